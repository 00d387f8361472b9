"""Arrival counts of the kernels' mbarriers, recomputed: what a header states, and what warps do in a simulated run.

A wrong count is a hang, or a wait that ends too early. Three statements must agree: the constants in a header, the
table of pipelines in the comment at the head of a file, and who arrives in each phase of a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megamoe.cuda.sources import KERNELS
from megamoe.sim.plans import Runner, find

__all__ = ["FUSED", "GEMM", "Pipelines", "breaches", "constants", "observed", "table", "warps"]

_CONSTANT: Final = re.compile(r"constexpr u32 (k\w+Arrivals) = ([^;]+);")
_ROW: Final = re.compile(r"^//\s+(\w+)(?:\[\w+\])+\s+\S.*?->.*?\s(k\w+Arrivals)\b", re.M)
_WARPS: Final = re.compile(r"^//\s+warps? (\d+)(?:\s*(-|,|and)\s*(\d+))?(?:, lane 0)?\s+(\w+)", re.M)


@dataclass(frozen=True)
class Pipelines:
    """One kernel's pipelines.

    Attributes:
        table: file whose comment has the table of pipelines.
        counts: file with the constants.
        arrive: barrier -> who arrives in a phase (role -> arrivals), from warps of each role and CTAs of a cluster.
    """

    table: str
    counts: str
    arrive: Mapping[str, Callable[[Mapping[str, int], int], dict[str, int]]]


_WARPGROUP: Final = 4
_COMMON: Final[dict[str, Callable[[Mapping[str, int], int], dict[str, int]]]] = {
    "full": lambda warps, cluster: {"loader": 1},
    "empty": lambda warps, cluster: {"math": warps["math"] * cluster},
    "staged": lambda warps, cluster: {"math": _WARPGROUP},
    "free": lambda warps, cluster: {"store": 1},
}
_GEMM_ROLES: Final = {"loader": 1, "store": 2, "math": 2 * _WARPGROUP}
GEMM: Final = Pipelines("tile.cuh", "tile.cuh", _COMMON)
"""The grouped GEMM."""

FUSED: Final = Pipelines(
    "mega_sm90.cu",
    "layout.cuh",
    {
        **_COMMON,
        "pulled": lambda warps, cluster: {"dispatch": 1},
        "tile": lambda warps, cluster: {"loader": 1},
        "taken": lambda warps, cluster: {"math": warps["math"], "store": warps["store"]},
    },
)
"""The fused kernel."""


def _value(expression: str, names: Mapping[str, int]) -> int:
    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return names[node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = walk(node.left), walk(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError(f"an arrival count that is not a sum of products: {expression}")

    return walk(ast.parse(expression, mode="eval").body)


def constants(text: str, *, cluster: int = 1) -> dict[str, int]:
    """The arrival counts that a header states, by name."""
    names = {"kMathWarpgroups": 2, "Cluster": cluster}
    return {name: _value(expression, names) for name, expression in _CONSTANT.findall(text)}


def table(text: str) -> dict[str, str]:
    """The rows of a file's table of pipelines: barrier -> name of its arrival count."""
    return dict(_ROW.findall(text))


def warps(text: str) -> dict[str, int]:
    """Warps of each role, from the list of roles in the same comment."""
    found: dict[str, int] = {}
    for first, joint, last, role in _WARPS.findall(text):
        found[role] = found.get(role, 0) + (int(last) - int(first) + 1 if joint == "-" else 2 if joint else 1)
    return found


def observed(plan: str, seed: int = 1) -> dict[str, set[str]]:
    """Who arrived in the phases of each barrier of one run: "role arrivals/warps", roles in alphabetical order."""
    with Runner(find(plan)) as runner:
        report = runner.run(seed, record_arrivals=True)
    if not report.ok:
        raise AssertionError(f"{plan} is not clean, so its arrivals say nothing: {report}")
    found: dict[str, set[str]] = {}
    for barrier, who, _ in report.arrivals:
        found.setdefault(barrier, set()).add(who)
    return found


def breaches(
    pipelines: Pipelines,
    seen: Mapping[str, Iterable[str]] | None = None,
    *,
    cluster: int = 1,
    kernels: Path = KERNELS,
) -> list[str]:
    """Where constants, table, roles and (with `seen`, from `observed`) a run disagree; empty when all is well."""
    comment = (kernels / pipelines.table).read_text()
    stated, rows = constants((kernels / pipelines.counts).read_text(), cluster=cluster), table(comment)
    roles = warps(comment) if pipelines is FUSED else _GEMM_ROLES
    wrong = []
    if set(rows) != set(pipelines.arrive):
        wrong.append(f"the table of {pipelines.table} has {sorted(rows)}, known are {sorted(pipelines.arrive)}")
    if set(stated) != set(rows.values()):
        wrong.append(
            f"{pipelines.counts} states {sorted(stated)}, the table of {pipelines.table} {sorted(rows.values())}"
        )
    for barrier, who in pipelines.arrive.items():
        arrive = who(roles, cluster)
        count = stated.get(rows.get(barrier, ""), 0)
        if sum(arrive.values()) != count:
            wrong.append(f"{barrier}: {rows.get(barrier)} is {count}, but {arrive} arrive")
        if seen is None:
            continue
        wanted = ", ".join(f"{role} {n}/{min(n, roles[role])}" for role, n in sorted(arrive.items()))
        different = set(seen.get(barrier, ())) - {wanted}
        if different or not seen.get(barrier):
            wrong.append(f"{barrier}: a run has {sorted(different) or 'no phase'}, expected {wanted}")
    if seen is not None and set(seen) - set(pipelines.arrive):
        wrong.append(f"a run has barriers that nobody states: {sorted(set(seen) - set(pipelines.arrive))}")
    return wrong
