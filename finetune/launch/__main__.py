"""`python -m finetune.launch`: `accelerate launch` that keeps the exit code of the failed process."""

import sys

from finetune.launch.launcher import main

sys.exit(main(sys.argv[1:]))
