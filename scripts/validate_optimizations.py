"""Does an optimized recipe keep its promise? A `finetune ablate` of two rows.

    python scripts/validate_optimizations.py --baseline recipes/baselines/llama3_8b.yaml \\
        --optimized recipes/gpus/80gb_fastest.yaml --min-speedup 3 --max-loss-delta 0.5%

Several GPUs: --accelerate ddp_4 (a shipped config, or a file) launches both. A word with `=` overrides a key
of both recipes. Finished runs are kept: the same command resumes. DIR/ab/<baseline>-against-<optimized>/ has
the runs, and the ablation's table, picture and page.

A loss may be lower than the baseline's by any amount, and higher by --max-loss-delta. Models, data and
checkpoint frequencies of both recipes, and machine, packages and training data of every run, have to be the
same: else they are NOT COMPARABLE.

Exit codes: 0 every limit holds; 5 one does not, or a run failed; 2 a recipe or an argument is wrong, or what
is there is NOT COMPARABLE; 3 this machine lacks what a recipe asks for; 75 stopped by a signal.
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
from finetune.experiments.runner import measured_run, varied_keys
from finetune.preflight import checker, choice_checks
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Recipe, Train
from finetune.run_folder import run_folder

HELD_OUT_ROWS = 64
SHARED = {*measured_run.ALIKE, *optimizations.MEASURED}  # keys that all runs have in common
SHARED |= {"model.name", "model.revision", "data.validation", "train.output_dir"}
SHARED |= {"train.save_steps", "train.seed"}


class Check(NamedTuple):
    what: str
    found: str
    limit: str
    ok: bool


def loss_delta(text: str) -> tuple[float, bool]:
    """0.5%, of the baseline's loss; or 0.001, nats a token."""
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
    asked = ablation.AblationRequest(options.optimized, overrides, place / "two_rows.yaml", place)
    judge(ablation.run(asked, quiet=options.quiet), options)


def check_comparable(options: argparse.Namespace, recipes: list[Recipe]) -> None:
    """Refuse a recipe that `finetune check` refuses, and two recipes whose figures cannot be compared.

    Raises:
        UserError: all steps are warm-up; a recipe is wrong (2, or 3 as `finetune check`).
    """
    if options.warm_up >= options.steps:
        found, expected = f"--steps {options.steps} --warm-up {options.warm_up}", "--warm-up below --steps"
        raise UserError(Problem("no step would count", found=found, expected=expected))
    for path, recipe in zip((options.baseline, options.optimized), recipes, strict=True):
        short = measured_run.length(options.steps, options.warm_up, recipe.adapter)
        checker.run(load_recipe(path, [*options.overrides, *short]))
        choice_checks.pinned(recipe)
    before, after = (
        {
            "model": measured_run.model_of(one.model),
            "data": data_of(one),
            "checkpoints": measured_run.saves(one.train),
        }
        for one in recipes  # runs of the ablation save no checkpoint
    )
    if reasons := measured_run.not_comparable(before, after):
        where, fix = f"{options.baseline} and {options.optimized}", "key=value, which is for both"
        raise UserError(Problem("NOT COMPARABLE", where=where, found="; ".join(reasons), fix=fix))


def data_of(recipe: Recipe) -> str:
    """The training data of a recipe: the content of local files, or the name of a dataset."""
    data = recipe.data.model_copy(update={"validation": None})
    return " ".join(measured_run.contents(data)) or str(data.name)


