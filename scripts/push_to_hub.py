"""`python scripts/push_to_hub.py RUN [--repo ID] ...`: the same as `finetune publish`."""

import sys

from finetune.cli.main import main

sys.exit(main(["publish", *sys.argv[1:]]))
