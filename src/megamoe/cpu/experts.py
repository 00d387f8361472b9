"""The arithmetic of one rank's experts on a CPU: routes grouped by expert, one matrix product per projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from megamoe.cpu import fused
from megamoe.cpu.combine import Results
from megamoe.cpu.products import multiply
from megamoe.cpu.rounding import round_e4m3
from megamoe.cpu.routing import by_expert, count_routes
from megamoe.cpu.small import leaves_out, padding_pays, run_grouped, run_one_token, run_padded
from megamoe.formats import fp8_block, mxfp4, ue8m0
from megamoe.formats.e4m3 import HALF_SCALE, e4m3_to_half_bits, has_nan
from megamoe.spec import BLOCK, MoESpec, ScaleFormat
from megamoe.weights import INTERLEAVED_ROWS, ExpertWeights, GateUpOrder

__all__ = ["Experts", "make_experts"]

_BATCH_ROUTES = 1024
"""Routes whose intermediates are held at once: few enough that they stay in a cache of some ten megabytes."""

_SMALL_ROUTES: Final = 4 * _BATCH_ROUTES
"""Routes and slots of experts with small matrices that are computed at once."""

_DECODED_ELEMENTS: Final = 1 << 22
"""Elements of one projection's matrices that are decoded to float32 at once."""

_DECODING_CALL: Final = 3 << 18
"""What decoding a small matrix by a call of its own costs, in the bytes of `padding_pays`: a dozen operations."""

Piece = tuple[int, int, int]
"""An expert and its routes ``[begin, end)`` in expert-major order."""


def _batches(counts: list[int]) -> Iterator[list[Piece]]:
    """Split expert-major routes into batches of at most `_BATCH_ROUTES`; an expert is split only if it exceeds that."""
    batch: list[Piece] = []
    begin = room = 0
    for expert, count in enumerate(counts):
        stop = begin + count
        if room < count <= _BATCH_ROUTES:
            room = 0
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


