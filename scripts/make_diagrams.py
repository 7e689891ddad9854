"""Draw the diagrams of the documentation as SVG files in docs/images (`make schema`); a test compares.

python scripts/make_diagrams.py
"""

# ruff: noqa: E501 (lines of SVG are not wrapped)
from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
INK, SOFT, LINE = "#1f2a37", "#5b6673", "#9aa5b1"
GREEN, BLUE, SAND, GREY = "#bfe3cf", "#c9dcf5", "#f6e6c5", "#e6e9ed"


class Box(NamedTuple):
    """A rectangle with up to two lines of text."""

    x: float
    y: float
    width: float
    text: str
    below: str = ""
    fill: str = GREY
    height: float = 46


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, text in diagrams().items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def diagrams() -> dict[str, str]:
    """Each diagram by its file name."""
    return {
        "life_of_a_run.svg": life_of_a_run(),
        "loss_mask.svg": loss_mask(),
        "packing_isolation.svg": packing_isolation(),
        "memory_of_a_step.svg": memory_of_a_step(),
        "plan_scatter.svg": plan_scatter(),
        "choose_method.svg": choose_method(),
        "choose_launch.svg": choose_launch(),
    }


def life_of_a_run() -> str:
    steps = [
        ("recipe.yaml", "your settings", SAND), ("check", "all mistakes", GREY), ("choose", "auto to values", GREY),
        ("prepare data", "mask, audit", GREY), ("load", "model, adapter", GREY), ("train", "checkpoints", BLUE),
        ("save, reload", "same logits", GREY), ("evaluate", "both models", GREY), ("report", "the verdict", GREEN),
    ]  # fmt: skip
    parts, at = [], []
    for number, (text, below, fill) in enumerate(steps):
        row, column = divmod(number, 5)
        x, y = 20 + column * 152, 24 + row * 96
        at.append((x, y))
        parts.append(box(Box(x, y, 128, text, below, fill)))
    for number in range(len(steps) - 1):
        (x, y), (to_x, to_y) = at[number], at[number + 1]
        if y == to_y:
            parts.append(arrow(x + 128, y + 23, to_x, to_y + 23))
        else:
            parts.append(path(f"M{x + 64} {y + 46} V{y + 72} H{to_x + 64} V{to_y}"))
    x, y = at[5]
    parts.append(
        text_at(x, y + 66, "Ctrl-C, SIGTERM, --until: save and exit 75; --resume=auto continues", SOFT, 12)
    )
    return svg(
        790, 200, parts, "A run: recipe, check, choose, prepare data, load, train, save, evaluate, report"
    )


def loss_mask() -> str:
    tokens = [
        ("<user>", 0), ("What", 0), ("is", 0), ("2+2", 0), ("?", 0), ("<end>", 0), ("<assistant>", 0),
        ("It", 1), ("is", 1), ("4", 1), (".", 1), ("<end>", 1),
    ]  # fmt: skip
    x, parts = 16.0, []
    for text, trained in tokens:
        width = 14 + 8.2 * len(text)
        parts.append(box(Box(x, 40, width, text, fill=GREEN if trained else GREY, height=34)))
        x += width + 4
    split = 16 + sum(18 + 8.2 * len(text) for text, trained in tokens if not trained)
    parts.append(text_at(16, 28, "prompt: no loss", SOFT, 13))
    parts.append(text_at(split, 28, "answer and its end: loss", INK, 13))
    parts.append(
        text_at(16, 98, "generation starts at inference where the loss starts in training", SOFT, 12)
    )
    return svg(x + 12, 112, parts, "The assistant's tokens and the end-of-turn token contribute to the loss")


