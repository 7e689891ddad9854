"""Where a launch contradicts the recipe, the machine or itself: each problem names both sides."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from finetune.autoconfig import attention_choice, batch_size, mixed_precision
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.packages import install_extra, installed
from finetune.distributed import launch_environment
from finetune.distributed.launch_environment import (
    BACKENDS,
    CONFIG,
    FROZEN,
    ONCE,
    TE_TOKENS,
    Fp8,
    fp8,
    means_fp8,
    on,
    parallel,
    read_by_rank_0,
    said,
    sharded,
    splitter,
    zero_stage,
)
from finetune.hardware import detection
from finetune.launch import accelerate_config
from finetune.models import model_files
from finetune.recipe import adapter_rules, adapter_types, qat_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Adapter, Data, Model, Recipe, Speed, Train

# What Accelerate hands on to TransformerEngine: `most_recent`, its own default, it drops, and TE takes `max`;
# of the others TE knows no argument
TE_TAKES = {
    "AMAX_COMPUTE_ALGO": ("max",),
    "FORMAT": ("HYBRID", "E4M3"),
    "INTERVAL": ("1",),
    "USE_MXFP8_BLOCK_SCALING": ("False",),
    **{f"OVERRIDE_{name}": ("False",) for name in ("FPROP", "DGRAD", "WGRAD")},
}
BASE_INSTEAD = "accelerate_configs/8xh100_fp8.yaml: the frozen fp8 base, under any adapter"
OTHER_FP8 = {  # of full, where the package of one is not installed
    "TE": "accelerate_configs/8xh100_fp8_torchao.yaml",
    "AO": "accelerate_configs/8xh100_fp8_te.yaml",
}


def check(
    machine: Hardware, adapter: Adapter, model: Model, data: Data, speed: Speed, every: int | None = None
) -> None:
    """Refuse what can't be meant before any weight is loaded.

    Args:
        every: `eval.eval_steps`.

    Raises:
        UserError: every contradiction (exit 2); a package that the launch needs (exit 3).
    """
    if found := against(machine, adapter, model, data, speed, every):
        raise UserError(*found)
    package, extra = accelerate_config.FP8_PACKAGES.get(fp8().kind, ("torch", ""))
    if not installed(package):
        what = f"fp8_config.backend: {fp8().kind} of the {CONFIG} needs {package}, which is not installed"
        fix = f"{install_extra(extra)}; or {OTHER_FP8[fp8().kind]}"  # full alone comes here
        raise UserError(Problem(what, fix=fix), code=Exit.ENVIRONMENT)


def against(
    machine: Hardware, adapter: Adapter, model: Model, data: Data, speed: Speed, every: int | None
) -> list[Problem]:
    """Every contradiction, those of single options of the adapter and of `eval.eval_steps` too."""
    found = problems(machine, adapter.type, model, data, speed)
    init = adapter.options().get("init_lora_weights")
    if sharded() and isinstance(init, str) and init.startswith(adapter_types.PREPARED_INITS):
        what = (
            f"{init} looks at the whole base for its first weights, which {sharded()} of the {CONFIG} splits"
        )
        fix = "init_lora_weights: true, or ddp_8.yaml"
        found.append(Problem(what, "adapter.init_lora_weights", found=init, fix=fix))
    if sharded() and every:
        what = f"{sharded()} of the {CONFIG} needs all ranks at each pass, and they ask differently often"
        fix = "eval.eval_steps: null; at the end it is evaluated"
        found.append(Problem(what, "eval.eval_steps", found=str(every), fix=fix))
    if splitter() and adapter.ours("loraplus_lr_ratio"):
        what = f"{splitter()} of the {CONFIG} takes no optimizer with groups of its own, which LoRA+ needs"
        found.append(Problem(what, "adapter.loraplus_lr_ratio", fix="drop it, or ddp_8.yaml"))
    return found


def problems(machine: Hardware, kind: str, model: Model, data: Data, speed: Speed) -> list[Problem]:
    """Every contradiction between launch, machine and recipe, each naming both sides.

    Args:
        kind: `adapter.type`.
    """
    found = [*_started(machine), *_sharding(machine, kind, model, speed), *_parallelism(model, data)]
    return found + (_fp8(fp8(), kind, model, speed, data) if fp8().kind else [])


def _fp8(asked: Fp8, kind: str, model: Model, speed: Speed, data: Data) -> list[Problem]:
    """fp8 is the launch's, the base's storage the recipe's: they must mean the same."""
    if asked.kind not in (FROZEN, *BACKENDS):
        drop = OTHER_FP8["TE"] if kind == "full" else f"drop it: {BASE_INSTEAD}"
        fix = f"backend: {asked.kind.upper()}" if asked.kind.upper() in BACKENDS else drop
        what = f"fp8_config.backend of the {CONFIG} is not one that Accelerate and this project serve"
        return [Problem(what, found=asked.kind, expected="TE or AO, in upper case", fix=fix)]
    if asked.kind == FROZEN:
        if kind == "full":
            what = f"mixed_precision: fp8 of the {CONFIG} means a frozen fp8 base, and full trains it"
            fix = "accelerate_configs/8xh100_fp8_torchao.yaml or 8xh100_fp8_te.yaml"
            return [Problem(what, "adapter.type", found="full", fix=fix)]
        stored = adapter_types.find(kind).storage or model.quantization
        if stored not in ("auto", "fp8"):
            what = (
                f"mixed_precision: fp8 of the {CONFIG} means an fp8 base model, and the recipe says {stored}"
            )
            fix = "model.quantization: auto and a type that leaves it open, or mixed_precision: bf16"
            return [Problem(what, "model.quantization", found=stored, fix=fix)]
        obstacle = adapter_types.obstacle(kind, "fp8")
        if obstacle:
            what = f"mixed_precision: fp8 of the {CONFIG}, and {obstacle}"
            fix = "adapter.type: lora, or mixed_precision: bf16"
            return [Problem(what, "adapter.type", found=kind, fix=fix)]
        return []
    return _by_accelerate(asked.kind, kind, model, speed, data)


