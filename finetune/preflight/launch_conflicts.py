"""Find contradictions between a launch, the recipe and the machine. Each problem names both sides."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from finetune.autoconfig import attention_choice, batch_size, launch_settings
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import as_yaml
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
from finetune.launch import accelerate_config
from finetune.models import model_files
from finetune.recipe import adapter_rules, adapter_types, qat_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Adapter, Data, Model, Recipe, Speed, Train

# The values of fp8_config that work with TransformerEngine. Accelerate drops its own default, `most_recent`,
# and TE then uses `max`. TE has no arguments for the other options.
TE_TAKES = {
    "AMAX_COMPUTE_ALGO": ("max",),
    "FORMAT": ("HYBRID", "E4M3"),
    "INTERVAL": ("1",),
    "USE_MXFP8_BLOCK_SCALING": ("False",),
    **{f"OVERRIDE_{name}": ("False",) for name in ("FPROP", "DGRAD", "WGRAD")},
}
BASE_INSTEAD = "use accelerate_configs/8xh100_fp8.yaml, which has a frozen fp8 base model for every adapter"
OTHER_FP8 = {  # for full fine-tuning, if the package of one backend is not installed
    "TE": "use accelerate_configs/8xh100_fp8_torchao.yaml",
    "AO": "use accelerate_configs/8xh100_fp8_te.yaml",
}
LORA_OR_DDP = "set `adapter.type: lora`, or use accelerate_configs/ddp_8.yaml"


def check(
    machine: Hardware, adapter: Adapter, model: Model, data: Data, speed: Speed, every: float | None = None
) -> None:
    """Refuse a launch that contradicts the recipe, before any weight is loaded.

    Args:
        every: `eval.eval_steps`.

    Raises:
        UserError: every contradiction (exit 2); a package that the launch needs (exit 3).
    """
    if found := check_setup(machine, adapter, model, data, speed, every):
        raise UserError(*found)
    package, extra = accelerate_config.FP8_PACKAGES.get(fp8().kind, ("torch", ""))
    if not installed(package):
        what = f"fp8_config.backend: {fp8().kind} of the {CONFIG} needs {package}, which is not installed"
        fix = f"{install_extra(extra)}, or {OTHER_FP8[fp8().kind]}"  # only full fine-tuning gets here
        raise UserError(Problem(what, fix=fix, code="package-missing"), code=Exit.ENVIRONMENT)


def check_setup(
    machine: Hardware, adapter: Adapter, model: Model, data: Data, speed: Speed, every: float | None
) -> list[Problem]:
    """Return every contradiction, also those of `eval.eval_steps` and of single options of the adapter."""
    found = problems(machine, adapter.type, model, data, speed)
    init, code = adapter.options().get("init_lora_weights"), "launch-config"
    if sharded() and isinstance(init, str) and init.startswith(adapter_types.PREPARED_INITS):
        what = f"init_lora_weights: {init} does not work with {sharded()} of the {CONFIG}"
        why = f"the initialization reads whole weights of the base model, and {sharded()} shards them"
        fix = "set `adapter.init_lora_weights: true`, or use accelerate_configs/ddp_8.yaml"
        found.append(Problem(what, "adapter.init_lora_weights", found=init, why=why, fix=fix, code=code))
    if sharded() and every:
        what = f"evaluation during training does not work with {sharded()} of the {CONFIG}"
        why = f"{sharded()} needs all ranks in each forward pass, and ranks have different numbers of them"
        fix = "set `eval.eval_steps: null`; finetune then evaluates at the end"
        found.append(Problem(what, "eval.eval_steps", found=as_yaml(every), why=why, fix=fix, code=code))
    if splitter() and adapter.ours("loraplus_lr_ratio"):
        what = f"LoRA+ does not work with {splitter()} of the {CONFIG}"
        why = f"LoRA+ needs an optimizer with its own parameter groups, which {splitter()} does not take"
        fix = "remove `loraplus_lr_ratio`, or use accelerate_configs/ddp_8.yaml"
        found.append(Problem(what, "adapter.loraplus_lr_ratio", why=why, fix=fix, code=code))
    return found


def problems(machine: Hardware, kind: str, model: Model, data: Data, speed: Speed) -> list[Problem]:
    """Return every contradiction between launch, machine and recipe. Each problem names both sides.

    Args:
        kind: `adapter.type`.
    """
    found = [*_started(machine), *_sharding(machine, kind, model, speed), *_parallelism(model, data)]
    return found + (_fp8(fp8(), kind, model, speed, data) if fp8().kind else [])


def _fp8(requested: Fp8, kind: str, model: Model, speed: Speed, data: Data) -> list[Problem]:
    """Compare the fp8 of the launch with the quantization of the base model in the recipe."""
    code = "launch-config"
    if requested.kind not in (FROZEN, *BACKENDS):
        instead = OTHER_FP8["TE"] if kind == "full" else f"remove it and {BASE_INSTEAD}"
        fix = f"backend: {requested.kind.upper()}" if requested.kind.upper() in BACKENDS else instead
        what = f"fp8_config.backend of the {CONFIG} is not a backend that Accelerate and finetune support"
        return [Problem(what, found=requested.kind, expected="TE or AO, in upper case", fix=fix, code=code)]
    if requested.kind != FROZEN:
        return _by_accelerate(requested.kind, kind, model, speed, data)
    means = f"mixed_precision: fp8 of the {CONFIG} means a frozen fp8 base model"
    if kind == "full":
        what = f"{means}, and full fine-tuning trains the base model"
        fix = f"{OTHER_FP8['TE']} or 8xh100_fp8_te.yaml"
        return [Problem(what, "adapter.type", found="full", fix=fix, code=code)]
    stored = adapter_types.find(kind).storage or model.quantization
    if stored not in ("auto", "fp8"):
        what = f"{means}, and the recipe says {stored}"
        fix = "set `mixed_precision: bf16`"
        if not adapter_types.find(kind).storage:
            fix = f"set `model.quantization: auto`, or {fix}"
        return [Problem(what, "model.quantization", found=stored, fix=fix, code=code)]
    if unsupported_reason := adapter_types.unsupported_reason(kind, "fp8"):
        fix = "set `adapter.type: lora`, or `mixed_precision: bf16`"
        what = f"{means}, and {kind} does not train on one"
        return [Problem(what, "adapter.type", found=kind, why=unsupported_reason, fix=fix, code=code)]
    return []


def _by_accelerate(backend: str, kind: str, model: Model, speed: Speed, data: Data) -> list[Problem]:
    """Return the problems of Accelerate's own fp8, which is only for full fine-tuning."""
    problems: list[Problem] = []
    by, code = f"fp8_config.backend: {backend} of the {CONFIG}", "launch-config"
    if kind != "full":
        why = {
            "TE": "it replaces all linear layers by layers with requires_grad=True, so the frozen base model "
            "would train",
            "AO": "it also converts the adapter's matrices to fp8, and quantizes frozen bf16 weights in each "
            "forward pass",
        }[backend]
        what = f"{by} is for full fine-tuning"
        problems.append(Problem(what, "adapter.type", found=kind, why=why, fix=BASE_INSTEAD, code=code))
    elif model.quantization not in ("auto", "none"):
        what = f"{by} trains weights in fp32, and the recipe quantizes them"
        fix = "set `model.quantization: auto`"
        problems.append(Problem(what, "model.quantization", found=model.quantization, fix=fix, code=code))
    problems += _by_transformer_engine(by, speed, data) if backend == "TE" else _by_torchao()
    return problems


