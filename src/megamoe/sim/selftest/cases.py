"""Inputs, launches and expected results of the self-test kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from megamoe.cuda.driver import TensorMapSpec
from megamoe.formats.fp8_block import E4M3
from megamoe.sim.build import Kernel
from megamoe.sim.memory import Buffer, encode_tensor_map
from megamoe.sim.plans import Prepared, SimPlan
from megamoe.sim.simulation import Argument, Launch, Simulation

__all__ = ["BUGS", "gemm", "handshake", "moe", "simulated"]

HERE: Final = Path(__file__).resolve().parent

BUGS: Final[dict[str, tuple[str, ...]]] = {
    "handshake": (
        "none",
        "relaxed flag",
        "gpu scope instead of sys",
        "one buffer instead of two",
        "no barrier before the flag",
        "fence with gpu scope",
        "none: fence and relaxed flag",
        "relaxed load without a fence",
    ),
    "gemm": (
        "none",
        "no wait on the empty barrier",
        "empty count too low",
        "empty count too high",
        "accumulators read before wgmma_wait",
        "stage released before wgmma_wait",
        "no proxy fence before the TMA store",
        "none: staging reused without a read wait",
        "no barrier before the TMA store",
        "expect_tx 16 bytes short",
        "wrong first parity",
        "read wait instead of full wait before the flag",
        "relaxed flag between CTAs",
        "no syncwarp before the release of a stage",
        "no syncwarp after the acquire of a flag",
        "stage released to the own CTA only",
        "none: no final cluster barrier",
    ),
    "moe": (
        "none",
        "no proxy fence on the intermediate",
        "read wait before the peer's flag",
        "gpu scope to the peer",
    ),
}
"""Planted mistakes of each kernel, by the number that its `bug` argument takes; "none: ..." is no mistake there."""


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_uint64) for name in names)


def _ints(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int) for name in names)


_Handshake = _structure(
    "HandshakeArguments",
    *_pointers("own_flag", "peer_flag", "own_buffer", "peer_buffer", "result"),
    *_ints("rank", "rounds", "bug"),
)
_Gemm = _structure(
    "GemmArguments",
    *_pointers("a_scales", "b_scales", "out", "row_sums", "done"),
    *_ints("row_tiles", "column_tiles", "kblocks", "rows", "columns", "bug"),
)
_MoeRank = _structure("MoeRank", *_pointers("x", "x_scales", "meta", "counts", "arrived", "y", "y_done"))
_Moe = _structure(
    "MoeArguments",
    ("ranks", _MoeRank * 2),
    *_pointers("x", "x_scales", "ids", "weights", "w1_scales", "w2_scales", "h", "h_scales", "h_done", "out"),
    *_ints("rank", "bug"),
)


def _wrong(name: str, error: float, limit: float) -> str | None:
    return None if error < limit else f"{name}: relative error {error:.3g}, allowed {limit:g}"


def handshake(sim: Simulation, bug: int = 0, rounds: int = 6) -> Prepared:
    """Two ranks of one CTA, `rounds` exchanges."""
    zero = functools.partial(torch.zeros, dtype=torch.int32)
    flags = [sim.buffer("flag", zero(1), rank=r, peers=True) for r in range(2)]
    words = [sim.buffer("words", zero(256), rank=r, peers=True) for r in range(2)]
    results = [sim.buffer("result", (rounds, 4), torch.int32, rank=r) for r in range(2)]
    arguments = []
    for r in range(2):
        own = [flags[r], flags[1 - r], words[r], words[1 - r], results[r]]
        arguments.append([_Handshake(*(b.address for b in own), r, rounds, bug)])
    lane, warp = torch.arange(32), torch.arange(4)

    def check() -> str | None:
        for r in range(2):
            first = (1 - r) * 1000 + 7 * torch.arange(rounds)[:, None] + 32 * warp
            wanted = (first[:, :, None] + lane).sum(dim=2)
            if not torch.equal(results[r].tensor.long(), wanted):
                return f"rank {r} summed words of another round"
        return None

    return Prepared([Launch(Kernel.of(HERE / "handshake.cu", "handshake"), 1, 128, arguments)], check)


def _codes(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Random e4m3 bytes of small magnitude, both signs."""
    return torch.randint(0, 0x48, shape, generator=g, dtype=torch.uint8) | (
        torch.randint(0, 2, shape, generator=g, dtype=torch.uint8) << 7
    )


