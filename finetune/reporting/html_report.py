"""Write one page about a run: the result, the process and the run checks (`finetune report RUN`).

It reads only the run folder, complete or not. The same run gives the same bytes.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import html_pages, safe_files
from finetune.core.console import Console
from finetune.core.formatting import duration, figure, percent, precision
from finetune.core.paths import writing
from finetune.core.privacy import masked
from finetune.core.visible_text import CONTINUED, visible_lines
from finetune.data import preview
from finetune.distributed import recorded_variables
from finetune.evaluation import verdicts
from finetune.recipe import adapter_types
from finetune.reporting import exports, run_files, scores
from finetune.reporting.plots import Curve, curves, smoothed
from finetune.reporting.scores import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.reporting.run_files import Run

REPORT = Path(__file__).with_name("report.html.jinja")
CHARTS = (  # key in metrics.jsonl, name with unit, whether the axis starts at zero, caption
    ("learning_rate", "learning rate", True, "Highest learning rate: {most}"),
    ("grad_norm", "gradient norm (L2)", False, "Median gradient norm: {median}"),
    ("tokens_per_second", "tokens/s", True, "Median speed: {median} tokens/s"),
    ("mfu", "model FLOPs utilization (MFU), %", True, "Median MFU: {median}%"),
    ("gpu_memory_gib", "GPU memory, GiB", True, "Peak GPU memory: {most} GiB"),
    ("host_memory_gib", "CPU memory, GiB", True, "Peak CPU memory: {most} GiB"),
    ("data_wait", "time spent waiting for data, % of a step", True, "Median wait: {median}% of a step"),
)
IN_PERCENT = ("mfu", "data_wait")


def run(path: str | Path, output: str | Path | None = None) -> tuple[Path, Verdict]:
    """Write the page of a run.

    Args:
        output: path of the page. `None` means report.html in the run folder.

    Raises:
        UserError: `path` is not a run folder, or `output` cannot be written (exit 2).
    """
    found = run_files.read(Path(path))
    verdict = judge(found)
    page, target = render(found, verdict), Path(output or found.path / "report.html")
    with writing(target):
        safe_files.write_text(target.parent, target.name, masked(page))
    return target, verdict


def show(page: Path, verdict: Verdict, *, quiet: bool) -> None:
    first, *more = f"{verdict.title}. {verdict.why}".split("\n")
    said = [f"{CONTINUED}{line}" for line in more]  # lines from the run's log
    Console(quiet=quiet).say(first, *said, *verdict.doubts, f"wrote {page}")


def after(path: Path, screen: Console) -> None:
    """Write the page at the end of a run. An error here gives a note and does not make the run fail."""
    try:
        run(path)
    except Exception as error:  # the run itself is finished, so report any error and continue
        said = " ".join(str(error).split())
        text = f"finetune can't write report.html ({type(error).__name__}: {said})"
        screen.say(f"warning: {text}; try: finetune report {path}")


def judge(run: Run) -> Verdict:
    """Return the verdict on a run, and the doubts about it."""
    failed = sum(not check["passed"] for check in run.run_checks)
    if not run.saved:
        return _unfinished(run)
    held_out = run.data["validation"].kept if run.data else None
    verdict = scores.judge(run.evaluation, held_out, training_loss(run))
    doubts = [f"{failed} of {len(run.run_checks)} run checks failed"] if failed else []
    kind = "mixed" if failed and verdict.kind == "good" else verdict.kind
    return verdict._replace(kind=kind, doubts=[*verdict.doubts, *doubts])


def _unfinished(run: Run) -> Verdict:
    """Return how far a run without weights came. A checkpoint can be newer than the last logged step."""
    last = max(run.steps[-1]["step"] if run.steps else 0, run.kept)
    ended = f"The run ended after step {last:,.0f}." if last else "The run logged no step."
    if run.kept:
        ended += f" To continue from the checkpoint of step {run.kept:,}, add --resume to the same command."
    failed = f"The run failed and saved {'only checkpoints' if run.kept else 'no weights'}"
    title = failed if run.error else "The run is not finished"
    return Verdict("bad" if run.error else "unknown", title, f"{ended}\n{run.error}".strip(), [])


def training_loss(run: Run) -> tuple[float, float] | None:
    """Return the training loss at the start and at the end, as means of a twentieth of the logged steps."""
    losses = [step["loss"] for step in run.steps if step["loss"] is not None]
    part = max(1, len(losses) // 20)
    return (sum(losses[:part]) / part, sum(losses[-part:]) / part) if losses else None


def seconds(run: Run) -> float:
    """Return the total time in optimizer steps. Each logged line holds the mean since the previous line."""
    before, total = 0.0, 0.0
    for step in run.steps:
        total += (step.get("step_seconds") or 0.0) * (step["step"] - before)
        before = step["step"]
    return total


def summary(run: Run) -> str:
    """Summarize model, data, duration and hardware in one sentence."""
    kind = run.get("adapter.type")
    options = f" (r {run.get('adapter.r')})" if run.get("adapter.r") else ""
    what = "Full fine-tuning" if kind == "full" else f"{kind}{options}" if kind else "Unknown adapter"
    model = "/".join(Path(str(run.get("model.name", "an unknown base model"))).parts[-2:])
    said = [f"{what} on {model}"]
    if run.data:
        rows = run.data["train"].kept
        names = ", ".join(Path(str(name)).name for name in run.data["train"].formats) or "a stream"
        said.append(f"trained on {rows:,} examples of {names}" if rows else f"trained on {names}")
    if run.steps:
        epochs = run.steps[-1].get("epoch")
        passes = f" ({epochs:.3g} epoch{'s' * (epochs != 1)})" if epochs else ""
        said.append(f"for {run.steps[-1]['step']:,.0f} steps{passes} in {duration(seconds(run))}")
    device = run.environment.get("hardware", {})
    if device:
        count = f"{device['count']} x " if device.get("count", 1) > 1 else ""
        said.append(f"on {count}{device.get('name', 'unknown hardware')}")
    return " ".join(said[:1]) + ", " + " ".join(said[1:]) + "." if said[1:] else said[0] + "."


def headlines(run: Run) -> list[tuple[str, str, str]]:
    """Return the few figures that are shown large, as (name, value, text below the value)."""
    found = scores.headlines(run.evaluation)
    if run.steps:
        found.append(("training time", duration(seconds(run)), ""))
    if run.run_checks:
        ok = sum(bool(check["passed"]) for check in run.run_checks)
        same = "all settings ran as planned" if ok == len(run.run_checks) else "the run differs from the plan"
        found.append(("run checks passed", f"{ok} of {len(run.run_checks)}", same))
    return found


def charts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the plots of a run, each with its caption."""
    if run.steps:
        yield _loss_chart(run)
    for key, name, zero, said in CHARTS:
        scale = 100 if key in IN_PERCENT else 1
        values = [None if (found := step.get(key)) is None else scale * found for step in run.steps]
        known = sorted(_known(values))
        if len(known) > 2:  # two points form no curve, and metrics.jsonl holds them
            told = {"median": known[len(known) // 2], "most": known[-1]}
            caption = said.format(**{what: figure(value) for what, value in told.items()})
            line = Curve(name, [step["step"] for step in run.steps], values)
            yield curves([line], name, zero=zero, alt=f"{name}: {caption}"), caption


def _loss_chart(run: Run) -> tuple[str, str]:
    places, losses = ([step[key] for step in run.steps] for key in ("step", "loss"))
    long = len(losses) >= 30
    lines = [Curve("each step", places, losses, "faint"), Curve("mean", places, smoothed(losses))]
    lines = lines if long else [Curve("training", places, losses)]
    drawn = [loss for loss in lines[-1].y if loss is not None and math.isfinite(loss)] or [math.nan]
    caption, mark = f"Training loss: {figure(drawn[0])} \N{RIGHTWARDS ARROW} {figure(drawn[-1])}", None
    bad = sum(loss is None or not math.isfinite(loss) for loss in losses)
    caption += f"; the loss of {bad:,} steps is NaN or Inf" if bad else ""
    held = [(check["step"], check["eval_loss"]) for check in run.checks if check.get("eval_loss") is not None]
    if held:
        lines.append(Curve("validation", [step for step, _ in held], [loss for _, loss in held], "points"))
        step, least = min(held, key=lambda pair: pair[1] if math.isfinite(pair[1]) else math.inf)
        caption += f"; lowest validation loss {figure(least)} at step {step:,.0f}"
        mark = (step, f"best: step {step:,.0f}")
    return curves(lines, "loss, nats per token", mark=mark, alt=f"loss: {caption}"), caption


def _known(values: list[Any]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def advice(run: Run, verdict: Verdict) -> list[tuple[str, str]]:
    """Return the next steps: the reason and the command."""
    name, found = shlex.quote(run.path.resolve().name), []
    again = f"finetune {_train_again(run)}"
    rate, losses = run.get("train.learning_rate"), training_loss(run)
    slower = f"{again} train.learning_rate={figure(rate / 5)}" if rate else ""
    if rate == 0:
        found.append(("Set a learning rate above 0", f"{again} train.learning_rate=2e-4"))
    elif slower and (verdict.kind == "bad" or (losses and not losses[1] < losses[0])):
        found.append(("Lower the learning rate", slower))
    if verdict.kind == "same" and rate:
        faster = f"{again} train.learning_rate={figure(rate * 3)}"
        found.append(("Raise the learning rate, or train for more steps", faster))
    held_out = run.get("data.validation") or run.get("data.validation_fraction")
    if verdict.kind == "unknown" and not held_out:
        found.append(("Train with a validation set", f"{again} data.validation_fraction=0.02"))
    if verdict.kind != "bad" or run.evaluation:
        found.append(("Repeat the evaluation from the saved files", f"finetune evaluate {name}"))
        found.append(("Chat with base model and fine-tuned model side by side", f"finetune chat {name}"))
    if verdict.kind in ("good", "mixed"):
        adapter = run.recipe.get("adapter") or {}
        if not adapter_types.unmerged(str(adapter.get("type")), adapter):
            found.append(("Merge the adapter into the base model", f"finetune merge {name}"))
            found.append(("Export the model for a server", f"finetune export {name} --to vllm"))
        found.append(("Show what publishing would upload", f"finetune publish {name} --dry-run"))
    return found


def _train_again(run: Run) -> str:
    """Return `train` arguments that repeat a run without publishing it."""
    alone = " publish.repo=null" if run.get("publish.repo") else ""
    name = shlex.quote(run.path.resolve().name)
    return f"train {name}/recipe.resolved.yaml train.output_dir=runs/again{alone}"


def reproduce(run: Run) -> tuple[str, list[str]]:
    """Return the command that reproduces this run, and its requirements."""
    launch, train = run.environment.get("launch", {}), _train_again(run)
    processes, needs = launch.get("processes", 1), []
    command = f"finetune {train}"
    if processes > 1:
        given = launch.get("environment") or {}
        launched = given.get(
            "ACCELERATE_MIXED_PRECISION", launch.get("precision")
        )  # the Accelerate default is no mixed precision
        command = (
            f"accelerate launch --num_processes {processes} --mixed_precision {launched} -m finetune {train}"
        )
        split = f", base model sharded by {launch['splitter']}" if launch.get("splitter") else ""
        needs.append(f"{processes} processes, precision {precision(str(launched))}{split}")
    git = run.environment.get("git")
    if git:
        dirty = " with uncommitted changes" if git.get("dirty") else ""
        needs.append(f"finetune at git commit {str(git['commit'])[:12]}{dirty}")
    sources = run.data["train"].sources if run.data else {}
    needs += [
        f"an unchanged {Path(path).name} (SHA-256 {digest[:12]}...)" for path, digest in sources.items()
    ]
    return command, needs


def environment(run: Run) -> list[tuple[str, str]]:
    """Return hardware, launch, code and versions."""
    found, rows = run.environment, []
    device, launch, git = (found.get(key) or {} for key in ("hardware", "launch", "git"))
    if device:
        said = f"{device.get('count', 1)} x {device.get('name')}, {device.get('memory_gib', 0):.0f} GiB"
        rows.append(("hardware", f"{said}, {device.get('cpu_cores')} CPU cores"))
    if launch:
        how = f"{launch.get('launcher')}, processes: {launch.get('processes')}"
        rows.append(("launch", f"{how}, precision {precision(str(launch.get('precision')))}"))
        rows += list(recorded_variables.recorded(launch.get("environment") or {}).items())
    if git:
        dirty = " with uncommitted changes" if git.get("dirty") else ""
        rows.append(("finetune's code", f"git commit {git.get('commit')}{dirty}"))
    rows += [("python", found.get("python", "?")), ("platform", found.get("platform", "?"))]
    return rows + [(name, at or "not installed") for name, at in (found.get("packages") or {}).items()]


@functools.cache
def template(path: Path = REPORT) -> Any:
    """Return a page's template. The cache helps a comparison of many runs."""
    pages = html_pages.templates(path.parent)
    pages.filters |= {"shown": shown, "result": result, "share": percent}
    pages.filters |= {"value": figure, "duration": duration}
    return pages.get_template(path.name)


def render(run: Run, verdict: Verdict) -> str:
    """Return the HTML page."""
    drawn = list(charts(run))
    given = {"run": run, "verdict": verdict, "summary": summary(run), "headlines": headlines(run)}
    given |= {"name": run.path.resolve().name, "charts": drawn}
    given["scores"] = scores.table(run.evaluation)
    given["overlap"] = scores.overlap(vars(run.data["train"])) if run.data else ""
    given |= {"sources": scores.sources(run.evaluation), "advice": advice(run, verdict)}
    command, needs = reproduce(run)
    given |= {"command": command, "needs": needs, "environment": environment(run)}
    given |= {"run_checks": sorted(run.run_checks, key=lambda r: bool(r["passed"]))}
    given |= {"legend": verdicts.LEGEND, "general": verdicts.GENERAL_LEGEND}
    given["exports"] = [(exports.title(name, one), exports.lines(one)) for name, one in run.exports.items()]
    given |= {"facts": [], "remarks": [], "mix": []}
    if run.data:
        given |= {"facts": preview.described(run.data), "remarks": preview.remarks(run.data)}
        given["mix"] = preview.mix(run.data["train"])
    return template().render(given)


def result(check: dict[str, Any]) -> str:
    """Return what a run check found. The hash of something unchanged tells a reader nothing."""
    expected, actual = str(check["expected"]), str(check["actual"])
    if not check["passed"] or expected != actual:
        return f"expected {expected}, found {actual}"
    return "unchanged" if re.fullmatch("[0-9a-f]{16,64}", actual) else actual


def shown(text: object) -> str:
    """Return a text of the run for display, truncated if it is long."""
    text = str(text)
    cut = f" ... {len(text) - run_files.LONGEST:,} more characters" if len(text) > run_files.LONGEST else ""
    return visible_lines(text[: run_files.LONGEST]) + cut
