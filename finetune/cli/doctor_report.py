"""`finetune doctor`: versions, hardware, choices, extras; each optimization: where set, state, why."""

from __future__ import annotations

import platform
from importlib.metadata import distributions, requires
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement

from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    data_loader,
    memory_estimate,
    mixed_precision,
)
from finetune.autoconfig.attention_choice import Rows
from finetune.autoconfig.batch_size import most_processes
from finetune.autoconfig.compilation import Work, choose_compile
from finetune.core import run_checks
from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.core.packages import install_extra, installed
from finetune.hardware import detection
from finetune.models import architecture
from finetune.planning import measured_rates
from finetune.preflight import choice_checks
from finetune.quantization import qat
from finetune.recipe import qat_rules
from finetune.recipe.adapter_types import FOUR_BIT, QUANTISED, find
from finetune.recipe.schema import Data, Speed, Train
from finetune.run_folder.run_folder import packages

if TYPE_CHECKING:
    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Recipe

EXTRAS = {  # extra -> what it brings, by import name
    "bnb": ("bitsandbytes",),
    "quantize": ("torchao",),
    "eval": ("lm_eval",),
    "sweep": ("optuna", "psycopg"),
    "deepspeed": ("deepspeed",),
    "fp8": ("transformer_engine",),
    "kernels": ("kernels", "liger_kernel"),
    "flash": ("flash_attn",),
}


LLAMA_8B = memory_estimate.Widths(4096, 14336, 4096, 6144, 32, 128256)


class Optimisation(NamedTuple):
    name: str
    where: str
    state: str  # active | off | not possible
    why: str
    needs: str = "any"


def run(recipe: Recipe | None, *, quiet: bool = False, measured: bool = False) -> dict[str, Any]:
    """Print five tables about a run of the recipe, or about the defaults without a recipe.

    Args:
        measured: first time this machine, which takes about a minute on a GPU, and store the rates for
            `finetune plan`.
    """
    screen, machine = Console(quiet=quiet), detection.detect()
    rates = dict(_ceilings(recipe, machine)) if measured else {}
    if measured:
        screen.table("measured on this machine", ("what", "rate"), list(rates.items()))
    found = {"python": platform.python_version(), **packages()}
    rows = [(name, version or "-", _problem(name, version)) for name, version in found.items()]
    screen.table("versions", ("package", "version", "note"), rows)
    hardware, choices = list(_machine(machine)), list(_choices(recipe, machine))
    listed, extras = optimisations(recipe, machine), list(_extras())
    screen.table("machine", ("what", "found"), hardware)
    screen.table("choices", ("what", "choice", "why"), choices)
    screen.table("optimizations", Optimisation._fields, listed)
    screen.table("extras", ("extra", "installed", "install command"), extras)
    return {
        "versions": found,
        "machine": dict(hardware),
        "choices": {name: {"value": value, "reason": reason} for name, value, reason in choices},
        "optimizations": listed,
        "extras": {name: installed for name, installed, _ in extras},
        "rates": rates,
    }


def _ceilings(recipe: Recipe | None, machine: Hardware) -> list[tuple[str, str]]:
    """Time GEMMs, attention and copies at the model's shapes, or at the shapes of an 8B Llama."""
    one = memory_estimate.widths(architecture.read(recipe.model).config) if recipe else LLAMA_8B
    fp8 = not mixed_precision.fp8_missing(machine, "bf16")
    rates = measured_rates.run(machine.device, machine.name, one, fp8=fp8, cards=machine.count)
    rows = [(name, str(rates[name])) for name in ("device", "torch", "date", "shapes")]
    for name, text in measured_rates.NAMES.items():
        if name in rates:
            rows.append(
                (text, f"{rates[name] / 1e12:,.3g} {'TB/s' if name in measured_rates.MOVED else 'TFLOP/s'}")
            )
    return [*rows, ("stored in", str(measured_rates.file_of(machine.name, one)))]


