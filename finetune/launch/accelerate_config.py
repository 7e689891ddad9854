"""An accelerate config file, read strictly: Accelerate ignores what it does not know in nested sections."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from finetune.core import regular_files, strict_yaml, upstream_private
from finetune.core.errors import Exit, Problem, UserError, nearest
from finetune.core.packages import install_extra, installed

# Sections of the file, and how their keys begin, which may be left out: `fsdp_version`, or `version` alone
PREFIXES = {
    "fp8_config": "fp8_",
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "",  # in full: parallelism_config_cp_size
    "deepspeed_config": "",
    "mpirun_config": "",
    "megatron_lm_config": "",
}

KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
COUNTS = ("num_processes", "num_machines")
# Keys that Accelerate writes into a config and passes over when it reads one (1.15, commands/launch.py takes
# from it only options whose default is None), and what is in force then
COMMAND_LINE = {"rdzv_backend": "static", "enable_cpu_affinity": False}
# Keys of FSDP1 that Accelerate passes over under version 2, and what that has in their place
FSDP1 = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_forward_prefetch": "drop it: version 2 fetches the next layer by itself",
    "fsdp_backward_prefetch": "drop it: version 2 fetches the next layer by itself",
    "fsdp_use_orig_params": "drop it: version 2 always trains the original parameters",
    "fsdp_sync_module_states": "drop it; fsdp_cpu_ram_efficient_loading: true hands on rank 0's weights",
}
READ_UNDER = {  # section -> the key and value without which Accelerate passes it over
    "fsdp_config": ("distributed_type", "FSDP"),
    "deepspeed_config": ("distributed_type", "DEEPSPEED"),
    "fp8_config": ("mixed_precision", "fp8"),
}
FP8_PACKAGES = {
    "TE": ("transformer_engine", "fp8"),
    "AO": ("torchao", "quantize"),
}  # backend -> module, extra


def read(path: Path) -> dict[str, Any]:
    """The file as it is written, by Accelerate's own reader of YAML.

    Raises:
        UserError: no such file, no mapping, or a key given twice, of which the last would hold (exit 2).
    """
    try:
        text = regular_files.read_text(path)
        made = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that is none
        problem = Problem("not an accelerate config", where=str(path), found=" ".join(str(error).split()))
        raise UserError(problem) from error
    if not isinstance(made, dict):
        raise UserError(Problem("not an accelerate config", where=str(path), found=type(made).__name__))
    problems = strict_yaml.parse(text, str(path)).problems
    if twice := [problem for problem in problems if problem.what == strict_yaml.TWICE]:
        raise UserError(*twice)
    return made


def sizes(given: dict[str, Any]) -> int:
    """How many processes a config's `parallelism_config` is for: the product of its sizes."""
    section = given.get("parallelism_config") or {}
    return math.prod(int(value or 1) for key, value in section.items() if key.endswith("_size"))


def environment(path: Path) -> dict[str, str]:
    """What the launcher should have set and does not: `use_cpu` of several processes."""
    return {"ACCELERATE_USE_CPU": "true"} if read(path).get("use_cpu") is True else {}


def check(path: Path) -> None:
    """Refuse what Accelerate would pass over in silence, and what it can't start.

    Raises:
        UserError: keys that nothing reads, a backend it will not find (exit 2); no package for fp8 (exit 3).
    """
    given = read(path)
    found, lacking = problems(given, str(path)), _missing_package(given, str(path))
    if found or lacking:
        packages = [lacking] if lacking else []
        raise UserError(*found, *packages, code=Exit.INPUT if found else Exit.ENVIRONMENT)


def _missing_package(given: dict[str, Any], where: str) -> Problem | None:
    """The package that a launch by this config needs and this environment lacks."""
    section = given.get("fp8_config")
    backend = str(section.get("backend")) if isinstance(section, dict) else ""
    package, extra = FP8_PACKAGES.get(backend, ("", ""))
    if given.get("distributed_type") == "DEEPSPEED" and not installed("deepspeed"):
        what, extra = "this launch needs DeepSpeed, which is not installed", "deepspeed"
    elif package and not installed(package):
        what = f"fp8_config.backend: {backend} needs {package}, which is not installed"
    elif given.get("mixed_precision") == "fp8" and not any(
        installed(package) for package, _ in FP8_PACKAGES.values()
    ):
        what = "Accelerate's launcher starts no fp8 launch without torchao or TransformerEngine"
        extra = "quantize"
    else:
        return None
    return Problem(what, where=where, fix=install_extra(extra))


