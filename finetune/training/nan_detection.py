"""Detect steps with NaN or Inf gradients, and losses far above the previous losses."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.adapters import trainable_parameters
from finetune.core import safe_files, upstream_private
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.privacy import masked_json
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, deepspeed_zero, sharded_tensors, transformer_engine_layers
from finetune.recipe.schema import Train
from finetune.run_folder.run_folder import RunFolder
from finetune.training.oom_recovery import MicroBatches

FIRST = 3  # steps that may have no gradient
HALVINGS = 20  # allowed consecutive halvings of fp16's loss scale; 16 halvings take 65,536 to 1
WINDOW, IN_A_ROW = 32, 3  # logged losses before a spike, and consecutive losses of a spike
WORTH_A_WORD = 2.0  # factor above the median that prints a note
SMALL = 0.03  # smallest median: losses of memorized examples differ by several times


class Steps(Protocol):
    """The methods of the Trainer that these callbacks need."""

    args: Any
    micro_batches: MicroBatches
    model: Any
    model_wrapped: Any
    train_dataset: Any

    def loss_of(self, inputs: dict[str, Any]) -> Any: ...


class NonFinite(TrainerCallback):
    """Stop before the update of a step with NaN or Inf gradients, or skip the step.

    Ranks share gradients, and tell each other whether their gradients are finite, in case a copy was damaged
    after the exchange. Reading the norm at once would leave the GPU idle until the next step is queued. So a
    fused optimizer skips its update by itself (`found_inf`, as a loss scaler sets it), and the norm is read
    one step later, or when the step is logged, evaluated or saved. The norm is read at once if steps may be
    skipped or the optimizer can't skip its update. AdaLoRA may then have masked ranks by such gradients
    already. That affects only the second run of the step, because the training run ends here.
    """

    trainer: Steps | None = None
    """The Trainer, which can run the micro-batches of a step again."""

    def __init__(self, allowed: int, folder: Path, screen: Console) -> None:
        """Args: allowed: consecutive steps that may be skipped; 0: the first one ends the run."""
        self.allowed, self.folder, self.screen = allowed, folder, screen
        self.step: int | None = None  # the step whose norm has not been read yet
        self.in_a_row = self.skipped = self.without = 0

    def follow(self, trainer: Steps) -> None:
        """Store the Trainer, whose constructor calls this, because callbacks do not get the Trainer."""
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.device = self.trained[0].device

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: AcceleratedOptimizer,
        **kwargs: object,
    ) -> None:
        self.check()
        assert self.trainer
        engine, inner = self.trainer.model_wrapped, optimizer.optimizer
        if hasattr(engine, "get_global_grad_norm"):  # DeepSpeed has already updated the weights
            norm = float(engine.get_global_grad_norm() or 1.0)  # None where it computes none
            norm = torch.tensor(norm if norm >= 0 else math.nan)  # DeepSpeed returns -1 for NaN or Inf
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        parts = isinstance(norm, DTensor)  # under FSDP
        norm = norm.full_tensor() if parts else norm
        fused = upstream_private.updates_if_finite(inner) and norm.device == self.device and not parts
        if fused:
            inner.found_inf = (~torch.isfinite(norm)).float()
        self.norm, self.step = norm.detach().to("cpu", non_blocking=True), state.global_step + 1
        self.copied = torch.cuda.Event() if norm.is_cuda else None
        if self.copied is not None:
            self.copied.record()
        if self.copied is None or self.allowed or not fused:
            left_out = self.check()
            upstream_private.mark_step_skipped(optimizer, left_out)
            if left_out and fused:
                inner.found_inf = torch.ones_like(inner.found_inf)  # the gradient may be another rank's
            if left_out and not fused:
                optimizer.zero_grad()  # without gradients, the optimizer changes no weight
                getattr(inner, "queue", {}).clear()  # torchao's queue of gradients on the CPU

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if control.should_log or control.should_evaluate or control.should_save:
            self.check()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.check()
        self.trainer, self.trained = None, []  # release the model
        if self.skipped:
            self.screen.say(
                f"note: {self.skipped} steps were skipped, because their gradients were NaN or Inf"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if self.allowed:
            logs["skipped_steps"] = self.skipped

    def check(self) -> bool:
        """Read a norm that has not been read yet, and return whether its step is skipped.

        Raises:
            UserError: the norm is NaN or Inf, and no further step may be skipped (exit 5).
        """
        if self.step is None:
            return False
        if self.copied is not None:
            self.copied.synchronize()
        step, self.step = self.step, None
        spoilt, trains = collectives.any_of(not torch.isfinite(self.norm), bool(self.norm))
        if not spoilt:
            self.in_a_row = 0
            self.stop_without_gradient(step, trains=trains)
            return False
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        if self.in_a_row <= self.allowed:
            self.screen.say(f"step {step} is skipped, because its gradients are NaN or Inf")
            return True
        self.stop(step)

    def stop_without_gradient(self, step: int, *, trains: bool) -> None:
        """End a run whose first steps have no gradient, because its end would find that nothing was trained.

        Raises:
            UserError: the gradients of all of the first steps are 0 (exit 5).
        """
        self.without = 0 if trains else self.without + 1
        if self.without < FIRST or step != FIRST:
            return
        raise UserError(
            Problem(
                f"all gradients of the first {FIRST} steps are 0, so no weight changes",
                found="a gradient norm of 0",
                fix="check the initialization of the adapter, `train.max_grad_norm` and the loss weights",
                code="no-gradient",
            ),
            code=Exit.TRAINING,
        )

    def stop(self, step: int) -> NoReturn:
        """End the run, and save the micro-batches of the step for inspection."""
        assert self.trainer
        place = self.folder / f"nonfinite-step-{step}"
        rank, batches = collectives.index(), self.trainer.micro_batches.kept.get(step, [])
        keep(place, rank, batches)
        try:
            own = [sources(self.trainer.train_dataset, batch) for batch in batches]
        except Exception as error:  # other ranks wait, and this error is not the reason that the run ends
            own = [[f"not found: {error}"]]
        rows = collectives.gathered(own)
        finding = look_again(self.trainer, step)
        norm = next(norm for norm in collectives.gathered(self.norm.item()) if not math.isfinite(norm))
        findings = [f"rank {number}: {said}" for number, said in enumerate(collectives.gathered(finding))]
        if rank == 0:
            details = {
                "step": step,
                "norm": str(norm),
                "first_not_finite": findings,
                "rows": {f"rank {number}": micro_batch for number, micro_batch in enumerate(rows)},
            }
            safe_files.write_text(place, "finding.json", masked_json(details, 1) + "\n")
        what = f"the gradients of step {step} are NaN or Inf"
        if self.in_a_row > 1:
            what += f", after {self.in_a_row - 1} such steps before it"
        raise UserError(
            Problem(
                what,
                where=str(place),
                found="; ".join([str(norm), *findings]),
                fix="lower `train.learning_rate`, or inspect this module and the examples of the step",
                code="non-finite",
            ),
            code=Exit.TRAINING,
        )


def callbacks(
    section: Train, precision: str, folder: RunFolder, screen: Console, checks: RunChecks
) -> list[Any]:
    """Return the callbacks of this module. Under fp16, the loss scaler itself skips steps with NaN or Inf.

    Raises:
        UserError: the recipe allows skipped steps under DeepSpeed (exit 3).
    """
    if section.skip_nonfinite and deepspeed_zero.used():
        raise UserError(
            Problem(
                "train.skip_nonfinite does not work with DeepSpeed",
                "train.skip_nonfinite",
                found=str(section.skip_nonfinite),
                why="DeepSpeed updates the weights before finetune can check",
                fix="train.skip_nonfinite: 0",
                code="launch-config",
            ),
            code=Exit.ENVIRONMENT,
        )
    allowed, fp16 = section.skip_nonfinite, precision == "fp16"
    steps = Overflow(allowed, screen, checks) if fp16 else NonFinite(allowed, folder.path, screen)
    return [steps, Spikes(section.stop_at_spike, screen)]


def keep(place: Path, rank: int, batches: list[dict[str, Any]]) -> None:
    """Save the micro-batches of a step, with names <name>.<micro-batch>, in one file per rank."""
    from safetensors.torch import save_file

    tensors = {
        f"{name}.{number}": value.detach().cpu().contiguous().clone()
        for number, batch in enumerate(batches)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    name = f"batches-rank{rank}.safetensors"
    safe_files.make_folder(place.parent, place.name)
    with safe_files.private_folder(place, name) as private:
        save_file(tensors, private.path / name)
        safe_files.rename(place, f"{private.name}/{name}", name)


def sources(dataset: Dataset, batch: dict[str, Any]) -> list[str]:
    """Find the examples of a micro-batch in the data by their tokens, as <file>:<line>.

    Loaders get only tokens, so the function searches all examples. It finds none in streamed data.
    """
    names = getattr(dataset, "column_names", None) or []
    if "where" not in names or not hasattr(dataset, "__len__"):
        return []
    ids = batch["input_ids"].cpu()
    if "attention_mask" in batch:
        texts = [row[mask.bool()] for row, mask in zip(ids, batch["attention_mask"].cpu(), strict=True)]
    else:
        texts = list(ids[0].split(batch["cu_seq_lens_q"].diff().tolist()))
    wanted = {tuple(text.tolist()) for text in texts}
    source_names = list[str]()
    for number in _of_lengths(dataset, {len(text) for text in wanted}):
        row, end = dataset[number], 0
        for length, where in zip(row.get("seq_lengths", [len(row["input_ids"])]), row["where"], strict=True):
            end += length
            if tuple(row["input_ids"][end - length : end]) in wanted:
                source_names.append(where)
    return source_names


def _of_lengths(dataset: Any, lengths: set[int]) -> Iterator[int]:
    """Return the indices of the sequences with an example of one of these lengths."""
    packed = "seq_lengths" in dataset.column_names
    column, first = "seq_lengths" if packed else "input_ids", 0
    for table in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        values = table[column].combine_chunks()
        counts = (values.flatten() if packed else values.value_lengths()).to_numpy()
        rows = values.value_parent_indices().to_numpy() if packed else np.arange(len(values))
        yield from (first + np.unique(rows[np.isin(counts, sorted(lengths))])).tolist()
        first += len(values)


def look_again(trainer: Steps, step: int) -> str:
    """Run a step with NaN or Inf again. Return where the first ones appear, or why finetune can't look."""
    batches, model = trainer.micro_batches.kept.get(step, []), trainer.model
    if sharded_tensors.sharded(model) or hasattr(trainer.model_wrapped, "backward"):
        return "not searched: the launch shards the weights or their state"
    if transformer_engine_layers.used():
        return "not searched: processes communicate in each forward pass of TransformerEngine"
    parts = trainer.micro_batches.divided(batches, getattr(trainer.args, "pad_to_multiple_of", None))
    try:
        reports = [first_not_finite(model, partial(trainer.loss_of, part)) for part in parts]
    except torch.OutOfMemoryError:
        return "not found: too little memory to repeat the step"
    said = [f"{what} (micro-batch {n} of {len(reports)})" for n, what in enumerate(reports, start=1) if what]
    return next(iter(said), "finite when the step was repeated, so the cause is gone")


