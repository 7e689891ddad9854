"""Decide whether two runs can be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core.formatting import shortened
from finetune.recipe import adapter_types
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Data, Recipe, Source
from finetune.run_folder import run_folder, settings_text
from finetune.run_folder.run_folder import RunFolder

SAME_BASE = 1e-2  # relative difference of the base model's validation loss; kernels and dtypes change it less
MISSING = "-"
AT_MOST = 8  # rows of a table of differences, and values of a list that one row shows
OF_THE_PLACE = ("train.output_dir", "model.name", "data.name", "data.validation", "data.cache_dir")


class Differences(NamedTuple):
    """The differences of one part of two runs."""

    part: str
    rows: list[tuple[str, str, str]]
    """For each difference: its name, the value of run A and the value of run B."""
    summary: str = ""


def recipes(a: RunFolder, b: RunFolder) -> Differences:
    """Compare two recipes key by key, with who set each value. Paths of files and folders may differ."""
    left, right = resolved(a), resolved(b)
    rows = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, (MISSING, "")), right.get(key, (MISSING, ""))
        place = key in OF_THE_PLACE and _moved(one[0]) == _moved(other[0])
        if one[0] != other[0] and not place and key != "train.output_dir":
            rows.append((key, *(f"{value}  ({who})" if who else value for value, who in (one, other))))
    return Differences("recipe", rows)


def _moved(text: str) -> Any:
    """Return the value of a key in recipe.resolved.yaml by `last_parts`."""
    try:
        return last_parts(json.loads(text))
    except ValueError:  # a value of YAML that is no JSON
        return last_parts(text.strip('"'))


def last_parts(value: object) -> Any:
    """Return the value of a key that names files, each without its folder. `data.name` can list sources."""
    if isinstance(value, list):
        return list(map(last_parts, value))
    if isinstance(value, dict):
        return {**value, "name": last_parts(value.get("name"))}
    return value.rpartition("/")[2] if isinstance(value, str) else value


def resolved(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Return, for each dotted key, its value in recipe.resolved.yaml and who set it."""
    found = settings_text.settings(folder.read_recipe(), folder.format_version)
    return {f"{one.section}.{one.key}": (one.value, one.who) for one in found}


def other_storage(folder: RunFolder, recipe: Recipe, now: str) -> str:
    """Return how a run stored its base model, as a text, if an override stores it in another way now.

    Args:
        now: the storage of the base model now, such as `nf4`.
    """
    requested = recipe.origin.set_by.get("model.quantization") == "override"
    if not folder.recipe.exists() or not (requested or folder.format_version == 1):
        return ""
    own = resolved(folder).get("model.storage", ("", ""))[0].strip('"')
    # format 1 could request bf16 under any precision; today `none` means the precision of the launch
    in_bf16 = folder.format_version == 1 and own == "bf16" and recipe.model.quantization == "none"
    if not (in_bf16 or requested) or now == own:
        return ""
    return f"this run used {own}" if own else "the run does not say what it used"


def data(a: RunFolder, b: RunFolder) -> Differences:
    """Compare the content of the data files, and the counts of their examples."""

    def of(folder: RunFolder) -> dict[str, Any]:
        counted = ("rows", "kept", "tokens", "trained_tokens")
        report = folder.read("data_report.json")
        files = {name: sorted(set(split.get("sources", {}).values())) for name, split in report.items()}
        return {name: {"files": files[name], **{k: report[name].get(k) for k in counted}} for name in report}

    return Differences("data", unequal(of(a), of(b)))


