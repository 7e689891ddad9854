"""Write verified checkpoints, and resume from them exactly."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.checkpointing.checkpoints import Writer as Writer
    from finetune.checkpointing.checkpoints import verify as verify
    from finetune.checkpointing.resume import find as find_checkpoint

__all__ = ["Writer", "find_checkpoint", "verify"]

__getattr__ = lazy_imports(
    __name__,
    {"Writer": "checkpoints.Writer", "verify": "checkpoints.verify", "find_checkpoint": "resume.find"},
)
