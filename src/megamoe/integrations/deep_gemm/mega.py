"""DeepGEMM's MegaMoE calls for SM90, with its argument order, dtypes, shapes and in-place behaviour."""

from __future__ import annotations

import math
import warnings
from typing import Final

import torch
import torch.distributed as dist

from megamoe.control import DEFAULT_DEADLINE
from megamoe.engine import Backend
from megamoe.errors import EngineError, InputError, WeightError
from megamoe.formats import fp8_block
from megamoe.formats.layout import interleave_gate_up
from megamoe.integrations.deep_gemm.buffer import SymmBuffer, Weights, check_capacity, only
from megamoe.integrations.refusal import refuse
from megamoe.spec import BLOCK

__all__ = [
    "SM90SymmBuffer",
    "SymmBuffer",
    "fp8_mega_moe",
    "fp8_mega_moe_cooperative",
    "fp8_mega_moe_pingpong",
    "fp8_mega_moe_sm90",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe_sm90",
]

SM90SymmBuffer = SymmBuffer

_TOKEN_ALIGNMENT: Final = 128
_RECIPE: Final = (128, 128, 128)


def get_symm_buffer_for_sm90_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    fused: bool = False,
    num_experts_per_wave: int | None = None,
    l2_act_sf_gran_k: int | None = None,
    *,
    num_shared_experts: int = 0,
    backend: Backend = "auto",
    deadline: float = DEFAULT_DEADLINE,
) -> SymmBuffer:
    """The buffer for `fp8_mega_moe`; collective over `group`.

    Args:
        group: process group, or None for one rank.
        num_experts: experts of all ranks.
        num_max_tokens_per_rank: capacity, rounded up to a multiple of 128.
        num_topk, hidden, intermediate_hidden: sizes; the last two multiples of 128.
        use_fp8_dispatch: must be True.
        activation: must be ``"swiglu"``.
        fused, num_experts_per_wave: schedules of DeepGEMM's kernels; without effect on results there and here.
        l2_act_sf_gran_k: columns of the intermediate that share a scale: 128, or None for it. DeepGEMM's own default is
            64; asking for 64 is refused.
        num_shared_experts: must be 0.
        backend, deadline: as in `MegaMoE`.

    Raises:
        EngineError: numerics or features that do not exist here; also as `MegaMoE`.
        SpecError, FormatError, InputError, PeerError, DeadlineError: as `MegaMoE`.
    """
    only("num_shared_experts", num_shared_experts, 0, "Run shared experts beside the call and add their output.")
    if l2_act_sf_gran_k not in (None, BLOCK):
        raise EngineError(
            "l2_act_sf_gran_k",
            l2_act_sf_gran_k,
            f"{BLOCK} or None: the intermediate has one scale for each {BLOCK} columns",
            "Leave it out.",
        )
    return SymmBuffer(
        group,
        num_experts,
        -(-num_max_tokens_per_rank // _TOKEN_ALIGNMENT) * _TOKEN_ALIGNMENT,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch,
        activation,
        backend=backend,
        deadline=deadline,
    )


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int | bool = 0,
    use_fp8_dispatch: bool | str | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    *,
    backend: Backend = "auto",
    deadline: float = DEFAULT_DEADLINE,
) -> SymmBuffer:
    """`get_symm_buffer_for_sm90_mega_moe` under the name that code for both architectures calls.

    The older form ``(..., intermediate_hidden, use_fp8_dispatch=True, activation="swiglu")`` is understood too. Of
    `mma_type` only the tokens' half counts on SM90, there and here: it must be fp8.
    """
    shared, fp8_dispatch = int(num_shared_experts), use_fp8_dispatch in (None, True)
    if isinstance(num_shared_experts, bool):
        shared, fp8_dispatch = 0, num_shared_experts
        if isinstance(use_fp8_dispatch, str):
            activation = use_fp8_dispatch
    if mma_type.partition("x")[0] != "fp8":
        raise EngineError("mma_type", mma_type, "'fp8x...': tokens travel as e4m3", "Leave it out on SM90.")
    return get_symm_buffer_for_sm90_mega_moe(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        fp8_dispatch,
        activation,
        num_shared_experts=shared,
        backend=backend,
        deadline=deadline,
    )


