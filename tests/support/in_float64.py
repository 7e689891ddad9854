"""Optimizer steps of our Trainer in float64, where what is the same in exact arithmetic is so to 1e-12."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from finetune.adapters import attach, trainable_parameters
from finetune.core.console import Console
from finetune.training import nan_detection
from finetune.training.trainer import Trainer
from support.faults import Strike
from support.paths import MODEL, QUICKSTART
from support.trainers import trainer_parts

if TYPE_CHECKING:
    from pathlib import Path

    from support.faults import Fault


class Keep(TrainerCallback):
    """The first step's gradients, and how often and how much DDP sent for them."""

    trainer: Any
    spoils = ""
    sent: list[int]
    by_ddp: list[int]
    weights: dict[str, torch.Tensor]
    stops: nan_detection.NonFinite

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(group, bucket):
            self.by_ddp.append(bucket.buffer().nbytes)
            return allreduce_hook(group, bucket)

        self.sent, self.by_ddp = [], []
        if hasattr(self.trainer.model_wrapped, "register_comm_hook"):
            self.trainer.model_wrapped.register_comm_hook(None, counted)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.sent.append(self.trainer.exchanged)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.spoils == os.environ.get("RANK"):  # what came out of the exchange
            next(iter(trained.values())).grad.view(-1)[0] = float("inf")
        self.gradients = {f"gradient.{name}": p.grad.clone() for name, p in trained.items()}


def step(
    folder: Path,
    data: str,
    base: str,
    rows: int,
    fault: Fault | None = None,
    spoils: str = "",
    more: tuple[str, ...] = (),
    allowed: int = 0,
    loss: str = "chunked",
) -> Keep:
    """Return the parameters after an optimizer step of eight sequences in float64, with micro-batches of
    `rows`.

    Args:
        more: overrides: of more steps than one, the last one's.
        allowed: consecutive steps that may be skipped.
        loss: `chunked` or `trl`.
    """
    from transformers import set_seed

    from finetune.autoconfig import machine_setup
    from finetune.autoconfig.batch_size import split_batch
    from finetune.core.run_checks import RunChecks
    from finetune.models import loading
    from finetune.recipe import loader
    from finetune.training import load_data, training_arguments

    given = [f"model.name={base}", data, "data.validation=null", "train.effective_batch_size=8"]
    given += ["train.warmup_steps=0", "train.max_grad_norm=0", "train.logging_steps=1"]
    given += [f"train.per_device_train_batch_size={rows}", *(more or ["train.max_steps=1"])]
    loaded = loader.load(QUICKSTART, given)
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type="lora")
    batch = split_batch(loaded.train, setup.launch.processes)
    arguments = training_arguments.training_arguments(loaded.train, loaded.data, setup, batch)
    arguments.output_dir = str(folder)
    set_seed(loaded.train.seed)
    tokenizer, prepared = load_data.prepare_data(loaded)
    adapted: Any = attach.attach(loading.load(loaded.model, setup, "cpu"), loaded.adapter, 1, RunChecks())
    for module in adapted.modules():  # so that every gradient is something
        if "default" in getattr(module, "lora_B", {}):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.02)
    in_double(adapted)
    keep = Keep()
    keep.spoils = spoils
    keep.stops = stops = nan_detection.NonFinite(allowed, folder, Console(quiet=True))
    callbacks = [keep, stops, *([Strike(fault)] if fault else [])]
    parts = trainer_parts(adapted, arguments, loaded, setup, *callbacks, loss=loss)
    parts.first_step.dtype = "float64"
    trainer = Trainer(adapted, arguments, prepared.train, tokenizer, parts)
    keep.trainer, inner, losses = trainer, trainer.compute_loss, list[torch.Tensor]()

    def compute_loss(*args: Any, **given: Any) -> torch.Tensor:  # the Trainer adds them up in float32
        losses.append(inner(*args, **given))
        return losses[-1]

    trainer.compute_loss = compute_loss
    trainer.train()
    counted = batch.accumulation * trainer.micro_batches.parts  # without an abandoned attempt
    keep.gradients["loss"] = torch.stack([loss.detach() for loss in losses[-counted:]]).sum()
    keep.weights = {name: p.detach() for name, p in trainable_parameters.trainable(adapted).items()}
    return keep


def eight_steps(folder: Path, base: str, rows: int, *, repeats: bool = False) -> dict[str, torch.Tensor]:
    """Weights after eight steps of SGD in float64, of two epochs and a part: each ends with four rows.

    Args:
        rows: in a pass.
        repeats: each epoch ends with its first four rows again, as two processes with four rows each have it.
    """
    lines = (MODEL.parent / "data" / "train.jsonl").read_text().splitlines()[:20]
    for number, row in enumerate(map(json.loads, lines)):
        for turn, message in enumerate(row["messages"]):  # of very different lengths, and cheap
            message["content"] = message["content"][: (5, 12, 30, 70)[(number + turn) % 4]]
        lines[number] = json.dumps(row)
    file = folder / f"rows-{os.environ.get('RANK', 'alone')}-{repeats}.jsonl"
    file.write_text("\n".join(lines + lines[:4] * repeats) + "\n")
    more = ("train.max_steps=8", "train.optim=sgd", "train.learning_rate=0.3")
    more += ("train.train_sampling_strategy=sequential", "data.expect.duplicates=0.5")
    return step(folder / "trainer", f"data.name={file}", base, rows, more=more).weights


def in_double(adapted: Any) -> None:
    """Everything in float64, norms too, which compute in float32 otherwise."""
    adapted.double()
    for name, norm in list(adapted.named_modules()):
        if "RMSNorm" in type(norm).__name__:
            made = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
            made.weight = norm.weight
            adapted.set_submodule(name, made)