def _by_transformer_engine(by: str, speed: Speed, data: Data) -> Iterator[Problem]:
    code = "launch-config"
    if speed.compile not in ("auto", False):
        what, why = f"{by} can't be compiled", "delayed scaling breaks the graph at each layer"
        fix = "set `speed.compile: auto`"
        yield Problem(what, "speed.compile", found="true", why=why, fix=fix, code=code)
    if data.streaming and (data.packing or data.padding_free):
        what = f"{by} needs sequences of a multiple of {TE_TOKENS} tokens"
        why = "streamed examples that are concatenated have any length"
        fix = "set `data.streaming: false`"
        yield Problem(what, "data.streaming", found="true", why=why, fix=fix, code=code)
    allowed = {
        "offload": ("auto", "none", "optimizer"),
        "activation_checkpointing": ("auto", "none", "norms"),
    }
    for name, values in allowed.items():
        if (value := getattr(speed, name)) not in values:
            what, fix = f"{by} applies only in the forward pass", f"set `speed.{name}: auto`"
            yield Problem(what, f"speed.{name}", found=as_yaml(value), why=ONCE, fix=fix, code=code)
    if on("ACCELERATE_USE_FSDP"):
        what = f"{by} needs whole weights, and FSDP shards them"
        fix = f"{OTHER_FP8['AO']}, or set `fp8_config.backend: AO`"
        yield Problem(what, found="distributed_type: FSDP", fix=fix, code=code)
    for name, takes in TE_TAKES.items():
        setting = said(f"ACCELERATE_FP8_{name}", takes[0])
        if setting.lower() not in [value.lower() for value in takes]:
            what = (
                f"fp8_config of the {CONFIG} sets {name.lower()} to a value that TransformerEngine can't use"
            )
            why = "Accelerate does not pass the value on, or TransformerEngine raises an error"
            fix = f"set `{name.lower()}: {takes[0]}`"
            yield Problem(what, found=setting, expected=" or ".join(takes), why=why, fix=fix, code=code)