def optimisations(recipe: Recipe | None, machine: Hardware) -> list[Optimisation]:
    """Return the state of every optimization for this recipe on this machine."""
    train = recipe.train if recipe else Train()
    given = train.passed_on()
    speed, data = (recipe.speed, recipe.data) if recipe else (Speed(), Data(name="-"))
    return [
        *_precision(machine, given, _base(recipe, machine)),
        _attention(recipe, machine),
        *_memory(speed, recipe, machine),
        *_optimizer(given),
        *_batches(train, given, data),
        *_loader(train, given, machine),
    ]


def _precision(machine: Hardware, given: dict[str, Any], base: run_checks.Choice) -> list[Optimisation]:
    gpu, ampere = machine.device == "cuda", machine.capability >= (8, 0)
    launch = "mixed_precision in the accelerate config"
    bf16 = Optimisation("bf16 autocast", launch, "not possible", "no GPU with bf16", "sm_80")
    if not gpu:
        why = "fp32 is the default on a CPU; set mixed_precision: bf16 in the accelerate config"
        bf16 = Optimisation("bf16 autocast", launch, "off", why)
    tf32 = Optimisation("TF32", "train.tf32", "not possible", "no GPU with TF32", "sm_80")
    if gpu and ampere:
        bf16 = bf16._replace(state="active", why="the default on GPUs that support bf16")
        asked = bool(given.get("tf32"))
        why = "asked for" if asked else "bf16 autocast leaves little in fp32; set train.tf32=true"
        tf32 = tf32._replace(state="active" if asked else "off", why=why)
    fp8 = "active" if base.value == "fp8" else "off"
    missing = mixed_precision.fp8_missing(machine, mixed_precision.launch(machine).precision)
    fp8, why = ("not possible", missing) if missing else (fp8, base.reason)
    benchmark = Optimisation("cuDNN benchmark", "nowhere", "off", "a decoder has no convolutions", "GPU")
    return [bf16, tf32, Optimisation("fp8 base model", "model.quantization", fp8, why, "sm_89"), benchmark]


def _attention(recipe: Recipe | None, machine: Hardware) -> Optimisation:
    name, reason = _chosen_attention(recipe, machine)
    state = "not possible" if name == "-" else "off" if name == "eager" else "active"
    text = reason if name == "-" else f"{name}: {reason}"
    return Optimisation("fused attention", "model.attention", state, text)


def _chosen_attention(recipe: Recipe | None, machine: Hardware) -> tuple[str, str]:
    """Choose the attention kernel for the recipe, or for a Llama if there is no recipe or no config."""
    rows, attends, unread = Rows(packed=False, longest=1024), None, ""
    dtype = mixed_precision.DTYPES[mixed_precision.launch(machine).precision]
    if recipe:
        rows = Rows(recipe.data.packing or recipe.data.padding_free, recipe.data.max_length)
        try:
            attends = attention_choice.read(architecture.read(recipe.model).config)
        except UserError:
            unread = f"; assumes a Llama, because no config of {recipe.model.name} can be read"
    try:
        asked = recipe.model.attention if recipe else "auto"
        name, reason = attention_choice.choose(asked, machine, dtype, attends, rows)
        return run_checks.Choice(name, f"{reason}{unread}")
    except UserError as error:
        return "-", error.problems[0].why


