"""What may run at the same time on one GPU: the table of docs/gpu.md, row by row, and a layer beside other kernels."""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path

import pytest
import torch
from fused_cases import SMALL, make_input, make_weights

from megamoe import MegaMoE, local_group
from megamoe.cuda.driver import LaunchConfig, Libcuda, open_driver
from megamoe.cuda.launch import Kernel, Library, aligned
from megamoe.cuda.toolchain import compile_kernel
from megamoe.errors import EngineError

pytestmark = pytest.mark.gpu

PROBE = Path(__file__).parent / "coexist_probe.cu"
DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"
LIMIT_NS = 2_000_000_000
"""Deadline of every wait in the probes."""
WHOLE_SM = 200 << 10
"""Dynamic shared memory of a probe's block: neither another one nor a block of the fused kernel fits beside it."""
BOUND = 64
RESERVE = 12


class Arguments(ctypes.Structure):
    _fields_ = (
        ("flag", ctypes.c_uint64),
        ("outcome", ctypes.c_uint64),
        ("limit_ns", ctypes.c_uint64),
        ("wanted", ctypes.c_uint32),
    )


def documented(question: str) -> str:
    """The answer that docs/gpu.md gives in its table; a remark in parentheses at its end is no part of it."""
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and cells[0] == question:
            return re.sub(r"\s*\([^)]*\)$", "", cells[1])
    raise AssertionError(f"docs/gpu.md has no row {question!r}")


def settle(question: str, seen: str) -> None:
    """Print the row as it was seen, and hold the document to it."""
    print(f"\n| {question} | {seen} |")
    assert seen == documented(question)


@pytest.fixture(scope="module")
def driver() -> Libcuda:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    return open_driver()


@pytest.fixture(scope="module")
def library(driver: Libcuda) -> Library:
    return Library(driver, compile_kernel(PROBE, arch=driver.device(torch.cuda.current_device()).arch))


@pytest.fixture(scope="module")
def weights():
    return make_weights(SMALL, "cuda")


def sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


class Probe:
    """One kernel of the probes with arguments of its own, of which each block fills an SM."""

    def __init__(self, library: Library, name: str, blocks: int, **attributes: bool) -> None:
        self.blocks = blocks
        self.outcome = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        self.arguments = aligned(Arguments)
        self.arguments.outcome, self.arguments.limit_ns = self.outcome.data_ptr(), LIMIT_NS
        config = LaunchConfig(threads=32, dynamic_shared=WHOLE_SM, **attributes)
        self.kernel = Kernel(library, name, torch.cuda.current_device(), config, [self.arguments])
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # what it works on is there before any stream starts

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        self.kernel.launch(self.blocks, (stream or self.stream).cuda_stream)

    def came(self) -> bool:
        """Whether no block's deadline passed."""
        assert bool((self.outcome > 0).all()), "a block left no outcome"
        return bool((self.outcome == 1).all())


def side_by_side(probes: list[Probe]) -> str:
    """Launch each probe, which waits for the blocks of all, into its own stream."""
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for probe in probes:
        probe.arguments.flag = flag.data_ptr()
        probe.arguments.wanted = sum(p.blocks for p in probes)
    torch.cuda.synchronize()
    for probe in probes:
        probe.launch()
    torch.cuda.synchronize()
    return together(probes)


def together(probes: list[Probe]) -> str:
    met = [probe.came() for probe in probes]
    return "side by side" if all(met) else "one after the other"


