"""Check that the Accelerator, and its model and optimizer, have the settings of the launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.autoconfig.batch_size import Batch
from finetune.autoconfig.launch_settings import Launch
from finetune.core.errors import Exit
from finetune.core.formatting import precision
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, sharded_tensors, transformer_engine_layers
from finetune.distributed.launch_environment import BACKENDS, said, zero_stage
from finetune.quantization import four_bit, fp8_linear
from finetune.recipe.schema import Train
from finetune.training.trainer import Trainer


def add_launch_checks(trainer: Trainer, launch: Launch, checks: RunChecks) -> None:
    """Add run checks that the Accelerator has the precision, processes, fp8 and sharding of the launch.

    A callback checks the prepared model, before the first step.
    """
    accelerator, how, code = trainer.accelerator, "the Accelerator", Exit.ENVIRONMENT
    planned, actual = precision(launch.precision), precision(accelerator.mixed_precision)
    checks.add("precision", planned, actual, how, code=code)
    checks.add("processes", launch.processes, accelerator.num_processes, how, code=code)
    if launch.fp8 in BACKENDS:
        backend, handler = (
            accelerator.fp8_backend,
            accelerator.te_recipe_handler or accelerator.ao_recipe_handler,
        )
        checks.add("fp8 backend", launch.fp8, getattr(backend, "value", str(backend)), how, code=code)
        for name, value in asked_of(launch.fp8).items():
            live_value = getattr(getattr(handler, "config", handler), name)
            checks.add(f"fp8_config.{name}", value, str(live_value).lower(), "its fp8 recipe", code=code)
    split = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}.get(accelerator.distributed_type.value, "")
    checks.add("sharding", launch.splitter or "none", split or "none", how, code=code)
    trainer.add_callback(PreparedModelChecks(launch, trainer, checks))


def add_repeated_check(trainer: Trainer, checks: RunChecks) -> None:
    """Count the examples that an epoch trained twice, if one ended: processes share its batches."""
    rows: Any = getattr(trainer, "train_dataset", None)
    epochs = int(float(trainer.state.epoch or 0))
    shards = trainer.first_step.processes
    if shards < 2 or not epochs or not hasattr(rows, "__len__") or trainer.args.dataloader_drop_last:
        return
    twice = count_repeated(len(rows), trainer.args.per_device_train_batch_size, shards)
    checks.add(
        "sequences trained once",
        expected=len(rows),
        actual=f"{len(rows) - twice}, and {twice} twice, in each of {epochs} epochs that ended",
        how="the length of an epoch, whose last batch Accelerate fills with the first sequences",
        ok=True,
    )


def add_loader_check(trainer: Trainer, checks: RunChecks) -> None:
    """Read back how long the run waited for a batch, if data loader workers read them."""
    if trainer.loader is not None and trainer.loader.num_workers:
        checks.add(
            "train.dataloader_timeout",
            expected=f"{trainer.loader_timeout} s",
            actual=f"{trainer.loader.timeout:g} s",
            how="torch's data loader",
        )


def notes_on_repeats(train: Train, rows: int | None, batch: Batch, shards: int, steps: int) -> list[str]:
    """Return a note on the sequences that each epoch trains twice, if the run reaches the end of an epoch.

    Args:
        rows: number of sequences; `None` for a stream.
        shards: number of processes with their own sequences.
        steps: optimizer steps of the run.
    """
    if rows is None or shards == 1 or train.passed_on().get("dataloader_drop_last"):
        return []
    twice = count_repeated(rows, batch.per_device, shards)
    an_epoch = math.ceil((rows + twice) / (batch.per_device * shards * batch.accumulation))
    if not twice or steps < an_epoch:
        return []
    said = f"each epoch trains {twice:,} of {rows:,} sequences twice, so that all {shards} processes"
    dropped = batch.per_device * shards - twice
    return [f"{said} have full batches; train.dataloader_drop_last: true skips {dropped:,} sequences instead"]


def count_repeated(rows: int, per_device: int, shards: int) -> int:
    """Return the number of sequences that an epoch repeats, so that all processes have full batches.

    Accelerate fills the end of an epoch with sequences of its beginning (BatchSamplerShard, even_batches).

    Args:
        shards: number of processes with their own sequences.
    """
    return -rows % (per_device * shards)


def asked_of(backend: str) -> dict[str, str]:
    """Return the fp8 recipe of the accelerate config, by the attribute names of its object."""
    names = {"TE": ("fp8_format", "amax_history_len", "amax_compute_algo"), "AO": ()}[backend]
    values = {name: said(f"ACCELERATE_FP8_{name.removeprefix('fp8_').upper()}") for name in names}
    if backend == "AO":
        values = {
            "enable_fsdp_float8_all_gather": said("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
        }
    return {name: value for name, value in values.items() if value}


class PreparedModelChecks(TrainerCallback):
    """Run checks of the prepared model: trainable parameters, the optimizer's tensors and the shards.

    After the first step, it checks fp8 GEMMs and gathered quantized weights.
    """

    def __init__(self, launch: Launch, trainer: Any, checks: RunChecks) -> None:
        self.launch, self.trainer, self.checks = launch, trainer, checks
        self.trained, self.looked = numbers(trainer.model), False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        how, add = "parameters with requires_grad, before and after preparing", self.checks.add
        add("trainable parameters of the prepared model", self.trained, numbers(model), how)
        inner = getattr(optimizer, "optimizer", optimizer)
        groups = [group["params"] for group in inner.param_groups]
        collectives.wait_alike()
        if self.launch.splitter == "DeepSpeed":  # its optimizer steps on flattened copies
            groups = getattr(inner, "bit16_groups", None) or inner.fp16_groups
        optimizer_ids = {id(p) for group in groups for p in group}
        trained = [p for p in model.parameters() if p.requires_grad]
        if not type(inner).__module__.startswith(_COPIES):
            actual = sum(id(p) in optimizer_ids for p in trained)
            add("tensors that the optimizer holds", len(trained), actual, "the optimizer's groups")
        if self.launch.splitter == "DeepSpeed":
            self._by_zero(model)
        if self.launch.sharded == "FSDP":
            split = [p for p in model.parameters() if isinstance(p, DTensor)]
            whole = sum(p.numel() for p in model.parameters())
            share = sum(p.to_local().numel() for p in split) / whole
            actual = f"{share:.1%} of the model's parameters, {len(split)} tensors"
            how, ok = "DTensors of this process", bool(split) and share < 1.5 / self.launch.processes
            add(
                "sharded by FSDP",
                f"1 of {self.launch.processes} shards",
                actual,
                how,
                ok=ok,
                code=Exit.ENVIRONMENT,
            )
        if self.launch.fp8 in BACKENDS:
            self._converted(model)
        self.checks.check()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.looked:
            return
        self.looked = True
        if self.launch.fp8 == "TE":
            layers, actual = (
                len(transformer_engine_layers.layers(kwargs["model"])),
                transformer_engine_layers.rounded(kwargs["model"]),
            )
            self.checks.add(
                "fp8 GEMMs",
                expected=f"{layers} layers, forward and backward",
                actual=f"{actual} layers",
                how=f"the layers' scaling factors after step {state.global_step}",
                ok=actual == layers > 0,
                code=Exit.ENVIRONMENT,
            )
        if self.launch.sharded == "FSDP":
            self._gathered(kwargs["model"])
        self.checks.check()

    def _gathered(self, model: Any) -> None:
        """Compare the quantized weights that a forward pass gathers with the stored shards, bit by bit."""
        sharded_tensors.give_back(model)
        coded = {
            name: module
            for name, module in model.named_modules()
            if four_bit.is_four_bit(module) or isinstance(module, fp8_linear.Fp8Linear)
        }
        if not coded:
            return
        split = {name: m.weight for name, m in coded.items() if isinstance(m.weight, DTensor)}
        stored, seen = sharded_tensors.sums(split), dict[str, tuple[int, int]]()
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                whole = {name: coded[name].weight for name in split.keys() - seen.keys()}
                seen |= sharded_tensors.sums({n: w for n, w in whole.items() if not isinstance(w, DTensor)})
                unit.reshard()
        same = sum(seen.get(name) == stored[name] for name in stored)
        how, code = "checksums of each weight's bytes, of the shards and after the gather", Exit.ENVIRONMENT
        self.checks.add(
            "quantized weights that FSDP gathers", f"all {len(coded)}", f"all {same}", how, code=code
        )

    def _by_zero(self, model: Any) -> None:
        """Add run checks of the engine's ZeRO stage, and of this process's share of sharded weights."""
        stage, processes = self.trainer.model_wrapped.zero_optimization_stage(), self.launch.processes
        parts = [p.ds_tensor.numel() for p in model.parameters() if hasattr(p, "ds_tensor")]
        share = sum(parts) / sum(sharded_tensors.shape(p).numel() for p in model.parameters())
        actual = f"ZeRO-{stage}" + (
            f", {share:.1%} of the model's parameters, {len(parts)} tensors" if parts else ""
        )
        ok = str(stage) == zero_stage() and bool(parts) == (stage == 3) and share < 1.5 / processes
        self.checks.add(
            "sharded by DeepSpeed",
            expected=f"ZeRO-{zero_stage()}, {processes} processes",
            actual=actual,
            how="the engine, and DeepSpeed's shards in this process",
            ok=ok,
            code=Exit.ENVIRONMENT,
        )

    def _converted(self, model: nn.Module) -> None:
        """Add a run check of the layers that Accelerate replaced by fp8 layers."""
        own = {"TE": "transformer_engine", "AO": "torchao"}[self.launch.fp8]
        converted = [m for m in model.modules() if type(m).__module__.startswith(own)]
        plain = [m for m in model.modules() if type(m) is torch.nn.Linear]
        self.checks.add(
            "fp8 layers",
            expected="at least one layer",
            actual=f"{len(converted)} {own} layers, {len(plain)} plain",
            how="modules of the prepared model",
            ok=bool(converted),
            code=Exit.ENVIRONMENT,
        )


# Optimizers that hold copies of the parameters, and step on these
_COPIES = ("torchao.optim.cpu_offload",)


def numbers(model: PreTrainedModel | PeftModel) -> int:
    """Return the number of trainable parameters over all processes."""
    return sum(sharded_tensors.shape(p).numel() for p in model.parameters() if p.requires_grad)
