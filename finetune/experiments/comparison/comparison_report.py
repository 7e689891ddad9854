"""Report a comparison from its run folders: a row for each type, the winner and the plot."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scipy.special import stdtr
from scipy.stats import studentized_range

from finetune.core import formatting, markdown, safe_files
from finetune.core.command_lines import command
from finetune.core.visible_text import visible
from finetune.core.weight_files import find_weight_files
from finetune.evaluation import verdicts
from finetune.evaluation.paired_differences import LEVEL
from finetune.experiments.runner import kept_runs
from finetune.reporting import plots
from finetune.run_folder import comparability
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.core.console import Console
    from finetune.recipe.schema import Recipe

MARK = "compare.json"  # file in a finished run's folder with values that the rest of the folder does not hold
RULE = (
    "keep the types that are not significantly worse than the best mean of {metric} (5%, Games-Howell test "
    "over seeds, Welch's t test for two types) or less than {least:g} worse; choose the type with the {cost} "
    "and its run with the median {metric}"
)
NOTES = (
    "± is the standard deviation over seeds. Training time is the number of steps times the median step. "
    "Memory on a GPU is the peak that PyTorch allocated. Memory on a CPU is the growth of the process until "
    "after a step. Forgetting is the change of the loss on general texts, in nats per token. Pareto-optimal: "
    "no other type is better both in quality and in this cost."
)
NOTHING = (
    "finetune can't rank the types: the runs have no validation set, or all their scores are NaN or Inf."
)


class Measure(NamedTuple):
    key: str
    label: str
    spread: bool = False
    """Whether the table shows the standard deviation. compare.json always holds it."""
    unit: float = 1.0
    """Divisor of the displayed value."""


MEASURES = (
    Measure("quality", "", spread=True),
    Measure("loss", "validation loss", spread=True),
    Measure("step_seconds", "s per step"),
    Measure("tokens_per_second", "tokens/s"),
    Measure("train_seconds", "training, s", spread=True),
    Measure("memory_gib", "GiB"),
    Measure("bytes", "saved, MB", unit=1e6),
    Measure("forgetting", "forgetting", spread=True),
)
WIDE = ("runs", "s per step", "tokens/s", "saved, MB")  # columns for wide terminals
GAP = 14  # space between plots, in units of the SVG
COSTS = {"train_seconds": "time", "memory_gib": "memory", "bytes": "size"}
AXES = {"train_seconds": "training, seconds", "memory_gib": "peak memory, GiB", "bytes": "saved, MB"}


def row(folder: RunFolder) -> dict[str, Any]:
    """Return the figures of one finished run. A figure that the run lacks is `None`."""
    lines, result = folder.measured_steps(), folder.found("eval.json")
    mark = {"host_memory_before_gib": 0.0, **folder.read(MARK, "mark")}
    steady = lines[1:] or lines  # the first step includes the warm-up of kernels and data loaders
    medians = {
        key: statistics.median(line[key] for line in steady) if steady else None
        for key in ("step_seconds", "tokens_per_second")
    }
    gpu = [line["gpu_memory_gib"] for line in lines if line["gpu_memory_gib"] is not None]
    host = max((line["host_memory_gib"] for line in lines), default=0.0) - mark["host_memory_before_gib"]
    steps = comparability.last_step(folder)
    kind, _, seed = folder.path.name.rpartition("-seed")
    metric, value, higher = main_metric(result)
    settings = result.get("settings", {})
    score, least = bool(higher) and value is not None and value <= 1, verdicts.smallest(settings)
    count = settings.get("rows") if metric == "exact match" else None
    general = result.get("tasks", {}).get("general_text", {}).get("difference", {}).get("loss")
    return {
        "run": folder.path.name,
        "type": kind,
        "seed": int(seed),
        "steps": steps,
        "metric": metric,
        "higher_is_better": higher,
        "quality": value,
        "resolution": 1 / count if score and count else 0.0,
        "least": least["score" if score else "loss"] if score or not higher else 0.0,
        "least_loss": least["loss"],
        "loss": result.get("tuned", {}).get("loss"),
        **medians,
        "train_seconds": steps * (medians["step_seconds"] or 0.0),
        "memory_gib": max(gpu) if gpu else max(host, 0.0),
        "bytes": sum(file.stat().st_size for file in find_weight_files(folder.weights, "")),
        "forgetting": general and general["value"],
        "whole_seconds": mark["seconds"],
    }


def main_metric(result: Mapping[str, Any]) -> tuple[str, float | None, bool]:
    """Return the metric for ranking: the first named task, else exact match, else validation loss."""
    for name, task in result.get("tasks", {}).items():
        # Subtasks of a group come before the group
        if task.get("asked", True) and not task.get("forgetting"):
            main = task.get("main")
            higher = bool(task.get("higher_is_better", {}).get(main))
            return f"{name} {main}", task.get("tuned", {}).get(main), higher
    tuned = result.get("tuned", {})
    if tuned.get("exact_match") is not None:
        return "exact match", tuned["exact_match"], True
    return "validation loss", tuned.get("loss"), False


def line(folder: RunFolder) -> str:
    """Summarize one run in a few words."""
    found = row(folder)
    said = [f"{found['metric']} {found['quality']:.3g}"] if found["quality"] is not None else []
    return ", ".join([*said, f"{found['steps']} steps of {found['step_seconds'] or 0:.3g} s"])


def collect(place: Path, settings: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    """Return the content of compare.json, from the finished runs."""
    timed = settings["budget_seconds"] is not None
    folders = [RunFolder(place / name) for name in settings["runs"] if (place / name / MARK).exists()]
    rows, strangers = [row(folder) for folder in folders], not_comparable(folders, not timed)
    ranked = [found for found in rows if found["run"] not in strangers]
    rank_level_runs_by_loss(ranked)
    types = {
        kind: entrant | averages([found for found in ranked if found["type"] == kind])
        for kind, entrant in settings["entrants"].items()
        if any(found["type"] == kind for found in ranked)
    }
    metric = ranked[0]["metric"] if ranked else ""
    higher = ranked[0]["higher_is_better"] if ranked else True
    return {
        **{key: settings[key] for key in ("recipe", "budget_seconds")},
        "metric": metric,
        "higher_is_better": higher,
        "types": types,
        "fronts": {key: front(types, key, higher) for key in COSTS},
        "winner": winner(types, ranked, metric, higher, timed),
        "runs": rows,
        "not_comparable": strangers,
        "failed": failed,
    }


def rank_level_runs_by_loss(rows: list[dict[str, Any]]) -> None:
    """Rank by validation loss if all runs have the same quality, such as no correct answer."""
    level = len(rows) > 1 and len({found["quality"] for found in rows}) == 1
    if level and all(found["loss"] is not None for found in rows):
        for found in rows:
            found |= {"metric": "validation loss", "quality": found["loss"], "higher_is_better": False}
            found |= {"resolution": 0.0, "least": found["least_loss"]}


def averages(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of each measure. One seed has no deviation."""
    found: dict[str, Any] = {"runs": len(rows), "steps": rows[0]["steps"]}
    for measure in MEASURES:
        values = [row[measure.key] for row in rows if row[measure.key] is not None]
        spread = None
        if len(values) > 1:  # `statistics` does not accept NaN or Inf
            spread = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
        mean = {"mean": statistics.mean(values), "sd": spread, "runs": len(values)} if values else None
        found[measure.key] = mean
    if found["quality"]:
        found["quality"] |= {key: max(row.get(key, 0.0) for row in rows) for key in ("resolution", "least")}
    return found


