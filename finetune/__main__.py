"""`python -m finetune`, and so `accelerate launch -m finetune train RECIPE`."""

import sys

from finetune.cli import main

sys.exit(main())
