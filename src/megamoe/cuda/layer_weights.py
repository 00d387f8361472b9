"""The weights of a layer's hosted ranks as the kernel reads them, from load to load.

Rows of gate and up that are interleaved by 8 already and lie on the rank's GPU are read where they are: their owner may
write to them between calls. All other weights are re-laid into memory of the layer's own. Scales are always re-laid.

Captured graphs hold addresses. Memory of the layer's own is therefore written to by every later load, whatever is
loaded. Weights that are read in place can be replaced by other ones, but not once a call was captured: the graph would
go on reading the old ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

import torch

from megamoe.cuda.gpu import Gpu
from megamoe.cuda.relayout import KernelWeights, readable_in_place, relayout, weight_shapes
from megamoe.errors import EngineError
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["LayerWeights"]

_log = logging.getLogger("megamoe")

_NAMES: Final = ("w13", "w13_scales", "w2", "w2_scales")


class LayerWeights:
    """Weights of the hosted ranks.

    Args:
        spec: the layer.
        local_experts: experts of a rank.
        ranks: each hosted rank and its GPU.

    Attributes:
        parts: one entry for each hosted rank; empty before the first load.
        watch: whether the engine must say (`capture`) when a call is captured.
    """

    def __init__(self, spec: MoESpec, local_experts: int, ranks: Sequence[tuple[int, Gpu]]) -> None:
        self.parts: list[KernelWeights] = []
        self.watch = False
        self._captured = False
        self._spec = spec
        self._ranks = tuple(ranks)
        self._shapes = dict(zip(_NAMES, weight_shapes(spec, local_experts), strict=True))

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layout of each hosted rank's weights."""
        return tuple(part.layout for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's own memory for a hosted rank's weights, the largest of them; before the first load what
        a copy will take."""
        if self.parts:
            return max(part.nbytes for part in self.parts)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    @property
    def copied(self) -> tuple[str, ...]:
        """Fields of `ExpertWeights` of which there is a copy here, so that writing to them needs another load."""
        values = ("w13", "w2") if "tiles" in self.layouts else ()
        return (*values, "w13_scale", "w2_scale")

    def capture(self) -> None:
        """A call is being captured."""
        self._captured = True
        self.watch = False

    def reserve(self, weights: Sequence[ExpertWeights]) -> bool:
        """Provide for `weights`, of each hosted rank; `write` follows. Nothing may be running.

        Returns:
            whether addresses changed.

        Raises:
            EngineError: too little memory, or weights that cannot take the place of those that are read in place;
                nothing has changed then.
        """
        if not self.parts:
            new = [self._made(i, one) for i, one in enumerate(weights)]
        else:
            new = [self._kept(i, old, one) for i, (old, one) in enumerate(zip(self.parts, weights, strict=True))]
        changed = _addresses(new) != _addresses(self.parts)
        if changed and self._captured:
            raise EngineError(
                "weights",
                "other tensors than those loaded before, which captured graphs read where they are",
                "the same tensors, overwritten in place",
                "Copy the new weights into the tensors that were loaded, or make a new layer and capture again.",
            )
        self.parts = new
        self.watch = "rows" in self.layouts and not self._captured
        return changed

    def write(self, weights: Sequence[ExpertWeights]) -> None:
        """Copy what is not read in place."""
        for one, part in zip(weights, self.parts, strict=True):
            relayout(self._spec, one, part)

    def clear(self) -> None:
        """Let go of everything."""
        self.parts = []
        self.watch = False

    def _kept(self, index: int, old: KernelWeights, new: ExpertWeights) -> KernelWeights:
        if old.layout == "tiles":
            if new.gate_up == "interleaved8":
                rank = self._ranks[index][0]
                _log.warning("GPU engine: weights of rank %d are copied, as the first ones of the layer were", rank)
            return old
        return self._made(index, new, old)

    def _made(self, index: int, new: ExpertWeights, old: KernelWeights | None = None) -> KernelWeights:
        if readable_in_place(new, self._ranks[index][1].device):
            w13, w2 = (t.view(torch.uint8) for t in (new.w13, new.w2))
            if old is not None:
                s13, s2 = old.w13_scales, old.w2_scales
            else:
                s13, s2 = self._zeros(index, "w13_scales", "w2_scales")
            return KernelWeights(w13, s13, w2, s2, layout="rows")
        return KernelWeights(*self._zeros(index, *_NAMES))

    def _zeros(self, index: int, *names: str) -> list[torch.Tensor]:
        rank, gpu = self._ranks[index]
        return [gpu.zeros(f"{name} of rank {rank}", *self._shapes[name]) for name in names]


def _addresses(parts: Sequence[KernelWeights]) -> list[tuple[int, int]]:
    return [(part.w13.data_ptr(), part.w2.data_ptr()) for part in parts]
