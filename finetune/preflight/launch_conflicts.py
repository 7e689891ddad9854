"""Find contradictions between a launch, the recipe and the machine. Each problem names both sides."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace

from finetune.autoconfig import attention_choice, batch_size, launch_settings
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.formatting import as_yaml
from finetune.core.model_config import ModelConfig
from finetune.core.packages import install_extra, installed
from finetune.distributed import launch_environment
from finetune.distributed.launch_environment import (
    BACKENDS,
    CONFIG,
    FROZEN,
    ONCE,
    TE_TOKENS,
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
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config
from finetune.models import model_files
from finetune.recipe import adapter_rules, adapter_types, qat_rules
from finetune.recipe.schema import Data, Model, Recipe, Speed, Train

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


def check(recipe: Recipe, machine: Hardware) -> None:
    """Refuse a launch that contradicts the recipe, before any weight is loaded.

    Raises:
        UserError: every contradiction (exit 2); a package that the launch needs (exit 3).
    """
    raise_if_any(check_all(recipe, machine))
    if on("ACCELERATE_USE_DEEPSPEED") and not installed("deepspeed"):
        what = "ACCELERATE_USE_DEEPSPEED asks for DeepSpeed, which is not installed"
        fix = f"unset ACCELERATE_USE_DEEPSPEED, or {install_extra('deepspeed')}"
        raise UserError(Problem(what, fix=fix, code="package-missing"), code=Exit.ENVIRONMENT)
    package, extra = accelerate_config.FP8_PACKAGES.get(fp8().kind, ("torch", ""))
    if not installed(package):
        what = f"fp8_config.backend: {fp8().kind} of the {CONFIG} needs {package}, which is not installed"
        fix = f"{install_extra(extra)}, or {OTHER_FP8[fp8().kind]}"  # only full fine-tuning gets here
        raise UserError(Problem(what, fix=fix, code="package-missing"), code=Exit.ENVIRONMENT)


def check_all(recipe: Recipe, machine: Hardware) -> list[Problem]:
    """Return every contradiction between launch, machine and recipe. Each problem names both sides."""
    adapter, every = recipe.adapter, recipe.eval.eval_steps
    found = [*_started(machine), *_sharding(recipe, machine), *_parallelism(recipe.model, recipe.data)]
    found += _fp8(recipe) if fp8().kind else []
    init, code = adapter.options().get("init_lora_weights"), "launch-config"
    if sharded() and isinstance(init, str) and init.startswith(adapter_types.PREPARED_INITS):
        found.append(
            Problem(
                f"init_lora_weights: {init} does not work with {sharded()} of the {CONFIG}",
                "adapter.init_lora_weights",
                found=init,
                why=f"the initialization reads whole weights of the base model, and {sharded()} shards them",
                fix="set `adapter.init_lora_weights: true`, or use accelerate_configs/ddp_8.yaml",
                code=code,
            )
        )
    if sharded() and every:
        found.append(
            Problem(
                f"evaluation during training does not work with {sharded()} of the {CONFIG}",
                "eval.eval_steps",
                found=as_yaml(every),
                why=(
                    f"{sharded()} needs all ranks in each forward pass, and ranks have "
                    "different numbers of them"
                ),
                fix="set `eval.eval_steps: null`; finetune then evaluates at the end",
                code=code,
            )
        )
    if splitter() and adapter.ours("loraplus_lr_ratio"):
        found.append(
            Problem(
                f"LoRA+ does not work with {splitter()} of the {CONFIG}",
                "adapter.loraplus_lr_ratio",
                why=(
                    "LoRA+ needs an optimizer with its own parameter groups, which "
                    f"{splitter()} does not take"
                ),
                fix="remove `loraplus_lr_ratio`, or use accelerate_configs/ddp_8.yaml",
                code=code,
            )
        )
    return found


def _fp8(recipe: Recipe) -> list[Problem]:
    """Compare the fp8 of the launch with the quantization of the base model in the recipe."""
    requested, kind = fp8(), recipe.adapter.type
    code = "launch-config"
    if requested.kind not in (FROZEN, *BACKENDS):
        instead = OTHER_FP8["TE"] if kind == "full" else f"remove it and {BASE_INSTEAD}"
        return [
            Problem(
                f"fp8_config.backend of the {CONFIG} is not a backend that Accelerate and finetune support",
                found=requested.kind,
                expected="TE or AO, in upper case",
                fix=f"backend: {requested.kind.upper()}" if requested.kind.upper() in BACKENDS else instead,
                code=code,
            )
        ]
    if requested.kind != FROZEN:
        return _by_accelerate(requested.kind, recipe)
    means = f"mixed_precision: fp8 of the {CONFIG} means a frozen fp8 base model"
    if kind == "full":
        return [
            Problem(
                f"{means}, and full fine-tuning trains the base model",
                "adapter.type",
                found="full",
                fix=f"{OTHER_FP8['TE']} or 8xh100_fp8_te.yaml",
                code=code,
            )
        ]
    stored = adapter_types.find(kind).storage or recipe.model.quantization
    if stored not in ("auto", "fp8"):
        fix = "set `mixed_precision: bf16`"
        if not adapter_types.find(kind).storage:
            fix = f"set `model.quantization: auto`, or {fix}"
        return [
            Problem(
                f"{means}, and the recipe says {stored}",
                "model.quantization",
                found=stored,
                fix=fix,
                code=code,
            )
        ]
    if unsupported_reason := adapter_types.unsupported_reason(kind, "fp8"):
        return [
            Problem(
                f"{means}, and {kind} does not train on one",
                "adapter.type",
                found=kind,
                why=unsupported_reason,
                fix="set `adapter.type: lora`, or `mixed_precision: bf16`",
                code=code,
            )
        ]
    return []


def _by_accelerate(backend: str, recipe: Recipe) -> list[Problem]:
    """Return the problems of Accelerate's own fp8, which is only for full fine-tuning."""
    problems, kind, quantization = list[Problem](), recipe.adapter.type, recipe.model.quantization
    by, code = f"fp8_config.backend: {backend} of the {CONFIG}", "launch-config"
    if kind != "full":
        why = {
            "TE": "it replaces all linear layers by layers with requires_grad=True, so the frozen base model "
            "would train",
            "AO": "it also converts the adapter's matrices to fp8, and quantizes frozen bf16 weights in each "
            "forward pass",
        }[backend]
        problems.append(
            Problem(
                f"{by} is for full fine-tuning",
                "adapter.type",
                found=kind,
                why=why,
                fix=BASE_INSTEAD,
                code=code,
            )
        )
    elif quantization not in ("auto", "none"):
        problems.append(
            Problem(
                f"{by} trains weights in fp32, and the recipe quantizes them",
                "model.quantization",
                found=quantization,
                fix="set `model.quantization: auto`",
                code=code,
            )
        )
    problems += _by_transformer_engine(by, recipe.speed, recipe.data) if backend == "TE" else _by_torchao()
    return problems


