"""The arithmetic of one rank's experts on a CPU: routes grouped by expert, one matrix product per projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from megamoe.cpu.decode import HALF_SCALE, e4m3_to_half_bits, has_nan
from megamoe.cpu.routing import by_expert
from megamoe.formats import fp8_block, mxfp4, ue8m0
from megamoe.spec import BLOCK, MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["Experts", "make_experts"]

_BATCH_ROUTES = 4096
"""Routes whose intermediates are held at once: bounds the scratch memory of a large call."""


def _batches(counts: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Split expert-major routes into batches of pieces ``(expert, begin, end)``, at most `_BATCH_ROUTES` each."""
    batch: list[tuple[int, int, int]] = []
    begin = room = 0
    for expert, count in enumerate(counts):
        stop = begin + count
        while begin < stop:
            if room == 0:
                if batch:
                    yield batch
                batch, room = [], _BATCH_ROUTES
            end = min(stop, begin + room)
            batch.append((expert, begin, end))
            room -= end - begin
            begin = end
    if batch:
        yield batch


class Experts(ABC):
    """One rank's experts. Rows are what a rank's input becomes before it travels: bytes, `row_bytes` each."""

    row_bytes: int

    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        self.spec = spec
        self.weights = weights

    @abstractmethod
    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The input as it travels: uint8 ``[M, row_bytes]``."""

    @abstractmethod
    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """The operand of the first product: ``[M, H]``."""

    @abstractmethod
    def _gate_up(self, expert: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """First product of one expert: `x` ``[m, H]`` to `out` ``[m, 2I]``."""

    @abstractmethod
    def _round(self, h: torch.Tensor) -> torch.Tensor:
        """Float32 `h` ``[m, I]`` rounded as the contract says, as the operand of the second product."""

    @abstractmethod
    def _down(self, expert: int, h: torch.Tensor, out: torch.Tensor) -> None:
        """Second product of one expert: `h` ``[m, I]`` to BF16 `out` ``[m, H]``."""

    @property
    @abstractmethod
    def _gate_up_dtype(self) -> torch.dtype: ...

    def run(
        self, rows: torch.Tensor, row: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """The down projection of every route, and the number of routes of every expert.

        Args:
            rows: uint8 ``[rows, row_bytes]``.
            row, expert: int64 ``[routes]``: index into `rows`, and local expert.
            weight: float32 ``[routes]``.

        Returns:
            BF16 ``[routes, H]`` in the order given, and the counts per local expert.
        """
        order, counts = by_expert(expert, self.weights.local_experts)
        x, row, weight = self._unpack(rows), row[order], weight[order]
        down = torch.empty(len(order), self.spec.hidden, dtype=torch.bfloat16)
        for batch in _batches(counts):
            first, last = batch[0][1], batch[-1][2]
            gate_up = torch.empty(last - first, 2 * self.spec.intermediate, dtype=self._gate_up_dtype)
            for index, begin, end in batch:
                self._gate_up(index, x[row[begin:end]], gate_up[begin - first : end - first])
            h = self._round(self._activate(gate_up, weight[first:last]))
            result = torch.empty(last - first, self.spec.hidden, dtype=torch.bfloat16)
            for index, begin, end in batch:
                piece = slice(begin - first, end - first)
                self._down(index, h[piece], result[piece])
            down[order[first:last]] = result
        return down, counts

    def _activate(self, gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up * weight`` in float32, clamped first where the layer clamps."""
        gate, up = gate_up.float().chunk(2, dim=1)
        if self.spec.clamp is not None:
            gate = gate.clamp(max=self.spec.clamp)
            up = up.clamp(-self.spec.clamp, self.spec.clamp)
        return torch.nn.functional.silu(gate).mul_(up).mul_(weight.unsqueeze(1))


