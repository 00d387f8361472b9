"""UE8M0: all bytes, against the definition and against torch's own type."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.errors import FormatError
from megamoe.formats import ue8m0

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_decode_every_byte() -> None:
    got = ue8m0.decode(ALL_BYTES)
    want = torch.tensor([math.ldexp(1.0, b - 127) for b in range(255)], dtype=torch.float64)
    assert torch.equal(got[:255].double(), want)
    assert bool(got[255].isnan())
    torch_own = ALL_BYTES.view(torch.float8_e8m0fnu).float()
    assert torch.equal(got[:255], torch_own[:255])
    assert bool(torch_own[255].isnan())


def test_encode_is_the_inverse_for_every_byte() -> None:
    encoded = ue8m0.encode(ue8m0.decode(ALL_BYTES.view(torch.float8_e8m0fnu)))
    assert encoded.dtype == torch.float8_e8m0fnu
    assert torch.equal(encoded.view(torch.uint8), ALL_BYTES)
    strided = torch.stack([ALL_BYTES, ALL_BYTES], 1)[:, 0]
    assert torch.equal(ue8m0.decode(strided)[:255], ue8m0.decode(ALL_BYTES)[:255])


@given(st.integers(0, 2**32 - 1))
def test_encode_refuses_exactly_what_it_cannot_hold(bits: int) -> None:
    signed = bits - 2**32 if bits >= 2**31 else bits
    value = torch.tensor([signed], dtype=torch.int32).view(torch.float32)
    number = value.item()
    holds = math.isnan(number) or (number > 0 and math.isfinite(number) and math.frexp(number)[0] == 0.5)
    holds = holds and (math.isnan(number) or number >= 2.0**-127)
    if holds:
        back = ue8m0.decode(ue8m0.encode(value)).item()
        assert back == number or (math.isnan(back) and math.isnan(number))
    else:
        with pytest.raises(FormatError, match=r"scale\[0\]"):
            ue8m0.encode(value)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.inf, 2.0**-128, 3.0, 2.0**-149])
def test_encode_names_the_first_bad_value(value: float) -> None:
    scale = torch.ones(2, 3)
    scale[1, 2] = value
    with pytest.raises(FormatError, match=r"scale\[1, 2\]"):
        ue8m0.encode(scale)


def test_wrong_dtypes_refused() -> None:
    with pytest.raises(FormatError):
        ue8m0.encode(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(FormatError):
        ue8m0.decode(torch.ones(2))


@given(st.integers(0, 0x7F800000))
def test_ceil_power_of_two(bits: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    got, value = ue8m0.ceil_power_of_two(x).item(), x.item()
    if value <= 2.0**-126:
        assert got == 2.0**-126
    elif value > 2.0**127:
        assert got == math.inf
    else:
        assert got / 2 < value <= got
        assert math.frexp(got)[0] == 0.5


def test_ceil_power_of_two_keeps_nan() -> None:
    nans = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(ue8m0.ceil_power_of_two(nans).isnan().all())
    assert bool(ue8m0.ceil_power_of_two(-nans).isnan().all())
