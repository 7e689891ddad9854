"""Decide the verdict of an evaluation: a word for each measure, a word for the whole, and the reason.

All measures form one family. Holm's correction limits the probability of any false verdict to 5 %. A
difference counts if it passes this test and reaches the smallest difference that matters
(`eval.min_loss_difference`, `eval.min_score_difference`). docs/explanation/verdicts.md explains the words.
benchmarks/verdicts.py measures their error rates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from finetune.core import formatting
from finetune.evaluation import paired_differences, tasks

BETTER, WORSE = "better", "worse"
NO_DIFFERENCE = "no significant difference"
NEGLIGIBLE = "negligible difference"
TOO_FEW = "too few examples"
MIXED, UNKNOWN = "mixed", "unknown"
SMALLEST = {"loss": 0.01, "score": 0.01}
"""Smallest difference that matters, for evaluations that do not store it."""
TITLES = {
    BETTER: "Better than the base model",
    WORSE: "Worse than the base model",
    NO_DIFFERENCE: "No significant difference from the base model",
    NEGLIGIBLE: "Negligible difference from the base model",
    MIXED: "Better in some measures, worse in others",
    UNKNOWN: "Not enough data to compare with the base model",
}
FORGETTING = {NO_DIFFERENCE: "no significant change", NEGLIGIBLE: "negligible change"}
"""Words of the forgetting check, which has no `better` and `worse`."""
LEGEND = "Losses are in nats per token. 95% CI: range of the change on new examples, with 95% confidence."
"""What outputs say below the scores."""
GENERAL_LEGEND = "General text: the texts of eval.forgetting, by default finetune's own."
OVERFITTING = "Answers are better, loss is worse: check for overfitting"
WORSE_ANSWERS = "Loss is better, answers are worse: read the samples"
NO_ANSWER = "Loss is better, but no answer is correct yet"
OLD_WORDS = {"same": NO_DIFFERENCE, "too few rows": TOO_FEW}
"""Words in eval.json of earlier versions."""


class Measure(NamedTuple):
    """One measure of the family."""

    name: str
    metric: str
    scores: dict[str, Any]
    """A mapping with `base`, `tuned` and `difference`."""
    forgetting: bool = False

    @property
    def change(self) -> dict[str, Any]:
        return self.scores["difference"].get(self.metric) or {}

    @property
    def word(self) -> str:
        return current_word(self.change.get("verdict", ""))


def current_word(word: str) -> str:
    """Return today's word for a word of an earlier version."""
    return OLD_WORDS.get(word, word)


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Decide on every measure of an evaluation, write each word into its difference, and judge the whole.

    Args:
        result: the content of eval.json.

    Returns:
        `word`, `title`, `why`, and `forgot` (the forgetting measures that are worse).
    """
    measures = family(result)
    decide([each.change for each in measures if "p" in each.change], smallest(result.get("settings") or {}))
    return judge(measures)


def smallest(settings: dict[str, Any]) -> dict[str, float]:
    """Return the smallest differences that matter, by kind of measure."""
    return {kind: settings.get(f"min_{kind}_difference", least) for kind, least in SMALLEST.items()}


def family(result: dict[str, Any]) -> list[Measure]:
    """Return the measures of the verdict: each task's main metric, without the subtasks of groups."""
    names = (("exact_match", "exact match"), ("loss", "validation loss"))
    found = [Measure(name, metric, result) for metric, name in names if metric in result["difference"]]
    for name, task in result["tasks"].items():
        if task["main"] and (task["forgetting"] or task.get("asked", True)):
            found.append(Measure(f"{name} {task['main']}", task["main"], task, task["forgetting"]))
    return found


def titled(name: str) -> str:
    """Return the name of a task or measure for people: `loss on general text` for `general_text loss`."""
    task, _, metric = name.partition(" ")
    if task != tasks.GENERAL:
        return name
    return f"{metric} on general text" if metric else "general text"


def shown_word(change: dict[str, Any], metric: str, *, forgetting: bool) -> str:
    """Return the word of a measure for people. The forgetting check says what was measured: `higher loss`."""
    word = current_word(str(change.get("verdict", "")))
    if forgetting and word == BETTER:
        return "no forgetting"
    if not forgetting or word != WORSE:
        return FORGETTING.get(word, word) if forgetting else word
    return f"{_direction(change, word)} {'loss' if metric == 'loss' else 'score'}"


def _direction(change: dict[str, Any], word: str) -> str:
    return "higher" if (word == BETTER) == bool(change.get("higher_is_better")) else "lower"


def decide(differences: list[dict[str, Any]], least: dict[str, float]) -> None:
    """Apply Holm's procedure to a family, and add `verdict`, `p_holm` and `detectable` to each difference."""
    tested = sorted((one for one in differences if one["p"] is not None), key=lambda one: one["p"])
    adjusted = 0.0
    for place, one in enumerate(tested):
        adjusted = max(adjusted, min(1.0, one["p"] * (len(tested) - place)))
        one["p_holm"] = adjusted
    level = paired_differences.LEVEL / max(1, len(tested))
    for one in differences:
        one["verdict"] = word_for(one, least[one["kind"]] * one["unit"])
        one["detectable"] = paired_differences.detectable(one, level)


