"""Write the metrics of each logged step, and print notes on slow data loading."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.autoconfig.machine_setup import Setup
from finetune.core import safe_files, strict_json
from finetune.core.console import Console
from finetune.hardware.detection import Hardware
from finetune.run_folder.run_folder import RunFolder

DATA_WAIT = 0.05  # share of the time of all steps that prints a note
COUNTED = 20  # steps of a process before a note during training
# Metrics of some runs only: AdaLoRA, corrected steps, mixtures of experts
OPTIONAL = ("orthogonality", "skipped_steps", "aux_loss", "router_entropy", "expert_utilization")
WAITING = "train.dataloader_num_workers, or `finetune profile` for where the time goes"


class Metrics(TrainerCallback):
    """Write one flat JSON object per logged step to metrics.jsonl, and a line to the screen."""

    def __init__(
        self, folder: RunFolder, screen: Console, setup: Setup, *, batch: int, flops_per_token: float
    ) -> None:
        self.folder, self.screen, self.batch = folder.path, screen, batch
        self.hardware, self.processes = setup.hardware, setup.launch.processes
        self.flops_per_token = flops_per_token
        self.waited = 0.0  # seconds of waiting for data since the last logged step
        self.all_waited = self.all_seconds = 0.0
        self.idle_since = self.logged_at = self.live_since = time.perf_counter()
        self.logged_step = self.logged_tokens = 0
        self.live_steps, self.live_waited, self.warned = 0, 0.0, False

        self.elapsed = 0.0  # seconds since the last logged step before this process resumed

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.idle_since = time.perf_counter()
        self.logged_at = self.idle_since - self.elapsed
        self.screen.say("training (losses in nats per token)")
        self.screen.start(state.max_steps, state.global_step)

    def state_dict(self) -> dict[str, Any]:
        elapsed = time.perf_counter() - self.logged_at
        return {"step": self.logged_step, "tokens": self.logged_tokens, "seconds": [elapsed, self.waited]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.logged_step, self.logged_tokens = state["step"], state["tokens"]
        self.elapsed, self.waited = state["seconds"]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.screen.stop()
        if (share := self.all_waited / max(self.all_seconds, 1e-9)) > DATA_WAIT:
            self.screen.say(f"note: steps waited for data {share:.0%} of their time: {WAITING}")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        now = time.perf_counter()
        self.waited += now - self.idle_since
        if self.live_steps == 0:  # the workers are still starting for the first batch
            self.live_since = now
        else:
            self.live_waited += now - self.idle_since
        share = self.live_waited / max(now - self.live_since, 1e-9)
        if self.live_steps >= COUNTED and share > DATA_WAIT and not self.warned:
            self.warned = True
            what = f"the last {self.live_steps} steps waited for data {share:.0%} of their time"
            self.screen.say(f"note: {what}: {WAITING}")
        self.live_steps += 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.screen.reach(state.global_step)
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last step, whatever logging_steps is

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
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
            **(memory_use := memory(self.hardware)),
        }
        record |= {name: logs[name] for name in OPTIONAL if name in logs}
        ours = ("tokens_per_second", "samples_per_second", "step_seconds", "mfu", "data_wait", *memory_use)
        logs.update({name: record[name] for name in ours if record[name] is not None})  # for trackers
        self.all_waited, self.all_seconds = self.all_waited + self.waited, self.all_seconds + seconds * steps
        self.append(record)
        on_gpu = record["gpu_memory_gib"]
        used = f"VRAM {on_gpu:.1f} GiB" if on_gpu else f"RAM {record['host_memory_gib']:.1f} GiB"
        self.screen.step(
            state.global_step, state.max_steps, f"loss {logs['loss']:.4f}  {rate:,.0f} tokens/s  {used}"
        )
        self.logged_at, self.logged_step, self.logged_tokens, self.waited = (
            now,
            state.global_step,
            tokens,
            0.0,
        )

    def append(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        with safe_files.open_append(self.folder, "metrics.jsonl") as file:
            file.write(json.dumps(strict_json.spelt(record)) + "\n")

    def loads(self) -> None:
        """Start to count the waiting time for data, after logging and saving."""
        self.idle_since = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Exclude time in which something other than training ran."""
        self.logged_at += seconds
        self.live_since += seconds

    def _mfu(self, tokens_per_second: float) -> float | None:
        peak = self.hardware.peak_flops
        return tokens_per_second * self.flops_per_token / (peak * self.processes) if peak else None


def memory(hardware: Hardware) -> dict[str, float | None]:
    """Return the peak memory of the GPU and of this process in GiB, and the GPU utilization.

    On a CPU, also return the CPU seconds of this process and its loaders so far.
    """
    import psutil

    own = psutil.Process()
    host = own.memory_info().rss / 2**30
    if hardware.device != "cuda":
        taken = sum(sum(process.cpu_times()[:2]) for process in (own, *own.children()))
        absent = {"gpu_memory_gib": None, "gpu_utilization": None}
        return {**absent, "host_memory_gib": host, "cpu_seconds": taken}
    try:
        busy = torch.cuda.utilization() / 100
    except (ModuleNotFoundError, RuntimeError):  # needs nvidia-ml-py
        busy = None
    return {
        "gpu_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_memory_gib": host,
        "gpu_utilization": busy,
    }
