"""`python -m finetune.launch`: `accelerate launch` that keeps the exit code of the failed process."""

import os
import sys

# `-m` and an open end of PYTHONPATH put the working directory before the standard library
here, root = os.path.realpath(os.getcwd()), os.path.realpath(f"{os.path.dirname(__file__)}/../..")
if here != root:
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
elif not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from finetune.core import import_paths  # noqa: E402 (not before the lines above)

import_paths.leave_working_directory()

from finetune.launch.launcher import main  # noqa: E402 (not before the lines above)

sys.exit(main(sys.argv[1:]))