def _by_accelerate(backend: str, kind: str, model: Model, speed: Speed, data: Data) -> list[Problem]:
    """Accelerate's own fp8 is for training every weight."""
    found: list[Problem] = []
    if kind != "full":
        why = {
            "TE": "makes every linear layer anew with requires_grad=True, A and B of the adapter among them: "
            "the frozen base would train, and all its gradients be exchanged",
            "AO": "turns A and B of the adapter into fp8 too, and frozen weights, kept in bf16, again "
            "in each pass",
        }[backend]
        what = f"fp8_config.backend: {backend} of the {CONFIG} is for full fine-tuning: it {why}"
        found.append(Problem(what, "adapter.type", found=kind, fix=BASE_INSTEAD))
    elif model.quantization not in ("auto", "none"):
        what = f"fp8_config.backend: {backend} of the {CONFIG} trains weights in fp32"
        key = "model.quantization"
        found.append(Problem(what, key, found=model.quantization, fix=f"{key}: auto"))
    if backend == "TE" and speed.compile not in ("auto", False):
        what = f"fp8_config.backend: TE of the {CONFIG} breaks the graph at each layer (delayed scaling)"
        found.append(Problem(what, "speed.compile", found="true", fix="speed.compile: auto"))
    if backend == "TE" and data.streaming and (data.packing or data.padding_free):
        what = f"fp8_config.backend: TE of the {CONFIG} multiplies {TE_TOKENS} tokens or a multiple, and "
        what += "streamed rows that stand end to end are of any length"
        found.append(Problem(what, "data.streaming", found="true", fix="streaming: false"))
    again = {"offload": ("auto", "none", "optimizer"), "activation_checkpointing": ("auto", "none", "norms")}
    for name in [
        name for name, once in again.items() if backend == "TE" and getattr(speed, name) not in once
    ]:
        what = f"fp8_config.backend: TE of the {CONFIG} is in force in forward alone: {ONCE}"
        found.append(Problem(what, f"speed.{name}", found=str(getattr(speed, name)), fix=f"{name}: auto"))
    if backend == "TE" and on("ACCELERATE_USE_FSDP"):
        what = f"fp8_config.backend: TE of the {CONFIG} is served with whole weights, and FSDP splits them"
        fix = "accelerate_configs/8xh100_fp8_te.yaml, or fp8_config.backend: AO"
        found.append(Problem(what, found="FSDP", fix=fix))
    for name, takes in TE_TAKES.items() if backend == "TE" else ():
        asked = said(f"ACCELERATE_FP8_{name}", takes[0])
        if asked.lower() not in [one.lower() for one in takes]:
            what = f"fp8_config of the {CONFIG}: {name.lower()} does not reach TransformerEngine, or ends it"
            expected = f"{' or '.join(takes)}; Accelerate's default of amax_compute_algo is another"
            found.append(Problem(what, found=asked, expected=expected, fix=f"{name.lower()}: {takes[0]}"))
    option = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"
    gathers = on(option) or not said(option)
    if backend == "AO" and gathers and not on("ACCELERATE_USE_FSDP"):
        what = (
            f"enable_fsdp_float8_all_gather of the {CONFIG} puts new parameters in place of those that the "
        )
        what += "optimizer holds: outside FSDP2 nothing would train"
        fix = "enable_fsdp_float8_all_gather: false in fp8_config"
        found.append(Problem(what, found="true (Accelerate's default)", fix=fix))
    if backend == "AO" and on("ACCELERATE_USE_FSDP") and on("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} can't hand on torchao's fp8 layers"
        fix = "fsdp_cpu_ram_efficient_loading: false"
        found.append(Problem(what, found="true, with fp8_config.backend: AO", fix=fix))
    return found


def _started(machine: Hardware) -> list[Problem]:
    """The number of processes: what was asked of the launcher, what it started, what this machine has."""
    alone = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if alone and said("ACCELERATE_MIXED_PRECISION"):
        what = f"num_processes of the {CONFIG} asks for several processes, and one was started"
        fix = (
            "distributed_type: MULTI_GPU, on CPUs too (accelerate_configs/cpu_2.yaml); without a launcher's "
        )
        return [Problem(what, found="MASTER_ADDR without WORLD_SIZE", fix=f"{fix}help: unset MASTER_ADDR")]
    here = int(said("LOCAL_WORLD_SIZE", "1"))
    if machine.device == "cuda" and here > machine.count:
        what = f"num_processes of the {CONFIG} is more than this machine has GPUs"
        return [
            Problem(
                what, found=f"{here} processes, {machine.count} GPUs", fix=f"--num_processes {machine.count}"
            )
        ]
    return []


def _sharding(machine: Hardware, kind: str, model: Model, speed: Speed) -> list[Problem]:
    """What splits weights, or their state, against the machine and the recipe."""
    stored = adapter_types.find(kind).storage or (
        "fp8" if means_fp8(model.quantization) else model.quantization
    )
    found = [*_twice(speed), *_precision(machine, stored)]
    if on("ACCELERATE_USE_FSDP"):
        found += _fsdp(machine, stored)
    if on("ACCELERATE_USE_DEEPSPEED"):
        found += _deepspeed(machine, stored, kind)
    unsplit = ("int8", "torchao_int8", "fp4") if sharded() == "DeepSpeed" else ("int8", "torchao_int8")
    if sharded() and stored in unsplit:
        what = f"{sharded()} of the {CONFIG} can't split a base in {stored}"
        found.append(Problem(what, "model.quantization", found=stored, fix="model.quantization: none"))
    if sharded():
        found += _undivided(kind)
    if splitter() and adapter_types.find(kind).peft == "adalora":
        what = f"{splitter()} of the {CONFIG} keeps gradients in parts, and AdaLoRA's ranks are chosen by "
        what += "whole ones"
        found.append(Problem(what, "adapter.type", found=kind, fix="adapter.type: lora, or ddp_8.yaml"))
    return found


def _undivided(kind: str) -> Iterator[Problem]:
    """Adapters that can't be split with the weights, or not be saved from their parts."""
    one, by = adapter_types.find(kind), f"{sharded()} of the {CONFIG}"
    why = f"{by} can't split what layers of {kind} share" if one.peft in adapter_types.SHARES else ""
    if one.prompt:
        why = f"{by} leaves parts of the net that makes {kind}'s vectors, which are saved in its place"
    if why:
        yield Problem(why, "adapter.type", found=kind, fix="adapter.type: lora, or ddp_8.yaml")
    elif read_by_rank_0() and one.peft in adapter_types.WITH_BUFFERS:
        what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} hands on no buffers, which {kind} has"
        fix = "fsdp_cpu_ram_efficient_loading: false (accelerate_configs/fsdp2_8_quantised.yaml)"
        yield Problem(what, "adapter.type", found=kind, fix=fix)


