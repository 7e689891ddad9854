"""`accelerate launch scripts/train.py RECIPE [key=value ...]`: the same as `finetune train`."""

import sys

from finetune import launch_env
from finetune.cli import main

sys.exit(launch_env.leave(main(["train", *sys.argv[1:]])))
