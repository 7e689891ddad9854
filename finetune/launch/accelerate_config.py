"""Read an accelerate config file strictly. Accelerate itself ignores unknown keys in nested sections."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.core import foreign_yaml, regular_files, strict_yaml, upstream_private
from finetune.core.errors import Exit, Problem, UserError, nearest, raise_if_any
from finetune.core.formatting import as_yaml
from finetune.core.packages import install_extra, installed

# Sections of the file, and the optional prefix of their keys: `fsdp_version` or `version`
PREFIXES = {
    "fp8_config": "fp8_",
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "parallelism_config": "",  # in full: parallelism_config_cp_size
    "deepspeed_config": "",
    "mpirun_config": "",
    "megatron_lm_config": "",
}

CODE, UNKNOWN_VALUE = "launch-config", "Accelerate does not know this value"
LONGEST_VALUE = 1000  # characters
MOST_CHOICES = 5  # that a message lists after the most similar one
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
# Smallest and largest integers of the launcher's options; -1 if the command line gives the number
RANGES = {
    "num_processes": (1, 65_536),
    "num_machines": (1, 65_536),
    "machine_rank": (0, 65_535),
    "main_process_port": (0, 65_535),
    "num_cpu_threads_per_process": (1, 65_536),
    "zero_stage": (0, 3),
}
ANY = (0, 2**63 - 1)
SWITCHES = ("use_fullgraph", "use_dynamic", "use_regional_compilation")  # of `dynamo_config`
# Keys of launches on several machines, and their values for one machine
ONE_MACHINE = {"num_machines": (1,), "main_process_ip": ("127.0.0.1", "localhost"), "mpirun_config": ({},)}
# Keys that Accelerate writes into a config and does not read, and their effective values. It reads only
# options with a default of None (1.15, commands/launch.py).
COMMAND_LINE = {"rdzv_backend": "static", "enable_cpu_affinity": False}
# Keys of FSDP1 that Accelerate ignores under version 2, and the help for each
FSDP1 = {
    "fsdp_sharding_strategy": "set `fsdp_reshard_after_forward: true` (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_forward_prefetch": "remove the key, because version 2 always prefetches the next layer",
    "fsdp_backward_prefetch": "remove the key, because version 2 always prefetches the next layer",
    "fsdp_use_orig_params": "remove the key, because version 2 always trains the original parameters",
    "fsdp_sync_module_states": "remove the key; `fsdp_cpu_ram_efficient_loading: true` broadcasts weights",
}
READ_UNDER = {  # section -> the key and value without which Accelerate ignores the section
    "fsdp_config": ("distributed_type", "FSDP"),
    "deepspeed_config": ("distributed_type", "DEEPSPEED"),
    "fp8_config": ("mixed_precision", "fp8"),
}
FP8_PACKAGES = {
    "TE": ("transformer_engine", "fp8"),
    "AO": ("torchao", "quantize"),
}  # backend -> module, extra


def read(path: Path) -> dict[str, Any]:
    """Read the file with the reader that Accelerate uses: JSON by its suffix, and else PyYAML's own parser.

    Raises:
        UserError: the file is missing or no mapping, or has a key twice or a list of values (exit 2).
    """
    try:
        text = regular_files.read_text(path)
        if path.suffix == ".json":
            made = regular_files.read_json(path)
        else:
            made = foreign_yaml.read(text, str(path), in_python=True)
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(
                "the file is not an accelerate config",
                where=str(path),
                fix="write the file with `accelerate config --config_file FILE`",
                found=" ".join(str(error).split()),
                code="launch-config",
            )
        ) from error
    if not isinstance(made, dict):
        raise UserError(
            Problem(
                "the file is not an accelerate config",
                where=str(path),
                fix="write the file with `accelerate config --config_file FILE`",
                found=type(made).__name__,
                expected="a mapping",
                code="launch-config",
            )
        )
    sections = [made, *(made[name] for name in PREFIXES if isinstance(made.get(name), dict))]
    for key, value in (entry for section in sections for entry in section.items()):
        is_own = key in (*PREFIXES, "gpu_ids")  # `problems` explains these
        is_number = key in RANGES or str(key).endswith("_size")  # `accelerate config` writes `tpu_env: []`
        is_nested = isinstance(value, list | dict) and not is_own and (value or is_number)
        if is_nested or (not is_own and len(str(value)) > LONGEST_VALUE):
            raise UserError(
                Problem(
                    "a value of the accelerate config has another form",
                    str(key)[:100],
                    where=str(path),
                    found=str(value)[:200],
                    expected="a text or a number",
                    fix="write the file with `accelerate config --config_file FILE`",
                    code="launch-config",
                )
            )
    problems = strict_yaml.parse(text, str(path)).problems
    raise_if_any([problem for problem in problems if problem.what == strict_yaml.TWICE])
    return made


def sizes(given: dict[str, Any]) -> int:
    """Return the number of processes that a config's `parallelism_config` needs."""
    section = given.get("parallelism_config") or {}
    return math.prod(int(value or 1) for key, value in section.items() if key.endswith("_size"))


