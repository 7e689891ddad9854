"""All that a run imports, quietly; for a process that runs are forked from (`trial.py`)."""

from finetune.screen import quieten_libraries

quieten_libraries()

from finetune import check, train  # noqa: E402, F401 (for those that are forked)
