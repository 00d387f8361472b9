"""What the doctor says about other software."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import pytest

from hosted_models import has_expert_parallel
from megamoe.integrations import deep_gemm, hosts

EXPERTS = "transformers: experts_implementation='megamoe'"
EXPERT_PARALLEL = "transformers: ep_implementation='megamoe'"
DEEP_GEMM = "deep_gemm: install()"


def why_not() -> dict[str | None, str | None]:
    return {entry["what"]: entry["why_not"] for entry in hosts.examine()}


def test_all_doors_are_open_here() -> None:
    pytest.importorskip("transformers")
    said = why_not()
    if not has_expert_parallel():
        assert said.pop(EXPERT_PARALLEL) == "this version has no EPImplementation (5.23 has)"
    assert set(said.values()) == {None}


def test_a_host_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(hosts, "version", missing)
    said = why_not()
    assert said[EXPERTS] == said[EXPERT_PARALLEL] == "transformers is not installed"


def test_a_host_with_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    expert_parallel: Any = pytest.importorskip("transformers.distributed.expert_parallel")
    if not has_expert_parallel():
        pytest.skip("Transformers before 5.23")
    monkeypatch.setattr(expert_parallel.EPImplementation, "__init__", lambda self, experts: None)
    said = why_not()
    assert said[EXPERTS] is None
    assert "takes (self, experts), not (self, experts, ep_mesh, tp_mesh)" in str(said[EXPERT_PARALLEL])


def test_a_host_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    assert str(why_not()[EXPERTS]).startswith("ModuleNotFoundError: ")


def test_a_real_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    assert "install(replace=True) would shadow it" in str(why_not()[DEEP_GEMM])
    monkeypatch.delitem(sys.modules, "deep_gemm")
    deep_gemm.install()
    try:
        assert why_not()[DEEP_GEMM] is None
    finally:
        deep_gemm.uninstall()