def environment(path: Path) -> dict[str, str]:
    """Return the variables that the launcher fails to set for `use_cpu` with several processes."""
    return {"ACCELERATE_USE_CPU": "true"} if read(path).get("use_cpu") is True else {}


def check(path: Path) -> None:
    """Refuse keys that Accelerate would silently ignore, and launches that it can't start.

    Raises:
        UserError: a key or backend is unknown (exit 2), or the package for fp8 is missing (exit 3).
    """
    given = read(path)
    found, lacking = check_values(given, str(path)), _missing_package(given, str(path))
    if found or lacking:
        packages = [lacking] if lacking else []
        raise UserError(*found, *packages, code=Exit.INPUT if found else Exit.ENVIRONMENT)


def check_one_machine(path: Path) -> None:
    """Refuse other machines, many processes and folders for offloading in the config of a stranger.

    Raises:
        UserError: the config names one of them (exit 2).
    """
    given = read(path)
    section = given.get("deepspeed_config")
    section = section if isinstance(section, dict) else {}
    addresses = {key: given.get(key) for key in ONE_MACHINE}
    addresses = {key: value for key, value in addresses.items() if value not in (None, *ONE_MACHINE[key])}
    folders = {
        f"deepspeed_config.{key}": value
        for key, value in section.items()
        if str(key).endswith("nvme_path") and value is not None
    }
    count, most = given.get("num_processes"), max(2, os.cpu_count() or 1)
    many = {"num_processes": count} if isinstance(count, int) and count > most else {}
    reasons = dict.fromkeys(addresses, "this launch must use only this machine")
    reasons |= dict.fromkeys(folders, "this launch must not name a folder to write into")
    reasons |= dict.fromkeys(many, f"this machine has cores for {most} processes")
    raise_if_any(
        Problem(
            reasons[key],
            key,
            where=str(path),
            found=as_yaml(value),
            fix=f"remove `{key.rpartition('.')[2]}:`",
            code=CODE,
        )
        for key, value in {**addresses, **folders, **many}.items()
    )


def _missing_package(given: dict[str, Any], where: str) -> Problem | None:
    """Return the problem of a package that this launch needs and that is not installed."""
    section = given.get("fp8_config")
    backend = str(section.get("backend")) if isinstance(section, dict) else ""
    package, extra = FP8_PACKAGES.get(backend, ("", ""))
    mpi = given.get("mpirun_config")
    if (
        isinstance(mpi, dict)
        and mpi.get("mpirun_hostfile")
        and not (shutil.which("mpirun") or shutil.which("mpiexec"))
    ):
        fix = "install Open MPI or Intel MPI, or remove `mpirun_config:`"
        return Problem(
            "mpirun_config needs mpirun, which is not installed", where=where, fix=fix, code="package-missing"
        )
    if given.get("distributed_type") == "DEEPSPEED" and not installed("deepspeed"):
        what, extra = "this launch needs DeepSpeed, which is not installed", "deepspeed"
    elif package and not installed(package):
        what = f"fp8_config.backend: {backend} needs the package {package}, which is not installed"
    elif given.get("mixed_precision") == "fp8" and not any(
        installed(package) for package, _ in FP8_PACKAGES.values()
    ):
        what = "mixed_precision: fp8 needs torchao or TransformerEngine, and neither is installed"
        extra = "quantize"
    else:
        return None
    return Problem(what, where=where, fix=install_extra(extra), code="package-missing")