def _memory(speed: Speed, recipe: Recipe | None, machine: Hardware) -> list[Optimisation]:
    compile, reason = choose_compile(speed.compile, Work(0, None), machine)
    state = "active" if compile == "on" else "off"
    asked, gpu = speed.activation_checkpointing != "auto", machine.device == "cuda"
    checkpointing = "active" if speed.activation_checkpointing != "none" and (asked or gpu) else "off"
    why = "asked for" if asked else "auto: CPU memory is large enough"
    if gpu and not asked:
        why = "auto: chosen when the model is loaded, from its size and the GPU memory"
    meant = find(recipe.adapter.type).storage if recipe else ""
    quantization = recipe.model.quantization if recipe else "auto"
    four_bit = (quantization if quantization in QUANTISED else meant) in FOUR_BIT
    bnb = "bitsandbytes is installed" if installed("bitsandbytes") else install_extra("bnb")
    nf4 = "active" if four_bit else "off" if installed("bitsandbytes") else "not possible"
    return [
        Optimisation("torch.compile", "speed.compile", state, reason),
        Optimisation("activation checkpointing", "speed.activation_checkpointing", checkpointing, why),
        Optimisation("4-bit base model (NF4)", "adapter.type: qlora", nf4, "asked for" if four_bit else bnb),
        Optimisation("CPU offload", "speed.offload", *_offload(speed.offload, machine)),
        _loss(speed),
        _qat(speed),
    ]


def _offload(asked: str, machine: Hardware) -> tuple[str, str]:
    if machine.device == "cpu":
        return "not possible", "there is no GPU whose memory it could save"
    if asked == "auto":
        return "off", "auto: chosen when the model is loaded, if a large fp8 model needs memory"
    return ("off", "asked for: none") if asked == "none" else ("active", asked)


def _loss(speed: Speed) -> Optimisation:
    name, where = "chunked loss", "speed.loss"
    if speed.loss == "trl":
        return Optimisation(name, where, "off", "asked for: trl")
    why = "asked for" if speed.loss == "chunked" else "auto: for models with the standard loss"
    return Optimisation(name, where, "active", why)


def _qat(speed: Speed) -> Optimisation:
    """Return the state of quantization-aware training, which only improves a quantized export."""
    name, where, absent = "quantization-aware training", "speed.qat", qat_rules.missing()
    if absent:
        return Optimisation(name, where, "not possible", absent.fix)
    if speed.qat:
        return Optimisation(name, where, "active", f"asked for: {qat.describe(speed.qat)}")
    return Optimisation(name, where, "off", "only useful before `finetune merge --quantize`")


def _optimizer(given: dict[str, Any]) -> list[Optimisation]:
    optim = str(given.get("optim", "adamw_torch_fused"))
    fused = "active" if "fused" in optim else "off"
    clip = given.get("max_grad_norm", 1.0)
    return [
        Optimisation("fused AdamW", "train.optim", fused, f"optim: {optim}"),
        Optimisation(
            "8-bit optimizer",
            "train.optim",
            "active" if "8bit" in optim or "4bit" in optim else "off",
            f"optim: {optim}",
        ),
        Optimisation("set_to_none", "the Trainer", "active", "model.zero_grad() frees the gradients"),
        Optimisation(
            "gradient clipping",
            "train.max_grad_norm",
            "active" if clip else "off",
            f"at norm {clip:g}",
        ),
    ]


def _batches(train: Train, given: dict[str, Any], data: Data) -> list[Optimisation]:
    packing, flat = data.packing, data.packing or data.padding_free
    effective = f"effective batch {train.effective_batch_size}"
    stated = train.per_device_train_batch_size
    micro = {None: "micro-batch size of at most 8", "auto": "largest micro-batch size that fits"}
    split = f"{effective}, {micro.get(stated, f'micro-batch size {stated}')}"
    bucketing = given.get("train_sampling_strategy") == "group_by_length"
    how = "not for streams" if data.streaming else "set train.train_sampling_strategy=group_by_length"
    return [
        Optimisation("gradient accumulation", "train.effective_batch_size", "active", split),
        Optimisation(
            "automatic batch size",
            "train.per_device_train_batch_size",
            "active" if stated == "auto" else "off",
            "searched with the longest examples"
            if stated == "auto"
            else "auto searches it; when out of memory, a run halves the micro-batch size",
        ),
        Optimisation(
            "packing",
            "data.packing",
            "active" if packing else "off",
            f"sequences of {data.max_length} tokens" if packing else "set data.packing=true to avoid padding",
        ),
        Optimisation(
            "padding-free batches",
            "data.padding_free",
            "active" if flat else "off",
            "examples are concatenated" if flat else "set data.padding_free=true to concatenate examples",
        ),
        Optimisation(
            "length bucketing",
            "train.train_sampling_strategy",
            "active" if bucketing else "off",
            "asked for" if bucketing else how,
        ),
    ]


