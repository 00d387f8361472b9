"""`megamoe run`, `demo` and `bench` on real-format checkpoints: they find agreement, and they find disagreement."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import megamoe
from megamoe import reference
from megamoe.bench.models import MODELS, Model
from megamoe.cli import _show
from megamoe.cli._evaluate import LIMIT, Evaluation, RankShare, judge
from megamoe.cli._inputs import Inputs, split
from megamoe.cli.app import main
from megamoe.demo_activations import byte_tokens, layer_input
from megamoe.demo_checkpoint import make_checkpoint
from megamoe.group import LocalGroup

pytest.importorskip("transformers")

LAYER = 1
TOKENS = 61
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """The FP8 checkpoint and a file with activations of its layer."""
    root = tmp_path_factory.mktemp("tiny")
    directory = make_checkpoint("deepseek-v3", root / "deepseek-v3")
    rows = root / "rows.safetensors"
    layer_input(directory, LAYER, byte_tokens(TOKENS)).save(rows)
    return directory, rows


def run_main(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0)


def run_tiny(tiny, *words: object) -> int:
    directory, rows = tiny
    return run_main("run", "--checkpoint", directory, "--layer", LAYER, "--input", rows, "--samples", 1, *words)


@pytest.mark.parametrize("ranks", [1, 4])
def test_run_agrees_with_the_oracle_and_saves_what_it_compared(tiny, ranks, tmp_path, capsys):
    out = tmp_path / "y.safetensors"
    assert run_tiny(tiny, "--ranks", ranks, "--json", "--save", out) == 0
    document = json.loads(capsys.readouterr().out)
    seen = load_file(tiny[1])
    layer = megamoe.checkpoint(tiny[0], layer=LAYER)
    oracle = reference.forward(
        layer.spec, layer.read(), seen["activations"], seen["expert_ids"], seen["expert_weights"]
    )
    output = load_file(out)["output"]
    assert reference.relative_error(output, oracle) == pytest.approx(document["error"])
    assert document["agrees"]
    assert document["error"] <= LIMIT
    assert document["tokens"] == TOKENS == sum(share["tokens"] for share in document["ranks"])
    assert len(document["ranks"]) == ranks
    counts = torch.bincount(seen["expert_ids"].flatten(), minlength=16).tolist()
    assert [count for share in document["ranks"] for count in share["routes"]] == counts
    # FP8 activations against BF16 arithmetic: two e4m3 roundings of 2.6 % each, not more.
    assert 1e-2 < document["transformers_error"] < 6e-2


def test_run_takes_the_first_rows_of_each_rank(tiny, tmp_path, capsys):
    out = tmp_path / "y.safetensors"
    assert run_tiny(tiny, "--ranks", 2, "--tokens", 3, "--save", out) == 0
    text = capsys.readouterr().out
    assert "agrees with the oracle" in text
    assert load_file(out)["output"].shape == (6, 256)


def test_run_without_input_uses_random_rows_and_zero_tokens_are_fine(tiny, capsys):
    words = ("run", "--checkpoint", tiny[0], "--layer", LAYER, "--ranks", 2, "--samples", 1, "--json")
    assert run_main(*words, "--tokens", 0) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 0
    assert run_main(*words, "--tokens", 5) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == 10
    assert "random" in document["input"]


def test_run_quantises_bf16_experts_only_when_asked(tmp_path, capsys):
    directory = make_checkpoint("qwen3-moe", tmp_path / "qwen3-moe")
    words = ("run", "--checkpoint", directory, "--layer", 0, "--samples", 1, "--tokens", 4, "--json")
    assert run_main(*words) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "bf16"
    # The tiny model's experts are 192 wide, which 128 x 128 blocks cannot hold.
    assert run_main(*words, "--convert-to", "fp8_block") == 2
    assert json.loads(capsys.readouterr().out)["given"] == "192"


def test_run_converts_fp8_experts_to_bf16(tiny, capsys):
    assert run_tiny(tiny, "--ranks", 2, "--json", "--convert-to", "bf16") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "bf16"
    # Now the weights are those that Transformers used, and so is the arithmetic.
    assert document["transformers_error"] < 1e-2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", 3), "multiple of the number of ranks"),
        (("--ranks", 0), "greater than or equal to 1"),
        (("--backend", "tpu"), "'tpu' is not one of"),
        (("--tokens", 62), "at most 61"),
        (("--layer", 0), "1-2"),
        (("--layer", 9), "layer"),
        (("--input", "nothing.safetensors"), "cannot be read"),
        (("--input", "{rows_of_another_width}"), "[T, 256]"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
        (("--plot", "/nowhere/x.png"), "plot"),
        (("--plot", "x.docx"), ".png, .svg, .pdf"),
        (("--save", "/nowhere/y.safetensors"), "save"),
    ],
)
def test_wrong_arguments_are_named(tiny, tmp_path, words, message, capsys):
    narrow = tmp_path / "narrow.safetensors"
    save_file({"activations": torch.zeros(4, 64, dtype=torch.bfloat16)}, narrow)
    words = tuple(narrow if word == "{rows_of_another_width}" else word for word in words)
    assert run_tiny(tiny, *words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


def test_a_wrong_result_is_reported_with_exit_code_1(tiny, capsys, monkeypatch):
    call = LocalGroup.__call__

    def one_token_off(self, *arguments, **options):
        outputs = call(self, *arguments, **options)
        outputs[1][0] *= 2
        return outputs

    monkeypatch.setattr(LocalGroup, "__call__", one_token_off)
    assert run_tiny(tiny, "--ranks", 2) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


def _judged(**changes: object) -> Evaluation:
    """Four tokens, two ranks, tiny BF16 experts; what is passed replaces the right value."""
    spec = megamoe.MoESpec(hidden=8, intermediate=4, experts=4, topk=2)
    g = torch.Generator().manual_seed(0)
    weights = megamoe.ExpertWeights(
        format="bf16",
        w13=torch.randn(4, 8, 8, generator=g).bfloat16(),
        w2=torch.randn(4, 8, 4, generator=g).bfloat16(),
    )
    x = torch.randn(4, 8, generator=g).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [-1, 3], [3, 0]])
    route_weights = torch.rand(4, 2, generator=g)
    y = reference.forward(spec, weights, x, ids, route_weights)
    right = {"outputs": [y[:2], y[2:]], "received": [[2, 2], [1, 2]], "other": None}
    values = {**right, **changes}
    return judge(
        spec=spec,
        weights=weights,
        inputs=Inputs(activations=x, source="test", transformers_output=values["other"]),
        ids=ids,
        route_weights=route_weights,
        outputs=values["outputs"],
        received=values["received"],
        samples_ms=[2.0, 1.0, 4.0],
        engine="cpu",
    )


def test_judge_accepts_the_oracle_itself():
    evaluation = _judged()
    assert evaluation.agrees
    assert evaluation.error == 0
    assert [share.error for share in evaluation.shares] == [0, 0]
    assert evaluation.median_ms == 2.0
    assert evaluation.tokens_per_second == pytest.approx(2000)


def test_judge_finds_swapped_rows_nan_and_lost_or_moved_routes():
    right = _judged()
    y = right.output
    assert not _judged(outputs=[y[:2].flip(0), y[2:]]).agrees
    nan = y.clone()
    nan[0, 0] = torch.nan
    broken = _judged(outputs=[nan[:2], nan[2:]])
    assert not broken.agrees
    assert json.loads(json.dumps(broken.document(), allow_nan=False))["error"] is None
    assert _judged(received=[[2, 2], [1, 1]]).routes_lost == 1
    moved = _judged(received=[[2, 1], [2, 2]])
    assert moved.error == 0
    assert not moved.agrees
    assert _judged(other=2 * y).transformers_error == pytest.approx(0.5)


def test_picture_shows_every_token_and_every_route():
    evaluation = _judged()
    left, right = _show.figure(evaluation, "title").axes
    assert [bar.get_height() for bar in right.patches] == [2, 2, 1, 2]
    points = [line.get_ydata() for line in left.lines[:2]]
    assert [len(values) for values in points] == [2, 2]


def test_table_shows_ranks_without_tokens():
    empty = RankShare(rank=0, tokens=0, routes=[0, 0], error=0.0)
    evaluation = replace(_judged(), shares=[empty])
    console = Console(width=80, record=True, file=StringIO())
    console.print(_show.table(evaluation, "title"))
    assert "0 to 0" in console.export_text()


def test_split_is_even_and_complete():
    for rows in range(20):
        for ranks in range(1, 7):
            parts = split(rows, ranks)
            sizes = [part.stop - part.start for part in parts]
            assert max(sizes) - min(sizes) <= 1
            assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))


def test_demo_agrees_on_both_models_with_four_ranks(tmp_path, capsys):
    assert run_main("demo", "--json", "--tokens", 50, "--keep", tmp_path, "--plot", tmp_path / "demo.svg") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"]
    assert {run["format"] for run in document["runs"].values()} == {"fp8_block", "bf16"}
    for run in document["runs"].values():
        assert len(run["ranks"]) == 4
        assert run["tokens"] == 50
        assert run["routes_lost"] == 0
        assert sum(sum(share["routes"]) for share in run["ranks"]) == 50 * run["spec"]["topk"]
    assert document["runs"]["qwen3-moe"]["transformers_error"] < 1e-2
    assert (tmp_path / "demo.svg").read_text().count("<svg") == 1
    # What was kept can be run again, as the last line of the demo says.
    directory = tmp_path / "qwen3-moe"
    rows = tmp_path / "qwen3-moe-layer-1.safetensors"
    assert run_main("run", "--checkpoint", directory, "--layer", 1, "--input", rows, "--samples", 1) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", 3), "multiple of the number of ranks"),
        (("--tokens", 10**6), "bytes of LICENSE"),
        (("--text", "/nowhere"), "/nowhere"),
        (("--keep", __file__), "keep: got"),
        (("--plot", "x.docx"), ".png, .svg, .pdf"),
    ],
)
def test_demo_names_what_is_wrong(words, message, capsys):
    assert run_main("demo", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_demo_fails_when_a_result_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr("megamoe.cli._evaluate.LIMIT", -1.0)
    assert run_main("demo", "--tokens", 8, "--ranks", 2) == 1
    assert "NO" in capsys.readouterr().out.split("Agreement with the oracle")[1]


def test_bench_measures_checks_and_merges(tmp_path, capsys, monkeypatch):
    spec = megamoe.MoESpec(hidden=256, intermediate=128, experts=32, topk=4, clamp=5.0)
    monkeypatch.setitem(MODELS, "tiny", Model(name="tiny", title="a tiny layer", spec=spec))
    words = (
        "bench",
        "--model",
        "tiny",
        "--experts",
        8,
        "--samples",
        3,
        "--ranks",
        2,
        "--routing",
        "balanced",
        "--out",
        tmp_path,
    )
    assert run_main(*words, "--tokens", "1,2", "--json", "--plot", tmp_path / "bench.svg") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["tokens"], row["ranks"]) for row in document["rows"]] == [
        ("tiny", 1, 2),
        ("tiny", 2, 2),
    ]
    for row in document["rows"]:
        assert row["error"] <= LIMIT
        assert len(row["e2e_us"]["samples"]) == 3
        assert row["e2e_us"]["min"] > 0
    (file,) = tmp_path.glob("layer-*.json")
    assert [row["tokens"] for row in json.loads(file.read_text())["rows"]] == [1, 2]
    assert run_main(*words, "--tokens", "2", "--format", "bf16", "--no-check") == 0
    assert "tiny" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["tokens"], row["format"]) for row in rows] == [(1, "fp8_block"), (2, "fp8_block"), (2, "bf16")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lunch",), "layer"),
        (("--model", "gpt2"), "flash, pro"),
        (("--tokens", "1,x"), "separated by commas"),
        (("--tokens", "-1"), "separated by commas"),
        (("--routing", "fair"), "all-remote"),
        (("--routing", "all-remote"), "other ranks"),
        (("--experts", "4"), "topk"),
        (("--ranks", "5"), "multiple"),
        (("--out", __file__), "out: got"),
    ],
)
def test_bench_refuses_before_it_measures(words, message, capsys):
    assert run_main("bench", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def _torchrun(*words: object) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_under_torchrun_is_one_report_of_all_ranks(tiny):
    directory, rows = tiny
    document = json.loads(
        _torchrun("-m", "megamoe", "run", "--checkpoint", directory, "--layer", LAYER, "--input", rows, "--json")
    )
    assert document["agrees"]
    assert [share["tokens"] for share in document["ranks"]] == [30, 31]
    assert sum(sum(share["routes"]) for share in document["ranks"]) == TOKENS * 4


def test_readme_code_runs_as_printed(tiny):
    text = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "\n".join(blocks).replace('"path/to/model", layer=3', f"{str(tiny[0])!r}, layer={LAYER}")
    assert str(tiny[0]) in code
    seen = load_file(tiny[1])
    whole = (seen["activations"], seen["expert_ids"], seen["expert_weights"])
    names = dict(zip(("x", "expert_ids", "expert_weights"), whole, strict=True), group=None)
    names.update(zip(("xs", "ids", "weights"), ([t[:0], t[:20], t[20:], t[:1]] for t in whole), strict=True))
    exec(code, names)
    assert reference.relative_error(torch.cat(names["ys"][:3]), names["y"]) <= LIMIT


def test_torchrun_example_can_be_pasted(tiny):
    text = _torchrun(EXAMPLES / "torchrun_layer.py", tiny[0], LAYER)
    assert "rank 0 of 2: 0 tokens in, (0, 256) out" in text
    assert "rank 1 of 2: 16 tokens in, (16, 256) out" in text


def test_make_checkpoint_example_can_be_pasted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(tmp_path), "--tokens", "8"])
    runpy.run_path(str(EXAMPLES / "make_checkpoint.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert megamoe.checkpoint(tmp_path / "deepseek-v3", layer=1).format == "fp8_block"
    assert load_file(tmp_path / "qwen3-moe-layer-1.safetensors")["activations"].shape == (8, 256)
