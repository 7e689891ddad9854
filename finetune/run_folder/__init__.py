"""The files that a run writes, and functions that read them."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.run_folder.run_folder import RunFolder as RunFolder
    from finetune.run_folder.run_folder import open_run as open_run

__all__ = ["RunFolder", "open_run"]

__getattr__ = lazy_imports(__name__, {"RunFolder": "run_folder.RunFolder", "open_run": "run_folder.open_run"})
