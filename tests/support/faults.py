"""Faults on purpose, in runs of tests: `with injected(Fault("oom", step=3)): train(...)`.

As a script, it is `finetune` with faults: `python tests/support/faults.py "kill step=5 rank=1" train ...`.
Several are separated by commas, and "" is none. Kinds:

    kill    this process is killed (SIGKILL) in the first forward pass of the step
    raise   an exception that nobody expects, there
    hang    this process sleeps there for ever
    nan     a gradient of the step becomes NaN, once, before ranks share theirs
    weight  a trained weight becomes NaN before the step
    input   an embedding becomes infinite in each forward pass of the step
    oom     backward runs out of memory: once in the step; or, from the step on (also in the search of a
            batch size), each of more than so many rows or tokens
    disk    the first checkpoint of the step or later finds the disk full, once
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
import safetensors.torch
import torch
from transformers import TrainerCallback

from finetune.checkpointing import checkpoints
from finetune.cli import main
from finetune.training import batch_search, pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator


SCRIPT = str(Path(__file__).resolve())


class Fault(NamedTuple):
    kind: str
    step: int = 0
    rank: int = 0
    life: int = 0
    """How often torchrun has restarted the process."""
    rows: int = 0
    tokens: int = 0


class Injected(Exception):
    """The exception of `raise`."""


def read(text: str) -> list[Fault]:
    """The faults of a command line, as the head of this file shows them."""
    words = [part.split() for part in text.split(",") if part]
    given = [[option.partition("=")[::2] for option in options] for _, *options in words]
    return [
        Fault(kind, **{name: int(value) for name, value in one})
        for (kind, *_), one in zip(words, given, strict=True)
    ]


class Strike(TrainerCallback):
    """Strikes those faults that are meant for this process."""

    def __init__(self, *faults: Fault) -> None:
        own = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.faults = [fault for fault in faults if (fault.rank, fault.life) == own]
        self.struck: set[Fault] = set()
        self.step = 0
        self.rows = self.tokens = 0
        """Of the micro-batch that is in forward or backward."""
        self.saved = 0
        """The step whose checkpoint is written."""

    def due(self, *kinds: str) -> Iterator[Fault]:
        return (one for one in self.faults if one.kind in kinds and one.step == self.step)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = 0
        self.watch(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step + 1
        for _ in self.due("weight"):
            next(p for p in model.parameters() if p.requires_grad).data.view(-1)[0] = float("nan")

    def watch(self, model: Any) -> list[Any]:
        """Strike in forward and backward passes of this model from now on; the hooks, to be removed."""
        embeddings = model.get_input_embeddings()
        trained = next(p for p in model.parameters() if p.requires_grad)
        return [
            embeddings.register_forward_pre_hook(self.before_forward),
            embeddings.register_forward_hook(self.in_forward, prepend=True),
            trained.register_post_accumulate_grad_hook(self.in_backward),
        ]

    def before_forward(self, module: Any, given: tuple[Any, ...]) -> None:
        self.rows, self.tokens = len(given[0]), given[0].numel()
        for fault in self.due("kill", "raise", "hang"):
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == "raise":
                raise Injected(f"in step {self.step}")
            while True:
                time.sleep(1)

    def in_forward(self, module: Any, given: Any, output: Any) -> Any:
        if not any(self.due("input")):
            return None
        output = output.clone()
        output.view(-1)[0] = float("inf")
        return output

    def in_backward(self, parameter: Any) -> None:
        for fault in [fault for fault in self.due("nan", "oom") if not fault.rows + fault.tokens]:
            if fault not in self.struck:
                self.struck.add(fault)
                if fault.kind == "oom":
                    self.run_out_of_memory()
                parameter.grad.view(-1)[0] = float("nan")
        for fault in [fault for fault in self.faults if fault.kind == "oom" and self.step >= fault.step]:
            if 0 < fault.rows < self.rows or 0 < fault.tokens < self.tokens:
                self.run_out_of_memory()

    def run_out_of_memory(self) -> NoReturn:
        raise torch.OutOfMemoryError(f"injected: {self.rows} rows in step {self.step}")

    def search(self, model: Any, *given: Any, **named: Any) -> Any:
        """`batch_search.search`, which has no callbacks."""
        hooks = self.watch(model)
        try:
            return _search(model, *given, **named)
        finally:
            for hook in hooks:
                hook.remove()

    def write(self, place: Path, step: int, *given: Any) -> Path:
        """`checkpoints.write`, which says whose files `save_file` writes."""
        self.saved = step
        return _write(place, step, *given)

    def save_file(self, tensors: Any, path: Path, *given: Any) -> None:
        """`safetensors.torch.save_file`, which a full disk ends after a few bytes."""
        for fault in self.faults:
            if fault.kind == "disk" and self.saved >= fault.step and fault not in self.struck:
                self.struck.add(fault)
                path.write_bytes(bytes(8))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _save_file(tensors, path, *given)


_search, _write, _save_file = batch_search.search, checkpoints.write, safetensors.torch.save_file


@contextlib.contextmanager
def injected(*faults: Fault) -> Iterator[None]:
    """Each run that is begun here meets these faults anew."""
    train = pipeline.run

    def run(*given: Any, **named: Any) -> Any:
        strike = Strike(*faults)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_search, "search", strike.search)
            patch.setattr(checkpoints, "write", strike.write)
            patch.setattr("safetensors.torch.save_file", strike.save_file)
            return train(*given, **named, callbacks=[strike])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", run)
        yield


if __name__ == "__main__":
    with injected(*read(sys.argv[1])):
        sys.exit(main.main(sys.argv[2:]))