def _by_transformer_engine(by: str, speed: Speed, data: Data) -> Iterator[Problem]:
    code = "launch-config"
    if speed.compile not in ("auto", False):
        yield Problem(
            f"{by} can't be compiled",
            "speed.compile",
            found="true",
            why="delayed scaling breaks the graph at each layer",
            fix="set `speed.compile: auto`",
            code=code,
        )
    if data.streaming and data.flat:
        yield Problem(
            f"{by} needs sequences of a multiple of {TE_TOKENS} tokens",
            "data.streaming",
            found="true",
            why="streamed examples that are concatenated have any length",
            fix="set `data.streaming: false`",
            code=code,
        )
    allowed = {
        "offload": ("auto", "none", "optimizer"),
        "activation_checkpointing": ("auto", "none", "norms"),
    }
    for name, values in allowed.items():
        if (value := getattr(speed, name)) not in values:
            yield Problem(
                f"{by} applies only in the forward pass",
                f"speed.{name}",
                found=as_yaml(value),
                why=ONCE,
                fix=f"set `speed.{name}: auto`",
                code=code,
            )
    if on("ACCELERATE_USE_FSDP"):
        yield Problem(
            f"{by} needs whole weights, and FSDP shards them",
            found="distributed_type: FSDP",
            fix=f"{OTHER_FP8['AO']}, or set `fp8_config.backend: AO`",
            code=code,
        )
    for name, takes in TE_TAKES.items():
        setting = said(f"ACCELERATE_FP8_{name}", takes[0])
        if setting.lower() not in [value.lower() for value in takes]:
            yield Problem(
                f"fp8_config of the {CONFIG} sets {name.lower()} to a value that TransformerEngine can't use",
                found=setting,
                expected=" or ".join(takes),
                why="Accelerate does not pass the value on, or TransformerEngine raises an error",
                fix=f"set `{name.lower()}: {takes[0]}`",
                code=code,
            )


