"""Estimate the score of the best trial on examples that did not select it.

The best of many trials is partly the luckiest one, so its own score is too good. This module selects a
trial on one half of the examples and scores it on the other half. It needs the loss of every example, and no
training.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from finetune.core import formatting
from finetune.run_folder.run_folder import RunFolder

SPLITS = 200


def assess(
    folder: Path, rows: list[dict[str, Any]], best: dict[str, Any] | None, metric: str
) -> dict[str, Any]:
    """Estimate the best trial's score on examples that did not select it.

    Args:
        rows: the complete trials.
        metric: loss | exact_match.

    Returns:
        `examples` and `trials` with one of two estimates. `fresh` is the score on examples that did not
        select the trial. `optimism` is the amount by which the score is too good. The mapping is empty if
        there is no estimate.
    """
    if best is None or len(rows) < 2:
        return {}
    found = [RunFolder(folder / row["folder"]).found("eval.json").get("examples") for row in rows]
    known = [one for one in found if one]
    alike = len(known) == len(rows) and all(
        (one["group"], one["tokens"]) == (known[0]["group"], known[0]["tokens"]) for one in known
    )
    if metric == "loss" and alike:
        losses = np.array([one["tuned"]["loss"] for one in known], float)
        losses[np.isnan(losses)] = math.inf
        counts = {"examples": losses.shape[1], "trials": len(rows)}
        value = fresh_loss(losses, np.array(known[0]["tokens"], float), np.array(known[0]["group"]))
        return {"fresh": value, **counts} if math.isfinite(value) else {}
    if metric == "exact_match":
        report = RunFolder(folder / best["folder"]).found("data_report.json")
        count = report.get("validation", {}).get("kept")
        return optimism(best["value"], count, len(rows)) if count else {}
    return {}


def fresh_loss(losses: np.ndarray, tokens: np.ndarray, groups: np.ndarray) -> float:
    """Return the loss per token on one half of the examples, for the trial that the other half selects.

    Args:
        losses: sums in nats of each trial and example.
        tokens: tokens of each example.
        groups: labels of the examples. Examples with equal labels stay in one half.
    """
    random, values = np.random.default_rng(0), []
    names, codes = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        return math.nan
    for _ in range(SPLITS):
        order = random.permutation(len(names))
        half = np.isin(codes, order[: len(names) // 2])
        for choosing in (half, ~half):
            best = int(np.argmin(losses[:, choosing].sum(axis=1)))
            values.append(losses[best, ~choosing].sum() / tokens[~choosing].sum())
    return float(np.mean(values))


def optimism(value: float, examples: int, trials: int) -> dict[str, Any]:
    """Return how far the best of `trials` equally good trials likely scores above their true accuracy."""
    highest = NormalDist().inv_cdf((trials - 0.375) / (trials + 0.25))  # Blom's expected maximum
    share = min(max(value, 1 / examples), 1 - 1 / examples)
    error = math.sqrt(share * (1 - share) / examples)
    return {"optimism": highest * error, "examples": examples, "trials": trials}


def described(found: dict[str, Any]) -> str:
    """Return one or two sentences for the user, or an empty string."""
    if not found:
        return ""
    chosen = f"The sweep chose the trial on the same {found['examples']:,} examples that give its score"
    if "fresh" in found:
        return f"{chosen}. Expect a loss of {found['fresh']:.4g} on new examples."
    high = f"{formatting.points(found['optimism'])} points"
    return (
        f"{chosen}. The best of {found['trials']} equally good trials scores about {high} too high. "
        "Evaluate it on new examples: finetune evaluate RUN data.validation=FILE."
    )
