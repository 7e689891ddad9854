"""`accelerate launch scripts/evaluate.py RUN [--tasks ...]`: `finetune evaluate`, over all GPUs."""

import sys

from finetune.cli.main import main

sys.exit(main(["evaluate", *sys.argv[1:]]))
