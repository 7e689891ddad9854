"""`python -m finetune`, and so `accelerate launch -m finetune train RECIPE`."""

from __future__ import annotations

import sys

from finetune import launch_env
from finetune.cli import main

sys.exit(launch_env.leave(main()))
