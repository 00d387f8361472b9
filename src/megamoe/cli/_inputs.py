"""Rows that enter the layer: from a file, or random."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from megamoe.errors import InputError

__all__ = ["Inputs", "load_inputs", "random_inputs", "split"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Rows that enter the layer.

    Attributes:
        activations: BF16 ``[T, H]``.
        source: where they come from, in words.
        transformers_output: BF16 ``[T, H]``, what Transformers computed for the same rows, if known.
    """

    activations: torch.Tensor
    source: str
    transformers_output: torch.Tensor | None = None

    def first(self, rows: int) -> Inputs:
        """The first `rows` rows.

        Raises:
            InputError: there are fewer.
        """
        have = int(self.activations.shape[0])
        if rows > have:
            raise InputError(
                "tokens", f"{rows} rows over all ranks", f"at most {have} ({self.source})", "Ask for less."
            )
        other = self.transformers_output
        return Inputs(
            activations=self.activations[:rows],
            source=self.source,
            transformers_output=None if other is None else other[:rows],
        )


def load_inputs(path: Path, hidden: int) -> Inputs:
    """Read ``activations`` (and ``experts_output``, if there) of a safetensors file.

    Raises:
        InputError: the file cannot be read, has no such tensor, or it has another dtype or width.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            rows = file.get_tensor("activations") if "activations" in names else None
            output = file.get_tensor("experts_output") if "experts_output" in names else None
    except (OSError, SafetensorError) as error:
        raise InputError("input", str(path), "a safetensors file", f"It cannot be read: {error}.") from error
    if rows is None or rows.dtype != torch.bfloat16 or rows.dim() != 2 or rows.shape[1] != hidden:
        given = f"tensors {sorted(names)}" if rows is None else f"{rows.dtype} {list(rows.shape)}"
        raise InputError(
            "input",
            f"{path} with {given}",
            f"a tensor 'activations', bfloat16 [T, {hidden}]",
            "Save the input of the layer's MoE block under that name.",
        )
    return Inputs(activations=rows, source=path.name, transformers_output=output)


def random_inputs(tokens: int, hidden: int) -> Inputs:
    """Gaussian rows of unit variance, the same for the same `tokens`."""
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, hidden, generator=generator).bfloat16()
    return Inputs(activations=rows, source="random rows of unit variance")


def split(rows: int, ranks: int) -> list[slice]:
    """`rows` cut into `ranks` consecutive parts whose sizes differ by at most one."""
    edges = [rows * rank // ranks for rank in range(ranks + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
