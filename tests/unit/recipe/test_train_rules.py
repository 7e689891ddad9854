"""Settings of `train:` that its schedule or optimizer would refuse, or never read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from finetune.autoconfig import batch_size, optimizer_choice
from finetune.checkpointing import serialization
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.recipe import loader, train_rules, upstream_options
from finetune.training import optimizers
from support.paths import QUICKSTART
from support.runs import run_checks

STREAMED = ["data.streaming=true", "train.max_steps=4"]
KWARGS = "train.lr_scheduler_kwargs"
MIN_LR = "train.lr_scheduler_type=cosine_with_min_lr"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train.lr_scheduler_type=cosine_with_min_lr"], "needs its last learning rate"),
        (["train.lr_scheduler_type=warmup_stable_decay"], "needs num_decay_steps"),
        (
            ["train.lr_scheduler_type=cosine_with_min_lr", f"{KWARGS}={{mn_lr: 1e-5}}"],
            "mn_lr: the schedule cosine_with_min_lr has no such option",
        ),
        (
            ["train.lr_scheduler_type=cosine", f"{KWARGS}={{min_lr: 0.001}}"],
            "min_lr: the schedule cosine has no such option",
        ),
        (["train.lr_scheduler_type=constant", f"{KWARGS}={{num_cycles: 2}}"], "expected: no options"),
        (
            ["train.lr_scheduler_type=cosine_with_min_lr", f"{KWARGS}={{min_lr: 0.1}}"],
            "min_lr: the last learning rate is not below the peak",
        ),
        ([MIN_LR, f"{KWARGS}={{min_lr: .inf}}"], "found: .inf expected: a finite number"),
        ([MIN_LR, f"{KWARGS}={{min_lr: .nan}}"], "found: .nan expected: a finite number"),
        ([MIN_LR, f"{KWARGS}={{min_lr_rate: -0.5}}"], "found: -0.5 expected: at least 0"),
        ([MIN_LR, f"{KWARGS}={{min_lr: -1e-5}}"], "found: -1e-05 expected: at least 0"),
        ([MIN_LR, f"{KWARGS}={{min_lr: {10**310}}}"], "help: train.lr_scheduler_kwargs.min_lr=0.0004"),
        (["train.lr_scheduler_type=cosine", f"{KWARGS}={{num_cycles: .nan}}"], "found: .nan expected"),
        (["train.lr_scheduler_type=polynomial", f"{KWARGS}={{lr_end: 0.005}}"], "expected: less than 0.004"),
        ([f"{KWARGS}=abc"], "a string in place of a mapping"),
        (["train.adam_beta2=1.0"], "less than 1"),
        ([MIN_LR, f"{KWARGS}={{min_lr: low}}"], "min_lr: wrong type (override"),
        ([MIN_LR, f"{KWARGS}={{min_lr_rate: true}}"], "found: true expected: a finite number"),
        ([MIN_LR, f"{KWARGS}={{min_lr_rate: [0.1]}}"], "found: [0.1] expected: a finite number"),
        (
            [
                "train.lr_scheduler_type=warmup_stable_decay",
                f"{KWARGS}={{num_decay_steps: 5, decay_type: cosin}}",
            ],
            "decay_type: not one of the allowed values (override",
        ),
        (["train.lr_scheduler_type=reduce_lr_on_plateau"], "the Trainer's own evaluations"),
        (["train.lr_scheduler_type=greedy"], "the Trainer's own evaluations"),
        (["train.optim=schedule_free_adamw"], "does not support schedule-free optimizers"),
        (["train.optim_args=amsgrad=true"], "adamw_torch_fused ignores `optim_args`"),
        (["train.optim=sgd", "train.optim_args=momentm=0.9"], "momentm expected: dampening, momentum,"),
        (
            ["train.save_strategy=epoch", "train.save_steps=5"],
            "train.save_steps: this key has no effect with `save_strategy: epoch`",
        ),
        ([*STREAMED, "train.train_sampling_strategy=sequential"], "reads a stream in its own order"),
        ([*STREAMED, "train.data_seed=1"], "`train.seed` is the seed that shuffles a stream"),
        (["train.optim_target_modules=all-linear"], "does not project gradients"),
        (["train.shuffle_dataset=true"], "train.train_sampling_strategy"),
        (["train.length_column_name=foo"], "finetune counts the lengths"),
    ],
)
def test_what_would_be_refused_or_never_read_is_known_before(given: list[str], said: str, capsys) -> None:
    assert main.main(["check", str(QUICKSTART), *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", sorted(upstream_options.schedules()))
def test_what_is_let_through_can_be_made(name: str) -> None:
    """With what each schedule needs; without it both refuse."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    options = {"warmup_stable_decay": {"num_decay_steps": 2}}.get(
        name, {"min_lr_rate": 0.1} if "min_lr" in name else {}
    )
    for given in ({}, options):
        raw = {"train": {"lr_scheduler_type": name, "lr_scheduler_kwargs": given}}
        found = train_rules.conflicts(raw)
        if name in train_rules.OF_METRICS:
            assert found
            continue
        made = {"num_warmup_steps": 1, "num_training_steps": 8, "scheduler_specific_kwargs": given}
        if found:
            with pytest.raises((TypeError, ValueError)):
                get_scheduler(name, optimizer, **made)
        else:
            get_scheduler(name, optimizer, **made)
            asked: Any = SimpleNamespace(learning_rate=0.1, lr_scheduler_type=name, lr_scheduler_kwargs=given)
            asked.get_warmup_steps = lambda steps: 1
            optimizers.check_schedule(asked, 8)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cosine", {"num_cycles": "two"}),
        ("cosine_with_min_lr", {"min_lr_rate": 2}),
        ("inverse_sqrt", {"timescale": 0}),
        ("polynomial", {"power": "x"}),
        ("polynomial", {"lr_end": -1e-3}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "exp"}),
    ],
)
def test_a_schedule_is_followed_to_its_end_before_anything_loads(name: str, given: dict) -> None:
    asked: Any = SimpleNamespace(learning_rate=1e-3, lr_scheduler_type=name, lr_scheduler_kwargs=given)
    asked.get_warmup_steps = lambda steps: 1
    with pytest.raises(UserError, match=f"lr_scheduler_kwargs: the schedule {name} (gives|raises)"):
        optimizers.check_schedule(asked, 8)


