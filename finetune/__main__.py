"""`python -m finetune`, and so `accelerate launch -m finetune train RECIPE`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # `-m` puts the working directory before the standard library

from finetune.core import import_paths

import_paths.leave_working_directory()

from finetune.cli.main import main  # noqa: E402 (not before the line above)
from finetune.distributed import launch_environment  # noqa: E402 (the same)

sys.exit(launch_environment.leave(main()))
