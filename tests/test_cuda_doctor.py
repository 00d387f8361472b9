from __future__ import annotations

import json

import pytest

from cuda_fakes import FakeDriver, device_info
from megamoe.cli.app import main
from megamoe.cuda import doctor
from megamoe.cuda.driver import PeerInfo
from megamoe.errors import EngineError


@pytest.fixture(autouse=True)
def _cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch had CUDA: what is asked here is what the driver's answers lead to."""
    monkeypatch.setattr(
        doctor, "_torch", lambda: {"version": "2.11", "cuda": "13.0", "available": True, "problem": None}
    )


def verdict(report: dict[str, object], what: str) -> str | None:
    runs = report["runs"]
    assert isinstance(runs, list)
    return next(entry["why_not"] for entry in runs if entry["what"] == what)


def test_one_hopper_gpu() -> None:
    report = doctor.examine(lambda: FakeDriver({}))
    assert verdict(report, "GPU engine, one GPU") is None
    assert verdict(report, "GPU engine, several GPUs") == "needs two or more GPUs; several ranks can share one"
    assert report["driver"]["cuda"] == "13.0"
    assert report["gpus"][0]["arch"] == "sm_90a"
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_two_gpus_with_and_without_a_link() -> None:
    two = [device_info(0), device_info(1)]
    report = doctor.examine(lambda: FakeDriver({}, devices=two))
    assert verdict(report, "GPU engine, several GPUs") is None
    assert [(p["source"], p["target"]) for p in report["peers"]] == [(0, 1), (1, 0)]
    apart = FakeDriver({}, devices=two, peers={(1, 0): PeerInfo(1, 0, False, False, 0)})
    report = doctor.examine(lambda: apart)
    assert verdict(report, "GPU engine, several GPUs") == "no direct access between GPUs 1->0"
    assert verdict(report, "GPU engine, one GPU") is None


def test_other_gpus_are_named() -> None:
    mixed = [device_info(0, (8, 0), "Old"), device_info(1, (10, 0), "New")]
    report = doctor.examine(lambda: FakeDriver({}, devices=mixed))
    assert verdict(report, "GPU engine, one GPU") == (
        "needs Hopper (sm_90a: H100, H200, H800, H20); found Old (sm_80), New (sm_100a)"
    )
    report = doctor.examine(lambda: FakeDriver({}, devices=[]))
    assert verdict(report, "GPU engine, one GPU") == "the driver sees no GPU"


def test_a_driver_that_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def old() -> FakeDriver:
        raise EngineError("driver", "CUDA 12.8", "CUDA 13 or newer (driver 580 or newer)", "Update the NVIDIA driver.")

    report = doctor.examine(old)
    said = "CUDA 12.8; needs CUDA 13 or newer (driver 580 or newer). Update the NVIDIA driver."
    assert report["driver"]["problem"] == said
    assert verdict(report, "GPU engine, one GPU") == said
    assert verdict(report, "compile the kernels") is None
    assert verdict(report, "CPU engine") is None


def test_a_compiler_that_is_missing_or_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.toolchain, "nvrtc_version", lambda: "13.77.1")
    report = doctor.examine(lambda: FakeDriver({}))
    assert "not among the tested versions" in report["nvrtc"]["note"]
    assert verdict(report, "GPU engine, one GPU") is None

    def missing() -> str:
        raise EngineError("nvrtc", "not loadable", "NVRTC 13", "pip install it")

    monkeypatch.setattr(doctor.toolchain, "nvrtc_version", missing)
    report = doctor.examine(lambda: FakeDriver({}))
    assert verdict(report, "compile the kernels") == "not loadable; needs NVRTC 13. pip install it"
    assert verdict(report, "GPU engine, one GPU") == verdict(report, "compile the kernels")


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = {"version": "2.13", "cuda": None, "available": False, "problem": "this build of torch has no CUDA"}
    monkeypatch.setattr(doctor, "_torch", lambda: blind)
    report = doctor.examine(lambda: FakeDriver({}))
    assert verdict(report, "GPU engine, one GPU") == "this build of torch has no CUDA"
    assert verdict(report, "CPU engine") is None


@pytest.mark.parametrize("devices", [[], [device_info(0), device_info(1)]], ids=["none", "two"])
def test_the_command(
    devices: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = doctor.examine(lambda: FakeDriver({}, devices=devices))  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda: report)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        main(["doctor", "--json"])
    assert not done.value.code
    assert json.loads(capsys.readouterr().out) == report
    with pytest.raises(SystemExit) as done:
        main(["doctor"])
    assert not done.value.code
    text = capsys.readouterr().out
    for entry in report["runs"] + report["integrations"]:
        assert entry["what"] in text
        assert (entry["why_not"] or "") in text
    for gpu in report["gpus"]:
        assert f"{gpu['name']} ({gpu['arch']})" in text
