"""How several GPUs share a training: the memory of each GPU, the communication, and the choice of the launch.

On a ring of n GPUs, each GPU sends 2 (n - 1) / n of a tensor in an all-reduce. An all-gather or a
reduce-scatter sends half of that. FSDP2 and ZeRO-3 gather all weights in the forward pass and again in the
backward pass (Rajbhandari et al., ZeRO, 2020, section 7). Context parallelism also gathers each layer's keys
and values in every pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from finetune.autoconfig import memory_estimate
from finetune.autoconfig.launch_settings import Launch
from finetune.core import shipped_files
from finetune.core.errors import Problem, UserError
from finetune.distributed import launch_environment
from finetune.launch import accelerate_config
from finetune.recipe import adapter_types
from finetune.recipe.adapter_types import FOUR_BIT

# Quantized weights that FSDP2 shards with an accelerate config of their own.
CODED = ("fp8", "nf4", "fp4")
# Layers that are gathered at the same time: the running layer and the next one.
WHOLE_LAYERS = 2


class Sharding(NamedTuple):
    """How a launch divides a training between its processes."""

    name: str
    """The name of the method, such as DDP; empty: one process."""
    weights: bool = False
    """Each process holds a shard of the weights, and gathers a layer while it runs."""
    states: bool = False
    """Each process holds a shard of the gradients and the optimizer state."""
    half: bool = False
    """DeepSpeed: weights are in 16 bits, and the optimizer state includes an fp32 copy of trained weights."""
    precision: str = ""
    """The launch's mixed_precision; empty: chosen for the machine."""
    frozen_fp8: bool = False
    """`mixed_precision: fp8` without a backend, which means an fp8 base model."""
    sharing: int = 1
    """Processes that share each sequence (context parallelism)."""
    no_recompute: bool = False
    """TransformerEngine's fp8 applies only in the forward pass, so no layer can be recomputed."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that the launch would set for its processes (`launch_environment`)."""


ONE, DDP = Sharding(""), Sharding("DDP")
FSDP2 = Sharding("FSDP2", True, True, variables=(("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")))
ZERO = {2: Sharding("ZeRO-2", states=True, half=True), 3: Sharding("ZeRO-3", True, True, half=True)}


class Share(NamedTuple):
    """The share of the weights and states that one process holds, and the memory that sharding adds."""

    weights: int = 1
    """Number of shards of the weights. Each process holds one shard, also of the states."""
    states: int = 1
    half: bool = False
    gathered: float = 0.0
    """GiB of the layers that are gathered at the same time, with one layer's gradients if it trains."""
    outside: float = 0.0
    """GiB of gathered weights outside of layers: before and after the layers run, or always if they train."""
    buckets: bool = False
    """DDP reduces gradients in a copy (buckets)."""
    nccl: float = 0.0
    """GiB that NCCL holds before the model is set up, if weights are sharded."""

    more: float = 0.0
    """GiB of one more layer, for which a run reserves memory in addition to `gathered`."""


