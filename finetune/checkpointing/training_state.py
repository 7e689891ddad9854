"""Save and restore the state of a training between two steps, in named parts.

The base model is not saved. A resumed run loads it again and compares its fingerprint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import psutil
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import TrainerState

from finetune.adapters import adalora, trainable_parameters
from finetune.checkpointing import checkpoints, serialization
from finetune.core import formatting
from finetune.core.errors import Exit, Problem, UserError
from finetune.data.loss_mask import WEIGHTS
from finetune.distributed import collectives, deepspeed_zero, launch_environment, sharded_tensors

# Parts that differ between processes. Under ZeRO, the optimizer does too.
RANKS = ("rng", "epoch_rng", "log", "batches")
# The folder with a container's limits.
GROUPS = Path("/sys/fs/cgroup")
# A prime number for the digest of batches.
_FIRST = 2**61 - 1


class Trainer(Protocol):
    """The attributes of the Trainer that a checkpoint saves and restores."""

    accelerator: Any
    batches_digest: Any
    contract: Any
    epoch_rng: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any
    regularizer: Any
    in_checkpoints: Any
    resumed: Any
    state: Any
    writer: Any

    def log_state(self) -> dict[str, Any]: ...
    def restore_log(self, saved: dict[str, Any]) -> None: ...
    def restore_batches(self, saved: object) -> None: ...


def save(trainer: Trainer) -> None:
    """Save the current state. A thread writes it while training continues.

    Rank 0 writes the weights and the optimizer state, which are equal on all ranks. It gathers the parts that
    differ between ranks, and the shards of FSDP and ZeRO. If a copy would fill half of the free memory, the
    live tensors are written before training continues.
    """
    state, split = PartialState(), sharded_tensors.sharded(cast("Any", trainer.model))
    rank_parts = (*RANKS, "optimizer") if deepspeed_zero.used() else RANKS
    own, all_tensors = {name: PARTS[name][0](trainer) for name in rank_parts}, dict[str, torch.Tensor]()
    structure = serialization.flatten(own, all_tensors, f"ranks.{state.process_index}", _copy)
    structures, all_tensors = (
        collectives.gathered_on_main(structure),
        collectives.tensors_on_main(all_tensors),
    )
    if not (state.is_main_process or split):
        return
    shared = {name: take(trainer) for name, (take, _) in PARTS.items() if name not in rank_parts}
    if split:
        shared = sharded_tensors.gathered_values(shared)
    if not state.is_main_process:
        return
    live = sum(p.nbytes for p in _weights(trainer).values())
    here = not split and 3 * live > available() / 2  # weights and two moments
    content: dict[str, Any] = {
        # without its log, because metrics.jsonl holds the log
        "trainer_state.json": {**dataclasses.asdict(trainer.state), "log_history": []},
        checkpoints.CONTRACT: trainer.contract,
    }
    content |= {"ranks.safetensors": all_tensors} if all_tensors else {}
    untensored: dict[str, Any] = {"ranks": structures}
    copy_tensor = partial(_as_it_is, set()) if here or split else _copy
    for name, value in shared.items():
        tensors: dict[str, torch.Tensor] = {}
        untensored[name] = serialization.flatten(value, tensors, name, copy_tensor)
        if tensors:
            content[f"{name}.safetensors"] = tensors
    content["state.json"] = untensored
    trainer.writer.start(trainer.state.global_step, content, here=here)


def available(groups: Path = GROUPS) -> int:
    """Return the bytes of free memory of the machine, or of its container (cgroup v2) if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (int((groups / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no limit
        return free
    return max(0, min(free, limit - used))


def check_memory(checkpoint_bytes: int, free: int) -> None:
    """Check that rank 0 has memory for the full state dict of a sharded training, which `save` gathers there.

    Args:
        checkpoint_bytes: bytes of a checkpoint, which holds trained weights and the optimizer state.
        free: bytes of free memory of rank 0.

    Raises:
        UserError: rank 0 does not have enough memory (exit 3).
    """
    if checkpoint_bytes > free:
        raise UserError(
            Problem(
                "rank 0 has too little memory for a checkpoint",
                "train.save_strategy",
                found=f"{formatting.size(free)} free",
                expected=f"{formatting.size(checkpoint_bytes)} free",
                fix="train.save_strategy: no, or run fewer processes on this machine",
                why="rank 0 gathers the full state dict",
                code="out-of-memory",
            ),
            code=Exit.ENVIRONMENT,
        )


def read(path: Path, groups: Path = GROUPS) -> dict[str, Any]:
    """Read the parts of a checkpoint by name, and its `path`.

    A part that differs between processes comes from this process.

    Raises:
        UserError: a part is missing (exit 4). The machine has no memory for all its processes to read the
            checkpoint (exit 3).
    """
    here, free = int(launch_environment.said("LOCAL_WORLD_SIZE", "1")), available(groups)
    state, apart = PartialState(), path / "ranks.safetensors"
    parts = apart.stat().st_size if apart.exists() else 0
    bytes_per_rank = checkpoints.size_of(path) - parts + parts // state.num_processes
    if here * bytes_per_rank > free:
        raise UserError(
            Problem(
                "the machine has too little memory to read the checkpoint",
                where=str(path),
                found=f"{formatting.size(free)} free",
                expected=f"{here} processes x {formatting.size(bytes_per_rank)}",
                fix="run fewer processes on it",
                code="out-of-memory",
            ),
            code=Exit.ENVIRONMENT,
        )
    layout, rank = structure(path), state.process_index
    with serialization.refusals(path):
        TrainerState(**checkpoints.read_json(path, "trainer_state.json"))  # transformers reads it later
        own = layout.pop("ranks")[rank]
        read = {name: serialization.restore(value, _tensors(path, name)) for name, value in layout.items()}
        return {"path": path, **read, **serialization.restore(own, _tensors(path, "ranks", f"ranks.{rank}."))}


def _tensors(path: Path, name: str, begin: str = "") -> dict[str, torch.Tensor]:
    file = f"{name}.safetensors"
    return checkpoints.read_tensors(path, file, begin) if (path / file).exists() else {}


def structure(path: Path) -> dict[str, Any]:
    """Read the structure of each part of a checkpoint, without its tensors.

    Raises:
        UserError: a part is missing (exit 4).
    """
    with serialization.refusals(path):
        layout = checkpoints.read_json(path, "state.json")
        names = layout.keys() | {name for name, _ in layout["ranks"][0]["dict"]}
    if missing := sorted(PARTS.keys() - names):
        raise UserError(
            Problem(
                "the checkpoint has no state for some parts of the training",
                where=str(path),
                found=", ".join(missing),
                fix="choose another checkpoint with --resume=step-N",
                why="the result of a resume would differ",
                code="checkpoint",
            ),
            code=Exit.ARTIFACT,
        )
    return layout


def put_back(trainer: Trainer, *names: str) -> None:
    """Restore these parts into the trainer. Free large parts, which would else stay in memory.

    Raises:
        UserError: a part has another structure than finetune writes (exit 4).
    """
    for name in names:
        saved = trainer.resumed[name] if name in RANKS else trainer.resumed.pop(name)
        with serialization.refusals(trainer.resumed["path"]):
            if name in ("log", "callbacks"):  # a value of another type can fail many steps later
                serialization.check_alike(saved, PARTS[name][0](trainer), name)
            PARTS[name][1](trainer, saved)


@contextlib.contextmanager
def refusals(trainer: Trainer, checkpoint: Path | None) -> Iterator[None]:
    """Name the checkpoint if the first step after it fails (exit 4): a value in it may have another type."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        if checkpoint is None or trainer.state.global_step > checkpoints.step_of(checkpoint):
            raise
        what, why = "the first step after the checkpoint failed", "a value in it may have another type"
        raise serialization.refusal(checkpoint, error, what, why) from error


def random_state() -> dict[str, Any]:
    """Return the state of every random generator that training uses, including this process's GPU."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}


def set_random_state(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])


def digest(so_far: int | Tensor, inputs: dict[str, Any]) -> Any:
    """Add a batch to the digest `so_far`, an int64 on the batch's device. Do not synchronize with the device.

    Token ids, labels and batches are weighted by their position. Another example, another position or another
    step gives another digest.
    """
    for name in ("input_ids", "labels", *({WEIGHTS} & inputs.keys())):
        flat = inputs[name].reshape(-1).to(torch.int64)
        places = torch.arange(1, flat.numel() + 1, device=flat.device)
        so_far = so_far * _FIRST + ((flat + _FIRST) * (places * _FIRST + 1)).sum() + flat.numel()
    return so_far


def _weights(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Return the trained weights in their training dtype. Under ZeRO-3, they are shards."""
    return trainable_parameters.trainable(trainer.model)


@torch.no_grad()
def _set_weights(trainer: Trainer, saved: dict[str, torch.Tensor]) -> None:
    trained = trainable_parameters.trainable(trainer.model)
    wrong = sorted(
        name
        for name in trained.keys() | saved.keys()
        if name not in trained
        or name not in saved
        or sharded_tensors.shape(trained[name]) != saved[name].shape
        or trained[name].dtype != saved[name].dtype
    )
    if wrong:
        what, found = "the weights of the checkpoint do not fit the model", ", ".join(wrong[:5])
        found += f" and {len(wrong) - 5:,} more tensors" if len(wrong) > 5 else ""
        raise UserError(
            Problem(
                what,
                found=found,
                fix="use the recipe and the base model of the checkpoint",
                code="resume-mismatch",
            ),
            code=Exit.ARTIFACT,
        )
    for name, parameter in trained.items():
        if parameter.shape == saved[name].shape:  # a shard of ZeRO-3 comes from the optimizer instead
            parameter.copy_(sharded_tensors.part_of(saved[name], parameter))


def _allocation(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return AdaLoRA's importances and masks."""
    if trainer.regularizer is None:
        return {}
    tensors = adalora.allocation_state(trainer.model)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("parameter.")}


def _set_allocation(trainer: Trainer, saved: dict[str, torch.Tensor]) -> None:
    if trainer.regularizer is not None:
        weights = {f"parameter.{name}": tensor.detach().clone() for name, tensor in _weights(trainer).items()}
        adalora.restore_allocation(trainer.model, {**weights, **saved})


def _set_optimizer(trainer: Trainer, saved: dict[str, Any]) -> None:
    if deepspeed_zero.used():
        deepspeed_zero.put_back(trainer.optimizer, saved)
        return
    trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for number, moments in saved.get("state", {}).items():  # torchao's offloaded optimizer has no `state`
        for name, value in moments.items():
            if isinstance(value, torch.Tensor):
                moments[name] = sharded_tensors.part_of(value, trained[int(number)])
    trainer.optimizer.load_state_dict(saved)


def _scaler(trainer: Trainer) -> Any:
    """Return the state of the fp16 loss scaler; `None` if there is none."""
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler.state_dict() if scaler is not None else None


def _set_scaler(trainer: Trainer, saved: object) -> None:
    if saved:
        trainer.accelerator.scaler.load_state_dict(saved)


def _set_callbacks(trainer: Trainer, saved: dict[str, Any]) -> None:
    for name, callback in trainer.in_checkpoints.items():
        if name in saved:  # a checkpoint of an older version may lack it: the callback then starts new
            callback.load_state_dict(saved[name])


PARTS: dict[str, tuple[Any, Any]] = {  # name -> (save from the trainer, restore into it)
    "weights": (_weights, _set_weights),
    "allocation": (_allocation, _set_allocation),
    "optimizer": (lambda trainer: deepspeed_zero.state_dict(trainer.optimizer), _set_optimizer),
    "scheduler": (
        lambda trainer: trainer.lr_scheduler.state_dict(),
        lambda trainer, kept: trainer.lr_scheduler.load_state_dict(kept),
    ),
    "scaler": (_scaler, _set_scaler),
    "callbacks": (
        lambda trainer: {name: each.state_dict() for name, each in trainer.in_checkpoints.items()},
        _set_callbacks,
    ),
    "rng": (lambda trainer: random_state(), lambda trainer, kept: set_random_state(kept)),
    # The generators at the start of the epoch, from which the sampler draws the order of the rows.
    "epoch_rng": (lambda trainer: trainer.epoch_rng, lambda trainer, kept: set_random_state(kept)),
    "log": (lambda trainer: trainer.log_state(), lambda trainer, kept: trainer.restore_log(kept)),
    "batches": (
        lambda trainer: torch.as_tensor(trainer.batches_digest, dtype=torch.int64),
        lambda trainer, kept: trainer.restore_batches(kept),
    ),
}


def _as_it_is(places: set[int], tensor: torch.Tensor) -> torch.Tensor:
    """Return the live tensor, or a copy if a tensor in `places` shares its memory.

    bitsandbytes' moments share quantization maps, and safetensors refuses shared memory.
    """
    detached = tensor.detach().contiguous()
    place = detached.untyped_storage().data_ptr()
    if place in places:
        return detached.clone()
    places.add(place)
    return detached


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