def check_values(given: dict[str, Any], where: str) -> list[Problem]:
    """Return the parts of a config that Accelerate would ignore, or that would fail later."""
    from accelerate.commands.config.config_args import ClusterConfig

    top = set(ClusterConfig.__dataclass_fields__)
    found = [*_values("", given, where), *_unread(given, where)]
    for key, value in given.items():
        if key not in top:
            found.append(
                Problem(
                    "an accelerate config has no such key",
                    str(key),
                    where=where,
                    fix=nearest(str(key), top) or "remove the key",
                    code=CODE,
                )
            )
        elif key in PREFIXES and value is not None:
            if isinstance(value, dict):
                found += [*_nested(key, value, where), *_values(key, value, where)]
            else:
                found.append(
                    Problem(
                        f"{key} must be a section",
                        key,
                        where=where,
                        found=as_yaml(value),
                        expected="a mapping with keys of its own",
                        code=CODE,
                    )
                )
    section = given.get("fp8_config")
    backend = section.get("backend") if isinstance(section, dict) else None
    if backend is not None and backend not in ("TE", "AO"):
        near = str(backend).upper()
        found.append(
            Problem(
                "Accelerate has no such fp8 backend",
                "fp8_config.backend",
                where=where,
                found=str(backend),
                expected="TE or AO, in upper case",
                fix=f"backend: {near if near in ('TE', 'AO') else 'AO'}",
                code=CODE,
            )
        )
    found += [*_gpus(given, where), *_fsdp(given, where)]
    several = given.get("num_processes", 1) not in (None, 1) and given.get("distributed_type") in (
        "NO",
        "MULTI_CPU",
    )
    if several and not given.get("mpirun_config"):
        found.append(
            Problem(
                "with this type, Accelerate starts one process and ignores num_processes",
                "distributed_type",
                where=where,
                found=str(given["distributed_type"]),
                fix="distributed_type: MULTI_GPU (also on CPUs, with use_cpu: true)",
                code=CODE,
            )
        )
    return found


_IDS = r"all|(\d+|(GPU|MIG)-[\w-]+)( *, *(\d+|(GPU|MIG)-[\w-]+))*"  # as CUDA_VISIBLE_DEVICES takes them


