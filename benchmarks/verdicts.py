"""How often verdicts are wrong where nothing changed, and how often they find a true change: simulations.

    python benchmarks/verdicts.py [--runs 2000] [--seed 0]

Each simulated evaluation goes through the functions of the product: `paired_differences.difference` and
`verdicts.verdict`, and for seeds `comparison_report.winner`. No model is trained. Results: verdicts.json, and
from it the tables of docs/explanation/verdicts.md (`make schema`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.evaluation import verdicts
from finetune.evaluation.paired_differences import difference
from finetune.experiments.comparison import comparison_report
from finetune.experiments.sweep import chosen_score

RESULTS = Path(__file__).with_suffix(".json")
WRONG = {verdicts.BETTER, verdicts.WORSE}
SPREAD = 0.15
"""Standard deviation of the difference of an example's loss, nats per token."""
GENERAL_TEXTS = 48


class Evaluation(NamedTuple):
    """What is simulated. The true changes are 0 by default."""

    examples: int
    shape: str = "normal"
    """Of the differences in loss: normal, or skewed (lognormal, less its mean)."""
    lengths: float = 0.3
    """Standard deviation of the logarithm of an example's tokens; 0: all are equally long."""
    repeats: int = 1
    """How often each example is in the validation set."""
    tasks: int = 0
    loss: float = 0.0
    """True change of the validation loss, nats per token."""
    gain: float = 0.0
    """True change of exact match."""
    changed: float = 0.2
    """Share of the answers that change from right to wrong, or back."""
    others: bool = True
    """Whether the family has more than one measure: loss, exact match and forgetting."""


def losses(random: Any, asked: Evaluation, examples: int, change: float) -> dict[str, Any]:
    """The difference of a loss per token, over examples of different lengths."""
    tokens = np.repeat(np.ceil(random.lognormal(3, asked.lengths, examples)), asked.repeats)
    before = random.normal(2.0, 0.5, examples)
    noise = random.normal(0, SPREAD, examples)
    if asked.shape == "skewed":
        noise = SPREAD * (random.lognormal(0, 1, examples) - np.exp(0.5))
    after = before + change + noise
    sums = [np.repeat(side, asked.repeats) * tokens for side in (before, after)]
    groups = np.repeat(np.arange(examples), asked.repeats).tolist() if asked.repeats > 1 else None
    return difference(*sums, higher_is_better=False, weights=tokens, groups=groups)


def answers(random: Any, asked: Evaluation, gain: float) -> dict[str, Any]:
    """The difference of a share of right answers, half of them right before."""
    up, down = (asked.changed + gain) / 2, (asked.changed - gain) / 2
    kinds = random.choice(4, asked.examples, p=[up, down, 0.5 - up, 0.5 - down])
    sides = [np.repeat(np.isin(kinds, right) * 1.0, asked.repeats) for right in ((1, 3), (0, 3))]
    groups = np.repeat(np.arange(asked.examples), asked.repeats).tolist() if asked.repeats > 1 else None
    return difference(*sides, higher_is_better=True, groups=groups)


def evaluated(random: Any, asked: Evaluation) -> dict[str, Any]:
    """One evaluation with its verdict, as eval.json has it."""
    metrics = (
        {"loss": losses(random, asked, asked.examples, asked.loss)} if asked.others or asked.loss else {}
    )
    if asked.others or asked.gain:
        metrics["exact_match"] = answers(random, asked, asked.gain)
    tasks = {f"task {number}": task("acc", answers(random, asked, 0.0)) for number in range(asked.tasks)}
    if asked.others:
        once = asked._replace(repeats=1)
        change = losses(random, once, GENERAL_TEXTS, 0.0)
        tasks["general_text"] = task("loss", change, forgetting=True)
    result = {**sides(metrics), "difference": metrics, "tasks": tasks}
    result["verdict"] = verdicts.verdict(result)
    return result


def sides(metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "base": dict.fromkeys(metrics, 0.5),
        "tuned": {key: 0.5 + one["value"] for key, one in metrics.items()},
    }


def task(metric: str, change: dict[str, Any], *, forgetting: bool = False) -> dict[str, Any]:
    metrics = {metric: change}
    return {**sides(metrics), "difference": metrics, "main": metric, "forgetting": forgetting, "asked": True}


