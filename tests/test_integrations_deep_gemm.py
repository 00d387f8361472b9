"""DeepGEMM's MegaMoE names: results, in-place behaviour, refusals, installing under the public name, ranks."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megamoe.integrations.deep_gemm as deep_gemm
from megamoe import ExpertWeights, MegaMoE, MoESpec, reference
from megamoe.errors import ClosedError, EngineError, FormatError, InputError, MegaMoEError, PeerError, WeightError
from megamoe.formats import fp8_block
from megamoe.formats.convert import convert
from megamoe.integrations.deep_gemm.__main__ import main
from moe_cases import make_call, make_weights
from rank_processes import play_ranks

SPEC = MoESpec(hidden=256, intermediate=256, experts=8, topk=3)
CLAMPED = MoESpec(hidden=256, intermediate=256, experts=8, topk=3, clamp=1.5)
EXAMPLE = Path(__file__).parent.parent / "examples" / "deep_gemm_moe.py"

Pair = tuple[torch.Tensor, torch.Tensor]


def pairs(weights: ExpertWeights) -> tuple[Pair, Pair]:
    """What `transform_weights_for_mega_moe_sm90` makes of all experts."""
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    return deep_gemm.transform_weights_for_mega_moe_sm90(
        (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
    )


def make_buffer(group: dist.ProcessGroup | None = None) -> deep_gemm.SymmBuffer:
    return deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        group, SPEC.experts, 32, SPEC.topk, SPEC.hidden, SPEC.intermediate, deadline=60
    )


def fill(buffer: deep_gemm.SymmBuffer, call: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Write the inputs as callers do; the output to pass, poisoned."""
    x, ids, weights = call
    q, s = deep_gemm.utils.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)
    tokens = len(x)
    buffer.x[:tokens].copy_(q)
    buffer.x_sf[:tokens].copy_(s)
    buffer.topk_idx[:tokens].copy_(ids)
    buffer.topk_weights[:tokens].copy_(weights)
    return torch.full((tokens, buffer.hidden), torch.nan, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return make_weights(SPEC, "fp8_block")


@pytest.fixture
def buffer() -> Iterator[deep_gemm.SymmBuffer]:
    buffer = make_buffer()
    yield buffer
    buffer.destroy()


@pytest.mark.parametrize("spec", [SPEC, CLAMPED])
@pytest.mark.parametrize("tokens", [1, 20, 0])
def test_agrees_with_the_oracle(
    buffer: deep_gemm.SymmBuffer, weights: ExpertWeights, spec: MoESpec, tokens: int
) -> None:
    call = make_call(spec, tokens)
    if tokens:
        call[1][0, 1] = -1
        call[2][0, 1] = torch.nan  # not read behind -1
    y = fill(buffer, call)
    clamp = spec.clamp if spec.clamp else float("inf")  # DeepGEMM's way to say none, besides None
    assert deep_gemm.fp8_mega_moe(y, *pairs(weights), buffer, activation_clamp=clamp) is None  # type: ignore[func-returns-value]
    assert reference.relative_error(y, reference.forward(spec, weights, *call)) < 8e-3


def test_the_oracle_reads_interleaved_rows(weights: ExpertWeights) -> None:
    (w13, s13), (w2, s2) = pairs(weights)
    assert not torch.equal(w13.view(torch.uint8), weights.w13.view(torch.uint8))
    interleaved = ExpertWeights(format="fp8_block", w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, gate_up="interleaved8")
    call = make_call(SPEC, 9)
    assert torch.equal(reference.forward(SPEC, interleaved, *call), reference.forward(SPEC, weights, *call))


def test_only_gate_and_up_rows_move(weights: ExpertWeights) -> None:
    (w13, s13), (w2, s2) = pairs(weights)
    assert s13 is weights.w13_scale
    assert (w2, s2) == (weights.w2, weights.w2_scale)
    rows, stacked = w13.view(torch.uint8)[5], weights.w13.view(torch.uint8)[5]
    for row in range(2 * SPEC.intermediate):
        run, is_up, offset = row // 16, row % 16 // 8, row % 8
        assert torch.equal(rows[row], stacked[is_up * SPEC.intermediate + 8 * run + offset])


def test_weights_are_used_where_they_are(buffer: deep_gemm.SymmBuffer, weights: ExpertWeights) -> None:
    """Not copied: what is written to them in place is used by the next call, for values and scales."""
    l1, l2 = pairs(make_weights(SPEC, "fp8_block", seed=1))
    call = make_call(SPEC, 12)
    deep_gemm.fp8_mega_moe(fill(buffer, call), l1, l2, buffer)
    new = pairs(weights)
    for old_pair, new_pair in zip((l1, l2), new, strict=True):
        for old, other in zip(old_pair, new_pair, strict=True):
            old.view(torch.uint8).copy_(other.view(torch.uint8))
    y = fill(buffer, call)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    assert reference.relative_error(y, reference.forward(SPEC, weights, *call)) < 8e-3


@pytest.mark.parametrize(
    ("copied", "times"),
    [((), 1), (("w13_scale", "w2_scale"), 3), (("w13", "w2", "w13_scale", "w2_scale"), 3), (("w13", "w2"), 1)],
)
def test_overwritten_weights_are_loaded_again_where_an_engine_has_a_copy(
    copied: tuple[str, ...],
    times: int,
    buffer: deep_gemm.SymmBuffer,
    weights: ExpertWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[MegaMoE] = []
    original = MegaMoE.load
    monkeypatch.setattr(MegaMoE, "copied", copied)
    monkeypatch.setattr(MegaMoE, "load", lambda self, source: (loads.append(self), original(self, source))[1])
    (w13, s13), l2 = pairs(weights)
    l1 = (w13, s13.clone())
    call = make_call(SPEC, 3)
    stats = torch.zeros(SPEC.experts, dtype=torch.int32)
    for factor in (1.0, 0.5, 1.0):
        l1[1].mul_(factor)
        deep_gemm.fp8_mega_moe(fill(buffer, call), l1, l2, buffer, stats)
    assert len(loads) == times
    assert torch.equal(stats, 3 * torch.bincount(call[1].flatten(), minlength=SPEC.experts).int())


def test_one_buffer_serves_many_layers(buffer: deep_gemm.SymmBuffer) -> None:
    models = [make_weights(SPEC, "fp8_block", seed=seed) for seed in range(2)]
    transformed = [pairs(one) for one in models]
    call = make_call(SPEC, 3)
    for _ in range(2):
        for one, (l1, l2) in zip(models, transformed, strict=True):
            for spec in (SPEC, CLAMPED):
                y = fill(buffer, call)
                deep_gemm.fp8_mega_moe(y, l1, l2, buffer, activation_clamp=spec.clamp)
                assert reference.relative_error(y, reference.forward(spec, one, *call)) < 8e-3
    assert len(buffer._layers) == 4  # one each for weights and clamp, made once


def test_received_routes_are_added_up(buffer: deep_gemm.SymmBuffer, weights: ExpertWeights) -> None:
    l1, l2 = pairs(weights)
    stats = torch.arange(SPEC.experts, dtype=torch.int32)
    want = stats.clone()
    for tokens in (5, 9):
        call = make_call(SPEC, tokens)
        call[1][2] = -1
        deep_gemm.fp8_mega_moe(fill(buffer, call), l1, l2, buffer, stats)
        want += torch.tensor([(call[1] == e).sum() for e in range(SPEC.experts)], dtype=torch.int32)
    assert torch.equal(stats, want)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_pre_dispatch(buffer: deep_gemm.SymmBuffer, id_type: torch.dtype) -> None:
    x, ids, weights = make_call(SPEC, 11)
    for view in (buffer.x.view(torch.uint8), buffer.x_sf, buffer.topk_idx, buffer.topk_weights):
        view.fill_(77)
    deep_gemm.mega_moe_pre_dispatch_sm90(
        x,
        ids.to(id_type),
        weights,
        buffer.x,
        buffer.x_sf,
        buffer.topk_idx,
        buffer.topk_weights,
        num_tokens=9,
        group_size=128,
        routed_scaling_factor=2.5,
    )
    q, s = fp8_block.quantize_activations(x[:9])
    assert torch.equal(buffer.x[:9].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:9], s)
    assert torch.equal(buffer.topk_idx[:9], ids[:9])
    assert torch.equal(buffer.topk_weights[:9], weights[:9] * 2.5)
    assert (buffer.topk_idx[9:] == -1).all()
    assert not buffer.topk_weights[9:].any()
    assert (buffer.x[9:].view(torch.uint8) == 77).all()


def test_an_empty_batch_may_have_one_row(buffer: deep_gemm.SymmBuffer, weights: ExpertWeights) -> None:
    """As SGLang calls it: an output of at least one row, whose routes the staging has switched off."""
    x, ids, route_weights = make_call(SPEC, 3)
    views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
    deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, route_weights, *views, 0)
    y = torch.full((1, SPEC.hidden), torch.nan, dtype=torch.bfloat16)
    deep_gemm.fp8_mega_moe(y, *pairs(weights), buffer)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize(
    "name", ["fp8_mega_moe_sm90", "fp8_mega_moe_pingpong", "fp8_mega_moe_cooperative", "mega.fp8_mega_moe"]
)
def test_other_names_give_the_same_bits(
    buffer: deep_gemm.SymmBuffer, weights: ExpertWeights, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm.mega, "_told", set())
    l1, l2 = pairs(weights)
    function: Any = deep_gemm
    for part in name.split("."):
        function = getattr(function, part)
    call = make_call(SPEC, 8)
    want, got = fill(buffer, call), fill(buffer, call)
    deep_gemm.fp8_mega_moe(want, l1, l2, buffer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            function(got, l1, l2, buffer, None, (128, 128, 128), "swiglu", None, False)
    assert torch.equal(got, want)
    forced = [w for w in said if "one kernel" in str(w.message)]
    assert len(forced) == (1 if name.endswith(("pingpong", "cooperative")) else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": (1, 1, 32)}, r"recipe: got \(1, 1, 32\)"),
        ({"activation": "situ"}, "activation: got situ"),
        ({"activation_clamp": -1.0}, "clamp: got -1.0"),
        ({"activation_clamp": float("nan")}, "activation_clamp: got nan"),
        ({"y": torch.zeros(129, SPEC.hidden, dtype=torch.bfloat16)}, "y: got 129 rows; allowed: at most .* = 128"),
        ({"y": torch.zeros(4, SPEC.hidden)}, "out: got dtype float32"),
        ({"y": torch.zeros(4, 128, dtype=torch.bfloat16)}, r"out: got shape \[4, 128\]"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(SPEC.experts)}, "recv_stats: got torch.float32"),
        ({"num_tokens_bound": 3}, "bound = 3"),
        ({"num_tokens_bound": 129}, "bound: got 129"),
    ],
)
def test_a_refused_call_leaves_the_buffer_usable(
    buffer: deep_gemm.SymmBuffer, weights: ExpertWeights, change: dict[str, Any], message: str
) -> None:
    l1, l2 = pairs(weights)
    call = make_call(SPEC, 4)
    y = fill(buffer, call)
    arguments = {"y": y, **change}
    with pytest.raises(MegaMoEError, match=message):
        deep_gemm.fp8_mega_moe(l1_weights=l1, l2_weights=l2, sym_buffer=buffer, **arguments)
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    assert reference.relative_error(y, reference.forward(SPEC, weights, *call)) < 8e-3


