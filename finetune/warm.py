"""All that a run imports, quietly; for a process that runs are forked from (`trial.py`)."""

import gc

from finetune.screen import quieten_libraries

quieten_libraries()

import matplotlib.backends.backend_svg  # noqa: E402 (for those that are forked)
import matplotlib.figure  # noqa: E402, F401 (once, before any fork)

from finetune import card, check, plan, publish, train  # noqa: E402, F401 (once, before any fork)

gc.collect()
gc.freeze()  # what is forked would go through it again and again: two of the five CPU seconds of a short run
