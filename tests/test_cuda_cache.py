from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.cuda.cache import Cache, default_directory


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-W", "always", "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_is_put_is_got_by_another_process(tmp_path: Path) -> None:
    Cache(tmp_path / "a" / "b").put("key", b"payload")
    assert Cache(tmp_path / "a" / "b").get("key") == b"payload"
    assert Cache(tmp_path / "a" / "b").get("other") is None
    memory = Cache(None)
    memory.put("key", b"x")
    assert memory.get("key") == b"x"
    assert Cache(None).get("key") is None


@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=300), data=st.data())
def test_a_damaged_entry_is_absent_never_wrong(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    Cache(directory).put("key", payload)
    path = directory / "key"
    raw = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        at = data.draw(st.integers(0, len(raw) - 1))
        damaged = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    path.write_bytes(damaged)
    cache = Cache(directory)
    assert cache.get("key") is None
    assert not path.exists()
    cache.put("key", payload)
    assert Cache(directory).get("key") == payload


COMPILE = """
import hashlib, pathlib, sys
from megamoe.cuda.cache import Cache
from megamoe.cuda.toolchain import compile_kernel
got = compile_kernel("staging.cu", {"kHidden": 2048, "kUe8m0": False, "kGroups": 1, "kThreads": 256},
                     cache=Cache(pathlib.Path(sys.argv[1])))
print(hashlib.sha256(got.cubin).hexdigest())
"""


def test_eight_processes_at_once(tmp_path: Path) -> None:
    running = [python(COMPILE, tmp_path) for _ in range(8)]
    results = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0] * 8, results
    assert len({out for out, _ in results}) == 1
    assert len(list(tmp_path.iterdir())) == 1  # one entry, no temporary file left


KILLED = """
import os, pathlib, signal, sys
from megamoe.cuda.cache import Cache
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Cache(pathlib.Path(sys.argv[1])).put("key", b"half")
"""


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    killed = python(KILLED, tmp_path)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    cache = Cache(tmp_path)
    assert cache.get("key") is None
    assert left.exists()  # it could be another process at work
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    assert Cache(tmp_path).get("key") is None
    assert not left.exists()
    cache.put("key", b"whole")
    assert Cache(tmp_path).get("key") == b"whole"


FULL = """
import pathlib, resource, sys
from megamoe.cuda.cache import Cache
cache = Cache(pathlib.Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the kernel refuses to write more, as on a full disk
for key in ("one", "two"):
    cache.put(key, bytes(10000))
    assert cache.get(key) == bytes(10000)
"""


def test_a_full_disk_falls_back_to_memory_with_one_warning(tmp_path: Path) -> None:
    full = python(FULL, tmp_path)
    _, err = full.communicate(timeout=60)
    assert full.returncode == 0, err
    assert err.count("cannot write compiled kernels") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="MEGAMOE_CACHE_DIR"):
        cache.put("key", b"1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("other", b"2")
    assert (cache.get("key"), cache.get("other")) == (b"1", b"2")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("MEGAMOE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "megamoe" / "kernels"