def test_wrong_weights_are_refused(buffer: deep_gemm.SymmBuffer, weights: ExpertWeights) -> None:
    l1, l2 = pairs(weights)
    y = fill(buffer, make_call(SPEC, 4))
    for bad, message in (
        ((l1, (l2[0].bfloat16(), l2[1])), "w2: got torch.bfloat16"),
        (((l1[0], l1[1][:, :1].contiguous()), l2), "w13_scale: got shape"),
        (((l1[0][:4], l1[1][:4]), l2), r"experts \[0, 4\)"),
        (((l1[0],), l2), "l1_weights"),
    ):
        with pytest.raises(WeightError, match=message):
            deep_gemm.fp8_mega_moe(y, *bad, buffer)  # type: ignore[arg-type]
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_fp8_dispatch": False}, EngineError, "use_fp8_dispatch"),
        ({"activation": "situ"}, EngineError, "activation: got situ"),
        ({"l2_act_sf_gran_k": 64}, EngineError, "l2_act_sf_gran_k: got 64; allowed: 128"),
        ({"num_shared_experts": 1}, EngineError, "num_shared_experts: got 1"),
        ({"hidden": 192}, FormatError, "hidden: got 192"),
        ({"num_max_tokens_per_rank": 0}, InputError, "num_max_tokens_per_rank: got 0"),
    ],
)
def test_buffers_that_cannot_be(change: dict[str, Any], error: type[Exception], message: str) -> None:
    sizes = {"num_experts": 8, "num_max_tokens_per_rank": 32, "num_topk": 2, "hidden": 256, "intermediate_hidden": 128}
    with pytest.raises(error, match=message):
        deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, **{**sizes, **change})


