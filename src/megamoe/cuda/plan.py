"""A plan: one configuration of the fused kernel, as data, with the proof that it is legal.

Everything that the host and the kernel must agree on is computed here and travels in the generated config header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from megamoe.cuda.arena import LARGEST_TILE, MAX_RANKS, TILE_ROWS, Sizes
from megamoe.errors import EngineError
from megamoe.spec import BLOCK, MAX_TOPK

__all__ = ["REGISTERS_PER_SM", "SHARED_LIMIT", "THREADS", "Plan", "SharedLayout", "WeightLayout"]

WeightLayout = Literal["tiles", "rows"]
"""Weights as contiguous swizzled tiles, or row-major with gate and up rows alternating by 8 (`relayout.py`)."""

THREADS: Final = 384
"""One role warpgroup and two math warpgroups."""

SHARED_LIMIT: Final = 232_448
"""Bytes of shared memory that one CTA can have on sm_90 and sm_100 (227 KiB)."""

REGISTERS_PER_SM: Final = 65_536

WIDE_TOKENS: Final = 128
SWAP_TOKENS: Final = 64
CARRIED_TOKENS: Final = LARGEST_TILE - TILE_ROWS
AMAX_ROWS: Final = 3
WEIGHT_ROWS: Final = 256
STAGING_BYTES: Final = 64 * 256 + 7 * 16
"""One staging buffer of a math warpgroup: 64 rows of 256 bytes in eight groups, 16 bytes of padding between two."""

FACT_WORDS: Final = 21
QUEUE_SLOTS: Final = 4
QUEUE_SLOT_BYTES: Final = 32
COPY_ALIGNMENT: Final = 16
"""Of bulk copies."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets of one CTA's shared memory, in order; the stages start at 0."""

    staging: int
    pulled_rows: int
    row_scales: int
    tile_scales: int
    amax: int
    tables: int
    queue: int
    barriers: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration of the fused kernel.

    Args:
        wide: tiles of up to 128 tokens on the M side of WGMMA.
        swap: tiles of up to 64 tokens, up to 32 of them on the N side. With both kinds, an expert's last tile is such a
            one if it can be.
        carried_tokens: tokens beyond 128 that a full wide tile may carry, in the same pass over the weights: 0 or 16.
        stages: depth of the operand ring.
        staging_buffers: staging buffers of a math warpgroup.
        pulled_rows: token rows that a CTA's dispatch warp has in flight.
        direct_tokens: up to so many tokens of all ranks, rows are brought while the routes are listed, by all warps.
        urgent_tokens: tokens, of those that it lists, that a CTA's math warps bring before their first tile; the
            dispatch warps bring what exceeds it.
        wave_experts: experts of one wave of the tile order; None: all of a rank, so all first GEMMs come first, unless
            `link_bytes` says otherwise.
        lag: waves by which the second GEMM stays behind the first; with it, tiles of the two alternate.
        link_bytes: what a CTA's share of the link sends to other ranks in the time of one k-block. A call whose results
            would take longer than all second GEMMs alternates both GEMMs instead, in waves with a lag of one; each rank
            finds out for itself, from the call's routing. 0: never. The default is of H200s, where it was tried.
        passes: calls that need more rows than the pools have are worked through in passes; without it the plan is for
            calls whose bound rules that out.
        weights: how the weights lie in memory. The engine sets it to what was loaded; the bits are the same.
        peek: test the next stage's barrier under the last product of a k-block.
        trace: record time stamps (`Sizes.trace_words` must provide for them).
        keep_intermediate: store the intermediate in float32, for tests (`Sizes.keep_intermediate` must be set).
        pipeline_limit_ticks: a pipeline inside a CTA that stands still for so many ticks of 4.3 s traps: the last
            resort, far beyond the deadline of any wait for a peer.
        role_registers: registers of a thread of the role warpgroup.
        math_registers: registers of a math thread.
    """

    wide: bool = True
    swap: bool = True
    carried_tokens: int = 0
    stages: int = 3
    staging_buffers: int = 1
    pulled_rows: int = 1
    direct_tokens: int = 1024
    urgent_tokens: int = STAGING_BYTES // 8
    wave_experts: int | None = None
    lag: int = 0
    link_bytes: int = 2300
    passes: bool = False
    weights: WeightLayout = "tiles"
    peek: bool = True
    trace: bool = False
    keep_intermediate: bool = False
    pipeline_limit_ticks: int = 300
    role_registers: int = 56
    math_registers: int = 224

    @property
    def tile_tokens(self) -> int:
        """Token rows of a stage."""
        return WIDE_TOKENS + self.carried_tokens if self.wide else SWAP_TOKENS

    def shared(self, sizes: Sizes) -> SharedLayout:
        """Shared memory of one CTA."""
        stages = self.stages * (self.tile_tokens + WEIGHT_ROWS) * BLOCK
        staging = stages
        pulled = _up(staging + 2 * self.staging_buffers * STAGING_BYTES, COPY_ALIGNMENT)
        row_scales = _up(pulled + self.pulled_rows * sizes.hidden, COPY_ALIGNMENT)
        tile_scales = row_scales + self.stages * self.tile_tokens * 4
        amax = tile_scales + self.stages * 16
        tables = amax + (AMAX_ROWS * SWAP_TOKENS * 4 if self.swap else 0)
        passes = sizes.max_passes + 1 if self.passes else 0
        queue = _up(tables + sizes.local_experts * 12 + (FACT_WORDS + passes) * 4, 16)
        barriers = queue + QUEUE_SLOTS * QUEUE_SLOT_BYTES
        total = barriers + (2 * self.stages + 4 * self.staging_buffers + self.pulled_rows + 2 * QUEUE_SLOTS) * 8
        return SharedLayout(staging, pulled, row_scales, tile_scales, amax, tables, queue, barriers, total)

    def check(self, sizes: Sizes) -> None:
        """Prove that the plan can run this layer.

        Raises:
            EngineError: names what does not fit, and by how much.
        """
        if not (self.wide or self.swap):
            raise EngineError("plan", "neither wide nor swap", "at least one kind of tile", "Set wide or swap.")
        if self.carried_tokens not in (0, CARRIED_TOKENS) or (self.carried_tokens and not (self.wide and self.swap)):
            raise EngineError(
                "plan.carried_tokens", self.carried_tokens, f"0, or {CARRIED_TOKENS} with wide and swap", "Use 0."
            )
        if sizes.hidden % BLOCK or sizes.intermediate % BLOCK:
            raise EngineError(
                "plan",
                f"H={sizes.hidden}, I={sizes.intermediate}",
                f"multiples of {BLOCK}",
                "FP8 blocks are 128 x 128: use the CPU engine with BF16 experts.",
            )
        if min(sizes.hidden, sizes.intermediate) < 2 * BLOCK and self.wide:
            raise EngineError(
                "plan",
                f"H={sizes.hidden}, I={sizes.intermediate}",
                f"at least two k-blocks ({2 * BLOCK}) for wide tiles",
                "Use a plan with swap only.",
            )
        if not 1 <= sizes.ranks <= MAX_RANKS:
            raise EngineError("ranks", sizes.ranks, f"1 to {MAX_RANKS}", "Split the group.")
        if not 1 <= sizes.topk <= MAX_TOPK:
            raise EngineError("topk", sizes.topk, f"1 to {MAX_TOPK}", "")
        if not 2 <= self.stages <= 8 or self.staging_buffers not in (1, 2) or not 1 <= self.pulled_rows <= 8:
            raise EngineError("plan", repr(self), "2 to 8 stages, 1 or 2 staging buffers, 1 to 8 rows in flight", "")
        if self.pulled_rows * sizes.topk > 32:
            raise EngineError(
                "plan.pulled_rows", self.pulled_rows, f"at most {32 // sizes.topk} with top-{sizes.topk}", "Use fewer."
            )
        if self.direct_tokens < 0:
            raise EngineError("plan.direct_tokens", self.direct_tokens, "0 or more", "")
        if not 0 <= self.urgent_tokens <= STAGING_BYTES // 8:
            raise EngineError("plan.urgent_tokens", self.urgent_tokens, f"0 to {STAGING_BYTES // 8}", "")
        if self.wave_experts is not None and self.wave_experts < 1:
            raise EngineError("plan.wave_experts", self.wave_experts, "None or at least 1", "")
        if self.lag < 0:
            raise EngineError("plan.lag", self.lag, "0 or more", "")
        if self.link_bytes < 0:
            raise EngineError("plan.link_bytes", self.link_bytes, "0 or more", "")
        if self.weights not in get_args(WeightLayout):
            raise EngineError("plan.weights", self.weights, " or ".join(map(repr, get_args(WeightLayout))), "")
        registers = 128 * self.role_registers + 256 * self.math_registers
        if registers > REGISTERS_PER_SM or self.role_registers % 8 or self.math_registers % 8:
            raise EngineError("plan registers", registers, f"at most {REGISTERS_PER_SM}, multiples of 8 a thread", "")
        layout = self.shared(sizes)
        if layout.total > SHARED_LIMIT:
            raise EngineError(
                "plan shared memory",
                f"{layout.total} bytes",
                f"at most {SHARED_LIMIT}",
                "Use fewer stages, staging buffers or rows in flight.",
            )
        scales = sizes.pool_rows * max(sizes.hidden, sizes.intermediate) // BLOCK
        if scales >= 1 << 32:
            raise EngineError(
                "max_tokens", sizes.capacity, f"few enough for {scales} scales of the pools to have 32-bit indices", ""
            )
        direct = sizes.rows_for(min(self.direct_tokens, sizes.ranks * sizes.capacity) * sizes.topk)
        if direct > sizes.pool_rows or (self.passes and sizes.pool_rows < TILE_ROWS + LARGEST_TILE):
            raise EngineError(
                "pool rows",
                sizes.pool_rows,
                f"at least {direct} for {self.direct_tokens} tokens that are brought at once, and two tiles",
                "Use larger pools, or fewer direct_tokens.",
            )
        if self.keep_intermediate and sizes.table_rows * sizes.intermediate >= 1 << 32:
            raise EngineError(
                "plan.keep_intermediate",
                f"{sizes.table_rows} rows",
                "few enough for 32-bit indices",
                "Use fewer tokens.",
            )
        routing = (sizes.experts + sizes.ranks) * 4
        if routing > layout.staging:
            raise EngineError(
                "experts", sizes.experts, f"at most {layout.staging // 4 - sizes.ranks} with this plan", ""
            )

    def config(self, sizes: Sizes) -> dict[str, bool | int | float]:
        """Constants of the compilation. Raises EngineError when the plan is not legal."""
        self.check(sizes)
        layout = self.shared(sizes)
        return {
            "kHidden": sizes.hidden,
            "kIntermediate": sizes.intermediate,
            "kTopk": sizes.topk,
            "kRanks": sizes.ranks,
            "kLocalExperts": sizes.local_experts,
            "kWide": self.wide,
            "kSwap": self.swap,
            "kCarriedTokens": self.carried_tokens,
            "kStages": self.stages,
            "kStagingBuffers": self.staging_buffers,
            "kPulledRows": self.pulled_rows,
            "kDirectTokens": self.direct_tokens,
            "kUrgentTokens": self.urgent_tokens,
            "kWaveExperts": min(self.wave_experts or sizes.local_experts, sizes.local_experts),
            "kLag": self.lag,
            "kOrderOpen": self.wave_experts is None and self.lag == 0 and self.link_bytes > 0,
            "kLinkBytes": self.link_bytes,
            "kPasses": self.passes,
            "kMaxPasses": sizes.max_passes,
            "kRowMajorWeights": self.weights == "rows",
            "kPeek": self.peek,
            "kTrace": self.trace,
            "kKeepIntermediate": self.keep_intermediate,
            "kPipelineLimitTicks": self.pipeline_limit_ticks,
            "kRoleRegisters": self.role_registers,
            "kMathRegisters": self.math_registers,
            "kStagingOffset": layout.staging,
            "kPulledRowsOffset": layout.pulled_rows,
            "kRowScalesOffset": layout.row_scales,
            "kTileScalesOffset": layout.tile_scales,
            "kAmaxOffset": layout.amax,
            "kAmaxRows": AMAX_ROWS,
            "kTablesOffset": layout.tables,
            "kQueueOffset": layout.queue,
            "kQueueSlots": QUEUE_SLOTS,
            "kBarriersOffset": layout.barriers,
            "kSharedBytes": layout.total,
        }
