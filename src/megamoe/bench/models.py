"""Layer shapes that benchmarks run, one name for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from megamoe.errors import InputError
from megamoe.spec import MoESpec

__all__ = ["MODELS", "Model", "model"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A public model's routed layer.

    Attributes:
        name: key in result rows.
        title: the model's own name.
        spec: its layer as the model's configuration states it.
    """

    name: str
    title: str
    spec: MoESpec

    def scaled(self, experts: int | None = None) -> MoESpec:
        """The same layer with fewer experts, as one GPU of a larger group or a small machine holds it.

        Raises:
            SpecError: `experts` is not positive or below top-k.
        """
        return self.spec if experts is None else replace(self.spec, experts=experts)


MODELS: Final[dict[str, Model]] = {
    m.name: m
    for m in (
        Model(
            name="flash",
            title="DeepSeek-V4-Flash",
            spec=MoESpec(hidden=4096, intermediate=2048, experts=256, topk=6, clamp=10.0),
        ),
        Model(
            name="pro",
            title="DeepSeek-V4-Pro",
            spec=MoESpec(hidden=7168, intermediate=3072, experts=384, topk=6, clamp=10.0),
        ),
        Model(
            name="mimo",
            title="MiMo-V2.5-Pro",
            spec=MoESpec(hidden=6144, intermediate=2048, experts=384, topk=8),
        ),
        Model(
            name="v3",
            title="DeepSeek-V3",
            spec=MoESpec(hidden=7168, intermediate=2048, experts=256, topk=8),
        ),
        Model(
            name="qwen3",
            title="Qwen3-30B-A3B",
            spec=MoESpec(hidden=2048, intermediate=768, experts=128, topk=8),
        ),
    )
}


def model(name: str) -> Model:
    """The model called `name`.

    Raises:
        InputError: unknown name; the message lists the known ones.
    """
    if name not in MODELS:
        raise InputError("model", name, ", ".join(MODELS), "Pick one of the listed names.")
    return MODELS[name]
