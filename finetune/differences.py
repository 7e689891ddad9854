"""What two runs differ in: `finetune compare RUN_A RUN_B [--assert-equal]`, from the run folders alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune import adapter_types, run_folder
from finetune.errors import Exit, Problem, UserError
from finetune.recipe import load as load_recipe
from finetune.recipe import local_path
from finetune.run_folder import RunFolder, open_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.screen import Screen

SAME_BASE = 1e-2  # relative, of the base's held-out loss: kernels and dtypes move it less, other weights more
MISSING = "-"
AT_MOST = 8  # rows of a table of differences
OF_THE_PLACE = ("train.output_dir", "model.name", "data.name", "data.validation", "data.cache")


class Found(NamedTuple):
    """What is unequal in one part of two runs."""

    part: str
    rows: list[tuple[str, str, str]]
    """What it is, as A has it, as B has it."""
    summary: str = ""


def run(a: str, b: str, screen: Screen, *, must_equal: bool = False) -> list[Found]:
    """Show what two runs differ in, part by part, and end with one sentence.

    Raises:
        UserError: no run (exit 2); `must_equal` and weights, losses or evaluation differ (exit 4).
    """
    left, right = open_run(a), open_run(b)
    reasons = obstacles(left, right)
    learnt = [curves(left, right), weights(left, right), results(left, right)]
    parts = [recipes(left, right), environments(left, right), data(left, right), *learnt]
    for part in parts:
        if part.rows:
            more = [("...", f"{len(part.rows) - AT_MOST} more", "")] if len(part.rows) > AT_MOST else []
            screen.table(part.part, ("", left.path.name, right.path.name), [*part.rows[:AT_MOST], *more])
        screen.say(*([f"{part.part}: {part.summary}"] if part.summary else []))
    screen.say("", *(f"NOT COMPARABLE: {reason}" for reason in reasons))
    unequal = [part for part in learnt if part.rows]
    screen.say(sentence(unequal, [part.part for part in parts[:3] if part.rows], reasons))
    if must_equal and unequal:
        problems = [Problem(f"the runs have other {part.part}", found=part.summary) for part in unequal]
        raise UserError(*problems, code=Exit.ARTEFACT)
    return parts


def sentence(unequal: list[Found], causes: list[str], reasons: list[str]) -> str:
    """All of it in one."""
    given = f"another {' and '.join(causes)}" if causes else "the same recipe, environment and data"
    if not unequal:
        return f"Both runs learnt the same, to the bit: losses, weights and evaluation; from {given}."
    names = " and ".join(part.part for part in unequal)
    sure = "; their figures can't be compared" if reasons else ""
    return f"The runs differ in {names}, from {given}: {unequal[0].summary}{sure}."


def recipes(a: RunFolder, b: RunFolder) -> Found:
    """Key by key, with who set it. Where files and folders stand is not a difference."""
    left, right = resolved(a), resolved(b)
    rows = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, (MISSING, "")), right.get(key, (MISSING, ""))
        place = key in OF_THE_PLACE and Path(one[0].strip('"')).name == Path(other[0].strip('"')).name
        if one[0] != other[0] and not place and key != "train.output_dir":
            rows.append((key, *(f"{value}  ({who})" if who else value for value, who in (one, other))))
    return Found("recipe", rows)


def resolved(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Dotted key -> value as it is written in recipe.resolved.yaml, and who set it."""
    found = run_folder.settings(folder.recipe.read_text(encoding="utf-8"))
    return {f"{one.section}.{one.key}": (one.value, one.who) for one in found}


def environments(a: RunFolder, b: RunFolder) -> Found:
    """Versions, git, hardware and launch; the Trainer's own settings follow from the recipe."""
    left, right = (folder.read("environment.json") for folder in (a, b))
    keys = [key for key in dict.fromkeys([*left, *right]) if key != "sft_config"]
    rows = [row for key in keys for row in unequal(left.get(key), right.get(key), key)]
    return Found("environment", rows)


