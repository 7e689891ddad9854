"""Print the tables of `finetune doctor`: versions, hardware, choices, extras and optimizations."""

from __future__ import annotations

import platform
from importlib.metadata import distributions, requires
from typing import Any

from packaging.requirements import Requirement

from finetune.autoconfig import launch_settings, memory_estimate, mixed_precision
from finetune.autoconfig.batch_size import most_processes
from finetune.cli import doctor_choices, doctor_optimizations
from finetune.core import formatting
from finetune.core.console import Console
from finetune.core.packages import install_extra, installed
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.planning import measured_rates
from finetune.recipe.schema import Recipe, Train
from finetune.run_folder.run_folder import packages

EXTRAS = {  # extra -> the import names of its packages
    "bnb": ("bitsandbytes",),
    "quantize": ("torchao",),
    "eval": ("lm_eval",),
    "sweep": ("optuna", "psycopg"),
    "export": ("gguf", "compressed_tensors"),
    "deepspeed": ("deepspeed",),
    "fp8": ("transformer_engine",),
    "kernels": ("kernels", "liger_kernel"),
    "hybrid": ("causal_conv1d", "fla"),
    "flash": ("flash_attn",),
}


LLAMA_8B = memory_estimate.Widths(4096, 14336, 4096, 6144, 32, 128256)


def run(recipe: Recipe | None, *, quiet: bool = False, measured: bool = False) -> dict[str, Any]:
    """Print five tables about a run of the recipe, or about the defaults without a recipe.

    Args:
        measured: whether to measure the speed of this machine first and store it for `finetune plan`. This
            takes about a minute on a GPU.
    """
    screen, machine = Console(quiet=quiet), detection.detect()
    rates = dict(_ceilings(recipe, machine)) if measured else {}
    if measured:
        screen.table("measured on this machine", ("what", "rate"), list(rates.items()))
    found = {"python": platform.python_version(), **packages()}
    rows = [(name, version or "-", _problem(name, version)) for name, version in found.items()]
    screen.table("versions", ("package", "version", "note"), rows)
    hardware, choices = list(_machine(machine)), list(_choices(recipe, machine))
    listed, extras = doctor_optimizations.optimizations(recipe, machine), list(_extras())
    screen.table("machine", ("what", "found"), hardware)
    shown = [(name, value, reason.removeprefix("auto: ")) for name, value, reason in choices]
    screen.table("choices", ("what", "choice", "why"), shown)
    screen.table("optimizations", doctor_optimizations.Optimization._fields, listed, wide=("where", "needs"))
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
    rates = measured_rates.run(
        machine.device,
        machine.name,
        one,
        fp8=not mixed_precision.fp8_missing(machine, "bf16"),
        cards=machine.count,
    )
    rows = [(name, str(rates[name])) for name in ("device", "torch", "date", "shapes")]
    for name, text in measured_rates.NAMES.items():
        if name in rates:
            rows.append(
                (text, f"{rates[name] / 1e12:,.3g} {'TB/s' if name in measured_rates.MOVED else 'TFLOP/s'}")
            )
    return [*rows, ("stored in", str(measured_rates.file_of(machine.name, one)))]


def _machine(machine: Hardware) -> list[tuple[str, str]]:
    rows = [
        ("device", f"{machine.count} x {machine.name}"),
        ("memory", f"{machine.memory_gib:.0f} GiB each"),
    ]
    if machine.device == "cuda":
        rows.append(("compute capability", f"{machine.capability[0]}.{machine.capability[1]}"))
    return [*rows, ("CPU cores", str(machine.cpu_cores)), ("system", platform.platform())]


def _choices(recipe: Recipe | None, machine: Hardware) -> list[tuple[str, ...]]:
    launch = launch_settings.read(machine)
    base = doctor_choices.base(recipe, machine)
    launcher = "accelerate launch" if machine.count > 1 else "in place"
    _, fewer = most_processes(recipe.train if recipe else Train(), machine.count)
    return [
        ("precision", formatting.precision(launch.precision), launch.precision_reason),
        ("base", base.value, base.reason),
        ("attention", *doctor_choices.attention(recipe, machine)),
        ("launcher", launcher, fewer or f"{machine.count} device(s)"),
    ]


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
        requirement = next(
            (r for r in map(Requirement, requires(package) or ()) if r.name == "kernels"), None
        )
        have = next((one.version for one in distributions(name="kernels")), "")
        if requirement and have and not requirement.specifier.contains(have):
            return (
                f"needs kernels{requirement.specifier}, found {have}: transformers disables all Hub kernels"
            )
    if package == "finetune-toolkit" and found is None:
        return "not installed; run pip install -e ."
    return "" if found else "not installed"
