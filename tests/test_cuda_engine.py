"""Which engine is chosen, and why; the call's arguments as the staging kernel gets them. No GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_fakes import FakeDriver, device_info
from megamoe import MegaMoE, MoESpec, local_group
from megamoe.cuda import call_staging, hosting, staging
from megamoe.cuda.cache import Cache
from megamoe.cuda.driver import Driver, PeerInfo
from megamoe.cuda.hosting import refusal, why_not
from megamoe.cuda.sources import KERNELS
from megamoe.cuda.toolchain import compile_kernel
from megamoe.engine import Peer, Placement
from megamoe.errors import EngineError

SPEC = MoESpec(hidden=512, intermediate=256, experts=16, topk=4)


def place(ranks: int = 1, devices: tuple[int, ...] | None = None) -> Placement:
    return Placement(ranks=ranks, local=tuple(range(ranks)), devices=devices)


def processes(*peers: tuple[int, int]) -> Placement:
    """Rank 0 of a group of processes with these hosts and GPUs."""
    return Placement(ranks=len(peers), local=(0,), peers=tuple(Peer(host=h, gpu=g) for h, g in peers))


HOPPER = FakeDriver({}, devices=[device_info(0), device_info(1)])
APART = FakeDriver({}, devices=HOPPER.devices, peers={(0, 1): PeerInfo(0, 1, False, False, 0)})
AMPERE = FakeDriver({}, devices=[device_info(0, (8, 0), "Fake A100")])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("devices", [None, (0,)])
def test_a_hopper_gpu_hosts_all_ranks_of_a_process(ranks: int, devices: tuple[int, ...] | None) -> None:
    assert refusal(SPEC, place(ranks, devices=devices), 8192, HOPPER) is None


@pytest.mark.parametrize("placement", [place(2, (0, 1)), place(8, (1, 0)), processes((1, 7), (1, 8))])
def test_gpus_that_reach_each_other_host_a_group(placement: Placement) -> None:
    assert refusal(SPEC, placement, 8192, HOPPER) is None


@pytest.mark.parametrize(
    ("spec", "placement", "driver", "said"),
    [
        (SPEC, processes((1, 7), (2, 8)), HOPPER, "ranks on 2 hosts.*split path.*all-to-all"),
        (SPEC, processes((1, 7), (1, 7)), HOPPER, "ranks 0 and 1 on one GPU.*set_device.*local_group"),
        (SPEC, processes((1, 7), (1, 0)), HOPPER, "rank 1 without a GPU.*backend='cpu'"),
        (SPEC, place(2, devices=(0, 1)), APART, "GPUs 0 and 1, which do not reach each other.*NVLink"),
        (SPEC, place(4, devices=(0, 0)), HOPPER, r"devices: got \[0, 0\].*different GPUs"),
        (SPEC, place(4, devices=(0, 1, 0)), HOPPER, r"devices: got \[0, 1, 0\].*divide 4 rank"),
        (SPEC, place(1, devices=(5,)), HOPPER, r"devices: got \[5\].*0 to 1"),
        (SPEC, place(1, devices=()), HOPPER, r"devices: got \[\]"),
        (SPEC, place(), AMPERE, r"Fake A100 \(sm_80\).*sm_90a.*backend='cpu'"),
        (SPEC, place(16), HOPPER, "ranks: got 16; allowed: 1 to 8"),
        (MoESpec(hidden=96, intermediate=256, experts=16, topk=4), place(), HOPPER, "hidden=96.*multiples of 128"),
        (MoESpec(hidden=2**18, intermediate=256, experts=16, topk=4), place(), HOPPER, "shared memory"),
    ],
)
def test_what_the_gpu_engine_cannot_host_has_a_reason(
    spec: MoESpec, placement: Placement, driver: FakeDriver, said: str
) -> None:
    reason = refusal(spec, placement, 8192, driver)
    assert reason is not None
    with pytest.raises(EngineError, match=said):
        raise reason


def test_without_a_gpu_auto_takes_the_cpu_and_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = EngineError("device", "nothing", "a Hopper GPU", "Buy one.")
    monkeypatch.setattr(hosting, "why_not", lambda *_: reason)
    with caplog.at_level("INFO", "megamoe"), MegaMoE(SPEC) as layer:
        assert layer.engine == "cpu"
        assert layer.memory == {"weights": 0}
    assert "takes the CPU engine: device: got nothing" in caplog.text
    with pytest.raises(EngineError, match=r"backend: got cuda.*device: got nothing.*Pass backend='cpu'"):
        MegaMoE(SPEC, backend="cuda")
    with pytest.raises(EngineError, match=r"devices: got \[0\].*the GPU engine cannot run \(device: got nothing"):
        local_group(SPEC, ranks=2, devices=[0])
    MegaMoE(SPEC, backend="cpu").close()


@pytest.mark.parametrize(("argument", "level"), [("group", "WARNING"), ("device", "INFO")])
def test_a_gpu_that_stays_idle_because_of_the_group_is_a_warning(
    argument: str, level: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = EngineError(argument, "given", "allowed", "way out")
    monkeypatch.setattr("megamoe.engine.why_no_gpu", lambda *_: reason)
    with caplog.at_level("INFO", "megamoe"), MegaMoE(SPEC) as layer:
        assert layer.engine == "cpu"
    (record,) = [r for r in caplog.records if "takes the CPU engine" in r.message]
    assert record.levelname == level


def test_every_way_a_machine_can_lack_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> Driver:
        raise EngineError("libcuda", "not found", "driver 580", "Install it.")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch" in str(why_not(SPEC, place(), 8))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "libcuda: got not found" in str(why_not(SPEC, place(), 8, no_driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch.cuda" in str(why_not(SPEC, place(), 8, lambda: HOPPER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not(SPEC, place(), 8, lambda: HOPPER) is None


SIZES = {"stage": [64], "stage_call": [ctypes.sizeof(call_staging._CallArguments)]}
SIZES["copy_call"] = SIZES["stage_call"]


@pytest.fixture(scope="module")
def stager() -> tuple[FakeDriver, call_staging.CallStager]:
    driver = FakeDriver(SIZES)
    return driver, call_staging.CallStager(512, "float32", 0, driver=driver)


def arguments(driver: FakeDriver) -> call_staging._CallArguments:
    return call_staging._CallArguments.from_buffer_copy(driver.launches[-1].parameters[0])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    slots=st.integers(1, 8),
    wide=st.booleans(),
    quantised=st.booleans(),
    gap=st.sampled_from([0, 8, 16, 3]),
    start=st.sampled_from([0, 8, 1]),
    turned=st.booleans(),
    count=st.booleans(),
)
def test_any_strides_reach_the_kernel(
    stager: tuple[FakeDriver, call_staging.CallStager],
    tokens: int,
    slots: int,
    wide: bool,
    quantised: bool,
    gap: int,
    start: int,
    turned: bool,
    count: bool,
) -> None:
    """The addresses and strides of the launch lead to the very elements that were passed."""
    driver, stage = stager
    kind = torch.uint8 if quantised else torch.bfloat16
    flat = (torch.arange(start + tokens * (512 + gap)) % 251).to(kind)
    x = flat.as_strided((tokens, 512), (512 + gap, 1), start)
    ids = torch.arange(tokens * slots, dtype=torch.int64 if wide else torch.int32).view(tokens, slots)
    weights = torch.arange(tokens * slots).float().view(tokens, slots)
    scales = torch.arange(tokens * 4).float().view(tokens, 4) if quantised else None
    if turned:
        ids, weights = ids.T.contiguous().T, weights.T.contiguous().T
        scales = None if scales is None else scales.T.contiguous().T
    number = torch.tensor([3], dtype=torch.int32)
    target = call_staging.Target(q=16, s=32, ids=48, weights=64)
    stage(x, scales, ids, weights, number.data_ptr() if count else 0, target, 5)
    launch, a = driver.launches[-1], arguments(driver)
    assert launch.kernel == ("copy_call" if quantised else "stage_call")
    assert launch.stream == 5
    assert (a.q, a.s, a.staged_ids, a.staged_weights) == (16, 32, 48, 64)
    assert a.num_tokens == (number.data_ptr() if count else 0)
    assert (a.tokens, a.slots, a.wide_ids) == (tokens, slots, int(wide))
    size = x.element_size()
    assert a.x % (8 * size) == 0
    assert tokens == 1 or a.x_stride % (8 * size) == 0
    if x.data_ptr() % (8 * size) == 0 and (tokens == 1 or gap % 8 == 0):
        assert a.x == x.data_ptr()  # as they lie, no copy
        assert tokens == 1 or a.x_stride == x.stride(0) * size
    for address, row, column, tensor in (
        (a.ids, a.ids_stride, a.ids_column, ids),
        (a.weights, a.weights_stride, a.weights_column, weights),
        *(((a.scales, a.scales_stride, a.scales_column, scales),) if scales is not None else ()),
    ):
        for i in range(tokens):
            for j in range(tensor.shape[1]):
                assert address + i * row + j * column == tensor[i, j].data_ptr()
    groups, threads = tokens * 4, launch.config.threads
    assert a.row_blocks * (threads // 16) * 4 >= groups
    assert (launch.grid - a.row_blocks) * threads >= tokens * slots


def test_no_rows_launch_nothing(stager: tuple[FakeDriver, call_staging.CallStager]) -> None:
    driver, stage = stager
    before = len(driver.launches)
    target = call_staging.Target(16, 32, 48, 64)
    stage(torch.zeros(0, 512).bfloat16(), None, torch.zeros(0, 2).int(), torch.zeros(0, 2), 0, target, 5)
    assert len(driver.launches) == before


def test_host_and_device_agree_on_a_calls_arguments(tmp_path: Path) -> None:
    checks = []
    for name, kind in call_staging._CallArguments._fields_:
        at = getattr(call_staging._CallArguments, name).offset
        # __INTADDR__ is offsetof in the front end that NVRTC uses.
        checks.append(f'static_assert(__INTADDR__(&(((CallArguments*)0)->{name})) == {at}, "{name}");')
        checks.append(f'static_assert(sizeof(CallArguments::{name}) == {ctypes.sizeof(kind)}, "{name}");')
    checks.append(f'static_assert(sizeof(CallArguments) == {ctypes.sizeof(call_staging._CallArguments)}, "size");')
    path = tmp_path / "layout.cu"
    path.write_text(f'#include "{KERNELS / "staging.cu"}"\n' + "\n".join(checks))
    compile_kernel(path, staging.job(512, "float32", staging.PLANS[0]).config, cache=Cache(None))