def test_a_schedule_without_options_is_blamed_itself() -> None:
    asked: Any = SimpleNamespace(learning_rate=1e-8, lr_scheduler_type="polynomial", lr_scheduler_kwargs=None)
    asked.get_warmup_steps = lambda steps: 1
    with pytest.raises(UserError, match="lr_scheduler_type: the schedule polynomial raises an error"):
        optimizers.check_schedule(asked, 8)


def test_an_option_that_a_schedule_has_not_is_no_end_either() -> None:
    raw = {"train": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 1}}}
    assert [problem.what for problem in train_rules.conflicts(raw)] == [
        "the schedule cosine has no such option"
    ]


def test_a_decay_that_begins_in_the_warm_up_is_said() -> None:
    given = ["train.lr_scheduler_type=warmup_stable_decay", "train.warmup_steps=1"]
    asked = loader.load(QUICKSTART, [*given, f"{KWARGS}={{num_decay_steps: 10}}"]).train
    (said,) = batch_size.short_of_peak(asked, 4)
    assert said.endswith("its peak: the run has 4 steps, of which 1 are warm-up and 10 are decay")
    assert not batch_size.short_of_peak(asked, 11)


def test_options_that_torchs_optimizers_take_are_let_through() -> None:
    for optim, given in (("sgd", "momentum=0.9, nesterov=true"), ("rmsprop", "alpha=0.9,centered=1")):
        loader.load(QUICKSTART, [f"train.optim={optim}", f"train.optim_args={given}"])
    loader.load(QUICKSTART, ["train.save_strategy=steps", "train.save_steps=5", "train.data_seed=1"])


def test_projected_gradients_are_not_kept_in_checkpoints() -> None:
    given = ["train.optim=galore_adamw", "train.optim_target_modules=all-linear"]
    assert optimizer_choice.unsaved(loader.load(QUICKSTART, given).train, "") == "galore_adamw"
    assert optimizer_choice.saved_instead("galore_adamw") == "train.optim=adamw_torch_fused"
    with pytest.raises(UserError, match="projector: object"):
        serialization.flatten({"projector": object()}, {}, "state", lambda tensor: tensor)


def test_an_optimizer_is_held_to_its_own_name(train) -> None:
    """Not to what transformers' enum is as a text, in which no 8 bits are found."""
    check = run_checks(train("train.max_steps=1", "train.warmup_steps=0"))["train.optim"]
    assert check["expected"] == train_rules.DEFAULT and check["passed"]


def test_a_warm_up_that_its_schedule_has_not_is_said() -> None:
    given = ["train.lr_scheduler_type=constant", "train.warmup_steps=2"]
    (said,) = batch_size.short_of_peak(loader.load(QUICKSTART, given).train, 10)
    assert "constant_with_warmup" in said
    assert not batch_size.short_of_peak(loader.load(QUICKSTART, given[1:]).train, 10)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("optim_args is wrong", "train.optim_args"),
        ("--optim x wants optim_args", "train.optim"),
        ("the optimum: save_steps_2", "train"),
    ],
)
def test_what_upstream_refuses_stands_at_the_first_key_that_it_names_whole(said: str, key: str) -> None:
    given = {"optim": "x", "optim_args": "y", "save_steps": 1}
    assert train_rules.refused("SFTConfig", ValueError(said), given).key == key
    assert train_rules.refused("SFTConfig", ValueError(said), {}).key == "train"


def test_order_of_examples_that_depends_on_workers_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"train\.dataloader_in_order: finetune needs the examples in a fixed order"
    ):
        loader.load(QUICKSTART, ["train.dataloader_in_order=false", "train.dataloader_num_workers=2"])
