"""Calls that are recognised by their kind: never one that the checks would refuse or take differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import MegaMoE, inputs, recognise
from megamoe.errors import InputError
from megamoe.recognise import same_kinds
from moe_cases import SPEC, make_call, make_weights

WEIGHTS = make_weights(SPEC, "fp8_block")
TOKENS = 3

Given = tuple[Any, Any, Any, dict[str, Any]]


def usual() -> Given:
    return (*make_call(SPEC, TOKENS), {})


def more_rows() -> Given:
    return (*make_call(SPEC, TOKENS + 1), {})


def _with(**changes: Callable[[Any], Any]) -> Callable[[], Given]:
    """The usual call with some of its arguments changed."""

    def make() -> Given:
        x, ids, weights = make_call(SPEC, TOKENS)
        arguments = {"x": x, "ids": ids, "weights": weights}
        for name, change in changes.items():
            arguments[name] = change(arguments[name])
        return arguments["x"], arguments["ids"], arguments["weights"], {}

    return make


def _and(**more: Callable[[], Any]) -> Callable[[], Given]:
    """The usual call with more arguments."""
    return lambda: (*make_call(SPEC, TOKENS), {name: value() for name, value in more.items()})


VARIANTS: dict[str, Callable[[], Given]] = {
    "usual": usual,
    "usual again": usual,
    "more rows": more_rows,
    "int ids": _with(ids=torch.Tensor.int),
    "short ids": _with(ids=torch.Tensor.short),
    "float rows": _with(x=torch.Tensor.float),
    "fewer ids": _with(ids=lambda t: t[:2]),
    "turned weights": _with(weights=lambda t: t.T.contiguous().T),
    "gradient": _with(weights=lambda t: t.requires_grad_()),
    "one row": lambda: (torch.zeros(1, 7 * SPEC.hidden).bfloat16()[:, : SPEC.hidden], *make_call(SPEC, 1)[1:], {}),
    "wanting out": _and(out=lambda: torch.empty(TOKENS, SPEC.hidden, dtype=torch.bfloat16, requires_grad=True)),
    "no rows": _with(x=lambda _: None),
    "lists": _with(ids=torch.Tensor.tolist),
    "elsewhere": _with(x=lambda t: t.to("meta")),
    "out": _and(out=lambda: torch.empty(TOKENS, SPEC.hidden, dtype=torch.bfloat16)),
    "float out": _and(out=lambda: torch.empty(TOKENS, SPEC.hidden)),
    "long out": _and(out=lambda: torch.empty(TOKENS + 1, SPEC.hidden, dtype=torch.bfloat16)),
    "wide out": _and(out=lambda: torch.empty(TOKENS, 2 * SPEC.hidden, dtype=torch.bfloat16)[:, : SPEC.hidden]),
    "bound": _and(bound=lambda: 5),
    "least bound": _and(bound=lambda: TOKENS),
    "small bound": _and(bound=lambda: 2),
    "true bound": _and(bound=lambda: True),
    "float bound": _and(bound=lambda: 5.0),
    "count": _and(num_tokens=lambda: 2),
    "too many": _and(num_tokens=lambda: 4),
}


@pytest.fixture(scope="module")
def layer() -> Iterator[MegaMoE]:
    with MegaMoE(SPEC, max_tokens=8, backend="cpu") as layer:
        layer.load(WEIGHTS)
        yield layer


def outcome(layer: MegaMoE, made: Given) -> Any:
    x, ids, weights, more = made
    try:
        return layer(x, ids, weights, **more)
    except InputError as error:
        return str(error)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b if isinstance(a, str) and isinstance(b, str) else False
    return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(VARIANTS)), st.sampled_from(sorted(MODES))), min_size=1, max_size=12),
    st.sampled_from(["usual", "gradient", "wanting out", "one row"]),
)
@settings(max_examples=200, deadline=None)
def test_a_call_ends_as_it_does_where_all_are_checked(layer: MegaMoE, calls: list[tuple[str, str]], first: str) -> None:
    layer._runtime._usual = None
    for name, mode in [(first, "no grad"), (first, "no grad"), *calls, (first, "grad"), (first, "no grad")]:
        with MODES[mode]():
            quick = outcome(layer, VARIANTS[name]())
            remembered, layer._runtime._usual = layer._runtime._usual, None
            full = outcome(layer, VARIANTS[name]())
            layer._runtime._usual = remembered
            assert equal(quick, full), name


def test_the_third_call_of_a_kind_is_recognised(layer: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recognise.trusted()  # with the torch of development
    checked: list[int] = []

    def counted(*arguments: Any) -> Any:
        checked.append(arguments[4].shape[0])
        return inputs.check_call(*arguments)

    monkeypatch.setattr("megamoe.runtime.check_call", counted)
    layer._runtime._usual = None
    out = torch.empty(TOKENS, SPEC.hidden, dtype=torch.bfloat16)
    for _ in range(5):
        x, ids, weights, _ = usual()
        assert layer(x, ids, weights, out=out) is out
        assert torch.equal(layer(x, ids, weights), out)
    assert checked == [TOKENS, TOKENS]
    layer(*more_rows()[:3])
    layer(*usual()[:3])
    assert checked == [TOKENS, TOKENS, TOKENS + 1, TOKENS]


def test_without_the_guards_every_call_is_checked(layer: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "_guards", lambda *_: lambda *_: True)  # they would accept anything
    recognise.trusted.cache_clear()
    try:
        assert same_kinds(torch.zeros(1)) is None
        layer._runtime._usual = None
        for _ in range(3):
            assert isinstance(outcome(layer, usual()), torch.Tensor)
        assert "short" in outcome(layer, VARIANTS["short ids"]()) or "int16" in outcome(layer, VARIANTS["short ids"]())
    finally:
        recognise.trusted.cache_clear()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64]),
    st.booleans(),
)
def test_kinds_are_types_sizes_and_strides(
    one: list[int], two: list[int], dtype: torch.dtype, other: torch.dtype, turned: bool
) -> None:
    a, b = torch.zeros(one, dtype=dtype), torch.zeros(two, dtype=other)
    if turned and b.dim() > 1:
        b = b.transpose(0, 1)
    check = same_kinds(a)
    assert check is not None
    assert check(torch.zeros(one, dtype=dtype))
    if check(b):
        assert (b.dtype, b.shape, b.stride()) == (a.dtype, a.shape, a.stride())
