"""Imported first by a process that runs are forked from (`trial.py`): it ends with the one that started it,
as those that are forked from it do, which would keep it alive."""

from finetune import trial

trial.tie()
