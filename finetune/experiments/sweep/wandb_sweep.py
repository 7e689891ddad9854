"""Export a search space as a W&B sweep. wandb itself is not required.

https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

from __future__ import annotations

from typing import Any

import yaml

from finetune.core.visible_text import visible
from finetune.experiments.runner.varied_keys import text_of
from finetune.experiments.sweep.search_space import IN_TRIALS, TYPE, Parameter, Space, every, grid, multiplied
from finetune.recipe.schema import Recipe


def sweep(
    space: Space, recipe: Recipe, path: str, given: list[str], rows: int | None = None
) -> tuple[str, list[str]]:
    """Return the YAML of the sweep, and notes on what a W&B sweep cannot express.

    The sweep's agents run `finetune train` with overrides.

    Args:
        rows: number of training sequences. It determines the evaluation interval if the recipe states neither
            `eval.eval_steps` nor its steps.
    """
    parameters: dict[str, Any] = {}
    notes = []
    for key, one in space.parameters.items():
        if one.times not in (None, key):
            notes.append(f"{key}: W&B can't multiply by {one.times}, so the recipe's value is used")
            continue
        parameters[key] = distribution(key, one, recipe)
    if TYPE in parameters and any(key.startswith("adapter.") for key in parameters if key != TYPE):
        notes.append(
            "W&B draws all keys for all adapter types; a run ignores keys that its type does not have"
        )
    best = recipe.eval.metric_for_best_model
    fixed = [*IN_TRIALS, f"eval.eval_steps={every(recipe, space.search, rows)}", "train.report_to=wandb"]
    fixed.append("train.output_dir=null")  # each run creates its own folder
    command = ["finetune", "train", path, *given, *fixed]
    content: dict[str, Any] = {
        "method": {"tpe": "bayes", "random": "random"}[space.search.sampler],
        "metric": {"name": f"eval/{best}", "goal": "minimize" if best == "loss" else "maximize"},
        "parameters": parameters,
        "command": [*command, "${args_no_hyphens}"],
    }
    if space.search.pruner != "none":
        content["early_terminate"] = {"type": "hyperband", "min_iter": 1}
        if space.search.pruner == "median":
            notes.append("W&B has no median pruner, so this sweep uses hyperband")
    name = visible(space.path.name)
    head = f"# {name} as a W&B sweep, by `finetune sweep --export-wandb`. Start it with: wandb sweep FILE\n"
    head += "".join(f"# {visible(note)}\n" for note in notes)
    return head + yaml.safe_dump(content, sort_keys=False, width=110), notes


def distribution(key: str, one: Parameter, recipe: Recipe) -> dict[str, Any]:
    """Return the W&B distribution of a key, with the same values as in a study.

    Values with steps and multiples of integers are listed, because W&B counts its steps from 0 in units of
    one.
    """
    is_listed = one.choices is not None or one.step is not None or one.times is not None
    listed = grid(one) if is_listed else None
    if listed is not None:
        values = [multiplied(key, value, one, {}, recipe) for value in listed]
        return {"values": [text_of(v) if isinstance(v, list | dict) else v for v in values]}
    low, high = (multiplied(key, value, one, {}, recipe) for value, _ in one.corners)
    kind = "log_uniform_values" if one.log else "int_uniform" if one.whole else "uniform"
    stepped = one.whole and one.log
    found = {"distribution": f"q_{kind}" if stepped else kind, "min": low, "max": high}
    return found | ({"q": multiplied(key, 1, one, {}, recipe)} if stepped else {})
