"""What a read costs: peak memory of the process, and which pages of the files it touches."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megamoe
from megamoe.formats import checkpoint as module
from megamoe.formats.shards import Reader
from megamoe.formats.testing import write_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc")

MIB = 1 << 20
BIG = megamoe.MoESpec(hidden=2048, intermediate=768, experts=48, topk=8)

# Runs in a fresh interpreter: the peak of this one may lie far in the past.
PROBE = """
import json, sys, threading
import torch
import megamoe
torch.set_num_threads(1)

def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10

path, convert_to, transform = sys.argv[1], sys.argv[2] or None, sys.argv[3]
megamoe.checkpoint(path, 0, convert_to=convert_to).read(0, 1)  # imports, thread pools, allocator
opened = megamoe.checkpoint(path, 0, convert_to=convert_to)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak (VmHWM) starts again here
before = status("VmRSS")
weights = opened.read()
if transform:
    from megamoe.formats import layout
    layout.interleave_gate_up(weights.w13, out=weights.w13)
    el, n, k = weights.w13.shape
    layout.tile_weights(weights.w13, out=weights.w13.view(el, n // 128, k // 128, 128, 128))
print(json.dumps({"peak": status("VmHWM") - before, "result": weights.nbytes}))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Hundreds of megabytes: not left behind for pytest's last three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def random_bytes(weight_format: str, spec: megamoe.MoESpec) -> megamoe.ExpertWeights:
    """Full-size weights without the cost of quantising anything."""
    weights = module.empty_weights(spec, weight_format, spec.experts)
    for tensor in (weights.w13, weights.w2):
        if weight_format == "bf16":
            tensor.fill_(0.5)
        else:
            tensor.view(torch.uint8).random_(0, 120)
    for scale in (weights.w13_scale, weights.w2_scale):
        if scale is not None:
            scale.fill_(0.5)
    return weights


@pytest.mark.parametrize(
    ("stored", "style", "convert_to", "transform"),
    [
        ("fp8_block", "hf", "", ""),
        ("fp8_block", "fused", "", "kernel layout in place"),
        ("bf16", "hf", "fp8_block", ""),
        ("mxfp4", "fused", "fp8_block", ""),
    ],
)
def test_peak_is_under_one_point_two_times_the_result(
    directory: Path, stored: str, style: str, convert_to: str, transform: str
) -> None:
    """Resident memory, mapped file pages included."""
    write_checkpoint(directory, BIG, {0: random_bytes(stored, BIG)}, style)
    command = [sys.executable, "-c", PROBE, str(directory), convert_to, transform]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["result"] > 200 * MIB
    ratio = got["peak"] / got["result"]
    assert 0.9 < ratio < 1.2, got


@pytest.mark.parametrize("style", ["hf", "fused"])
def test_only_the_pages_of_the_own_experts_are_read(
    directory: Path, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file holds 48 experts. The kernel maps up to 2 MiB around a fault: that much more at each end of a tensor."""
    weights = random_bytes("fp8_block", BIG)
    write_checkpoint(directory, BIG, {0: weights}, style)
    touched: list[int] = []

    def release(self: Reader) -> None:
        touched.append(resident_bytes(directory / "model.safetensors"))
        self._open.clear()

    monkeypatch.setattr(Reader, "release", release)
    opened = megamoe.checkpoint(directory, 0)
    touched.clear()
    got = opened.read(6, 2)
    assert torch.equal(got.w13.view(torch.uint8), weights.w13[6:8].view(torch.uint8))
    pieces = 2 if style == "fused" else 2 * 3
    assert got.nbytes * 0.9 < max(touched) < got.nbytes + pieces * 2 * 2 * MIB
    assert max(touched) < weights.nbytes / 6


def resident_bytes(file: Path) -> int:
    """Resident bytes of all mappings of `file` in this process, each page counted once."""
    most, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Rss:":
            most = max(most, int(line.split()[1]) << 10)
    return most
