"""Every kernel that ships compiles for each architecture it is legal on, without a spill or a forbidden remark."""

from __future__ import annotations

import re

import pytest

from megamoe.cuda.cache import Cache
from megamoe.cuda.sass import disassemble, truncated_addresses
from megamoe.cuda.shipped import shipped
from megamoe.cuda.sources import KERNELS
from megamoe.cuda.toolchain import ARCHITECTURES, Job, compile_kernel

JOBS = [pytest.param(entry.name, job, id=f"{entry.name}-{job.arch}") for entry in shipped() for job in entry.jobs]


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_it_compiles_cleanly(name: str, job: Job) -> None:
    compiled = compile_kernel(job.source, job.config, job.arch, policy="strict", cache=Cache(None))
    assert [f.name for f in compiled.report.functions if f.entry]
    assert compiled.cubin
    if "fused" in name:  # the others have no address that the compiler forms in more than one way
        assert truncated_addresses(disassemble(compiled.cubin)) == ()


TRUNCATED = """
        /*0100*/                   R2UR UR10, R8 ;
        /*0110*/                   R2UR UR11, R9 ;
        /*0120*/                   UMOV UR5, URZ ;
        /*0130*/                   ULEA UR4, UR4, UR10, 0x2 ;
        /*0140*/                   UBLKCP.S.G [UR12], [UR4], UR6 ;
"""


def test_an_address_without_its_upper_half_is_seen() -> None:
    """As ptxas 13.0.88 wrote it for a layer of two k-blocks, and as it is right."""
    assert truncated_addresses(TRUNCATED) == ("/*0140*/ UBLKCP.S.G [UR12], [UR4], UR6: upper half UR5 is zero",)
    assert truncated_addresses(TRUNCATED.replace("[UR4]", "[UR10]")) == ()
    assert truncated_addresses(TRUNCATED.replace("ULEA", "UIMAD.WIDE.U32")) == ()
    wide = "/*00*/ IMAD.MOV.U32 R3, RZ, RZ, RZ ;\n/*10*/ LDG.E R4, desc[UR32][R2.64+0x4] ;"
    assert truncated_addresses(wide) == ("/*10*/ LDG.E R4, desc[UR32][R2.64+0x4]: upper half R3 is zero",)
    assert truncated_addresses(wide.replace("R3, RZ, RZ, RZ", "R3, RZ, RZ, R9")) == ()


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
