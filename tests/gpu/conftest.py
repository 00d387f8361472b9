"""Skips everything here, with a reason, on a machine that cannot run the kernels."""

from __future__ import annotations

import functools

import pytest


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why the GPU engine does not run here; None where it does."""
    from megamoe.cuda.doctor import examine

    return next(entry["why_not"] for entry in examine()["runs"] if entry["what"] == "GPU engine, one GPU")


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no usable GPU: {reason}")