def of_config(path: Path, gpus: int | None = None) -> tuple[Sharding, int]:
    """Read from an accelerate config how it divides a training, and its number of processes.

    Args:
        gpus: the number of processes; `None`: the number in the config.

    Raises:
        UserError: the file is not an accelerate config, or plans do not support its launch, or it has no
            valid number of processes (exit 2).
    """
    given: dict[str, Any] = accelerate_config.read(path)
    ours = path.resolve().is_relative_to(shipped_files.folder("accelerate_configs").resolve())
    if not ours and (
        found := accelerate_config.check_values(given, str(path))
    ):  # imports Accelerate, which takes seconds
        raise UserError(*found)
    count, precision_of_launch = (
        gpus or int(given.get("num_processes") or 1),
        str(given.get("mixed_precision") or ""),
    )
    kind, known = str(given.get("distributed_type") or "NO"), {"NO": ONE, "MULTI_GPU": DDP, "FSDP": FSDP2}
    stage, code = int((given.get("deepspeed_config") or {}).get("zero_stage", 0)), "launch-config"
    found = ZERO.get(stage) if kind == "DEEPSPEED" else known.get(kind)
    offloads = "offload_params: true" in str(given.get("fsdp_config")).replace("'", "").lower()
    offloads |= any(value in ("cpu", "nvme") for value in (given.get("deepspeed_config") or {}).values())
    sizes = _sizes(given.get("parallelism_config"))
    cut = [
        f"{name}_size: {size}" for name, size in sizes.items() if size > 1 and name not in ("cp", "dp_shard")
    ]
    if found is None or offloads or cut or (sizes["cp"] > 1 and found is not FSDP2):
        raise UserError(
            Problem(
                "finetune can't plan this launch",
                "--accelerate",
                where=str(path),
                found="offloading" if offloads else ", ".join(cut) or f"{kind} {stage or ''}".strip(),
                expected="DDP, FSDP2, context parallelism, ZeRO-2 or ZeRO-3",
                fix="--accelerate fsdp2_8",
                code=code,
            )
        )
    if count < 1:
        raise UserError(
            Problem(
                "the config has no number of processes",
                "--accelerate",
                str(path),
                found=f"num_processes: {count}",
                fix="--gpus 16",
                code=code,
            )
        )
    if sizes["cp"] > 1 and count != sizes["cp"] * sizes["dp_shard"]:
        raise UserError(
            Problem(
                "the number of processes is not dp_shard_size x cp_size of the config",
                "--accelerate",
                where=str(path),
                found=f"{count} processes; dp_shard_size {sizes['dp_shard']} x cp_size {sizes['cp']}",
                fix=f"--gpus {sizes['dp_shard'] * sizes['cp']}, or change dp_shard_size or cp_size",
                code=code,
            )
        )
    if found is ONE and count > 1:
        raise UserError(
            Problem(
                "the config starts one process",
                "--accelerate",
                where=str(path),
                found=f"{count} GPUs",
                fix=f"--gpus 1, or --accelerate ddp_8 --gpus {count}",
                code=code,
            )
        )
    precision = "bf16" if precision_of_launch == "fp8" else precision_of_launch
    frozen = precision_of_launch == "fp8" and not given.get("fp8_config")
    made = (found if count > 1 else ONE)._replace(precision=precision, frozen_fp8=frozen)
    once = precision_of_launch == "fp8" and str((given.get("fp8_config") or {}).get("backend")) == "TE"
    said = tuple(variables(given).items())
    return made._replace(sharing=sizes["cp"], no_recompute=once, variables=said), count