def not_comparable(folders: list[RunFolder], steps: bool) -> dict[str, list[str]]:
    """Return the runs that differ from the majority in a fact that must be equal, with the reasons."""
    seen = [repr({k: v for k, v in comparability.facts(f).items() if steps or k != "steps"}) for f in folders]
    usual = folders[seen.index(Counter(seen).most_common(1)[0][0])] if folders else None
    found = {f.path.name: comparability.obstacles(f, usual, steps=steps) for f in folders if usual}
    return {name: reasons for name, reasons in found.items() if reasons}


def ranks(quality: dict[str, Any] | None) -> bool:
    """Return whether the quality is known and finite, so that the type can be ranked."""
    return quality is not None and math.isfinite(quality["mean"])


def front(types: dict[str, Any], cost: str, higher: bool) -> list[str]:
    """Return the types that are Pareto-optimal in mean quality and mean cost."""
    known = {
        kind: (-found["quality"]["mean"] if higher else found["quality"]["mean"], found[cost]["mean"])
        for kind, found in types.items()
        if ranks(found["quality"]) and found[cost]
    }

    def beaten(kind: str) -> bool:
        own = known[kind]
        return any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in known.values())

    return [kind for kind in known if not beaten(kind)]


def winner(
    types: dict[str, Any], rows: list[dict[str, Any]], metric: str, higher: bool, same_time: bool
) -> dict[str, Any] | None:
    """Return the winning type, its representative run, and the evidence."""
    known = {kind: found["quality"] for kind, found in types.items() if ranks(found["quality"])}
    if not known:
        return None
    sign = 1 if higher else -1
    best = max(known, key=lambda kind: sign * known[kind]["mean"])

    least = max(found.get("least", 0.0) for found in known.values())

    def within(kind: str) -> bool:
        apart = abs(known[best]["mean"] - known[kind]["mean"])
        if kind == best or apart < least:
            return True
        if known[best]["sd"] is None or known[kind]["sd"] is None:  # a single run; `verdict` says so
            return apart == 0
        return chance(known[best], known[kind], len(known)) > LEVEL

    tied = [kind for kind in known if within(kind)]
    costs = ("memory_gib", "bytes") if same_time else ("train_seconds", "memory_gib")
    chosen = min(tied, key=lambda kind: [types[kind][cost]["mean"] for cost in costs])
    own = [row for row in rows if row["type"] == chosen and row["quality"] is not None]
    own.sort(key=lambda row: sign * row["quality"])
    run = own[(len(own) - 1) // 2]  # the best seed's run would look better than its type
    cost = "least memory" if same_time else "shortest training"
    return {
        "type": chosen,
        "seed": run["seed"],
        "run": run["run"],
        "rule": RULE.format(metric=metric, cost=cost, least=least),
        "within_noise": tied,
        "why": verdict(known, best, chosen, tied, metric, cost),
    }


def chance(one: dict[str, Any], other: dict[str, Any], types: int) -> float:
    """Return the p-value for the difference of two means under the Games-Howell test.

    For two types this is Welch's t test. For more types it accounts for all pairs. If seeds agree to the last
    answer, their spread is too low, because scores change in steps of one example. One step is the lower
    bound of the spread.
    """
    spreads = [max(side["sd"], side.get("resolution", 0.0)) for side in (one, other)]
    if not any(spreads):
        return float(one["mean"] == other["mean"])
    errors = [spread**2 / side["runs"] for spread, side in zip(spreads, (one, other), strict=True)]
    shares = [error**2 / (side["runs"] - 1) for error, side in zip(errors, (one, other), strict=True)]
    t, freedom = abs(one["mean"] - other["mean"]) / math.sqrt(sum(errors)), sum(errors) ** 2 / sum(shares)
    if types == 2:
        return float(2 * stdtr(freedom, -t))
    return float(studentized_range.sf(math.sqrt(2) * t, types, freedom))


def verdict(known: dict[str, Any], best: str, chosen: str, tied: list[str], metric: str, cost: str) -> str:
    """Explain the win in one sentence that does not claim more than the seeds show."""

    def of(kind: str) -> str:
        return f"{kind} {plus_minus(known[kind], MEASURES[0])}"

    def gap(kind: str) -> float:
        return abs(known[kind]["mean"] - known[best]["mean"])

    if len(known) == 1:
        return f"{chosen} is the only type with a result: {metric} {of(best)}"
    if any(found["sd"] is None for found in known.values()):
        return f"{chosen} has the best {metric}: {of(best)}. One run per type does not show the seed noise"
    if len(tied) > 1 and chosen == best:
        others = ", ".join(of(kind) for kind in tied if kind != best)
        rest = f"It also has the {cost} of the types without a significant difference: {others}"
        return f"{chosen} has the best {metric}: {of(best)}. {rest}"
    if len(tied) > 1:
        others = ", ".join(of(kind) for kind in tied if kind != best)
        near = f"These types have no significant difference from the best {metric}, {of(best)}: {others}"
        return f"{chosen} wins by the {cost}. {near}"
    following = of(min((kind for kind in known if kind != best), key=gap))
    return f"{chosen} wins with {metric} {of(best)}. The next type, {following}, is significantly worse"


def plus_minus(found: dict[str, Any] | None, measure: Measure) -> str:
    """Format the mean and, if there is one, the standard deviation."""
    if found is None:
        return "-"
    text, spread = formatting.figure(found["mean"] / measure.unit), found["sd"]
    if spread is None or not measure.spread:
        return text
    return f"{text}±{formatting.figure(spread / measure.unit, 2)}"


def cells(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table, with the best type first. Columns without values are skipped."""
    metric, higher, types = found["metric"], found["higher_is_better"], found["types"]
    shown = [MEASURES[0]._replace(label=metric), *(m for m in MEASURES[1:] if m.label != metric)]
    shown = [m for m in shown if any(values[m.key] for values in types.values())]

    def order(kind: str) -> float:
        mean = (types[kind]["quality"] or {"mean": math.nan})["mean"]
        return math.inf if math.isnan(mean) else -mean if higher else mean

    rows = []
    for kind in sorted(types, key=order):
        values = types[kind]
        unbeaten = [name for key, name in COSTS.items() if kind in found["fronts"][key]]
        rows.append([kind, f"{values['rate']:g}", f"{values['runs']} x {values['steps']}"])
        rows[-1] += [*(plus_minus(values[m.key], m) for m in shown), " ".join(unbeaten)]
    return ["type", "rate", "runs", *(m.label for m in shown), "Pareto-optimal in"], rows


def remarks(found: dict[str, Any]) -> list[str]:
    """Return the remarks under the table: the winner, failed runs, and runs that are not comparable."""
    won = found["winner"]
    said = [f"{won['why']}."] if won else [NOTHING]
    said += [f"{name} FAILED: {reason}" for name, reason in found["failed"].items()]
    for name, reasons in found["not_comparable"].items():
        said.append(f"{name} is NOT COMPARABLE, so the table excludes it: {'; '.join(reasons)}")
    return said


def write(place: Path, settings: dict[str, Any], failed: dict[str, str]) -> None:
    """Write compare.json and compare.md for the finished runs."""
    found = collect(place, settings, failed)
    RunFolder(place).write("compare.json", found)
    header, rows = cells(found)
    of = markdown.plain(Path(found["recipe"]).name)
    parts = [f"# {', '.join(found['types']) or 'No finished run'}: {of}"]
    parts += [*map(markdown.plain, remarks(found)), markdown.table(header, rows), NOTES]
    if found["winner"]:
        picture = "![Quality against time, memory and size](compare.svg)"
        parts += [picture, f"Rule for the winner: {found['winner']['rule']}."]
    safe_files.write_text(place, "compare.md", "\n\n".join(parts) + "\n")


def show(place: Path, found: dict[str, Any], recipes: Mapping[str, Recipe], screen: Console) -> None:
    """Print the table, and write compare.svg and best.yaml."""
    header, rows = cells(found)
    screen.table(f"{len(found['runs'])} runs", header, rows, wide=WIDE)
    screen.say("", *remarks(found), "")
    won = found["winner"]
    if won:
        safe_files.write_text(place, "compare.svg", picture(found))
        best = kept_runs.recipe_file(recipes[won["run"]], {}, f"# {visible(won['why'])}.\n")
        safe_files.write_text(place, "best.yaml", best)
        screen.say(
            f"rule for the winner: {won['rule']}", f"table and plot: {place}/compare.md, {place}/compare.svg"
        )
        screen.say(f"next: {command('train', str(place / 'best.yaml'))}")


def picture(found: dict[str, Any]) -> str:
    """Plot quality against time, memory and size in one SVG."""
    types = {kind: values for kind, values in found["types"].items() if ranks(values["quality"])}
    drawn = []
    for key, label in AXES.items():
        unit = next(m.unit for m in MEASURES if m.key == key)
        points = [
            plots.Point(
                kind, values[key]["mean"] / unit, (values[key]["sd"] or 0) / unit, q["mean"], q["sd"] or 0
            )
            for kind, values in types.items()
            for q in [values["quality"]]
        ]
        drawn.append(plots.scatter(points, label, found["metric"], front=found["fronts"][key]))
    return side_by_side(drawn)


def side_by_side(drawn: list[str]) -> str:
    """Combine SVGs of equal size into one row."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn[0])
    width, height = map(float, found.groups()) if found else (360.0, 223.2)
    apart = width + GAP
    inner = [
        svg.replace(
            "<svg ",
            f'<svg x="{index * apart:g}" overflow="visible" width="{width:g}" height="{height:g}" ',
            1,
        )
        for index, svg in enumerate(drawn)
    ]
    size = f'viewBox="-4 0 {apart * len(drawn):g} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{"".join(inner)}</svg>\n'
