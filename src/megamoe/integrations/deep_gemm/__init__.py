"""DeepGEMM's MegaMoE names for SM90, on megamoe layers.

    import megamoe.integrations.deep_gemm as deep_gemm

or, for code that says ``import deep_gemm``::

    import megamoe.integrations.deep_gemm
    megamoe.integrations.deep_gemm.install()

or, for a script that is not to be touched::

    python -m megamoe.integrations.deep_gemm SCRIPT [ARGUMENTS]

Works with CPU tensors and gloo groups as well, so that an integration can be tested without a GPU. Names of DeepGEMM
that are not here (its GEMMs, the SM100 kernels) are absent, so that ``hasattr`` tells the truth. See
docs/integrations/deep_gemm.md.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, Final

from megamoe.errors import EngineError
from megamoe.integrations.deep_gemm import mega, utils
from megamoe.integrations.deep_gemm.buffer import InternalViewError
from megamoe.integrations.deep_gemm.mega import (
    SM90SymmBuffer,
    SymmBuffer,
    fp8_mega_moe,
    fp8_mega_moe_cooperative,
    fp8_mega_moe_pingpong,
    fp8_mega_moe_sm90,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90,
    transform_sf_into_required_layout,
    transform_weights_for_mega_moe_sm90,
)
from megamoe.integrations.deep_gemm.utils import align, ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8

__all__ = [
    "InternalViewError",
    "SM90SymmBuffer",
    "SymmBuffer",
    "align",
    "ceil_div",
    "fp8_mega_moe",
    "fp8_mega_moe_cooperative",
    "fp8_mega_moe_pingpong",
    "fp8_mega_moe_sm90",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "install",
    "mega",
    "mega_moe_pre_dispatch_sm90",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "real_module",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe_sm90",
    "uninstall",
    "utils",
]

_PUBLIC: Final = "deep_gemm"


def _aliases() -> dict[str, Any]:
    return {
        _PUBLIC: sys.modules[__name__],
        f"{_PUBLIC}.mega": mega,
        f"{_PUBLIC}.utils": utils,
        f"{_PUBLIC}.utils.math": utils,
    }


def real_module() -> str | None:
    """Where another module is that ``import deep_gemm`` would find, or None."""
    present = sys.modules.get(_PUBLIC)
    if present is sys.modules[__name__]:
        return None
    if present is not None:
        return str(getattr(present, "__file__", None) or "in sys.modules")
    spec = find_spec(_PUBLIC)
    return None if spec is None else spec.origin or "a namespace package"


def install(*, replace: bool = False) -> None:
    """Make ``import deep_gemm`` give this module; safe to call again.

    Args:
        replace: shadow a real ``deep_gemm`` that is installed or imported. Modules that already took names from it
            keep them.

    Raises:
        EngineError: a real ``deep_gemm`` is there and `replace` is False.
    """
    real = real_module()
    if real is not None and not replace:
        raise EngineError(
            "deep_gemm",
            f"a real one: {real}",
            "no module of that name",
            "Import megamoe.integrations.deep_gemm by its own name, or call install(replace=True).",
        )
    for name in [name for name in sys.modules if name.startswith(f"{_PUBLIC}.")]:
        del sys.modules[name]
    sys.modules.update(_aliases())


def uninstall() -> None:
    """Take back `install`; a real ``deep_gemm`` that was shadowed is imported anew by the next import."""
    for name, module in _aliases().items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"megamoe's deep_gemm has no {name!r}: it has the MegaMoE calls for SM90 ({', '.join(mega.__all__)})"
    )