def transform_weights_for_mega_moe_sm90(l1_weights: Weights, l2_weights: Weights) -> tuple[Weights, Weights]:
    """Interleave the gate and up rows of the first projection by 8; everything else is handed through.

    Args:
        l1_weights: e4m3 ``[EL, 2I, H]`` (gate, then up) and float32 ``[EL, 2I/128, H/128]``.
        l2_weights: e4m3 ``[EL, H, I]`` and float32 ``[EL, H/128, I/128]``.

    Returns:
        Both pairs; the first value is new memory.

    Raises:
        WeightError: a shape that cannot be interleaved.
    """
    return (interleave_gate_up(l1_weights[0]), l1_weights[1]), l2_weights


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...] = (128, 128),
    num_groups: int | None = None,
    is_sfa: bool = False,
    disable_ue8m0_cast: bool = True,
) -> torch.Tensor:
    """Float32 scales of 128 x 128 blocks, which are used as they are on SM90; anything else is refused.

    Raises:
        EngineError: another recipe, activation scales, or a cast to UE8M0.
        WeightError: scales of another dtype or shape.
    """
    only("recipe", tuple(recipe)[-2:], (BLOCK, BLOCK), "Weights have one scale for each 128 x 128 block.")
    only("is_sfa", bool(is_sfa), False, "Scales of activations need no transform here.")
    only("disable_ue8m0_cast", bool(disable_ue8m0_cast), True, "Scales stay float32.")
    want = (*(() if num_groups is None else (num_groups,)), -(-mn // BLOCK), -(-k // BLOCK))
    if sf.dtype != torch.float32 or tuple(sf.shape) != want:
        raise WeightError("sf", f"{sf.dtype} {list(sf.shape)}", f"torch.float32 {list(want)}", "Pass block scales.")
    return sf


def mega_moe_pre_dispatch_sm90(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Quantise `num_tokens` rows into a buffer's views; the rows after them become skipped routes of weight 0.

    Args:
        x: BF16 ``[num_tokens or more, hidden]``.
        topk_idx: int32 or int64 ``[.., k]``; topk_weights: float ``[.., k]``.
        buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights: the views of a `SymmBuffer`.
        group_size: must be 128.
        routed_scaling_factor: multiplied into the route weights, in float32.

    Raises:
        EngineError: another group size.
        InputError: more tokens than `x` or the views have.
    """
    only("group_size", group_size, BLOCK, "Activations have one scale for each 128 columns.")
    most = min(len(buf_x), len(x), len(topk_idx), len(topk_weights))
    if not 0 <= num_tokens <= most:
        raise InputError("num_tokens", num_tokens, f"0 to {most}, the rows given", "Split the batch.")
    here, behind = slice(0, num_tokens), slice(num_tokens, None)
    if num_tokens:
        if x.is_cuda:
            from megamoe.cuda.staging import stage

            stage(x[here], buf_x[here], buf_x_sf[here])
        else:
            q, s = fp8_block.quantize_activations(x[here])
            buf_x[here].view(torch.uint8).copy_(q.view(torch.uint8))
            buf_x_sf[here] = s
        buf_topk_idx[here] = topk_idx[here].to(buf_topk_idx.dtype)
        buf_topk_weights[here] = topk_weights[here].float() * float(routed_scaling_factor)
    buf_topk_idx[behind] = -1
    buf_topk_weights[behind] = 0.0


def _clamp(value: float | None) -> float | None:
    """DeepGEMM's clamp: None and infinity mean no clamp."""
    if value is not None and math.isnan(value):
        raise InputError("activation_clamp", value, "None or a number above 0", "Pass the model's swiglu_limit.")
    return None if value is None or math.isinf(value) else float(value)


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    num_tokens_bound: int | None = None,
) -> None:
    """Run the experts on the first ``y.size(0)`` rows of the buffer's views; collective over the buffer's group.

    The first call with new weights makes a layer, collectively: all ranks must bring theirs in the same call. Later
    calls find it by the tensors' addresses. Weights are read where they are, on a GPU as well: values that are
    overwritten in place are used by the next call and by the next replay of a captured one. Of scales the GPU engine
    has a copy, which the next call renews when torch counted the write (not through ``.data``), but a replay does not.

    Args:
        y: BF16 ``[num_tokens, hidden]``, written.
        l1_weights: e4m3 ``[EL, 2I, H]`` with rows interleaved by 8, and float32 ``[EL, 2I/128, H/128]``, gate's first.
        l2_weights: e4m3 ``[EL, H, I]`` and float32 ``[EL, H/128, I/128]``.
        sym_buffer: holds the inputs.
        cumulative_local_expert_recv_stats: int32 ``[EL]`` to which the routes received by each local expert are added;
            on a GPU this waits for the call to finish.
        recipe: must be ``(128, 128, 128)``.
        activation: must be ``"swiglu"``.
        activation_clamp: SwiGLU clamp; None or infinity for none.
        fast_math: permission for cheaper arithmetic, of which no use is made: results are the same either way.
        num_tokens_bound: largest token count of any rank, equal on all; None or 0: the buffer's capacity.

    Raises:
        EngineError: numerics that do not exist here.
        WeightError, InputError, PeerError, DeadlineError: as `MegaMoE`; the buffer stays usable.
        ClosedError: the buffer was destroyed.
    """
    only("recipe", tuple(recipe), _RECIPE, "Scales are per 128 x 128 block and per 128 columns.")
    only("activation", activation, "swiglu", "Only (clamped) SwiGLU is computed.")
    layer = sym_buffer.layer(l1_weights, l2_weights, _clamp(activation_clamp))
    tokens = y.shape[0] if y.dim() else 0
    stats = cumulative_local_expert_recv_stats
    wrong = check_capacity(tokens, sym_buffer) or _check_stats(stats, layer.local_experts)
    if wrong is not None:
        refuse(layer, wrong)
    before = None if stats is None else layer.stats
    layer(
        (sym_buffer.x[:tokens], sym_buffer.x_sf[:tokens]),
        sym_buffer.topk_idx[:tokens],
        sym_buffer.topk_weights[:tokens],
        out=y,
        bound=num_tokens_bound or None,
    )
    if stats is not None and before is not None:
        stats += (layer.stats - before).to(stats)


def _check_stats(stats: torch.Tensor | None, local_experts: int) -> InputError | None:
    if stats is None or (stats.dtype == torch.int32 and tuple(stats.shape) == (local_experts,)):
        return None
    return InputError(
        "cumulative_local_expert_recv_stats",
        f"{stats.dtype} {list(stats.shape)}",
        f"torch.int32 [{local_experts}]",
        "Pass one counter for each local expert.",
    )


fp8_mega_moe_sm90 = fp8_mega_moe

_told: set[str] = set()


def _instead_of(kernel: str) -> None:
    if kernel not in _told:
        _told.add(kernel)
        warnings.warn(
            f"{kernel} asks for a kernel of DeepGEMM's; megamoe has one kernel and chooses its plan by shape, on "
            "which results do not depend.",
            RuntimeWarning,
            stacklevel=3,
        )


def fp8_mega_moe_pingpong(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """`fp8_mega_moe`; the kernel that the name asks for does not exist here, which a warning says once."""
    _instead_of("fp8_mega_moe_pingpong")
    fp8_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        recipe,
        activation,
        activation_clamp,
        fast_math,
    )


def fp8_mega_moe_cooperative(
    y: torch.Tensor,
    l1_weights: Weights,
    l2_weights: Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """`fp8_mega_moe`; the kernel that the name asks for does not exist here, which a warning says once."""
    _instead_of("fp8_mega_moe_cooperative")
    fp8_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        recipe,
        activation,
        activation_clamp,
        fast_math,
    )