def _by_torchao() -> Iterator[Problem]:
    option, code = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "launch-config"
    if on("ACCELERATE_USE_FSDP"):
        if on("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} can't send fp8 layers of torchao"
            fix, found = "set `fsdp_cpu_ram_efficient_loading: false`", "true, with fp8_config.backend: AO"
            yield Problem(what, found=found, fix=fix, code=code)
    elif on(option) or not said(option):
        what = f"enable_fsdp_float8_all_gather of the {CONFIG} works only with FSDP2"
        why = "it replaces the parameters that the optimizer holds, so nothing would train"
        fix = "set `enable_fsdp_float8_all_gather: false` in fp8_config"
        yield Problem(what, found="true (Accelerate's default)", why=why, fix=fix, code=code)


def _started(machine: Hardware) -> list[Problem]:
    """Compare the number of processes in the config, the number that was started, and the number of GPUs."""
    alone = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if alone and said("ACCELERATE_MIXED_PRECISION"):
        what = f"num_processes of the {CONFIG} asks for several processes, but the launcher started one"
        fix = "set `distributed_type: MULTI_GPU`, also on CPUs (accelerate_configs/cpu_2.yaml); without a "
        fix += "launcher, unset MASTER_ADDR"
        return [Problem(what, found="MASTER_ADDR without WORLD_SIZE", fix=fix, code="launch-config")]
    here = int(said("LOCAL_WORLD_SIZE", "1"))
    if machine.device == "cuda" and here > machine.count:
        what = f"num_processes of the {CONFIG} is larger than the number of GPUs of this machine"
        found, fix = f"{here} processes, {machine.count} GPUs", f"--num_processes {machine.count}"
        return [Problem(what, found=found, fix=fix, code="launch-config")]
    return []


def _sharding(machine: Hardware, kind: str, model: Model, speed: Speed) -> list[Problem]:
    """Compare the sharding of weights or optimizer state with the machine and the recipe."""
    own = "fp8" if means_fp8(model.quantization) else model.quantization
    stored, code = adapter_types.find(kind).storage or own, "launch-config"
    found = [*_twice(speed), *_precision(machine, stored)]
    if on("ACCELERATE_USE_FSDP"):
        found += _fsdp(machine, stored)
    if on("ACCELERATE_USE_DEEPSPEED"):
        found += _deepspeed(machine, stored, kind)
    unsplit = ("int8", "torchao_int8", "fp4") if sharded() == "DeepSpeed" else ("int8", "torchao_int8")
    if sharded() and stored in unsplit:
        what = f"{sharded()} of the {CONFIG} can't shard a base model in {stored}"
        fix = "set `model.quantization: none`"
        found.append(Problem(what, "model.quantization", found=stored, fix=fix, code=code))
    if sharded():
        found += _undivided(kind)
    if splitter() and adapter_types.find(kind).peft == "adalora":
        what = f"AdaLoRA does not work with {splitter()} of the {CONFIG}"
        why = f"AdaLoRA's ranks are chosen by whole gradients, and {splitter()} shards them"
        found.append(Problem(what, "adapter.type", found=kind, why=why, fix=LORA_OR_DDP, code=code))
    return found


def _undivided(kind: str) -> Iterator[Problem]:
    """Return the problem of an adapter that can't be sharded with the weights, or not saved from shards."""
    one, by, code = adapter_types.find(kind), f"{sharded()} of the {CONFIG}", "launch-config"
    if one.prompt or one.peft in adapter_types.SHARES:
        what = f"{by} can't train {kind}"
        why = f"{sharded()} can't shard tensors that several layers share"
        if one.prompt:
            why = f"{sharded()} has only shards of the network that makes the virtual tokens to save"
        yield Problem(what, "adapter.type", found=kind, why=why, fix=LORA_OR_DDP, code=code)
    elif read_by_rank_0() and one.peft in adapter_types.WITH_BUFFERS:
        what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} does not send buffers, and {kind} has buffers"
        fix = "set `fsdp_cpu_ram_efficient_loading: false` (accelerate_configs/fsdp2_8_quantized.yaml)"
        yield Problem(what, "adapter.type", found=kind, fix=fix, code=code)


