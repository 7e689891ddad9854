"""Find settings of `train:` that the chosen schedule or optimizer refuses or ignores."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.core.errors import Problem, nearest
from finetune.core.formatting import as_yaml
from finetune.recipe import upstream_options
from finetune.recipe.schema import Train

Found = tuple[str, str, dict[str, str]]  # key, message, the other fields of the problem
SCHEDULED = {"lr_scheduler_type", "lr_scheduler_kwargs"}
# Arguments that the Trainer sets.
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
# Schedules with both options need one of them.
ONE_OF = ("min_lr", "min_lr_rate")
# Options that are learning rates, not shares of the peak.
ENDS = ("lr_end", "min_lr")
# Values of warmup_stable_decay's `decay_type` and `warmup_type`.
SHAPES = ("linear", "cosine", "1-sqrt")
# Largest learning rate in a comparison. An integer in a recipe may be larger than any float.
LARGEST = 1e300
# Schedules that follow an evaluation metric.
OF_METRICS = ("reduce_lr_on_plateau", "greedy")
# Optimizers for which the Trainer reads `optim_args` (transformers 5.22, trainer_optimizer.py).
_READS_ARGS = re.compile(
    ".*ademamix.*|adamw_anyprecision|sgd|adagrad|rmsprop.*|galore.*|apollo.*|grokadamw|adamw_torch_[48]bit"
    "|stable_adamw"
)

# Names in `optim_args` that torch's optimizers read. The names of other optimizers are not checked.
_ARGS = {
    "sgd": {"momentum", "dampening", "weight_decay", "nesterov"},
    "adagrad": {"lr_decay", "weight_decay", "eps"},
    "rmsprop": {"momentum", "alpha", "eps", "weight_decay", "centered"},
}


def conflicts(raw: Mapping[str, Any]) -> list[Found]:
    """Return the settings that conflict with the schedule or the optimizer, in a recipe as it was read."""
    train = raw.get("train")
    if not isinstance(train, dict):
        return []
    name, given = train.get("lr_scheduler_type", "linear"), train.get("lr_scheduler_kwargs") or {}
    named = isinstance(name, str) and isinstance(given, dict) and train.keys() & SCHEDULED
    known = upstream_options.schedules().get(str(name)) if named else None
    found: list[Found] = []
    if known:
        peak = train.get("learning_rate", Train.model_fields["learning_rate"].default)
        taken = {one: given[one] for one in given if one in known[1]}
        found += [*_of_schedule(str(name), given, *known), *_of_rates(taken, peak)]
    if isinstance(given, str):  # SFTConfig's annotation allows a string
        texts = {"found": given, "expected": "a mapping", "code": "value-type"}
        texts |= {"fix": "lr_scheduler_kwargs: {num_cycles: 0.5}"}
        found.append(("train.lr_scheduler_kwargs", "a string in place of a mapping", texts))
    data = raw.get("data")
    streamed = isinstance(data, dict) and data.get("streaming")
    found += [*_of_numbers(train), *_of_order(train, streamed=bool(streamed))]
    return [*found, *_of_optimizer(str(train.get("optim") or DEFAULT), train)]


def refused(by: str, error: Exception, given: Mapping[str, Any]) -> Problem:
    """Return a library's error as a problem. Its key is the first setting that the error names."""
    said = " ".join(str(error).split())
    named = re.search(rf"\b({'|'.join(map(re.escape, given))})\b", said) if given else None
    return Problem(
        f"{by} does not accept this value",
        f"train.{named[1]}" if named else "train",
        found=said,
        code="value-range",
    )


def _of_schedule(
    name: str, given: dict[str, Any], needed: frozenset[str], taken: frozenset[str]
) -> Iterator[Found]:
    key, options = "train.lr_scheduler_kwargs", taken - GIVEN
    if name in OF_METRICS:
        what, why = f"finetune does not support the schedule {name}", "it needs the Trainer's own evaluations"
        texts = {"found": name, "fix": "lr_scheduler_type: cosine", "why": why, "code": "value-choice"}
        yield "train.lr_scheduler_type", what, texts
        return
    for one in sorted(given.keys() - options, key=str):
        near, expected = nearest(str(one), options), ", ".join(sorted(options)) or "no options"
        texts = {
            "found": str(one),
            "expected": expected,
            "fix": f"rename it to `{near}`" if near else f"remove `{one}`",
            "code": "unknown-key",
        }
        yield f"{key}.{one}", f"the schedule {name} has no such option", texts
    missing = sorted(needed - GIVEN - given.keys())
    if missing:
        what, fix = f"the schedule {name} needs {', '.join(missing)}", f"{{{missing[0]}: 100}}"
        yield key, what, {"fix": f"lr_scheduler_kwargs: {fix}", "code": "missing-key"}
    if set(ONE_OF) <= options and not any(given.get(one) is not None for one in ONE_OF):
        what, fix = f"the schedule {name} needs its last learning rate", "{min_lr_rate: 0.1}"
        yield key, what, {"fix": f"lr_scheduler_kwargs: {fix}", "code": "missing-key"}


