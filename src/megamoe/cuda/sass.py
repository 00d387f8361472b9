"""Machine code of a compiled kernel, for checks that only the code itself allows.

ptxas 13.0.88 was seen to compute a 64-bit address in the uniform datapath with a 32-bit ``ULEA`` and to take zero for
its upper half. The source was right, the report clean, and the kernel ended in an illegal memory access.
`truncated_addresses` finds such code. Needs nvdisasm (the extra ``reports``).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from megamoe.errors import EngineError

__all__ = ["disassemble", "truncated_addresses"]

_PACKAGE: Final = "nvidia-cuda-nvdisasm"

_INSTRUCTION: Final = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_BULK_COPY: Final = re.compile(r"\[UR(\d+)\], \[UR(\d+)\]")
_WIDE_ADDRESS: Final = re.compile(r"\[R(\d+)\.64[\]+-]")
_ZERO: Final = re.compile(r"^(U?R\d+), (?:U?RZ|RZ, RZ, RZ)\s*$")
_MOVES: Final = ("UMOV", "MOV", "IMAD.MOV.U32")


def disassemble(cubin: bytes) -> str:
    """SASS of `cubin`, as nvdisasm prints it.

    Raises:
        EngineError: nvdisasm is not installed, or does not read this file.
    """
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    tool = next((Path(str(f.locate())) for f in files if f.name == "nvdisasm"), None)
    if tool is None:
        raise EngineError("nvdisasm", "not installed", f"the package {_PACKAGE}", "pip install 'megamoe[reports]'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineError("cubin", done.stderr.strip(), "a file that nvdisasm reads", "Update nvdisasm.")
    return done.stdout


def truncated_addresses(sass: str) -> tuple[str, ...]:
    """Instructions that use a 64-bit global address whose upper half the code before them sets to zero.

    For each such instruction the nearest write above it to the register of the upper half counts; no address of a GPU's
    memory lies in the first 4 GiB, so a zero there is wrong wherever it comes from.
    """
    instructions = [m.groups() for m in map(_INSTRUCTION.search, sass.splitlines()) if m]
    return tuple(
        f"/*{at}*/ {opcode} {operands.strip()}: upper half {register} is zero"
        for i, (at, opcode, operands) in enumerate(instructions)
        for register in _upper_halves(opcode, operands)
        if _is_zero(instructions, i, register)
    )


def _upper_halves(opcode: str, operands: str) -> list[str]:
    if opcode.startswith("UBLKCP"):
        m = _BULK_COPY.search(operands)
        # UBLKCP.S.G [shared], [global]; UBLKCP.G.S [global], [shared]
        return [f"UR{int(m[2 if '.S.G' in opcode else 1]) + 1}"] if m else []
    return [f"R{int(m[1]) + 1}" for m in _WIDE_ADDRESS.finditer(operands)]


def _is_zero(instructions: Sequence[tuple[str, ...]], index: int, register: str) -> bool:
    for _, opcode, operands in reversed(instructions[:index]):
        target = operands.split(",", 1)[0].strip()
        wide = opcode.endswith(".64") or ".WIDE" in opcode
        written = {target}
        if wide and (m := re.fullmatch(r"(U?R)(\d+)", target)):
            written.add(f"{m[1]}{int(m[2]) + 1}")
        if register in written:
            return opcode in _MOVES and bool(_ZERO.match(operands.strip()))
    return False
