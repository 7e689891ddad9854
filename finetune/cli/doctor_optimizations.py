"""List the state of each optimization on this machine, for `finetune doctor`."""

from __future__ import annotations

from typing import Any, NamedTuple

from finetune.autoconfig import data_loader, launch_settings, mixed_precision
from finetune.autoconfig.batch_size import most_processes
from finetune.autoconfig.compilation import Work, choose_compile
from finetune.cli import doctor_choices
from finetune.core import run_checks
from finetune.core.packages import install_extra, installed
from finetune.hardware.detection import Hardware
from finetune.quantization import qat
from finetune.recipe import qat_rules
from finetune.recipe.adapter_types import FOUR_BIT, base_storage
from finetune.recipe.schema import Data, Recipe, Speed, Train


class Optimization(NamedTuple):
    name: str
    where: str
    state: str  # active | off | not possible
    why: str
    needs: str = "any"


def optimizations(recipe: Recipe | None, machine: Hardware) -> list[Optimization]:
    """Return the state of every optimization for this recipe on this machine."""
    train = recipe.train if recipe else Train()
    given = train.passed_on()
    speed, data = (recipe.speed, recipe.data) if recipe else (Speed(), Data(name="-"))
    return [
        *_precision(machine, given, doctor_choices.base(recipe, machine)),
        _attention(recipe, machine),
        *_memory(speed, recipe, machine),
        *_optimizer(given),
        *_batches(train, given, data),
        *_loader(train, given, machine),
    ]


def _precision(machine: Hardware, given: dict[str, Any], base: run_checks.Choice) -> list[Optimization]:
    gpu, ampere = machine.device == "cuda", machine.capability >= (8, 0)
    launch = "mixed_precision in the accelerate config"
    bf16 = Optimization("bf16 autocast", launch, "not possible", "no GPU with bf16", "sm_80")
    if not gpu:
        bf16 = Optimization(
            "bf16 autocast",
            launch,
            "off",
            "fp32 is the default on a CPU; set mixed_precision: bf16 in the accelerate config",
        )
    tf32 = Optimization("TF32", "train.tf32", "not possible", "no GPU with TF32", "sm_80")
    if gpu and ampere:
        bf16 = bf16._replace(state="active", why="the default on GPUs that support bf16")
        requested = bool(given.get("tf32"))
        why = "asked for" if requested else "bf16 autocast leaves little in fp32; set train.tf32=true"
        tf32 = tf32._replace(state="active" if requested else "off", why=why)
    fp8 = "active" if base.value == "fp8" else "off"
    missing = mixed_precision.fp8_missing(machine, launch_settings.read(machine).precision)
    fp8, why = ("not possible", missing) if missing else (fp8, base.reason)
    benchmark = Optimization("cuDNN benchmark", "nowhere", "off", "a decoder has no convolutions", "GPU")
    return [bf16, tf32, Optimization("fp8 base model", "model.quantization", fp8, why, "sm_89"), benchmark]


def _attention(recipe: Recipe | None, machine: Hardware) -> Optimization:
    name, reason = doctor_choices.attention(recipe, machine)
    state = "not possible" if name == "-" else "off" if name == "eager" else "active"
    text = reason if name == "-" else f"{name}: {reason}"
    return Optimization("fused attention", "model.attention", state, text)


def _memory(speed: Speed, recipe: Recipe | None, machine: Hardware) -> list[Optimization]:
    compile, reason = choose_compile(speed.compile, Work(0, None), machine)
    state = "active" if compile == "on" else "off"
    is_set, gpu = speed.activation_checkpointing != "auto", machine.device == "cuda"
    checkpointing = "active" if speed.activation_checkpointing != "none" and (is_set or gpu) else "off"
    why = "asked for" if is_set else "auto: CPU memory is large enough"
    if gpu and not is_set:
        why = "auto: chosen when the model is loaded, from its size and the GPU memory"
    four_bit = recipe and base_storage(recipe.adapter.type, recipe.model.quantization) in FOUR_BIT
    bnb = "bitsandbytes is installed" if installed("bitsandbytes") else install_extra("bnb")
    nf4 = "active" if four_bit else "off" if installed("bitsandbytes") else "not possible"
    return [
        Optimization("torch.compile", "speed.compile", state, reason),
        Optimization("activation checkpointing", "speed.activation_checkpointing", checkpointing, why),
        Optimization("4-bit base model (NF4)", "adapter.type: qlora", nf4, "asked for" if four_bit else bnb),
        Optimization("CPU offload", "speed.offload", *_offload(speed.offload, machine)),
        _loss(speed),
        _qat(speed),
    ]


