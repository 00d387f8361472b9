"""The measuring harness: routings are what their names say, result files keep every sample and merge by key."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.bench.models import MODELS, model
from megamoe.bench.results import KEYS, key, load, merge, result_path, timing, write
from megamoe.bench.routing import ROUTINGS, routing
from megamoe.bench.timing import alternate
from megamoe.errors import InputError, SpecError

FACTS = {"topic": "layer", "device": "cpu", "commit": "abc", "date": "2026-01-01T00:00:00+00:00"}
PUBLISHED_IDS = [[[13, 12, 3, 14], [15, 13, 3, 7]], [[1, 0, 15, 12], [0, 2, 13, 3]]]
PUBLISHED_WEIGHTS = [0.13383359, 0.19658542, 0.35239616, 0.31718484]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(ROUTINGS),
    tokens=st.integers(0, 40),
    ranks=st.integers(1, 5),
    local=st.integers(1, 7),
    topk=st.integers(1, 8),
)
def test_routes_are_in_range_distinct_and_normalised(kind, tokens, ranks, local, topk):
    experts = ranks * local
    available = experts - local if kind == "all-remote" else experts
    if topk > available:
        with pytest.raises(InputError):
            routing(kind, tokens=tokens, ranks=ranks, experts=experts, topk=topk)
        return
    ids, weights = routing(kind, tokens=tokens, ranks=ranks, experts=experts, topk=topk)
    assert ids.shape == weights.shape == (ranks, tokens, topk)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    assert ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == topk for row in ids.reshape(-1, topk).tolist())
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    assert (weights > 0).all()
    counts = np.bincount(ids.ravel(), minlength=experts)
    if kind == "balanced":
        assert counts.max() - counts.min() <= 1
    elif kind == "hot":
        assert counts.max() == ranks * tokens
    elif kind == "all-remote":
        owner = ids // local
        assert (owner != np.arange(ranks)[:, None, None]).all()


def test_zipf_draws_follow_their_weights():
    """First draws without replacement are plain draws, so their frequencies are proportional to 1 / (e + 1)."""
    ids, _ = routing("zipf", tokens=20000, ranks=1, experts=8, topk=1)
    share = np.sort(np.bincount(ids.ravel(), minlength=8))[::-1] / 20000
    expected = 1 / np.arange(1, 9)
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.015)


def test_random_routing_is_uniform():
    ids, _ = routing("random", tokens=8000, ranks=2, experts=16, topk=4)
    share = np.bincount(ids.ravel(), minlength=16) / (2 * 8000)
    np.testing.assert_allclose(share, 4 / 16, atol=0.015)


def test_routing_is_a_published_array():
    """These ids are part of every published measurement: a change here makes old and new results incomparable."""
    ids, weights = routing("random", tokens=2, ranks=2, experts=16, topk=4)
    assert ids.tolist() == PUBLISHED_IDS
    np.testing.assert_allclose(weights[0, 0], PUBLISHED_WEIGHTS, rtol=1e-6)


def test_unknown_routing_and_model_are_refused_with_the_list():
    with pytest.raises(InputError, match="all-remote"):
        routing("fair", tokens=1, ranks=1, experts=4, topk=1)
    with pytest.raises(InputError, match="flash, pro, mimo, v3, qwen3"):
        model("gpt2")
    with pytest.raises(SpecError, match="topk"):
        model("flash").scaled(experts=4)


def test_scaling_changes_the_experts_only():
    full, small = MODELS["flash"].spec, model("flash").scaled(experts=8)
    assert (small.hidden, small.intermediate, small.topk, small.clamp) == (
        full.hidden,
        full.intermediate,
        full.topk,
        full.clamp,
    )
    assert small.experts == 8
    assert model("flash").scaled() == full


def test_timing_keeps_every_sample():
    assert timing([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "samples": [3.0, 1.0, 2.0]}
    with pytest.raises(InputError):
        timing([])


rows = st.lists(
    st.fixed_dictionaries({"model": st.sampled_from("ab"), "tokens": st.integers(1, 3), "kernel_us": st.integers()}),
    max_size=8,
)


@given(old=rows, new=rows)
def test_merge_replaces_equal_keys_and_keeps_the_rest(old, new):
    merged = merge(old, new)
    keys = [key(row) for row in merged]
    assert len(keys) == len(set(keys))
    assert set(keys) == {key(row) for row in old + new}
    last = {key(row): row for row in old + new}
    assert all(row == last[key(row)] for row in merged)


def test_every_key_separates_rows():
    base = dict.fromkeys(KEYS, 0)
    assert all(key({**base, name: 1}) != key(base) for name in KEYS)
    assert key({**base, "kernel_us": 5, "error": 1.0}) == key(base)


def test_rows_of_a_cell_replace_those_of_other_plans(tmp_path):
    path, facts = tmp_path / "layer.json", {"topic": "layer", "commit": "a", "date": "b"}
    first = {"model": "m", "tokens": 1, "plan": "auto:x", "figure": 1}
    other = {"model": "m", "tokens": 2, "plan": "auto:x", "figure": 2}
    stage = {"model": "m", "tokens": 1, "phase": "down", "plan": "x", "figure": 3}
    write(path, facts, [first, other, stage])
    new = [{**first, "plan": plan, "figure": 4} for plan in ("auto:y", "z")]
    rows = write(path, facts, new, cell=("model", "tokens", "phase"))["rows"]
    assert [(r["plan"], r["figure"]) for r in rows] == [("auto:x", 2), ("x", 3), ("auto:y", 4), ("z", 4)]


def test_written_file_is_the_document_and_rows_carry_their_own_commit(tmp_path):
    path = result_path(tmp_path / "results", "layer", "cpu-2c")
    assert path.name == "layer-cpu-2c.json"
    assert result_path(tmp_path, "layer", "h200", gpus=2).name == "layer-h200-x2.json"
    one = {"model": "flash", "tokens": 1, "e2e_us": timing([1.0])}
    two = {"model": "flash", "tokens": 2, "e2e_us": timing([2.0])}
    write(path, FACTS, [one, two])
    newer = {**two, "e2e_us": timing([1.5])}
    document = write(path, {**FACTS, "commit": "def"}, [newer])
    assert load(path) == document == json.loads(path.read_text())
    assert document["commit"] == "def"
    assert [(row["tokens"], row["commit"], row["e2e_us"]["median"]) for row in document["rows"]] == [
        (1, "abc", 1.0),
        (2, "def", 1.5),
    ]
    assert [f.name for f in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_a_damaged_result_file_is_refused_and_not_overwritten(tmp_path):
    path = tmp_path / "layer-cpu.json"
    path.write_text("{half")
    with pytest.raises(InputError, match="result file"):
        write(path, FACTS, [{"model": "flash"}])
    assert path.read_text() == "{half"


def test_alternate_swaps_the_order_and_counts_samples():
    calls: list[str] = []
    times = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, samples=3, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 3, "b": 3}
    few = alternate({"a": lambda: None}, samples=1000, seconds=0.0)
    assert len(few["a"]) == 3
    with pytest.raises(InputError):
        alternate({}, samples=1)