class Projection(ABC):
    """One projection of all experts: `values` ``[EL, N, K]`` as stored."""

    rows_apart = 1
    """Experts with at most so many rows go to `single_rows`, each row by itself."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.columns = values.transpose(1, 2)
        """`values` ``[EL, K, N]``; a view made once, because a small layer's call is mostly calls of torch."""

    @abstractmethod
    def product(self, expert: int, x: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        """The given rows of `x` ``[P, K]`` times one expert's matrix, to the same rows of `out` ``[P, N]``."""

    @abstractmethod
    def matrices(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        """``[A, N, K]`` of the given experts (int64 ``[A]``; all: None), in the type that products take."""

    def single_rows(self, experts: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Row by row, each with an expert of its own: `x` ``[A, K]`` to ``[A, N]``; None where `product` must do it."""
        return None

    def run(self, pieces: list[Piece], first: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """All products of a batch: rows `x` ``[P, K]`` to `out` ``[P, N]``, both from route `first` on."""
        few = [piece for piece in pieces if piece[2] - piece[1] <= self.rows_apart]
        single = [(expert, route - first) for expert, begin, end in few for route in range(begin, end)]
        if len(single) > 1:  # torch compiles sizes of one apart
            experts, rows = torch.tensor(single).unbind(1)
            result = self.single_rows(experts, x.index_select(0, rows))
            if result is not None:
                out.index_copy_(0, rows, result.to(out.dtype))
                pieces = [piece for piece in pieces if piece[2] - piece[1] > self.rows_apart]
        for expert, begin, end in pieces:
            self.product(expert, x, slice(begin - first, end - first), out)


class _Bf16Projection(Projection):
    def matrices(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        return self.values if experts is None else self.values.index_select(0, experts)

    def product(self, expert: int, x: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        count = rows.stop - rows.start
        width = -(-count // 16) * 16
        if count < 25 or width - count > count // 5 or width > len(x) or torch.get_num_threads() == 1:
            torch.mm(x[rows], self.values[expert].T, out=out[rows])
            return
        # From about so many rows on the library is quicker with weights on the left, in whole sixteens of columns.
        # Neighbouring rows, whose results are dropped, fill them up: columns of a product do not touch each other.
        start = min(rows.start, len(x) - width)
        result = self.values[expert] @ x[start : start + width].T
        out[rows].copy_(result[:, rows.start - start : rows.stop - start].T)

    def single_rows(self, experts: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if self.values[0].numel() < fused.LEAST_ELEMENTS:
            return None
        done = fused.matvec_bf16.call(self.values, experts, x)
        return None if done is None else done[0]


class _Float32Projection(Projection):
    """Products in float32 of weights that are decoded and scaled into one scratch matrix, expert by expert."""

    def __init__(
        self, values: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], scratch: torch.Tensor
    ) -> None:
        super().__init__(values)
        self.scale = scale
        self.shape = shape
        self._matrix = scratch[: shape[0] * shape[1]].view(shape)

    @abstractmethod
    def _decode(self, expert: int, out: torch.Tensor) -> None:
        """Write one expert's float32 weights to `out` ``[N, K]``."""

    def matrices(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        numbers: Iterable[int] = range(len(self.values)) if experts is None else experts.tolist()
        out = torch.empty(len(self.values) if experts is None else len(experts), *self.shape)
        for matrix, expert in zip(out, numbers, strict=True):
            self._decode(expert, matrix)
        return out

    def product(self, expert: int, x: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        self._decode(expert, self._matrix)
        multiply(x[rows], self._matrix, out[rows])


class _Fp8Projection(_Float32Projection):
    """Block-scaled e4m3. With `order` ``"interleaved8"`` the rows stay as they are, and so do the columns of `out`."""

    rows_apart = 2

    def __init__(
        self, values: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor, order: GateUpOrder = "stacked"
    ) -> None:
        super().__init__(values, scale, (values.shape[1], values.shape[2]), scratch)
        self._order = order
        self._rows = BLOCK if order == "stacked" else INTERLEAVED_ROWS
        # Not compiled for small matrices, nor for a single block in a dimension (torch compiles sizes of one apart).
        self._fuse = values[0].numel() >= fused.LEAST_ELEMENTS and min(scale.shape[1:]) > 1
        self._bits: torch.Tensor | None = None

    def _row_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale` as stored, as float32 ``[experts, N/rows, K/128]``: one for each ``self._rows`` neighbouring rows."""
        scale = ue8m0.decode(scale) if scale.dtype == ue8m0.E8M0 else scale
        if self._order == "stacked":
            return scale
        experts, rows, columns = scale.shape
        runs = scale.view(experts, 2, rows // 2, 1, columns).expand(-1, -1, -1, BLOCK // INTERLEAVED_ROWS, -1)
        return runs.permute(0, 2, 3, 1, 4).reshape(experts, -1, columns)

    def single_rows(self, experts: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        if not self._fuse:
            return None
        done = fused.matvec_e4m3[self._rows].call(
            self.values.view(torch.int8), self._row_scales(self.scale), experts, x
        )
        return None if done is None else done[0]

    def _decode(self, expert: int, out: torch.Tensor) -> None:
        values, scale = self.values[expert], self._row_scales(self.scale[expert : expert + 1])[0]
        if self._fuse and fused.decode_e4m3[self._rows].call(values.view(torch.int8), scale, out) is not None:
            return
        if self._bits is None:
            self._bits = torch.empty(self.shape, dtype=torch.int16)
        self._decode_plainly(values, scale, self._bits, out)

    def _decode_plainly(self, values: torch.Tensor, scale: torch.Tensor, bits: torch.Tensor, out: torch.Tensor) -> None:
        """Write the float32 weights of e4m3 `values` ``[..., N, K]`` to `out`; `bits` is int16 scratch."""
        if has_nan(values):
            out.copy_(values)
        else:
            out.copy_(e4m3_to_half_bits(values, bits))
            scale = scale * HALF_SCALE
        *batch, groups, blocks = scale.shape
        out.view(*batch, groups, self._rows, blocks, BLOCK).mul_(scale.view(*batch, groups, 1, blocks, 1))

    def matrices(self, experts: torch.Tensor | None = None) -> torch.Tensor:
        values, scale = self.values, self.scale
        if experts is not None:  # torch cannot index e4m3 or UE8M0
            values = values.view(torch.uint8).index_select(0, experts).view(values.dtype)
            scale = scale.view(torch.uint8).index_select(0, experts).view(scale.dtype)
        out = torch.empty(values.shape)
        self._decode_plainly(values, self._row_scales(scale), torch.empty(values.shape, dtype=torch.int16), out)
        return out


class _Mxfp4Projection(_Float32Projection):
    def __init__(self, values: torch.Tensor, scale: torch.Tensor, scratch: torch.Tensor) -> None:
        super().__init__(values, scale, (values.shape[1], 2 * values.shape[2]), scratch)

    def _decode(self, expert: int, out: torch.Tensor) -> None:
        out.copy_(mxfp4.dequantize(self.values[expert], self.scale[expert]))


class Experts(ABC):
    """One rank's experts. Rows are what a rank's input becomes before it travels: bytes, `row_bytes` each."""

    row_bytes: int
    _gate_up: Projection
    _down: Projection
    _gate_up_dtype: torch.dtype

    def __init__(self, spec: MoESpec, local_experts: int) -> None:
        self.spec = spec
        self.local_experts = local_experts

    @abstractmethod
    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The input as it travels: uint8 ``[M, row_bytes]``."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """The operand of the first product, ``[M, H]``, from rows that travelled."""

    @abstractmethod
    def operand(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The operand of the first product from an input that stays on its rank: ``unpack(rows(x, scales))``."""

    @abstractmethod
    def _round(self, h: torch.Tensor) -> torch.Tensor:
        """Float32 `h` ``[m, I]`` rounded as the contract says, as the operand of the second product."""

    def _split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up, each ``[m, I]``, of the first product ``[m, 2I]``."""
        gate, up = gate_up.chunk(2, dim=1)
        return gate, up

    def run(
        self, x: torch.Tensor, row: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
    ) -> tuple[Results, torch.Tensor]:
        """The down projection of every route, and the number of routes of every local expert (int64 ``[EL]``).

        Args:
            x: operand of the first product, ``[rows, H]``.
            row, expert: int64 ``[routes]``: index into `x`, and local expert.
            weight: float32 ``[routes]``.
        """
        order, counts = by_expert(expert, self.local_experts)
        row, weight = row.index_select(0, order), weight.index_select(0, order)
        down = torch.empty(len(order), self.spec.hidden, dtype=torch.bfloat16)  # expert-major
        for pieces in _batches(counts.tolist()):
            first, last = pieces[0][1], pieces[-1][2]
            gate_up = torch.empty(last - first, 2 * self.spec.intermediate, dtype=self._gate_up_dtype)
            # Rows are gathered by index_select, also on the way back: torch copies whole rows there, and element by
            # element where a tensor is indexed.
            self._gate_up.run(pieces, first, x.index_select(0, row[first:last]), gate_up)
            h = self._down_operand(gate_up, weight[first:last])
            self._down.run(pieces, first, h, down[first:last])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return Results(down, place), counts

    def _down_operand(self, gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The operand of the second product ``[m, I]`` from the first product ``[m, 2I]`` and route weights ``[m]``."""
        return self._round(self._activate(gate_up, weight))

    def warmup(self) -> None:
        """Run one expert with several routes and others with one, so that everything is compiled."""
        expert = torch.tensor([0, 0, 0, *range(1, min(3, self.local_experts))])
        x = self.operand(torch.zeros(2, self.spec.hidden, dtype=torch.bfloat16), None)
        self.run(x, torch.zeros_like(expert), expert, torch.ones(len(expert)))

    def _activate(self, gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up * weight`` in float32, clamped first where the layer clamps."""
        # BF16 widens, exactly, as a whole: one pass where each half would take its own.
        wide = gate_up.float()
        own = wide is not gate_up
        gate, up = self._split(wide)
        if self.spec.clamp is not None:
            gate, up = gate.clamp(max=self.spec.clamp), up.clamp(-self.spec.clamp, self.spec.clamp)
            own = True
        # In place where that is a copy: a matrix less to write.
        return torch.nn.functional.silu(gate, inplace=own).mul_(up).mul_(weight.unsqueeze(1))


class _Bf16Experts(Experts):
    """BF16 experts. torch's CPU products of BF16 matrices sum in float32 and return BF16, so gate and up are rounded
    to BF16 once more than the contract asks: about 2e-3 of the result, inside the bound for a CPU engine."""

    _gate_up_dtype = torch.bfloat16

    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        super().__init__(spec, weights.local_experts)
        self.row_bytes = 2 * spec.hidden
        self._gate_up, self._down = _Bf16Projection(weights.w13), _Bf16Projection(weights.w2)
        self._clamp = torch.tensor(torch.inf if spec.clamp is None else spec.clamp)
        # What a call of a small layer asks for, where each look into a tensor shows in its time.
        self._matrix_bytes, self._large = weights.w13[0].nbytes, weights.w13[0].numel() >= fused.LEAST_ELEMENTS

    def run(
        self, x: torch.Tensor, row: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
    ) -> tuple[Results, torch.Tensor]:
        gate_up, down = self._gate_up, self._down
        if self._large or not 0 < len(expert) <= _SMALL_ROUTES:
            return super().run(x, row, expert, weight)
        counts = count_routes(expert, self.local_experts)
        if len(x) == 1:
            return run_one_token(x, expert, weight, gate_up, down, self._down_operand), counts
        each: list[int] = counts.tolist()
        # Groups are of the matrices where they lie; only few of many are worth a copy.
        padded = leaves_out(each) and padding_pays(each, self._matrix_bytes, _SMALL_ROUTES)
        run = run_padded if padded else run_grouped
        return run(x, row, expert, weight, each, gate_up, down, self._down_operand), counts

    def _down_operand(self, gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._large and min(len(gate_up), self.spec.intermediate) > 1:  # torch compiles sizes of one apart
            done = fused.activate.call(gate_up, weight, self._clamp)
            if done is not None:
                h: torch.Tensor = done[0]
                return h
        return super()._down_operand(gate_up, weight)

    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.bfloat16)

    def operand(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return x.contiguous()

    def _round(self, h: torch.Tensor) -> torch.Tensor:
        return h.bfloat16()


class _QuantizedExperts(Experts):
    """FP8 and MXFP4 experts: input and intermediate are quantised where the contract says. The products sum in float32
    over the whole depth with scales folded into the operands (one rounding of 2^-24 each), instead of promoting every
    k-block."""

    _gate_up_dtype = torch.float32

    def __init__(self, spec: MoESpec, weights: ExpertWeights) -> None:
        super().__init__(spec, weights.local_experts)
        self.row_bytes = spec.hidden + 4 * (spec.hidden // BLOCK)
        assert weights.w13_scale is not None
        assert weights.w2_scale is not None
        scratch = torch.empty(2 * spec.intermediate * spec.hidden)
        self._fuse = len(scratch) >= fused.LEAST_ELEMENTS
        self._order = weights.gate_up
        if weights.format == "fp8_block":
            self._gate_up = _Fp8Projection(weights.w13, weights.w13_scale, scratch, weights.gate_up)
            self._down = _Fp8Projection(weights.w2, weights.w2_scale, scratch)
        else:
            self._gate_up = _Mxfp4Projection(weights.w13, weights.w13_scale, scratch)
            self._down = _Mxfp4Projection(weights.w2, weights.w2_scale, scratch)

    def run(
        self, x: torch.Tensor, row: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
    ) -> tuple[Results, torch.Tensor]:
        rows, columns = 2 * self.spec.intermediate, self.spec.hidden
        if self._fuse or not 0 < len(expert) <= _SMALL_ROUTES:
            return super().run(x, row, expert, weight)
        counts = count_routes(expert, self.local_experts)
        each: list[int] = counts.tolist()
        if (len(each) - each.count(0)) * rows * columns <= _DECODED_ELEMENTS:
            if len(x) == 1 and max(each) == 1:
                return run_one_token(x, expert, weight, self._gate_up, self._down, self._down_operand), counts
            if padding_pays(each, 4 * rows * columns, _SMALL_ROUTES, _DECODING_CALL):
                return run_padded(x, row, expert, weight, each, self._gate_up, self._down, self._down_operand), counts
        return super().run(x, row, expert, weight)

    def _split(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._order == "stacked":
            return super()._split(gate_up)
        gate, up = gate_up.view(len(gate_up), -1, 2, INTERLEAVED_ROWS).unbind(2)
        return gate.flatten(1), up.flatten(1)

    def rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            x, scales = fp8_block.quantize_activations(x, self.spec.input_scales)
        values = x.contiguous().view(torch.uint8)
        return torch.cat((values, scales.contiguous().view(torch.uint8)), dim=1)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = rows[:, : self.spec.hidden], rows[:, self.spec.hidden :]
        return fp8_block.dequantize_activations(
            values.contiguous().view(fp8_block.E4M3), scales.contiguous().view(torch.float32)
        )

    def operand(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            return self._rounded(x, self.spec.input_scales)
        return fp8_block.dequantize_activations(x, scales)

    def _round(self, h: torch.Tensor) -> torch.Tensor:
        return self._rounded(h, "float32")

    def _rounded(self, x: torch.Tensor, scale_format: ScaleFormat) -> torch.Tensor:
        """`x` ``[m, K]`` quantised and multiplied out."""
        if self._fuse and min(len(x), x.shape[1] // BLOCK) > 1:  # torch compiles sizes of one apart
            done = fused.round_e4m3[scale_format].call(x.contiguous())
            if done is not None:
                rounded: torch.Tensor = done[0]
                return rounded
        return round_e4m3(x, scale_format)


def make_experts(spec: MoESpec, weights: ExpertWeights) -> Experts:
    """The experts of one rank for the format of `weights`."""
    return _Bf16Experts(spec, weights) if weights.format == "bf16" else _QuantizedExperts(spec, weights)
