"""Limits of a layer and of its weights: each refused with the argument, the value, what is allowed and the way out."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from setuptools import find_packages

from megamoe import ExpertWeights, MoESpec, local_group
from megamoe.errors import FormatError, InputError, MegaMoEError, SpecError, WeightError
from moe_cases import SPEC, make_weights

FIELDS: dict[str, Any] = {"hidden": 256, "intermediate": 128, "experts": 8, "topk": 3}
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden: got 0; allowed: an integer from 1"),
        ({"hidden": "256"}, "hidden: got '256'; allowed: an integer"),
        ({"intermediate": True}, "intermediate: got True"),
        ({"experts": 65537}, "experts: got 65537; allowed: an integer from 1 to 65536"),
        ({"topk": 33, "experts": 64}, "topk: got 33; allowed: an integer from 1 to 32"),
        ({"topk": 9}, "topk: got 9; allowed: at most experts = 8"),
        ({"clamp": 0.0}, "clamp: got 0.0; allowed: None or a finite number above 0"),
        ({"clamp": float("nan")}, "clamp: got nan"),
        ({"clamp": float("inf")}, "clamp: got inf"),
        ({"clamp": "7"}, "clamp: got '7'"),
        ({"input_scales": "e8m0"}, "input_scales: got e8m0; allowed: 'float32' or 'ue8m0'"),
    ],
)
def test_a_spec_that_cannot_exist(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        MoESpec(**{**FIELDS, **change})
    assert caught.value.way_out


def test_limits_themselves_are_allowed() -> None:
    spec = MoESpec(hidden=1, intermediate=1, experts=65536, topk=32, clamp=7)
    assert spec.clamp == 7.0
    assert spec.local_experts(65536) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.hidden = 2  # type: ignore[misc]


@pytest.mark.parametrize(("ranks", "message"), [(3, r"experts: got 8.*\(3\).*\[1, 2, 4, 8\]"), (0, "ranks: got 0")])
def test_experts_that_ranks_do_not_divide(ranks: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SPEC.local_experts(ranks)


def test_a_format_that_cannot_hold_the_layer_names_one_that_can() -> None:
    spec = MoESpec(hidden=2880, intermediate=2944, experts=8, topk=3)
    for weight_format in ("fp8_block", "mxfp4"):
        with pytest.raises(FormatError, match=r"hidden: got 2880.*multiple of 128.*intermediate=2944: bf16"):
            spec.check_format(weight_format)  # type: ignore[arg-type]
    spec.check_format("bf16")
    with pytest.raises(FormatError, match="weight_format: got int4; allowed: fp8_block, mxfp4, bf16"):
        spec.check_format("int4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"w13": None}, "w13: got NoneType; allowed: a tensor of three dimensions"),
        (lambda w: {"w2": torch.tensor(1.0)}, r"w2: got shape \[\]"),
        (lambda w: {"w13_scale": 3}, "w13_scale: got int"),
        (lambda w: {"w2_scale": None}, r"w2_scale: got None; allowed: torch.float32 or .*\[8, 2, 1\]"),
        (lambda w: {"w13": w.w13.float()}, "w13: got torch.float32; allowed: torch.float8_e4m3fn"),
        (lambda w: {"w13": w.w13[:, :, :128].contiguous()}, r"w13: got shape \[8, 256, 128\]"),
        (lambda w: {"w2": w.w2.transpose(1, 2).contiguous().transpose(1, 2)}, "w2: got strides"),
        (lambda w: {"w2_scale": w.w2_scale.double()}, "w2_scale: got torch.float64"),
        (lambda w: {"w2": w.w2.to("meta")}, "w2: got device meta; allowed: cpu, like w13"),
        (lambda w: {"gate_up": "interleaved16"}, "gate_up: got interleaved16"),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[ExpertWeights], dict[str, Any]], message: str) -> None:
    good = make_weights(SPEC, "fp8_block")
    good.check(SPEC, 8)
    with pytest.raises(WeightError, match=message) as caught:
        dataclasses.replace(good, **change(good)).check(SPEC, 8)
    assert caught.value.way_out


def test_scales_of_a_format_without_scales() -> None:
    scale = make_weights(SPEC, "fp8_block").w13_scale
    with pytest.raises(WeightError, match="w13_scale: got a tensor; allowed: None for bf16"):
        dataclasses.replace(make_weights(SPEC, "bf16"), w13_scale=scale).check(SPEC, 8)


@pytest.mark.parametrize("devices", [0, "cuda", [], [True], [-1], [0.0]])
def test_devices_that_are_no_list_of_numbers(devices: Any) -> None:
    with pytest.raises(InputError, match=r"devices: got .*allowed: a list of CUDA device numbers"):
        local_group(SPEC, ranks=2, devices=devices)


def test_errors_survive_a_process_boundary() -> None:
    error = InputError("x", "3 tokens", "at most 2", "Split the batch.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.way_out) == (InputError, str(error), "Split the batch.")
    assert isinstance(copy, MegaMoEError)


def test_every_file_of_the_package_is_installed() -> None:
    """What is not Python must be declared in pyproject.toml, or a wheel lacks it."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["megamoe"]
    package = ROOT / "src" / "megamoe"
    declared = {path for glob in globs for path in package.glob(glob)}
    here = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert here - declared == set()
    directories = {p.parent for p in package.rglob("*.py") if "__pycache__" not in p.parts}
    found = {package.parent.joinpath(*name.split(".")) for name in find_packages(str(package.parent))}
    assert directories - found == set()
