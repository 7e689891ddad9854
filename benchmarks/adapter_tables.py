"""The tables of adapter methods in the documentation, from what `adapters.py` measured."""

from __future__ import annotations

import statistics
from typing import Any

TASKS = ("json", "sms")
SHAPES = {"4 rows": 4, "16 rows": 16}  # of a step


def types(rows: list[dict[str, Any]]) -> list[str]:
    """The adapter types, in the order in which the rows are kept."""
    return list(dict.fromkeys(row["type"] for row in rows))


def quality_table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, on both tasks."""
    scores = "exact match, validation loss"
    names = f"type, trained, saved, JSON: rate, {scores}, SMS: rate, {scores}"
    lines = [f"| {names.replace(', ', ' | ')} |", "|---|---|---|---|---|---|---|---|---|"]
    for kind in types(rows):
        cells = [kind]
        for task in TASKS:
            mine = [r for r in rows if (r["part"], r["task"], r["type"]) == ("quality", task, kind)]
            good = [row for row in mine if "tuned" in row]
            if task == "json":
                cells += [f"{good[0]['trainable']:,}", size(good[0]["saved_bytes"])] if good else ["", ""]
            rate = f"{mine[0]['learning_rate']:g}" if mine else "not run"
            cells += [rate, spread(good, "exact_match", len(mine)), spread(good, "loss", len(mine))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def guide_table(rows: list[dict[str, Any]]) -> str:
    """Quality on both tasks, and time, memory and size of the 1.1B model, for choose_method.md."""
    step = "step: 4 sequences, 16 sequences"
    names = f"| type | JSON: exact match | SMS: exact match | {step} | peak GPU memory | file |"
    lines = [names, "|---|---|---|---|---|---|"]
    for kind in types(rows):
        cells = [kind]
        for task in TASKS:
            mine = [r for r in rows if (r["part"], r["task"], r["type"]) == ("quality", task, kind)]
            cells.append(spread([row for row in mine if "tuned" in row], "exact_match", len(mine)))
        at = [shape_cells(rows, kind, task) for task in SHAPES]
        times = [beside or "-" for _, beside, *_ in at]
        saved = [file for *_, file in at if file] or ["-"]
        cells += [", ".join(times), at[-1][2] or "-", saved[-1]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(good: list[dict[str, Any]], name: str, runs: int) -> str:
    """Mean +- standard deviation; runs that failed are counted."""
    values = [row["tuned"][name] for row in good]
    if not values:
        return f"{runs} failed" if runs else ""
    mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    text = f"{mean:.1%} ± {deviation * 100:.1f}" if name == "exact_match" else f"{mean:.4f} ± {deviation:.4f}"
    return text + (f" ({runs - len(good)} of {runs} failed)" if runs > len(good) else "")


def shape_table(rows: list[dict[str, Any]]) -> str:
    """Return time and memory of a step of the 1.1B model, with small and large batches, and the time relative
    to LoRA."""
    names = ["type", "trained", "saved"]
    names += [
        f"{size} sequences: {name}"
        for size in SHAPES.values()
        for name in ("seconds", "relative to lora", "peak GPU memory")
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for kind in types(rows):
        mine = [r for r in rows if (r["part"], r["type"]) == ("shape", kind) and "trainable" in r]
        at = {task: shape_cells(rows, kind, task) for task in SHAPES}
        cells = (
            [kind, f"{mine[-1]['trainable']:,}", next(c[3] for c in at.values() if c[3])]
            if mine
            else [kind, "", ""]
        )
        cells += [cell for task in SHAPES for cell in at[task][:3]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shape_cells(rows: list[dict[str, Any]], kind: str, task: str) -> tuple[str, str, str, str]:
    """Return seconds, seconds relative to LoRA, peak memory and file size. They are empty without a run."""
    found = {row["type"]: row for row in rows if (row["part"], row["task"]) == ("shape", task)}
    row = found.get(kind, {})
    if "trainable" not in row:
        return ("failed" if "error" in row else "", "", "", "")
    seconds, reference = row.get("step_seconds"), found.get("lora", {}).get("step_seconds")
    beside = f"{seconds / reference:.2f} x" if seconds and reference else ""
    saved = size(row["saved_bytes"]) + "".join(f" ({text})" for text in row.get("overrides", []))
    memory = f"{row['gpu_memory_gib'] or 0:.1f} GiB"
    return (f"{seconds:.3f}" if seconds else "", beside, memory, saved)


def size(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
