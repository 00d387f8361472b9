"""Staging: quantise BF16 rows into memory that the caller gives, on the GPU.

The arithmetic is that of `megamoe.formats.fp8_block.quantize_activations`, bit for bit. No allocation, no
synchronisation, capturable.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from megamoe.cuda.driver import Driver, LaunchConfig, open_driver
from megamoe.cuda.launch import Kernel, Library, aligned, packer, raw_stream
from megamoe.cuda.toolchain import ARCHITECTURES, Compiled, Job, compile_kernel
from megamoe.errors import EngineError, InputError
from megamoe.spec import BLOCK, ScaleFormat

__all__ = [
    "HIDDEN_SIZES",
    "MAX_SHAPES",
    "PLANS",
    "Stager",
    "StagingPlan",
    "job",
    "select_plan",
    "stage",
]

SOURCE: Final = "staging.cu"

HIDDEN_SIZES: Final = (2048, 4096, 6144, 7168)
"""Widths that are compiled and checked in tests; any other multiple of 128 compiles when it is first used."""

_MAX_GROUPS: Final = 2**31 - 1

MAX_SHAPES: Final = 4096
"""Checked combinations of shapes that are remembered, so that changing ones cannot fill the memory."""


@dataclass(frozen=True, order=True)
class StagingPlan:
    """How the groups of 128 columns are dealt out: `groups` for each half warp, `threads` a block."""

    groups: int
    threads: int = 256

    @property
    def name(self) -> str:
        """Short name, as in result files."""
        return f"g{self.groups}t{self.threads}"

    def blocks(self, groups: int) -> int:
        """Blocks that cover `groups` groups."""
        return -(-groups // (self.groups * self.threads // 16))


PLANS: Final = (StagingPlan(1), StagingPlan(2), StagingPlan(4))
"""All plans, from the one with the shortest chain to the one with the most bytes in flight."""


def select_plan(rows: int, hidden: int, multiprocessors: int) -> StagingPlan:
    """The plan for `rows` rows of `hidden` columns: the first whose blocks all find an SM of their own, else the last.

    On an H200 another block on an SM costs more than another group in a warp (``benchmarks/results/staging-*``).
    """
    groups = rows * (hidden // BLOCK)
    return next((plan for plan in PLANS if plan.blocks(groups) <= multiprocessors), PLANS[-1])


def job(hidden: int, scale_format: ScaleFormat, plan: StagingPlan, arch: str = "sm_90a") -> Job:
    """What to compile for this width, scale format and plan."""
    config = {
        "kHidden": hidden,
        "kUe8m0": scale_format == "ue8m0",
        "kGroups": plan.groups,
        "kThreads": plan.threads,
    }
    return Job(SOURCE, config, arch)


class _Arguments(ctypes.Structure):
    # Layout shared with StagingArguments in kernels/staging.cu.
    _fields_ = (
        ("x", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("s", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint64),
        ("x_stride", ctypes.c_int64),
        ("q_stride", ctypes.c_int64),
        ("s_stride", ctypes.c_int64),
        ("tokens", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What follows from the tensors' metadata alone, worked out once for each combination of it."""

    kernel: Kernel
    write: Callable[..., None]
    """Writes the kernel's arguments, in the order of `_Arguments`."""
    blocks: int
    rows: int
    strides: tuple[int, int, int]
    spans: tuple[int, int, int]
    """Bytes from the first to behind the last of x, q and s."""


def _span(t: torch.Tensor) -> int:
    rows, columns = t.shape
    return ((rows - 1) * t.stride(0) + columns) * t.element_size() if rows else 0


