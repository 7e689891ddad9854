"""Compare an evaluation with earlier ones of the same run."""

from __future__ import annotations

from typing import Any

from finetune.evaluation import results, validation_set
from finetune.recipe.schema import Recipe
from finetune.run_folder import comparability
from finetune.run_folder.run_folder import RunFolder

# For other examples than the run's validation set, or for another base model
OTHER = "eval.other.json"


def others(folder: RunFolder, recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Return why this result is not about the run's own weights.

    The base model can be stored in another format than in training. Or the overrides name another base model,
    which its validation loss shows.
    """
    origin, now = recipe.origin.set_by, result["settings"]["storage"]
    own = comparability.resolved(folder).get("model.storage", ("", ""))[0].strip('"')
    # format 1 could request bf16 under any precision; today `none` means the precision of the launch
    in_bf16 = folder.format_version == 1 and own == "bf16" and recipe.model.quantization == "none"
    if (in_bf16 or origin.get("model.quantization") == "override") and now != own:
        was = f"this run used {own}" if own else "the run does not say what it used"
        return [f"this evaluation stores the base model in {now}, but {was}"]
    overrides_model = any(who == "override" and key.startswith("model.") for key, who in origin.items())
    earlier = folder.found("eval.json")
    if validation_set.overridden(recipe) or not overrides_model or _same_base(earlier, result) is not False:
        return []
    losses = [one["base"]["loss"] for one in (result, earlier)]
    text = "this is not the base model of the run: the validation loss is {:.4f} in place of {:.4f}"
    return [text.format(*losses)]


def _same_base(earlier: dict[str, Any], now: dict[str, Any]) -> bool | None:
    """Return whether two evaluations have the same base model, by its validation loss.

    `None` if not known.
    """
    losses = [one.get("base", {}).get("loss") for one in (earlier, now)]
    rows = [one.get("settings", {}).get("rows") for one in (earlier, now)]
    return None if None in losses or rows[0] != rows[1] else comparability.near(*losses)


def earlier_tasks(folder: RunFolder, name: str, now: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks of an earlier evaluation on the same base model that were not repeated now.

    For another base model than the run's, the same name is not sufficient.
    """
    earlier = folder.found(name)
    was, same, strict = earlier.get("settings", {}), _same_base(earlier, now), name == OTHER
    keys = ("model", "storage") if strict else ("model",)
    alike = all(was.get(key) == now["settings"][key] for key in keys)
    if not alike or not (same if strict else same is not False):
        return {}
    gone = {*now["tasks"], results.GENERAL}  # the general texts are evaluated each time, or are not wanted
    return {name: _tested(task) for name, task in earlier.get("tasks", {}).items() if name not in gone}


def _tested(task: dict[str, Any]) -> dict[str, Any]:
    """Remove the verdict of an older evaluation's task if it has no p-value."""
    for change in task.get("difference", {}).values():
        if "p" not in change:
            change.pop("verdict", None)
    return task