def test_a_buffer_has_the_views_that_callers_write() -> None:
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        None, 8, 130, 3, 256, 128, True, "swiglu", True, 4, l2_act_sf_gran_k=128
    )
    assert (buffer.num_max_tokens_per_rank, buffer.num_experts, buffer.num_topk) == (256, 8, 3)
    assert [(v.dtype, tuple(v.shape)) for v in (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)] == [
        (torch.float8_e4m3fn, (256, 256)),
        (torch.float32, (256, 2)),
        (torch.int64, (256, 3)),
        (torch.float32, (256, 3)),
    ]
    for name in ("l1_acts", "l2_acts_sf", "buffer", "handle", "shared_l1_acts"):
        assert not hasattr(buffer, name)
        with pytest.raises(deep_gemm.InternalViewError, match=f"SymmBuffer.{name}: got a part that is internal"):
            getattr(buffer, name)
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(AttributeError, match="destroyed"):
        _ = buffer.x
    with pytest.raises(ClosedError, match="destroyed"):
        deep_gemm.fp8_mega_moe(torch.zeros(1, 256).bfloat16(), *pairs(make_weights(SPEC, "fp8_block")), buffer)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((), {}), ((True, "swiglu"), {}), ((), {"use_fp8_dispatch": True, "activation": "swiglu"}), ((0, True), {})],
)
def test_the_name_for_both_architectures(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 130, 3, 256, 128, *arguments, **keywords)
    assert buffer.num_max_tokens_per_rank == 256
    buffer.destroy()
    for wrong in ((False, "swiglu"), (True, "situ"), (2, True), (0, True, "mxf4xmxf4"), (0, None, "bf16xbf16")):
        with pytest.raises(EngineError):
            deep_gemm.get_symm_buffer_for_mega_moe(None, 8, 130, 3, 256, 128, *wrong)


