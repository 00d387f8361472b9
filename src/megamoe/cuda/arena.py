"""The memory of the fused kernel: one definition of every field, from which offsets, sizes and the device header come.

Two buffers a rank. The **arena** is what peers touch: staged inputs and routing, tags, the combine buffer. The
**workspace** is local: the expert-major pools, route tables and counters. Offsets depend on the layer's sizes and on
the token cap, so they travel as kernel arguments: another cap needs no other kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from megamoe.spec import BLOCK

__all__ = [
    "ARENA",
    "ERROR_WORDS",
    "MAX_RANKS",
    "REPORT_WORDS",
    "TRACE_EVENTS",
    "TRACE_ROLES",
    "WORKSPACE",
    "Field",
    "Params",
    "Sizes",
    "allocation_report",
    "device_header",
    "offset_of",
    "offsets",
    "total_bytes",
]

MAX_RANKS: Final = 8
"""Ranks of one group: the GPUs of one NVLink domain on a Hopper host."""

ALIGNMENT: Final = 1024
"""Every field starts at a multiple of this many bytes (a tensor map needs 16, a swizzle atom 1024)."""

ROW_ALIGNMENT: Final = 8
"""An expert's first pool row is a multiple of this: its scales are then 16-byte aligned."""

TILE_ROWS: Final = 128
"""Rows of the largest token tile; pools are that much longer, so that a tile may read past the last expert."""

EVEN_LOAD_MARGIN: Final = 32
"""Pools hold the routes that a rank receives from an evenly dealt full call, and one part in so many more."""

WHOLE_LOAD_RANKS: Final = 2
"""In larger groups they hold half of that. An even full call takes two passes there, and arena and pools of a common
layer stay below 700 MiB."""

LEAST_POOL_TOKENS: Final = 2048
"""Pools hold at least all routes of so many tokens: small calls never need more."""

SMALLEST_TILE: Final = 64
"""Rows of the narrowest kind of tile that counts as one: no expert has more than rows / 64 + 1 tiles."""

LARGEST_TILE: Final = 144
"""Rows of the largest one: what a full tile can carry with it (`Plan.carried_tokens`)."""

TRACE_ROLES: Final = 6
TRACE_EVENTS: Final = 1024
"""Rows and columns of a CTA's time stamps (trace.cuh)."""

MAX_CTAS: Final = 256
"""CTAs of a kernel that may cut tiles between them."""

HANDED_TAGS: Final = 8
HANDED_SUMS: Final = HANDED_TAGS * 32 * 8
"""Words that a CTA hands on in each GEMM: a tag a math warp, eight sums a thread of it (stretch.cuh)."""

BANKS: Final = 2
"""Sets of counters: a call uses one and clears the other for the next."""


