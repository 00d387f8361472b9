"""Names of expert tensors in Hugging Face checkpoints.

Understood, each for ``<prefix>layers.<N>.<block>.experts.``, where the prefix (``model.``, none,
``model.language_model.``, ...) and the block (``mlp``, ``ffn``, ``block_sparse_moe``) may be anything:

* one tensor per expert and projection, ``<E>.{gate_proj,up_proj,down_proj}.weight`` or ``<E>.{w1,w3,w2}.weight``, with
  scales under ``.weight_scale_inv`` (DeepSeek-V3, Qwen3-MoE), ``.scale`` (DeepSeek-V4) or ``.weight_scale``;
* fused over experts, ``gate_up_proj`` and ``down_proj`` with scales under ``<name>_scale_inv`` or ``<name>_scale``
  (the module layout of Transformers 5, written by ``save_pretrained(save_original_format=False)``).

Every other tensor below ``experts.`` is refused: ignoring a bias or an input scale would be a silent wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from megamoe.errors import CheckpointError

__all__ = ["FUSED", "LayerNames", "Projection", "expert_layers", "find_layer"]

Projection = Literal["gate", "up", "down", "gate_up"]

FUSED: Final = -1
"""Expert number under which the name of a tensor that holds all experts is kept."""

_TENSOR: Final = re.compile(r"(?P<prefix>.*?)\blayers\.(?P<layer>\d+)\.(?:\w+\.)*?experts\.(?P<rest>.+)")
_PER_EXPERT: Final = re.compile(
    r"(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"\.(?P<kind>weight|weight_scale_inv|weight_scale|scale)"
)
_ALL_EXPERTS: Final = re.compile(r"(?P<projection>gate_up_proj|down_proj)(?P<kind>|_scale_inv|_scale)")
_PROJECTIONS: Final[dict[str, Projection]] = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
    "gate_up_proj": "gate_up",
}
# Multi-token-prediction and draft modules number their layers from 0 again.
_OTHER_STACKS: Final = re.compile(r"\b(mtp|nextn|eagle|draft\w*)\b")


@dataclass(frozen=True)
class LayerNames:
    """Tensor names of one layer's experts.

    Attributes:
        weights: (expert or FUSED, projection) to tensor name.
        scales: the same for scales; empty for a format without.
        fused: one tensor holds all experts.
    """

    weights: dict[tuple[int, Projection], str] = field(default_factory=dict)
    scales: dict[tuple[int, Projection], str] = field(default_factory=dict)
    fused: bool = False

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Tensors that make up one expert."""
        return ("gate_up", "down") if self.fused else ("gate", "up", "down")

    def key(self, expert: int, projection: Projection) -> tuple[int, Projection]:
        """Key of an expert's tensor in `weights` and `scales`."""
        return (FUSED if self.fused else expert, projection)


def expert_layers(names: Iterable[str]) -> tuple[int, ...]:
    """Layers that have expert tensors, ascending."""
    return tuple(sorted({int(m["layer"]) for m in map(_match, names) if m}))


def find_layer(names: Iterable[str], layer: int, experts: int) -> LayerNames:
    """Names of all expert tensors of `layer`, complete for `experts` experts.

    Raises:
        CheckpointError: a tensor is missing, surplus or of a kind that is not understood, or two stacks of layers have
            the same number.
    """
    weights: dict[tuple[int, Projection], str] = {}
    scales: dict[tuple[int, Projection], str] = {}
    prefixes: set[str] = set()
    unknown: list[str] = []
    for name in names:
        found = _match(name)
        if not found or int(found["layer"]) != layer:
            continue
        prefixes.add(found["prefix"])
        each, fused = _PER_EXPERT.fullmatch(found["rest"]), _ALL_EXPERTS.fullmatch(found["rest"])
        if each:
            key = (int(each["expert"]), _PROJECTIONS[each["projection"]])
            (weights if each["kind"] == "weight" else scales)[key] = name
        elif fused:
            key = (FUSED, _PROJECTIONS[fused["projection"]])
            (scales if fused["kind"] else weights)[key] = name
        else:
            unknown.append(name)
    if len(prefixes) > 1:
        raise CheckpointError(
            f"layer {layer}", f"experts under {sorted(prefixes)}", "one stack of layers", "Split the checkpoint."
        )
    if unknown:
        raise CheckpointError(
            f"layer {layer}",
            f"{len(unknown)} expert tensors of another kind, such as {min(unknown)!r}",
            "gate, up and down weights with block scales, no biases, no input scales, no other packing",
            "Use an FP8 128x128, MXFP4 or BF16 edition of this checkpoint.",
        )
    found_fused = any(expert == FUSED for expert, _ in weights)
    result = LayerNames(weights, scales, found_fused)
    _check_complete(result, layer, experts)
    return result


def _match(name: str) -> re.Match[str] | None:
    found = _TENSOR.fullmatch(name)
    return None if found is None or _OTHER_STACKS.search(found["prefix"]) else found


def _check_complete(found: LayerNames, layer: int, experts: int) -> None:
    numbers = [FUSED] if found.fused else range(experts)
    wanted = {(number, projection) for number in numbers for projection in found.projections}
    for kind, have in (("weight", found.weights), ("scale", found.scales)):
        if kind == "scale" and not have:
            continue
        where = f"layer {layer}"
        surplus = sorted(have[key] for key in have.keys() - wanted)
        if surplus:
            raise CheckpointError(
                where,
                f"{len(surplus)} surplus expert tensors, such as {surplus[0]!r}",
                f"{' and '.join(found.projections)} of {experts} experts, as config.json says",
                "Check that config.json belongs to these files.",
            )
        missing = [(e, p) for e in numbers for p in found.projections if (e, p) not in have]
        if missing:
            expert, projection = missing[0]
            of = "all experts" if expert == FUSED else f"expert {expert}"
            raise CheckpointError(
                where,
                f"no {projection} {kind} of {of} ({len(missing)} tensors missing)",
                f"{' and '.join(found.projections)} of {experts} experts, as config.json says",
                "Download the missing files, or check that config.json belongs to these files.",
            )
