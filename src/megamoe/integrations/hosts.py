"""What `megamoe doctor` says about the doors to other software: which are open here, and why the rest are not."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["examine"]


def examine() -> list[dict[str, str | None]]:
    """One entry for each door: ``what``, and ``why_not``, which is None where it is open.

    Looks at signatures, which imports the hosts that are installed; never raises.
    """
    return [*_transformers(), {"what": "deep_gemm: install()", "why_not": _deep_gemm()}]


def _transformers() -> list[dict[str, str | None]]:
    doors = ("experts_implementation", "ep_implementation")
    try:
        version("transformers")
    except PackageNotFoundError:
        reasons: dict[str, str | None] = dict.fromkeys(doors, "transformers is not installed")
    else:
        try:
            from megamoe.integrations.transformers import host

            reasons = host.examine()
        except Exception as error:
            reasons = dict.fromkeys(doors, f"{type(error).__name__}: {error}")
    return [{"what": f"transformers: {door}='megamoe'", "why_not": reasons[door]} for door in doors]


def _deep_gemm() -> str | None:
    try:
        from megamoe.integrations.deep_gemm import real_module

        real = real_module()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if real is None else f"the real one is at {real}; install(replace=True) would shadow it"
