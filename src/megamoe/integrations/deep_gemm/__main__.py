"""``python -m megamoe.integrations.deep_gemm SCRIPT [ARGUMENTS]``: run a script that says ``import deep_gemm``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megamoe.errors import EngineError
from megamoe.integrations import deep_gemm


def main(arguments: list[str]) -> int:
    """Run the script named first, as ``python SCRIPT`` would; ``--replace`` before it shadows a real deep_gemm."""
    replace = arguments[:1] == ["--replace"]
    arguments = arguments[1:] if replace else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m megamoe.integrations.deep_gemm [--replace] SCRIPT [ARGUMENTS]", file=sys.stderr)
        return 0 if arguments else 2
    try:
        deep_gemm.install(replace=replace)
    except EngineError as error:
        print(f"{error} (Here: --replace.)", file=sys.stderr)
        return 2
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
