"""A GPU, and a data loader that is too slow, for tests of the profiler."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from finetune.hardware import detection

GPU = detection.Hardware("cuda", "NVIDIA H200", 1, (9, 0), 140.0, 16)


class SlowLoader(TrainerCallback):
    """Each batch takes a fifth of a second to put together."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        loader = getattr(loader, "base_dataloader", loader)
        collate = loader.collate_fn

        def slowly(rows: Any) -> Any:
            time.sleep(0.2)
            return collate(rows)

        loader.collate_fn = slowly
