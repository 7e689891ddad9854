"""`accelerate launch scripts/train.py RECIPE [key=value ...]`: the same as `finetune train`."""

import sys

from finetune.cli.main import main
from finetune.distributed import launch_environment

sys.exit(launch_environment.leave(main(["train", *sys.argv[1:]])))
