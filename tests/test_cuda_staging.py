"""The host side of staging over a fake driver that runs the codec on the addresses and strides it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_fakes import FakeDriver, device_info, run_staging
from megamoe.cuda import staging
from megamoe.cuda.cache import Cache
from megamoe.cuda.sources import KERNELS
from megamoe.cuda.staging import PLANS, Stager, StagingPlan, select_plan
from megamoe.cuda.toolchain import compile_kernel
from megamoe.errors import EngineError, InputError
from megamoe.formats.fp8_block import quantize_activations

H = 256


@pytest.fixture(scope="module", autouse=True)
def _stream_zero() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "raw_stream", lambda stream, ordinal: 7 if stream is None else stream)
        yield


@pytest.fixture(scope="module")
def gpu() -> tuple[FakeDriver, Stager]:
    driver = FakeDriver({"stage": [64]}, run=run_staging("float32", H))
    return driver, Stager(H, driver=driver)


def outputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.full((rows, H), 0xA5, dtype=torch.uint8)
    return q, torch.full((rows, H // 128), -1.0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_rows_any_strides_any_count(gpu: tuple[FakeDriver, Stager], data: st.DataObject) -> None:
    driver, stager = gpu
    rows = data.draw(st.integers(0, 9))
    seed = data.draw(st.integers(0, 2**31))
    wide = torch.randn(rows + 1, H + 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x = wide[:rows, 8 * data.draw(st.integers(0, 8)) :][:, :H]
    q_all = torch.full((rows + 2, H + 16), 0xA5, dtype=torch.uint8)
    s_all = torch.full((rows + 2, H // 128 + 3), -1.0)
    q, s = q_all[1 : rows + 1, 8 : 8 + H], s_all[1 : rows + 1, 2 : 2 + H // 128]
    count = data.draw(st.none() | st.integers(-3, 12))
    given_count = None if count is None else torch.tensor(count, dtype=torch.int32)
    plan = data.draw(st.sampled_from([None, *PLANS]))
    before = len(driver.launches)
    stager(x, q, s, num_tokens=given_count, plan=plan)
    written = rows if count is None else min(max(count, 0), rows)
    want_q, want_s = torch.full_like(q_all, 0xA5), torch.full_like(s_all, -1.0)
    codes, scales = quantize_activations(x)
    want_q[1 : 1 + written, 8 : 8 + H] = codes.view(torch.uint8)[:written]
    want_s[1 : 1 + written, 2 : 2 + H // 128] = scales[:written]
    assert torch.equal(q_all, want_q)
    assert torch.equal(s_all, want_s)
    assert len(driver.launches) - before == (rows > 0)
    if rows:
        launch = driver.launches[-1]
        assert launch.stream == 7
        assert launch.config.threads * launch.grid * PLANS[-1].groups // 16 >= rows * (H // 128)


BAD: list[tuple[str, Callable[..., dict[str, torch.Tensor]], str]] = [
    ("float32 rows", lambda x, q, s: {"x": x.float()}, "x: got torch.float32"),
    ("float16 rows", lambda x, q, s: {"x": x.half()}, r"x: got torch.float16.*bfloat16\(\)"),
    ("other width", lambda x, q, s: {"x": x[:, :128]}, r"x: got shape \[5, 128\]; allowed: \[M, 256\]"),
    ("one row as a vector", lambda x, q, s: {"x": x[0]}, "x: got shape"),
    ("columns apart", lambda x, q, s: {"x": torch.zeros(5, 2 * H).bfloat16()[:, ::2]}, "x: got strides"),
    ("rows not 16 bytes apart", lambda x, q, s: {"x": torch.zeros(5, H + 4).bfloat16()[:, :H]}, "8 elements apart"),
    ("unaligned start", lambda x, q, s: {"x": torch.zeros(5 * H + 1).bfloat16()[1:].view(5, H)}, "16-byte aligned"),
    ("signed codes", lambda x, q, s: {"q": q.view(torch.int8)}, "q: got torch.int8"),
    ("fewer rows of q", lambda x, q, s: {"q": q[:4]}, r"q: got shape \[4, 256\]"),
    ("q rows overlap", lambda x, q, s: {"q": q.expand(5, H) if False else q[:1].expand(5, H)}, "q: got row stride 0"),
    ("q unaligned", lambda x, q, s: {"q": torch.zeros(5 * H + 4, dtype=torch.uint8)[4:].view(5, H)}, "8-byte aligned"),
    ("double scales", lambda x, q, s: {"s": s.double()}, "s: got torch.float64"),
    ("transposed scales", lambda x, q, s: {"s": torch.zeros(2, 5).t()}, "s: got strides"),
    ("q is x", lambda x, q, s: {"q": x.view(torch.uint8)[:, :H]}, "q: got memory that overlaps x"),
    ("s is x", lambda x, q, s: {"s": x.view(torch.float32)[:, -2:]}, "s: got memory that overlaps x"),
    ("long count", lambda x, q, s: {"num_tokens": torch.tensor(3)}, "num_tokens: got torch.int64"),
    ("two counts", lambda x, q, s: {"num_tokens": torch.zeros(2, dtype=torch.int32)}, "num_tokens: got"),
    ("elsewhere", lambda x, q, s: {"q": q.to("meta")}, "q: got device meta"),
]


@pytest.mark.parametrize(("change", "said"), [(c, m) for _, c, m in BAD], ids=[n for n, _, _ in BAD])
def test_bad_input_is_refused_and_the_stager_stays_usable(
    gpu: tuple[FakeDriver, Stager], change: Callable[..., dict[str, torch.Tensor]], said: str
) -> None:
    driver, stager = gpu
    x = torch.randn(5, H).bfloat16()
    q, s = outputs(5)
    good = {"x": x, "q": q, "s": s}
    before = len(driver.launches)
    with pytest.raises(InputError, match=said):
        stager(**{**good, **change(x, q, s)})
    assert len(driver.launches) == before
    assert bool((q == 0xA5).all())
    stager(**good)
    assert torch.equal(q, quantize_activations(x)[0].view(torch.uint8))


def test_e4m3_outputs_and_one_row_of_any_stride(gpu: tuple[FakeDriver, Stager]) -> None:
    _, stager = gpu
    x = torch.randn(3, H + 4).bfloat16()[:1, :H]  # one row: the distance to the next does not matter
    q, s = torch.zeros(1, H, dtype=torch.float8_e4m3fn), torch.zeros(1, H // 128)
    stager(x, q, s)
    assert torch.equal(q.view(torch.uint8), quantize_activations(x)[0].view(torch.uint8))


def test_widths_formats_and_gpus_that_cannot_be(gpu: tuple[FakeDriver, Stager]) -> None:
    driver, stager = gpu
    for width in (2880, 0, -128, 64):
        with pytest.raises(InputError, match="multiple of 128"):
            Stager(width, driver=driver)
    with pytest.raises(InputError, match="'float32' or 'ue8m0'"):
        Stager(H, "e8m0", driver=driver)  # type: ignore[arg-type]
    old = FakeDriver({"stage": [64]}, devices=[device_info(capability=(8, 0), name="A100")])
    with pytest.raises(EngineError, match=r"A100 \(sm_80\)"):
        Stager(H, driver=old)
    with pytest.raises(InputError, match="g9t256"):
        stager(torch.zeros(1, H).bfloat16(), *outputs(1), plan=StagingPlan(9))
    with pytest.raises(InputError, match="on a CUDA device"):
        staging.stage(torch.zeros(1, H).bfloat16(), *outputs(1))


def test_both_architectures_get_their_own_code() -> None:
    driver = FakeDriver({"stage": [64]}, devices=[device_info(capability=(10, 0))])
    Stager(H, "ue8m0", driver=driver, plans=PLANS[:1])
    job = staging.job(H, "ue8m0", PLANS[0], "sm_100a")
    assert list(driver.loaded.values()) == [compile_kernel(job.source, job.config, "sm_100a").cubin]


@given(st.integers(1, 20000), st.sampled_from(staging.HIDDEN_SIZES), st.integers(1, 200))
def test_a_plan_covers_all_groups_and_only_grows(rows: int, hidden: int, sms: int) -> None:
    plan = select_plan(rows, hidden, sms)
    groups = rows * hidden // 128
    per_block = plan.groups * plan.threads // 16
    assert (plan.blocks(groups) - 1) * per_block < groups <= plan.blocks(groups) * per_block
    more = select_plan(rows + 1, hidden, sms)
    assert more.groups >= plan.groups


def test_plans_are_ordered() -> None:
    assert all(a.groups < b.groups for a, b in pairwise(PLANS))


def test_host_and_device_agree_on_the_arguments(tmp_path: Path) -> None:
    checks = []
    for name, kind in staging._Arguments._fields_:
        at = getattr(staging._Arguments, name).offset
        # __INTADDR__ is offsetof in the front end that NVRTC uses.
        checks.append(f'static_assert(__INTADDR__(&(((StagingArguments*)0)->{name})) == {at}, "{name}");')
        checks.append(f'static_assert(sizeof(StagingArguments::{name}) == {ctypes.sizeof(kind)}, "{name}");')
    checks.append(f'static_assert(sizeof(StagingArguments) == {ctypes.sizeof(staging._Arguments)}, "size");')
    path = tmp_path / "layout.cu"
    path.write_text(f'#include "{KERNELS / "staging.cu"}"\n' + "\n".join(checks))
    compile_kernel(path, staging.job(H, "float32", PLANS[0]).config, cache=Cache(None))