def _gpus(given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Check `gpu_ids`, which must be a string, and must name several GPUs for several processes."""
    ids = given.get("gpu_ids")
    several = given.get("distributed_type") == "MULTI_GPU" and (given.get("num_machines") or 1) == 1
    if ids is not None and (not isinstance(ids, str) or not re.fullmatch(_IDS, ids)):
        yield Problem(
            "gpu_ids must be a string that names GPUs",
            "gpu_ids",
            where=where,
            found=as_yaml(ids),
            expected='all, or a string of numbers such as "0,1"',
            fix="gpu_ids: all",
            code=CODE,
        )
    elif several and ids not in (None, "all") and "," not in ids:
        yield Problem(
            "a launch of type MULTI_GPU needs several GPUs",
            "gpu_ids",
            where=where,
            found=ids,
            fix='set `distributed_type: "NO"` and `num_processes: 1`, or `gpu_ids: all`',
            code=CODE,
        )


def _fsdp(given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Check for options of FSDP1, and check the wrap policy."""
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY

    section = given.get("fsdp_config")
    if not isinstance(section, dict):
        return
    held = {f"fsdp_{str(key).removeprefix('fsdp_')}": (key, value) for key, value in section.items()}
    two = str(held.get("fsdp_version", ("", 1))[1]) == "2"
    policy = str(held.get("fsdp_auto_wrap_policy", ("", None))[1] or "NO_WRAP")
    for name, fix in FSDP1.items() if two else ():
        if name in held:
            key, value = held[name]
            yield Problem(
                "the key belongs to FSDP1, and Accelerate ignores it with fsdp_version: 2",
                f"fsdp_config.{key}",
                where=where,
                found=as_yaml(value),
                fix=fix,
                code=CODE,
            )
    if policy.upper() not in FSDP_AUTO_WRAP_POLICY:
        near = nearest(policy, FSDP_AUTO_WRAP_POLICY) or "TRANSFORMER_BASED_WRAP"
        key = held["fsdp_auto_wrap_policy"][0]
        yield Problem(
            UNKNOWN_VALUE,
            f"fsdp_config.{key}",
            where=where,
            found=policy,
            expected=", ".join(FSDP_AUTO_WRAP_POLICY),
            fix=f"{key}: {near}",
            code=CODE,
        )
    elif "fsdp_min_num_params" in held and policy.upper() != "SIZE_BASED_WRAP":
        key, value = held["fsdp_min_num_params"]
        yield Problem(
            "Accelerate reads this key only with the wrap policy SIZE_BASED_WRAP",
            f"fsdp_config.{key}",
            where=where,
            found=as_yaml(value),
            fix="remove the key, or set `fsdp_auto_wrap_policy: SIZE_BASED_WRAP`",
            code=CODE,
        )


def _unread(given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Return the keys that this launch ignores, and types and files that finetune does not support."""
    kind = given.get("distributed_type")
    for key, value in COMMAND_LINE.items():
        if given.get(key, value) not in (value, None):
            yield Problem(
                "Accelerate reads this key only from the command line",
                key,
                where=where,
                found=as_yaml(given[key]),
                fix=f"remove the key, or pass --{key} to accelerate launch",
                code=CODE,
            )
    if kind not in KINDS:
        near = nearest(str(kind), KINDS)
        fix = f"distributed_type: {near}" if near else "use accelerate_configs/fsdp2_8.yaml"
        if kind is False:
            fix = "distributed_type: 'NO' (without quotes, YAML reads NO as false)"
        yield Problem(
            "finetune does not support Megatron-LM" if kind == "MEGATRON_LM" else "no such type of launch",
            "distributed_type",
            where=where,
            found=as_yaml(kind),
            expected=", ".join(KINDS),
            fix=fix,
            code=CODE,
        )
    for section, (key, value) in READ_UNDER.items():
        if given.get(section) and given.get(key) != value and kind in KINDS:
            yield Problem(
                f"Accelerate reads this section only with {key}: {value}",
                section,
                where=where,
                found=f"{key}: {as_yaml(given.get(key))}",
                fix=f"{key}: {value}",
                code=CODE,
            )
    zero = given.get("deepspeed_config")
    if isinstance(zero, dict) and zero.get("deepspeed_config_file"):
        yield Problem(
            "finetune can't compare a separate DeepSpeed config file with the recipe",
            "deepspeed_config.deepspeed_config_file",
            where=where,
            found=str(zero["deepspeed_config_file"]),
            fix="move zero_stage and the other settings to this section",
            code=CODE,
        )


def _values(section: str, given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Return the values that the options of Accelerate's launcher do not allow.

    A number of -1 is allowed: the command line then gives the number.
    """
    from accelerate.commands.launch import launch_command_parser

    actions = upstream_private.launch_options(launch_command_parser())
    prefix = PREFIXES.get(section, "")
    for key, value in given.items():
        action = actions.get(key) or actions.get(f"{prefix}{key}")
        if action is None or value is None or isinstance(value, (dict, list)):
            continue
        name = f"{section}.{key}" if section else key
        text = "no" if key == "mixed_precision" and value is False else str(value)
        choices = [] if key in ("backend", "fp8_backend") else [str(one) for one in action.choices or ()]
        if choices and text.lower() not in [one.lower() for one in choices]:
            near = nearest(text, choices)
            yield Problem(
                UNKNOWN_VALUE,
                name,
                where=where,
                found=text,
                expected="" if near and len(choices) > MOST_CHOICES else ", ".join(choices),
                fix=f"{key}: {near}" if near else "",
                code=CODE,
            )
        elif key.removeprefix("dynamo_") in SWITCHES and not isinstance(value, bool):
            yield Problem(
                f"{key} must be true or false",
                name,
                where=where,
                found=as_yaml(value),
                fix=f"{key}: true",
                code=CODE,
            )
        elif action.type is int and not _in_range(key, value):
            low, high = RANGES.get(key, ANY)
            expected = f"an integer from {low} to {high:,}" if key in RANGES else "an integer"
            usual = 29500 if key == "main_process_port" else max(low, 1)
            yield Problem(
                f"{key} must be {expected}",
                name,
                where=where,
                found=as_yaml(value),
                fix=f"{key}: {text if text.isdecimal() and low <= int(text) <= high else usual}",
                code=CODE,
            )


def _in_range(key: str, value: object) -> bool:
    low, high = RANGES.get(key, ANY)
    is_left_out = value == -1 and key != "main_process_port"
    return type(value) is int and (low <= value <= high or is_left_out)


def _nested(section: str, given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Return the keys of a section that are no options of Accelerate's launcher, so that it ignores them."""
    prefix, known = PREFIXES[section], _options(section)
    for key in map(str, given):
        full = key if key.startswith(prefix) else f"{prefix}{key}"
        if full not in known:
            shown = {name.removeprefix(prefix) for name in known}
            ends = [name for name in shown if name.endswith(f"_{key}")]
            yield Problem(
                f"{section} has no such key, so Accelerate would ignore it",
                f"{section}.{key}",
                where=where,
                fix=ends[0] if ends else nearest(key.removeprefix(prefix), shown) or "remove the key",
                code=CODE,
            )


def _options(section: str) -> set[str]:
    """Return the keys that a section may have, from Accelerate's launcher and dataclasses."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import TERecipeKwargs

    options, prefix = set(vars(launch_command_parser().parse_args(["script"]))), PREFIXES[section]
    found = {name for name in options if name.startswith(prefix or section.removesuffix("config"))}
    if section == "deepspeed_config":  # its keys have no common prefix
        found |= {name for name in options if re.match("zero|offload|gradient", name)}
    if section == "fp8_config":
        found |= {f"fp8_{name.removeprefix('fp8_')}" for name in TERecipeKwargs.__dataclass_fields__}
    return found | ({"fsdp_ignored_modules"} if section == "fsdp_config" else set())
