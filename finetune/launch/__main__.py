"""`python -m finetune.launch`: `accelerate launch` that keeps the exit code of the failed process."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]  # `-m` puts the working directory before the standard library

from finetune.core import import_paths

import_paths.leave_working_directory()

from finetune.launch.launcher import main  # noqa: E402 (not before the line above)

sys.exit(main(sys.argv[1:]))
