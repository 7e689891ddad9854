"""The devices of this machine, and the table of GPUs."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.hardware.detection import Hardware as Hardware
    from finetune.hardware.detection import detect as detect
    from finetune.hardware.gpus import Gpu as Gpu

__all__ = ["Gpu", "Hardware", "detect"]

__getattr__ = lazy_imports(
    __name__, {"Hardware": "detection.Hardware", "detect": "detection.detect", "Gpu": "gpus.Gpu"}
)