def _uniform(g: torch.Generator, *shape: int) -> torch.Tensor:
    return 0.5 + torch.rand(shape, generator=g)


def _map(buffer: Buffer, element: str, box: tuple[int, int]) -> bytes:
    rows, columns = buffer.tensor.shape
    pitch = columns * buffer.tensor.element_size()
    return encode_tensor_map(TensorMapSpec(buffer.address, element, (columns, rows), (pitch,), box))


def gemm(
    sim: Simulation, bug: int = 0, *, columns: int = 64, cluster: int = 1, shape: tuple[int, int, int] = (128, 256, 512)
) -> Prepared:
    """`shape` is (M, N, K); two CTAs, or two pairs."""
    m, n, k = shape
    g = torch.Generator().manual_seed(0)
    a, b = _codes(g, m, k), _codes(g, n, k)
    a_scales, b_scales = _uniform(g, k // 128, m), _uniform(g, max(1, n // 128), k // 128)
    blocks = torch.einsum("mkd,nkd->kmn", *(t.view(E4M3).double().view(-1, k // 128, 128) for t in (a, b)))
    column_scales = b_scales.repeat_interleave(128, dim=0)[:n].t()
    wanted = (blocks * a_scales[:, :, None] * column_scales[:, None, :]).sum(dim=0)

    given = {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales}
    put = {name: sim.buffer(name, t, read_only=True) for name, t in given.items()}
    out = sim.buffer("out", (m, n), torch.bfloat16)
    sums = sim.buffer("row_sums", (m,), torch.float32)
    done = sim.buffer("done", torch.zeros(m // 128, dtype=torch.int32))
    pointers = [put["a_scales"].address, put["b_scales"].address, out.address, sums.address, done.address]
    arguments: list[Argument] = [
        _map(put["a"], "uint8", (128, 128)),
        _map(put["b"], "uint8", (128, columns // cluster)),
        _map(out, "bfloat16", (64, 64)),
        _Gemm(*pointers, m // 128, n // columns, k // 128, m, n, bug),
    ]
    shared = 4 * (128 * 128 + columns * 128) + 128 * columns * 2 + 4 * 512 + 8 * 8 + 8 * 4
    kernel = Kernel.of(HERE / "gemm.cu", "selftest_gemm", {"kColumns": columns, "kCluster": cluster})

    def check() -> str | None:
        error = float((out.tensor.double() - wanted).norm() / wanted.norm())
        sum_error = float((sums.tensor.double() - wanted.sum(dim=1)).norm() / wanted.abs().sum(dim=1).norm())
        return _wrong("product", error, 3e-3) or _wrong("row sums", sum_error, 1e-3)

    return Prepared([Launch(kernel, 2 * cluster, 384, [arguments], cluster, shared)], check)


@functools.lru_cache(maxsize=1)
def _moe_inputs() -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Inputs of both ranks, and their outputs in float64 with the intermediate rounded to e4m3."""
    h, i, experts, tokens, topk = 512, 256, 8, 40, 2
    local = experts // 2
    g = torch.Generator().manual_seed(1)
    ranks = [
        {
            "x": _codes(g, tokens, h),
            "x_scales": _uniform(g, tokens, h // 128),
            "ids": torch.rand(tokens, experts, generator=g).argsort(dim=1)[:, :topk].int().contiguous(),
            "weights": _uniform(g, tokens, topk),
            "w1": _codes(g, local * 2 * i, h),
            "w2": _codes(g, local * h, i),
            "w1_scales": _uniform(g, local * 2 * i // 128, h // 128) / 8,
            "w2_scales": _uniform(g, local * h // 128, i // 128) / 20,
        }
        for _ in range(2)
    ]

    def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(E4M3).double() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)

    w1 = torch.cat([dequantised(r["w1"], r["w1_scales"]) for r in ranks]).view(experts, 2 * i, h)
    w2 = torch.cat([dequantised(r["w2"], r["w2_scales"]) for r in ranks]).view(experts, h, i)
    results = []
    for r in ranks:
        x = r["x"].view(E4M3).double() * r["x_scales"].repeat_interleave(128, 1)
        out = torch.zeros(tokens, h, dtype=torch.float64)
        for t in range(tokens):
            for slot in range(topk):
                e = int(r["ids"][t, slot])
                gate, up = (w1[e] @ x[t]).view(-1, 2, 8).unbind(dim=1)
                mid = (gate * torch.sigmoid(gate) * up).reshape(-1, 64)
                scale = mid.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 448
                mid = ((mid / scale).float().to(E4M3).double() * scale).view(-1)
                out[t] += float(r["weights"][t, slot]) * (w2[e] @ mid)
        results.append(out)
    return ranks, results


def moe(sim: Simulation, bug: int = 0, *, ctas: int = 4) -> Prepared:
    """Two ranks of `ctas` CTAs, 384 threads each."""
    h, i, local, pairs = 512, 256, 4, 80
    inputs, wanted = _moe_inputs()
    shared_fields = {
        "x": ((local * 128, h), torch.uint8),
        "x_scales": ((local * 128, h // 128), torch.float32),
        "meta": ((local * 128,), torch.int32),
        "counts": ((local, 2), torch.int32),
        "arrived": ((local,), torch.int32),
        "y": ((pairs, h), torch.bfloat16),
        "y_done": ((1,), torch.int32),
    }
    peers = [
        {
            name: sim.buffer(f"pool_{name}", shape, dtype, rank=r, peers=True, poison=0)
            for name, (shape, dtype) in shared_fields.items()
        }
        for r in range(2)
    ]
    arguments: list[list[Argument]] = []
    outs = []
    for r in range(2):
        put = {name: sim.buffer(name, t, rank=r, read_only=True) for name, t in inputs[r].items()}
        mid = sim.buffer("h", (local * 128, i), torch.uint8, rank=r, poison=0)
        mid_scales = sim.buffer("h_scales", (local * 128, i // 64), torch.float32, rank=r, poison=0)
        mid_done = sim.buffer("h_done", torch.zeros(local, dtype=torch.int32), rank=r)
        out = sim.buffer("out", (40, h), torch.bfloat16, rank=r)
        outs.append(out)
        maps = [_map(t, "uint8", (128, 128)) for t in (peers[r]["x"], put["w1"], mid, put["w2"])]
        tables = (_MoeRank * 2)(*(_MoeRank(*(b.address for b in p.values())) for p in peers))
        own = [put[f] for f in ("x", "x_scales", "ids", "weights", "w1_scales", "w2_scales")]
        addresses = [b.address for b in (*own, mid, mid_scales, mid_done, out)]
        arguments.append([b"".join(maps), _Moe(tables, *addresses, r, bug)])
    shared = 2 * 4 * 16384 + h + 9 * 8

    def check() -> str | None:
        for r in range(2):
            error = float((outs[r].tensor.double() - wanted[r]).norm() / wanted[r].norm())
            if (wrong := _wrong(f"rank {r}", error, 8e-3)) is not None:
                return wrong
        return None

    kernel = Kernel.of(HERE / "moe.cu", "selftest_moe")
    return Prepared([Launch(kernel, ctas, 384, arguments, shared=shared)], check)


def simulated() -> Iterable[SimPlan]:
    """The kernels without a planted bug."""
    yield SimPlan("selftest/handshake", handshake)
    yield SimPlan("selftest/gemm", gemm)
    yield SimPlan("selftest/gemm-pair", functools.partial(gemm, columns=128, cluster=2, shape=(512, 256, 1024)))
    yield SimPlan("selftest/moe", moe)
