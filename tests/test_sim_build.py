"""Where the simulator's libraries are kept."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from megamoe.sim import build
from megamoe.sim.requirements import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def test_threads_agree_on_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations know a call site by its library, so every thread must find the library at the same path."""
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "kernels"))
    found: set[Path] = set()

    def look() -> None:
        for _ in range(300):
            found.add(build._directory())

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {tmp_path / "sim"}
    assert not any((tmp_path / "sim").iterdir())


def test_a_directory_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "sim"
    blocked.write_text("a file where the directory should be")
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = build._directory()
    assert found.parent == tmp_path
    assert found.is_dir()
    assert blocked.read_text() == "a file where the directory should be"