def test_helpers() -> None:
    x = torch.randn(256, 384)
    q, s = deep_gemm.utils.per_block_cast_to_fp8(x, use_ue8m0=True)
    want_q, want_s = fp8_block.quantize_weights(x, "ue8m0")
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(s, want_s.float())
    assert deep_gemm.transform_sf_into_required_layout(s, mn=256, k=384, recipe=(128, 128)) is s
    assert (deep_gemm.utils.align(129, 128), deep_gemm.utils.ceil_div(7, 2)) == (256, 4)
    with pytest.raises(EngineError, match="recipe"):
        deep_gemm.transform_sf_into_required_layout(s, mn=256, k=384, recipe=(1, 32))
    with pytest.raises(WeightError, match=r"sf: got torch\.bfloat16"):
        deep_gemm.transform_sf_into_required_layout(s.bfloat16(), mn=256, k=384)
    for keywords in ({"gran_k": 32}, {"use_packed_ue8m0": True}):
        with pytest.raises(EngineError, match="gran_k"):
            deep_gemm.utils.per_token_cast_to_fp8(x, **keywords)  # type: ignore[arg-type]


PUBLIC = {
    "get_symm_buffer_for_sm90_mega_moe": "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, "
    "intermediate_hidden, use_fp8_dispatch=True, activation='swiglu'",
    "SM90SymmBuffer": "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, "
    "use_fp8_dispatch=True, activation='swiglu'",
    "get_symm_buffer_for_mega_moe": "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, "
    "intermediate_hidden, num_shared_experts=0, use_fp8_dispatch=None, mma_type='fp8xfp4', activation='swiglu'",
    "transform_weights_for_mega_moe_sm90": "l1_weights, l2_weights",
    "fp8_mega_moe": "y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, "
    "recipe=(128, 128, 128), activation='swiglu', activation_clamp=None, fast_math=True, num_tokens_bound=None",
    "mega_moe_pre_dispatch_sm90": "x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, "
    "num_tokens, group_size=128, routed_scaling_factor=1.0",
    "per_token_cast_to_fp8": "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False",
    "per_block_cast_to_fp8": "x, use_ue8m0, gran_k=128",
    "align": "x, y",
    "ceil_div": "x, y",
}
"""What sgl-deep-gemm 0.2.5 has at its top level for MegaMoE on SM90, with the parameters as they are there."""