def words(result: dict[str, Any]) -> list[str]:
    """The word of every measure."""
    return [each.word for each in verdicts.family(result)]


def false_verdicts(asked: Evaluation, runs: int, seed: int) -> float:
    """Share of evaluations in which any measure gets a word that is false: nothing has changed."""
    random = np.random.default_rng(seed)
    return sum(bool(WRONG & set(words(evaluated(random, asked)))) for _ in range(runs)) / runs


def found(asked: Evaluation, metric: str, runs: int, seed: int) -> float:
    """Share of evaluations in which a true change of a measure is called better."""
    random = np.random.default_rng(seed)
    called = [evaluated(random, asked)["difference"][metric]["verdict"] for _ in range(runs)]
    return called.count(verdicts.BETTER) / runs


NULLS = {
    "normal differences": [Evaluation(n) for n in (6, 20, 50, 100, 200)],
    "skewed differences": [Evaluation(n, "skewed") for n in (6, 20, 50, 100, 200)],
    "each example five times": [Evaluation(n, repeats=5) for n in (6, 30, 100)],
    "skewed, each example five times": [Evaluation(n, "skewed", repeats=5) for n in (30, 100)],
}
TASKS = (0, 3, 12)
ANSWERS = Evaluation(200, gain=0.1)
LOSS = Evaluation(100, lengths=0, loss=-0.05)
CHANGES = {  # name -> what is simulated, and the measure that has to be found
    "exact match 50 % to 60 %, 200 examples, the only measure": (
        ANSWERS._replace(others=False),
        "exact_match",
    ),
    "the same, with loss (-0.05) and forgetting": (ANSWERS._replace(loss=-0.05), "exact_match"),
    "the same, with loss and forgetting unchanged": (ANSWERS, "exact_match"),
    "loss -0.05 nats per token, 100 examples, the only measure": (LOSS._replace(others=False), "loss"),
    "the same, with exact match (50 % to 60 %) and forgetting": (LOSS._replace(gain=0.1), "loss"),
    "the same, with exact match and forgetting unchanged": (LOSS, "loss"),
    "the same, the only measure, examples of different lengths": (
        LOSS._replace(others=False, lengths=0.3),
        "loss",
    ),
}
DRAWS = 10
"""Of each true change, times `--runs`: a share near 80 % then has a standard error of 0.3 points."""
SIZES = (50, 100, 200, 500, 1000)
GAINS = (0.02, 0.05, 0.1, 0.2)
FALLS = (0.01, 0.02, 0.05, 0.1)


SEEDS = (2, 3, 5)
KINDS = (2,)
GAPS = (1.0, 2.0, 3.0, 5.0)
"""Between the best type and the others, in standard deviations of a seed."""


def sole_winners(kinds: int, seeds: int, gap: float, runs: int, seed: int) -> float:
    """Share of comparisons in which one type alone is called the best: type 0, better by `gap`."""
    random, sole = np.random.default_rng(seed), 0
    costs = {key: {"mean": 1.0, "sd": 0.0} for key in ("train_seconds", "memory_gib", "bytes")}
    for _ in range(runs):
        scores = random.normal(2.0, 0.1, (kinds, seeds))
        scores[0] -= 0.1 * gap
        rows = [
            {"type": f"type{kind}", "seed": number, "run": "", "quality": value}
            for kind, values in enumerate(scores.tolist())
            for number, value in enumerate(values)
        ]
        types = {
            f"type{kind}": costs
            | {"quality": {"mean": s.mean(), "sd": s.std(ddof=1), "runs": seeds, "least": 0.01}}
            for kind, s in enumerate(scores)
        }
        found = comparison_report.winner(types, rows, "validation loss", False, False)
        tied = found["within_noise"] if found else []
        sole += len(tied) == 1 and (gap == 0 or tied == ["type0"])
    return sole / runs