def _twice(speed: Speed) -> Iterator[Problem]:
    """Return the problems of features that the launch and the recipe would both apply."""
    if on("FSDP_ACTIVATION_CHECKPOINTING"):
        key = "speed.activation_checkpointing"
        what = f"fsdp_activation_checkpointing of the {CONFIG} and {key} would both recompute layers"
        fix = f"set `fsdp_activation_checkpointing: false` and `{key}: full`"
        yield Problem(what, key, found=speed.activation_checkpointing, fix=fix, code="launch-config")
    if (compiler := said("ACCELERATE_DYNAMO_BACKEND", "no")) not in ("", "no"):
        what = f"dynamo_config of the {CONFIG} and speed.compile would both compile the model"
        fix = "remove dynamo_config and set `speed.compile: true`"
        yield Problem(what, "speed.compile", found=compiler, fix=fix, code="launch-config")


def _precision(machine: Hardware, stored: str) -> Iterator[Problem]:
    """GEMMs of an fp8 base model return bf16, so the launch must use bf16 too."""
    precision = said("ACCELERATE_MIXED_PRECISION", "bf16")
    if stored == "fp8" and precision in ("no", "fp16") and machine.device == "cuda":
        what = f"an fp8 base model needs bf16, and the {CONFIG} sets mixed_precision: {precision}"
        fix = "set `mixed_precision: bf16`, or `model.quantization: auto`"
        yield Problem(what, "model.quantization", found=stored, fix=fix, code="launch-config")


def _fsdp(machine: Hardware, stored: str) -> Iterator[Problem]:
    code = "launch-config"
    if machine.device == "cpu":
        what = f"FSDP of the {CONFIG} would shard nothing: on CPUs, Accelerate uses plain DDP"
        fix = "use accelerate_configs/cpu_2.yaml"
        yield Problem(what, found="distributed_type: FSDP", fix=fix, code=code)
    if (version := said("FSDP_VERSION", "1")) != "2":
        what = f"fsdp_config of the {CONFIG} asks for FSDP1, and finetune supports only FSDP2"
        why = "FSDP1 is deprecated and needs one dtype for all weights"
        yield Problem(what, found=version, why=why, fix="set `fsdp_version: 2`", code=code)
    if on("FSDP_CPU_RAM_EFFICIENT_LOADING") and stored in ("fp8", "nf4", "fp4"):
        what = f"fsdp_cpu_ram_efficient_loading of the {CONFIG} can't send a base model in {stored}"
        fix = "set `fsdp_cpu_ram_efficient_loading: false` (accelerate_configs/fsdp2_8_quantized.yaml)"
        yield Problem(what, "model.quantization", found=stored, fix=fix, code=code)