def _by_torchao() -> Iterator[Problem]:
    option, code = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "launch-config"
    if on("ACCELERATE_USE_FSDP"):
        if on("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            yield Problem(
                f"fsdp_cpu_ram_efficient_loading of the {CONFIG} can't send fp8 layers of torchao",
                found="true, with fp8_config.backend: AO",
                fix="set `fsdp_cpu_ram_efficient_loading: false`",
                code=code,
            )
    elif on(option) or not said(option):
        yield Problem(
            f"enable_fsdp_float8_all_gather of the {CONFIG} works only with FSDP2",
            found="true (Accelerate's default)",
            why="it replaces the parameters that the optimizer holds, so nothing would train",
            fix="set `enable_fsdp_float8_all_gather: false` in fp8_config",
            code=code,
        )


def _started(machine: Hardware) -> list[Problem]:
    """Compare the number of processes in the config, the number that was started, and the number of GPUs."""
    alone = "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if alone and said("ACCELERATE_MIXED_PRECISION"):
        return [
            Problem(
                f"num_processes of the {CONFIG} asks for several processes, but the launcher started one",
                found="MASTER_ADDR without WORLD_SIZE",
                fix=(
                    "set `distributed_type: MULTI_GPU`, also on CPUs (accelerate_configs/cpu_2.yaml); "
                    "without a launcher, unset MASTER_ADDR"
                ),
                code="launch-config",
            )
        ]
    here = int(said("LOCAL_WORLD_SIZE", "1"))
    if machine.device == "cuda" and here > machine.count:
        return [
            Problem(
                f"num_processes of the {CONFIG} is larger than the number of GPUs of this machine",
                found=f"{here} processes, {machine.count} GPUs",
                fix=f"--num_processes {machine.count}",
                code="launch-config",
            )
        ]
    return []


def _sharding(recipe: Recipe, machine: Hardware) -> list[Problem]:
    """Compare the sharding of weights or optimizer state with the machine and the recipe."""
    kind, own, code = recipe.adapter.type, recipe.model.quantization, "launch-config"
    stored = adapter_types.find(kind).storage or ("fp8" if means_fp8(own) else own)
    found = [*_twice(recipe.speed), *_precision(machine, stored)]
    if on("ACCELERATE_USE_FSDP"):
        found += _fsdp(machine, stored)
    if on("ACCELERATE_USE_DEEPSPEED"):
        found += _deepspeed(machine, stored, kind)
    unsplit = ("int8", "torchao_int8", "fp4") if sharded() == "DeepSpeed" else ("int8", "torchao_int8")
    if sharded() and stored in unsplit:
        found.append(
            Problem(
                f"{sharded()} of the {CONFIG} can't shard a base model in {stored}",
                "model.quantization",
                found=stored,
                fix="set `model.quantization: none`",
                code=code,
            )
        )
    if sharded():
        found += _undivided(kind)
    if splitter() and adapter_types.find(kind).peft == "adalora":
        found.append(
            Problem(
                f"AdaLoRA does not work with {splitter()} of the {CONFIG}",
                "adapter.type",
                found=kind,
                why=f"AdaLoRA's ranks are chosen by whole gradients, and {splitter()} shards them",
                fix=LORA_OR_DDP,
                code=code,
            )
        )
    return found


