"""A space as a W&B sweep; wandb itself is not needed.

https://docs.wandb.ai/guides/sweeps/sweep-config-keys
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from finetune.tune_space import TYPE, every, multiplied, text_of

if TYPE_CHECKING:
    from finetune.recipe import Recipe
    from finetune.tune_space import Space


def sweep(
    space: Space, recipe: Recipe, path: str, given: list[str], rows: int | None = None
) -> tuple[str, list[str]]:
    """The sweep's YAML, whose agents run `finetune train` with overrides, and what a sweep can't say.

    Args:
        rows: to train on, for a recipe that states neither `eval.every` nor its steps: without evaluations
            there would be no metric to go by.
    """
    parameters: dict[str, Any] = {}
    notes = []
    for key, one in space.parameters.items():
        if one.times not in (None, key):
            notes.append(f"{key}: a sweep can't multiply by {one.times}; it stays as the recipe has it")
            continue
        values = [multiplied(key, value, one, {}, recipe) for value, _ in one.corners]
        if one.choices is not None:
            parameters[key] = {"values": [text_of(v) if isinstance(v, list | dict) else v for v in values]}
            continue
        whole, names = all(isinstance(value, int) for value in values), {True: "q_log_uniform_values"}
        kind = names.get(whole, "log_uniform_values") if one.log else "int_uniform" if whole else "uniform"
        stepped = one.step is not None and not one.log
        kind = "q_uniform" if stepped else kind
        parameters[key] = {"distribution": kind, "min": values[0], "max": values[1]}
        parameters[key] |= {"q": one.step} if stepped else {}
    if TYPE in parameters and any(key.startswith("adapter.") for key in parameters if key != TYPE):
        notes.append("a sweep draws all keys for all types; what a type has not is left out by the run")
    best = recipe.eval.best
    fixed = [
        f"eval.every={every(recipe, space.search, rows)}",
        "train.report_to=wandb",
        "speed.compile=false",
    ]
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
            notes.append("a sweep has no median pruner: hyperband stands in its place")
    head = f"# {space.path.name} as a W&B sweep, made by `finetune tune --export-wandb`: wandb sweep FILE\n"
    head += "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump(content, sort_keys=False, width=110), notes