def _deepspeed(machine: Hardware, stored: str, kind: str) -> Iterator[Problem]:
    precision, code = said("ACCELERATE_MIXED_PRECISION", "no"), "launch-config"
    if machine.device == "cpu" and precision != "no":
        what = f"DeepSpeed of the {CONFIG} supports 16-bit precision only on GPUs"
        fix = 'set `mixed_precision: "no"`'
        yield Problem(what, found=f"mixed_precision: {precision}", fix=fix, code=code)
    if machine.device == "cpu" and on("ACCELERATE_USE_CPU"):
        what = f"DeepSpeed of the {CONFIG} would shard nothing: with use_cpu, Accelerate uses plain DDP"
        fix = "set `use_cpu: false`, and CUDA_VISIBLE_DEVICES= if the machine has GPUs"
        yield Problem(what, found="use_cpu: true", fix=fix, code=code)
    if stored == "fp8" or (stored == "nf4" and sharded()):  # ZeRO-2 too casts the whole module
        what = f"DeepSpeed of the {CONFIG} can't train on a base model in {stored}"
        why = "it casts or shards weights, and these weights are quantized"
        fix = "use accelerate_configs/fsdp2_8_quantized.yaml, or ddp_8.yaml if the model fits on each GPU"
        yield Problem(what, "model.quantization", found=stored, why=why, fix=fix, code=code)
    if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        what = f"finetune can't compare a DeepSpeed config file with the recipe, so the {CONFIG} must hold it"
        fix = "move zero_stage and the other settings to `deepspeed_config`"
        yield Problem(what, "--deepspeed_config_file", found=file, fix=fix, code=code)
    if fp8().kind:
        what = f"DeepSpeed does not support mixed_precision: fp8, which the {CONFIG} sets"
        fix = OTHER_FP8["TE"] if kind == "full" else BASE_INSTEAD
        yield Problem(what, found="fp8", fix=fix, code=code)
    if zero_stage() not in ("1", "2", "3"):
        what, expected = f"zero_stage of the {CONFIG} is no stage that shards", "1, 2 or 3"
        why = "ZeRO shards the optimizer state (1), also the gradients (2), and also the weights (3)"
        fix = "set `zero_stage: 2`; to shard nothing, use accelerate_configs/ddp_8.yaml"
        yield Problem(what, found=zero_stage(), expected=expected, why=why, fix=fix, code=code)


def _parallelism(model: Model, data: Data) -> list[Problem]:
    """Return the problems of sequences and layers that several processes share."""
    problems: list[Problem] = []
    by, code = f"of the {CONFIG} is not supported", "launch-config"
    cut = "PEFT's adapters need whole weight matrices, and tensor parallelism shards them"
    lost = "DeepSpeed's sequence parallelism needs its own loss function, and finetune uses another one"
    for size, name, why in (("TP", "tp_size", cut), ("SP", "sp_size", lost)):
        if parallel(size) > 1:
            fix = "use accelerate_configs/fsdp2_8.yaml, or context_parallel_4.yaml for long sequences"
            what, number = f"parallelism_config_{name} {by}", str(parallel(size))
            problems.append(Problem(what, found=number, expected="1", why=why, fix=fix, code=code))
    if parallel("DP_REPLICATE") > 1:
        what = f"parallelism_config_dp_replicate_size {by}"
        fix = "set it to 1: fsdp2_8.yaml shards one copy over all processes, multi_node.yaml shards nothing"
        number = str(parallel("DP_REPLICATE"))
        problems.append(Problem(what, found=number, expected="1", fix=fix, code=code))
    problems += [] if problems else _sizes()
    return problems + (cut_rows(model, data) if parallel("CP") > 1 else [])


def _sizes() -> Iterator[Problem]:
    """Compare the sizes with the number of processes, and check that FSDP shards the weights."""
    sizes, code = {name: parallel(name) for name in ("DP_SHARD", "CP")}, "launch-config"
    stated = ", ".join(f"{name.lower()}_size: {size}" for name, size in sizes.items())
    total, processes = math.prod(sizes.values()), said("WORLD_SIZE")
    if total > 1 and not on("ACCELERATE_USE_FSDP"):
        what = f"parallelism_config of the {CONFIG} needs FSDP"
        fix = (
            "set `distributed_type: FSDP` and `fsdp_version: 2` (accelerate_configs/context_parallel_4.yaml)"
        )
        yield Problem(what, found=f"{stated}, without FSDP", fix=fix, code=code)
    elif total > 1 and processes and total != int(processes):
        what = f"parallelism_config of the {CONFIG} needs {total} processes, because its sizes multiply"
        fix = f"--num_processes {total}, or set `parallelism_config_cp_size: {processes}` alone"
        yield Problem(what, found=f"{stated}; {processes} processes", fix=fix, code=code)
    elif total == 1 and on("ACCELERATE_USE_PARALLELISM_CONFIG") and on("ACCELERATE_USE_FSDP"):
        what = f"FSDP would shard nothing: all sizes in parallelism_config of the {CONFIG} are 1"
        fix = (
            "remove parallelism_config, or set `parallelism_config_dp_shard_size` to the number of processes"
        )
        yield Problem(what, found=stated, fix=fix, code=code)