def data(a: RunFolder, b: RunFolder) -> Found:
    """The files' content, and what became of their rows."""

    def of(folder: RunFolder) -> dict[str, Any]:
        counted = ("rows", "kept", "tokens", "trained_tokens")
        report = folder.read("data_report.json")
        files = {name: sorted(set(split["sources"].values())) for name, split in report.items()}
        return {name: {"files": files[name], **{k: report[name][k] for k in counted}} for name in report}

    return Found("data", unequal(of(a), of(b)))


def curves(a: RunFolder, b: RunFolder) -> Found:
    """Losses at the same steps."""
    left, right = ({line["step"]: line["loss"] for line in folder.steps()} for folder in (a, b))
    both = sorted(left.keys() & right.keys())
    apart = [step for step in both if left[step] != right[step]]
    rows = [(f"loss of step {step}", f"{left[step]}", f"{right[step]}") for step in apart]
    rows += [
        (f"loss of step {step}", str(left.get(step, MISSING)), str(right.get(step, MISSING)))
        for step in sorted(left.keys() ^ right.keys())
    ]
    if not rows:
        return Found("losses", [], f"the same at {len(both)} steps")
    gaps = [abs(float(left[step]) - float(right[step])) for step in both]
    said = f"{len(apart)} of {len(both)} steps differ" + (f", first step {apart[0]}" if apart else "")
    said += f", by {max(gaps):.3g} at most and {sum(gaps) / len(gaps):.3g} on average" if apart else ""
    alone = len(left.keys() ^ right.keys())
    return Found("losses", rows, said + (f"; {alone} steps are in one run only" if alone else ""))


def weights(a: RunFolder, b: RunFolder) -> Found:
    """What was trained: tensor by tensor."""
    left, right = dict(tensors(a)), dict(tensors(b))
    if left.keys() != right.keys():
        alone = sorted(left.keys() ^ right.keys())
        rows = [(name, shape(left.get(name)), shape(right.get(name))) for name in alone]
        return Found("weights", rows, f"{len(alone)} of {len(left | right)} tensors are in one run only")
    rows, largest, furthest = [], 0.0, ""
    for name in left:
        one, other = left[name], right[name]
        if one.shape != other.shape:
            rows.append((name, shape(one), shape(other)))
        elif not one.equal(other) or one.dtype != other.dtype:
            gap = float((one.double() - other.double()).abs().max())
            largest, furthest = max((largest, furthest), (gap, name))
            rows.append((name, f"norm {one.double().norm():.6g}", f"norm {other.double().norm():.6g}"))
    if not rows:
        return Found("weights", [], f"all {len(left)} tensors are the same, to the bit")
    said = f"{len(rows)} of {len(left)} tensors differ"
    return Found("weights", rows, said + (f", by {largest:.3g} at most ({furthest})" if furthest else ""))


