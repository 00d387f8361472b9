"""Row and tile orders of kernel layouts: exact permutations of one-byte (and BF16) weights, in place or streaming.

Both transforms go expert by expert, so that the peak memory is the result plus one expert. FP8 block scales are not
touched: they stay in [gate, up] block order, whatever the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.errors import WeightError
from megamoe.spec import BLOCK

__all__ = ["deinterleave_gate_up", "interleave_gate_up", "tile_weights", "untile_weights"]


def interleave_gate_up(w13: torch.Tensor, granularity: int = 8, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reorder the rows [all gate; all up] into `granularity` rows of gate, as many of up, and so on.

    Args:
        w13: any dtype ``[EL, 2I, K]``, I a multiple of `granularity`.
        granularity: rows of gate (and of up) in a run.
        out: where to write, same shape and dtype, contiguous; `w13` itself works in place (one expert extra). Default:
            a new tensor.

    Returns:
        `out`.

    Raises:
        WeightError: a shape, dtype or overlap that does not fit.
    """
    half = _half(w13, granularity)
    runs = (half // granularity, 2, granularity, w13.shape[2])
    return _stream(w13, out, w13.shape, lambda e: e.view(2, runs[0], granularity, runs[3]).transpose(0, 1), runs)


def deinterleave_gate_up(w13: torch.Tensor, granularity: int = 8, out: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `interleave_gate_up`, with the same arguments and errors."""
    half = _half(w13, granularity)
    halves = (2, half // granularity, granularity, w13.shape[2])
    return _stream(w13, out, w13.shape, lambda e: e.view(halves[1], 2, granularity, halves[3]).transpose(0, 1), halves)


def tile_weights(
    w: torch.Tensor, rows: int = BLOCK, depth: int = BLOCK, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Cut each expert's matrix into tiles of `rows` x `depth`, each contiguous in memory.

    Args:
        w: one-byte dtype ``[EL, N, K]``, N a multiple of `rows`, K of `depth`.
        rows: rows of a tile.
        depth: columns of a tile.
        out: where to write, contiguous ``[EL, N/rows, K/depth, rows, depth]`` of the same dtype; a view of `w`'s own
            memory works in place (one expert extra). Default: a new tensor.

    Returns:
        `out`: tile ``[e, n, k]`` is ``w[e, n*rows:(n+1)*rows, k*depth:(k+1)*depth]``.

    Raises:
        WeightError: a shape, dtype or overlap that does not fit.
    """
    if w.dim() != 3 or w.element_size() != 1 or rows < 1 or depth < 1 or w.shape[1] % rows or w.shape[2] % depth:
        raise WeightError(
            "w", f"{w.dtype} {list(w.shape)}", f"one-byte [EL, N, K], N % {rows} == 0, K % {depth} == 0", "Pad it."
        )
    el, n, k = w.shape
    grid = (n // rows, k // depth, rows, depth)
    return _stream(w, out, (el, *grid), lambda e: e.view(grid[0], rows, grid[1], depth).transpose(1, 2), grid)


def untile_weights(tiles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Inverse of `tile_weights`: ``[EL, N/rows, K/depth, rows, depth]`` to ``[EL, N, K]``."""
    if tiles.dim() != 5 or tiles.element_size() != 1:
        raise WeightError(
            "tiles",
            f"{tiles.dtype} {list(tiles.shape)}",
            "one-byte [EL, N/rows, K/depth, rows, depth]",
            "Use tile_weights().",
        )
    el, n, k, rows, depth = tiles.shape
    return _stream(tiles, out, (el, n * rows, k * depth), lambda e: e.transpose(1, 2), (n, rows, k, depth))


def _half(w13: torch.Tensor, granularity: int) -> int:
    """I of ``[EL, 2I, K]``, checked."""
    if w13.dim() != 3 or granularity < 1 or w13.shape[1] % (2 * granularity):
        raise WeightError(
            "w13",
            f"shape {list(w13.shape)} with granularity {granularity}",
            f"[EL, 2I, K] with I a multiple of {granularity}",
            "Pass gate's rows followed by as many rows of up.",
        )
    return int(w13.shape[1]) // 2


def _stream(
    source: torch.Tensor,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    reorder: Callable[[torch.Tensor], torch.Tensor],
    reordered: tuple[int, ...],
) -> torch.Tensor:
    """Write ``reorder(expert)``, which has the shape `reordered`, for each expert of `source` into `out`."""
    if out is None:
        out = torch.empty(shape, dtype=source.dtype, device=source.device)
    elif tuple(out.shape) != tuple(shape) or out.dtype != source.dtype or not out.is_contiguous():
        raise WeightError(
            "out",
            f"{out.dtype} {list(out.shape)}, strides {list(out.stride())}",
            f"contiguous {source.dtype} {list(shape)}",
            "Leave it out to get a new tensor.",
        )
    in_place = _in_place(source, out)
    for e in range(shape[0]):
        expert = source[e].clone(memory_format=torch.contiguous_format) if in_place else source[e].contiguous()
        target = out[e].view(reordered)
        if expert.element_size() == 1:  # one copy kernel for every one-byte dtype
            expert, target = expert.view(torch.uint8), target.view(torch.uint8)
        target.copy_(reorder(expert))
        del expert  # before the next one is copied: one expert extra, not two
    return out


def _in_place(source: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `out` is exactly the memory of `source`; any other overlap would overwrite experts not yet read."""
    if out.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or source.numel() == 0:
        return False
    if out.data_ptr() == source.data_ptr() and source.is_contiguous():
        return True
    first = sorted((t.data_ptr(), t.data_ptr() + _extent(t)) for t in (source, out))
    if first[0][1] <= first[1][0]:
        return False
    raise WeightError("out", "memory that overlaps the input in part", "the input itself, or other memory", "Copy it.")


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()
