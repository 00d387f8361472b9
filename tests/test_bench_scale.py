"""``megamoe bench scale`` without a GPU: what it plans, writes, resumes, prints, and that its checks find faults."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megamoe import reference
from megamoe.bench import mega, scale, scale_checks
from megamoe.bench.check import held, oracle_error
from megamoe.bench.results import layer_keys, load, timing
from megamoe.bench.scale import Budget, Record, Scale
from megamoe.bench.scale_table import PUBLIC, tables
from megamoe.cli import _scale
from megamoe.cli.app import main
from megamoe.errors import EngineError, InputError
from megamoe.group import LocalGroup
from megamoe.spec import MoESpec

ROOT = Path(__file__).parents[1]
FACTS = {"topic": "scale", "device": "GPU", "gpus": 2, "commit": "abc", "date": "2026-11-30T00:00:00+00:00"}
SPEC = MoESpec(hidden=256, intermediate=128, experts=8, topk=2, clamp=10.0)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


class Machine:
    """Stands in for GPUs: a clock that work moves, and what was asked for."""

    def __init__(self, per_sample: float = 0.02) -> None:
        self.now, self.per_sample = 0.0, per_sample
        self.asked: list[tuple[object, ...]] = []
        self.cut_after: int | None = None

    def _work(self, seconds: float, *what: object) -> None:
        if self.cut_after is not None and len(self.asked) == self.cut_after:
            raise EngineError("device", "gone", "a GPU", "")
        self.asked.append(what)
        self.now += seconds

    def benchmark(self, name, tokens, *, ranks, samples, devices, e2e, check, checked_tokens, max_tokens):
        assert checked_tokens >= ranks
        assert e2e
        assert check
        local = mega.EXPERTS_PER_RANK[name]
        spec = replace(scale.model(name).spec, experts=local * ranks)
        self.now += 5.0
        for m in tokens:
            counts = [samples(m), samples(m)]
            self._work(sum(counts) * self.per_sample, "table", name, m, counts[0])
            keys = {"routing": "random", "protocol": "paced", "engine": "megamoe"}
            figures = {"kernel_us": timing([m + 1.0] * counts[0]), "e2e_us": timing([m + 5.0] * counts[1])}
            figures |= {"floor_us": 1.0, "error": 1e-3}
            yield {**layer_keys(name, spec, ranks), "tokens": m, "bound": m, **keys, **figures}

    def correctness(self, on, kind, share, bound):
        self._work(1.0, "correctness", kind, share, bound)
        return {"error": 1e-3, "differing": 0, "counts": [], "ok": True}

    def replays(self, group, given, wanted, bound, calls):
        self._work(2.0, "replays", bound, calls)
        return {"calls": calls, "differing": 0, "ok": True}

    def soak(self, group, given, wanted, bounds, calls, on_call):
        self._work(5.0, "soak", calls)
        return {"calls": calls, "tokens_in_all": 9, "late_starts": 3, "differing": 0, "ok": True}

    def of(self, phase: str) -> list[tuple[object, ...]]:
        return [what[1:] for what in self.asked if what[0] == phase]


@pytest.fixture
def machine(monkeypatch, two_gpus):
    made = Machine()

    class Nothing:
        group = None
        devices = (torch.device("cpu"),)

        def wanted(self, *_):
            return None

    @contextmanager
    def subject(*_):
        yield Nothing()

    monkeypatch.setattr(mega, "benchmark", made.benchmark)
    monkeypatch.setattr(scale, "kernels", lambda _: [])
    monkeypatch.setattr(scale, "_used_gib", lambda _: 12.5)
    for name, stand_in in (
        ("subject", subject),
        ("pool_of", lambda *_: []),
        ("correctness", made.correctness),
        ("replays", made.replays),
        ("soak", made.soak),
    ):
        monkeypatch.setattr(scale_checks, name, stand_in)
    return made


def run(machine, plan, record):
    scale.run(plan, record, clock=lambda: machine.now)


def test_by_default_every_gpu_has_a_rank(two_gpus):
    plan = Scale.planned()
    assert (plan.backend, plan.devices, plan.ranks, plan.budget) == ("cuda", (0, 1), 2, 540.0)
    assert plan.tokens == (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert Scale.planned(devices=[1], ranks=8).ranks == 8
    assert Scale.planned(ranks=8).devices == (0, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 3}, r"ranks: got 3; allowed: a multiple of the 2 GPUs 0, 1, such as 2 or 4.*--devices"),
        ({"ranks": 16}, "ranks: got 16; allowed: at most 8"),
        ({"devices": [0, 2]}, r"devices: got \(0, 2\); allowed: different GPUs of the 2"),
        ({"devices": [1, 1]}, "devices"),
        ({"budget": 0}, "budget"),
        ({"models": ["gpt2"]}, "model: got gpt2"),
        ({"tokens": [0]}, "tokens"),
        ({"backend": "cpu", "devices": [0]}, "none on the CPU"),
    ],
)
def test_what_does_not_fit_is_refused(two_gpus, given, message):
    with pytest.raises(InputError, match=message):
        Scale.planned(**given)


def test_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    plan = Scale.planned()
    assert (plan.backend, plan.gpus, plan.models) == ("cpu", 0, ())
    with pytest.raises(InputError, match="--backend cpu"):
        Scale.planned(backend="cuda")


def test_ranks_of_a_smaller_group_have_as_many_experts_as_in_a_group_of_eight(two_gpus):
    for ranks in (1, 2, 4, 8):
        plan = Scale.planned(devices=[0], ranks=ranks)
        for name in scale.MODELS:
            assert plan.layer(name).experts == scale.model(name).spec.experts * ranks // 8


def test_everything_runs_once_in_order_and_is_written(machine, tmp_path):
    path = tmp_path / "scale.json"
    plan = Scale.planned(ranks=4, models=["flash", "pro"], tokens=[64, 8])
    record = Record(path, FACTS)
    seen = []
    scale.run(plan, record, lambda what, part: seen.append(part), clock=lambda: machine.now)
    phases = [what[0] for what in machine.asked]
    assert phases == ["correctness"] * 20 + ["table"] * 4 + ["replays"] * 2 + ["soak"]
    cases = {(kind, share) for kind, share, _ in machine.of("correctness")}
    assert {kind for kind, _ in cases} == {"random", "zipf", "hot", "all-remote"}
    assert {share for _, share in cases} == set(scale_checks.SHARES)
    assert [what[:2] for what in machine.of("table")] == [("flash", 8), ("flash", 64), ("pro", 8), ("pro", 64)]
    assert [calls for _, calls in machine.of("replays")] == [1000, 1000]
    assert machine.of("soak") == [(2000,)]
    assert all(a <= b for a, b in pairwise(seen))
    assert seen[-1] == 1.0
    document = load(path)
    assert {name: document[name] for name in FACTS} == FACTS
    stamped = [{**row, "commit": "abc", "date": FACTS["date"]} for row in record.rows]
    assert document["rows"] == stamped
    assert len(stamped) == 27
    timed = [row for row in stamped if row["phase"] == "table"]
    assert [row["experts"] for row in timed] == ["128 of 256"] * 2 + ["192 of 384"] * 2
    assert all(row["gpu_gib"] == 12.5 and len(row["kernel_us"]["samples"]) == 100 for row in timed)


@pytest.mark.parametrize("cut", [0, 7, 21, 23, 24, 26])
def test_a_run_that_is_cut_keeps_its_rows_and_is_resumed(machine, tmp_path, cut):
    path, plan = tmp_path / "scale.json", Scale.planned(models=["flash", "pro"], tokens=[8, 64])
    machine.cut_after = cut
    with pytest.raises(EngineError):
        run(machine, plan, Record(path, FACTS))
    first, machine.cut_after, machine.asked = machine.asked, None, []
    assert len(load(path)["rows"] if path.exists() else []) == cut
    record = Record(path, FACTS, resume=plan)
    assert record.resumed == cut
    run(machine, plan, record)
    assert len(first) + len(machine.asked) == len(load(path)["rows"]) == len(record.rows) == 27
    run(machine, plan, Record(path, FACTS, resume=plan))
    assert len(first) + len(machine.asked) == 27


def test_only_rows_of_the_same_run_and_commit_that_were_right_are_taken_over(machine, tmp_path):
    path, plan = tmp_path / "scale.json", Scale.planned(models=["flash"], tokens=[8])
    run(machine, plan, Record(path, FACTS))
    assert Record(path, {**FACTS, "commit": "def"}, resume=plan).resumed == 0
    assert Record(path, FACTS).resumed == 0
    assert Record(path, FACTS, resume=replace(plan, ranks=4)).resumed == 0
    document = load(path)
    document["rows"][3]["ok"] = False
    path.write_text(json.dumps(document))
    record = Record(path, FACTS, resume=plan)
    assert record.resumed == len(document["rows"]) - 1
    machine.asked = []
    run(machine, plan, record)
    assert [what[0] for what in machine.asked] == ["correctness"]


@pytest.mark.parametrize("budget", [540.0, 240.0, 10.0])
@pytest.mark.parametrize("per_sample", [0.01, 0.2])
def test_a_smaller_budget_takes_fewer_samples_of_the_same_cells(machine, budget, per_sample):
    machine.per_sample = per_sample
    run(machine, Scale.planned(budget=budget), Record(None, FACTS))
    cells = machine.of("table")
    assert [what[:2] for what in cells] == [(name, m) for name in scale.MODELS for m in scale.TOKENS]
    counts = [count for *_, count in cells]
    assert all(5 <= count <= (30 if m >= 512 else 100) for (_, m, _), count in zip(cells, counts, strict=True))
    least = 33 * 2 * 5 * per_sample + 20 + 3 * 5
    assert machine.now <= max(budget, least + 30)
    if (budget, per_sample) == (540.0, 0.01):
        assert counts == [30 if m >= 512 else 100 for _, m, _ in cells]
    if budget == 10.0:
        assert set(counts) == {5}


@given(st.floats(0.1, 2000), st.integers(1, 200), st.integers(0, 100), st.floats(1e-4, 10), st.floats(0, 100))
def test_samples_stay_between_their_limits(seconds, most, cells, measuring, other):
    budget = Budget(seconds, lambda: 0.0)
    for _ in range(3):
        assert min(5, most) <= budget.samples(most, cells) <= max(most, 5)
        budget.learn(10, measuring, other)


@given(st.sampled_from(scale_checks.SHARES), st.integers(1, 8), st.integers(1, 600))
def test_shares_are_what_they_are_called(kind, ranks, tokens):
    counts = scale_checks.shares(kind, ranks, tokens)
    assert len(counts) == ranks
    assert all(0 <= n <= tokens for n in counts)
    assert max(counts) >= tokens - 1
    if kind == "even":
        assert set(counts) == {tokens}
    elif kind == "one rank":
        assert counts[:-1] == [0] * (ranks - 1)
    elif kind == "zero-token ranks" and ranks > 1:
        assert counts.count(0) == ranks // 2
    elif kind == "uneven" and tokens >= 2 * ranks:
        assert len(set(counts)) == ranks


def test_unknown_shares_are_refused():
    with pytest.raises(InputError, match="zero-token ranks"):
        scale_checks.shares("fair", 2, 4)


@pytest.fixture(scope="module")
def pieces():
    made = [mega.random_weights(SPEC, 4, torch.device("cpu"), seed=r) for r in range(2)]
    return [replace(one, first_expert=4 * r) for r, one in enumerate(made)]


def test_only_hit_experts_are_gathered_and_the_error_is_the_oracles(pieces):
    x, ids, weights = scale_checks.pool_of(SPEC, 6, torch.device("cpu"))
    ids[1, 0] = -1
    ids[ids == 5] = 6
    wanted = reference.forward(SPEC, pieces, x, ids, weights)
    assert oracle_error(SPEC, pieces, x, ids, weights, wanted) == 0.0
    wrong = wanted.clone()
    wrong[2] = wanted[3]
    assert oracle_error(SPEC, pieces, x, ids, weights, wrong) == reference.relative_error(wrong, wanted) > 0.1
    some = held(pieces, [6, 1], torch.device("cpu"))
    assert torch.equal(some.w2[0].view(torch.uint8), pieces[1].w2[2].view(torch.uint8))
    assert torch.equal(some.w13_scale[1], pieces[0].w13_scale[1])
    nothing = torch.full_like(ids, -1)
    assert oracle_error(SPEC, pieces, x, nothing, weights, torch.zeros_like(x)) == 0.0


@pytest.fixture(scope="module")
def on():
    with scale_checks.subject(SPEC, 4, None, 8, 32, "cpu") as made:
        yield made


@pytest.fixture
def faulty(monkeypatch):
    """Makes each group call return (and write) rows of the last rank in the wrong order."""
    right = LocalGroup.__call__

    def call(self, *columns, outs=None, **how):
        got = right(self, *columns, outs=outs, **how)
        got[-1].copy_(got[-1].flip(0))
        return got

    monkeypatch.setattr(LocalGroup, "__call__", call)


@pytest.mark.parametrize(("kind", "share"), scale_checks.CASES)
def test_correct_calls_are_right(on, kind, share):
    row = scale_checks.correctness(on, kind, share, 8)
    assert row["ok"]
    assert row["error"] <= reference.LIMIT
    assert row["counts"] == scale_checks.shares(share, 4, 8)


def test_a_fault_is_found_by_the_calls_and_by_the_soak(on, faulty):
    for share in ("even", "uneven", "one rank"):
        row = scale_checks.correctness(on, "random", share, 8)
        assert not row["ok"]
        assert row["differing"] > 0
    given = scale_checks.pool_of(SPEC, 32, torch.device("cpu"))
    row = scale_checks.soak(on.group, given, on.wanted(*given), (2, 8), 12)
    assert row["calls"] == 12
    assert not row["ok"]


def test_a_fault_in_tokens_that_the_oracle_does_not_see_counts_on_the_gpu(on, monkeypatch):
    """Bits are asked of the GPU engine for all tokens, also where the error is small."""
    right = LocalGroup.__call__

    def call(self, *columns, outs=None, **how):
        got = right(self, *columns, outs=outs, **how)
        got[0][-1, 0] += 1
        return got

    monkeypatch.setattr(LocalGroup, "__call__", call)
    monkeypatch.setattr(scale_checks, "_ORACLE_TOKENS", 4)
    assert scale_checks.correctness(on, "random", "even", 8)["ok"]
    monkeypatch.setattr(scale_checks, "_exact", lambda _: True)
    row = scale_checks.correctness(on, "random", "even", 8)
    assert row["differing"] >= 1
    assert not row["ok"]


def test_measured_calls_are_checked_on_every_rank(pieces):
    cpu = torch.device("cpu")
    calls, _ = mega.random_calls(SPEC, "random", 4, [cpu, cpu])
    assert all(call.plain for call in calls)  # the fused kernel stages them, as it does a layer's calls
    for call in calls:
        call.out.copy_(reference.forward(SPEC, pieces, call.x, call.expert_ids, call.expert_weights))
    assert mega._error(SPEC, pieces, calls, 4) == 0.0
    calls[1].out[1].neg_()
    assert mega._error(SPEC, pieces, calls, 4) > 0.1
    assert mega._error(SPEC, pieces, calls, 2) == 0.0  # one token of each rank, which is right


class Rows:
    """A group whose ranks scale their rows: exact, so that one changed bit shows. `fault` changes outputs in place."""

    engine = "cuda"

    def __init__(self, fault=lambda outs: None) -> None:
        self.members = [self, self]
        self.device = torch.device("cpu")
        self.calls, self.fault, self.bounds = [], fault, set()

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(self.members)

    def warmup(self, bound):
        self.bounds.add(bound)

    def check(self):
        pass

    @staticmethod
    def one(x, ids, weights):
        return (x * weights.sum(1, keepdim=True)).bfloat16()

    def __call__(self, xs, ids, weights, *, outs=None, bound):
        assert bound in self.bounds
        assert all(len(x) <= bound for x in xs)
        self.calls.append((xs, ids, weights, outs, bound))
        outs = [torch.empty_like(x) for x in xs] if outs is None else outs
        for out, *rows in zip(outs, xs, ids, weights, strict=True):
            out.copy_(self.one(*rows))
        self.fault(outs)
        return outs


def flip_a_bit(outs):
    if len(outs[1]):
        outs[1].view(torch.int16)[-1, 3] ^= 1


@pytest.fixture
def pool():
    given = scale_checks.pool_of(SPEC, 32, torch.device("cpu"))
    return given, Rows.one(*given)


def test_a_soak_finds_one_bit(pool):
    given, wanted = pool
    row = scale_checks.soak(Rows(), given, wanted, (2, 8), 40)
    assert row["ok"]
    assert row["differing"] == 0
    assert row["calls"] == 40
    group = Rows(flip_a_bit)
    row = scale_checks.soak(group, given, wanted, (2, 8), 40)
    assert not row["ok"]
    assert row["differing"] == sum(len(xs[1]) > 0 for xs, *_ in group.calls)
    assert {len(x) for xs, *_ in group.calls for x in xs} >= {0, 1, 2, 8}


@pytest.mark.parametrize(
    ("replayed", "ok"),
    [
        (lambda group: group(*group.calls[1][:3], outs=group.calls[1][3], bound=8), True),
        (lambda group: None, False),  # a graph that writes nothing
    ],
    ids=["right", "empty"],
)
@pytest.mark.parametrize("fault", [None, flip_a_bit])
def test_replays_are_compared_bit_by_bit(pool, monkeypatch, replayed, ok, fault):
    """With a stand-in for CUDA graphs, which makes the captured call again."""
    group = Rows() if fault is None else Rows(fault)

    class Graph:
        def replay(self):
            replayed(group)

    @contextmanager
    def nothing(*_, **__):
        yield

    for name, stand_in in (("CUDAGraph", Graph), ("graph", nothing), ("device", nothing)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    row = scale_checks.replays(group, *pool, 8, 12)
    assert row["calls"] == 12
    assert row["ok"] is (ok and fault is None)
    if ok and fault is not None:
        assert row["differing"] == 12
    if not ok:
        assert row["differing"] == 12 * 2 * 8 * SPEC.hidden


def run_main(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0)


COMMAND = ("bench", "scale", "--backend", "cpu", "--ranks", 2)


def test_the_whole_command_on_the_cpu_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # which the command sets where nobody did
    assert run_main(*COMMAND, "--out", tmp_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("scale-cpu-*.json")
    assert [row["phase"] for row in load(path)["rows"]] == ["correctness"] * 20 + ["soak"]
    assert len(document["rows"]) == 21
    assert all(row["ok"] for row in document["rows"])
    assert {"device", "driver", "nvrtc", "commit", "date", "protocol"} <= document.keys()
    assert run_main(*COMMAND, "--out", tmp_path, "--resume") == 0
    shown = capsys.readouterr().out
    assert "20 of 20 right" in " ".join(shown.split())
    assert "21 rows of it from before" in " ".join(shown.split())


def test_a_wrong_result_is_exit_code_1(tmp_path, capsys, monkeypatch, faulty):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(scale, "_SOAK", {"cpu": 2})
    assert run_main(*COMMAND, "--out", tmp_path) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "scale", "--routing", "hot"), "--routing: got with scale"),
        (("bench", "layer", "--budget", "9"), "--budget: got with layer"),
        (("bench", "speed"), "layer, gemm, conformance, scale"),
    ],
)
def test_options_of_other_topics_are_refused(words, message, capsys):
    assert run_main(*words) == 2
    assert message in capsys.readouterr().err


def recorded(machine, gpus: int, ranks: int, models=("flash", "mimo"), tokens=(8, 64)) -> dict[str, object]:
    record = Record(None, FACTS)
    plan = replace(Scale.planned(models=models, tokens=tokens), ranks=ranks, devices=tuple(range(gpus)))
    run(machine, plan, record)
    return {**FACTS, "gpus": gpus, "rows": record.rows}


def test_tables_show_what_is_recorded_beside_the_public_figures(machine):
    shown = dict(tables(recorded(machine, 8, 8)))
    flash, mimo, checks = shown
    assert flash == "flash, 32 experts a rank (256 of 256), 8 ranks on 8 GPUs, random routing"
    assert "| M | 8 | 64 |" in shown[flash]
    assert "| kernel | 9 | 65 |" in shown[flash]
    public, unfused = PUBLIC
    assert f"| {public}, 8 GPUs | {PUBLIC[public]['flash'][8]} | {PUBLIC[public]['flash'][64]} |" in shown[flash]
    assert f"| {unfused}, 8 GPUs | 348 |  |" in shown[flash]
    assert "public" not in shown[mimo]
    assert "20 of 20 right" in shown[checks]
    assert "2,000 calls, 3 with a late rank" in shown[checks]


def test_the_terminal_shows_times_by_tokens_and_marks_what_is_wrong(machine):
    document = recorded(machine, 2, 4)
    document["rows"][21]["ok"] = False  # the second cell
    plan = Scale.planned(ranks=4)
    console = Console(width=120, file=StringIO())
    console.print(_scale._shown(plan, FACTS, document["rows"]))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[:2] == ["GPU, 4 ranks on 2 GPUs", "Kernel, call in us"]
    assert "M flash 4 x 32 mimo 4 x 48" in lines
    assert "8 9, 13 9, 13" in lines
    assert "64 65, 69 WRONG 65, 69" in lines
    assert any(line.startswith("graph, 512 tokens") and line.endswith("ok") for line in lines)


def test_ranks_that_share_a_gpu_do_not_stand_beside_public_figures(machine):
    for gpus, ranks, where in ((1, 8, "8 ranks on 1 GPU"), (2, 8, "8 ranks on 2 GPUs")):
        shown = dict(tables(recorded(machine, gpus, ranks)))
        assert all(where in title for title in shown)
        assert not any("public" in table for table in shown.values())


def test_a_cut_run_has_only_its_own_tables(machine):
    document = recorded(machine, 8, 8)
    cut = {**document, "rows": document["rows"][:5]}
    assert [title for title, _ in tables(cut)] == ["Checks, 8 ranks on 8 GPUs"]
    assert list(tables({**document, "rows": []})) == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("scale-*.json")), ids=lambda p: p.stem)
def test_the_documentation_shows_the_record(path):
    text = (ROOT / "docs" / "tuning.md").read_text()
    for title, table in tables(load(path)):
        assert title in text
        assert table in text


def test_the_kernels_compiled_up_front_are_those_that_calls_use(two_gpus, monkeypatch, pieces):
    from engine_sim import world
    from megamoe.cuda import memory
    from megamoe.cuda.engine import CudaEngine
    from megamoe.cuda.toolchain import Job

    plan = Scale.planned(ranks=2, models=["qwen3"], tokens=[8, 2048])
    small = (SPEC, (2, 4096))  # of the second one's calls, some need passes
    monkeypatch.setattr(Scale, "checked", property(lambda _: ("small", *small)))
    monkeypatch.setattr(mega, "DEADLINE", 2.0)  # as every engine of `world` has it: it is part of a kernel
    with world() as w:
        ready = scale.kernels(plan)
        used = []

        def compiled(source, config, arch, **_):
            used.append(Job(source, config, arch))
            raise EngineError("kernel", "asked for", "nothing more", "")

        monkeypatch.setattr(memory, "compile_kernel", compiled)
        layer: CudaEngine = w.engine(SPEC, ranks=2, devices=(0, 1), max_tokens=4096)
        layer.load([replace(one, first_expert=4 * r) for r, one in enumerate(pieces)])
        for bound in small[1]:
            with pytest.raises(EngineError, match="asked for"):
                layer.warmup(bound)
        assert [one.config["kPasses"] for one in used] == [False, True]
        assert all(one in ready for one in used)
        assert all(ready.count(one) == 1 for one in ready)
