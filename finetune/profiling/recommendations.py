"""Choose the verdict of `finetune profile` in one sentence, and the next change that is not active yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import data_loader
from finetune.autoconfig.batch_size import split_batch
from finetune.distributed import launch_environment
from finetune.kernels import kernel_limits
from finetune.profiling.trace_analysis import COPIES
from finetune.recipe import adapter_rules
from finetune.recipe.adapter_types import QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.hardware.detection import Hardware
    from finetune.planning.plan import Plan
    from finetune.recipe.schema import Recipe

ENOUGH = 0.05  # share of a step below which a cause is not reported
USUAL_GAPS = {"cpu": 0.10, "cuda": 0.03}  # share of a step that the training loop itself always takes
ROWS = 8  # suggested micro-batch size if the batch is tiny


def judge(
    found: dict[str, float],
    padding: float,
    attention: str,
    whole: Recipe,
    made: Plan,
    reached: tuple[float, str] | None = None,
) -> tuple[str, str]:
    """Return a verdict in one sentence and the change that could save the most time.

    The time of GEMMs can only be reduced by fp8. About two thirds of the time of eager attention can be
    saved.

    Args:
        found: shares of a step by kind.
        padding: share of padding tokens.
        attention: the attention implementation.
        made: the plan of the recipe, which knows the active options.
        reached: the share of the peak that GEMMs reach, and the name of the peak.
    """
    gpu = made.machine.device == "cuda"
    masked = attention == "eager" or (gpu and attention == "sdpa")
    waits, gaps, copied = found["data wait"], found["launch gaps"], found.get(COPIES, 0.0)
    sums, passes, attends = found["communication"], found["memory-bound"], found["attention"]
    best = "this machine has no faster attention kernel"
    kernel = "model.attention: auto" if whole.model.attention != "auto" else best
    rarer = "raise train.effective_batch_size for fewer communications"
    # Time that could be saved, description, suggestion
    causes: list[tuple[float, str, Callable[[], str]]] = [
        (waits, f"the step waits for data {waits:.0%} of its time", lambda: loader(whole, made.machine)),
        (
            gaps - USUAL_GAPS[made.machine.device],
            f"the {'GPU' if gpu else 'CPU'} is idle for {gaps:.0%} of the step, because the batch is small",
            lambda: more_rows(whole, gpu),
        ),
        (
            padding * (1 - waits - gaps),
            f"{padding:.0%} of the tokens are padding",
            lambda: less_padding(whole, gpu),
        ),
        (
            attends * (0.67 if masked else 0.0),
            f"{attention} attention takes {attends:.0%} of the step",
            lambda: kernel,
        ),
        (sums, f"communication between processes takes {sums:.0%} of the step", lambda: rarer),
        (
            copied,
            f"copies between GPU and CPU memory take {copied:.0%} of the step",
            lambda: fewer_copies(whole, made),
        ),
        (
            passes * 0.3 * gpu,
            f"memory-bound kernels take {passes:.0%} of the step",
            lambda: fewer_passes(whole, made),
        ),
    ]
    gain, said, lever = max(causes, key=lambda cause: cause[0])
    if gain >= ENOUGH:
        return said, lever()
    share = found["products"] + attends
    text = f"GEMMs and attention take {share:.0%} of the step, and no other part is large"
    text += f"; GEMMs reach {reached[0]:.0%} of {reached[1]}" if reached else ""
    return text, faster_products(whole, made)


def fewer_copies(whole: Recipe, made: Plan) -> str:
    """Suggest less offloading, if the recipe or `auto` offloads."""
    if whole.speed.offload not in ("auto", "none"):
        return "speed.offload: auto"
    if made.choices["offload"].value != "none":
        return "speed.offload: none"
    return "find out why tensors move in each step, such as an offload in the accelerate config or a callback"


def loader(whole: Recipe, machine: Hardware) -> str:
    """Suggest more data loader workers, up to the number of CPU cores."""
    if whole.data.streaming:
        return "data.streaming: false, because a stream is read during training"
    key, given = "dataloader_num_workers", whole.train.passed_on()
    here = int(launch_environment.said("LOCAL_WORLD_SIZE", "1"))
    has = given.get(key, data_loader.loader(machine, here)[key])
    most = max(2, machine.cpu_cores // here)
    if has < most:
        return f"train.{key}: {min(most, max(2, 2 * has))}" + (f" (now {has})" if has else "")
    return f"use a machine with more CPU cores: {has} workers use all cores of this machine"


def more_rows(whole: Recipe, gpu: bool) -> str:
    """Suggest a larger micro-batch size, or a larger effective batch size if there is no accumulation.

    Packing also fills sequences, but it is slower on a CPU (docs/reference/optimizations.md).
    """
    # Context parallel processes share their sequences
    apart = processes() // launch_environment.parallel("CP")
    batch = split_batch(whole.train, apart)
    share = batch.effective // apart
    more = [size for size in range(batch.per_device + 1, share + 1) if share % size == 0]
    packed = "; or data.packing: true" if gpu and not whole.data.packing else ""
    # Auto has already chosen the largest size that fits
    if more and whole.train.per_device_train_batch_size != "auto":
        rows = max([size for size in more if size <= max(ROWS, 2 * batch.per_device)] or more[:1])
        return f"train.per_device_train_batch_size: {rows}{packed}"
    rows = max(ROWS, 2 * share)
    if whole.train.per_device_train_batch_size == "auto":
        return f"train.effective_batch_size: {rows * apart}, if the memory suffices{packed}"
    both = f"train.effective_batch_size: {rows * apart} and train.per_device_train_batch_size: {rows}"
    return f"{both}{packed}"


def less_padding(whole: Recipe, gpu: bool) -> str:
    """Suggest sequences without padding on a GPU, and grouping by length on a CPU, where that is faster."""
    if whole.data.flat:
        return "lower data.max_length, so that sequences have less padding"
    if gpu:
        return "data.packing: true, or data.padding_free: true"
    given = whole.train.passed_on()
    if not whole.data.streaming and given.get("train_sampling_strategy") != "group_by_length":
        return "train.train_sampling_strategy: group_by_length"
    return "lower train.per_device_train_batch_size, so that the examples of a batch differ less in length"


def fewer_passes(whole: Recipe, made: Plan) -> str:
    """Suggest fusing optimizations that are off."""
    off = ["speed.compile: true"] if made.choices["compile"].value == "off" else []
    off += ["speed.fused: auto"] if whole.speed.fused is False else []
    off += ["speed.loss: auto"] if whole.speed.loss == "trl" else []
    return " and ".join(off) or "use a GPU with faster memory; all fusing optimizations are on"


def faster_products(whole: Recipe, made: Plan) -> str:
    """Suggest a frozen base model in fp8, if that is possible and not active."""
    able = made.machine.device == "cuda" and made.machine.capability >= kernel_limits.FP8_CAPABILITY
    stored = made.choices["quantization"].value in ("fp8", *QUANTIZED)
    if able and not stored and not adapter_rules.against_fp8(whole.adapter, whole.speed, whole.eval):
        return "model.quantization: fp8"
    return "use a faster machine"


def processes() -> int:
    return launch_environment.processes()