def tensors(folder: RunFolder) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(folder.weights.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (not a dict)


def shape(tensor: Any) -> str:
    return MISSING if tensor is None else " x ".join(map(str, tensor.shape))


def results(a: RunFolder, b: RunFolder) -> Found:
    """Every figure of the evaluation."""
    left, right = ({k: f.found("eval.json").get(k, {}) for k in ("base", "tuned", "tasks")} for f in (a, b))
    rows = unequal(left, right)
    said = f"{rows[0][0]} is {rows[0][1]} against {rows[0][2]}" if rows else "the same"
    return Found("evaluation", rows, said if any(left.values()) or rows else "there is none")


def unequal(left: Any, right: Any, name: str = "") -> list[tuple[str, str, str]]:
    """The leaves of two JSON values that are not the same, by dotted name."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = dict.fromkeys([*left, *right])
        pairs = ((f"{name}.{key}" if name else key, left.get(key), right.get(key)) for key in keys)
        return [row for key, one, other in pairs for row in unequal(one, other, key)]
    same = left == right or (left != left and right != right)  # NaN, which is a loss like any other here
    return [] if same else [(name, shown(left), shown(right))]


def facts(folder: RunFolder) -> dict[str, Any]:
    """What has to be equal for the figures of two runs to be compared; each is said as a reason."""
    environment, report = folder.read("environment.json"), folder.read("data_report.json")
    recipe, result = load_recipe(folder.recipe), folder.found("eval.json")
    machine, launch = environment["hardware"], environment["launch"]
    beside = ("batch_size", "seconds", "notes", "storage")
    settings = {k: v for k, v in result.get("settings", {}).items() if k not in beside}
    settings["data"] = sorted(settings.get("data", {}).values())
    if isinstance(settings.get("general"), str):  # a file, whose content is in `data`
        settings["general"] = Path(settings["general"]).name
    settings["max_new_tokens"] = recipe.eval.max_new_tokens
    data = recipe.data.model_dump(exclude={"name", "validation", "cache", "expect", "chat_template"})
    template = Path(recipe.data.chat_template).name if recipe.data.chat_template else None
    return {
        "hardware": f"{machine['count']} x {machine['name']}, {machine['cpu_cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB",
        "processes": launch["processes"],
        "threads": launch["environment"].get("OMP_NUM_THREADS", "not set"),
        "precision": launch["precision"],
        **environment["packages"],
        **{f"{name} files": sorted(set(report[name]["sources"].values())) for name in report},
        **{f"data.{key}": value for key, value in {**data, "chat_template": template}.items()},
        **{f"evaluation {key}": value for key, value in settings.items()},
        "evaluation tasks": sorted(result.get("tasks", {})),
        "base model": base_name(folder),
        "steps": "until it learns no more" if recipe.eval.patience else last_step(folder),
    }


def base_name(folder: RunFolder) -> str:
    """The base of a run, and its commit on the Hub."""
    recipe = load_recipe(folder.recipe)
    saved = RunFolder(folder.adapter).found("adapter_config.json")
    return named(recipe.model.name, saved.get("revision") or recipe.model.revision)


def named(base: str, commit: str | None) -> str:
    """A base by its name alone, since its folder may stand elsewhere, and its commit."""
    name = Path(base).absolute().name if local_path(base) else base
    return f"{name} {commit or ''}".strip()


def last_step(folder: RunFolder) -> int:
    return max((line["step"] for line in folder.steps()), default=0)


def obstacles(a: RunFolder, b: RunFolder, *, steps: bool = True) -> list[str]:
    """Why the figures of two runs can't be compared; empty if they can.

    Args:
        steps: whether another number of steps is such a reason.
    """
    left, right = facts(a), facts(b)
    keys = [key for key in dict.fromkeys([*left, *right]) if steps or key != "steps"]
    unequal = [key for key in keys if left.get(key) != right.get(key)]
    said = [f"{key}: {shown(left.get(key))} against {shown(right.get(key))}" for key in unequal]
    return said + ([] if "base model" in unequal else other_weights(a, b))


def other_weights(a: RunFolder, b: RunFolder) -> list[str]:
    """Bases of one name whose losses on the same held-out file are not the same."""
    recipes = [load_recipe(folder.recipe) for folder in (a, b)]
    losses = [folder.found("eval.json").get("base", {}).get("loss") for folder in (a, b)]
    storages = {adapter_types.find(r.adapter.type).storage or r.speed.base for r in recipes}
    if None in losses or len(storages) > 1 or not all(recipe.data.validation for recipe in recipes):
        return []
    if near(*losses):
        return []
    return [
        f"base model: its weights are others, by its held-out loss: {losses[0]:.4f} against {losses[1]:.4f}"
    ]


def near(one: float, other: float) -> bool:
    """Whether two losses on the same rows may well be of the same weights."""
    return math.isclose(one, other, rel_tol=SAME_BASE) or math.isnan(one) or math.isnan(other)


def shown(value: Any) -> str:
    """A value in a line: hashes and long texts shortened."""
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) == 64 and not set(text) - set("0123456789abcdef"):
        return text[:12]
    return text if len(text) <= 80 else f"{text[:77]}..."