@pytest.mark.parametrize("name", PUBLIC)
def test_signatures_are_the_public_ones(name: str) -> None:
    """Everything that can be passed there, by position or by name, can be passed here and defaults to the same."""
    public = inspect.signature(eval(f"lambda {PUBLIC[name]}: 0")).parameters.values()
    ours = list(inspect.signature(getattr(deep_gemm, name)).parameters.values())
    for wanted, found in zip(public, ours, strict=False):
        assert (found.name, found.kind) == (wanted.name, wanted.kind)
        assert wanted.default in (found.default, inspect.Parameter.empty)
    assert len(ours) >= len(public)
    assert all(extra.default is not extra.empty for extra in ours[len(public) :])


def test_the_page_names_what_there_is() -> None:
    page = (EXAMPLE.parent.parent / "docs" / "integrations" / "deep_gemm.md").read_text()
    section = page.partition("## Names")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {"InternalViewError", "SymmBuffer", "install", "uninstall", "real_module", "mega", "utils"}
    assert named == set(deep_gemm.__all__) - own


def test_names_that_do_not_exist_here_are_absent() -> None:
    for name in ("fp8_fp4_mega_moe", "bf16_mega_moe", "fp8_gemm_nt", "transform_weights_for_mega_moe"):
        assert not hasattr(deep_gemm, name)
    with pytest.raises(AttributeError, match=r"has no 'fp8_gemm_nt'.*fp8_mega_moe"):
        _ = deep_gemm.fp8_gemm_nt


@pytest.fixture
def clean_names() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_gemm"]:
        del sys.modules[name]


@pytest.mark.usefixtures("clean_names")
def test_install_and_uninstall() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_gemm")
    deep_gemm.install()
    deep_gemm.install()
    assert importlib.import_module("deep_gemm") is deep_gemm
    assert importlib.import_module("deep_gemm.utils.math").align is deep_gemm.utils.align
    assert importlib.import_module("deep_gemm.mega") is deep_gemm.mega
    deep_gemm.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deep_gemm")


