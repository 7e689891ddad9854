"""Check an optimized recipe against its baseline: speed-up, loss and memory, measured by `finetune ablate`.

    python scripts/validate_optimizations.py --baseline recipes/baselines/llama3_8b.yaml \\
        --optimized recipes/gpus/80gb_fastest.yaml --min-speedup 3 --max-loss-delta 0.5%

For several GPUs, --accelerate ddp_4 launches both recipes; it takes a shipped config or a file. An argument
key=value overrides a key of both recipes. The same command resumes and keeps finished runs.
DIR/ab/<baseline>-against-<optimized>/ has the runs and the ablation's table, plot and report.

The optimized loss may be higher than the baseline's by --max-loss-delta, and lower by any amount. Both
recipes must have the same model, data and checkpoint frequency. All runs must have the same machine, packages
and training data. Otherwise the script stops with NOT COMPARABLE.

Exit codes:
0   every limit holds
2   a recipe or an argument is wrong, or the runs are NOT COMPARABLE
3   this machine lacks a package or a feature that a recipe needs
5   a limit does not hold, or a run failed
75  stopped by a signal
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from finetune.cli.arguments import at_least_one, at_least_zero
from finetune.cli.main import guarded
from finetune.core import safe_files
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.paths import writing
from finetune.experiments.ablation import ablation, optimizations
from finetune.experiments.runner import kept_runs, measured_run, varied_keys
from finetune.preflight import checker, choice_checks
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Recipe, Train
from finetune.run_folder import run_folder

VALIDATION_EXAMPLES = 64
SHARED = {*measured_run.ALIKE, *optimizations.MEASURED}  # keys that all runs have in common
SHARED |= {"model.name", "model.revision", "data.validation", "train.output_dir"}
SHARED |= {"train.save_steps", "train.seed"}


class Check(NamedTuple):
    what: str
    found: str
    limit: str
    ok: bool


def loss_delta(text: str) -> tuple[float, bool]:
    """Parse 0.5%, a share of the baseline's loss, or 0.001, in nats per token."""
    return at_least_zero(text.rstrip("%")) / (100 if text.endswith("%") else 1), text.endswith("%")


def validate(options: argparse.Namespace) -> None:
    place = (
        Path(options.output) / "ab" / f"{Path(options.baseline).stem}-against-{Path(options.optimized).stem}"
    )
    recipes = [load_recipe(path, options.overrides) for path in (options.baseline, options.optimized)]
    check_comparable(options, recipes)
    run_folder.refuse_links(Path(options.output))
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    rows = json.dumps(two_rows(options, *recipes), indent=1)  # JSON is YAML
    safe_files.write_text(place, "two_rows.yaml", f"{rows}\n")
    validation = {"data.validation": recipes[0].data.validation} if recipes[0].data.validation else {}
    overrides = [*options.overrides, *varied_keys.overrides(validation)]
    request = ablation.AblationRequest(options.optimized, overrides, place / "two_rows.yaml", place)
    check_limits(ablation.run(request, quiet=options.quiet), options)


def check_comparable(options: argparse.Namespace, recipes: list[Recipe]) -> None:
    """Check both recipes as `finetune check` does, and check that their figures can be compared.

    Raises:
        UserError: all steps are warm-up, a recipe is wrong, or the figures can't be compared (exit 2). This
            machine can't run a recipe (exit 3).
    """
    if options.warm_up >= options.steps:
        found, expected = f"--steps {options.steps} --warm-up {options.warm_up}", "--warm-up below --steps"
        raise UserError(Problem("no step is measured", found=found, expected=expected, code="command-line"))
    for path, recipe in zip((options.baseline, options.optimized), recipes, strict=True):
        short = measured_run.length(options.steps, options.warm_up, recipe.adapter)
        checker.check_without_examples(load_recipe(path, [*options.overrides, *short]))
        choice_checks.pinned(recipe)
    before, after = (
        {
            "model": measured_run.model_of(recipe.model),
            "data": data_of(recipe),
            "checkpoints": measured_run.saves(recipe.train),
        }
        for recipe in recipes  # runs of the ablation save no checkpoint
    )
    if reasons := measured_run.not_comparable(before, after):
        where, fix = f"{options.baseline} and {options.optimized}", "override the keys of both with key=value"
        found = "; ".join(reasons)
        raise UserError(Problem("NOT COMPARABLE", where=where, found=found, fix=fix, code="experiment"))


def data_of(recipe: Recipe) -> str:
    """Return what identifies a recipe's training data: digests of local files, or the name of a dataset."""
    data = recipe.data.model_copy(update={"validation": None})
    return " ".join(kept_runs.contents(data).values()) or str(data.name)