def _twice(speed: Speed) -> Iterator[Problem]:
    """What the launch and the recipe would both do."""
    if on("FSDP_ACTIVATION_CHECKPOINTING"):
        key = "speed.activation_checkpointing"
        what = f"fsdp_activation_checkpointing of the {CONFIG} and {key} would both recompute layers"
        fix = f"fsdp_activation_checkpointing: false; {key}: full"
        yield Problem(what, key, found=speed.activation_checkpointing, fix=fix)
    if (compiler := said("ACCELERATE_DYNAMO_BACKEND", "no")) not in ("", "no"):
        what = (
            f"dynamo_config of the {CONFIG} and speed.compile would both compile; compiling is the recipe's"
        )
        fix = "drop dynamo_config; speed.compile: true"
        yield Problem(what, "speed.compile", found=compiler, fix=fix)


def _precision(machine: Hardware, stored: str) -> Iterator[Problem]:
    """Products on an fp8 base give bf16, which the launch's precision must be."""
    precision = said("ACCELERATE_MIXED_PRECISION", "bf16")
    if stored == "fp8" and precision in ("no", "fp16") and machine.device == "cuda":
        what = f"mixed_precision: {precision} of the {CONFIG}, and products on an fp8 base give bf16"
        fix = "mixed_precision: bf16, or model.quantization: auto"
        yield Problem(what, "model.quantization", found=stored, fix=fix)


