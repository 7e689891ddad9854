"""Import all libraries that a run needs, once, in the process that runs are forked from."""

import gc

from finetune.core.console import quieten_libraries

quieten_libraries()

from finetune.reporting import matplotlib_settings  # noqa: E402 (for the forked processes)

matplotlib_settings.load()

import matplotlib.backends.backend_svg  # noqa: E402, F401 (before any fork)

from finetune.export import model_card, publishing  # noqa: E402, F401 (before any fork)
from finetune.planning import planner  # noqa: E402, F401 (before any fork)
from finetune.preflight import checker  # noqa: E402, F401 (before any fork)
from finetune.training import pipeline  # noqa: E402, F401 (before any fork)

gc.collect()
# Exclude these objects from garbage collection in forked runs, which saves two of a short run's five CPU
# seconds
gc.freeze()
