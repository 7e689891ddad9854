"""Report a search: trials.csv, trials.json, plots, an HTML page and the best recipe."""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import TrialState

from finetune.core.command_lines import command
from finetune.core.formatting import figure
from finetune.core.visible_text import visible
from finetune.experiments.runner import kept_runs, varied_keys
from finetune.experiments.sweep import chosen_score, search_space, study_storage
from finetune.recipe.loader import load as load_recipe
from finetune.reporting import html_report, plots
from finetune.reporting.plots import Curve
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from finetune.core.console import Console
    from finetune.experiments.sweep.search_space import Parameter, Space
    from finetune.experiments.sweep.search_space_checks import SweepRequest
    from finetune.recipe.schema import Recipe

PAGE = Path(__file__).with_name("sweep.html.jinja")
BEST = "best.yaml"
SURPLUS = "one more than was asked for"
FEWEST = 4  # minimum of complete trials for importances
OWN = " (the recipe's values)"
SHOWN = 8  # best trials in the terminal table
STATES = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "waiting",
}


def described(one: Parameter) -> str:
    """Format a range or choices in a few words."""
    if one.choices is not None:
        said = ", ".join(map(varied_keys.text_of, one.choices))
    else:
        said = f"{one.low:g} to {one.high:g}" + (", log" if one.log else "")
        said += f", step {one.step:g}" if one.step else ""
    return said + (f", multiplied by {one.times}" if one.times else "")


def trials(study: Study) -> list[dict[str, Any]]:
    """Return a row for each trial in order, without surplus trials."""
    every = study.get_trials(deepcopy=False)
    again = {one.user_attrs["again"]: one.number for one in every if "again" in one.user_attrs}
    return [_row(one, again) for one in every if not is_surplus(one)]


def is_surplus(one: FrozenTrial) -> bool:
    """Return whether the trial was not run because two workers asked for the last trial at the same time."""
    return one.user_attrs.get("reason") == SURPLUS


def _row(one: FrozenTrial, again: dict[int, int]) -> dict[str, Any]:
    kept, lost = one.user_attrs, study_storage.is_lost(one)
    why = "the worker ended; "
    number = again.get(one.number)
    why += f"the study ran it again as trial {number}" if number is not None else "too many attempts"
    return {
        "number": one.number,
        "state": "lost" if lost else STATES[one.state.name],
        "value": one.value if one.state == TrialState.COMPLETE else None,
        "reason": why if lost else kept.get("reason", ""),
        "evaluations": [value for _, value in sorted(one.intermediate_values.items())],
        "seconds": kept.get("seconds"),
        "started_seconds": kept.get("started_seconds"),
        "values": kept.get("values", {}),
        "own": bool(kept.get("own")),
        "worker": kept.get("worker", ""),
        "folder": f"trial-{one.number:04d}",
    }


def collect(requested: SweepRequest, study: Study) -> dict[str, Any]:
    """Return the content of trials.json."""
    rows = trials(study)
    complete = [row for row in rows if row["state"] == "complete"]
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    best = min(complete, key=lambda row: sign * row["value"], default=None)
    metric = "loss" if sign == 1 else "exact_match"
    return {
        "study": study.study_name,
        "recipe": requested.path,
        "overrides": requested.overrides,
        "space": str(requested.space),
        "storage": study_storage.shown(requested.url),
        "direction": study.direction.name.lower(),
        "counts": {state: sum(row["state"] == state for row in rows) for state in (*STATES.values(), "lost")},
        "best": best["number"] if best else None,
        "chosen": chosen_score.assess(requested.folder, complete, best, metric),
        "own": next((row["number"] for row in complete if row["own"]), None),
        "importances": importances(study),
        "trials": rows,
    }


def importances(study: Study) -> dict[str, float]:
    """Return the importance of each key, by PED-ANOVA (arXiv 2304.10255), which does not need scikit-learn.

    It uses complete trials. The mapping is empty if there are too few.
    """
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < FEWEST:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        # Optuna warns of few trials, and the page has its own note about them
        warnings.simplefilter("ignore")
        return optuna.importance.get_param_importances(study, evaluator=evaluator)