def two_rows(options: argparse.Namespace, baseline: Recipe, optimized: Recipe) -> dict[str, Any]:
    """The ablation file: the baseline's values, and one row that takes all of them away again.

    Raises:
        UserError: only the optimized recipe states a key of `train`, so the baseline has no value for it.
    """
    before, after = values_of(baseline), values_of(optimized)
    differing = [
        key for key in {**before, **after} if before.get(key) != after.get(key) and key not in SHARED
    ]
    other = {key: before.get(key) for key in differing if not key.startswith("eval.")}
    passed_on = {key for key in other if key.startswith("train.") and key[6:] not in Train.model_fields}
    if unset := [key for key in passed_on if other[key] is None]:
        what = "only the optimized recipe states this key"
        raise UserError(*(Problem(what, key, options.baseline, fix="state it here too") for key in unset))
    measure = {"steps": options.steps, "warm_up": options.warm_up, "repeats": options.repeats}
    measure |= {"held_out_rows": HELD_OUT_ROWS, "held_out_band": 1e9}  # `judge` has the limits
    measure |= {"validation_fraction": baseline.data.validation_fraction, "accelerate": options.accelerate}
    config, back = options.baseline_accelerate, dict.fromkeys(other, optimizations.OURS)
    row = {"name": "optimized", "kind": "optimized", "what": options.optimized, "gate": "held_out"}
    row |= {"set": back, "accelerate": optimizations.OURS if config else None}
    return {"measure": measure, "baseline": {"set": other, "accelerate": config}, "optimizations": [row]}


def values_of(recipe: Recipe) -> dict[str, Any]:
    values = recipe.model_dump(mode="json", exclude={"publish": True})
    return {f"{section}.{key}": value for section, part in values.items() for key, value in part.items()}


def judge(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Check the limits on the figures of the ablation.

    Raises:
        UserError: the optimized recipe is refused, or its runs are NOT COMPARABLE (2). A run failed, or a
            limit does not hold (5).
    """
    (row,) = found["optimizations"]
    if row["status"] in ("refused", "NOT COMPARABLE", "error"):
        code = Exit.TRAINING if row["status"] == "error" else Exit.INPUT
        raise UserError(Problem(f"{options.optimized}: {row['status']}", found=row["why"]), code=code)
    sides = [found["baseline"], row["alone"]]
    screen = Console(quiet=options.quiet)
    hours = [1e9 / side["tokens_per_second"] / 3600 for side in sides]
    screen.say("", f"hours for a billion tokens: {hours[0]:,.1f} -> {hours[1]:,.1f}")
    if options.price_per_hour is not None:
        devices = int(found["machine"]["processes"])
        cost = [one * options.price_per_hour * devices for one in hours]
        name = f"cost of that, {devices} x {options.price_per_hour:g} an hour"
        screen.say(f"{name}: {cost[0]:,.2f} -> {cost[1]:,.2f}")
    checks = compare(sides, options)
    rows = [(c.what, c.found, c.limit, "holds" if c.ok else "DOES NOT HOLD") for c in checks]
    screen.table("limits", ("what", "found", "limit", ""), rows)
    if broken := [check for check in checks if not check.ok]:
        said = [Problem(f"{c.what} does not hold", found=c.found, expected=c.limit) for c in broken]
        raise UserError(*said, code=Exit.TRAINING)


def compare(sides: list[dict[str, Any]], options: argparse.Namespace) -> list[Check]:
    """Compare both sides by each limit. The loss is the validation loss, or else that of the last steps."""
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
    """The mean loss of the last quarter of the steps."""
    return statistics.mean(losses[-max(1, len(losses) // 4) :])


def main(given: list[str] | None = None) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both recipes")
    parser.add_argument("--baseline", required=True, metavar="RECIPE")
    parser.add_argument("--optimized", required=True, metavar="RECIPE")
    parser.add_argument("--min-speedup", required=True, type=at_least_zero, metavar="X", help="of tokens/s")
    parser.add_argument(
        "--max-loss-delta", type=loss_delta, default="0.5%", help="higher: 0.5%% (the default), or 0.001"
    )
    parser.add_argument("--max-memory-gib", type=at_least_zero, metavar="X", help="of one device")
    parser.add_argument("--price-per-hour", type=at_least_zero, metavar="X", help="of one device")
    parser.add_argument("--accelerate", metavar="FILE", help="an accelerate config for both")
    parser.add_argument("--baseline-accelerate", metavar="FILE", help="another one for the baseline")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--warm-up", type=at_least_one, default=5, help="steps that do not count: 5")
    parser.add_argument("--repeats", type=at_least_one, default=3)
    parser.add_argument("--output", default="results", metavar="DIR")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return guarded(validate, parser.parse_intermixed_args(given)).code


if __name__ == "__main__":
    sys.exit(main())