def _loader(train: Train, given: dict[str, Any], machine: Hardware) -> list[Optimisation]:
    given = {**data_loader.loader(machine, most_processes(train, machine.count)[0]), **given}
    workers = int(given["dataloader_num_workers"])
    pinned = given["dataloader_pin_memory"] and machine.device == "cuda"
    state = "active" if pinned else "not possible" if machine.device == "cpu" else "off"
    kept = "active" if workers and given.get("dataloader_persistent_workers") else "off"
    why = f"{workers} workers" if workers else "0 workers, because the data is prepared before training"
    return [
        Optimisation(
            "pinned memory",
            "train.dataloader_pin_memory",
            state,
            "copies overlap with computation",
            "GPU",
        ),
        Optimisation("loader workers", "train.dataloader_num_workers", "active" if workers else "off", why),
        Optimisation("persistent workers", "train.dataloader_persistent_workers", kept, why),
    ]


def _machine(machine: Hardware) -> list[tuple[str, str]]:
    rows = [
        ("device", f"{machine.count} x {machine.name}"),
        ("memory", f"{machine.memory_gib:.0f} GiB each"),
    ]
    if machine.device == "cuda":
        rows.append(("compute capability", f"{machine.capability[0]}.{machine.capability[1]}"))
    return [*rows, ("CPU cores", str(machine.cpu_cores)), ("system", platform.platform())]


def _choices(recipe: Recipe | None, machine: Hardware) -> list[tuple[str, ...]]:
    launch = mixed_precision.launch(machine)
    base = _base(recipe, machine)
    launcher = "accelerate launch" if machine.count > 1 else "in place"
    _, fewer = most_processes(recipe.train if recipe else Train(), machine.count)
    return [
        ("precision", launch.precision, launch.precision_reason),
        ("base", base.value, base.reason),
        ("attention", *_chosen_attention(recipe, machine)),
        ("launcher", launcher, fewer or f"{machine.count} device(s)"),
    ]


def _base(recipe: Recipe | None, machine: Hardware) -> run_checks.Choice:
    """Choose the quantization of the base model."""

    def against_fp8() -> str:
        return choice_checks.against_fp8(recipe) if recipe else "the model is not known without a recipe"

    asked, kind = (recipe.model.quantization, recipe.adapter.type) if recipe else ("auto", "lora")
    try:
        return base_quantization.choose_base(
            asked, kind, mixed_precision.launch(machine).precision, machine, against_fp8
        )
    except UserError as error:
        return run_checks.Choice("-", f"{error.problems[0].what}; {error.problems[0].fix}")


def _extras() -> list[tuple[str, str, str]]:
    rows = []
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not installed(module)]
        fix = install_extra(extra) if missing else ""
        rows.append((extra, "yes" if not missing else f"no ({', '.join(missing)})", fix))
    return rows


def _problem(package: str, found: str | None) -> str:
    """Return a known problem of an installed version."""
    if package == "transformers":
        asked = next((r for r in map(Requirement, requires(package) or ()) if r.name == "kernels"), None)
        have = next((one.version for one in distributions(name="kernels")), "")
        if asked and have and not asked.specifier.contains(have):
            return f"needs kernels{asked.specifier}, found {have}: transformers disables all Hub kernels"
    if package == "finetune-toolkit" and found is None:
        return "not installed; run pip install -e ."
    return "" if found else "not installed"
