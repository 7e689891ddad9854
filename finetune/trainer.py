"""TRL's trainer, subclassed once: our loss, AdaLoRA's regulariser, an eye on the first step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.sft_trainer import SFTTrainer

from finetune import adalora
from finetune.speed import attention, head, loss

if TYPE_CHECKING:
    from finetune import callbacks


class Trainer(SFTTrainer):
    """TRL's trainer, with our loss, AdaLoRA's regulariser (TRL ignores `outputs.loss`), an eye on step 1."""

    first_step: callbacks.FirstStep
    orthogonality_weight = 0.0
    orthogonality_every = 1
    """Optimizer steps from one computation of the regulariser to the next; its weight is multiplied by it."""
    singular_vectors: adalora.Vectors
    shape: tuple[int, int, int] | None = None
    """Tokens, documents and longest document of each flattened batch, where compiled code wants one shape."""

    chunked: head.Installed | None = None
    """Our loss, in place of TRL's fused head."""

    def install_loss(self, chosen: str, *, compiled: bool) -> None:
        """Use the loss that `head.choose` has chosen."""
        self.chunked = head.install(self.model, compiled=compiled) if chosen == "chunked" else None
        self.first_step.add_loss = partial(head.add_receipt, chosen, self.chunked)
        self.sums: dict[str, Any] = defaultdict(int)  # tensors are read when they are logged, not before
        if self.chunked and isinstance(
            self.train_dataset, Sized
        ):  # streamed batches are joined, which takes tensors alone
            self.data_collator = partial(loss.counted, self.data_collator)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        counts = inputs.pop("num_labels", None), inputs.pop("num_tokens", None)
        if self.shape:
            inputs = attention.fixed_shape(inputs, *self.shape)
        first = self.state.global_step == 0
        with self.first_step.watch(model, inputs) if first else contextlib.nullcontext():
            if self.chunked and model.training and not return_outputs:
                value = self.chunked_loss(model, inputs, counts, num_items_in_batch)
            else:
                value = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        step_ends = self.accelerator.sync_gradients and model.training  # not each micro-batch: `adalora`
        due = (self.state.global_step + 1) % self.orthogonality_every == 0
        if self.orthogonality_weight and step_ends and due:
            regulariser = adalora.orthogonality(self.singular_vectors)
            self._metrics["train"]["orthogonality"].append(regulariser.detach())
            # `training_step` divides a loss that no token count went into; the value logged stays the tokens'
            divided_by = 1 if num_items_in_batch is not None else self.current_gradient_accumulation_steps
            weight = self.orthogonality_weight * self.orthogonality_every * divided_by
            value = value + weight * (regulariser - regulariser.detach())
        return value

    def chunked_loss(self, model: Any, inputs: dict[str, Any], counts: Any, num_items_in_batch: Any) -> Any:
        """TRL's loss to rounding, from the wrapped model; what TRL logs is summed where it is."""
        num_labels, num_tokens = loss.numbers(inputs) if None in counts else counts
        found = model(**inputs, num_labels=num_labels)
        items = num_labels if num_items_in_batch is None else num_items_in_batch
        value = found.nll / torch.as_tensor(items).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            value = value * (self.accelerator.num_processes // self.get_tp_size())
        self.sums["labels"] += num_labels
        self.sums["tokens"] += num_tokens
        self.sums["correct"] += found.correct
        if found.entropy is not None:
            self.sums["entropy"] += found.entropy
        return value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics["train"]
        if self.chunked and self.sums:
            given = [
                torch.as_tensor(n, dtype=torch.float64, device=self.args.device) for n in self.sums.values()
            ]
            totals: Any = self.accelerator.reduce(torch.stack(given), "sum")
            found = dict(zip(self.sums, totals.tolist(), strict=True))
            self.sums.clear()
            self._total_train_tokens += int(found["tokens"])
            metrics["num_tokens"] = [self._total_train_tokens]
            for name, key in (("entropy", "entropy"), ("mean_token_accuracy", "correct")):
                if key in found:
                    metrics[name] = [found[key] / max(found["labels"], 1)]
        for name in metrics.keys() & {"orthogonality"}:
            metrics[name] = torch.stack(metrics[name]).tolist()
        super().log(logs, start_time)