def most_passes(ranks: int) -> int:
    """Bound of `Sizes.max_passes` for any layer and token cap.

    As if all tiles that there can be had the largest size. Tiles are counted by routes / 64 and by experts, rows of the
    pools by routes and by 8 for an expert: the quotient lies between the two, and rounding adds less than 3.
    """
    if ranks == 1:
        return 1
    share = 1 if ranks <= WHOLE_LOAD_RANKS else 2
    by_routes = ranks * share * LARGEST_TILE * EVEN_LOAD_MARGIN / (SMALLEST_TILE * (EVEN_LOAD_MARGIN + 1))
    return math.ceil(max(by_routes, LARGEST_TILE / ROW_ALIGNMENT)) + 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the sizes of all fields follow from. `capacity` is the token cap of a rank."""

    hidden: int
    intermediate: int
    topk: int
    ranks: int
    local_experts: int
    capacity: int
    trace_words: int = 0
    """Words for time stamps: CTAs x 6 roles x 1024 where a tracing plan runs."""
    keep_intermediate: bool = False
    """Room for the intermediate in float32, where a plan that keeps it runs."""
    pool_limit: int | None = None
    """At most so many rows in a pool, for tests; None: `pool_rows` decides."""

    @property
    def experts(self) -> int:
        """All routed experts, E."""
        return self.ranks * self.local_experts

    @property
    def pool_routes(self) -> int:
        """Most routes that one rank can receive: every slot of every token of every rank."""
        return self.ranks * self.capacity * self.topk

    def rows_for(self, routes: int) -> int:
        """Rows that so many routes can take: each expert's alignment, and a tile of slack, with them."""
        rows = routes + self.local_experts * ROW_ALIGNMENT + TILE_ROWS
        return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def table_rows(self) -> int:
        """Rows of the routing's tables: as many as any call can need."""
        return self.rows_for(self.pool_routes)

    @property
    def pool_rows(self) -> int:
        """Rows of a pool. A call that needs more works through its token tiles in passes (schedule.cuh)."""
        even = self.capacity * self.topk // (1 if self.ranks <= WHOLE_LOAD_RANKS else 2)
        rows = self.rows_for(max(even + even // EVEN_LOAD_MARGIN, LEAST_POOL_TOKENS * self.topk))
        if self.pool_limit is not None:
            rows = self.pool_limit // ROW_ALIGNMENT * ROW_ALIGNMENT
        return min(rows, self.table_rows)

    @property
    def max_passes(self) -> int:
        """Most passes of a call, whatever its plan and the token cap: another cap needs no other kernel."""
        if self.pool_limit is None:
            return most_passes(self.ranks)
        room = (self.pool_rows - TILE_ROWS) // LARGEST_TILE
        return 1 if self.pool_rows >= self.table_rows else -(-self.pool_tiles // max(1, room))

    @property
    def pool_tiles(self) -> int:
        """Most token tiles of one call."""
        return self.pool_routes // SMALLEST_TILE + self.local_experts


@dataclass(frozen=True)
class Field:
    """One array: device element type, bytes of an element, number of elements, and what it is for."""

    name: str
    ctype: str
    itemsize: int
    count: Callable[[Sizes], int]
    doc: str
    state: bool = False
    """Whether it carries something from call to call; all others are written before they are read."""

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes of the array, rounded up to the alignment of the next field."""
        return -(-self.itemsize * self.count(sizes) // ALIGNMENT) * ALIGNMENT


ARENA: Final = (
    Field("x", "u8", 1, lambda s: s.capacity * s.hidden, "staged input, e4m3 [tokens][H]"),
    Field("x_scales", "float", 4, lambda s: s.capacity * s.hidden // BLOCK, "its scales [tokens][H/128]"),
    Field("ids", "int", 4, lambda s: s.capacity * s.topk, "expert ids [tokens][k]; outside 0..E-1: no route"),
    Field("route_weights", "float", 4, lambda s: s.capacity * s.topk, "final route weights [tokens][k]"),
    Field("positions", "u32", 4, lambda s: s.capacity * s.topk, "place of a route among this rank's of its expert"),
    Field(
        "counts",
        "u64",
        8,
        lambda s: s.ranks * (s.local_experts + 1),
        "written by peers: [source][local expert, then tokens], epoch << 32 | count",
        state=True,
    ),
    Field(
        "done", "u32", 4, lambda s: MAX_RANKS, "written by peers: [owner] epoch of its last complete call", state=True
    ),
    Field(
        "finished",
        "u32",
        4,
        lambda s: s.experts,
        "written by owners: [expert] epoch of its last complete results",
        state=True,
    ),
    Field("abort", "u32", 4, lambda s: 1, "raised by any rank: every wait ends", state=True),
    Field("y", "__nv_bfloat16", 2, lambda s: s.capacity * s.topk * s.hidden, "route results [tokens][k][H]"),
)
"""Peer-visible fields, in order."""

WORKSPACE: Final = (
    Field("epoch", "u32", 4, lambda s: 1, "calls completed", state=True),
    Field(
        "barrier",
        "u32",
        4,
        lambda s: BANKS * (6 + s.local_experts),
        "[bank] counted, listed, tiles taken, stored, pieces combined, exits; stored result tiles of each local expert",
        state=True,
    ),
    Field("own_counts", "u32", 4, lambda s: BANKS * s.experts, "[bank][expert] this rank's routes", state=True),
    Field("arrived", "u32", 4, lambda s: BANKS * s.pool_tiles, "[bank][token tile] pool rows written", state=True),
    Field(
        "halves",
        "u32",
        4,
        lambda s: BANKS * s.pool_tiles,
        "[bank][token tile] stored halves of the intermediate",
        state=True,
    ),
    Field(
        "passes",
        "u32",
        4,
        lambda s: BANKS * 2 * s.max_passes,
        "[bank][first, second GEMM][pass] stored halves",
        state=True,
    ),
    Field("routes", "uint4", 16, lambda s: s.table_rows, "[row] source and first flag, route, expert"),
    Field("targets", "u32", 4, lambda s: s.pool_routes, "[source][token][slot] row"),
    Field("pool_weights", "float", 4, lambda s: s.table_rows, "[row] route weight"),
    Field("x_pool", "u8", 1, lambda s: s.pool_rows * s.hidden, "expert-major input rows of a pass [row][H]"),
    Field("x_pool_scales", "float", 4, lambda s: s.pool_rows * s.hidden // BLOCK, "their scales [H/128][row]"),
    Field("h_pool", "u8", 1, lambda s: s.pool_rows * s.intermediate, "intermediate rows of a pass [row][I]"),
    Field("h_pool_scales", "float", 4, lambda s: s.pool_rows * s.intermediate // BLOCK, "their scales [I/128][row]"),
    Field(
        "h_float",
        "float",
        4,
        lambda s: s.table_rows * s.intermediate if s.keep_intermediate else 0,
        "intermediate before requantisation [row][I]; only with a plan that keeps it",
    ),
    Field(
        "partial_sums",
        "float",
        4,
        lambda s: 2 * MAX_CTAS * HANDED_SUMS if s.ranks == 1 else 0,
        "[first, second GEMM][CTA][math thread][8] of a tile whose rest is the next CTA's",
    ),
    Field(
        "handed",
        "u32",
        4,
        lambda s: 2 * MAX_CTAS * HANDED_TAGS if s.ranks == 1 else 0,
        "written by the CTA before: [first, second GEMM][CTA][math warp] epoch of its last partial sums",
        state=True,
    ),
    Field("trace", "u64", 8, lambda s: s.trace_words, "[CTA][role][event] time stamps; only with a tracing plan"),
)
"""Local fields, in order."""


REPORT_WORDS: Final = 8
"""32-bit words of a workspace's host-visible record of an expired wait: see `Params`."""

ERROR_WORDS: Final = 2
"""32-bit words of a layer's host-visible record of bad values: see `Params`."""


def offsets(fields: tuple[Field, ...], sizes: Sizes) -> list[int]:
    """Byte offset of each field in its buffer."""
    at, result = 0, []
    for field in fields:
        result.append(at)
        at += field.nbytes(sizes)
    return result


def offset_of(fields: tuple[Field, ...], name: str, sizes: Sizes) -> int:
    """Byte offset of the field `name`. Raises StopIteration when there is none."""
    return next(at for field, at in zip(fields, offsets(fields, sizes), strict=True) if field.name == name)


def total_bytes(fields: tuple[Field, ...], sizes: Sizes) -> int:
    """Bytes of the whole buffer."""
    return sum(field.nbytes(sizes) for field in fields)


def allocation_report(sizes: Sizes) -> dict[str, int]:
    """Bytes by buffer, to be shown before anything is allocated."""
    return {"arena": total_bytes(ARENA, sizes), "workspace": total_bytes(WORKSPACE, sizes)}


class Params(ctypes.Structure):
    """Arguments of the fused kernel; the device header declares the same structure."""

    _fields_ = (
        ("arena", ctypes.c_uint64 * MAX_RANKS),
        ("arena_at", ctypes.c_uint64 * len(ARENA)),
        ("workspace", ctypes.c_uint64),
        ("workspace_at", ctypes.c_uint64 * len(WORKSPACE)),
        ("w13", ctypes.c_uint64),
        ("w13_scales", ctypes.c_uint64),
        ("w2", ctypes.c_uint64),
        ("w2_scales", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("out_stride", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("tokens", ctypes.c_uint32),
        ("wide_ids", ctypes.c_uint32),
        ("report", ctypes.c_uint64),
        ("errors", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("power_scales", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
        ("pool_rows", ctypes.c_uint32),
        ("pool_tiles", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("clamp", ctypes.c_float),
    )


_PARAM_DOCS: Final[dict[str, tuple[str, str]]] = {
    "arena": ("u8* arena[kMaxRanks]", "every rank's arena, own included"),
    "arena_at": ("u64 arena_at[{arena}]", "byte offset of each field"),
    "workspace": ("u8* workspace", ""),
    "workspace_at": ("u64 workspace_at[{workspace}]", ""),
    "w13": (
        "const u8* w13",
        "tiles of 128 gate/up rows (alternating by 8) x 128, swizzled; unused for rows",
    ),
    "w13_scales": ("const float* w13_scales", "[expert][256 rows][k-block] gate, up, gate, up"),
    "w2": ("const u8* w2", "tiles of 128 rows x 128, swizzled; unused for rows"),
    "w2_scales": ("const float* w2_scales", "[expert][256 rows][k-block] rows 0-127 twice, rows 128-255 twice"),
    "out": ("__nv_bfloat16* out", "[tokens][H]"),
    "out_stride": ("u64 out_stride", "elements from one output row to the next"),
    "num_tokens": ("const int* num_tokens", "device scalar, or null: `tokens` holds"),
    "x": (
        "const u8* x",
        "BF16 [tokens][H], 16-byte aligned, to be staged; null: rows, ids and weights are staged",
    ),
    "ids": ("const u8* ids", "[tokens][k]"),
    "weights": ("const float* weights", "[tokens][k]"),
    "wide_ids": ("u32 wide_ids", "ids are 64-bit"),
    "power_scales": ("u32 power_scales", "scales of staged rows are powers of two"),
    "report": ("u32* report", "host-visible, of all layers that share the workspace: an expired wait"),
    "errors": ("u32* errors", "host-visible, of this layer: [0] ids out of range, [1] bad token count"),
    "received": ("u64* received", "routes received per local expert, all calls of this layer"),
    "timeout_ns": ("u64 timeout_ns", "deadline of one wait"),
    "tokens": ("u32 tokens", ""),
    "capacity": ("u32 capacity", "token cap of a rank"),
    "pool_rows": ("u32 pool_rows", "rows of a pool: all that a call has, or a pass of it"),
    "pool_tiles": ("u32 pool_tiles", ""),
    "rank": ("u32 rank", ""),
    "clamp": ("float clamp", "+inf for none"),
}


def _accessor(kind: str, index: int, field: Field) -> str:
    if kind == "arena":
        head, base = f"{field.name}(const Params& p, u32 rank)", "p.arena[rank]"
    else:
        head, base = f"{field.name}(const Params& p)", "p.workspace"
    return (
        f"// {field.doc}\n"
        f"MEGAMOE_DEVICE {field.ctype}* {head} {{\n"
        f"  return reinterpret_cast<{field.ctype}*>({base} + p.{kind}_at[{index}]);\n}}\n"
    )


def device_header() -> str:
    """Text of ``kernels/arena_gen.cuh``: `Params` and one accessor per field."""
    sizes = {"arena": len(ARENA), "workspace": len(WORKSPACE)}
    lines = []
    for name, _ in Params._fields_:
        declaration, doc = _PARAM_DOCS[name]
        lines.append(f"  {declaration.format(**sizes)};" + (f"  // {doc}" if doc else ""))
    parts = [
        "// Generated by tools/generate_arena.py from cuda/arena.py: arguments and memory of the fused kernel.\n",
        '#pragma once\n#include "ptx.cuh"\n\nnamespace megamoe {\n\n',
        "using ptx::u32;\nusing ptx::u64;\nusing ptx::u8;\n\n",
        f"constexpr int kMaxRanks = {MAX_RANKS};\n",
        f"constexpr u32 kBanks = {BANKS};\n",
        f"constexpr u32 kMaxCtas = {MAX_CTAS}, kHandedTags = {HANDED_TAGS}, kHandedSums = {HANDED_SUMS};\n",
        f"constexpr u32 kRowAlignment = {ROW_ALIGNMENT};\n",
        f"constexpr u32 kTraceEvents = {TRACE_EVENTS};\n\n",
        "struct Params {\n" + "\n".join(lines) + "\n};\n\n",
        "namespace arena {\n\n",
        "\n".join(_accessor("arena", i, f) for i, f in enumerate(ARENA)),
        "\n}  // namespace arena\n\nnamespace workspace {\n\n",
        "\n".join(_accessor("workspace", i, f) for i, f in enumerate(WORKSPACE)),
        "\n}  // namespace workspace\n\n}  // namespace megamoe\n",
    ]
    return "".join(parts)