def unequal(left: object, right: object, name: str = "") -> list[tuple[str, str, str]]:
    """Return the leaves that differ between two JSON values, by dotted name."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = dict.fromkeys([*left, *right])
        pairs = ((f"{name}.{key}" if name else key, left.get(key), right.get(key)) for key in keys)
        return [row for key, one, other in pairs for row in unequal(one, other, key)]
    same = left == right or (left != left and right != right)  # NaN equals NaN here
    return [] if same else [(name, *shown_pair(left, right))]


def facts(folder: RunFolder) -> dict[str, Any]:
    """Return the values that must be equal in two runs whose figures are compared."""
    environment, report = folder.read("environment.json"), folder.read("data_report.json")
    recipe, result = load_recipe(folder.recipe, (), folder.format_version), folder.found("eval.json")
    machine, launch = environment["hardware"], environment["launch"]
    beside = ("batch_size", "seconds", "notes", "storage")
    settings = {k: v for k, v in result.get("settings", {}).items() if k not in beside}
    settings["data"] = sorted(settings.get("data", {}).values())
    if isinstance(settings.get("general"), str):  # a file; `data` has its content
        settings["general"] = Path(settings["general"]).name
    settings.setdefault("max_new_tokens", recipe.eval.max_new_tokens)  # of format 1
    left_out = {"name", "validation", "cache_dir", "expect", "chat_template"}
    data = recipe.data.model_dump(exclude=left_out | {"max_example_bytes", "max_uncompressed_bytes"})
    sources = _sources(recipe.data)
    template = Path(recipe.data.chat_template).name if recipe.data.chat_template else None
    return {
        "hardware": f"{machine['count']} x {machine['name']}, {machine['cpu_cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB",
        "processes": launch["processes"],
        "threads": launch.get("environment", {}).get("OMP_NUM_THREADS", "not set"),
        "precision": launch["precision"],
        **environment["packages"],
        **{f"{name} files": _hashes(report[name], in_order=len(sources) > 1) for name in report},
        "sources": sources,
        **{f"data.{key}": value for key, value in {**data, "chat_template": template}.items()},
        **{f"evaluation {key}": value for key, value in settings.items()},
        "evaluation measures": sorted(
            key for key, value in result.get("tuned", {}).items() if value is not None
        ),
        "evaluation tasks": sorted(result.get("tasks", {})),
        **{f"settings of {name}": _settings_of(task) for name, task in result.get("tasks", {}).items()},
        "base model": base_name(folder),
        "steps": "until early stopping" if recipe.eval.early_stopping_patience else last_step(folder),
    }


def _sources(data: Data) -> list[dict[str, Any]]:
    """Return the weight, subset and split of each source of a list; empty for one source."""
    beside = {"name", "revision", "max_example_bytes", "max_uncompressed_bytes"}
    named = data.name if isinstance(data.name, list) else []
    return [(Source(name=one) if isinstance(one, str) else one).model_dump(exclude=beside) for one in named]


def _hashes(split: dict[str, Any], *, in_order: bool) -> list[str]:
    """Return the hashes of the data files of a split. Their order matters if each source has its weight."""
    found = dict.fromkeys(split.get("sources", {}).values())
    return list(found) if in_order else sorted(found)


def _settings_of(task: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a task that change its scores, such as the limit and the few-shot examples."""
    return {key: value for key, value in task.get("settings", {}).items() if key != "batch_size"}


def base_name(folder: RunFolder) -> str:
    """Return the base model of a run, with its commit on the Hub."""
    recipe = load_recipe(folder.recipe, (), folder.format_version)
    saved = RunFolder(folder.adapter).found("adapter_config.json")
    return run_folder.named(recipe.model.name, saved.get("revision") or recipe.model.revision)


def last_step(folder: RunFolder) -> int:
    return max((line["step"] for line in folder.steps()), default=0)


def obstacles(a: RunFolder, b: RunFolder, *, steps: bool = True) -> list[str]:
    """Return why the figures of two runs can't be compared; an empty list if they can.

    Args:
        steps: whether a different number of steps is a reason.
    """
    left, right = facts(a), facts(b)
    keys = [key for key in dict.fromkeys([*left, *right]) if steps or key != "steps"]
    unequal = [key for key in keys if left.get(key) != right.get(key)]
    said = [f"{key}: {shown(left.get(key))} and {shown(right.get(key))}" for key in unequal]
    return said + ([] if "base model" in unequal else other_weights(a, b))


def other_weights(a: RunFolder, b: RunFolder) -> list[str]:
    """Report base models of one name with other files, or with another loss on the same validation set."""
    recipes = [load_recipe(folder.recipe, (), folder.format_version) for folder in (a, b)]
    left, right = (folder.found("environment.json").get("base_model") or {} for folder in (a, b))
    if any(left[part] != right[part] for part in left.keys() & right.keys()):  # versions record other parts
        return ["base model: the config or the weights differ"]
    losses = [folder.found("eval.json").get("base", {}).get("loss") for folder in (a, b)]
    storages = {adapter_types.find(r.adapter.type).storage or r.model.quantization for r in recipes}
    if None in losses or len(storages) > 1 or not all(recipe.data.validation for recipe in recipes):
        return []
    if near(*losses):
        return []
    loss = f"{losses[0]:.4f} and {losses[1]:.4f}"
    return [f"base model: the weights differ, because the validation loss is {loss}"]


def near(one: float, other: float) -> bool:
    """Return whether two losses on the same examples may come from the same weights."""
    return math.isclose(one, other, rel_tol=SAME_BASE) or math.isnan(one) or math.isnan(other)


def shown_pair(left: object, right: object) -> tuple[str, str]:
    """Format two unequal values. Floats have four digits, or as many as it takes to tell them apart."""
    if isinstance(left, float) and isinstance(right, float):
        pairs = ((f"{left:.{digits}g}", f"{right:.{digits}g}") for digits in (4, 6, 9))
        return next((pair for pair in pairs if pair[0] != pair[1]), (repr(left), repr(right)))
    return shown(left), shown(right)


def shown(value: object) -> str:
    """Format a value on one line, with shortened hashes, long texts and long lists."""
    if isinstance(value, list):
        more = [f"{len(value) - AT_MOST:,} more"] if len(value) > AT_MOST else []
        return "[" + ", ".join([*map(shown, value[:AT_MOST]), *more]) + "]"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) == 64 and not set(text) - set("0123456789abcdef"):
        return f"{text[:6]}..{text[-6:]}"  # the hash of a task joins the hashes of two files
    return shortened(text, 80)
