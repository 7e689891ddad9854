"""Report an ablation: terminal table, markdown, plot, HTML page and best recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.autoconfig import mixed_precision
from finetune.core import formatting, html_pages, safe_files, shipped_files
from finetune.core.command_lines import command
from finetune.core.console import Console
from finetune.core.markdown import code, plain, table
from finetune.core.visible_text import visible
from finetune.experiments.ablation.verdict import described_cost
from finetune.experiments.runner import kept_runs, measured_run
from finetune.hardware.detection import Hardware
from finetune.recipe.schema import Recipe
from finetune.reporting import plots

ALONE, STACKED = "speed alone, ratio", "speed stacked, ratio"
MFU, TRAINING_LOSS, FIRST_STEP = "MFU", "training loss, nats", "first step, s"
LEGEND = (
    "Speed ratios: alone, the baseline is 1; stacked, the stack before is 1. ± is the noise. "
    "Losses are in nats per token."
)
PAGE = Path(__file__).with_name("ablation.html.jinja")
LAUNCH = "launch.yaml"  # next to best.yaml
NOTES = (
    "Speed alone: the speed of one optimization divided by the speed of the baseline, or of the "
    "optimizations that it builds on. Speed stacked: its speed divided by the speed of the stack before "
    "it, from interleaved runs. Tokens exclude padding. The speed of a run is the median of its steps "
    "after the warm-up. The speed of an optimization is the median of its runs. One run is enough if the "
    "difference is clear. Memory is the peak of the allocator, or on a CPU the size of the process after "
    "a step. The training loss is the mean of the last two steps. Losses are in nats per token. The "
    "change of the validation loss is from the baseline, on the same examples. A gain counts if it "
    "exceeds twice its standard error. The spread of repeated runs, pooled over all variants, gives the "
    "standard error. `loss_band` limits the distance between two loss curves. On a CPU that is busy with "
    "other work, speed is tokens per CPU second."
)


def header(found: dict[str, Any]) -> list[str]:
    unit = measured_run.UNITS[found["rate"]]
    speeds = (ALONE, f"{unit} alone", STACKED, f"{unit} stacked")
    losses = (TRAINING_LOSS, "validation loss, nats", "loss change (95% CI)")
    return ["optimization", *speeds, "memory, GiB", MFU, *losses, FIRST_STEP, "verdict"]


def cells(found: dict[str, Any]) -> list[list[str]]:
    """Return the table: the baseline, the measured optimizations, the whole stack, and the user's recipe."""
    rate, base = found["rate"], found["baseline"]
    rows = [["baseline", "1.00", f"{base[rate]:,.0f}", "", "", *_rest(base), ""]]
    for row in found["optimizations"]:
        alone, stacked = row.get("alone", {}), row.get("stacked", {})
        shown = stacked if "speedup" in stacked else alone
        if "speedup" in shown:
            gains = [*_gain(alone, rate), *_gain(stacked, rate)]
            rows.append([row["name"], *gains, *_rest(shown), row["status"]])
    for name, whole in (("whole stack", found["stack"]), ("your recipe", found["as_is"])):
        if whole:
            figures = [f"{whole[rate] / base[rate]:.2f}", f"{whole[rate]:,.0f}"]
            rows.append([name, *figures, "", "", *_rest(whole), ""])
    return rows


def _gain(found: dict[str, Any], rate: str) -> list[str]:
    if "speedup" not in found:
        return ["-", "-"]
    return [f"{found['speedup']:.2f} ±{found['noise']:.2f}", f"{found[rate]:,.0f}"]


def _rest(found: dict[str, Any]) -> list[str]:
    mfu, held_out = found["mfu"], found["held_out"]
    return [
        formatting.amount(found["memory_gib"]),
        "-" if mfu is None else formatting.percent(mfu),
        formatting.figure(found["loss"]),
        formatting.figure(held_out),
        _cost(found),
        formatting.amount(found["first_step_seconds"]),
    ]