def problems(given: dict[str, Any], where: str) -> list[Problem]:
    """What in a config's content Accelerate would ignore, or fail at later."""
    from accelerate.commands.config.config_args import ClusterConfig

    top, found = set(ClusterConfig.__dataclass_fields__), _values("", given, where)
    found += _unread(given, where)
    for key, value in given.items():
        if key not in top:
            found.append(Problem("no such key in an accelerate config", key, where, fix=nearest(key, top)))
        elif key in PREFIXES and value is not None:
            if isinstance(value, dict):
                found += [*_nested(key, value, where), *_values(key, value, where)]
            else:
                found.append(Problem("is a section", key, where, found=str(value)))
    backend = (
        (given.get("fp8_config") or {}).get("backend") if isinstance(given.get("fp8_config"), dict) else None
    )
    if backend is not None and backend not in ("TE", "AO"):
        fix = str(backend).upper()
        texts = {"found": str(backend), "expected": "TE or AO, in upper case"}
        fix = fix if fix in ("TE", "AO") else ""
        found.append(
            Problem("Accelerate finds no such backend", "fp8_config.backend", where, **texts, fix=fix)
        )
    found += [*_gpus(given, where), *_fsdp(given, where)]
    several = given.get("num_processes", 1) not in (None, 1) and given.get("distributed_type") in (
        "NO",
        "MULTI_CPU",
    )
    if several and not given.get("mpirun_config"):
        what = "Accelerate starts one process, whatever num_processes says"
        texts = {"found": str(given["distributed_type"]), "fix": "MULTI_GPU, on CPUs too (use_cpu: true)"}
        found.append(Problem(what, "distributed_type", where, **texts))
    return found


_IDS = r"all|(\d+|(GPU|MIG)-[\w-]+)( *, *(\d+|(GPU|MIG)-[\w-]+))*"  # as CUDA_VISIBLE_DEVICES takes them


def _gpus(given: dict[str, Any], where: str) -> list[Problem]:
    """`gpu_ids`, which Accelerate takes as text, and several of for several processes."""
    ids, found = given.get("gpu_ids"), []
    several = given.get("distributed_type") == "MULTI_GPU" and (given.get("num_machines") or 1) == 1
    if ids is not None and (not isinstance(ids, str) or not re.fullmatch(_IDS, ids)):
        texts = {"found": str(ids), "expected": 'all, or numbers as text: "0,1"'}
        found.append(Problem("is no text that names GPUs", "gpu_ids", where, **texts, fix="gpu_ids: all"))
    elif several and ids not in (None, "all") and "," not in ids:
        what, fix = "Accelerate starts no MULTI_GPU launch on one GPU", 'distributed_type: "NO"'
        found.append(
            Problem(what, "gpu_ids", where, found=ids, fix=f"{fix} and num_processes: 1, or gpu_ids: all")
        )
    return found


def _fsdp(given: dict[str, Any], where: str) -> list[Problem]:
    """What FSDP2 has not, and how a model can be divided."""
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY

    section, found = given.get("fsdp_config"), []
    if not isinstance(section, dict):
        return []
    held = {f"fsdp_{str(key).removeprefix('fsdp_')}": (key, value) for key, value in section.items()}
    two = str(held.get("fsdp_version", ("", 1))[1]) == "2"
    policy = str(held.get("fsdp_auto_wrap_policy", ("", None))[1] or "NO_WRAP")
    for name, fix in FSDP1.items() if two else ():
        if name in held:
            key, value = held[name]
            what = "is FSDP1's: Accelerate passes it over under fsdp_version: 2"
            found.append(Problem(what, f"fsdp_config.{key}", where, found=str(value), fix=fix))
    if policy.upper() not in FSDP_AUTO_WRAP_POLICY:
        texts = {"found": policy, "expected": ", ".join(FSDP_AUTO_WRAP_POLICY)}
        fix = nearest(policy, FSDP_AUTO_WRAP_POLICY) or "TRANSFORMER_BASED_WRAP"
        key = held["fsdp_auto_wrap_policy"][0]
        found.append(Problem("Accelerate knows no such value", f"fsdp_config.{key}", where, **texts, fix=fix))
    elif "fsdp_min_num_params" in held and policy.upper() != "SIZE_BASED_WRAP":
        key, value = held["fsdp_min_num_params"]
        what, fix = (
            "is read under SIZE_BASED_WRAP alone",
            "drop it, or fsdp_auto_wrap_policy: SIZE_BASED_WRAP",
        )
        found.append(Problem(what, f"fsdp_config.{key}", where, found=str(value), fix=fix))
    return found