def _of_rates(given: dict[str, Any], peak: object) -> Iterator[Found]:
    """Find options that raise the rate above its peak, or that transformers refuses after the model loads."""
    for one, number in given.items():
        key, texts = f"train.lr_scheduler_kwargs.{one}", {"found": as_yaml(number), "code": "value-range"}
        if one.endswith("_type"):  # decay_type
            if number not in SHAPES:
                near = nearest(str(number), SHAPES)
                texts |= {"expected": " or ".join(SHAPES), "fix": f"{one}: {near}" if near else ""}
                yield key, "not one of the allowed values", {**texts, "code": "value-choice"}
        elif number is None:
            continue
        elif not isinstance(number, int | float) or isinstance(number, bool) or not _is_finite(number):
            yield key, "wrong type", {**texts, "expected": "a finite number", "code": "value-type"}
        elif "lr" in one and number < 0:
            yield key, "a learning rate can't be negative", {**texts, "expected": "at least 0"}
        elif one in ENDS and isinstance(peak, int | float) and 0 < peak <= min(number, LARGEST):
            what, expected = "the last learning rate is not below the peak", f"less than {peak:g}"
            yield (
                key,
                what,
                {
                    **texts,
                    "expected": expected,
                    "fix": f"{one}: {peak / 10:g}",
                    "why": "it is the rate to which the schedule falls from train.learning_rate",
                },
            )


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)  # some integers are too large for a float


def _of_numbers(train: dict[str, Any]) -> Iterator[Found]:
    """Find values that transformers refuses when training starts and that their types allow."""
    every = train.get("logging_steps")
    if isinstance(every, float) and 1 < every < math.inf and every % 1:
        texts = {"found": f"{every:g}", "expected": "an integer, or a share of the run below 1"}
        texts |= {"fix": f"logging_steps: {round(every)}", "code": "value-type"}
        yield "train.logging_steps", "the number of steps is not an integer", texts


def _of_order(train: dict[str, Any], *, streamed: bool) -> Iterator[Found]:
    """Find settings of the data order and of checkpoints that would be ignored."""
    strategy = train.get("train_sampling_strategy")
    if streamed and strategy not in (None, "random"):
        what = "this key has no effect with `data.streaming: true`"
        why = "finetune reads a stream in its own order and shuffles it in `data.shuffle_buffer`"
        texts = {"found": as_yaml(strategy), "fix": "remove `train_sampling_strategy`", "why": why}
        yield "train.train_sampling_strategy", what, texts
    if streamed and train.get("data_seed") is not None:
        what = "this key has no effect with `data.streaming: true`"
        texts = {
            "found": as_yaml(train["data_seed"]),
            "fix": "remove `data_seed`",
            "why": "`train.seed` is the seed that shuffles a stream",
        }
        yield "train.data_seed", what, texts
    if train.get("save_strategy") == "epoch" and train.get("save_steps") is not None:
        what = "this key has no effect with `save_strategy: epoch`"
        texts = {
            "found": as_yaml(train["save_steps"]),
            "fix": "save_strategy: steps",
            "why": "finetune then saves a checkpoint only at the end of each epoch",
        }
        yield "train.save_steps", what, texts


def _of_optimizer(optim: str, train: dict[str, Any]) -> Iterator[Found]:
    if optim.startswith("schedule_free"):
        what = "finetune does not support schedule-free optimizers"
        yield (
            "train.optim",
            what,
            {
                "found": optim,
                "fix": f"optim: {DEFAULT}",
                "why": "they train other weights than the averaged weights that must be saved",
            },
        )
    elif train.get("optim_args") and not _READS_ARGS.fullmatch(optim):
        what = f"{optim} ignores `optim_args`"
        fix = "remove `optim_args`, or use adam_beta1, adam_beta2, adam_epsilon and weight_decay of `train:`"
        yield "train.optim_args", what, {"found": as_yaml(train["optim_args"]), "fix": fix}
    elif optim in _ARGS and isinstance(train.get("optim_args"), str):
        for name in (part.partition("=")[0].strip() for part in train["optim_args"].split(",")):
            if name not in _ARGS[optim]:
                near, expected = nearest(name, _ARGS[optim]), ", ".join(sorted(_ARGS[optim]))
                texts = {
                    "found": name,
                    "expected": expected,
                    "fix": f"optim_args: {train['optim_args'].replace(name, near)}" if near else "",
                    "code": "value-choice",
                }
                yield "train.optim_args", f"{optim} has no such option", texts
    if train.get("optim_target_modules") and not PROJECTS.fullmatch(optim):
        what, why = f"{optim} ignores `optim_target_modules`", "it does not project gradients"
        yield (
            "train.optim_target_modules",
            what,
            {"fix": "remove `optim_target_modules`, or set `optim: galore_adamw`", "why": why},
        )


DEFAULT = "adamw_torch_fused"
PROJECTS = re.compile("(galore|apollo).*")  # they project gradients, and checkpoints can't save their state