@pytest.mark.parametrize(
    ("question", "kinds"),
    [
        ("two ordinary kernels on two streams, half of the SMs each", [{}, {}]),
        ("a cooperative and an ordinary kernel on two streams, half of the SMs each", [{"cooperative": True}, {}]),
        ("two cooperative kernels on two streams, half of the SMs each", [{"cooperative": True}] * 2),
        ("four cooperative kernels on four streams, a quarter of the SMs each", [{"cooperative": True}] * 4),
    ],
    ids=["ordinary", "mixed", "two-cooperative", "four-cooperative"],
)
def test_kernels_of_several_streams(library, question, kinds):
    settle(question, side_by_side([Probe(library, "meet", sms() // len(kinds), **kind) for kind in kinds]))


@pytest.mark.parametrize(
    ("question", "attributes"),
    [
        ("a kernel launched as dependent", {"dependent": True}),
        ("a kernel launched as dependent and cooperative", {"dependent": True, "cooperative": True}),
        ("a cooperative kernel, not dependent", {"cooperative": True}),
    ],
    ids=["dependent", "both", "cooperative"],
)
def test_dependent_and_cooperative_on_one_launch(library, question, attributes):
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    half = sms() // 2
    one, two = Probe(library, "first", half), Probe(library, "second", half, **attributes)
    for probe in (one, two):
        probe.arguments.flag, probe.arguments.wanted = flag.data_ptr(), 1
    torch.cuda.synchronize()
    one.launch()
    try:
        two.launch(one.stream)
    except EngineError as error:
        torch.cuda.synchronize()
        settle(question, f"refused with {error.given}")
        return
    torch.cuda.synchronize()
    assert two.came()
    settle(question, "starts before the kernel in front of it ends" if one.came() else "starts when that one has ended")


@pytest.mark.parametrize("cooperative", [1, 2])
def test_dependent_chains_beside_cooperative_kernels(library, cooperative):
    """Two streams with a short kernel and one that depends on it; each of the latter meets the cooperative kernels."""
    quarter = sms() // 4
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    dependents = [Probe(library, "meet", quarter, dependent=True) for _ in range(2)]
    others = [Probe(library, "meet", quarter, cooperative=True) for _ in range(cooperative)]
    probes = [*dependents, *others]
    for probe in probes:
        probe.arguments.flag, probe.arguments.wanted = flag.data_ptr(), sum(p.blocks for p in probes)
    before = [Probe(library, "pause", quarter) for _ in dependents]
    for probe in before:
        probe.arguments.limit_ns = 2_000_000  # still there when the others are launched
    torch.cuda.synchronize()
    for probe, dependent in zip(before, dependents, strict=True):
        probe.launch(dependent.stream)
    for probe in probes:
        probe.launch()
    torch.cuda.synchronize()
    assert all(probe.came() for probe in before)
    names = {1: "a cooperative kernel", 2: "two cooperative kernels"}
    settle(
        f"two streams of dependent kernels beside {names[cooperative]}, a quarter of the SMs each",
        together(probes),
    )


class Holder:
    """A kernel that holds SMs until it is told to stop, or for two seconds."""

    def __init__(self, library: Library, blocks: int) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._probe = Probe(library, "hold", blocks)
        self._probe.arguments.flag, self._probe.arguments.wanted = self._flag.data_ptr(), 1
        self._ended = torch.cuda.Event()

    def __enter__(self) -> Holder:
        self._probe.launch()
        self._ended.record(self._probe.stream)
        time.sleep(0.01)  # its blocks are on their SMs before what follows asks for any
        return self

    @property
    def holds(self) -> bool:
        return not self._ended.query()

    def stop(self) -> None:
        self._flag.fill_(1)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ended.synchronize()


def ends_within(event: torch.cuda.Event, seconds: float) -> bool:
    end = time.perf_counter() + seconds
    while not event.query() and time.perf_counter() < end:
        time.sleep(0.001)
    return event.query()


class Group:
    """Ranks on this GPU that leave SMs to others, their inputs, and the bits that they give by themselves."""

    def __init__(self, weights, ranks: int) -> None:
        self.group = local_group(SMALL, ranks=ranks, max_tokens=BOUND, deadline=5.0, sm_reserve=RESERVE)
        self.group.load(weights)
        given = make_input(SMALL, 24 * ranks, "cuda")
        self.columns = [[t[24 * r : 24 * (r + 1)].clone() for r in range(ranks)] for t in given]
        self.want = torch.cat(self.group(*self.columns))
        self.group.check()
        self.outs = [torch.empty_like(x) for x in self.columns[0]]
        # Nothing is loaded for the first time later: that can wait for kernels that run.
        self.call()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.group(*self.columns, outs=self.outs)
        self.replay()
        torch.cuda.synchronize()
        assert self.right()

    def replay(self) -> torch.cuda.Event:
        """Poison the outputs and replay the call."""
        for out in self.outs:
            out.fill_(float("nan"))
        self.graph.replay()
        ended = torch.cuda.Event()
        ended.record()
        return ended

    def call(self) -> torch.cuda.Event:
        """Poison the outputs and call; what the end of that is."""
        for out in self.outs:
            out.fill_(float("nan"))
        self.group(*self.columns, outs=self.outs)
        ended = torch.cuda.Event()
        ended.record()
        return ended

    def right(self) -> bool:
        return torch.equal(torch.cat(self.outs), self.want)


@pytest.fixture(params=[1, 2, 4], ids=["1-rank", "2-ranks", "4-ranks"])
def group(request, weights):
    made = Group(weights, request.param)
    with made.group:
        yield made


def test_calls_end_while_another_stream_holds_the_reserve(library, group):
    with Holder(library, RESERVE) as holder:
        for action in (group.call, group.replay):
            for _ in range(5):
                assert ends_within(action(), 1.0), "the call waits for an SM that it does not need"
            assert holder.holds, "the calls took longer than the deadline of the kernel beside them"
            assert group.right()
    group.group.check()
    print(f"\ncalls and replays ended while a kernel held the {RESERVE} reserved SMs")


def test_a_call_waits_for_sms_that_another_stream_holds(library, group):
    with Holder(library, 3 * RESERVE) as holder:
        ended = group.call()
        early = ends_within(ended, 0.3)
        assert holder.holds
        holder.stop()
        assert ends_within(ended, 1.0)
    assert group.right()
    group.group.check()
    assert not early, "the kernel beside it did not hold SMs that the call needs"
    print(f"\na call waited while a kernel held {3 * RESERVE} SMs of which {RESERVE} are reserved, then ended right")


@pytest.mark.parametrize("cooperative", [False, True], ids=["ordinary", "cooperative"])
def test_many_calls_beside_many_kernels(library, weights, cooperative):
    """A layer's dependent launches beside a stream that is never without a kernel on the reserve."""
    given = make_input(SMALL, 24, "cuda")
    beside = Probe(library, "pause", RESERVE, cooperative=cooperative)
    beside.arguments.limit_ns = 50_000
    with MegaMoE(SMALL, max_tokens=BOUND, deadline=5.0, sm_reserve=RESERVE) as layer:
        layer.load(weights)
        want = layer(*given)
        layer.check()
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        bad = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for number in range(600):
            beside.launch()
            own = number // 3 % len(streams)
            with torch.cuda.stream(streams[own]):
                bad[own] += (layer(*given).view(torch.int16) != want.view(torch.int16)).sum()
        layer.check()
        assert bad.tolist() == [0] * len(streams)
    kind = "cooperative" if cooperative else "ordinary"
    print(f"\n600 calls beside 600 {kind} kernels on the {RESERVE} reserved SMs: every bit right")