def _fsdp(machine: Hardware, stored: str) -> Iterator[Problem]:
    if machine.device == "cpu":
        what = f"FSDP of the {CONFIG} becomes plain DDP on the CPU: nothing would be split"
        yield Problem(what, found="distributed_type: FSDP", fix="accelerate_configs/cpu_2.yaml")
    if (version := said("FSDP_VERSION", "1")) != "2":
        what = f"fsdp_config of the {CONFIG} asks for FSDP1, which mixes no dtypes and is given up upstream"
        yield Problem(what, found=version, fix="fsdp_version: 2")
    if on("FSDP_CPU_RAM_EFFICIENT_LOADING") and stored in ("fp8", "nf4", "fp4"):
        what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} hands on no base in {stored}"
        fix = "fsdp_cpu_ram_efficient_loading: false (accelerate_configs/fsdp2_8_quantised.yaml)"
        yield Problem(what, "model.quantization", found=stored, fix=fix)


def _deepspeed(machine: Hardware, stored: str, kind: str) -> Iterator[Problem]:
    precision = said("ACCELERATE_MIXED_PRECISION", "no")
    if machine.device == "cpu" and precision != "no":
        what = f"DeepSpeed of the {CONFIG} computes in 16 bits on GPUs alone"
        yield Problem(what, found=f"mixed_precision: {precision}", fix='mixed_precision: "no" on a CPU')
    if machine.device == "cpu" and on("ACCELERATE_USE_CPU"):
        what = f"DeepSpeed of the {CONFIG} becomes plain DDP under use_cpu: nothing would be split"
        yield Problem(what, found="use_cpu: true", fix="use_cpu: false, with no GPU visible")
    if stored == "fp8" or (stored == "nf4" and sharded()):  # ZeRO-2 too casts the whole module
        what = f"DeepSpeed of the {CONFIG} casts or splits weights, and the recipe's are codes ({stored})"
        fix = "accelerate_configs/ddp_8.yaml, where it fits on each GPU, or fsdp2_8_quantised.yaml"
        yield Problem(what, "model.quantization", found=stored, fix=fix)
    if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        what = f"a file of DeepSpeed's in place of the {CONFIG}'s section is not held against the recipe"
        fix = "zero_stage and what else it says, in deepspeed_config"
        yield Problem(what, "--deepspeed_config_file", found=file, fix=fix)
    if fp8().kind:
        what = f"DeepSpeed knows no mixed_precision: fp8, which the {CONFIG} asks for"
        yield Problem(what, found="fp8", fix=OTHER_FP8["TE"] if kind == "full" else BASE_INSTEAD)
    if zero_stage() not in ("1", "2", "3"):
        what = f"zero_stage of the {CONFIG}: ZeRO splits moments (1), gradients too (2), weights too (3)"
        fix = "zero_stage: 2 or 3; to split nothing accelerate_configs/ddp_8.yaml"
        yield Problem(what, found=zero_stage(), fix=fix)


