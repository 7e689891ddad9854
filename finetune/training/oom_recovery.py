"""Run a step again with smaller micro-batches after it ran out of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from finetune.autoconfig import decisions, memory_estimate
from finetune.autoconfig.compilation import Work
from finetune.autoconfig.machine_setup import Setup
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.run_checks import Choice, RunChecks
from finetune.data.loss_mask import WEIGHTS
from finetune.distributed import collectives
from finetune.recipe.schema import Speed
from finetune.speed import chunked_cross_entropy
from finetune.speed.live_model_spec import live_model_spec


class MicroBatches:
    """The micro-batches of the last two steps, and the number of parts that each is divided into.

    A step that runs out of memory is run again from its beginning, with the same examples, the same random
    numbers and twice the parts. The gradients equal those of a run with this micro-batch size. Only
    `torch.OutOfMemoryError` counts as out of memory.
    """

    parts = 1

    def __init__(
        self,
        rows: int,
        fixes: Sequence[str] = (),
        tell: Callable[[int, int], None] | None = None,
        needs: Callable[[Any, int], str] = lambda model, rows: "",
    ) -> None:
        """Args:
        rows: number of sequences of a whole micro-batch.
        fixes: changes of the recipe that help if one sequence needs too much memory.
        tell: is called with the step that runs again and its new micro-batch size.
        needs: describes the memory of a step with a micro-batch size.
        """
        self.rows, self.fixes, self.tell, self.needs = rows, fixes, tell, needs
        self.kept: dict[int, list[dict[str, Any]]] = {}
        self.error = ""  # of the attempt that ran out of memory

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = state["parts"]

    def keep(self, step: int, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all micro-batches of the step so far, including this one."""
        self.kept = {number: batches for number, batches in self.kept.items() if number >= step - 1}
        self.kept.setdefault(step, []).append(inputs)
        return self.kept[step]

    def divided(self, batches: list[dict[str, Any]], multiple: int | None) -> Iterator[dict[str, Any]]:
        """Args: multiple: the multiple to which the collator pads a sequence."""
        for batch in batches:
            if self.parts == 1:
                yield batch
            elif "attention_mask" in batch:
                yield from rows_apart(batch, math.ceil(self.rows / self.parts), multiple or 1)
            else:
                yield from documents_apart(batch, self.parts)

    def too_large(self, step: int, said: str, memory_use: str = "") -> UserError:
        """Return the error of a step that can't run again or can't be divided further.

        Args:
            memory_use: the text of `held`, which describes the memory in use.
        """
        rows = math.ceil(self.rows / self.parts)
        least = [n for n in range(1, rows) if self.rows % n == 0]  # sizes that divide a process's share
        fewer = [f"train.per_device_train_batch_size={least[-1]}"] if least else []
        return UserError(
            Problem(
                f"step {step} ran out of memory with a micro-batch size of {rows}",
                found="; ".join(filter(None, [first_line(said), memory_use])),
                fix=", or ".join([*fewer, *self.fixes][:3])
                + " (`finetune plan RECIPE` shows the memory of each)",
                code="out-of-memory",
            ),
            code=Exit.TRAINING,
        )

    def again(self, step: int, describe: Callable[[], str]) -> bool:
        """Return whether a rank ran out of memory. Then all ranks run the step again in smaller parts.

        Args:
            describe: describes the memory in use.

        Raises:
            UserError: there is no smaller part (exit 5).
        """
        (spoilt,) = collectives.any_of(bool(self.error))
        if not spoilt:
            return False
        said = next(filter(None, collectives.gathered(self.error)))
        if self.parts >= self.rows:
            raise self.too_large(step, said, describe())
        self.parts, self.error = self.parts * 2, ""
        rows = math.ceil(self.rows / self.parts)
        if self.tell:
            self.tell(step, rows)
        return True


def needed(
    length: int,
    setup: Setup,
    chosen: dict[str, Choice],
    bytes_per_parameter: float,
    model: PreTrainedModel | PeftModel,
    rows: int,
) -> str:
    """Estimate the GiB of a step of `rows` full sequences by `finetune plan`'s formulas; empty if unknown.

    Args:
        chosen: the choices for `speed:`, by option.
        bytes_per_parameter: bytes per trainable parameter in addition to weight and gradient.
    """
    spec, tokens = live_model_spec(model), rows * length
    if setup.launch.sharded or not spec.layers:
        return ""
    fused, compiled = (chosen[f"speed.{name}"].value == "on" for name in ("fused", "compile"))
    keeps = decisions.keeps_of(spec, 1, chosen["speed.loss"].value, fused=fused, compiled=compiled)
    memory = decisions.plan_memory(spec, Work(tokens, None), keeps, chosen["speed.offload"].value)
    at_loss, at_backward = memory_estimate.peak_activations_gib(
        memory, chosen["speed.activation_checkpointing"].value
    )
    of_head = {"trained": spec.head, "fp8": keeps.loss_fp8}
    at_loss += memory_estimate.loss_gib(model.config, tokens, compiled=compiled, **of_head)
    at_backward += memory_estimate.backward_gib(model.config, tokens, keeps)
    allocated = sum(p.nbytes for p in model.parameters()) + (4 + bytes_per_parameter) * spec.trained
    total = allocated / memory_estimate.GIB + max(at_loss, at_backward)
    total += memory.graphs if chosen["CUDA graphs"].value == "on" else 0.0
    what = f"a micro-batch of {rows} x {length} tokens"
    return f"needed, estimated as by finetune plan: {total:.3g} GiB for {what}"


