"""Whether the installed Transformers has the doors that this integration uses: by signature, from `OLDEST` on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = ["EXPERTS", "EXPERT_PARALLEL", "OLDEST", "examine", "installed_version"]

EXPERTS: Final = "experts_implementation"
EXPERT_PARALLEL: Final = "ep_implementation"

OLDEST: Final = "5.17"
"""The oldest version that is tested. Older ones have functions of the same signatures around other modules."""

_CALL: Final = ("hidden_states", "top_k_index", "top_k_weights")


def installed_version() -> str | None:
    """Version of the installed Transformers."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def _too_old() -> str | None:
    """Why the version alone keeps the doors shut."""
    found = installed_version()
    if found is None or _release(found) >= _release(OLDEST):
        return None
    return f"it is older than {OLDEST}"


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _wants(function: Callable[..., Any], needed: tuple[str, ...]) -> str | None:
    """Why `function` is not called with exactly `needed`."""
    found = _parameters(function)
    if found[: len(needed)] == needed and len(found) == len(needed):
        return None
    return f"{getattr(function, '__qualname__', function)} takes ({', '.join(found)}), not ({', '.join(needed)})"


def _experts() -> str | None:
    moe = import_module("transformers.integrations.moe")
    fp8 = import_module("transformers.integrations.finegrained_fp8")
    for registry in (moe.ALL_EXPERTS_FUNCTIONS, fp8.ALL_FP8_EXPERTS_FUNCTIONS):
        if not callable(getattr(registry, "register", None)):
            return f"{type(registry).__name__} has no register()"
    # Functions of the host's own that are called as ours will be.
    for function in (moe.grouped_mm_experts_forward, fp8.fp8_grouped_mm_experts_forward):
        if (reason := _wants(function, ("self", *_CALL))) is not None:
            return reason
    return None


def _expert_parallel() -> str | None:
    try:
        module: Any = import_module("transformers.distributed.expert_parallel")
    except ModuleNotFoundError:
        module = None
    base = getattr(module, "EPImplementation", None)
    if base is None:
        return "this version has no EPImplementation (5.23 has)"
    if not callable(getattr(module.EPImplementationInterface, "register", None)):
        return "EPImplementationInterface has no register()"
    return _wants(base.__init__, ("self", "experts", "ep_mesh", "tp_mesh")) or _wants(base.__call__, ("self", *_CALL))


def examine() -> dict[str, str | None]:
    """Each door and why it is shut, None where it is open. Imports Transformers; never raises.

    Returns:
        ``{"experts_implementation": ..., "ep_implementation": ...}``.
    """
    doors = {}
    for door, look in ((EXPERTS, _experts), (EXPERT_PARALLEL, _expert_parallel)):
        try:
            doors[door] = _too_old() or look()
        except Exception as error:
            doors[door] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return doors
