"""An accelerate config file, read strictly: Accelerate ignores what it does not know in nested sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import Exit, Problem, UserError, nearest
from finetune.upstream import installed

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


def read(path: Path) -> dict[str, Any]:
    """The file as it is written."""
    try:
        made = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        problem = Problem("not an accelerate config", where=str(path), found=" ".join(str(error).split()))
        raise UserError(problem) from error
    if not isinstance(made, dict):
        raise UserError(Problem("not an accelerate config", where=str(path), found=type(made).__name__))
    return made


def environment(path: Path) -> dict[str, str]:
    """What the launcher should have set and does not: `use_cpu` of several processes."""
    return {"ACCELERATE_USE_CPU": "true"} if read(path).get("use_cpu") is True else {}


def check(path: Path) -> None:
    """Refuse what Accelerate would pass over in silence, and what it can't start.

    Raises:
        UserError: keys that nothing reads, a backend it will not find (exit 2); no package for fp8 (exit 3).
    """
    given = read(path)
    if found := problems(given, str(path)):
        raise UserError(*found)
    if given.get("mixed_precision") == "fp8" and not (
        installed("torchao") or installed("transformer_engine")
    ):
        what = "Accelerate's launcher starts no fp8 launch without torchao or TransformerEngine"
        problem = Problem(what, where=str(path), fix="pip install 'finetune-toolkit[quantize]'")
        raise UserError(problem, code=Exit.ENVIRONMENT)


def problems(given: dict[str, Any], where: str) -> list[Problem]:
    """What in a config's content Accelerate would ignore, or fail at later."""
    from accelerate.commands.config.config_args import ClusterConfig

    top, found = set(ClusterConfig.__dataclass_fields__), []
    for key, value in given.items():
        if key not in top:
            found.append(Problem("no such key in an accelerate config", key, where, fix=nearest(key, top)))
        elif key in PREFIXES and value is not None:
            if isinstance(value, dict):
                found += _nested(key, value, where)
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
    several = given.get("num_processes", 1) not in (None, 1) and given.get("distributed_type") in (
        "NO",
        "MULTI_CPU",
    )
    if several and not given.get("mpirun_config"):
        what = "Accelerate starts one process, whatever num_processes says"
        texts = {"found": str(given["distributed_type"]), "fix": "MULTI_GPU, on CPUs too (use_cpu: true)"}
        found.append(Problem(what, "distributed_type", where, **texts))
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