@pytest.mark.usefixtures("clean_names")
@pytest.mark.parametrize("imported", [True, False])
def test_a_real_module_is_not_shadowed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text("real = True\n")
    (tmp_path / "deep_gemm" / "mega.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        importlib.import_module("deep_gemm.mega")
    with pytest.raises(EngineError, match=r"a real one: .*deep_gemm.__init__\.py.*install\(replace=True\)"):
        deep_gemm.install()
    assert importlib.import_module("deep_gemm").real
    deep_gemm.install(replace=True)
    assert importlib.import_module("deep_gemm") is deep_gemm
    assert importlib.import_module("deep_gemm.mega") is deep_gemm.mega
    deep_gemm.uninstall()
    assert importlib.import_module("deep_gemm").real


def test_a_module_without_a_spec_is_not_shadowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    with pytest.raises(EngineError, match="a real one"):
        deep_gemm.install()


@contextlib.contextmanager
def isolated_interpreter() -> Iterator[None]:
    """What running a script changes, put back."""
    argv, path = sys.argv, list(sys.path)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def play_two(rank: int) -> dict[str, Any]:
    """Scenes of two ranks."""
    seen: dict[str, Any] = {}
    w = make_weights(SPEC, "fp8_block")
    l1, l2 = pairs(w)
    mine = slice(4 * rank, 4 * rank + 4)
    part = ((l1[0][mine], l1[1][mine]), (l2[0][mine], l2[1][mine]))
    buffer = make_buffer(dist.group.WORLD)
    stats = torch.zeros(4, dtype=torch.int32)

    def call(tokens: int, y: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
        filled = fill(buffer, make_call(SPEC, tokens, seed=rank))
        y = filled if y is None else y
        deep_gemm.fp8_mega_moe(y, *part, buffer, stats, **changes)
        return y

    def caught(action: Any) -> Any:
        start = time.monotonic()
        try:
            return action()
        except MegaMoEError as error:
            assert time.monotonic() - start < 20
            return error

    seen["uneven"] = call((13, 0)[rank])
    seen["stats"] = stats.clone()
    too_many = torch.zeros(200, SPEC.hidden, dtype=torch.bfloat16)
    seen["capacity"] = caught(lambda: call(3, too_many if rank == 1 else None))
    seen["bound"] = caught(lambda: call(3, num_tokens_bound=8 + rank))
    seen["clamp"] = call(5, activation_clamp=1.5)
    seen["after"] = call(6)
    other = part[1][0].bfloat16() if rank == 0 else part[1][0].clone()  # new weights on both ranks
    wrong = (part[0], (other, part[1][1]))
    seen["weights"] = caught(lambda: deep_gemm.fp8_mega_moe(seen["after"].clone(), *wrong, buffer))
    seen["again"] = call(6)
    seen["disagree"] = caught(
        lambda: deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, 8, 32, 2 + rank, 256, 256)
    )
    buffer.destroy()
    return seen


def test_two_ranks(tmp_path: Path) -> None:
    seen = play_ranks(play_two, 2, tmp_path)
    w = make_weights(SPEC, "fp8_block")
    for rank, one in enumerate(seen):
        for scene, tokens, spec in (
            ("uneven", (13, 0)[rank], SPEC),
            ("clamp", 5, CLAMPED),
            ("after", 6, SPEC),
            ("again", 6, SPEC),
        ):
            want = reference.forward(spec, w, *make_call(spec, tokens, seed=rank))
            assert reference.relative_error(one[scene], want) < 8e-3
    ids = make_call(SPEC, 13)[1]
    assert torch.cat([one["stats"] for one in seen]).tolist() == [(ids == e).sum() for e in range(SPEC.experts)]
    assert type(seen[1]["capacity"]) is InputError
    assert type(seen[0]["capacity"]) is PeerError
    assert "rank 1: y: got 200 rows" in str(seen[0]["capacity"])
    assert type(seen[0]["weights"]) is WeightError
    assert type(seen[1]["weights"]) is PeerError
    assert "bound" in str(seen[0]["bound"])
    assert "topk" in str(seen[0]["disagree"])
    assert {type(one[scene]) for one in seen for scene in ("bound", "disagree")} == {PeerError}


def errors_said(output: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in output.splitlines() if line.startswith("rank ")]


@pytest.mark.usefixtures("clean_names")
def test_a_script_with_only_deep_gemms_names_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert "import megamoe" not in EXAMPLE.read_text()
    with isolated_interpreter():
        assert main([str(EXAMPLE)]) == 0
    (error,) = errors_said(capsys.readouterr().out)
    assert error < 8e-3


def test_the_same_script_on_two_ranks() -> None:
    runner = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megamoe.integrations.deep_gemm"]
    done = subprocess.run([sys.executable, "-m", *runner, str(EXAMPLE)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    errors = errors_said(done.stdout)
    assert len(errors) == 2
    assert max(errors) < 8e-3


@pytest.mark.usefixtures("clean_names")
def test_a_script_is_told_about_a_real_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep_gemm.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import deep_gemm, sys; print(deep_gemm.__name__, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([str(script), "a"]) == 2
    assert "a real one" in capsys.readouterr().err
    with isolated_interpreter():
        assert main(["--replace", str(script), "a"]) == 0
    assert "megamoe.integrations.deep_gemm ['a']" in capsys.readouterr().out
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_interleaved_rows_are_not_converted(weights: ExpertWeights) -> None:
    (w13, s13), (w2, s2) = pairs(weights)
    mixed = ExpertWeights(format="fp8_block", w13=w13, w2=w2, w13_scale=s13, w2_scale=s2, gate_up="interleaved8")
    assert convert(mixed, "fp8_block") is mixed
    with pytest.raises(FormatError, match="gate_up: got interleaved8"):
        convert(mixed, "bf16")
