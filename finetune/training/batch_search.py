"""`train.per_device_train_batch_size: auto`: find the largest micro-batch size that fits in memory."""

from __future__ import annotations

import resource
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.autoconfig.batch_size import MARGIN, Batch, sizes, with_micro_batch
from finetune.checkpointing import training_state
from finetune.core import upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives
from finetune.recipe.schema import Data
from finetune.speed import chunked_cross_entropy, lm_head_loss, static_shapes


class Trial(NamedTuple):
    rows: int
    peak: float
    """Peak memory in bytes; infinity: out of memory."""


class SearchData(NamedTuple):
    """The data of the search."""

    dataset: Any
    """The training data."""
    data: Data
    pad_token: int


class StepKind(NamedTuple):
    """The memory of a step in addition to the model."""

    compiled: bool | None
    """Whether the chunked loss is compiled; `None`: another loss, with all logits."""
    bytes_per_parameter: float
    """Bytes per trainable parameter in addition to weight and gradient."""
    fp8: bool = False
    """Whether the loss is `chunked_fp8`."""


def search(
    model: PreTrainedModel | PeftModel, rows: SearchData, batch: Batch, step: StepKind, checks: RunChecks
) -> Batch:
    """Find the largest divisor of each process's share that fits with the longest sequences.

    The search runs forward pass, loss and backward pass of growing micro-batches, with a placeholder for the
    optimizer state. It changes no weight and restores the random state. It tests the next size only if the
    memory of the last two sizes suggests that it fits, so out of memory is rare. It ends the search.

    Args:
        batch: the current batch. Only its effective size and the process's share are used.

    Raises:
        UserError: not even one sequence fits (exit 5).
    """
    share = batch.per_device * batch.accumulation
    lengths = torch.tensor([len(ids) for ids in rows.dataset["input_ids"]])
    longest = lengths.argsort(descending=True, stable=True).tolist()
    total, trials = _total(model.device), list[Trial]()  # without the memory of other processes
    random = training_state.random_state()
    for size in sizes(share, len(longest)):
        if len(trials) > 1 and not collectives.all_of(_next(trials, size) <= MARGIN * total):
            break
        chosen = [rows.dataset[number] for number in longest[:size]]
        inputs = _collated(chosen, rows.data, rows.pad_token, model.device)
        trials.append(Trial(size, _peak(model, inputs, step)))
        if not collectives.all_of(trials[-1].peak <= MARGIN * total):
            break
    torch.compiler.reset()  # after several sizes, torch would compile slower graphs for a changing size
    upstream_private.compile_counters().clear()
    training_state.set_random_state(random)
    fit = [trial for trial in trials if trial.peak <= MARGIN * total]
    size = min(collectives.gathered(fit[-1].rows if fit else 0))
    said = ", ".join(f"{t.rows}: {t.peak / 2**30:.2f} GiB" for t in trials)
    if not size:
        raise UserError(
            Problem(
                "not even one of the longest sequences fits in memory",
                "train.per_device_train_batch_size",
                found=f"{said} of {total / 2**30:.1f} GiB",
                expected=f"{MARGIN:.0%} of it or less",
                fix="run `finetune plan RECIPE`, which suggests settings that need less memory",
                code="out-of-memory",
            ),
            code=Exit.TRAINING,
        )
    checks.add(
        "train.per_device_train_batch_size",
        expected="auto",
        actual=size,
        how=f"forward and backward pass of the longest sequences, by micro-batch size: {said} of "
        f"{total / 2**30:.1f} GiB",
        ok=True,
    )
    return Batch(batch.effective, size, share // size)


def as_before(batch: Batch, contract: dict[str, Any]) -> Batch:
    """Return the batch with the micro-batch size of a checkpoint.

    Raises:
        UserError: the checkpoint has no micro-batch size, or the size does not divide the batch (exit 4).
    """
    key = "train.per_device_train_batch_size"
    size = contract["chosen"].get(key)
    if not size or batch.per_device * batch.accumulation % size:
        raise UserError(
            Problem(
                "the checkpoint's micro-batch size does not divide the effective batch",
                key,
                found=str(size),
                fix=f"{key}: 1",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        )
    return with_micro_batch(batch, size)


def _next(trials: list[Trial], size: int) -> float:
    """Extrapolate the memory of a micro-batch size in bytes from the trials."""
    (a, first), (b, last) = trials[-2:]
    return last + (last - first) / (b - a) * (size - b)


def _collated(rows: list[Any], data: Data, pad_token: int, device: torch.device) -> dict[str, Any]:
    flat = data.flat
    inputs = DataCollatorForLanguageModeling(pad_token_id=pad_token, padding_free=flat)(rows)
    if flat:
        documents = len(inputs["cu_seq_lens_q"]) - 1 + len(rows)
        inputs = static_shapes.fixed_shape(inputs, len(rows) * data.max_length, documents, data.max_length)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def _peak(model: PreTrainedModel | PeftModel, inputs: dict[str, Any], step: StepKind) -> float:
    """Return the peak memory in bytes of a step of these sequences without its update."""
    installed = None
    if step.compiled is not None:
        installed = lm_head_loss.install(model, compiled=step.compiled, fp8=step.fp8)
    trained, training = sum(p.numel() for p in model.parameters() if p.requires_grad), model.training
    model.train()  # enables recomputation and dropout
    _reset(model.device)
    try:
        held = torch.zeros(round(trained * step.bytes_per_parameter), dtype=torch.uint8, device=model.device)
        found = (
            model(**inputs, num_labels=chunked_cross_entropy.numbers(inputs)[0]).nll
            if installed
            else model(**inputs).loss
        )
        found.backward()
        del held, found
    except torch.OutOfMemoryError:
        peak = float("inf")
    else:
        peak = _used(model.device)
    if installed:
        installed.undo()
    model.train(training)
    model.zero_grad()
    clear_device_cache(garbage_collection=True)
    return peak


def _reset(device: torch.device) -> None:
    clear_device_cache(garbage_collection=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _used(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _total(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return float(psutil.Process().memory_info().rss + training_state.available())
