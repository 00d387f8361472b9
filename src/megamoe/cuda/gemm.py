"""Host side of the standalone grouped FP8 GEMM: the fused kernel's main loop with the simplest roles around it.

Rows of all groups lie one after the other in a *pool*; each group starts at a multiple of 128 rows, and the rows
between its last and the next start are padding: whatever they hold, they reach no other row.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from megamoe.cuda.driver import LaunchConfig, TensorMapSpec, open_driver
from megamoe.cuda.launch import Kernel, Library, TensorMap, TensorMaps, aligned, raw_stream
from megamoe.cuda.toolchain import Compiled, Job, compile_kernel
from megamoe.errors import InputError
from megamoe.spec import BLOCK

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from megamoe.cuda.driver import Driver

__all__ = [
    "PLANS",
    "THREADS",
    "TILE_ROWS",
    "GemmParams",
    "GemmPlan",
    "GroupedGemm",
    "Problem",
    "fill_params",
    "grid_size",
    "group_starts",
    "job",
    "pack_row_scales",
    "pack_tile_scales",
    "problem_from",
    "tensor_maps",
    "tile_list",
]

SOURCE: Final = "gemm_sm90.cu"
TILE_ROWS: Final = 128
THREADS: Final = 384
SCALES_PER_TILE: Final = 4
"""Weight scales stored for one tile and k-block, so that they are one 16-byte copy."""
_STAGING_BYTES: Final = 8192
_MATH_WARPGROUPS: Final = 2
_SHARED_LIMIT: Final = 232448


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """One configuration of ``gemm_sm90.cu``; the fields are those of `TileConfig` in ``kernels/tile.cuh``.

    Attributes:
        columns: tile width, 256 (one accumulator used twice a k-block) or 192 (two accumulators).
        stages: depth of the operand ring.
        cluster: CTAs that share the weights of a tile, 1 or 2.
        buffers: staging buffers of 64 rows x 128 bytes for each of the two math warpgroups.
        interleaved: rows of the weights alternate 8 of gate, 8 of up, as the fused kernel's first product wants them.
        peek: test the next stage's barrier while the last product of the current stage runs.
        float32: output float32 instead of BF16, for inspection.
        clocks: record each CTA's cycles and nanoseconds.
        limit_ticks: a pipeline wait traps after so many ticks of 4.3 s.

    Raises:
        InputError: a field out of range, or more shared memory than a CTA can have.
    """

    columns: int = 256
    stages: int = 4
    cluster: int = 2
    buffers: int = 2
    interleaved: bool = False
    peek: bool = True
    float32: bool = False
    clocks: bool = False
    limit_ticks: int = 300

    def __post_init__(self) -> None:
        self._allow("columns", self.columns in (192, 256), "192 or 256")
        self._allow("stages", 2 <= self.stages <= 8, "2 to 8")
        self._allow("cluster", self.cluster in (1, 2), "1 or 2")
        pieces = self.columns // self.piece_columns
        self._allow("buffers", self.buffers > 0 and pieces % self.buffers == 0, f"a divisor of {pieces} pieces")
        self._allow("interleaved", not self.interleaved or self.columns == 256, "False for 192 columns")
        self._allow("limit_ticks", 1 <= self.limit_ticks <= 100_000, "1 to 100000")
        self._allow(
            "stages", self.shared_bytes <= _SHARED_LIMIT, f"few enough for {_SHARED_LIMIT} bytes of shared memory"
        )

    def _allow(self, field: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise InputError(f"plan.{field}", getattr(self, field), allowed, "Pick one of PLANS.")

    @property
    def piece_columns(self) -> int:
        """Columns of one store: 128 bytes."""
        return 32 if self.float32 else 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; the kernel asserts the same number."""
        stage = (TILE_ROWS + self.columns) * BLOCK + TILE_ROWS * 4 + SCALES_PER_TILE * 4 + 2 * 8
        buffer = _STAGING_BYTES + 2 * 8
        return self.stages * stage + _MATH_WARPGROUPS * self.buffers * buffer

    @property
    def name(self) -> str:
        """Key in result rows, such as ``"128x256-s4-c2"``."""
        flags = {"i": self.interleaved, "peek": self.peek, "f32": self.float32}
        return "-".join(
            [f"{TILE_ROWS}x{self.columns}", f"s{self.stages}", f"c{self.cluster}", *(f for f in flags if flags[f])]
        )

    def config(self) -> dict[str, bool | int]:
        """Constants of the compilation."""
        return {
            "kColumns": self.columns,
            "kStages": self.stages,
            "kCluster": self.cluster,
            "kBuffers": self.buffers,
            "kInterleaved": self.interleaved,
            "kPeek": self.peek,
            "kFloat32Output": self.float32,
            "kClocks": self.clocks,
            "kPipelineLimitTicks": self.limit_ticks,
            "kSharedBytes": self.shared_bytes,
        }


