"""Kernel sources keep the rules of the simulator, and each rule catches what it is there for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamoe.cuda.sources import KERNELS
from megamoe.sim.build import HERE
from megamoe.sim.lint import MOST_LINES, breaches, lint

GOOD = """// while (true) asm("x"); clock();
#pragma once
#include "ptx.cuh"
namespace megamoe {
constexpr int kMany = 3;
struct Tile {
  static constexpr int kRows = 128;
  MEGAMOE_DEVICE static constexpr int index(int c) { return c / kRows; }
};
MEGAMOE_DEVICE void wait(const ptx::u32* p) {
  while (ptx::ld_acquire_gpu(p) == 0) {
  }
  int i = 0;
  while (i < kMany) ++i;
  do {
    ++i;
  } while (i < 9);
}
}  // namespace megamoe
extern "C" __global__ void __launch_bounds__(128, 1) entry(int n) {
  extern __shared__ __align__(1024) ptx::u8 smem[];
}
"""

BAD = {
    'asm volatile("trap;");': "asm belongs",
    "volatile int* p = q;": "volatile",
    'printf("%d", 3);': "printf",
    "__syncwarp();": "warp collectives",
    "x = __shfl_xor_sync(~0u, x, 1);": "warp collectives",
    "__nanosleep(20);": "use the wrapper",
    "__threadfence_system();": "use the wrapper",
    "atomicAdd(p, 1);": "atomics go through",
    "const long long t = clock64();": "clocks go through",
    "if (ptx::globaltimer() > t) return;": "clocks are for",
    "while (ptx::deadline_passed(d)) ptx::nanosleep(20);": "clocks are for",
    "while (*flag == 0) {}": "a spin without a wrapper",
    "while (flags[3] != epoch);": "a spin without a wrapper",
    "for (; *flag == 0;) {}": "a spin without a wrapper",
    "static int calls = 0;": "a mutable static",
    "static u32 table[4];": "a mutable static",
    "const u32 a = base.address;": "opaque",
    "extern __shared__ float tile[];": "dynamic shared memory",
    "extern __shared__ unsigned char smem[];": "dynamic shared memory",
}


def _say(text: str, name: str = "some.cuh") -> list[str]:
    return [b.text for b in breaches(Path(name), text)]


def test_the_kernels_keep_the_rules() -> None:
    assert "\n".join(map(str, lint())) == ""


def test_what_is_right_is_not_flagged() -> None:
    assert _say(GOOD) == []


@pytest.mark.parametrize(("line", "what"), BAD.items())
def test_each_rule_catches_its_breach(line: str, what: str) -> None:
    said = _say(GOOD.replace("  int i = 0;\n", f"  int i = 0;\n  {line}\n"))
    assert any(what in s for s in said), said


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("#include <cuda/std/array>\n" + GOOD, "only ptx.cuh includes"),
        (GOOD.replace("constexpr int kMany", "__device__ int kMany"), "mutable __device__"),
        (GOOD.replace("}  // namespace megamoe\n", "") + "}\n", "global namespace"),
        (GOOD.replace("#pragma once\n", ""), "without #pragma once"),
        (GOOD + "//\n" * MOST_LINES, "split the file"),
    ],
)
def test_rules_on_whole_files(text: str, what: str) -> None:
    assert any(what in s for s in _say(text))


def _signatures(text: str) -> set[str]:
    """Names of device functions with the types of their parameters, template or not."""
    text = re.sub(r"//[^\n]*", "", text)
    found = set()
    for name, parameters in re.findall(r"MEGAMOE_DEVICE\s+[\w:<>]+\s+([\w+]+)\(([^)]*(?:\(&\w*\)[^)]*)*)\)\s*\{", text):
        types = [re.sub(r"\s*=.*", "", p) for p in parameters.split(",") if p.strip()]
        types = [re.sub(r"(?<=[\w*&>])\s+\w+(?=\[|$)", "", t.strip()) for t in types]
        types = [re.sub(r"\(&\w*\)", "(&)", t) for t in types]
        found.add(f"{name}({', '.join(types)})")
    return found


def _expanded(text: str) -> str:
    """The words macro of ptx_sim/memory.cuh, written out."""
    macro = re.search(r"#define MEGAMOE_SIM_WORDS\(T, scope\)(.*?)\nMEGAMOE_SIM_WORDS", text, re.DOTALL)
    if macro is None:
        return text
    body = macro[1].replace("\\\n", "\n")
    parts = [body.replace("##scope", scope).replace("T ", f"{t} ").replace("T*", f"{t}*") for t, scope in _WORDS]
    return text.replace(macro[0], "\n".join(parts))


_WORDS = [(t, scope) for t in ("u32", "u64") for scope in ("gpu", "sys")]
_ONLY_HARDWARE = {"descriptor_bits", "wgmma_ss", "wgmma_rs"}
_ONLY_SIMULATOR = {"shuffle_from", "bf16_bits", "e4m3_bits", "flush"}


def test_both_sides_of_ptx_have_the_same_functions() -> None:
    hardware = set().union(*(_signatures(p.read_text()) for p in (KERNELS / "ptx").glob("*.cuh")))
    simulated = set().union(
        *(_signatures(_expanded(p.read_text())) for p in (HERE / "ptx_sim").glob("*.cuh") if p.stem != "language")
    )

    def public(names: set[str], private: set[str]) -> list[str]:
        return sorted(n for n in names if n.split("(")[0] not in private)

    assert public(hardware, _ONLY_HARDWARE) == public(simulated, _ONLY_SIMULATOR)
    assert len(hardware) > 90