class Stager:
    """Staging for one width and scale format on one GPU, all plans loaded.

    Args:
        hidden: columns H of a row, a multiple of 128.
        scale_format: ``"float32"`` or ``"ue8m0"`` scales, both stored as float32.
        ordinal: the GPU.
        driver: for tests; by default the real one.
        plans: which plans to load.
        dependent: launch with programmatic dependent launch: the kernel starts while its predecessor drains.

    Raises:
        InputError: H is not a positive multiple of 128, or an unknown scale format.
        EngineError: no usable driver, or a GPU without kernels.
        CompileError: the kernel does not compile.
    """

    def __init__(
        self,
        hidden: int,
        scale_format: ScaleFormat = "float32",
        ordinal: int = 0,
        *,
        driver: Driver | None = None,
        plans: tuple[StagingPlan, ...] = PLANS,
        dependent: bool = True,
    ) -> None:
        if hidden <= 0 or hidden % BLOCK:
            raise InputError(
                "hidden", str(hidden), f"a positive multiple of {BLOCK}", "Use the bf16 format for other widths."
            )
        if scale_format not in ("float32", "ue8m0"):
            raise InputError("scale_format", repr(scale_format), "'float32' or 'ue8m0'", "Use one of the two.")
        self._driver = driver if driver is not None else open_driver()
        self.hidden = hidden
        self.scale_format = scale_format
        self.device = self._driver.device(ordinal)
        if self.device.arch not in ARCHITECTURES:
            raise EngineError(
                "device", f"{self.device.name} ({self.device.arch})", " or ".join(ARCHITECTURES), "Use the CPU engine."
            )
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        self._kernels: dict[StagingPlan, tuple[Kernel, Callable[..., None]]] = {}
        for plan in plans:
            work = job(hidden, scale_format, plan, self.device.arch)
            self._load(plan, compile_kernel(work.source, work.config, work.arch), dependent)

    def _load(self, plan: StagingPlan, compiled: Compiled, dependent: bool) -> None:
        arguments = aligned(_Arguments)
        config = LaunchConfig(threads=plan.threads, dependent=dependent)
        library = Library(self._driver, compiled)
        kernel = Kernel(library, "stage", self.device.ordinal, config, [arguments])
        self._kernels[plan] = (kernel, packer(arguments))

    def __call__(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        s: torch.Tensor,
        *,
        num_tokens: torch.Tensor | None = None,
        stream: torch.cuda.Stream | int | None = None,
        plan: StagingPlan | None = None,
    ) -> None:
        """Quantise the rows of `x` into `q` and `s`.

        Args:
            x: bfloat16 ``[M, H]``; rows may be strided (a multiple of 8 elements, 16-byte aligned), columns not.
            q: e4m3 (or uint8) ``[M, H]``, written; rows may be strided (8-byte aligned).
            s: float32 ``[M, H / 128]``, written; rows may be strided.
            num_tokens: int32 scalar on the GPU; rows from there on (held in ``[0, M]``) are not written.
            stream: where to launch; by default torch's current stream of the GPU.
            plan: by default chosen from M.

        Raises:
            InputError: a tensor of a wrong dtype, shape, stride, device or alignment, or an output that overlaps `x`.
                Nothing is launched then.
        """
        key = (
            x.shape, x.stride(), x.dtype, x.device,
            q.shape, q.stride(), q.dtype, q.device,
            s.shape, s.stride(), s.dtype, s.device,
            plan,
        )  # fmt: skip
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._check(x, q, s, plan)
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = shape
        count = 0
        if num_tokens is not None:
            self._check_count(num_tokens)
            count = num_tokens.data_ptr()
        at_x, at_q, at_s = x.data_ptr(), q.data_ptr(), s.data_ptr()
        if shape.rows == 0:
            return
        end_x, end_q, end_s = at_x + shape.spans[0], at_q + shape.spans[1], at_s + shape.spans[2]
        if at_x % 16 or at_q % 8 or at_s % 4 or (at_q < end_x and at_x < end_q) or (at_s < end_x and at_x < end_s):
            self._refuse_place((at_x, end_x), (at_q, end_q), (at_s, end_s))
        where = raw_stream(stream, self.device.ordinal)
        with shape.kernel.lock:
            shape.write(at_x, at_q, at_s, count, *shape.strides, shape.rows)
            shape.kernel.launch(shape.blocks, where)

    def _check(self, x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, plan: StagingPlan | None) -> _Shape:
        h = self.hidden
        if x.dtype != torch.bfloat16:
            raise InputError("x", str(x.dtype), "torch.bfloat16", "Convert it with .bfloat16().")
        if x.dim() != 2 or x.shape[1] != h:
            raise InputError("x", f"shape {list(x.shape)}", f"[M, {h}]", "Pass rows of the layer's hidden size.")
        rows, per_row = x.shape[0], h // BLOCK
        if rows * per_row > _MAX_GROUPS:
            raise InputError("x", f"{rows} rows", f"at most {_MAX_GROUPS // per_row}", "Split the call.")
        if q.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise InputError("q", str(q.dtype), "torch.float8_e4m3fn or torch.uint8", "Allocate it so.")
        if s.dtype != torch.float32:
            raise InputError("s", str(s.dtype), "torch.float32", "Allocate it so.")
        for name, t, columns, align in (("x", x, h, 16), ("q", q, h, 8), ("s", s, per_row, 4)):
            self._check_device(name, t)
            if t.shape != (rows, columns):
                raise InputError(name, f"shape {list(t.shape)}", f"[{rows}, {columns}]", "It must match x.")
            if t.stride(1) != 1 or (rows > 1 and t.stride(0) * t.element_size() % align):
                raise InputError(
                    name,
                    f"strides {list(t.stride())}",
                    f"contiguous columns and rows a multiple of {align // t.element_size()} elements apart",
                    "Call .contiguous() on it." if name == "x" else "Allocate it so.",
                )
            if rows > 1 and name != "x" and t.stride(0) < columns:
                raise InputError(name, f"row stride {t.stride(0)}", f"at least {columns}", "Its rows overlap.")
        chosen = plan if plan is not None else select_plan(rows, h, self.device.multiprocessors)
        if chosen not in self._kernels:
            raise InputError(
                "plan", chosen.name, ", ".join(p.name for p in self._kernels), "Load it in the constructor."
            )
        strides = (2 * x.stride(0), q.stride(0), 4 * s.stride(0))
        return _Shape(
            *self._kernels[chosen], chosen.blocks(rows * per_row), rows, strides, (_span(x), _span(q), _span(s))
        )

    @staticmethod
    def _refuse_place(x: tuple[int, int], q: tuple[int, int], s: tuple[int, int]) -> None:
        for name, (start, _), align in (("x", x, 16), ("q", q, 8), ("s", s, 4)):
            if start % align:
                raise InputError(name, f"address {start:#x}", f"{align}-byte aligned", "Start it at another column.")
        name = "q" if q[0] < x[1] and x[0] < q[1] else "s"
        raise InputError(name, "memory that overlaps x", "memory of its own", "Staging does not work in place.")

    def _check_count(self, num_tokens: torch.Tensor) -> None:
        self._check_device("num_tokens", num_tokens)
        if num_tokens.dtype != torch.int32 or num_tokens.numel() != 1:
            given = f"{num_tokens.dtype} {list(num_tokens.shape)}"
            raise InputError("num_tokens", given, "one torch.int32 on the GPU", "Pass torch.tensor(n, dtype=int32).")

    def _check_device(self, name: str, t: torch.Tensor) -> None:
        wanted = self._driver.device_type
        if t.device.type != wanted or (wanted == "cuda" and t.device.index != self.device.ordinal):
            place = f"{wanted}:{self.device.ordinal}"
            raise InputError(name, f"device {t.device}", place, f"Move it with .to('{place}').")


@functools.lru_cache(maxsize=64)
def _stager(hidden: int, scale_format: ScaleFormat, ordinal: int) -> Stager:
    return Stager(hidden, scale_format, ordinal)


def stage(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor, scale_format: ScaleFormat = "float32", **how: Any) -> None:
    """Quantise `x` into `q` and `s` on the GPU they are on; see `Stager.__call__` for the arguments and errors.

    The kernels for this width are compiled and loaded at the first call, which must not be inside a graph capture.
    """
    if x.dim() != 2 or x.device.type != "cuda":
        raise InputError("x", f"{list(x.shape)} on {x.device}", "[M, H] on a CUDA device", "Use the CPU engine.")
    _stager(x.shape[1], scale_format, x.device.index)(x, q, s, **how)