PLANS: Final = {
    "wide": GemmPlan(),
    "wide-s3": GemmPlan(stages=3),
    "wide-interleaved": GemmPlan(interleaved=True),
    "wide-plain": GemmPlan(peek=False),
    "wide-single": GemmPlan(cluster=1),
    "wide-f32": GemmPlan(float32=True),
    "narrow": GemmPlan(columns=192, buffers=3),
    "narrow-plain": GemmPlan(columns=192, buffers=3, peek=False),
    "narrow-single": GemmPlan(columns=192, buffers=3, cluster=1),
    "narrow-f32": GemmPlan(columns=192, buffers=3, float32=True),
}
"""Plans that are compiled and tested."""


def job(plan: GemmPlan, arch: str = "sm_90a") -> Job:
    """What to compile for `plan`; WGMMA exists on ``sm_90a`` only."""
    return Job(SOURCE, plan.config(), arch)


def group_starts(counts: Sequence[int]) -> list[int]:
    """First pool row of each group of `counts` rows, and the pool's length as the last entry."""
    starts = [0]
    for rows in counts:
        starts.append(starts[-1] + -(-rows // TILE_ROWS) * TILE_ROWS)
    return starts


def tile_list(counts: Sequence[int], n: int, plan: GemmPlan) -> npt.NDArray[np.int32]:
    """Tiles of all groups in the order in which clusters take them: row blocks fastest, then columns, then groups.

    Args:
        counts: rows of each group; 0 is allowed.
        n: columns of the output.
        plan: gives the tile width and the number of CTAs that take neighbouring row blocks.

    Returns:
        int32 ``[tiles, 2]`` as ``TileList`` in ``kernels/tile_list.cuh`` reads it.

    Raises:
        InputError: more row blocks, columns or groups than an entry can hold.
    """
    import numpy as np

    blocks = [-(-rows // TILE_ROWS) for rows in counts]
    columns = -(-n // plan.columns)
    if sum(blocks) >= 1 << 24 or columns > 1 << 12 or len(blocks) > 1 << 19:
        raise InputError(
            "counts", f"{sum(blocks)} row blocks, {columns} column tiles", "2^24 and 2^12", "Split the call."
        )
    entries: list[npt.NDArray[np.int64]] = []
    first = 0
    for group, count in enumerate(blocks):
        rows = np.arange(0, count, plan.cluster, dtype=np.int64)
        x = (first + rows) | np.minimum(plan.cluster, count - rows) << 24
        y = np.arange(columns, dtype=np.int64) | group << 12
        entries.append(np.stack([np.tile(x, columns), np.repeat(y, len(rows))], axis=1))
        first += count
    return np.concatenate(entries).astype(np.int32) if entries else np.zeros((0, 2), dtype=np.int32)


def pack_row_scales(scales: torch.Tensor) -> torch.Tensor:
    """Activation scales float32 ``[M, K/128]`` to ``[K/128, M rounded up to 128]``, zeros behind the last row."""
    m, kblocks = scales.shape
    packed = scales.new_zeros(kblocks, -(-m // TILE_ROWS) * TILE_ROWS)
    packed[:, :m] = scales.t()
    return packed


def pack_tile_scales(scales: torch.Tensor, plan: GemmPlan) -> torch.Tensor:
    """Weight scales in the order in which a tile uses them, 16 bytes for each tile and k-block.

    Args:
        scales: float32 ``[G, N/128, K/128]``, gate's blocks first where `plan` is interleaved.
        plan: tile width and order.

    Returns:
        float32 ``[G, column tiles, K/128, 4]``: of the tile's 128-column blocks (256 wide), of its 64-column groups
        (192 wide), or of its gate and its up block (interleaved); zeros past the last.
    """
    groups, blocks, kblocks = scales.shape
    if plan.interleaved:
        parts = scales.view(groups, 2, blocks // 2, kblocks).permute(0, 2, 3, 1)
    else:
        step = 128 if plan.columns == 256 else 64
        per_tile, tiles = plan.columns // step, -(-blocks * BLOCK // plan.columns)
        expanded = scales.repeat_interleave(BLOCK // step, dim=1)
        padded = scales.new_zeros(groups, tiles * per_tile, kblocks)
        padded[:, : expanded.shape[1]] = expanded
        parts = padded.view(groups, tiles, per_tile, kblocks).transpose(2, 3)
    packed = scales.new_zeros(*parts.shape[:3], SCALES_PER_TILE)
    packed[..., : parts.shape[3]] = parts
    return packed


class GemmParams(ctypes.Structure):
    """Host image of the kernel's ``GemmParams``."""

    _fields_ = (
        ("row_scales", ctypes.c_uint64),
        ("tile_scales", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("clocks", ctypes.c_uint64),
        ("tile_count", ctypes.c_int),
        ("kblocks", ctypes.c_int),
        ("row_scale_stride", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
    )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Operands of one grouped GEMM on one GPU, in the kernel's layout (`problem_from` makes them from plain scales).

    Attributes:
        a: e4m3 ``[M, K]``, the pool of all groups' rows, M at least the last of `group_starts`.
        row_scales: from `pack_row_scales`.
        b: e4m3 ``[G, N, K]``.
        tile_scales: from `pack_tile_scales` with the same plan.
        tiles: int32 from `tile_list` with the same plan, on the GPU.
        out: BF16 (or float32, see `GemmPlan`) ``[M, N]``.
    """

    a: torch.Tensor
    row_scales: torch.Tensor
    b: torch.Tensor
    tile_scales: torch.Tensor
    tiles: torch.Tensor
    out: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(rows of the pool, N, K, groups)."""
        return int(self.a.shape[0]), int(self.b.shape[1]), int(self.b.shape[2]), int(self.b.shape[0])


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise InputError(
            name, f"{tensor.dtype} {list(tensor.shape)}", f"contiguous {dtype} {list(shape)}", "Check plan and packing."
        )


@functools.lru_cache(maxsize=64)
def _compiled(plan: GemmPlan, arch: str) -> Compiled:
    wanted = job(plan, arch)
    return compile_kernel(wanted.source, wanted.config, wanted.arch)


def tensor_maps(plan: GemmPlan, problem: Problem) -> tuple[TensorMapSpec, TensorMapSpec, TensorMapSpec]:
    """The kernel's first three parameters: maps of a, b and the output."""
    m, n, k, groups = problem.shape
    element, size = ("float32", 4) if plan.float32 else ("bfloat16", 2)
    box_b = (BLOCK, plan.columns // plan.cluster, 1)
    return (
        TensorMapSpec(problem.a.data_ptr(), "uint8", (k, m), (k,), (BLOCK, TILE_ROWS)),
        TensorMapSpec(problem.b.data_ptr(), "uint8", (k, n, groups), (k, k * n), box_b),
        TensorMapSpec(problem.out.data_ptr(), element, (n, m), (n * size,), (plan.piece_columns, 64)),
    )


def fill_params(params: GemmParams, problem: Problem, clocks: torch.Tensor | None = None) -> GemmParams:
    """Write the kernel's fourth parameter; returns it."""
    p: Any = params
    p.row_scales, p.tile_scales = problem.row_scales.data_ptr(), problem.tile_scales.data_ptr()
    p.tiles, p.clocks = problem.tiles.data_ptr(), 0 if clocks is None else clocks.data_ptr()
    p.tile_count, p.kblocks = int(problem.tiles.shape[0]), int(problem.b.shape[2]) // BLOCK
    p.row_scale_stride, p.column_tiles = int(problem.row_scales.shape[1]), int(problem.tile_scales.shape[1])
    return params


def grid_size(plan: GemmPlan, problem: Problem, multiprocessors: int) -> int:
    """CTAs of a launch: one for each SM, whole clusters, and no more than there are tiles for."""
    return min(multiprocessors - multiprocessors % plan.cluster, int(problem.tiles.shape[0]) * plan.cluster)


class GroupedGemm:
    """One plan's kernel on one GPU.

    Args:
        plan: the configuration.
        ordinal: the GPU.
        driver: by default the real one.
        compiled: a compiled kernel of `plan`; by default it is compiled now, or taken from the cache.

    Raises:
        EngineError, CompileError: no driver, no compiler, or a kernel that does not fit the GPU.
    """

    def __init__(
        self, plan: GemmPlan, ordinal: int = 0, *, driver: Driver | None = None, compiled: Compiled | None = None
    ) -> None:
        self.plan = plan
        self._driver = driver if driver is not None else open_driver()
        info = self._driver.device(ordinal)
        self._grid = info.multiprocessors - info.multiprocessors % plan.cluster
        self._library = Library(self._driver, compiled or _compiled(plan, info.arch))
        self._maps = TensorMaps(self._driver)
        self._a, self._b, self._d = (aligned(TensorMap) for _ in range(3))
        self._params = aligned(GemmParams)
        config = LaunchConfig(threads=THREADS, dynamic_shared=plan.shared_bytes, cluster=plan.cluster)
        arguments: list[ctypes.Structure] = [self._a, self._b, self._d, self._params]
        self._kernel = Kernel(self._library, "grouped_gemm", ordinal, config, arguments)

    def check(self, problem: Problem, clocks: torch.Tensor | None = None) -> None:
        """Raises InputError for operands that the kernel cannot take."""
        import torch

        m, n, k, groups = problem.shape
        if k % BLOCK or not k:
            raise InputError("b", f"depth {k}", f"a multiple of {BLOCK}", "Pad it.")
        if n % BLOCK or (self.plan.interleaved and n % 256):
            raise InputError(
                "b", f"{n} rows a group", f"a multiple of {256 if self.plan.interleaved else BLOCK}", "Pad it."
            )
        tiles = -(-n // self.plan.columns)
        _expect("a", problem.a, torch.float8_e4m3fn, (m, k))
        _expect("b", problem.b, torch.float8_e4m3fn, (groups, n, k))
        _expect("row_scales", problem.row_scales, torch.float32, (k // BLOCK, -(-m // TILE_ROWS) * TILE_ROWS))
        _expect("tile_scales", problem.tile_scales, torch.float32, (groups, tiles, k // BLOCK, SCALES_PER_TILE))
        _expect("tiles", problem.tiles, torch.int32, (int(problem.tiles.shape[0]), 2))
        _expect("out", problem.out, torch.float32 if self.plan.float32 else torch.bfloat16, (m, n))
        if self.plan.clocks:
            if clocks is None:
                raise InputError("clocks", "None", f"int64 [{self._grid}, 2]", "The plan records clocks.")
            _expect("clocks", clocks, torch.int64, (self._grid, 2))

    @property
    def grid(self) -> int:
        """CTAs of a launch."""
        return self._grid

    def __call__(
        self, problem: Problem, stream: torch.cuda.Stream | int | None = None, clocks: torch.Tensor | None = None
    ) -> None:
        """Launch; see `check` for what is refused.

        Args:
            problem: operands on this kernel's GPU.
            stream: by default torch's current one.
            clocks: int64 ``[grid, 2]`` for a plan that records them.
        """
        self.check(problem, clocks)
        if problem.tiles.shape[0] == 0:
            return
        maps = tensor_maps(self.plan, problem)
        with self._kernel.lock:
            for target, spec in zip((self._a, self._b, self._d), maps, strict=True):
                target.set(self._maps.tiled(spec))
            fill_params(self._params, problem, clocks)
            grid = grid_size(self.plan, problem, self._grid)
            self._kernel.launch(grid, raw_stream(stream, self._kernel.ordinal))

    def close(self) -> None:
        """Unload the kernel; none of its launches may be running."""
        self._library.close()


def problem_from(
    plan: GemmPlan,
    counts: Sequence[int],
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
) -> Problem:
    """Kernel operands from plain ones, on the device of `a`; the output is poisoned with NaN.

    Args:
        plan: decides packing, tiles and the output's dtype.
        counts: rows of each group.
        a: e4m3 ``[M, K]``, rows of group g from ``group_starts(counts)[g]`` on.
        a_scales: float32 ``[M, K/128]``.
        b: e4m3 ``[G, N, K]``, in the plan's row order.
        b_scales: float32 ``[G, N/128, K/128]``.
    """
    import torch

    if group_starts(counts)[-1] > -(-a.shape[0] // TILE_ROWS) * TILE_ROWS or len(counts) != b.shape[0]:
        raise InputError("counts", list(counts), f"{b.shape[0]} groups in {a.shape[0]} rows", "Check the pool.")
    dtype = torch.float32 if plan.float32 else torch.bfloat16
    return Problem(
        a=a,
        row_scales=pack_row_scales(a_scales),
        b=b,
        tile_scales=pack_tile_scales(b_scales, plan),
        tiles=torch.from_numpy(tile_list(counts, int(b.shape[1]), plan)).to(a.device),
        out=torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=dtype, device=a.device),
    )
