"""Find settings of `train:` that the chosen schedule or optimizer refuses or ignores."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, nearest
from finetune.recipe import upstream_options
from finetune.recipe.schema import Train

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        texts = {"found": given, "fix": "{num_cycles: 0.5}, or what the schedule takes"}
        found.append(("train.lr_scheduler_kwargs", "is a mapping", texts))
    data = raw.get("data")
    streamed = isinstance(data, dict) and data.get("streaming")
    found += [*_of_numbers(train), *_of_order(train, streamed=bool(streamed))]
    return [*found, *_of_optimizer(str(train.get("optim") or DEFAULT), train)]


def refused(by: str, error: Exception, given: Mapping[str, Any]) -> Problem:
    """Return a library's error as a problem. Its key is the first setting that the error names."""
    said = " ".join(str(error).split())
    named = re.search(rf"\b({'|'.join(map(re.escape, given))})\b", said) if given else None
    return Problem(f"{by} refuses it", f"train.{named[1]}" if named else "train", found=said)


def _of_schedule(
    name: str, given: dict[str, Any], needed: frozenset[str], taken: frozenset[str]
) -> Iterator[Found]:
    key, options = "train.lr_scheduler_kwargs", taken - GIVEN
    if name in OF_METRICS:
        what = "follows the Trainer's own evaluations, which `eval.eval_steps` stands in for here"
        yield "train.lr_scheduler_type", what, {"found": name, "fix": "cosine"}
        return
    for one in sorted(given.keys() - options, key=str):
        expected = ", ".join(sorted(options)) or "none: it takes no options"
        texts = {"found": one, "expected": expected, "fix": nearest(str(one), options)}
        yield f"{key}.{one}", f"is no option of {name}", texts
    missing = sorted(needed - GIVEN - given.keys())
    if missing:
        yield key, f"{name} needs {', '.join(missing)}", {"fix": f"{{{missing[0]}: 100}}"}
    if set(ONE_OF) <= options and not any(given.get(one) is not None for one in ONE_OF):
        yield key, f"{name} needs the rate that it ends at", {"fix": "{min_lr_rate: 0.1}"}


def _of_rates(given: dict[str, Any], peak: Any) -> Iterator[Found]:
    """Find options that raise the rate above its peak, or that transformers refuses after the model loads."""
    for one, number in given.items():
        key, texts = f"train.lr_scheduler_kwargs.{one}", {"found": str(number)}
        if one.endswith("_type"):  # decay_type
            if number not in SHAPES:
                expected = ", ".join(SHAPES)
                yield key, "wrong value", {**texts, "expected": expected, "fix": nearest(str(number), SHAPES)}
        elif number is None:
            continue
        elif not isinstance(number, int | float) or isinstance(number, bool) or not _is_finite(number):
            yield key, "wrong type", {**texts, "expected": "a finite number"}
        elif "lr" in one and number < 0:
            yield key, "out of range", {**texts, "expected": ">= 0"}
        elif one in ENDS and isinstance(peak, int | float) and 0 < peak <= min(number, LARGEST):
            what = f"is no end to go down to: train.learning_rate is {peak:g}"
            yield key, what, {**texts, "fix": f"{peak / 10:g}"}


def _is_finite(number: float) -> bool:
    return isinstance(number, int) or math.isfinite(number)  # some integers are too large for a float


def _of_numbers(train: dict[str, Any]) -> Iterator[Found]:
    """Find values that transformers refuses when training starts and that their types allow."""
    every = train.get("logging_steps")
    if isinstance(every, float) and 1 < every < math.inf and every % 1:
        texts = {"found": f"{every:g}", "expected": "an integer, or a share of the run below 1"}
        yield "train.logging_steps", "steps are whole", texts


def _of_order(train: dict[str, Any], *, streamed: bool) -> Iterator[Found]:
    """Find settings of the data order and of checkpoints that would be ignored."""
    strategy = train.get("train_sampling_strategy")
    if streamed and strategy not in (None, "random"):
        what = "a stream is read in its own order, shuffled in data.shuffle_buffer"
        yield "train.train_sampling_strategy", what, {"found": str(strategy), "fix": "drop it"}
    if streamed and train.get("data_seed") is not None:
        what = "a stream is shuffled by train.seed"
        yield "train.data_seed", what, {"found": str(train["data_seed"]), "fix": "drop it"}
    if train.get("save_strategy") == "epoch" and train.get("save_steps") is not None:
        what = "save_strategy: epoch saves at the ends of epochs alone"
        texts = {"found": str(train["save_steps"]), "fix": "drop it; or save_strategy: steps"}
        yield "train.save_steps", what, texts


def _of_optimizer(optim: str, train: dict[str, Any]) -> Iterator[Found]:
    if optim.startswith("schedule_free"):
        what = "what it trains is not what is to be saved, but an average that it keeps: not made here"
        yield "train.optim", what, {"found": optim, "fix": f"optim: {DEFAULT}"}
    elif train.get("optim_args") and not _READS_ARGS.fullmatch(optim):
        fix = "drop it, or train.adam_beta1, adam_beta2, adam_epsilon, weight_decay in its place"
        yield "train.optim_args", f"{optim} reads none", {"found": str(train["optim_args"]), "fix": fix}
    elif optim in _ARGS and isinstance(train.get("optim_args"), str):
        for name in (part.partition("=")[0].strip() for part in train["optim_args"].split(",")):
            if name not in _ARGS[optim]:
                expected = ", ".join(sorted(_ARGS[optim]))
                texts = {"found": name, "expected": expected, "fix": nearest(name, _ARGS[optim])}
                yield "train.optim_args", f"{optim} reads no such option", texts
    if train.get("optim_target_modules") and not PROJECTS.fullmatch(optim):
        what = f"{optim} reads none: it projects no gradients"
        yield "train.optim_target_modules", what, {"fix": "drop it; or optim: galore_adamw"}


DEFAULT = "adamw_torch_fused"
PROJECTS = re.compile("(galore|apollo).*")  # they project gradients, and checkpoints can't save their state
