"""Staging on a GPU against the codec that defines it, bit by bit."""

from __future__ import annotations

import time

import pytest
import torch

from megamoe.cuda.staging import PLANS, Stager
from megamoe.errors import InputError
from megamoe.formats.fp8_block import quantize_activations

pytestmark = pytest.mark.gpu

HIDDEN = (2048, 4096, 6144, 7168)
FORMATS = ("float32", "ue8m0")
POISON = 0xA5


class Output:
    """q and s with poisoned guard rows before and after."""

    def __init__(self, rows: int, hidden: int, extra: int = 0) -> None:
        self.rows, self.hidden = rows, hidden
        self.q_all = torch.full((rows + 2, hidden + 8 * extra), POISON, dtype=torch.uint8, device="cuda")
        self.s_all = torch.full((rows + 2, 4 * (hidden // 128 + extra)), POISON, dtype=torch.uint8, device="cuda")
        self.q = self.q_all[1:-1, :hidden]
        self.s = self.s_all.view(torch.float32)[1:-1, : hidden // 128]

    def check(self, q: torch.Tensor, s: torch.Tensor, written: int | None = None) -> None:
        """The first `written` rows are those of `q` and `s`, everything else is untouched."""
        written = self.rows if written is None else written
        want_q = torch.full_like(self.q_all, POISON, device="cpu")
        want_q[1 : 1 + written, : self.hidden] = q.view(torch.uint8)[:written]
        assert torch.equal(self.q_all.cpu(), want_q)
        want_s = torch.full_like(self.s_all, POISON, device="cpu").view(torch.float32)
        want_s[1 : 1 + written, : s.shape[1]] = s[:written]
        got_s = self.s_all.cpu().view(torch.float32)
        nan = want_s.isnan()  # which NaN is not specified
        assert torch.equal(got_s.isnan(), nan)
        bits = torch.int32
        assert torch.equal(got_s.view(bits)[~nan], want_s.view(bits)[~nan])


@pytest.fixture(scope="module")
def stagers() -> dict[tuple[int, str], Stager]:
    return {(h, f): Stager(h, f) for h in HIDDEN for f in FORMATS}


def rows_of(rows: int, hidden: int, seed: int) -> torch.Tensor:
    """Random rows whose groups have very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden // 128, 128, generator=g)
    return (x * torch.exp2(torch.randint(-40, 40, (rows, hidden // 128, 1), generator=g))).view(rows, hidden).bfloat16()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_every_small_number_of_rows(stagers: dict[tuple[int, str], Stager], hidden: int, scale_format: str) -> None:
    x = rows_of(40, hidden, seed=hidden)
    q, s = quantize_activations(x, scale_format)
    on_gpu = x.cuda()
    for rows in range(41):
        out = Output(rows, hidden)
        stagers[hidden, scale_format](on_gpu[:rows], out.q, out.s, plan=PLANS[rows % len(PLANS)])
        out.check(q, s)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_full_prefill(stagers: dict[tuple[int, str], Stager], hidden: int, scale_format: str) -> None:
    x = rows_of(8192, hidden, seed=hidden + 1)
    q, s = quantize_activations(x, scale_format)
    on_gpu = x.cuda()
    for plan in (None, *PLANS):
        out = Output(8192, hidden)
        stagers[hidden, scale_format](on_gpu, out.q, out.s, plan=plan)
        out.check(q, s)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_every_bf16_magnitude_as_the_largest_of_a_group(
    stagers: dict[tuple[int, str], Stager], scale_format: str
) -> None:
    hidden = 4096
    g = torch.Generator().manual_seed(5)
    groups = 1024 * (hidden // 128)  # 0x0000 .. 0x7fff: all finite magnitudes, Inf and every NaN
    largest = torch.arange(groups)
    bits = (torch.rand(groups, 128, generator=g) * (largest[:, None] + 1)).long().clamp(max=largest[:, None])
    bits[torch.arange(groups), torch.randint(0, 128, (groups,), generator=g)] = largest
    bits |= torch.randint(0, 2, bits.shape, generator=g) << 15
    x = bits.to(torch.uint16).view(torch.bfloat16).view(1024, hidden)
    q, s = quantize_activations(x, scale_format)
    out = Output(1024, hidden)
    stagers[hidden, scale_format](x.cuda(), out.q, out.s)
    out.check(q, s)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_nan_and_inf_stay_in_their_group(
    stagers: dict[tuple[int, str], Stager], scale_format: str, plan: object
) -> None:
    hidden = 2048
    x = rows_of(37, hidden, seed=9)
    nan, inf = float("nan"), float("inf")
    for column in range(128):  # every lane and every place in it
        x[column % 37, 128 * (column % 16) + column] = (nan, inf, -inf)[column % 3]
    x[3, 0], x[3, 1] = nan, inf
    x[4] = 0.0
    x[5] = -0.0
    x[6] = nan
    x[7] = -inf
    q, s = quantize_activations(x, scale_format)
    out = Output(37, hidden)
    stagers[hidden, scale_format](x.cuda(), out.q, out.s, plan=plan)
    out.check(q, s)


def test_strided_rows_in_and_out(stagers: dict[tuple[int, str], Stager]) -> None:
    hidden = 4096
    wide = rows_of(70, hidden + 128, seed=11)
    for view in (wide[::2, 8 : 8 + hidden], wide[:35, :hidden], wide[:1, :hidden].expand(35, hidden)):
        q, s = quantize_activations(view, "float32")
        base = wide.cuda()
        on_gpu = base.as_strided(view.shape, view.stride(), view.storage_offset())
        out = Output(35, hidden, extra=3)
        stagers[hidden, "float32"](on_gpu, out.q, out.s)
        out.check(q, s)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_a_count_on_the_device_limits_what_is_written(stagers: dict[tuple[int, str], Stager], plan: object) -> None:
    hidden, rows = 6144, 41
    x = rows_of(rows, hidden, seed=13)
    q, s = quantize_activations(x, "ue8m0")
    count = torch.zeros((), dtype=torch.int32, device="cuda")
    for n in (0, 1, 2, 7, 40, 41, 42, 2**31 - 1, -1, -(2**31)):
        count.fill_(n)
        out = Output(rows, hidden)
        stagers[hidden, "ue8m0"](x.cuda(), out.q, out.s, num_tokens=count, plan=plan)
        out.check(q, s, written=min(max(n, 0), rows))


def test_one_graph_serves_new_inputs_and_counts(stagers: dict[tuple[int, str], Stager]) -> None:
    hidden, rows = 7168, 64
    stager = stagers[hidden, "float32"]
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    count = torch.zeros((), dtype=torch.int32, device="cuda")
    out = Output(rows, hidden)
    stager(x, out.q, out.s, num_tokens=count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stager(x, out.q, out.s, num_tokens=count)
    for i in range(100):
        fresh = rows_of(rows, hidden, seed=1000 + i)
        q, s = quantize_activations(fresh, "float32")
        x.copy_(fresh)
        count.fill_(i % (rows + 1))
        out.q_all.fill_(POISON)
        out.s_all.fill_(POISON)
        graph.replay()
        out.check(q, s, written=i % (rows + 1))


def test_a_dependent_launch_waits_for_the_kernel_before_it(stagers: dict[tuple[int, str], Stager]) -> None:
    """Every call reads what the kernel right before it wrote: without the wait it would read the old rows."""
    hidden, rows = 4096, 2048
    stager = stagers[hidden, "float32"]
    sources = [rows_of(rows, hidden, seed=i).cuda() for i in range(4)]
    wanted = [quantize_activations(x.cpu()) for x in sources]
    x = torch.empty_like(sources[0])
    outs = [Output(rows, hidden) for _ in sources]
    torch.cuda.synchronize()
    for source, out in zip(sources, outs, strict=True):
        torch.mul(source, 1, out=x)
        stager(x, out.q, out.s)
    for (q, s), out in zip(wanted, outs, strict=True):
        out.check(q, s)


def test_any_stream(stagers: dict[tuple[int, str], Stager]) -> None:
    hidden, rows = 2048, 19
    x = rows_of(rows, hidden, seed=17)
    q, s = quantize_activations(x)
    on_gpu = x.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for given in (stream, stream.cuda_stream, None):
        out = Output(rows, hidden)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            stagers[hidden, "float32"](on_gpu, out.q, out.s, stream=given)
        stream.synchronize()
        out.check(q, s)


def test_a_refused_call_writes_nothing_and_leaves_it_usable(stagers: dict[tuple[int, str], Stager]) -> None:
    hidden, rows = 2048, 3
    stager = stagers[hidden, "float32"]
    x = rows_of(rows, hidden, seed=19)
    q, s = quantize_activations(x)
    out = Output(rows, hidden)
    for bad in (x, x.cuda().float(), x.cuda()[:, :1024], x.cuda()[:2]):
        with pytest.raises(InputError):
            stager(bad, out.q, out.s)
    out.check(q, s, written=0)
    stager(x.cuda(), out.q, out.s)
    out.check(q, s)
    with pytest.raises(InputError, match="multiple of 128"):
        Stager(2880)


def test_a_call_costs_little_cpu(stagers: dict[tuple[int, str], Stager]) -> None:
    hidden = 4096
    stager = stagers[hidden, "float32"]
    x, out = rows_of(8, hidden, seed=23).cuda(), Output(8, hidden)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            stager(x, out.q, out.s)
        best = min(best, (time.perf_counter() - start) / 300)
    assert best <= 15e-6