def write_trials(folder: Path, study: Study) -> None:
    """Write trials.csv. This happens after each trial."""
    rows = trials(study)
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["trial", "state", "value", "seconds", *keys, "reason"])
    for row in rows:
        values = [varied_keys.text_of(row["values"][key]) if key in row["values"] else "" for key in keys]
        table.writerow([row["number"], row["state"], row["value"], row["seconds"], *values, row["reason"]])
    RunFolder(folder).write_text("trials.csv", file.getvalue())


def write(
    requested: SweepRequest, study: Study, recipe: Recipe, space: Space, rows: int | None
) -> dict[str, Any]:
    """Write all results, and return the content of trials.json.

    Args:
        rows: number of training sequences, or `None` if it is not known.
    """
    place, content = RunFolder(requested.folder), collect(requested, study)
    write_trials(requested.folder, study)
    place.write("trials.json", content)
    drawn = pictures(content, space, recipe)
    for name, svg in drawn.items():
        place.write_text(f"{name}.svg", svg)
    if content["best"] is not None:
        place.write_text(BEST, best_recipe(requested, content, space, rows))
    place.write_text("sweep.html", page(requested, content, drawn, recipe))
    return content


def pictures(content: dict[str, Any], space: Space, recipe: Recipe) -> dict[str, str]:
    """Return the plots as SVG by file name: history, importances, and one slice for each key."""
    rows = [row for row in content["trials"] if row["state"] == "complete"]
    if not rows:
        return {}
    name, less = label(recipe), content["direction"] == "minimize"
    places, values = [row["number"] for row in rows], [row["value"] for row in rows]
    best = [row["number"] for row in rows].index(content["best"])
    so_far = [(min if less else max)(values[: index + 1]) for index in range(len(values))]
    found = {
        "history": plots.dots(
            places, values, "trial", name, best=best, line=Curve("best so far", places, so_far)
        )
    }
    if content["importances"]:
        bars = [plots.Bar(key, [share], [0.0]) for key, share in content["importances"].items()]
        found["importances"] = plots.bars(bars, ("importance",), "importance of the key (share)")
    for key, one in space.parameters.items():
        own = [row for row in rows if key in row["values"]]
        if one.choices is not None:  # order by the space's choices
            own.sort(key=lambda row: _place(one, row["values"][key]))
        if own:
            drawn = [row["values"][key] for row in own]
            x = drawn if one.choices is None else list(map(short, drawn))
            star = next((at for at, row in enumerate(own) if row["number"] == content["best"]), None)
            found[f"slice-{key}"] = plots.dots(x, [row["value"] for row in own], key, name, best=star)
    return found


def _place(one: Parameter, value: object) -> Any:
    """Return the sort key of a choice: its position in the space, or its value if it is a multiple."""
    labels = list(map(varied_keys.text_of, one.choices or ()))
    return value if one.times else labels.index(varied_keys.text_of(value))


def label(recipe: Recipe) -> str:
    return "validation loss" if recipe.eval.metric_for_best_model == "loss" else "exact match"


def column(recipe: Recipe) -> str:
    """Return the header of the column of scores, with its unit."""
    unit = "nats per token" if recipe.eval.metric_for_best_model == "loss" else "1 = all answers"
    return f"{label(recipe)}, {unit}"


def best_recipe(requested: SweepRequest, content: dict[str, Any], space: Space, rows: int | None) -> str:
    """Return the recipe with the best trial's values. A comment gives the source of each value.

    The recipe is evaluated as often as the trials, so a run keeps the weights of its best evaluation, as the
    trials did.
    """
    best = next(row for row in content["trials"] if row["number"] == content["best"])
    recipe = load_recipe(requested.path, [*requested.overrides, *search_space.overrides(best["values"])])
    chosen = dict[str, tuple[Any, str]]()
    for key in best["values"]:
        if key.count(".") == 1:
            who = f"sweep: trial {best['number']}, from {described(space.parameters[key])}"
            chosen[key] = (search_space.own_value(recipe, key), who)
    if recipe.eval.eval_steps is None:
        chosen["eval.eval_steps"] = (search_space.every(recipe, space.search, rows), "as in the trials")
    compiled = recipe.speed.compile, f"{recipe.origin.set_by.get('speed.compile', 'default')}; off in trials"
    chosen["speed.compile"] = compiled
    complete = content["counts"]["complete"]
    of = f"the best of {complete} complete trials of {content['study']}"
    more = chosen_score.described(content.get("chosen", {}))
    head = f"# {label(recipe)} {best['value']:.5g}: {visible(of)}.\n" + f"# {visible(more)}\n" * bool(more)
    return kept_runs.recipe_file(recipe, chosen, head)


