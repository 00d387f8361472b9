"""FP8 block codec: against the formulas computed one element at a time with numpy, and at every special value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.errors import FormatError, WeightError
from megamoe.formats import fp8_block, ue8m0


def e4m3_table() -> np.ndarray:
    """Values of all 256 bytes from the OCP FP8 definition: 4 exponent bits, bias 7, 3 mantissa bits."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(byte & 0x80, -value, value)
    value[[0x7F, 0xFF]] = np.nan
    return value


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes by search in the table: nearest, ties to the even byte, saturating; NaN gives 0x7F."""
    positive = e4m3_table()[:0x7F]
    magnitude = np.abs(x.astype(np.float64)).reshape(-1, 1)
    distance = np.abs(np.minimum(magnitude, 448.0) - positive)
    best = distance.argmin(1)
    tie = (best + 1 < 0x7F) & (distance[np.arange(len(best)), np.minimum(best + 1, 0x7E)] == distance.min(1))
    best = np.where(tie & (best % 2 == 1), best + 1, best)
    out = best | np.where(np.signbit(x).reshape(-1), 0x80, 0)
    return np.where(np.isnan(x).reshape(-1), 0x7F, out).astype(np.uint8).reshape(x.shape)


def quantize_by_hand(x: torch.Tensor, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """The contract, in numpy float32 (IEEE division), group by group."""
    values = x.float().numpy()
    rows, columns = values.shape
    q = np.empty((rows, columns), np.uint8)
    s = np.empty((rows, columns // 128), np.float32)
    with np.errstate(all="ignore"):
        for row in range(rows):
            for group in range(columns // 128):
                part = values[row, group * 128 : group * 128 + 128]
                amax = np.maximum(np.abs(part).max(), np.float32(1e-10))  # numpy's max propagates NaN
                scale = np.float32(amax / np.float32(448))
                multiplier = np.float32(np.float32(448) / amax)
                if scale_format == "ue8m0" and np.isfinite(scale):
                    m, e = np.frexp(scale)  # scale = m * 2^e, m in [0.5, 1)
                    scale = np.float32(2.0 ** (e - 1 if m == 0.5 else e))
                    multiplier = np.float32(1) / scale
                s[row, group] = scale
                q[row, group * 128 : group * 128 + 128] = nearest_e4m3(part * multiplier)
    return q, s


def assert_same(x: torch.Tensor, scale_format: str) -> None:
    q, s = fp8_block.quantize_activations(x, scale_format)
    want_q, want_s = quantize_by_hand(x, scale_format)
    np.testing.assert_array_equal(s.numpy(), want_s)
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), want_q)
    assert q.dtype == torch.float8_e4m3fn
    assert s.dtype == torch.float32
    assert q.is_contiguous()
    assert s.is_contiguous()


def test_every_byte_is_its_own_nearest_value() -> None:
    table = torch.from_numpy(e4m3_table()).float()
    got = fp8_block.to_e4m3(table).view(torch.uint8)
    want = torch.arange(256, dtype=torch.uint8)
    want[0xFF] = 0x7F
    assert torch.equal(got, want)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(every.nan_to_num(1e9), table.nan_to_num(1e9))


def test_to_e4m3_rounds_ties_to_even_and_saturates() -> None:
    positive = torch.from_numpy(e4m3_table()[:0x7F])
    middle = ((positive[1:] + positive[:-1]) / 2).float()
    around = torch.cat([middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    special = torch.tensor([448.0, 449, 464, 465, 480, 1e30, torch.inf, torch.nan, 0.0])
    x = torch.cat([around, -around, special, -special])
    np.testing.assert_array_equal(fp8_block.to_e4m3(x).view(torch.uint8).numpy(), nearest_e4m3(x.numpy()))


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 30), zeros=st.booleans())
def test_activations_follow_the_contract(
    dtype: torch.dtype, scale_format: str, seed: int, spread: int, zeros: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 256, generator=g) * torch.exp2(torch.randn(3, 256, generator=g) * spread)
    if zeros:
        x[1] = 0
        x[0, ::2] = -0.0
    assert_same(x.to(dtype), scale_format)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_special_values_stay_in_their_group(scale_format: str) -> None:
    x = torch.randn(8, 384)
    x[1, 130] = torch.nan
    x[2, 131] = torch.inf
    x[3, 132] = -torch.inf
    x[4, 133], x[4, 134] = torch.inf, torch.nan
    x[5] = 0
    x[6] = torch.finfo(torch.float32).max
    x[7] = 1e-45
    assert_same(x, scale_format)
    q, s = fp8_block.quantize_activations(x, scale_format)
    byte = q.view(torch.uint8)
    assert bool((byte[1, 128:256] == 0x7F).all())
    assert s[1].isnan().tolist() == [False, True, False]
    assert s[2, 1] == torch.inf
    assert byte[2, 131] == 0x7F
    assert set(byte[2, 128:256].tolist()) == {0x00, 0x80, 0x7F}


def test_ue8m0_scale_at_the_edges_of_a_power_of_two() -> None:
    edges = 448 * torch.exp2(torch.arange(-20, 20).float())
    amax = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(1e30))])
    x = torch.zeros(len(amax), 128)
    x[:, 7] = amax
    assert_same(x, "ue8m0")
    _, s = fp8_block.quantize_activations(x, "ue8m0")
    assert torch.equal(s[:40, 0], torch.exp2(torch.arange(-20, 20).float()))


def test_rows_may_be_strided_and_few() -> None:
    base = torch.randn(6, 1024)
    x = base[::2, 128:640]
    q, s = fp8_block.quantize_activations(x)
    want_q, want_s = fp8_block.quantize_activations(x.contiguous())
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(s, want_s)
    t = torch.randn(256, 5).t()
    assert torch.equal(fp8_block.quantize_activations(t)[1], fp8_block.quantize_activations(t.contiguous())[1])
    q, s = fp8_block.quantize_activations(torch.empty(0, 256))
    assert q.shape == (0, 256)
    assert s.shape == (0, 2)
    assert fp8_block.dequantize_activations(q, s).shape == (0, 256)


def test_the_input_is_not_modified() -> None:
    x = torch.randn(2, 128)
    x[0, 0] = torch.nan
    before = x.clone()
    fp8_block.quantize_activations(x)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 100), torch.zeros(128), torch.zeros(2, 0), torch.zeros(2, 128, dtype=torch.float16)]
)
def test_activations_refused(x: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="x: got"):
        fp8_block.quantize_activations(x)


def test_unknown_scale_format_refused() -> None:
    with pytest.raises(FormatError, match="scale_format"):
        fp8_block.quantize_activations(torch.zeros(1, 128), "e5m2")  # type: ignore[arg-type]


def test_dequantize_activations_is_one_product() -> None:
    x = torch.randn(5, 256)
    q, s = fp8_block.quantize_activations(x)
    want = q.float().numpy() * s.numpy().repeat(128, axis=1)
    np.testing.assert_array_equal(fp8_block.dequantize_activations(q, s).numpy(), want)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_weights_block_by_block(scale_format: str, lead: tuple[int, ...]) -> None:
    w = torch.randn(*lead, 256, 384) * torch.exp2(torch.randn(*lead, 256, 384))
    q, s = fp8_block.quantize_weights(w, scale_format)
    assert s.dtype == (torch.float32 if scale_format == "float32" else torch.float8_e8m0fnu)
    assert q.shape == w.shape
    assert s.shape == (*lead, 2, 3)
    dense = fp8_block.dequantize_weights(q, s)
    flat_w, flat_q, flat_s, flat_d = (t.reshape(-1, *t.shape[-2:]) for t in (w, q.view(torch.uint8), s, dense))
    for e in range(flat_w.shape[0]):
        for n in range(2):
            for k in range(3):
                rows, cols = slice(n * 128, n * 128 + 128), slice(k * 128, k * 128 + 128)
                block = flat_w[e, rows, cols]
                amax = np.float32(block.abs().max().item())
                scale, multiplier = np.float32(amax / np.float32(448)), np.float32(np.float32(448) / amax)
                if scale_format == "ue8m0":
                    scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
                    multiplier = np.float32(1) / scale
                assert flat_s[e, n, k].float().item() == scale
                np.testing.assert_array_equal(flat_q[e, rows, cols].numpy(), nearest_e4m3(block.numpy() * multiplier))
                want = e4m3_table()[flat_q[e, rows, cols].numpy()].astype(np.float32) * scale
                np.testing.assert_array_equal(flat_d[e, rows, cols].numpy(), want)


def test_weight_scales_of_both_kinds_mean_the_same() -> None:
    q, s = fp8_block.quantize_weights(torch.randn(128, 256), "ue8m0")
    assert torch.equal(fp8_block.dequantize_weights(q, s), fp8_block.dequantize_weights(q, ue8m0.decode(s)))
    bf16 = fp8_block.dequantize_weights(q, s, torch.bfloat16)
    assert torch.equal(bf16, fp8_block.dequantize_weights(q, s).bfloat16())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_damaged_weights_refused_by_block(value: float) -> None:
    w = torch.zeros(2, 256, 256)
    w[1, 130, 5] = value
    with pytest.raises(WeightError, match=r"block \[1, 1, 0\]"):
        fp8_block.quantize_weights(w)


def test_weight_shapes_refused() -> None:
    with pytest.raises(FormatError, match="bf16"):
        fp8_block.quantize_weights(torch.zeros(100, 128))
    with pytest.raises(FormatError, match="float16"):
        fp8_block.quantize_weights(torch.zeros(128, 128, dtype=torch.float16))
