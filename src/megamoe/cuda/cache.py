"""An on-disk cache of compiled kernels that several processes share without locks.

One file per key, written beside its place and renamed into it, with a checksum: a reader sees a whole entry or none, a
killed writer leaves a temporary file that a later process removes, a damaged entry is dropped and compiled again. When
the disk cannot be written (full, read-only, no permission) the cache goes on in memory and says so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
import warnings
from pathlib import Path
from typing import Final

__all__ = ["Cache", "default_directory"]

_MAGIC: Final = b"megamoe-cache-1\n"
_STALE_SECONDS: Final = 3600.0
_DIGEST_BYTES: Final = 32


def default_directory() -> Path:
    """``$MEGAMOE_CACHE_DIR``, else ``megamoe/kernels`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    chosen = os.environ.get("MEGAMOE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "megamoe" / "kernels"
    except RuntimeError:  # no home directory
        return Path("/nonexistent")


class Cache:
    """Bytes by key, in `directory` and in memory.

    Args:
        directory: where entries are kept; None keeps them in memory only. Created on the first write.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._memory: dict[str, bytes] = {}
        self._writable = directory is not None
        if directory is not None:
            self._remove_stale(directory)

    def get(self, key: str) -> bytes | None:
        """The payload stored under `key`, or None. A damaged file counts as absent and is removed."""
        if key in self._memory:
            return self._memory[key]
        if self.directory is None:
            return None
        path = self.directory / key
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        payload = raw[start:]
        if raw[: len(_MAGIC)] != _MAGIC or raw[len(_MAGIC) : start] != hashlib.sha256(payload).digest():
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self._memory[key] = payload
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store `payload`; never raises for the disk's sake. The last of several writers wins."""
        self._memory[key] = payload
        if self.directory is None or not self._writable:
            return
        temporary = self.directory / f"{key}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(_MAGIC + hashlib.sha256(payload).digest() + payload)
            temporary.replace(self.directory / key)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._writable = False
            warnings.warn(
                f"megamoe: cannot write compiled kernels to {self.directory} ({error.strerror or error}); keeping them "
                "in memory, so that every process compiles them again. Set MEGAMOE_CACHE_DIR to a writable directory.",
                RuntimeWarning,
                stacklevel=2,
            )

    @staticmethod
    def _remove_stale(directory: Path) -> None:
        # Only what a killed writer left long ago: a young temporary file may be another process at work.
        with contextlib.suppress(OSError):
            for path in directory.glob("*.tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        path.unlink()
