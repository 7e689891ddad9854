"""Between steps: metrics, AdaLoRA's allocation, the stop at a non-finite step, receipts of the first step."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from finetune.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.hardware import Hardware
    from finetune.receipts import Ledger
    from finetune.screen import Screen


class AllocateRanks(TrainerCallback):
    """AdaLoRA's `update_and_allocate` at each optimizer step; nothing upstream calls it.

    It runs after the optimizer moved and before gradients are zeroed. `global_step` is counted up only later,
    so the step that just ran is one more; PEFT finalises when the number is equal, so it must be exact.
    """

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        adalora, step = model.base_model, state.global_step + 1
        allocator = adalora.rankallocator
        budget, masks = allocator.budget_schedule(step)
        if (
            masks and budget == allocator.init_bgt
        ):  # nothing to take away yet: PEFT would ask for the 0th smallest
            allocator.update_ipt(adalora.model)
        else:
            adalora.update_and_allocate(step)


class StopOnNonFinite(TrainerCallback):
    """Stop before the update of a step whose gradients are not finite; ranks share gradients, so all stop."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            step = state.global_step + 1
            fix = "lower train.learning_rate, or look at the rows of this step; nothing was updated or saved"
            problem = Problem(f"gradients of step {step} are not finite", found=str(norm.item()), fix=fix)
            raise UserError(problem, code=Exit.TRAINING)


class Metrics(TrainerCallback):
    """One flat JSON object a logged step into metrics.jsonl, and a line for the screen."""

    def __init__(
        self,
        path: Path,
        screen: Screen,
        hardware: Hardware,
        batch: int,
        flops_per_token: float,
        processes: int,
    ) -> None:
        self.path, self.screen, self.hardware, self.batch = path, screen, hardware, batch
        self.flops_per_token, self.processes = flops_per_token, processes
        self.waited = 0.0  # seconds since the last logged step in which no step was running
        self.idle_since = self.logged_at = time.perf_counter()
        self.logged_step = self.logged_tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.idle_since = self.logged_at = time.perf_counter()
        self.screen.start(state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.waited += time.perf_counter() - self.idle_since

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.idle_since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or "loss" not in logs:
            return
        now, steps = time.perf_counter(), state.global_step - self.logged_step
        seconds, tokens = (now - self.logged_at) / steps, int(logs["num_tokens"])
        rate = (tokens - self.logged_tokens) / (seconds * steps)
        record = {
            "step": state.global_step,
            "epoch": logs["epoch"],
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs["learning_rate"],
            "tokens": tokens,
            "tokens_per_second": rate,
            "samples_per_second": self.batch / seconds,
            "step_seconds": seconds,
            "mfu": self._mfu(rate),
            "data_wait": self.waited / (seconds * steps),
            **memory(self.hardware),
        }
        if "orthogonality" in logs:
            record["orthogonality"] = logs["orthogonality"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: _json(v) for k, v in record.items()}) + "\n")
        used = record["gpu_memory_gib"] or record["host_memory_gib"]
        line = f"loss {logs['loss']:.4f}  {rate:,.0f} tokens/s  {used:.1f} GiB"
        self.screen.step(state.global_step, state.max_steps, line)
        self.logged_at, self.logged_step, self.logged_tokens, self.waited = (
            now,
            state.global_step,
            tokens,
            0.0,
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        peak = self.hardware.peak_flops
        return tokens_per_second * self.flops_per_token / (peak * self.processes) if peak else None


class FirstStep(TrainerCallback):
    """Receipts of the first optimizer step, read from the operations and batches that really ran."""

    def __init__(self, ledger: Ledger, *, steps: int, batch: int, precision: str, attention: str) -> None:
        self.ledger, self.steps, self.batch = ledger, steps, batch
        self.precision, self.attention = precision, attention
        self.operations = Operations()
        self.rows = self.micro_batches = self.loss_tokens = 0

    def saw(self, inputs: dict[str, torch.Tensor]) -> None:
        """Count one micro-batch of this process."""
        self.micro_batches += 1
        self.rows += len(inputs["input_ids"])
        self.loss_tokens += int((inputs["labels"][:, 1:] != -100).sum())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        add, seen = self.ledger.add, self.operations
        how = f"rows of step 1: {self.micro_batches} micro-batches x {args.world_size} processes"
        add("train.effective_batch_size", self.batch, self.rows * args.world_size, how)
        add("steps", self.steps, state.max_steps, "the Trainer's own count")
        add(
            "loss tokens in step 1",
            "> 0",
            self.loss_tokens,
            "labels of rank 0",
            ok=self.loss_tokens > 0,
        )
        add(
            "dtype",
            DTYPES[self.precision],
            seen.dtype(),
            "matrix products of the first forward",
            code=Exit.ENVIRONMENT,
        )
        ran = seen.attention()
        asked = self.attention
        add(
            "model.attention",
            asked,
            ran,
            "operations of the first forward",
            ok=attention_ok(asked, ran),
            code=Exit.ENVIRONMENT,
        )
        self.ledger.check()


DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


def attention_ok(asked: str, ran: str) -> bool:
    """Whether the operations that ran are those of the implementation asked for."""
    if asked == "sdpa":
        return ran.startswith("sdpa")
    if asked == "eager":
        return ran == "eager"
    return ran.replace("_", "").startswith(asked.replace("_", "")[:9])


class Operations(TorchDispatchMode):
    """Which attention and which matrix-product dtypes ran while it was active."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}
        self.dtypes: dict[str, int] = {}  # matrix products by dtype, weighted by their size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[name] = self.names.get(name, 0) + 1
        if name in ("mm", "addmm", "bmm"):
            dtype = str(args[-1].dtype).removeprefix("torch.")
            self.dtypes[dtype] = self.dtypes.get(dtype, 0) + args[-1].numel()
        return func(*args, **(kwargs or {}))

    def dtype(self) -> str:
        """The dtype most of the matrix products had."""
        return max(self.dtypes, key=lambda name: self.dtypes[name]) if self.dtypes else "none seen"

    def attention(self) -> str:
        """The attention that ran: `sdpa (<kernel>)`, `flash_attn ...`, `flex_attention` or `eager`."""
        for name in self.names:
            if "scaled_dot_product" in name:
                kernel = name.removeprefix("_scaled_dot_product_").removesuffix("_attention")
                return f"sdpa ({kernel})"
            if "flash_attn" in name or "flex_attention" in name:
                return name.strip("_")
        return "eager" if any("softmax" in name for name in self.names) else "none seen"


def memory(hardware: Hardware) -> dict[str, float | None]:
    """Peak memory of the GPU and of this process, GiB, and how busy the GPU is (a share)."""
    import psutil

    host = psutil.Process().memory_info().rss / 2**30
    if hardware.device != "cuda":
        return {"gpu_memory_gib": None, "host_memory_gib": host, "gpu_utilisation": None}
    try:
        busy = torch.cuda.utilization() / 100
    except (ModuleNotFoundError, RuntimeError):  # needs nvidia-ml-py
        busy = None
    return {
        "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_memory_gib": host,
        "gpu_utilisation": busy,
    }


def _json(value: Any) -> Any:
    """Non-finite numbers are not JSON; they are written as text, never replaced."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