def packing_isolation() -> str:
    size, parts = 22, []
    lengths = (4, 3, 3)
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    document = [sum(at >= end for end in ends) for at in range(sum(lengths))]
    colors = (GREEN, BLUE, SAND)
    for row, own in enumerate(document):
        for column, other in enumerate(document):
            seen = own == other and column <= row
            fill = colors[own] if seen else "#ffffff"
            parts.append(
                f'<rect x="{110 + column * size}" y="{40 + row * size}" width="{size}" height="{size}" '
                f'fill="{fill}" stroke="{LINE}" stroke-width="0.7"/>'
            )
    start = 0
    for number, length in enumerate(lengths):
        middle = 40 + (start + length / 2) * size + 4
        parts.append(text_at(16, middle, f"example {number + 1}", INK, 13))
        start += length
    parts.append(
        text_at(110, 28, "tokens of one packed sequence: each row attends to the colored cells", SOFT, 12)
    )
    parts.append(text_at(350, 120, "Check before training:", INK, 13))
    parts.append(text_at(350, 140, "change example 1,", INK, 13))
    parts.append(text_at(350, 160, "outputs of 2 and 3", INK, 13))
    parts.append(text_at(350, 180, "must not change.", INK, 13))
    return svg(580, 276, parts, "A block-diagonal attention mask: each packed example attends only to itself")


def memory_of_a_step() -> str:
    """Bars of the plan for Llama 3.1 8B, LoRA, four sequences of 4,096 tokens (rows of plan.json)."""
    plans = _measured("plan")
    bars = [
        ("bf16 base model", "lora-bf16", ""),
        ("+ activation_checkpointing: mlp", "lora-bf16-mlp", ""),
        ("+ activation_checkpointing: full", "lora-bf16-recomputed", ""),
        ("+ offload: activations", "lora-bf16-mlp-small", ""),
        ("fp8 base model", "lora-fp8", ""),
        ("fp8 + mlp_int8", "lora-fp8-int8", ""),
        ("fp8 + full", "lora-fp8-recomputed", ""),
        ("fp8 + offload: activations", "lora-fp8-mlp-small", ""),
    ]
    most, parts = max(plans[name]["planned_gib"] for _, name, _ in bars), []
    weights = {"bf16": 15.0, "fp8": 8.5}
    for number, (label, name, _) in enumerate(bars):
        total, y = plans[name]["planned_gib"], 44 + number * 30
        stored = weights["fp8" if "fp8" in name else "bf16"]
        scale = 440 / most
        parts.append(text_at(16, y + 15, label, INK, 12))
        parts.append(f'<rect x="250" y="{y}" width="{stored * scale:.1f}" height="20" fill="{BLUE}"/>')
        rest = (total - stored) * scale
        parts.append(
            f'<rect x="{250 + stored * scale:.1f}" y="{y}" width="{rest:.1f}" height="20" fill="{SAND}"/>'
        )
        parts.append(text_at(256 + total * scale, y + 15, f"{total:.1f} GiB", SOFT, 12))
    parts.append(text_at(250, 28, "base model (about)", INK, 12))
    parts.append(f'<rect x="236" y="18" width="10" height="10" fill="{BLUE}"/>')
    parts.append(text_at(400, 28, "saved activations and other memory", INK, 12))
    parts.append(f'<rect x="386" y="18" width="10" height="10" fill="{SAND}"/>')
    return svg(790, 44 + len(bars) * 30 + 10, parts, "Planned GPU memory of one step, by option")


def plan_scatter() -> str:
    rows = [
        row for row in _measured("plan").values() if row.get("measured_gib") and row.get("measured_seconds")
    ]
    parts = [
        _scatter(16, "seconds per step (log scale)", rows, "seconds"),
        _scatter(410, "peak GiB (log scale)", rows, "gib"),
    ]
    return svg(790, 380, parts, f"Planned against measured, {len(rows)} benchmark rows")