def _cost(found: dict[str, Any]) -> str:
    """Return the increase of the validation loss over the baseline. Older results have no interval."""
    if "loss_cost" in found:
        return described_cost(found["loss_cost"])
    return f"{found['worse_held_out']:+.1%}" if "worse_held_out" in found else "-"


def reasons(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return every optimization with its status and the reason."""
    return [(row["name"], row["status"], row["why"]) for row in found["optimizations"]]


def headline(found: dict[str, Any]) -> str:
    """Summarize the result of the ablation in one sentence."""
    stack, base, rate, own = found["stack"], found["baseline"], found["rate"], found["as_is"]
    optimizations, unit = " + ".join(stack["optimizations"]) or "no optimization", measured_run.UNITS[rate]
    plain = f"{found['speedup']:.2f} times the speed of the baseline"
    if not own:
        speeds = f"{base[rate]:,.0f} -> {stack[rate]:,.0f} {unit}"
        return f"{optimizations}: {plain} ({speeds}); the run of your recipe failed"
    slower = ""
    if stack[rate] < own[rate]:
        slower = "; your recipe is faster, so best.yaml changes only settings that helped or hurt"
    return (
        f"{optimizations}: {stack[rate] / own[rate]:.2f} times the speed of your recipe ({own[rate]:,.0f} -> "
        f"{stack[rate]:,.0f} {unit}), {own['memory_gib']:.2f} -> {stack['memory_gib']:.2f} GiB; "
        f"{plain}{slower}"
    )


def markdown(found: dict[str, Any]) -> str:
    """Return the content of ablation.md."""
    units = {**measured_run.UNITS, "memory_gib": "memory"}
    known = {units[figure]: noise for figure, noise in found["noise"].items() if noise is not None}
    noise = ", ".join(f"{value:.1%} of {unit}" for unit, value in known.items()) or "not known"
    hardware, measure = found["machine"]["hardware"], found["measure"]
    said = (
        f"{code(found['command'])}, {found['date']}: {hardware}, "
        f"OMP_NUM_THREADS {found['machine']['threads']}, torch {found['machine']['torch']}. "
        f"{measure['steps']} steps per run, of which {measure['warm_up']} are warm-up; "
        f"{measure['repeats']} runs per variant; noise of one run: {noise}; "
        f"total time {found['seconds']:.0f} s."
    )
    why = "\n".join(plain(f"- {name} {status}: {text}") for name, status, text in reasons(found))
    title, scores = plain(Path(found["recipe"]).name), table(header(found), cells(found))
    parts = [f"# Ablation of {title}", f"{headline(found)}.", said, scores]
    return "\n\n".join([*parts, "![The ablation](ablation.svg)", why, NOTES]) + "\n"


def picture(found: dict[str, Any]) -> str:
    """Plot the gain of each optimization alone, and the growing stack, relative to the baseline's speed."""
    rate = found["rate"]
    base = found["baseline"][rate]
    bars = [plots.Bar("baseline", [1.0, 1.0], [0.0, 0.0])]
    for row in found["optimizations"]:
        alone, stacked = row.get("alone", {}), row.get("stacked", {})
        if "speedup" in alone:
            ratios = [one[rate] / base if "speedup" in one else None for one in (alone, stacked)]
            spread = [alone["noise"], stacked.get("noise", 0.0) * (ratios[1] or 0.0)]
            name = row["name"] if row["status"] == "kept" else f"{row['name']} ({row['status']})"
            bars.append(plots.Bar(name, ratios, spread))
    return plots.bars(
        bars, ("alone", "on the stack so far"), f"{measured_run.UNITS[rate]}, relative to the baseline"
    )


def page(found: dict[str, Any]) -> str:
    """Return one self-contained HTML page."""
    stack, base, rate = found["stack"], found["as_is"] or found["baseline"], found["rate"]
    figures = [
        (f"speed / {'your recipe' if found['as_is'] else 'baseline'}", f"{stack[rate] / base[rate]:.2f}"),
        (measured_run.UNITS[found["rate"]], f"{stack[found['rate']]:,.0f}"),
        ("memory, GiB", f"{base['memory_gib']:.2f} → {stack['memory_gib']:.2f}"),
        (
            "training loss, nats per token",
            f"{formatting.figure(base['loss'])} → {formatting.figure(stack['loss'])}",
        ),
    ]
    machine = ", ".join(
        f"{name} {found['machine'][name]}" for name in ("hardware", "threads", "torch", "transformers")
    )
    return (
        html_pages.templates(PAGE.parent)
        .get_template(PAGE.name)
        .render(
            title=f"Ablation of {Path(found['recipe']).name}",
            machine=machine,
            headlines=figures,
            picture=picture(found),
            header=header(found),
            rows=cells(found),
            reasons=reasons(found),
            notes=NOTES,
            command=found["command"],
        )
    )


def write(place: Path, found: dict[str, Any], machine: Hardware) -> None:
    """Write ablation.md, ablation.svg and ablation.html, and launch.yaml if best.yaml needs it."""
    safe_files.remove(place, LAUNCH)
    if launched := launch_config(found, machine):
        safe_files.write_text(place, LAUNCH, launched)
    for name, text in (("md", markdown(found)), ("svg", picture(found)), ("html", page(found))):
        safe_files.write_text(place, f"ablation.{name}", text)


def launch_config(found: dict[str, Any], machine: Hardware) -> str:
    """Return an Accelerate config with the precision that was measured.

    A recipe does not hold the precision. The string is empty if a plain `finetune train` uses the same
    precision.
    """
    precision = found["stack"]["mixed_precision"]
    if not precision or precision == mixed_precision.default_precision(machine).value:
        return ""
    name = "cpu" if machine.device == "cpu" else "single_gpu"
    shelf = shipped_files.folder("accelerate_configs") / f"{name}.yaml"
    return re.sub(
        r"(?m)^mixed_precision:.*$",
        f'mixed_precision: "{precision}" # as measured',
        shelf.read_text(encoding="utf-8"),
    )


def show(screen: Console, found: dict[str, Any], place: Path) -> None:
    unit = measured_run.UNITS[found["rate"]]
    wide = (f"{unit} alone", f"{unit} stacked", MFU, TRAINING_LOSS, FIRST_STEP)
    screen.table(f"ablation of {found['recipe']}", header(found), cells(found), wide=wide)
    screen.say(LEGEND)
    screen.table("status of each optimization", ("optimization", "status", "why"), reasons(found))
    screen.say(
        "", f"{headline(found)}.", f"wrote {place}/ablation.md, ablation.svg, ablation.html, best.yaml"
    )
    given = ["--accelerate", str(place / LAUNCH)] if (place / LAUNCH).exists() else []
    screen.say(f"next: {command('train', str(place / 'best.yaml'), *given)}")


def best(recipe: Recipe, found: dict[str, Any]) -> str:
    """Return the recipe with the optimizations that helped. A comment gives the source of each value."""
    chosen = dict[str, tuple[Any, str]]()
    for key, why in found["sources"].items():
        section, _, name = key.partition(".")
        value = getattr(getattr(recipe, section), name, None)
        who = recipe.origin.set_by.get(key, "default")
        chosen[key] = (value, f"ablation: {why}" if who == "override" else f"{who}; ablation: {why}")
    precision = found["stack"]["mixed_precision"]
    made = f"{found['command']}, {found['date']}, {found['machine']['hardware']}"
    top = f"# {visible(headline(found))}.\n# {visible(made)}.\n"
    top += (
        f"# The launch sets the precision. The ablation measured mixed_precision: {precision}.\n"
        if precision
        else ""
    )
    return kept_runs.recipe_file(recipe, chosen, top)
