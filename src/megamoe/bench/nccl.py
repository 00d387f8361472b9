"""The unfused peer: dispatch and combine by all-to-all, experts by the fastest grouped GEMM that torch offers.

One process a rank. Rows go to their experts' rank once for each route, quantised where the GEMM is FP8, and BF16
results come back. Row counts are known on the host only after an exchange, so a call waits for the device twice and no
graph can hold it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from megamoe.bench import mega
from megamoe.bench.models import model
from megamoe.bench.results import Row, timing
from megamoe.bench.routing import routing
from megamoe.formats import fp8_block
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights

__all__ = ["PEERS", "UnfusedRank", "run"]

PEERS: Final = ("nccl+grouped-gemm-bf16", "nccl+grouped-gemm-fp8")
"""BF16 weights; e4m3 weights and rows with a scale for each row, which is what torch's scaled grouped GEMM takes."""

_ROW_ALIGNMENT: Final = 16


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of `rows` and a float32 scale for each."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / fp8_block.E4M3_MAX
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


class UnfusedRank:
    """One rank's experts and what a call does with them.

    Args:
        spec: the layer.
        weights: this rank's experts, FP8 blocks.
        group: the ranks, on NCCL (or gloo with CPU tensors).
        fp8: whether rows travel and multiply as e4m3.
    """

    def __init__(self, spec: MoESpec, weights: ExpertWeights, group: dist.ProcessGroup, *, fp8: bool) -> None:
        assert weights.w13_scale is not None
        assert weights.w2_scale is not None
        self.spec, self.group, self.fp8 = spec, group, fp8
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.local = weights.local_experts
        made = []
        for values, scale in ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)):
            parts = [fp8_block.dequantize_weights(v, s).bfloat16() for v, s in zip(values, scale, strict=True)]
            if fp8:
                pairs = [_quantised(part) for part in parts]
                made.append((torch.stack([q.view(torch.uint8) for q, _ in pairs]).view(torch.float8_e4m3fn),
                             torch.stack([s for _, s in pairs])))  # fmt: skip
            else:
                made.append((torch.stack(parts), torch.empty(0)))
        (self.w13, self.s13), (self.w2, self.s2) = made

    def _product(self, rows: torch.Tensor, w: torch.Tensor, s: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self.fp8:
            q, scale = _quantised(rows)
            return torch._scaled_grouped_mm(q, w.transpose(1, 2), scale, s, offs=ends, out_dtype=torch.bfloat16)
        return torch._grouped_mm(rows, w.transpose(1, 2), offs=ends)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """BF16 ``[M, H]`` of BF16 rows, int64 ids ``[M, k]`` and float32 route weights ``[M, k]``."""
        spec, topk = self.spec, ids.shape[1]
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=spec.experts)
        arriving = torch.empty_like(counts)  # [source][local expert]
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent = counts.view(self.ranks, self.local).sum(1).tolist()
        table = arriving.view(self.ranks, self.local)
        received = table.sum(1).tolist()

        def exchange(rows: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
            result = rows.new_empty((sum(into), *rows.shape[1:]))
            dist.all_to_all_single(result, rows.contiguous(), into, out, group=self.group)
            return result

        token = order // topk
        route_weights = exchange(weights.flatten()[order], sent, received)
        if self.fp8:
            q, scale = _quantised(x)
            arrived = exchange(q.view(torch.uint8)[token], sent, received).view(torch.float8_e4m3fn)
            rows = (arrived.float() * exchange(scale[token], sent, received)[:, None]).bfloat16()
        else:
            rows = exchange(x[token], sent, received)
        experts = torch.arange(self.local, device=x.device).repeat(self.ranks).repeat_interleave(table.flatten())
        by_expert = experts.argsort(stable=True)
        # A group's rows begin at a multiple of 16, as the FP8 product wants.
        per_expert = table.sum(0)
        padded = (per_expert + _ROW_ALIGNMENT - 1) // _ROW_ALIGNMENT * _ROW_ALIGNMENT
        ends = padded.cumsum(0).int()
        first = ends - padded
        within = torch.arange(len(experts), device=x.device) - (per_expert.cumsum(0) - per_expert)[experts[by_expert]]
        place = first[experts[by_expert]] + within
        pool = rows.new_zeros((len(experts) + self.local * _ROW_ALIGNMENT, spec.hidden))
        pool[place] = rows[by_expert]
        both = self._product(pool, self.w13, self.s13, ends)
        gate, up = both[:, : spec.intermediate], both[:, spec.intermediate :]
        if spec.clamp is not None:
            gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
        down = self._product(functional.silu(gate) * up, self.w2, self.s2, ends)
        results = torch.empty_like(rows)
        results[by_expert] = (down[place].float() * route_weights[by_expert][:, None]).bfloat16()
        back = exchange(results, received, sent)
        routes = torch.empty_like(back)
        routes[order] = back
        return routes.view(-1, topk, spec.hidden).float().sum(1).bfloat16()


def _process(rank: int, ranks: int, cells: Sequence[tuple[str, int, str, int]], samples: int, directory: Path) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world is not None
    found: list[Row] = []
    flush = torch.empty(mega.FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    for name, local in dict.fromkeys((cell[0], cell[1]) for cell in cells):
        spec = replace(model(name).spec, experts=local * ranks)
        weights = replace(mega.random_weights(spec, local, device, seed=rank), first_expert=rank * local)
        for peer in PEERS:
            unfused = UnfusedRank(spec, weights, world, fp8=peer.endswith("fp8"))
            for kind, tokens in [(k, m) for n, e, k, m in cells if (n, e) == (name, local)]:
                ids, route_weights = routing(kind, tokens=tokens, ranks=ranks, experts=spec.experts, topk=spec.topk)
                x = torch.randn(tokens, spec.hidden, device=device).bfloat16()
                given = (
                    x,
                    torch.from_numpy(ids[rank]).to(device).long(),
                    torch.from_numpy(route_weights[rank]).to(device),
                )
                times = _time(lambda g=given, u=unfused: u(*g), flush, samples, device)  # type: ignore[misc]
                found.append({"model": name, "ranks": ranks, "experts_per_rank": local, "topk": spec.topk,
                              "hidden": spec.hidden, "intermediate": spec.intermediate, "tokens": tokens,
                              "routing": kind, "bound": tokens, "protocol": "paced", "engine": peer,
                              "variant": "cuda", "times": times})  # fmt: skip
            del unfused
            torch.cuda.empty_cache()
    torch.save(found, directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _time(action: Callable[[], Any], flush: torch.Tensor, samples: int, device: torch.device) -> list[float]:
    """Microseconds between events around `action`, after an L2 flush and 10 ms of sleep; two more calls come first."""
    taken = []
    for number in range(samples + 2):
        flush.zero_()
        torch.cuda._sleep(mega.SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        start.record()
        action()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 2:
            taken.append(start.elapsed_time(end) * 1e3)
    return taken


def run(cells: Sequence[tuple[str, int, str, int]], ranks: int, samples: int = 20, seconds: float = 300) -> list[Row]:
    """Rows of the unfused peers, one process a GPU; the slowest rank counts in every sample.

    Args:
        cells: model, experts per rank, routing, tokens of a rank.
        ranks: GPUs.
        samples: of each cell.
        seconds: end the processes after this long.

    Raises:
        TimeoutError: they did not finish in time.
    """
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        mp: Any = torch.multiprocessing
        processes: Any = mp.spawn(_process, args=(ranks, list(cells), samples, directory), nprocs=ranks, join=False)
        deadline = time.monotonic() + seconds
        while not processes.join(timeout=2):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(f"the unfused peers did not finish in {seconds:g} s")
        by_rank = [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    rows = []
    for cell in zip(*by_rank, strict=True):
        slowest = [max(times) for times in zip(*(one["times"] for one in cell), strict=True)]
        row = {key: value for key, value in cell[0].items() if key != "times"}
        rows.append({**row, "e2e_us": timing(slowest)})
    return rows