def best_trials(runs: int, seed: int) -> dict[str, float]:
    """The best of 20 equal trials on 100 examples, in the mean: as it reads, and as `sweep` reports it."""
    random, read, fresh = np.random.default_rng(seed), [], []
    for _ in range(runs):
        losses = random.normal(2.0, 0.5, (20, 100))
        read.append(losses.mean(axis=1).min())
        fresh.append(chosen_score.fresh_loss(losses, np.ones(100), np.arange(100)))
    right = random.binomial(100, 0.7, (runs, 20)).max(axis=1) / 100
    less = [share - chosen_score.optimism(share, 100, 20)["optimism"] for share in right]
    return {
        "loss": float(np.mean(read)),
        "loss, fresh": float(np.mean(fresh)),
        "exact match": float(right.mean()),
        "exact match, less its optimism": float(np.mean(less)),
    }


def changes_found(runs: int, seed: int) -> dict[str, float]:
    """Share of evaluations in which each of the true changes is found."""
    return {name: found(*change, runs, seed) for name, change in CHANGES.items()}


def measure(runs: int, seed: int) -> dict[str, Any]:
    """Every simulation."""
    few = max(200, runs // 4)
    winners = {
        f"{kinds} types": {
            f"{gap:g}": [sole_winners(kinds, seeds, gap, runs, seed) for seeds in SEEDS]
            for gap in (0.0, *GAPS)
        }
        for kinds in KINDS
    }
    return {
        "runs": runs,
        "seed": seed,
        "winners": winners,
        "trials": best_trials(max(50, runs // 20), seed),
        "false": {
            name: {
                str(one.examples * one.repeats): [
                    false_verdicts(one._replace(tasks=tasks), runs, seed) for tasks in TASKS
                ]
                for one in nulls
            }
            for name, nulls in NULLS.items()
        },
        "found": changes_found(DRAWS * runs, seed),
        "answers": {
            f"{gain:g}": [
                found(Evaluation(n, gain=gain, loss=-gain / 2), "exact_match", few, seed) for n in SIZES
            ]
            for gain in GAINS
        },
        "losses": {
            f"{fall:g}": [found(Evaluation(n, loss=-fall), "loss", few, seed) for n in SIZES]
            for fall in FALLS
        },
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def percent(values: list[float]) -> list[str]:
    return [f"{value:.1%}" for value in values]


def false_table(results: dict[str, Any]) -> str:
    """Share of evaluations with any false word, where nothing changed."""
    rows = [
        [name, examples, *percent(shares)]
        for name, sizes in results["false"].items()
        for examples, shares in sizes.items()
    ]
    return table(["nothing changed", "examples", *(f"{tasks} tasks" for tasks in TASKS)], rows)


def found_table(results: dict[str, Any]) -> str:
    return table(
        ["true change", "found"], [[name, f"{share:.1%}"] for name, share in results["found"].items()]
    )


def answers_table(results: dict[str, Any]) -> str:
    rows = [
        [f"{float(gain):.0%}".replace("%", " points"), *percent(s)] for gain, s in results["answers"].items()
    ]
    return table(["exact match rises by", *(f"{n:,} examples" for n in SIZES)], rows)


def losses_table(results: dict[str, Any]) -> str:
    rows = [[f"{fall} nats", *percent(shares)] for fall, shares in results["losses"].items()]
    return table(["validation loss falls by", *(f"{n:,} examples" for n in SIZES)], rows)


def winners_table(results: dict[str, Any]) -> str:
    """Share of comparisons with the right sole winner; at a gap of 0 with any."""
    rows = [
        [kinds, "equal" if gap == "0" else f"{gap} deviations", *percent(shares)]
        for kinds, gaps in results["winners"].items()
        for gap, shares in gaps.items()
    ]
    return table(["compared", "the best is better by", *(f"{seeds} seeds" for seeds in SEEDS)], rows)


def trials_table(results: dict[str, Any]) -> str:
    found = results["trials"]
    rows = [
        ["validation loss", "2.000", f"{found['loss']:.3f}", f"{found['loss, fresh']:.3f}"],
        [
            "exact match",
            "70.0%",
            f"{found['exact match']:.1%}",
            f"{found['exact match, less its optimism']:.1%}",
        ],
    ]
    return table(["the best of 20 equal trials", "true", "as it reads", "as `sweep` corrects it"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    results = measure(options.runs, options.seed) | {"seconds": round(time.monotonic() - started)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
