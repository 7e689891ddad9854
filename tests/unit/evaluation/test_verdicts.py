"""Verdicts: one family with Holm's correction, the smallest difference that matters, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.examples import Example
from finetune.data.preparation import HeldOut
from finetune.evaluation import results, verdicts
from finetune.evaluation.paired_differences import difference
from finetune.evaluation.verdicts import BETTER, MIXED, NEGLIGIBLE, NO_DIFFERENCE, TOO_FEW, UNKNOWN, WORSE

EMPTY: dict[str, Any] = {"base": {}, "tuned": {}, "difference": {}, "tasks": {}}


def change(value: float, p: float | None, kind: str = "loss", **more: Any) -> dict[str, Any]:
    """A difference of a metric of which less is better if it is a loss."""
    least = {"value": value, "low": value - 0.1, "high": value + 0.1, "p": p, "kind": kind, "unit": 1.0}
    least |= {"standard_error": 0.05, "freedom": 99.0, "examples": 100, "distinct": 100}
    return least | {"higher_is_better": kind == "score"} | more


def evaluation(
    loss: Any = None, answers: Any = None, base_right: float = 0.5, **tasks: Any
) -> dict[str, Any]:
    metrics = {name: one for name, one in (("loss", loss), ("exact_match", answers)) if one}
    starts = {"loss": 1.0, "exact_match": base_right}
    base = {name: starts[name] for name in metrics}
    tuned = {name: starts[name] + one["value"] for name, one in metrics.items()}
    return {"base": base, "tuned": tuned, "difference": metrics, "tasks": tasks}


def task(one: dict[str, Any], *, forgetting: bool = False, asked: bool = True) -> dict[str, Any]:
    sides = {"base": {"acc": 0.5}, "tuned": {"acc": 0.5 + one["value"]}, "difference": {"acc": one}}
    return {**sides, "main": "acc", "forgetting": forgetting, "asked": asked}


FELL, ROSE, SAME = (change(value, p) for value, p in ((-0.5, 1e-6), (0.5, 1e-6), (0.02, 0.5)))
RIGHT, WRONG, EQUAL = (change(v, p, "score") for v, p in ((0.2, 1e-6), (-0.2, 1e-6), (0.02, 0.5)))


@pytest.mark.parametrize(
    ("loss", "answers", "word", "title"),
    [
        (FELL, RIGHT, BETTER, "Better than the base model"),
        (FELL, EQUAL, BETTER, "Better than the base model"),
        (SAME, RIGHT, BETTER, "Better than the base model"),
        (ROSE, WRONG, WORSE, "Worse than the base model"),
        (ROSE, EQUAL, WORSE, "Worse than the base model"),
        (ROSE, RIGHT, MIXED, "Answers are better, loss is worse: check for overfitting"),
        (FELL, WRONG, MIXED, "Loss is better, answers are worse: read the samples"),
        (SAME, EQUAL, NO_DIFFERENCE, "No significant difference from the base model"),
        (change(-2e-5, 1e-6), None, NEGLIGIBLE, "Negligible difference from the base model"),
        (change(-0.5, None), None, UNKNOWN, "Not enough data to compare with the base model"),
        (change(-0.5, None), RIGHT, BETTER, "Better than the base model"),
    ],
)
def test_verdict_on_each_combination(loss: Any, answers: Any, word: str, title: str) -> None:
    found = verdicts.verdict(evaluation(loss and {**loss}, answers and {**answers}))
    assert (found["word"], found["title"]) == (word, title)


def test_verdict_without_a_right_answer_is_not_better() -> None:
    unchanged = difference([0.0] * 100, [0.0] * 100, higher_is_better=True)
    found = verdicts.verdict(evaluation({**FELL}, unchanged, base_right=0.0))
    assert (found["word"], found["title"]) == (MIXED, "Loss is better, but no answer is correct yet")
    assert "exact match 0.0% -> 0.0%" in found["why"]


def test_verdict_of_nothing_is_unknown() -> None:
    assert verdicts.verdict(EMPTY)["word"] == UNKNOWN


def test_holm_corrects_over_loss_answers_tasks_and_forgetting() -> None:
    """One p of 0.02 counts alone, and not among twelve others; smaller ones leave it more room."""

    def words(*ps: float) -> list[str]:
        first, *others = ps
        tasks = {f"t{number}": task(change(0.2, p, "score")) for number, p in enumerate(others)}
        result = evaluation(change(-0.5, first), **tasks)
        verdicts.verdict(result)
        return [each.word for each in verdicts.family(result)]

    assert words(0.02) == [BETTER]
    assert words(0.02, *[0.6] * 12)[0] == NO_DIFFERENCE
    assert words(0.02, 0.02, 0.6) == [NO_DIFFERENCE] * 3
    assert words(0.02, 0.01, 0.6) == [BETTER, BETTER, NO_DIFFERENCE]
    kept = evaluation(change(-0.5, 0.03), kept=task(change(0.2, 0.6, "score"), forgetting=True))
    part = evaluation(change(-0.5, 0.03), part=task(change(0.2, 0.6, "score"), asked=False))
    few = evaluation(change(-0.5, 0.03), few=task(change(0.2, None, "score")))
    assert [verdicts.verdict(one)["word"] for one in (kept, part, few)] == [NO_DIFFERENCE, BETTER, BETTER]
    assert "verdict" not in part["tasks"]["part"]["difference"]["acc"], "a subtask has no verdict of its own"


def test_a_difference_counts_from_the_smallest_one_that_matters() -> None:
    settings = {"min_loss_difference": 0.1, "min_score_difference": 0.3}
    assert verdicts.verdict(evaluation(change(-0.05, 1e-9)))["word"] == BETTER
    small = evaluation(change(-0.05, 1e-9), change(0.2, 1e-9, "score")) | {"settings": settings}
    assert verdicts.verdict(small)["word"] == NEGLIGIBLE
    near = change(0.0, 0.9, low=-0.004, high=0.004)
    assert verdicts.verdict(evaluation(near))["word"] == NEGLIGIBLE, (
        "the interval shows it, without significance"
    )
    percent = change(0.5, 1e-9, "score", unit=100.0)  # an f1 from 0 to 100
    assert verdicts.verdict(evaluation(None, None, squad=task(percent)))["word"] == NEGLIGIBLE


def test_no_difference_says_what_the_examples_could_show() -> None:
    """A true drop from 29 % to 22 % is seldom seen on 100 examples."""
    base = [1.0] * 29 + [0.0] * 71
    tuned = [1.0] * 15 + [0.0] * 14 + [1.0] * 7 + [0.0] * 64
    found = verdicts.verdict(
        evaluation(None, difference(base, tuned, higher_is_better=True), base_right=0.29)
    )
    assert found["word"] == NO_DIFFERENCE
    assert "with 100 examples, a difference below 13." in found["why"]


def test_too_few_examples_say_how_many_are_needed() -> None:
    losses = evaluation(difference([1.0] * 9, [0.5] * 9, higher_is_better=False, weights=[1] * 9))
    assert (
        "(too few examples: 9; a test needs 20); use a larger validation set"
        in verdicts.verdict(losses)["why"]
    )
    asked = evaluation(None, difference([0.0] * 3, [1.0] * 3, higher_is_better=True))
    assert "(too few examples: 3; a test needs 6)" in verdicts.verdict(asked)["why"]
    assert asked["difference"]["exact_match"]["verdict"] == TOO_FEW
    tokens = [1000] * 3 + [1] * 40
    long = evaluation(difference([1.0] * 43, [0.5] * 43, higher_is_better=False, weights=tokens))
    assert (
        "(too few examples: 43, which weigh as much as 3; a test needs 20)" in verdicts.verdict(long)["why"]
    )


def test_forgetting_does_not_decide_and_is_named() -> None:
    result = evaluation({**FELL}, kept=task({**WRONG}, forgetting=True))
    found = verdicts.verdict(result)
    assert found["word"] == BETTER and found["forgot"] == ["kept"]
    assert verdicts.title(found) == "Better than the base model, but worse on general tasks"
    assert ". Forgetting check: kept acc is lower than the base model's (" in verdicts.sentence(found)
    slight = evaluation({**FELL}, kept=task(change(-3.6e-7, 1e-9, "score"), forgetting=True))
    assert verdicts.verdict(slight)["forgot"] == []


@pytest.mark.parametrize(
    ("word", "title"), [("same", "No significant difference from the base model"), ("odd", "Not enough data")]
)
def test_a_stored_verdict_of_an_earlier_version_has_today_s_title(word: str, title: str) -> None:
    assert verdicts.title({"word": word, "why": "because", "forgot": []}).startswith(title)


def test_equal_examples_share_a_group() -> None:
    def chat(asked: str, answer: str) -> HeldOut:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return HeldOut(Example("x:1", messages=turns), [])

    def text(words: str) -> HeldOut:
        return HeldOut(Example("x:1", completion=words), [])

    def pair(prompt: str, completion: str) -> HeldOut:
        return HeldOut(Example("x:1", prompt=prompt, completion=completion), [])

    chats = [chat("a", "1"), chat("b", "1"), chat("a", "1"), chat("a", "2")]
    assert results.equal_examples(chats) == [0, 1, 0, 0]
    assert results.equal_examples([text("a"), text("b"), text("a")]) == [0, 1, 0]
    assert results.equal_examples([pair("a", "1"), pair("b", "1"), pair("a", "2")]) == [0, 1, 0]
    assert results.equal_examples([pair("a", "1"), pair("a", "2"), pair("a", "1")]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("found", "word", "said"),
    [
        (
            change(-0.03, 1e-9),
            "no forgetting",
            "loss on general text is lower than the base model's (1 -> 0.97, 95% CI",
        ),
        (
            change(0.5, 1e-9),
            "higher loss",
            "loss on general text is higher than the base model's (1 -> 1.5, 95% CI",
        ),
        (
            change(0.02, 0.5),
            "no significant change",
            "no significant change: loss on general text (1 -> 1.02,",
        ),
        (
            change(0.001, 1e-9, low=0.0, high=0.002),
            "negligible change",
            "negligible change: loss on general text (1 ->",
        ),
        (change(0.5, None), TOO_FEW, "too few examples: loss on general text (1 -> 1.5,"),
    ],
)
def test_forgetting_check_says_what_was_measured(found: dict[str, Any], word: str, said: str) -> None:
    """A lower loss on general text is not called better, because the task is another one."""
    sides = {"base": {"loss": 1.0}, "tuned": {"loss": 1.0 + found["value"]}, "difference": {"loss": found}}
    result = evaluation({**FELL}, general_text={**sides, "main": "loss", "forgetting": True})
    why = verdicts.verdict(result)["why"]
    assert f". Forgetting check: {said}" in why, why
    assert verdicts.shown_word(found, "loss", forgetting=True) == word