def cut_rows(model: Model, data: Data) -> list[Problem]:
    """Return the conflicts of a recipe with context parallelism, which shares sequences among processes."""
    problems, by = list[Problem](), f"parallelism_config_cp_size of the {CONFIG}"
    if data.packing or data.padding_free:
        key = "data.packing" if data.packing else "data.padding_free"
        what = f"{by} would cut packed examples into pieces"
        fix = f"set `{key}: false`"
        problems.append(Problem(what, key, found="true", fix=fix, code="launch-config"))
    if model.attention != "sdpa":
        what, fix = f"{by} works only with PyTorch's own attention", "set `model.attention: sdpa`"
        problems.append(
            Problem(what, "model.attention", found=model.attention, fix=fix, code="launch-config")
        )
    return problems


def deepspeed_values(train: Train, processes: int) -> list[Problem]:
    """Return the values of a `deepspeed_config` that the recipe decides, where the two differ."""
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
    problems = list[Problem]()
    for name, (key, decide) in decided.items():
        number = launch_environment.said(f"ACCELERATE_{name.upper()}").replace("auto", "")
        if number and float(number) != (value := decide()):
            what = f"{name} of the {CONFIG} contradicts train.{key} of the recipe"
            texts = {"found": number, "expected": f"{value:g}"}
            fix = f"remove {name} from deepspeed_config"
            problems.append(Problem(what, f"train.{key}", **texts, fix=fix, code="launch-config"))
    return problems


def check_launch(recipe: Recipe) -> None:
    """Refuse settings of the recipe that do not work under this launch (exit 2).

    These are a batch size search on sharded weights, vLLM in several processes, and a sliding window under
    context parallelism. If the launch asks for fp8, conflicts with `model.quantization: fp8` are refused too.
    """
    by, key = launch_environment.sharded(), "train.per_device_train_batch_size"
    if by and recipe.train.per_device_train_batch_size == "auto":
        what = f"{by} of the {CONFIG} does not work with a search for the batch size"
        why, fix = f"the search runs before {by} shards the weights", f"set `{key}: 1` or a larger number"
        raise UserError(Problem(what, key, found="auto", why=why, fix=fix, code="launch-config"))
    processes = launch_settings.read().processes
    if problems := deepspeed_values(recipe.train, processes):
        raise UserError(*problems)
    if recipe.eval.engine == "vllm" and recipe.eval.tasks and processes > 1:
        what = "vLLM does not work in a launch of several processes"
        why, key = f"each of the {processes} processes would start its own vLLM", "eval.engine"
        fix = "set `eval.engine: hf`, or run `finetune evaluate RUN eval.engine=vllm` after training"
        raise UserError(Problem(what, key, found="vllm", why=why, fix=fix, code="launch-config"))
    if launch_environment.parallel("CP") > 1:
        check_window(model_files.read_config(recipe.model))
    if not launch_environment.means_fp8(recipe.model.quantization):
        return
    raw = {
        "adapter": {"type": recipe.adapter.type, **recipe.adapter.options()},
        "speed": recipe.speed.model_dump(include={"qat"}),
        "model": {"add_tokens": recipe.model.add_tokens, "quantization": "fp8"},
    }
    by = f"mixed_precision: fp8 of the {CONFIG} means a frozen fp8 base model: "
    found = [*adapter_rules.conflicts(raw), *qat_rules.conflicts(raw)]
    if found:
        coded = ((key, what, {"code": "launch-config", **texts}) for key, what, texts in found)
        raise UserError(*(Problem(by + what, key, **texts) for key, what, texts in coded))


def check_window(config: ModelConfig) -> None:
    """Refuse a model with a sliding window, which context parallelism would cut into pieces (exit 2)."""
    if (window := attention_choice.read(config).window) is not None:
        what = f"parallelism_config_cp_size of the {CONFIG} would cut the model's sliding window into pieces"
        fix = "use accelerate_configs/fsdp2_8.yaml, or a model without a sliding window"
        found = f"a window of {window} tokens"
        raise UserError(Problem(what, "model.name", found=found, fix=fix, code="launch-config"))