def tell(whole: int, screen: Console, checks: RunChecks, step: int, rows: int) -> None:
    """Print that steps use a micro-batch size of `rows` instead of `whole` from now on."""
    screen.say(
        f"step {step} ran out of memory and runs again with a micro-batch size of {rows} instead of {whole}"
    )
    checks.add(
        "micro-batch size",
        expected=whole,
        actual=rows,
        how=f"step {step} ran out of memory and ran again with the same examples",
        ok=True,
    )


def held(model: Any, optimizer: object, batches: MicroBatches) -> str:
    """Describe the memory in use in GiB, and the memory needed. On a GPU, include the rest of the peak."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    state = getattr(optimizer, "state", {}).values()
    taken = {
        "frozen weights": sum(p.nbytes for p in parameters if not p.requires_grad),
        "trainable weights": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "optimizer state": sum(
            t.nbytes for one in state for t in one.values() if isinstance(t, torch.Tensor)
        ),
    }
    most = torch.cuda.max_memory_allocated() if _gpu() else 0
    taken["saved activations and other tensors"] = most - sum(taken.values())
    largest = sorted(taken.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {size / 2**30:.3g}" for name, size in largest if size > 0)
    text = f"memory in use, GiB: {text}" + (f"; {most / 2**30:.3g} in total" if most else "")
    return "; ".join(filter(None, [text, batches.needs(model, math.ceil(batches.rows / batches.parts))]))


def fixes(
    speed: Speed,
    quantization: str,
    kind: str,
    max_length: int,
    allowed: Callable[[str], bool],
    *,
    graphs: bool = False,
) -> list[str]:
    """Return changes that need less memory than these settings, the cheapest first.

    Args:
        quantization: `model.quantization`.
        kind: `adapter.type`.
        allowed: returns whether a run would accept a change.
        graphs: whether layers run as CUDA graphs, which have their own memory.
    """
    codes = kind in ("lora", "dora", "rslora") and quantization in ("auto", "none", "fp8", "int8")
    further = {"all": (), "activations": ("all",)}.get(speed.offload, ("all", "activations"))
    offloads = [f"speed.offload={what}" for what in further if _gpu()]
    settings = {
        "speed.compile=default": graphs,
        "speed.activation_checkpointing=full": speed.activation_checkpointing != "full",
        "model.quantization=nf4": codes,
        f"data.max_length={max_length // 2}": max_length > 8,
        next(filter(allowed, offloads), ""): True,
        "adapter.type=lora": kind == "full",
        "a smaller adapter (adapter.r)": kind != "full",
        "several GPUs, or one with more memory: finetune plan says which": True,
    }
    return [text for text, possible in settings.items() if text and possible and allowed(text)]


def rows_apart(batch: dict[str, Any], size: int, multiple: int) -> Iterator[dict[str, Any]]:
    """Divide a padded batch into parts of `size` sequences, each padded to its own longest sequence."""
    rows = len(batch["input_ids"])
    longest = batch["attention_mask"].sum(1)
    for first in range(0, rows, size):
        width = math.ceil(int(longest[first : first + size].max()) / multiple) * multiple
        part = {
            name: value[first : first + size, :width]
            if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,) and value.ndim == 2
            else value
            for name, value in batch.items()
        }
        yield _counted(part, batch)


def documents_apart(batch: dict[str, Any], parts: int) -> Iterator[dict[str, Any]]:
    """Divide a flattened batch between examples into parts of at most the batch's tokens / `parts`.

    A part is longer if an example is.
    """
    borders: list[int] = batch["cu_seq_lens_q"].tolist()
    limit, start = math.ceil(borders[-1] / parts), 0
    while start < len(borders) - 1:
        end = max(start + 1, max(i for i, b in enumerate(borders) if b - borders[start] <= limit))
        yield _counted(_documents(batch, start, end, borders), batch)
        start = end


def _documents(batch: dict[str, Any], start: int, end: int, borders: list[int]) -> dict[str, Any]:
    a, b = borders[start], borders[end]
    part: dict[str, Any] = {name: batch[name][:, a:b] for name in ("input_ids", "labels", "position_ids")}
    if WEIGHTS in batch:
        part[WEIGHTS] = batch[WEIGHTS][:, a:b]
    if "seq_idx" in batch:
        part["seq_idx"] = batch["seq_idx"][:, a:b] - start
    within: Tensor = batch["cu_seq_lens_q"][start : end + 1] - a
    longest = max(borders[i + 1] - borders[i] for i in range(start, end))
    part |= {"cu_seq_lens_q": within, "cu_seq_lens_k": within}
    return part | {"max_length_q": longest, "max_length_k": longest}


def _counted(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    if "num_labels" not in whole:
        return part
    return {
        **part,
        **dict(zip(("num_labels", "num_tokens"), chunked_cross_entropy.numbers(part), strict=True)),
    }


def _gpu() -> bool:
    return torch.cuda.is_initialized()
