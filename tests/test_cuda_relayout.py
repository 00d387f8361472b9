"""The fused kernel's weight layout against its definition, element by element."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import ExpertWeights, MoESpec
from megamoe.cuda.relayout import KernelWeights, relayout
from megamoe.errors import EngineError
from megamoe.formats.layout import interleave_gate_up

SPEC = MoESpec(hidden=384, intermediate=256, experts=2, topk=1)


def weights(scale_dtype: torch.dtype = torch.float32) -> ExpertWeights:
    g = torch.Generator().manual_seed(0)
    h, i = SPEC.hidden, SPEC.intermediate

    def raw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def scale(*shape: int) -> torch.Tensor:
        return (2.0 ** torch.randint(-8, 8, shape, generator=g)).to(scale_dtype)

    return ExpertWeights(
        format="fp8_block",
        w13=raw(2, 2 * i, h),
        w2=raw(2, h, i),
        w13_scale=scale(2, 2 * i // 128, h // 128),
        w2_scale=scale(2, h // 128, i // 128),
    )


def lookup(tiles: torch.Tensor, row: int, column: int) -> int:
    """Byte of (row, column) of a matrix that lies in swizzled tiles."""
    r, c = row % 128, column % 128
    return int(tiles[row // 128, column // 128].flatten()[r * 128 + ((c // 16) ^ (r % 8)) * 16 + c % 16])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_every_element_lies_where_the_kernel_looks(scale_dtype):
    w, i = weights(scale_dtype), SPEC.intermediate
    out = KernelWeights.empty(SPEC, 2, "cpu")
    before = out.w13.data_ptr()
    relayout(SPEC, w, out)
    assert out.w13.data_ptr() == before
    g = torch.Generator().manual_seed(1)
    raw13, raw2 = w.w13.view(torch.uint8), w.w2.view(torch.uint8)
    for _ in range(400):
        e = int(torch.randint(0, 2, (1,), generator=g))
        row, column = (int(torch.randint(0, n, (1,), generator=g)) for n in (2 * i, SPEC.hidden))
        up, within = divmod(row, i)
        mixed = within // 8 * 16 + up * 8 + within % 8  # rows alternate: 8 of gate, 8 of up
        assert lookup(out.w13[e], mixed, column) == int(raw13[e, row, column])
        row, column = (int(torch.randint(0, n, (1,), generator=g)) for n in (SPEC.hidden, i))
        assert lookup(out.w2[e], row, column) == int(raw2[e, row, column])
    s13, s2 = w.w13_scale.float(), w.w2_scale.float()
    for tile in range(i // 128):
        want = torch.stack([s13[:, tile], s13[:, i // 128 + tile]] * 2, dim=-1)
        assert torch.equal(out.w13_scales[:, tile], want)
    assert torch.equal(out.w2_scales[:, 0], torch.stack([s2[:, 0], s2[:, 0], s2[:, 1], s2[:, 1]], dim=-1))
    assert torch.equal(out.w2_scales[:, 1, :, :2], torch.stack([s2[:, 2]] * 2, dim=-1))


def test_interleaved_rows_are_taken_as_they_are():
    w = weights()
    mixed = replace(w, w13=interleave_gate_up(w.w13.view(torch.uint8)).view(w.w13.dtype), gate_up="interleaved8")
    both = [KernelWeights.empty(SPEC, 2, "cpu") for _ in range(2)]
    relayout(SPEC, w, both[0])
    relayout(SPEC, mixed, both[1])
    for name in ("w13", "w13_scales"):
        assert torch.equal(getattr(both[0], name), getattr(both[1], name))


def test_other_formats_are_refused_with_the_way_out():
    bf16 = ExpertWeights(format="bf16", w13=torch.zeros(2, 512, 384).bfloat16(), w2=torch.zeros(2, 384, 256).bfloat16())
    with pytest.raises(EngineError, match="fp8_block"):
        relayout(SPEC, bf16, KernelWeights.empty(SPEC, 2, "cpu"))