def two_rows(options: argparse.Namespace, baseline: Recipe, optimized: Recipe) -> dict[str, Any]:
    """Return the ablation file: the baseline's values, and one optimization that undoes all of them.

    Raises:
        UserError: only the optimized recipe sets a key of `train`, so the baseline has no value (exit 2).
    """
    before, after = values_of(baseline), values_of(optimized)
    differing = [
        key for key in {**before, **after} if before.get(key) != after.get(key) and key not in SHARED
    ]
    other = {key: before.get(key) for key in differing if not key.startswith("eval.")}
    passed_on = {key for key in other if key.startswith("train.") and key[6:] not in Train.model_fields}
    if unset := [key for key in passed_on if other[key] is None]:
        what, fix = "only the optimized recipe sets this key", "set it here too"
        raise UserError(*(Problem(what, key, options.baseline, fix=fix, code="experiment") for key in unset))
    measure = {"steps": options.steps, "warm_up": options.warm_up, "repeats": options.repeats}
    measure |= {"held_out_rows": VALIDATION_EXAMPLES, "held_out_band": 1e9}  # `check_limits` has the limits
    measure |= {"validation_fraction": baseline.data.validation_fraction, "accelerate": options.accelerate}
    config, back = options.baseline_accelerate, dict.fromkeys(other, optimizations.OURS)
    row = {"name": "optimized", "kind": "optimized", "what": options.optimized, "gate": "held_out"}
    row |= {"set": back, "accelerate": optimizations.OURS if config else None}
    return {"measure": measure, "baseline": {"set": other, "accelerate": config}, "optimizations": [row]}


def values_of(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json", exclude={"publish": True})
    return {f"{section}.{key}": value for section, part in values.items() for key, value in part.items()}


def check_limits(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Check the figures of the ablation against the limits.

    Raises:
        UserError: the optimized recipe can't run, or its runs are NOT COMPARABLE (exit 2). A run failed, or a
            limit does not hold (exit 5).
    """
    (row,) = result["optimizations"]
    if row["status"] in ("refused", "NOT COMPARABLE", "error"):
        exit_code = Exit.TRAINING if row["status"] == "error" else Exit.INPUT
        what = f"{options.optimized}: {row['status']}"
        raise UserError(Problem(what, found=row["why"], code="experiment"), code=exit_code)
    sides = [result["baseline"], row["alone"]]
    screen = Console(quiet=options.quiet)
    hours = [1e9 / side["tokens_per_second"] / 3600 for side in sides]
    screen.say("", f"hours per billion tokens: {hours[0]:,.1f} -> {hours[1]:,.1f}")
    if options.price_per_hour is not None:
        devices = int(result["machine"]["processes"])
        cost = [side_hours * options.price_per_hour * devices for side_hours in hours]
        name = f"cost per billion tokens, {devices} x {options.price_per_hour:g} per hour"
        screen.say(f"{name}: {cost[0]:,.2f} -> {cost[1]:,.2f}")
    checks = compare(sides, options)
    rows = [(c.what, c.found, c.limit, "yes" if c.ok else "NO") for c in checks]
    screen.table("limits", ("figure", "measured", "limit", "holds"), rows)
    if broken := [check for check in checks if not check.ok]:
        problems = [
            Problem(f"{c.what} misses its limit", found=c.found, expected=c.limit, code="experiment")
            for c in broken
        ]
        raise UserError(*problems, code=Exit.TRAINING)


def compare(sides: list[dict[str, Any]], options: argparse.Namespace) -> list[Check]:
    """Compare both sides by each limit. Without a validation loss, compare the last training losses."""
    before, after = sides
    ratio = after["tokens_per_second"] / before["tokens_per_second"]
    least = f"at least {options.min_speedup:g} times"
    checks = [Check("speed-up", f"{ratio:.2f} times the tokens/s", least, ratio >= options.min_speedup)]
    limit, relative = options.max_loss_delta
    known = before["held_out"] is not None and after["held_out"] is not None
    losses = [side["held_out"] if known else last(side["losses"]) for side in sides]
    more = (losses[1] - losses[0]) / (losses[0] if relative else 1.0)
    shown, allowed = (f"{more:+.2%}", f"{limit:.2%}") if relative else (f"{more:+.4f}", f"{limit:g}")
    name = "validation loss" if known else "training loss, last quarter of the steps"
    found = f"{losses[0]:.4f} -> {losses[1]:.4f} ({shown})"
    checks.append(Check(name, found, f"at most {allowed} higher", more <= limit))
    if options.max_memory_gib is not None:
        peak, most = after["memory_gib"], options.max_memory_gib
        checks.append(Check("peak memory", f"{peak:.2f} GiB", f"at most {most:g} GiB", peak <= most))
    return checks


def last(losses: list[float]) -> float:
    """Return the mean loss of the last quarter of the steps."""
    return statistics.mean(losses[-max(1, len(losses) // 4) :])


def main(arguments: list[str] | None = None) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of both recipes")
    parser.add_argument("--baseline", required=True, metavar="RECIPE")
    parser.add_argument("--optimized", required=True, metavar="RECIPE")
    parser.add_argument(
        "--min-speedup", required=True, type=at_least_zero, metavar="X", help="ratio of tokens/s"
    )
    parser.add_argument(
        "--max-loss-delta",
        type=loss_delta,
        default="0.5%",
        help="how much higher the loss may be: 0.5%% (the default), or 0.001 nats per token",
    )
    parser.add_argument("--max-memory-gib", type=at_least_zero, metavar="X", help="per device")
    parser.add_argument("--price-per-hour", type=at_least_zero, metavar="X", help="per device")
    parser.add_argument("--accelerate", metavar="FILE", help="an accelerate config for both")
    parser.add_argument("--baseline-accelerate", metavar="FILE", help="another one for the baseline")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument(
        "--warm-up", type=at_least_one, default=5, help="steps that are not measured; default 5"
    )
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--output", default="results", metavar="DIR")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return guarded(validate, parser.parse_intermixed_args(arguments)).code


if __name__ == "__main__":
    sys.exit(main())
