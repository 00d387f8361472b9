"""The safetensors files of a checkpoint directory: which tensor is in which file, and memory-mapped access to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from megamoe.errors import CheckpointError

__all__ = ["INDEX_NAME", "Reader", "StoredTensor", "read_json", "weight_map"]

INDEX_NAME: Final = "model.safetensors.index.json"
_SINGLE_NAME: Final = "model.safetensors"
_MAPPED_LIMIT: Final = 16 << 20
"""Bytes that may stay mapped after they were read. Mapped pages count as resident memory, so that without a limit a
read would look (and, in a memory-limited container, behave) like two copies."""


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says about a tensor, and a way to its bytes.

    Attributes:
        label: file name and tensor name, for messages.
        dtype: safetensors' name of the dtype, such as ``"F8_E4M3"``.
        shape: as stored (logical elements; a packed ``F4`` counts two to a byte).
        view: maps the file and returns the tensor; valid until the reader lets go of the file.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    view: Callable[[], torch.Tensor]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(str(path), reason or repr(error), "a readable JSON file", "Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"a JSON {type(value).__name__}", "a JSON object", "Download it again.")
    return value


def weight_map(directory: Path) -> dict[str, str]:
    """Tensor name to file name: from the index, else from ``model.safetensors``, else from all safetensors headers.

    Raises:
        CheckpointError: `directory` is no directory or holds no safetensors, or an index or header cannot be read.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "path",
            str(directory),
            "a directory with config.json and safetensors files",
            "Pass a local directory; a model on a hub must be downloaded first.",
        )
    index = directory / INDEX_NAME
    if index.exists():
        entries = read_json(index).get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(v, str) for v in entries.values()):
            raise CheckpointError(str(index), "no 'weight_map' object", "tensor names to file names", "Repair it.")
        return entries
    single = directory / _SINGLE_NAME
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            "path",
            f"{directory} without safetensors files",
            f"{INDEX_NAME}, {_SINGLE_NAME} or *.safetensors",
            "Other formats (pytorch_model.bin, GGUF) must be converted first.",
        )
    return {name: file.name for file in files for name in _open(file).keys()}  # noqa: SIM118 (not a mapping)


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(
            str(file), "no such file", "the file that the index names", "Download the missing file."
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(file), str(error), "a complete safetensors file", "Download it again; it may be truncated."
        ) from error


class Reader:
    """Opens files when a tensor is asked for, and lets go of them when enough was read. Not shared between threads.

    Args:
        directory: of the checkpoint.
        files: from `weight_map`.
    """

    def __init__(self, directory: Path, files: Mapping[str, str]) -> None:
        self._directory = directory
        self._files = files
        self._open: dict[str, Any] = {}
        self._read = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def available(self, name: str) -> bool:
        """Whether tensor `name` is in a file that is here and can be opened."""
        try:
            self.stored(name)
        except CheckpointError:
            return False
        return True

    def label(self, name: str) -> str:
        """``file: tensor`` for messages."""
        return f"{self._files.get(name, INDEX_NAME)}: {name}"

    def stored(self, name: str) -> StoredTensor:
        """Header of tensor `name`; no data is read.

        Raises:
            CheckpointError: the tensor is in no file, or its file is missing, damaged or does not hold it.
        """
        if name not in self._files:
            raise CheckpointError(
                name, "not in the checkpoint", "a tensor of the weight index", "Download the checkpoint again."
            )
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _open(self._directory / file)
        handle = self._open[file]
        try:
            entry = handle.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                self.label(name), "not in that file", "the tensor that the index puts there", "Download the file again."
            ) from error
        return StoredTensor(
            self.label(name), str(entry.get_dtype()), tuple(entry.get_shape()), lambda: handle.get_tensor(name)
        )

    def count(self, nbytes: int) -> None:
        """Note that `nbytes` were read; drop all mappings once the limit is passed (keep no views across this)."""
        self._read += nbytes
        if self._read >= _MAPPED_LIMIT:
            self.release()

    def release(self) -> None:
        """Unmap all files; the next `stored` opens what it needs."""
        self._open.clear()
        self._read = 0