def _undivided(kind: str) -> Iterator[Problem]:
    """Return the problem of an adapter that can't be sharded with the weights, or not saved from shards."""
    one, by, code = adapter_types.find(kind), f"{sharded()} of the {CONFIG}", "launch-config"
    if one.prompt or one.peft in adapter_types.SHARES:
        why = f"{sharded()} can't shard tensors that several layers share"
        if one.prompt:
            why = f"{sharded()} has only shards of the network that makes the virtual tokens to save"
        yield Problem(
            f"{by} can't train {kind}", "adapter.type", found=kind, why=why, fix=LORA_OR_DDP, code=code
        )
    elif read_by_rank_0() and one.peft in adapter_types.WITH_BUFFERS:
        yield Problem(
            f"fsdp_cpu_ram_efficient_loading of the {CONFIG} does not send buffers, and {kind} has buffers",
            "adapter.type",
            found=kind,
            fix="set `fsdp_cpu_ram_efficient_loading: false` (accelerate_configs/fsdp2_8_quantized.yaml)",
            code=code,
        )


def _twice(speed: Speed) -> Iterator[Problem]:
    """Return the problems of features that the launch and the recipe would both apply."""
    if on("FSDP_ACTIVATION_CHECKPOINTING"):
        key = "speed.activation_checkpointing"
        yield Problem(
            f"fsdp_activation_checkpointing of the {CONFIG} and {key} would both recompute layers",
            key,
            found=speed.activation_checkpointing,
            fix=f"set `fsdp_activation_checkpointing: false` and `{key}: full`",
            code="launch-config",
        )
    if (compiler := said("ACCELERATE_DYNAMO_BACKEND", "no")) not in ("", "no"):
        yield Problem(
            f"dynamo_config of the {CONFIG} and speed.compile would both compile the model",
            "speed.compile",
            found=compiler,
            fix="remove dynamo_config and set `speed.compile: true`",
            code="launch-config",
        )


def _precision(machine: Hardware, stored: str) -> Iterator[Problem]:
    """GEMMs of an fp8 base model return bf16, so the launch must use bf16 too."""
    precision = said("ACCELERATE_MIXED_PRECISION", "bf16")
    if stored == "fp8" and precision in ("no", "fp16") and machine.device == "cuda":
        yield Problem(
            f"an fp8 base model needs bf16, and the {CONFIG} sets mixed_precision: {precision}",
            "model.quantization",
            found=stored,
            fix="set `mixed_precision: bf16`, or `model.quantization: auto`",
            code="launch-config",
        )


def _fsdp(machine: Hardware, stored: str) -> Iterator[Problem]:
    code = "launch-config"
    if machine.device == "cpu":
        yield Problem(
            f"FSDP of the {CONFIG} would shard nothing: on CPUs, Accelerate uses plain DDP",
            found="distributed_type: FSDP",
            fix="use accelerate_configs/cpu_2.yaml",
            code=code,
        )
    if (version := said("FSDP_VERSION", "1")) != "2":
        yield Problem(
            f"fsdp_config of the {CONFIG} asks for FSDP1, and finetune supports only FSDP2",
            found=version,
            why="FSDP1 is deprecated and needs one dtype for all weights",
            fix="set `fsdp_version: 2`",
            code=code,
        )
    if on("FSDP_CPU_RAM_EFFICIENT_LOADING") and stored in ("fp8", "nf4", "fp4"):
        yield Problem(
            f"fsdp_cpu_ram_efficient_loading of the {CONFIG} can't send a base model in {stored}",
            "model.quantization",
            found=stored,
            fix="set `fsdp_cpu_ram_efficient_loading: false` (accelerate_configs/fsdp2_8_quantized.yaml)",
            code=code,
        )


