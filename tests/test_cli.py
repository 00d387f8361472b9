"""The command line: commands are listed, errors are one message with an exit code, help imports nothing heavy."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import __version__
from megamoe.cli import app as cli_app
from megamoe.cli._console import bars, sparkline
from megamoe.cli.app import COMMANDS, main
from megamoe.errors import DeadlineError, InputError, MegaMoEError

INPUT_ERROR = InputError("tokens", 7, "at most 4", "Ask for less.")


def run_main(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return int(stop.value.code or 0)


@pytest.fixture
def failing(monkeypatch):
    """`main` with a command line that raises the given error instead of running a command."""

    def arrange(error: Exception) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(cli_app, "app", fail)

    return arrange


def test_help_lists_every_command_and_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, megamoe.cli\n"
        "try: megamoe.cli.main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'matplotlib', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f" {name} " in done.stdout


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "megamoe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"megamoe {__version__}\n"


@pytest.mark.parametrize(("error", "code"), [(INPUT_ERROR, 2), (DeadlineError("wait", "10 s", "less"), 1)])
def test_error_is_one_message_with_an_exit_code(failing, capsys, error, code):
    failing(error)
    assert run_main("run") == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert str(error) in streams.err
    assert "Traceback" not in streams.err


def test_error_names_the_rank_under_torchrun(failing, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    failing(INPUT_ERROR)
    run_main("run")
    assert "InputError on rank 3: tokens: got 7" in capsys.readouterr().err


def test_debug_lets_the_error_out_and_bugs_are_never_hidden(failing):
    failing(INPUT_ERROR)
    with pytest.raises(InputError):
        main(["--debug", "run"])
    failing(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["run"])


def test_json_errors_are_one_document(failing, capsys):
    failing(INPUT_ERROR)
    assert run_main("run", "--json") == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": "InputError",
        "argument": "tokens",
        "given": "7",
        "allowed": "at most 4",
        "way_out": "Ask for less.",
    }


def test_unknown_command_is_a_usage_error(capsys):
    assert run_main("dance") == 2
    assert "dance" in capsys.readouterr().err


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(1, 40))
def test_histograms_lose_no_route(counts, width):
    binned = bars(counts, width)
    assert sum(binned) == sum(counts)
    assert len(binned) <= width or len(counts) <= width
    line = sparkline(binned)
    assert len(line) == len(binned)
    assert [character == " " for character in line] == [count == 0 for count in binned]
    if max(binned):
        assert line[binned.index(max(binned))] == "█"


def test_every_error_class_has_an_exit_code():
    def subclasses(cls: type) -> set[type]:
        return {cls}.union(*(subclasses(c) for c in cls.__subclasses__()))

    for cls in subclasses(MegaMoEError):
        assert cli_app._exit_code(cls("a", "b", "c")) == (2 if issubclass(cls, ValueError) else 1)