def word_for(change: dict[str, Any], least: float) -> str:
    """Return the word for a difference.

    Args:
        least: the smallest difference that matters.
    """
    if change["p"] is None:
        return TOO_FEW
    value, significant = change["value"], change["p_holm"] <= paired_differences.LEVEL
    if not math.isfinite(value):
        return WORSE if significant else NO_DIFFERENCE
    if abs(value) < least:
        within = -least < change["low"] and change["high"] < least
        return NEGLIGIBLE if significant or within else NO_DIFFERENCE
    if not significant:
        return NO_DIFFERENCE
    return BETTER if (value > 0) == change["higher_is_better"] else WORSE


def judge(measures: list[Measure]) -> dict[str, Any]:
    """Return the verdict on the whole, from the word of each measure."""
    forgot = [each.name.rpartition(" ")[0] for each in measures if each.forgetting and each.word == WORSE]
    deciding = [each for each in measures if not each.forgetting and each.word]
    word, title = _whole(deciding)
    kept = "; ".join(described_forgetting(each) for each in measures if each.forgetting)
    why = ", ".join(described(each) for each in measures if not each.forgetting)
    if not deciding:
        missing = "the run has no validation set and no task: set data.validation or eval.tasks"
        why += f"{'; ' * bool(why)}{missing}"
    elif word == UNKNOWN:
        why += "; use a larger validation set (data.validation, data.validation_fraction)"
    if kept:
        why += f"{'. ' * bool(why)}Forgetting check: {kept}"
    return {"word": word, "title": title, "why": why, "forgot": forgot}


def _whole(deciding: list[Measure]) -> tuple[str, str]:
    """Return word and title. Contradictions come first, so that no measure hides another."""
    words = {each.metric: each.word for each in deciding if each.metric in ("loss", "exact_match")}
    said = {each.word for each in deciding} - {TOO_FEW}
    answers, loss = words.get("exact_match"), words.get("loss")
    if (answers, loss) == (BETTER, WORSE):
        return MIXED, OVERFITTING
    if (answers, loss) == (WORSE, BETTER):
        return MIXED, WORSE_ANSWERS
    if {BETTER, WORSE} <= said:
        return MIXED, TITLES[MIXED]
    right = [each.scores["tuned"].get("exact_match") for each in deciding if each.metric == "exact_match"]
    if loss == BETTER and right == [0]:
        return MIXED, NO_ANSWER
    for word in (BETTER, WORSE, NO_DIFFERENCE, NEGLIGIBLE):
        if word in said:
            return word, TITLES[word]
    return UNKNOWN, TITLES[UNKNOWN]


def described(measure: Measure) -> str:
    """Return `exact match 29.0% -> 22.0% (no significant difference; with 100 examples, ...)`."""
    text = f"{titled(measure.name)} {_values(measure)}"
    return f"{text} ({measure.word}{_limits(measure)})" if measure.word else text


def described_forgetting(measure: Measure) -> str:
    """Return `loss on general text is lower than the base model's (2.31 -> 2.28, 95% CI ...)`."""
    change, word = measure.change, measure.word
    text, name = _values(measure), titled(measure.name)
    if change.get("low") is not None and change.get("high") is not None:
        low, high = (_changed(measure, change[end]) for end in ("low", "high"))
        unit = " points" if _is_share(measure) else ""
        text += f", 95% CI {low} to {high}{unit}"
    inside = f"({text}{_limits(measure)})"
    if word in (BETTER, WORSE):
        return f"{name} is {_direction(change, word)} than the base model's {inside}"
    return f"{FORGETTING.get(word, word)}: {name} {inside}".removeprefix(": ")


def _is_share(measure: Measure) -> bool:
    return formatting.is_share(measure.metric, measure.scores["base"], measure.scores["tuned"])


def _values(measure: Measure) -> str:
    """Return the scores of the base model and the fine-tuned model: `29.0% -> 22.0%`."""
    sides = (measure.scores[side][measure.metric] for side in ("base", "tuned"))
    return " -> ".join(formatting.number(value, share=_is_share(measure)) for value in sides)


def _changed(measure: Measure, value: float) -> str:
    return formatting.signed(value, formatting.points if _is_share(measure) else formatting.figure)


def _limits(measure: Measure) -> str:
    """Return which difference the examples can show, or how many examples a test needs."""
    change = measure.change
    if measure.word == NO_DIFFERENCE and math.isfinite(change.get("detectable", math.inf)):
        least = f"{change['detectable']:.2g}"
        if _is_share(measure):
            least = f"{formatting.points(change['detectable'])} points"
        return f"; with {change['examples']:,} examples, a difference below {least} can go unnoticed"
    if measure.word == TOO_FEW and "needed" in change:
        count = f"{change['distinct']}"
        if change["distinct"] >= change["needed"]:  # a few long examples hold most of the tokens
            count += f", which weigh as much as {change['freedom'] + 1:.0f}"
        return f": {count}; a test needs {change['needed']}"
    return ""


def title(said: dict[str, Any]) -> str:
    """Return the headline of a stored verdict, also of an earlier version, with a note on forgetting."""
    text = said.get("title") or TITLES.get(current_word(str(said.get("word"))), TITLES[UNKNOWN])
    if not said.get("forgot"):
        return text
    return f"{text}{', but' if said.get('word') == BETTER else ';'} worse on general tasks"


def sentence(said: dict[str, Any]) -> str:
    """Format a verdict as one line. All outputs use it."""
    return f"{title(said)}: {said.get('why', '')}"
