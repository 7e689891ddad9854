"""Show the differences between two runs: `finetune compare RUN_A RUN_B [--assert-equal]`.

It reads only the run folders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core import weight_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import figure
from finetune.run_folder import comparability
from finetune.run_folder.comparability import Differences
from finetune.run_folder.run_folder import RunFolder, open_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from finetune.core.console import Console


def run(a: str, b: str, screen: Console, *, must_equal: bool = False) -> list[Differences]:
    """Show the differences between two runs, part by part, and end with one sentence.

    Raises:
        UserError: a folder is not a run (exit 2). With `must_equal`, weights, losses or evaluation differ
            (exit 4).
    """
    left, right = open_run(a), open_run(b)
    reasons = comparability.obstacles(left, right)
    learnt = [curves(left, right), weights(left, right), results(left, right)]
    parts = [
        comparability.recipes(left, right),
        environments(left, right),
        comparability.data(left, right),
        *learnt,
    ]
    for part in parts:
        if part.rows:
            more = (
                [("...", f"{len(part.rows) - comparability.AT_MOST} more", "")]
                if len(part.rows) > comparability.AT_MOST
                else []
            )
            screen.table(
                part.part,
                ("", left.path.name, right.path.name),
                [*part.rows[: comparability.AT_MOST], *more],
            )
        screen.say(*([f"{part.part}: {part.summary}"] if part.summary else []))
    screen.say("", *(f"NOT COMPARABLE: {reason}" for reason in reasons))
    unequal = [part for part in learnt if part.rows]
    screen.say(sentence(unequal, [part.part for part in parts[:3] if part.rows], reasons))
    if must_equal and unequal:
        problems = [
            Problem(
                f"the {part.part} of the runs differ",
                found=part.summary,
                why="--assert-equal asks for equal losses, weights and evaluation",
                fix="compare recipe.resolved.yaml and environment.json of the runs",
                code="run-check",
            )
            for part in unequal
        ]
        raise UserError(*problems, code=Exit.ARTIFACT)
    return parts


def sentence(unequal: list[Differences], causes: list[str], reasons: list[str]) -> str:
    """Summarize the differences in one sentence."""
    given = f"Different: {', '.join(causes)}." if causes else "Recipe, environment and data are the same."
    if not unequal:
        return f"Losses, weights and evaluation of the runs are equal, bit for bit. {given}"
    names = ", ".join(part.part for part in unequal)
    sure = " Their figures are not comparable." if reasons else ""
    return f"The runs differ in: {names} ({unequal[0].summary}). {given}{sure}"


def environments(a: RunFolder, b: RunFolder) -> Differences:
    """Compare versions, git, hardware and launch. The Trainer's settings follow from the recipe."""
    left, right = (folder.read("environment.json") for folder in (a, b))
    keys = [key for key in dict.fromkeys([*left, *right]) if key != "sft_config"]
    rows = [row for key in keys for row in comparability.unequal(left.get(key), right.get(key), key)]
    return Differences("environment", rows)


def curves(a: RunFolder, b: RunFolder) -> Differences:
    """Compare the losses at the same steps."""
    left, right = ({line["step"]: line["loss"] for line in folder.steps()} for folder in (a, b))
    both = sorted(left.keys() & right.keys())
    apart = [step for step in both if left[step] != right[step]]
    rows = [(f"loss of step {step}", *comparability.shown_pair(left[step], right[step])) for step in apart]
    rows += [
        (
            f"loss of step {step}",
            figure(left.get(step)),
            figure(right.get(step)),
        )
        for step in sorted(left.keys() ^ right.keys())
    ]
    if not rows:
        return Differences("losses", [], f"equal at {len(both)} steps")
    gaps = [abs(float(left[step]) - float(right[step])) for step in both]
    said = f"{len(apart)} of {len(both)} steps differ" + (f", first step {apart[0]}" if apart else "")
    said += f", by at most {max(gaps):.3g} and {sum(gaps) / len(gaps):.3g} on average" if apart else ""
    alone = len(left.keys() ^ right.keys())
    return Differences("losses", rows, said + (f"; only one run has {alone} of the steps" if alone else ""))


def weights(a: RunFolder, b: RunFolder) -> Differences:
    """Compare the trained weights, tensor by tensor."""
    left, right = dict(tensors(a)), dict(tensors(b))
    if left.keys() != right.keys():
        alone = sorted(left.keys() ^ right.keys())
        rows = [(name, shape(left.get(name)), shape(right.get(name))) for name in alone]
        return Differences("weights", rows, f"only one run has {len(alone)} of {len(left | right)} tensors")
    rows, largest, furthest = [], 0.0, ""
    for name in left:
        one, other = left[name], right[name]
        if one.shape != other.shape:
            rows.append((name, shape(one), shape(other)))
        elif not one.equal(other) or one.dtype != other.dtype:
            gap = float((one.double() - other.double()).abs().max())
            largest, furthest = max((largest, furthest), (gap, name))
            norms = comparability.shown_pair(float(one.double().norm()), float(other.double().norm()))
            rows.append((name, *(f"norm {norm}" for norm in norms)))
    if not rows:
        return Differences("weights", [], f"all {len(left)} tensors are equal, bit for bit")
    said = f"{len(rows)} of {len(left)} tensors differ"
    return Differences(
        "weights", rows, said + (f", by at most {largest:.3g} ({furthest})" if furthest else "")
    )


def tensors(folder: RunFolder) -> Iterator[tuple[str, Any]]:
    """Yield the name and the values of each trained tensor. PyTorch compares 4-bit numbers only as bytes."""
    from torch import uint8

    for path in weight_files.find_weight_files(folder.weights, ""):
        with weight_files.opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                values = file.get_tensor(name)
                yield name, values.view(uint8) if "float4" in str(values.dtype) else values


def shape(tensor: Tensor | None) -> str:
    return comparability.MISSING if tensor is None else " x ".join(map(str, tensor.shape))


def results(a: RunFolder, b: RunFolder) -> Differences:
    """Compare every figure of the evaluation."""
    named = {"base model": "base", "fine-tuned model": "tuned", "tasks": "tasks"}
    found = (folder.found("eval.json") for folder in (a, b))
    left, right = ({name: result.get(key, {}) for name, key in named.items()} for result in found)
    rows = comparability.unequal(left, right)
    said = f"{rows[0][0]} is {rows[0][1]} in one run and {rows[0][2]} in the other" if rows else "equal"
    return Differences(
        "evaluation", rows, said if any(left.values()) or rows else "the runs have no evaluation"
    )