def verdict(content: dict[str, Any], name: str) -> str:
    """Summarize the result in a few sentences."""
    by_number = {row["number"]: row for row in content["trials"]}
    if content["best"] is None:
        return "The sweep finished no trial."
    best, own = by_number[content["best"]], by_number.get(content["own"])
    said = f"{name} {figure(best['value'])} (trial {best['number']})"
    more = f" {chosen_score.described(content.get('chosen', {}))}".rstrip()
    if own is best:
        return f"The recipe's own values are the best: {said}.{more}"
    if own is None:
        return f"Best trial: {said}.{more}"
    return f"Best trial: {said}; the recipe's own values: {figure(own['value'])}.{more}"


def counted(content: dict[str, Any]) -> str:
    found = [f"{count} {state}" for state, count in content["counts"].items() if count]
    return ", ".join(found)


def next_step(requested: SweepRequest, content: dict[str, Any]) -> str:
    """Return the next command: train the best recipe, or repeat the search.

    It does not contain the storage URL, which can hold a password.
    """
    more = [
        "sweep",
        requested.path,
        *requested.overrides,
        "--space",
        str(requested.space),
        "--output",
        str(requested.folder),
    ]
    more += ["--trials", str(requested.trials)] if requested.trials is not None else []
    more += ["--hours", f"{requested.seconds / 3600:g}"] if requested.seconds is not None else []
    more += ["--accelerate", requested.accelerate] if requested.accelerate else []
    if content["best"] is None:
        return command(*more, *["--final"] * requested.final)
    return command("train", str(requested.folder / BEST))


def ranked(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the complete trials, best first."""
    sign = 1 if content["direction"] == "minimize" else -1
    rows = [row for row in content["trials"] if row["state"] == "complete"]
    return sorted(rows, key=lambda row: sign * row["value"])


def short(value: object) -> str:
    """Format a value for a table cell."""
    return figure(value) if isinstance(value, float) else varied_keys.text_of(value)


def show(screen: Console, requested: SweepRequest, content: dict[str, Any]) -> None:
    """Print the best trials, the importances and the next command."""
    rows, recipe = ranked(content)[:SHOWN], load_recipe(requested.path, requested.overrides)
    keys = list(dict.fromkeys(key for row in rows for key in row["values"]))
    if rows:
        cells = [
            [f"{row['number']}{OWN if row['own'] else ''}", figure(row["value"])]
            + [short(row["values"][key]) if key in row["values"] else "" for key in keys]
            for row in rows
        ]
        screen.say("", f"the best of {len(content['trials'])} trials ({counted(content)}):")
        screen.table("", ("trial number", column(recipe), *keys), cells)
    if content["importances"]:
        decides = ", ".join(f"{key} {share:.0%}" for key, share in list(content["importances"].items())[:4])
        few = f" (a rough estimate from {content['counts']['complete']} trials)"
        screen.say("", f"most important keys: {decides}{few}")
    screen.say("", verdict(content, label(recipe)))
    screen.say(f"report: {requested.folder}/sweep.html; all trials: {requested.folder}/trials.csv")
    screen.say(f"next: {next_step(requested, content)}")


def page(requested: SweepRequest, content: dict[str, Any], drawn: dict[str, str], recipe: Recipe) -> str:
    """Return one self-contained HTML page."""
    rows = ranked(content) + [row for row in content["trials"] if row["state"] != "complete"]
    keys = list(dict.fromkeys(key for row in content["trials"] for key in row["values"]))
    spent = sum(row["seconds"] or 0.0 for row in content["trials"])
    given = {
        "content": content,
        "rows": rows,
        "keys": keys,
        "drawn": drawn,
        "label": label(recipe),
        "own": OWN,
        "column": column(recipe),
        "verdict": verdict(content, label(recipe)),
        "counted": counted(content),
        "spent": spent,
        "next": next_step(requested, content),
        "name": content["study"],
        "cell": short,
    }
    return html_report.template(PAGE).render(given)
