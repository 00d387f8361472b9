"""Kernel layouts: each position against its index formula, exact inverses, in place with one expert extra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import WeightError
from megamoe.formats import layout

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16]


def numbered(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(
    el=st.integers(0, 3),
    runs=st.integers(1, 5),
    granularity=st.integers(1, 9),
    k=st.integers(1, 5),
    d=st.integers(0, 2),
)
def test_interleave(el: int, runs: int, granularity: int, k: int, d: int) -> None:
    w = numbered(el, 2 * runs * granularity, k, dtype=DTYPES[d])
    half = runs * granularity
    got = layout.interleave_gate_up(w, granularity)
    for run in range(runs):
        for r in range(granularity):
            base = 2 * run * granularity + r
            assert same(got[:, base], w[:, run * granularity + r])
            assert same(got[:, base + granularity], w[:, half + run * granularity + r])
    assert same(layout.deinterleave_gate_up(got, granularity), w)
    here = w.clone()
    assert layout.interleave_gate_up(here, granularity, out=here) is here
    assert same(here, got)
    assert layout.deinterleave_gate_up(here, granularity, out=here) is here
    assert same(here, w)


def test_interleave_by_eight_rows() -> None:
    rows = torch.arange(64, dtype=torch.uint8).view(1, 64, 1)
    got = layout.interleave_gate_up(rows)[0, :, 0].tolist()
    want = [*range(8), *range(32, 40), *range(8, 16), *range(40, 48), *range(16, 24), *range(48, 56)]
    assert got[:48] == want


@settings(max_examples=40, deadline=None)
@given(
    el=st.integers(0, 3),
    n=st.integers(1, 3),
    k=st.integers(1, 3),
    rows=st.sampled_from([1, 3, 8]),
    depth=st.sampled_from([1, 4, 5]),
    d=st.integers(0, 1),
)
def test_tiles(el: int, n: int, k: int, rows: int, depth: int, d: int) -> None:
    w = numbered(el, n * rows, k * depth, dtype=DTYPES[d])
    tiles = layout.tile_weights(w, rows, depth)
    assert tiles.is_contiguous()
    assert tiles.shape == (el, n, k, rows, depth)
    for i in range(n):
        for j in range(k):
            assert same(
                tiles[:, i, j].contiguous(),
                w[:, i * rows : (i + 1) * rows, j * depth : (j + 1) * depth].contiguous(),
            )
    assert same(layout.untile_weights(tiles), w)
    here = w.clone()
    in_place = layout.tile_weights(here, rows, depth, out=here.view(tiles.shape))
    assert in_place.data_ptr() == here.data_ptr()
    assert same(in_place, tiles)
    assert same(layout.untile_weights(in_place, out=here), w)


def test_default_tile_is_128_by_128() -> None:
    assert layout.tile_weights(numbered(2, 256, 384)).shape == (2, 2, 3, 128, 128)


def test_streaming_takes_strided_experts_and_a_given_output() -> None:
    base = numbered(4, 32, 12)
    w = base[::2, :, :8]
    out = torch.empty(2, 32, 8, dtype=torch.uint8)
    assert layout.interleave_gate_up(w, out=out) is out
    assert same(out, layout.interleave_gate_up(w.contiguous()))


@pytest.mark.parametrize("transform", ["interleave", "tile"])
def test_in_place_needs_one_expert_extra(transform: str) -> None:
    """Every allocation is counted; a whole copy would be eight experts."""
    from torch.profiler import ProfilerActivity, profile

    w = numbered(8, 256, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        if transform == "interleave":
            layout.interleave_gate_up(w, out=w)
        else:
            layout.tile_weights(w, out=w.view(8, 2, 2, 128, 128))
    live = peak = 0
    for event in prof.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 1.5 * 256 * 256


@pytest.mark.parametrize(
    "call",
    [
        lambda: layout.interleave_gate_up(torch.zeros(1, 24, 4)),
        lambda: layout.interleave_gate_up(torch.zeros(24, 4)),
        lambda: layout.tile_weights(torch.zeros(1, 128, 100, dtype=torch.uint8)),
        lambda: layout.tile_weights(torch.zeros(1, 128, 128)),
        lambda: layout.untile_weights(torch.zeros(1, 128, 128, dtype=torch.uint8)),
        lambda: layout.interleave_gate_up(torch.zeros(1, 16, 4), out=torch.zeros(1, 16, 5)),
        lambda: layout.interleave_gate_up(torch.zeros(1, 16, 4), out=torch.zeros(1, 16, 4, dtype=torch.float64)),
    ],
)
def test_refused(call: object) -> None:
    with pytest.raises(WeightError):
        call()  # type: ignore[operator]


def test_partial_overlap_refused() -> None:
    base = numbered(3, 16, 4)
    with pytest.raises(WeightError, match="overlaps"):
        layout.interleave_gate_up(base[:2], out=base[1:])
    before = base[0].clone()
    layout.interleave_gate_up(base[:1], out=base[1:2])  # disjoint parts of one storage are fine
    assert same(base[0], before)