def _deepspeed(machine: Hardware, stored: str, kind: str) -> Iterator[Problem]:
    precision, code = said("ACCELERATE_MIXED_PRECISION", "no"), "launch-config"
    if machine.device == "cpu" and precision != "no":
        yield Problem(
            f"DeepSpeed of the {CONFIG} supports 16-bit precision only on GPUs",
            found=f"mixed_precision: {precision}",
            fix='set `mixed_precision: "no"`',
            code=code,
        )
    if machine.device == "cpu" and on("ACCELERATE_USE_CPU"):
        yield Problem(
            f"DeepSpeed of the {CONFIG} would shard nothing: with use_cpu, Accelerate uses plain DDP",
            found="use_cpu: true",
            fix="set `use_cpu: false`, and CUDA_VISIBLE_DEVICES= if the machine has GPUs",
            code=code,
        )
    if stored == "fp8" or (stored == "nf4" and sharded()):  # ZeRO-2 too casts the whole module
        yield Problem(
            f"DeepSpeed of the {CONFIG} can't train on a base model in {stored}",
            "model.quantization",
            found=stored,
            why="it casts or shards weights, and these weights are quantized",
            fix="use accelerate_configs/fsdp2_8_quantized.yaml, or ddp_8.yaml if the model fits on each GPU",
            code=code,
        )
    if file := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        yield Problem(
            f"finetune can't compare a DeepSpeed config file with the recipe, so the {CONFIG} must hold it",
            "--deepspeed_config_file",
            found=file,
            fix="move zero_stage and the other settings to `deepspeed_config`",
            code=code,
        )
    if fp8().kind:
        yield Problem(
            f"DeepSpeed does not support mixed_precision: fp8, which the {CONFIG} sets",
            found="fp8",
            fix=OTHER_FP8["TE"] if kind == "full" else BASE_INSTEAD,
            code=code,
        )
    if zero_stage() not in ("1", "2", "3"):
        yield Problem(
            f"zero_stage of the {CONFIG} is no stage that shards",
            found=zero_stage(),
            expected="1, 2 or 3",
            why="ZeRO shards the optimizer state (1), also the gradients (2), and also the weights (3)",
            fix="set `zero_stage: 2`; to shard nothing, use accelerate_configs/ddp_8.yaml",
            code=code,
        )


def _parallelism(model: Model, data: Data) -> list[Problem]:
    """Return the problems of sequences and layers that several processes share."""
    problems: list[Problem] = []
    by, code = f"of the {CONFIG} is not supported", "launch-config"
    cut = "PEFT's adapters need whole weight matrices, and tensor parallelism shards them"
    lost = "DeepSpeed's sequence parallelism needs its own loss function, and finetune uses another one"
    for size, name, why in (("TP", "tp_size", cut), ("SP", "sp_size", lost)):
        if parallel(size) > 1:
            problems.append(
                Problem(
                    f"parallelism_config_{name} {by}",
                    found=str(parallel(size)),
                    expected="1",
                    why=why,
                    fix="use accelerate_configs/fsdp2_8.yaml, or context_parallel_4.yaml for long sequences",
                    code=code,
                )
            )
    if parallel("DP_REPLICATE") > 1:
        problems.append(
            Problem(
                f"parallelism_config_dp_replicate_size {by}",
                found=str(parallel("DP_REPLICATE")),
                expected="1",
                fix=(
                    "set it to 1: fsdp2_8.yaml shards one copy over all processes, "
                    "multi_node.yaml shards nothing"
                ),
                code=code,
            )
        )
    problems += [] if problems else _sizes()
    return problems + (cut_rows(model, data) if parallel("CP") > 1 else [])