class _Bf16Experts(Experts):
    """BF16 experts. torch's CPU products of BF16 matrices sum in float32 and return BF16, so gate and up are rounded
    to BF16 once more than the contract asks: about 2e-3 of the result, inside the bound for a CPU engine."""

    _gate_up_dtype = torch.bfloat16

    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        super().__init__(spec, weights)
        self.row_bytes = 2 * spec.hidden

    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.bfloat16)

    def _gate_up(self, expert: int, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, self.weights.w13[expert].T, out=out)

    def _round(self, h: torch.Tensor) -> torch.Tensor:
        return h.bfloat16()

    def _down(self, expert: int, h: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(h, self.weights.w2[expert].T, out=out)


class _ScaledExperts(Experts):
    """FP8 and MXFP4 experts: weights are decoded and scaled expert by expert into one float32 scratch matrix.

    Input and intermediate are quantised where the contract says. The products sum in float32 over the whole depth with
    scales folded into the operands (one rounding of 2^-24 each), instead of promoting every k-block.
    """

    _gate_up_dtype = torch.float32

    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        super().__init__(spec, weights)
        self.row_bytes = spec.hidden + 4 * (spec.hidden // BLOCK)
        rows = max(2 * spec.intermediate * spec.hidden, spec.hidden * spec.intermediate)
        self._matrix = torch.empty(rows)

    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            x, scales = fp8_block.quantize_activations(x, self.spec.input_scales)
        values = x.contiguous().view(torch.uint8)
        return torch.cat((values, scales.contiguous().view(torch.uint8)), dim=1)

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = rows[:, : self.spec.hidden], rows[:, self.spec.hidden :]
        return fp8_block.dequantize_activations(
            values.contiguous().view(fp8_block.E4M3), scales.contiguous().view(torch.float32)
        )

    @abstractmethod
    def _decode(self, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, expert: int) -> None:
        """Write the float32 weights of one expert's projection to `out` ``[N, K]``."""

    def _product(
        self, expert: int, values: torch.Tensor, scale: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert scale is not None
        n, k = out.shape[1], x.shape[1]
        matrix = self._matrix[: n * k].view(n, k)
        self._decode(values[expert], scale[expert], matrix, expert)
        if len(x) == 1:
            out[0] = torch.mv(matrix, x[0])
        else:
            # Weights on the left: the library's float32 product is faster this way round for few columns.
            out.copy_((matrix @ x.T).T)

    def _gate_up(self, expert: int, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product(expert, self.weights.w13, self.weights.w13_scale, x, out)

    def _round(self, h: torch.Tensor) -> torch.Tensor:
        return fp8_block.dequantize_activations(*fp8_block.quantize_activations(h, "float32"))

    def _down(self, expert: int, h: torch.Tensor, out: torch.Tensor) -> None:
        self._product(expert, self.weights.w2, self.weights.w2_scale, h, out)


class _Fp8Experts(_ScaledExperts):
    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        super().__init__(spec, weights)
        self._bits = torch.empty(self._matrix.shape, dtype=torch.int16)
        self._nan = [has_nan(weights.w13[e]) or has_nan(weights.w2[e]) for e in range(weights.local_experts)]

    def _decode(self, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, expert: int) -> None:
        n, k = out.shape
        scale = ue8m0.decode(scale) if scale.dtype == ue8m0.E8M0 else scale
        if self._nan[expert]:
            out.copy_(values)
        else:
            out.copy_(e4m3_to_half_bits(values, self._bits[: n * k].view(n, k)))
            scale = scale * HALF_SCALE
        out.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK).mul_(scale.view(n // BLOCK, 1, k // BLOCK, 1))


class _Mxfp4Experts(_ScaledExperts):
    def _decode(self, values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, expert: int) -> None:
        out.copy_(mxfp4.dequantize(values, scale))


def make_experts(spec: MoESpec, weights: ExpertWeights) -> Experts:
    """The experts of one rank for the format of `weights`."""
    kinds: dict[str, type[Experts]] = {"fp8_block": _Fp8Experts, "mxfp4": _Mxfp4Experts, "bf16": _Bf16Experts}
    return kinds[weights.format](spec, weights)