def _offload(requested: str, machine: Hardware) -> tuple[str, str]:
    if machine.device == "cpu":
        return "not possible", "there is no GPU whose memory it could save"
    if requested == "auto":
        return "off", "auto: chosen when the model is loaded, if a large fp8 model needs memory"
    return ("off", "asked for: none") if requested == "none" else ("active", requested)


def _loss(speed: Speed) -> Optimization:
    name, where = "chunked loss", "speed.loss"
    if speed.loss == "trl":
        return Optimization(name, where, "off", "asked for: trl")
    why = "asked for" if speed.loss != "auto" else "auto: for models with the standard loss"
    return Optimization(name, where, "active", why)


def _qat(speed: Speed) -> Optimization:
    """Return the state of quantization-aware training, which only improves a quantized export."""
    name, where, absent = "quantization-aware training", "speed.qat", qat_rules.missing()
    if absent:
        return Optimization(name, where, "not possible", absent.fix)
    if speed.qat:
        return Optimization(name, where, "active", f"asked for: {qat.describe(speed.qat)}")
    return Optimization(name, where, "off", "only useful before `finetune merge --quantize`")


def _optimizer(given: dict[str, Any]) -> list[Optimization]:
    optim = str(given.get("optim", "adamw_torch_fused"))
    fused = "active" if "fused" in optim else "off"
    clip = given.get("max_grad_norm", 1.0)
    return [
        Optimization("fused AdamW", "train.optim", fused, f"optim: {optim}"),
        Optimization(
            "8-bit optimizer",
            "train.optim",
            "active" if "8bit" in optim or "4bit" in optim else "off",
            f"optim: {optim}",
        ),
        Optimization("set_to_none", "the Trainer", "active", "model.zero_grad() frees the gradients"),
        Optimization(
            "gradient clipping",
            "train.max_grad_norm",
            "active" if clip else "off",
            f"at norm {clip:g}",
        ),
    ]


def _batches(train: Train, given: dict[str, Any], data: Data) -> list[Optimization]:
    packing, flat = data.packing, data.flat
    effective = f"effective batch {train.effective_batch_size}"
    stated = train.per_device_train_batch_size
    micro = {None: "micro-batch size of at most 8", "auto": "largest micro-batch size that fits"}
    split = f"{effective}, {micro.get(stated, f'micro-batch size {stated}')}"
    bucketing = given.get("train_sampling_strategy") == "group_by_length"
    how = "not for streams" if data.streaming else "set train.train_sampling_strategy=group_by_length"
    return [
        Optimization("gradient accumulation", "train.effective_batch_size", "active", split),
        Optimization(
            "automatic batch size",
            "train.per_device_train_batch_size",
            "active" if stated == "auto" else "off",
            "searched with the longest examples"
            if stated == "auto"
            else "auto searches it; when out of memory, a run halves the micro-batch size",
        ),
        Optimization(
            "packing",
            "data.packing",
            "active" if packing else "off",
            f"sequences of {data.max_length} tokens" if packing else "set data.packing=true to avoid padding",
        ),
        Optimization(
            "padding-free batches",
            "data.padding_free",
            "active" if flat else "off",
            "examples are concatenated" if flat else "set data.padding_free=true to concatenate examples",
        ),
        Optimization(
            "length bucketing",
            "train.train_sampling_strategy",
            "active" if bucketing else "off",
            "asked for" if bucketing else how,
        ),
    ]


def _loader(train: Train, given: dict[str, Any], machine: Hardware) -> list[Optimization]:
    given = {**data_loader.loader(machine, most_processes(train, machine.count)[0]), **given}
    workers = int(given["dataloader_num_workers"])
    pinned = given["dataloader_pin_memory"] and machine.device == "cuda"
    state = "active" if pinned else "not possible" if machine.device == "cpu" else "off"
    kept = "active" if workers and given.get("dataloader_persistent_workers") else "off"
    why = f"{workers} workers" if workers else "0 workers, because the data is prepared before training"
    return [
        Optimization(
            "pinned memory",
            "train.dataloader_pin_memory",
            state,
            "copies overlap with computation",
            "GPU",
        ),
        Optimization("loader workers", "train.dataloader_num_workers", "active" if workers else "off", why),
        Optimization("persistent workers", "train.dataloader_persistent_workers", kept, why),
    ]
