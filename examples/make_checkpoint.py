"""Make the two tiny checkpoints and the activations of a text, to play with.

    python examples/make_checkpoint.py /tmp/tiny
    megamoe run --checkpoint /tmp/tiny/deepseek-v3 --layer 1 --ranks 4 --input /tmp/tiny/deepseek-v3-layer-1.safetensors

Needs Transformers; downloads nothing.
"""

import argparse
from pathlib import Path

from megamoe.demo_activations import byte_tokens, layer_input
from megamoe.demo_checkpoint import FAMILIES, make_checkpoint

LAYER = 1

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("directory", type=Path)
parser.add_argument("--tokens", type=int, default=509, help="bytes of the text")
parser.add_argument("--text", type=Path, help="text file (default: the package's licence)")
arguments = parser.parse_args()

for family in FAMILIES:
    checkpoint = make_checkpoint(family, arguments.directory / family)
    rows = arguments.directory / f"{family}-layer-{LAYER}.safetensors"
    layer_input(checkpoint, LAYER, byte_tokens(arguments.tokens, arguments.text)).save(rows)
    print(f"{checkpoint}  {rows}")
