"""`accelerate launch scripts/train.py RECIPE [key=value ...]`: the same as `finetune train`."""

import sys

from finetune.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
