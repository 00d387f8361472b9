"""MXFP4: the OCP tables over all bytes, exact conversion to FP8 blocks, and every way it can fail to be exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megamoe.errors import FormatError, WeightError
from megamoe.formats import fp8_block, mxfp4, ue8m0

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX v1.0, table for E2M1, positive half


def e2m1(code: int) -> float:
    """From the fields: sign, exponent (bias 1), mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def test_value_table() -> None:
    assert [e2m1(c) for c in range(16)] == list(mxfp4.E2M1_VALUES)
    assert list(mxfp4.E2M1_VALUES[:8]) == E2M1
    assert math.copysign(1, mxfp4.E2M1_VALUES[8]) == -1


def test_every_byte_unpacks_low_nibble_first_and_packs_back() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    codes = mxfp4.unpack(byte.unsqueeze(-1))
    assert codes.tolist() == [[b & 15, b >> 4] for b in range(256)]
    assert torch.equal(mxfp4.pack(codes).squeeze(-1), byte)
    for dtype in (torch.int8, torch.float4_e2m1fn_x2):  # the dtypes of checkpoints and of torch itself
        assert torch.equal(mxfp4.unpack(byte.unsqueeze(-1).view(dtype)), codes)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_dequantize_every_byte_and_scale(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (4, 64), dtype=torch.uint8, generator=g)
    scale = torch.randint(0, 252, (4, 4), dtype=torch.uint8, generator=g)
    got = mxfp4.dequantize(packed, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(got, mxfp4.dequantize(packed, scale))
    for r in range(4):
        for k in range(128):
            byte = int(packed[r, k // 2])
            want = e2m1(byte >> 4 if k % 2 else byte & 15) * 2.0 ** (int(scale[r, k // 32]) - 127)
            assert got[r, k].item() == want
    assert torch.equal(mxfp4.dequantize(packed, scale, torch.bfloat16).float(), got)


def test_dequantize_all_256_bytes_at_scale_one() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256)
    got = mxfp4.dequantize(packed, torch.full((1, 16), 127, dtype=torch.uint8))
    assert got.view(256, 2).tolist() == [[e2m1(b & 15), e2m1(b >> 4)] for b in range(256)]
    assert bool(mxfp4.dequantize(packed, torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 40), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
@example(seed=1_576_303_200, spread=34, dtype=torch.bfloat16)
def test_quantize_is_nearest_with_the_ocp_scale(seed: int, spread: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    exponent = (torch.randn(3, 64, generator=g) * spread).clamp(-130, 120)  # subnormals too, no infinities
    w = (torch.randn(3, 64, generator=g) * torch.exp2(exponent)).to(dtype)
    w[1] = 0
    w[2, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -7.9])
    w[2, 8:32] = 0
    packed, scale = mxfp4.quantize(w)
    values = w.double().numpy().reshape(3, 2, 32)
    codes = mxfp4.unpack(packed).numpy().reshape(3, 2, 32)
    table = np.array(E2M1)
    for r in range(3):
        for group in range(2):
            amax = np.abs(values[r, group]).max()
            e = max(-127, math.frexp(amax)[1] - 1 - 2) if amax > 0 else 0
            assert int(scale.view(torch.uint8)[r, group]) == e + 127
            y = np.abs(values[r, group]) / 2.0**e
            distance = np.abs(np.minimum(y, 6.0)[:, None] - table)
            chosen = distance[np.arange(32), codes[r, group] & 7]
            np.testing.assert_array_equal(chosen, distance.min(1))
            tie = (distance == distance.min(1, keepdims=True)).sum(1) == 2
            assert not (codes[r, group][tie] & 1).any()
            np.testing.assert_array_equal((codes[r, group] >> 3).astype(bool), np.signbit(values[r, group]))


def test_quantize_gives_back_what_it_can_hold() -> None:
    packed = torch.randint(0, 256, (8, 64), dtype=torch.uint8)
    packed[:, ::16] = 0x77  # a 6 in every group fixes its scale
    scale = torch.randint(100, 150, (8, 4), dtype=torch.uint8)
    again, again_scale = mxfp4.quantize(mxfp4.dequantize(packed, scale))
    assert torch.equal(again, packed)
    assert torch.equal(again_scale.view(torch.uint8), scale)


def random_weights(seed: int, shape: tuple[int, ...], low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, high + 1, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=g)
    return packed, scale


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), low=st.integers(0, 240))
def test_conversion_is_exact(scale_format: str, seed: int, low: int) -> None:
    packed, scale = random_weights(seed, (2, 128, 256), low, low + 14)
    q, s = mxfp4.to_fp8_block(packed, scale, scale_format)
    assert q.dtype == torch.float8_e4m3fn
    assert s.dtype == (torch.float32 if scale_format == "float32" else torch.float8_e8m0fnu)
    assert s.shape == (2, 1, 2)
    exact = mxfp4.dequantize(packed, scale).double()
    assert torch.equal(fp8_block.dequantize_weights(q, s).double(), exact)
    zeros = exact == 0
    assert torch.equal(q.view(torch.uint8)[zeros] >> 7, torch.signbit(exact[zeros]).to(torch.uint8))
    assert len(mxfp4.inexact_groups(packed, scale)) == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), low=st.integers(0, 218), spread=st.integers(12, 34))  # 6 * 2^125: float32 holds it
def test_inexact_exactly_where_no_common_scale_exists(seed: int, low: int, spread: int) -> None:
    """Brute force: with the smallest scale that holds the largest value, which groups are not e4m3 multiples of it."""
    packed, scale = random_weights(seed, (128, 256), low, low + 2)
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 128, (3,), generator=g)
    scale[rows, 1] = low + spread
    packed[5, 64:] = 0
    scale[5, 4:] = 0  # zeros do not count, whatever their scale
    want = torch.zeros(scale.shape, dtype=torch.bool)
    dense = mxfp4.dequantize(packed, scale).double()
    for j in range(2):
        block = dense[:, j * 128 : j * 128 + 128]
        top = float(block.abs().max())
        e = max(-126, math.ceil(math.log2(top / 448)))
        y = block / 2.0**e
        ok = y.float().to(torch.float8_e4m3fn).double() == y
        want[:, j * 4 : j * 4 + 4] = ~ok.view(128, 4, 32).all(-1)
    got = mxfp4.inexact_groups(packed, scale)
    assert torch.equal(got, want.nonzero())
    if want.any():
        row, group = want.nonzero()[0].tolist()
        with pytest.raises(FormatError, match=rf"\[row, group\] = \[{row}, {group}\]") as raised:
            mxfp4.to_fp8_block(packed, scale)
        assert f"in {int(want.sum())} groups" in str(raised.value)
    else:
        q, s = mxfp4.to_fp8_block(packed, scale)
        assert torch.equal(fp8_block.dequantize_weights(q, s).double(), dense)


def test_seventeen_binary_places_fit_and_eighteen_do_not() -> None:
    packed = torch.zeros(128, 64, dtype=torch.uint8)
    scale = torch.full((128, 4), 127, dtype=torch.uint8)
    packed[0, 0] = 7  # 6 = 1.5 * 2^2
    packed[3, 20] = 1  # 0.5, group 1
    scale[3, 1] = 127 - 14  # smallest set bit 2^-15: 17 places below 2^2
    q, s = mxfp4.to_fp8_block(packed, scale)
    assert torch.equal(fp8_block.dequantize_weights(q, s), mxfp4.dequantize(packed, scale))
    scale[3, 1] -= 1
    with pytest.raises(FormatError, match=r"first at \[row, group\] = \[3, 1\]"):
        mxfp4.to_fp8_block(packed, scale)
    assert mxfp4.inexact_groups(packed, scale).tolist() == [[3, 1]]
    with pytest.raises(FormatError, match=r"\[expert, row, group\] = \[1, 3, 1\]"):
        mxfp4.to_fp8_block(torch.stack([packed * 0, packed]), torch.stack([scale, scale]))


@pytest.mark.parametrize("code", range(1, 8))
def test_every_code_at_every_distance_from_the_largest(code: int) -> None:
    """A group that holds only one code may be exact where a group of all codes is not (4 * 2^-11 is e4m3's 2^-9)."""
    for top in range(1, 8):
        for distance in range(30):
            packed = torch.zeros(128, 64, dtype=torch.uint8)
            scale = torch.full((128, 4), 127, dtype=torch.uint8)
            packed[0, 0] = top
            packed[9, 17] = code << 4
            scale[9, 1] = 127 - distance
            small, large = e2m1(code) * 2.0**-distance, e2m1(top)
            unit = 2.0 ** (math.frexp(max(small, large))[1] - 1 - 17)  # smallest bit beside the largest value
            if small / unit == int(small / unit):
                q, s = mxfp4.to_fp8_block(packed, scale)
                assert torch.equal(fp8_block.dequantize_weights(q, s), mxfp4.dequantize(packed, scale))
            else:
                assert mxfp4.inexact_groups(packed, scale).tolist() == [[9, 1]]


def test_block_of_zeros_and_ends_of_the_scale_range() -> None:
    packed = torch.zeros(128, 64, dtype=torch.uint8)
    scale = torch.full((128, 4), 200, dtype=torch.uint8)
    assert mxfp4.to_fp8_block(packed, scale)[1].item() == 1.0
    for byte in (0, 5, 250):
        packed, scale = random_weights(byte, (128, 128), byte, byte)
        q, s = mxfp4.to_fp8_block(packed, scale)
        assert s.item() >= 2.0**-126
        assert torch.equal(fp8_block.dequantize_weights(q, s).double(), mxfp4.dequantize(packed, scale).double())


def test_damaged_and_misshapen_input_refused() -> None:
    packed, scale = random_weights(0, (128, 128), 120, 125)
    bad = scale.clone()
    bad[7, 2] = 255
    with pytest.raises(WeightError, match=r"\[7, 2\]"):
        mxfp4.to_fp8_block(packed, bad)
    with pytest.raises(FormatError, match="scale"):
        mxfp4.dequantize(packed, scale[:, :3])
    with pytest.raises(FormatError, match="multiples of 128"):
        mxfp4.to_fp8_block(packed[:64], scale[:64])
    with pytest.raises(FormatError, match="packed"):
        mxfp4.unpack(packed.float())
    with pytest.raises(FormatError, match="scale"):
        mxfp4.dequantize(packed, ue8m0.decode(scale))
    with pytest.raises(FormatError, match="codes"):
        mxfp4.pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FormatError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(4, 40))
    with pytest.raises(WeightError, match=r"group \[1, 1\]"):
        mxfp4.quantize(torch.tensor([[0.0] * 64, [0.0] * 40 + [math.inf] * 24]))
