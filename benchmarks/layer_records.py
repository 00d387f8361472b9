"""The rows of ``layer-<device>.json`` that docs/tuning.md shows, on one GPU.

    python benchmarks/layer_records.py                    # all of them, some minutes
    python benchmarks/layer_records.py flash-own pro-bounds

Parts: ``<model>-own`` (flash, pro: every number of tokens, paced and sustained, kernels and whole calls), ``-clean``
(small calls with the flush written back), ``-bounds`` (one bound for smaller calls), ``-three`` (mimo, v3: three
numbers of tokens) and ``flash-ranks`` (2, 4 and 8 ranks on the GPU, compared with the oracle). A row replaces all rows
of the same cell, whatever plan they were of.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from megamoe.bench import environment, mega, results
from megamoe.bench.results import Row

DEVICE = "cuda:0"
ALL = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEW = (64, 1024, 8192)
CLEAN = (1, 8, 16, 32, 64)
BOUNDS = {256: (1, 8, 64, 128), 8192: (1, 8, 64, 256, 512, 1024, 2048, 4096)}
CELL = ("model", "ranks", "tokens", "routing", "phase", "bound", "protocol", "engine")


def _both(name: str, tokens: tuple[int, ...]) -> Iterator[Row]:
    return mega.benchmark(name, tokens, protocols=("paced", "sustained"), e2e=True)


def _clean(name: str) -> Iterator[Row]:
    return mega.benchmark(name, CLEAN, protocols=("paced-clean",), e2e=True)


def _bounds(name: str) -> Iterator[Row]:
    for bound, tokens in BOUNDS.items():
        yield from mega.benchmark(name, tokens, bound=bound)


def _ranks(name: str) -> Iterator[Row]:
    for ranks in (2, 4, 8):
        yield from mega.benchmark(name, (8, 64, 1024), ranks=ranks, e2e=True, check=True, samples=lambda _: 30)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    **{f"{name}-own": partial(_both, name, ALL) for name in ("flash", "pro")},
    **{f"{name}-clean": partial(_clean, name) for name in ("flash", "pro")},
    **{f"{name}-bounds": partial(_bounds, name) for name in ("flash", "pro")},
    **{f"{name}-three": partial(_both, name, FEW) for name in ("mimo", "v3")},
    "flash-ranks": partial(_ranks, "flash"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the result file")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    facts = environment.facts("layer", device=DEVICE, gpus=1, protocol=mega.PROTOCOL)
    path = results.result_path(given.out, "layer", environment.device_slug(DEVICE))
    console = Console(stderr=True)
    for part in given.parts or PARTS:
        rows = []
        for row in PARTS[part]():
            rows.append(row)
            console.print(
                f"{part}: M={row['tokens']} bound {row['bound']} {row['protocol']} {row['kernel_us']['median']} us"
            )
        # Part by part: what was measured is kept if a later one fails.
        results.write(path, facts, rows, cell=CELL)


if __name__ == "__main__":
    main()
