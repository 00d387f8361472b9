"""Every kernel that ships compiles for each architecture it is legal on, without a spill or a forbidden remark."""

from __future__ import annotations

import re

import pytest

from megamoe.cuda.cache import Cache
from megamoe.cuda.shipped import shipped
from megamoe.cuda.sources import KERNELS
from megamoe.cuda.toolchain import ARCHITECTURES, Job, compile_kernel

JOBS = [pytest.param(job, id=f"{entry.name}-{job.arch}") for entry in shipped() for job in entry.jobs]


@pytest.mark.parametrize("job", JOBS)
def test_it_compiles_cleanly(job: Job) -> None:
    compiled = compile_kernel(job.source, job.config, job.arch, policy="strict", cache=Cache(None))
    assert [f.name for f in compiled.report.functions if f.entry]
    assert compiled.cubin


def test_names_are_unique_and_both_architectures_occur() -> None:
    names = [entry.name for entry in shipped()]
    assert len(set(names)) == len(names)
    assert {job.arch for entry in shipped() for job in entry.jobs} == set(ARCHITECTURES)


def test_every_kernel_file_is_shipped() -> None:
    assert {job.source for entry in shipped() for job in entry.jobs} == {p.name for p in KERNELS.glob("*.cu")}


def test_asm_only_behind_the_one_door() -> None:
    files = [p for p in KERNELS.rglob("*") if p.suffix in (".cu", ".cuh") and p.parent.name != "ptx"]
    assert files
    assert [p.name for p in files if re.search(r"\basm\b", re.sub(r"//.*", "", p.read_text()))] == []