def _parallelism(model: Model, data: Data) -> list[Problem]:
    """Sequences and layers shared between processes."""
    found: list[Problem] = []
    cut = "PEFT's adapters hold whole rows of layers that tensor parallelism cuts"
    lost = "DeepSpeed's sequence parallelism takes a loss of its own, and this project's is others"
    for size, name, why in (("TP", "tp_size", cut), ("SP", "sp_size", lost)):
        if parallel(size) > 1:
            fix = "accelerate_configs/fsdp2_8.yaml; for long sequences context_parallel_4.yaml"
            what = f"parallelism_config_{name} of the {CONFIG}: {why}"
            found.append(Problem(what, found=str(parallel(size)), fix=fix))
    if parallel("DP_REPLICATE") > 1:
        what = f"parallelism_config_dp_replicate_size of the {CONFIG}: copies of split weights are not served"
        fix = "1: all processes split one copy (fsdp2_8.yaml), or each has a whole one (multi_node.yaml)"
        found.append(Problem(what, found=str(parallel("DP_REPLICATE")), fix=fix))
    found += [] if found else _sizes()
    return found + (cut_rows(model, data) if parallel("CP") > 1 else [])


def _sizes() -> Iterator[Problem]:
    """The product of the sizes against the processes, and against what has to split for them."""
    sizes = {name: parallel(name) for name in ("DP_SHARD", "CP")}
    asked = ", ".join(f"{name.lower()}_size: {size}" for name, size in sizes.items())
    product, processes = math.prod(sizes.values()), said("WORLD_SIZE")
    if product > 1 and not on("ACCELERATE_USE_FSDP"):
        what = f"parallelism_config of the {CONFIG} shares rows or weights, which FSDP has to split"
        fix = "distributed_type: FSDP with fsdp_version: 2 (accelerate_configs/context_parallel_4.yaml)"
        yield Problem(what, found=f"{asked}, without FSDP", fix=fix)
    elif product > 1 and processes and product != int(processes):
        what = f"parallelism_config of the {CONFIG} is for {product} processes, as its sizes multiply"
        fix = f"--num_processes {product}, or parallelism_config_cp_size: {processes}, dp_shard_size: 1"
        yield Problem(what, found=f"{asked}; {processes} processes", fix=fix)
    elif product == 1 and on("ACCELERATE_USE_PARALLELISM_CONFIG") and on("ACCELERATE_USE_FSDP"):
        what = f"parallelism_config of the {CONFIG} leaves FSDP nothing to split: all its sizes are 1"
        fix = "drop it, or parallelism_config_dp_shard_size: the number of processes"
        yield Problem(what, found=asked, fix=fix)


