"""Compile several kernels at once, in worker processes that fill the on-disk cache.

The workers are plain child processes that run this file, not `multiprocessing` ones: those would run the user's main
module again, and a forked child would inherit a loaded driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from megamoe.cuda.cache import Cache, default_directory
from megamoe.cuda.toolchain import Compiled, Job, Policy, compile_kernel, is_cached
from megamoe.errors import MegaMoEError

__all__ = ["compile_all"]


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(jobs: list[Job], directory: Path) -> subprocess.Popen[bytes] | None:
    paths = [str(Path(__file__).resolve().parents[2]), *(p for p in sys.path if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    request = {"directory": str(directory), "jobs": [[j.source, dict(j.config), j.arch] for j in jobs]}
    try:
        worker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, TypeError):  # no interpreter to start: an embedded Python
        return None
    if worker.stdin is None:
        return worker
    with contextlib.suppress(OSError):  # it died at once: the caller compiles by itself
        worker.stdin.write(json.dumps(request).encode())
        worker.stdin.close()
    return worker


def compile_all(
    jobs: Iterable[Job],
    *,
    policy: Policy | None = None,
    directory: Path | None = None,
    workers: int | None = None,
    progress: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile `jobs` in the order given, those that are not cached yet in parallel.

    Args:
        jobs: what to compile.
        policy: as in `compile_kernel`.
        directory: of the cache, by default the user's.
        workers: processes, by default one a CPU; no more are started than there is work.
        progress: called with each result as it is ready.

    Raises:
        CompileError: the first job that failed, in the order of `jobs`.
    """
    work = list(jobs)
    directory = directory if directory is not None else default_directory()
    cache = Cache(directory)
    missing = [job for job in work if not is_cached(job, cache)]
    count = min(workers if workers is not None else _cpus(), len(missing))
    # This process takes the first share itself: it needs no start, and one job needs no worker at all.
    running = [_start(missing[i::count], directory) for i in range(1, count)]
    try:
        for job in missing[::count] if count > 1 else []:
            with contextlib.suppress(MegaMoEError):
                compile_kernel(job.source, job.config, job.arch, policy="warn", cache=cache)
        for worker in running:
            if worker is not None:
                worker.wait()
    finally:
        for worker in running:
            if worker is not None and worker.poll() is None:
                worker.terminate()
                worker.wait()
    # Whatever a worker could not do (an error, a disk that cannot be written) is done and reported here.
    done = []
    for job in work:
        done.append(compile_kernel(job.source, job.config, job.arch, policy=policy, cache=cache))
        if progress is not None:
            progress(done[-1])
    return done


def _work(request: str) -> None:
    asked = json.loads(request)
    cache = Cache(Path(asked["directory"]))
    for source, config, arch in asked["jobs"]:
        with contextlib.suppress(MegaMoEError):  # the parent meets the same error and raises it
            compile_kernel(source, config, arch, policy="warn", cache=cache)


if __name__ == "__main__":
    _work(sys.stdin.read())