def _sizes() -> Iterator[Problem]:
    """Compare the sizes with the number of processes, and check that FSDP shards the weights."""
    sizes, code = {name: parallel(name) for name in ("DP_SHARD", "CP")}, "launch-config"
    stated = ", ".join(f"{name.lower()}_size: {size}" for name, size in sizes.items())
    total, processes = math.prod(sizes.values()), said("WORLD_SIZE")
    if total > 1 and not on("ACCELERATE_USE_FSDP"):
        yield Problem(
            f"parallelism_config of the {CONFIG} needs FSDP",
            found=f"{stated}, without FSDP",
            fix=(
                "set `distributed_type: FSDP` and `fsdp_version: 2` "
                "(accelerate_configs/context_parallel_4.yaml)"
            ),
            code=code,
        )
    elif total > 1 and processes and total != int(processes):
        yield Problem(
            f"parallelism_config of the {CONFIG} needs {total} processes, because its sizes multiply",
            found=f"{stated}; {processes} processes",
            fix=f"--num_processes {total}, or set `parallelism_config_cp_size: {processes}` alone",
            code=code,
        )
    elif total == 1 and on("ACCELERATE_USE_PARALLELISM_CONFIG") and on("ACCELERATE_USE_FSDP"):
        yield Problem(
            f"FSDP would shard nothing: all sizes in parallelism_config of the {CONFIG} are 1",
            found=stated,
            fix=(
                "remove parallelism_config, or set `parallelism_config_dp_shard_size` to the "
                "number of processes"
            ),
            code=code,
        )


def cut_rows(model: Model, data: Data) -> list[Problem]:
    """Return the conflicts of a recipe with context parallelism, which shares sequences among processes."""
    problems, by = list[Problem](), f"parallelism_config_cp_size of the {CONFIG}"
    if data.flat:
        key = "data.packing" if data.packing else "data.padding_free"
        problems.append(
            Problem(
                f"{by} would cut packed examples into pieces",
                key,
                found="true",
                fix=f"set `{key}: false`",
                code="launch-config",
            )
        )
    if model.attention != "sdpa":
        problems.append(
            Problem(
                f"{by} works only with PyTorch's own attention",
                "model.attention",
                found=model.attention,
                fix="set `model.attention: sdpa`",
                code="launch-config",
            )
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
            problems.append(
                Problem(
                    f"{name} of the {CONFIG} contradicts train.{key} of the recipe",
                    f"train.{key}",
                    found=number,
                    expected=f"{value:g}",
                    fix=f"remove {name} from deepspeed_config",
                    code="launch-config",
                )
            )
    return problems


def check_launch(recipe: Recipe) -> None:
    """Refuse settings of the recipe that do not work under this launch (exit 2).

    These are a batch size search on sharded weights, vLLM in several processes, and a sliding window under
    context parallelism. If the launch asks for fp8, conflicts with `model.quantization: fp8` are refused too.
    """
    by, key = launch_environment.sharded(), "train.per_device_train_batch_size"
    if by and recipe.train.per_device_train_batch_size == "auto":
        raise UserError(
            Problem(
                f"{by} of the {CONFIG} does not work with a search for the batch size",
                key,
                found="auto",
                why=f"the search runs before {by} shards the weights",
                fix=f"set `{key}: 1` or a larger number",
                code="launch-config",
            )
        )
    processes = launch_settings.read().processes
    raise_if_any(deepspeed_values(recipe.train, processes))
    if recipe.eval.engine == "vllm" and recipe.eval.tasks and processes > 1:
        raise UserError(
            Problem(
                "vLLM does not work in a launch of several processes",
                "eval.engine",
                found="vllm",
                why=f"each of the {processes} processes would start its own vLLM",
                fix="set `eval.engine: hf`, or run `finetune evaluate RUN eval.engine=vllm` after training",
                code="launch-config",
            )
        )
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
        raise UserError(
            *(
                replace(
                    one,
                    what=by + one.what,
                    code="launch-config" if one.code == "recipe-conflict" else one.code,
                )
                for one in found
            )
        )


def check_window(config: ModelConfig) -> None:
    """Refuse a model with a sliding window, which context parallelism would cut into pieces (exit 2)."""
    if (window := attention_choice.read(config).window) is not None:
        raise UserError(
            Problem(
                (
                    f"parallelism_config_cp_size of the {CONFIG} would cut the model's sliding "
                    "window into pieces"
                ),
                "model.name",
                found=f"a window of {window} tokens",
                fix="use accelerate_configs/fsdp2_8.yaml, or a model without a sliding window",
                code="launch-config",
            )
        )