def cut_rows(model: Model, data: Data) -> list[Problem]:
    """What context parallelism, which gives processes parts of a row, can't do with a recipe."""
    found: list[Problem] = []
    if data.packing or data.padding_free:
        key = "packing" if data.packing else "padding_free"
        what = f"parallelism_config_cp_size of the {CONFIG} cuts through a packed row's documents"
        found.append(Problem(what, f"data.{key}", found="true", fix=f"{key}: false"))
    if model.attention != "sdpa":
        what = f"parallelism_config_cp_size of the {CONFIG} works with torch's own attention alone"
        found.append(Problem(what, "model.attention", found=model.attention, fix="attention: sdpa"))
    return found


def deepspeed_values(train: Train, processes: int) -> list[Problem]:
    """What a `deepspeed_config` says of what the recipe decides, and says otherwise."""
    if launch_environment.splitter() != "DeepSpeed":
        return []
    clipping = train.passed_on().get("max_grad_norm", 1.0)  # TrainingArguments' own
    decided = {
        "gradient_clipping": ("max_grad_norm", lambda: clipping),
        "gradient_accumulation_steps": (
            "effective_batch_size",
            lambda: batch_size.split_batch(train, processes).accumulation,
        ),
    }
    found = list[Problem]()
    for name, (key, decide) in decided.items():
        number = launch_environment.said(f"ACCELERATE_{name.upper()}").replace("auto", "")
        if number and float(number) != (value := decide()):
            what = f"{name} of the {launch_environment.CONFIG} is what train.{key} decides"
            fix = "drop it from deepspeed_config"
            found.append(Problem(what, f"train.{key}", found=number, expected=f"{value:g}", fix=fix))
    return found


def against_launch(recipe: Recipe) -> None:
    """Refuse a search for a batch where weights are split, a sliding window where rows are, and under an fp8
    launch what a recipe with `model.quantization: fp8` is refused for (exit 2)."""
    by, key = launch_environment.sharded(), "train.per_device_train_batch_size"
    if by and recipe.train.per_device_train_batch_size == "auto":
        what = f"can't be searched: {by} of the {launch_environment.CONFIG} splits the weights only later"
        raise UserError(Problem(what, key, found="auto", fix="a number"))
    processes = mixed_precision.launch(detection.detect()).processes
    if problems := deepspeed_values(recipe.train, processes):
        raise UserError(*problems)
    if recipe.eval.engine == "vllm" and recipe.eval.tasks and processes > 1:
        what = f"vLLM is one process, and a launch of {processes} would start it in each"
        fix = "eval.engine: hf; or after training, in one process: finetune evaluate RUN eval.engine=vllm"
        raise UserError(Problem(what, "eval.engine", found="vllm", fix=fix))
    if launch_environment.parallel("CP") > 1:
        against_window(model_files.read_config(recipe.model))
    if not launch_environment.means_fp8(recipe.model.quantization):
        return
    raw = {
        "adapter": {"type": recipe.adapter.type, **recipe.adapter.options()},
        "speed": recipe.speed.model_dump(include={"qat"}),
        "model": {"add_tokens": recipe.model.add_tokens, "quantization": "fp8"},
    }
    by = f"mixed_precision: fp8 of the {launch_environment.CONFIG} means a frozen fp8 base: "
    found = [*adapter_rules.conflicts(raw), *qat_rules.conflicts(raw)]
    if found:
        raise UserError(*(Problem(by + what, key, **texts) for key, what, texts in found))


def against_window(config: ModelConfig) -> None:
    """Refuse a model whose sliding window context parallelism would cut through (exit 2)."""
    if (window := attention_choice.read(config).window) is not None:
        what = f"parallelism_config_cp_size of the {launch_environment.CONFIG} cuts through a sliding window"
        fix = "accelerate_configs/fsdp2_8.yaml, or a model without one"
        raise UserError(Problem(what, "model.name", found=f"a window of {window} tokens", fix=fix))