def first_not_finite(model: torch.nn.Module, forward: Callable[..., Any]) -> str:
    """Find the first module with NaN or Inf in a forward and backward pass.

    Args:
        forward: computes the loss of one micro-batch by `model`.
    """
    bad = [name for name, p in trainable_parameters.trainable(model).items() if not torch.isfinite(p).all()]
    if bad:
        return f"trained weights are NaN or Inf ({len(bad)} tensors, {bad[0]} the first)"
    model.zero_grad()
    names: list[str] = []

    def look(name: str, output: torch.Tensor) -> None:
        tensors = [t for t in (output if isinstance(output, (tuple, list)) else [output]) if _real(t)]
        if not names and not all(torch.isfinite(t).all() for t in tensors):
            names.append(name)

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            value = forward()
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
    if names:
        return f"the output of {names[0]}"
    if not torch.isfinite(value):
        return "the loss, of outputs that are finite"
    trained = trainable_parameters.trainable(model).items()
    bad = [name for name, p in trained if p.grad is not None and not torch.isfinite(p.grad).all()]
    return f"the gradient of {bad[-1]}" if bad else ""


def _real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Overflow(TrainerCallback):
    """End a run in fp16 if the loss scaler skips too many consecutive steps.

    The scaler skips a step with overflowing gradients, and halves its scale. From 65,536, it reaches 1 after
    16 halvings. A later overflow means that the loss or the weights are NaN or Inf without a scale.
    """

    def __init__(self, allowed: int, screen: Console, checks: RunChecks) -> None:
        """Args: allowed: consecutive steps that may be skipped in addition to the scaler's own."""
        self.most, self.screen, self.checks = HALVINGS + allowed, screen, checks
        self.in_a_row = self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: AcceleratedOptimizer,
        **kwargs: object,
    ) -> None:
        if not optimizer.step_was_skipped:
            self.in_a_row = 0
            return
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        if self.in_a_row > self.most:
            raise UserError(
                Problem(
                    f"the loss scaler of fp16 has skipped {self.in_a_row} steps in a row",
                    found=f"after step {state.global_step}",
                    why="the loss or the weights are NaN or Inf",
                    fix="lower `train.learning_rate`, or use bf16",
                    code="non-finite",
                ),
                code=Exit.TRAINING,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.checks.add(
            "steps skipped by fp16's loss scaler",
            expected="as few as possible",
            actual=f"{self.skipped} of {state.global_step}",
            how="skipped steps, as Accelerate's optimizer reports them",
            ok=True,
        )
        if self.skipped:
            self.screen.say(
                f"note: the loss scaler of fp16 skipped {self.skipped} steps with overflowing gradients"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        logs["skipped_steps"] = self.skipped


class Spikes(TrainerCallback):
    """Print a note at a spike of the loss, or end the run if the recipe asks for it.

    A spike is `IN_A_ROW` consecutive logged losses, each above `factor` times the median of the `WINDOW`
    logged losses before. A single high loss is a hard batch. Unlike a mean, a median does not follow a few
    high losses.
    """

    def __init__(self, stop_at: float | None, screen: Console) -> None:
        self.stop_at, self.screen = stop_at, screen
        self.losses: deque[float] = deque(maxlen=WINDOW + IN_A_ROW)
        self.said = False

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "said": self.said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses.extend(state["losses"])
        self.said = state["said"]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if "loss" not in logs:
            return
        self.losses.append(logs["loss"])
        factor = spike(list(self.losses))
        if self.stop_at is not None and factor > self.stop_at:
            raise UserError(
                Problem(
                    f"the loss is {factor:.1f} times the median of the previous {WINDOW} values, "
                    f"{IN_A_ROW} times in a row",
                    "train.stop_at_spike",
                    found=f"{logs['loss']:.4g} after step {state.global_step}",
                    fix="lower `train.learning_rate` or raise `train.warmup_steps`, or resume with --resume",
                    code="non-finite",
                ),
                code=Exit.TRAINING,
            )
        if factor > WORTH_A_WORD and not self.said:
            self.said = True
            self.screen.say(
                f"note: the loss is {factor:.1f} times its median before (see train.stop_at_spike)"
            )


def spike(losses: list[float]) -> float:
    """Return the smallest of the last losses divided by the median before them; 0: too few losses."""
    if len(losses) < WINDOW + IN_A_ROW:
        return 0.0
    before, last = losses[-WINDOW - IN_A_ROW : -IN_A_ROW], losses[-IN_A_ROW:]
    before = [value for value in before if not math.isnan(value)]  # skipped steps have NaN
    median = max(SMALL, statistics.median(before or [SMALL]))
    least = min(math.inf if math.isnan(value) else value for value in last)
    return least / median
