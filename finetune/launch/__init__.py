"""`accelerate launch` of a finetune command, and Accelerate's config files."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.launch.launcher import if_needed as launch_if_needed

__all__ = ["launch_if_needed"]

__getattr__ = lazy_imports(__name__, {"launch_if_needed": "launcher.if_needed"})
