"""How fast the bytes of a small call's weights can be read at all, on one GPU: ``stream-<device>.json``.

    python benchmarks/stream.py

A kernel that only reads (stream.cu), as many bytes as the hit experts of one token have, from an L2 that a flush has
left with zeros to write back (``paced``) or without any (``paced-clean``), as the layer's benchmark does it.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from megamoe.bench import environment, mega, results
from megamoe.bench.models import model
from megamoe.bench.results import Row
from megamoe.cuda.driver import LaunchConfig, open_driver
from megamoe.cuda.launch import Kernel, Library, aligned, raw_stream
from megamoe.cuda.toolchain import compile_kernel

SOURCE = Path(__file__).resolve().with_name("stream.cu")
DEVICE = "cuda:0"
BLOCK, MOST_STAGES = 32768, 6
MODELS = ("flash", "pro")
SHAPES = ((132, 4), (132, 2), (96, 4))
"""CTAs and stages."""
PROTOCOL = (
    "kernel_us from the first CTA's start to the last block of the last one, first_us to the median CTA's first block, "
    "by the GPU's clock; paced: one launch after an L2 flush and 10 ms of sleep; paced-clean: the same, and the L2 has "
    "no line of the flush left to write back"
)


class Arguments(ctypes.Structure):
    """As in stream.cu."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("stamps", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32),
        ("stages", ctypes.c_uint32),
    )


def weights_of_a_token(name: str) -> int:
    """Bytes of the FP8 weights of the experts that one token of a model has."""
    spec = model(name).spec
    return spec.topk * 3 * spec.hidden * spec.intermediate


def measure(samples: int) -> Iterator[Row]:
    """One row for each model's bytes, shape and protocol."""
    device = torch.device(DEVICE)
    pace = mega.Pace([device])
    sizes = {name: weights_of_a_token(name) for name in MODELS}
    driver = open_driver()
    library = Library(driver, compile_kernel(SOURCE, arch=driver.device(0).arch))
    given = aligned(Arguments)
    kernel = Kernel(
        library, "read_once", 0, LaunchConfig(threads=128, dynamic_shared=MOST_STAGES * (BLOCK + 8)), [given]
    )
    data = torch.randint(0, 255, (max(sizes.values()),), dtype=torch.uint8, device=device)
    for name, size in sizes.items():
        for ctas, stages in SHAPES:
            stamps = torch.zeros(ctas, 3, dtype=torch.int64, device=device)
            given.source, given.stamps = data.data_ptr(), stamps.data_ptr()
            given.blocks, given.stages = size // BLOCK, stages
            for protocol in ("paced", "paced-clean"):
                taken, firsts = [], []
                for _ in range(samples):
                    pace.run(protocol, partial(kernel.launch, ctas, raw_stream(None, 0)), None)
                    since = (stamps - stamps[:, 0].min()).double().cpu() / 1e3
                    taken.append(float(since[:, 2].max()))
                    firsts.append(float(since[:, 1].median()))
                yield {
                    "model": name,
                    "phase": "read",
                    "protocol": protocol,
                    "engine": "stream",
                    "variant": f"{ctas} CTAs, {stages} stages of 32 KB",
                    "bytes": size,
                    "kernel_us": results.timing(taken),
                    "first_us": results.timing(firsts),
                    "tbps": round(size / results.timing(taken)["median"] / 1e6, 3),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=30, help="launches of each row")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result file")
    chosen = parser.parse_args()
    facts = environment.facts("stream", device=DEVICE, gpus=1, protocol=PROTOCOL)
    path = results.result_path(chosen.out, "stream", environment.device_slug(DEVICE))
    rows = []
    for row in measure(chosen.samples):
        rows.append(row)
        print(f"{row['model']} {row['variant']} {row['protocol']}: {row['kernel_us']['median']} us, {row['tbps']} TB/s")
    results.write(path, facts, rows)


if __name__ == "__main__":
    main()