def _scatter(left: float, title: str, rows: list[Any], what: str) -> str:
    from math import log10

    values = [row[f"{name}_{what}"] for row in rows for name in ("measured", "planned")]
    limits = min(values) / 1.3, max(values) * 1.3
    low, high = map(log10, limits)
    x, y, size = left + 48, 36, 290

    def place(value: float) -> float:
        return (log10(value) - low) / (high - low) * size

    parts = [f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="none" stroke="{LINE}"/>']
    parts.append(f'<path d="M{x} {y + size} L{x + size} {y}" stroke="{LINE}" stroke-dasharray="4 3"/>')
    for row in rows:
        at_x, at_y = place(row[f"measured_{what}"]), place(row[f"planned_{what}"])
        parts.append(
            f'<circle cx="{x + at_x:.1f}" cy="{y + size - at_y:.1f}" r="3" fill="#2f7d5b" fill-opacity="0.6"/>'
        )
    for value in (0.01, 0.1, 1, 10, 100):
        if limits[0] <= value <= limits[1]:
            parts.append(text_at(x + place(value) - 6, y + size + 16, f"{value:g}", SOFT, 11))
            parts.append(text_at(x - 26, y + size - place(value) + 4, f"{value:g}", SOFT, 11))
    parts.append(text_at(x, y - 10, title, INK, 13))
    parts.append(text_at(x + size / 2 - 30, y + size + 34, "measured", SOFT, 12))
    parts.append(
        f'<text transform="translate({left + 8} {y + size / 2 + 26}) rotate(-90)" font-size="12" fill="{SOFT}">planned</text>'
    )
    return "".join(parts)


def choose_method() -> str:
    return _tree(
        [
            ("Do you have 16 bytes of GPU memory per parameter?", "and want to train every weight", "full"),
            ("Does the base model fit in 16 or 8 bits?", "no: store it in 4 bits", "qlora"),
            ("Must the adapter be smaller than 1 MB?", "and is the task easy", "ia3"),
            ("Do you need ranks of 64 and more?", "", "rslora"),
        ],
        "lora",
        ("yes", "no", "yes", "yes"),
    )


def choose_launch() -> str:
    return _tree(
        [
            ("One GPU?", "", "no config"),
            ("Several machines?", "", "multi_node"),
            ("Does the training fit on each GPU?", "an adapter on an fp8 or bf16 base model", "ddp_N"),
            ("Is one sequence too long for a GPU?", "", "context_parallel_4"),
            ("Is the base model quantized?", "", "fsdp2_8_quantized"),
        ],
        "fsdp2_8",
        ("yes",) * 5,
    )


def _tree(questions: list[tuple[str, str, str]], last: str, taken: tuple[str, ...]) -> str:
    parts = []
    for number, ((question, below, answer), word) in enumerate(zip(questions, taken, strict=True)):
        y = 16 + number * 78
        parts.append(box(Box(16, y, 400, question, below)))
        parts.append(arrow(416, y + 23, 520, y + 23))
        parts.append(text_at(450, y + 16, word, SOFT, 12))
        parts.append(box(Box(520, y, 200, answer, fill=GREEN)))
        parts.append(arrow(216, y + 46, 216, y + 78))
        parts.append(text_at(226, y + 66, "yes" if word == "no" else "no", SOFT, 12))
    y = 16 + len(questions) * 78
    parts.append(box(Box(116, y, 200, last, fill=GREEN)))
    return svg(740, y + 62, parts, "Decision tree")


def _measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def box(made: Box) -> str:
    middle = made.x + made.width / 2
    lines = [made.text, made.below] if made.below else [made.text]
    first = made.y + made.height / 2 + (5 if len(lines) == 1 else -3)
    text = "".join(
        f'<text x="{middle:.1f}" y="{first + 16 * number:.1f}" text-anchor="middle" font-size="{13 if not number else 11}" '
        f'fill="{INK if not number else SOFT}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{made.x:.1f}" y="{made.y}" width="{made.width:.1f}" height="{made.height}" rx="6" '
        f'fill="{made.fill}" stroke="{LINE}" stroke-width="0.8"/>{text}'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return path(f"M{x} {y} L{to_x} {to_y}")


def path(way: str) -> str:
    return f'<path d="{way}" fill="none" stroke="{INK}" stroke-width="1.2" marker-end="url(#tip)"/>'


def text_at(x: float, y: float, text: str, color: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def svg(width: float, height: float, parts: list[str], title: str) -> str:
    """A picture on a white card, so that it can be read on dark pages too."""
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="ui-sans-serif, system-ui, sans-serif"><title>{escape(title)}</title>{tip}'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>' + "\n".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    main()
