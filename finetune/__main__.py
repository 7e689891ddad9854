"""`python -m finetune`, and so `accelerate launch -m finetune train RECIPE`."""

import sys

from finetune.cli.main import main
from finetune.distributed import launch_environment

sys.exit(launch_environment.leave(main()))