def _unread(given: dict[str, Any], where: str) -> list[Problem]:
    """Keys and sections that this launch leaves unread; kinds and files that this project does not serve."""
    kind, found = given.get("distributed_type"), []
    for key, value in COMMAND_LINE.items():
        if given.get(key, value) not in (value, None):
            what, texts = "Accelerate takes it from the command line alone", {"found": str(given[key])}
            found.append(Problem(what, key, where, **texts, fix=f"drop it, or --{key} when it is launched"))
    if kind not in KINDS:
        what = (
            "pipelines by Megatron-LM are not served" if kind == "MEGATRON_LM" else "no such kind of launch"
        )
        fix = nearest(str(kind), KINDS) or "accelerate_configs/fsdp2_8.yaml"
        if kind is False:
            fix = "distributed_type: 'NO', in quotes: without them NO is YAML's false"
        texts = {"found": str(kind), "expected": ", ".join(KINDS), "fix": fix}
        found.append(Problem(what, "distributed_type", where, **texts))
    for section, (key, value) in READ_UNDER.items():
        if given.get(section) and given.get(key) != value and kind in KINDS:
            what = f"Accelerate reads it under {key}: {value} alone"
            found.append(
                Problem(what, section, where, found=f"{key}: {given.get(key)}", fix=f"{key}: {value}")
            )
    zero = given.get("deepspeed_config")
    if isinstance(zero, dict) and zero.get("deepspeed_config_file"):
        what = "settings in a file of their own are not held against the recipe"
        fix = "zero_stage and what else it says, in this section"
        found.append(Problem(what, "deepspeed_config.deepspeed_config_file", where, fix=fix))
    return found


def _values(section: str, given: dict[str, Any], where: str) -> list[Problem]:
    """Values that Accelerate's launcher does not know, of keys that it does; its choices and types decide.

    -1 leaves a number to the command line.
    """
    from accelerate.commands.launch import launch_command_parser

    actions = upstream_private.launch_options(launch_command_parser())
    prefix, found = PREFIXES.get(section, ""), []
    for key, value in given.items():
        action = actions.get(key) or actions.get(f"{prefix}{key}")
        if action is None or value is None or isinstance(value, (dict, list)):
            continue
        name = f"{section}.{key}" if section else key
        text = "no" if key == "mixed_precision" and value is False else str(value)
        choices = [] if key in ("backend", "fp8_backend") else [str(one) for one in action.choices or ()]
        if choices and text.lower() not in [one.lower() for one in choices]:
            texts = {"found": text, "expected": ", ".join(choices), "fix": nearest(text, choices)}
            found.append(Problem("Accelerate knows no such value", name, where, **texts))
        elif action.type is int and not (
            (text.isdecimal() and (int(text) or key not in COUNTS)) or text == "-1"
        ):
            least = "a whole number from 1 up" if key in COUNTS else "a whole number"
            found.append(Problem("is no number", name, where, found=text, expected=least))
    return found


def _nested(section: str, given: dict[str, Any], where: str) -> list[Problem]:
    """Keys of a section that become no option of Accelerate's launcher: it would not read them."""
    prefix, known = PREFIXES[section], _options(section)
    found = []
    for key in given:
        full = key if key.startswith(prefix) else f"{prefix}{key}"
        if full not in known:
            what = f"Accelerate would ignore it: {section} has no such key"
            shown = {name.removeprefix(prefix) for name in known}
            ends = [name for name in shown if name.endswith(f"_{key}")]
            fix = ends[0] if ends else nearest(key.removeprefix(prefix), shown)
            found.append(Problem(what, f"{section}.{key}", where, fix=fix))
    return found


def _options(section: str) -> set[str]:
    """The keys that a section may have, by Accelerate's own launcher and dataclasses."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import TERecipeKwargs

    options, prefix = set(vars(launch_command_parser().parse_args(["script"]))), PREFIXES[section]
    found = {name for name in options if name.startswith(prefix or section.removesuffix("config"))}
    if section == "deepspeed_config":  # no name of its own
        found |= {name for name in options if re.match("zero|offload|gradient", name)}
    if section == "fp8_config":
        found |= {f"fp8_{name.removeprefix('fp8_')}" for name in TERecipeKwargs.__dataclass_fields__}
    return found | ({"fsdp_ignored_modules"} if section == "fsdp_config" else set())