def variables(given: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables that Accelerate sets for a config and `launch_conflicts` reads.

    Accelerate's own function is not called because it imports torch.
    """
    kind, made = str(given.get("distributed_type")), dict[str, Any]()
    made["ACCELERATE_MIXED_PRECISION"] = given.get("mixed_precision") or "no"
    if made["ACCELERATE_MIXED_PRECISION"] == "fp8":
        made |= _of_section(given, "fp8_config", "fp8_", "ACCELERATE_FP8_")
    if kind == "FSDP":
        made |= {"ACCELERATE_USE_FSDP": True, **_of_section(given, "fsdp_config", "fsdp_", "FSDP_")}
    if kind == "DEEPSPEED":
        zero = _of_section(given, "deepspeed_config", "", "ACCELERATE_")
        made |= {name: value for name, value in zero.items() if name.startswith("ACCELERATE_GRADIENT_")}
        stage = zero.get("ACCELERATE_ZERO_STAGE", 2)
        made |= {"ACCELERATE_USE_DEEPSPEED": True, "ACCELERATE_DEEPSPEED_ZERO_STAGE": stage}
    if given.get("parallelism_config"):
        made |= {"ACCELERATE_USE_PARALLELISM_CONFIG": True, **_of_section(given, "parallelism_config")}
    made |= _of_section(given, "dynamo_config", "dynamo_", "ACCELERATE_DYNAMO_")
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in made.items()
    }


def _of_section(given: dict[str, Any], section: str, begin: str = "", name: str = "") -> dict[str, Any]:
    held = given.get(section) or {}
    given = {key: value for key, value in held.items() if value is not None}
    return {f"{name}{key.removeprefix(begin).upper()}": value for key, value in given.items()}


def _sizes(parallelism: dict[str, Any] | None) -> dict[str, int]:
    """Return the size of each dimension of a config's `parallelism_config`; 1 if it is not set."""
    names = ("cp", "dp_shard", "dp_replicate", "tp", "sp")
    return {name: int((parallelism or {}).get(f"parallelism_config_{name}_size") or 1) for name in names}


def launched(by: Sharding, processes: int, precision: str) -> Launch:
    """Return the launch as one of its processes sees it."""
    splitter = "FSDP" if by.name == FSDP2.name else "DeepSpeed" if by.states else ""
    shards = splitter if by.weights else ""
    fp8 = launch_environment.FROZEN if by.frozen_fp8 else ""
    return Launch("none", processes, 0, by.precision or precision, "hardware", "", shards, fp8, splitter)


def share(by: Sharding, processes: int, gathered: float, outside: float, parameters: int) -> Share:
    """Return the share of one process.

    Args:
        gathered: GiB of the layers that are gathered at the same time, if weights are sharded.
        outside: GiB of gathered weights outside of layers, if weights are sharded.
        parameters: the number of parameters of the model.
    """
    gathered = max(gathered, memory_estimate.zero3_gib(parameters)) if by.half else gathered
    weights, states = processes if by.weights else 1, processes if by.states else 1
    if not by.weights:
        return Share(weights, states, by.half, buckets=by.name == "DDP")
    more = (
        0.0
        if by.half or keeps_layers(by)
        else gathered * (memory_estimate.GATHERED_LAYERS / WHOLE_LAYERS - 1)
    )
    return Share(
        weights, states, by.half, gathered, outside, nccl=memory_estimate.nccl_gib(processes), more=more
    )


def keeps_layers(by: Sharding) -> bool:
    """Return whether all layers stay gathered from forward to backward."""
    with launch_environment.under(dict(by.variables)):
        return launch_environment.keeps_layers()


def sent(by: Sharding, processes: int, base: float, trained: int, passes: int) -> tuple[float, float]:
    """Return the bytes that each GPU sends in an optimizer step, for gathering weights and for gradients.

    Args:
        base: bytes of all weights in their gathered form.
        trained: trainable parameters. Their gradients are reduced in fp32, or in 16 bits under DeepSpeed.
        passes: forward and backward passes of a step. DDP reduces gradients in the last pass. Sharded
            gradients are reduced in every pass.
    """
    part = (processes - 1) / processes
    size = 2 if by.half else 4
    if by.weights:
        return 2 * base * part * passes, size * trained * part * passes
    if by.states:  # each process gathers the weights that the other processes updated
        return 2 * trained * part, size * trained * part * passes
    return 0.0, 2 * size * trained * part


def config_name(by: Sharding, storage: str) -> str:
    """Return the shipped accelerate config of a chosen launch. It works for any number of GPUs."""
    if by.weights:
        return "fsdp2_8_quantized" if storage in CODED else "fsdp2_8"
    return "ddp_8" if by.name else "single_gpu"


def split_config(by: Sharding, storage: str, processes: int) -> Sharding:
    """Return the launch of the shipped config that `auto` starts for a sharded base model."""
    return of_config(
        shipped_files.folder("accelerate_configs") / f"{config_name(by, storage)}.yaml", processes
    )[0]


class Sizes(NamedTuple):
    """GiB that decide whether each GPU holds the whole base model or a shard of it."""

    memory: float
    """GiB of a GPU."""
    usable: float
    """GiB of a GPU that training may use."""
    whole: float
    """GiB that training needs with the whole base model on each GPU."""
    split: float | None
    """GiB that training needs with a shard on each GPU; `None`: not planned or not possible."""


def reason(count: int, gib: Sizes, smaller: str, refused: str = "") -> str:
    """Explain why each GPU holds the whole base model or a shard of it.

    If each GPU holds the whole base model, GPUs exchange only the adapter's gradients, a few MB per step.
    FSDP2 and ZeRO-3 send all weights between the GPUs in each pass, so `auto` uses FSDP2 only if DDP does not
    fit.

    Args:
        smaller: settings that need less memory than a sharded base model.
        refused: why the base model can't be sharded.
    """
    whole = "each GPU holds the whole base model (DDP)"
    text = f"{count} GPUs: training needs about {gib.whole:.0f} GiB of {gib.memory:.0f} GiB per GPU under DDP"
    if refused:
        return f"{text}; {whole}, which may not fit, because FSDP2 does not work here: {refused}"
    if gib.split is None:
        return f"{text}, so {whole}"
    if gib.split > gib.usable and gib.split >= gib.whole:
        text += f" and {gib.split:.0f} GiB under FSDP2; {whole}, which may not fit"
    else:
        text += f", so FSDP2 shards the base model: {gib.split:.0f} GiB per GPU"
        text += ", which may not fit either" if gib.split > gib.usable else ""
    return f"{text}; try {smaller}" if gib.split > gib.usable else text


def smaller(storage: str, kind: str, *, fp8: bool) -> str:
    """Suggest settings that need less memory than a sharded base model.

    Args:
        storage: the storage of the sharded base model.
        kind: `adapter.type`.
        fp8: whether the GPUs have fp8 GEMMs.
    """
    offload, quantized = "--accelerate fsdp2_8_offload", f"q{kind}"
    if kind == "full":
        return offload
    if storage not in CODED and fp8:
        return f"model.quantization=fp8, or {offload}"
    if storage not in FOUR_BIT and quantized in adapter_types.all_types():
        return f"adapter.type={quantized}"
    return "a smaller train.per_device_train_batch_size or data.max_length"
