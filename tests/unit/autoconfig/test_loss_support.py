"""`check` refuses a chunked loss that `train` would refuse, with the same reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from finetune.autoconfig import loss_support
from finetune.core.errors import Exit, UserError
from finetune.hardware.detection import Hardware
from finetune.planning import planned_machine, planner
from finetune.preflight import checker, choice_checks
from finetune.recipe import loader
from finetune.speed import fp8_cross_entropy, lm_head_loss
from support.launches import H100, PARALLEL, ZERO
from support.paths import QUICKSTART

SIZE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
A100 = Hardware("cuda", "NVIDIA A100-SXM4-80GB", 1, (8, 0), 79.2, 8)


def reasons(options: list[str], config: Any, machine: Hardware, precision: str = "bf16") -> str:
    """Return why `check` and `train` refuse the loss; the empty string if they do not."""
    recipe = loader.load(QUICKSTART, options)
    problems = loss_support.check_recipe(recipe, config)
    try:
        loss_support.check_machine(recipe.speed.loss, machine, precision)
    except UserError as error:
        assert error.code == Exit.ENVIRONMENT
        problems += error.problems
    assert all(problem.fix == "speed.loss: auto" for problem in problems)
    return "; ".join(problem.why for problem in problems)


BOTH = (
    ("label smoothing", ["train.label_smoothing_factor=0.1"], {}),
    ("virtual tokens", ["adapter.type=prompt_tuning"], {}),
    ("fp16", [], {"precision": "fp16"}),
)
FP8 = (
    ("no fp8 GEMMs", [], {"machine": A100}),
    ("precision is no", [], {"precision": "no"}),
    ("output head trains", ["adapter.type=full"], {}),
    ("softcap", [], {"config": Gemma2Config(**SIZE)}),
    ("not a multiple of 16", [], {"config": LlamaConfig(**{**SIZE, "vocab_size": 32003})}),
)
CONFIGS = [LlamaConfig(**SIZE), *(changed["config"] for _, _, changed in FP8 if "config" in changed)]
PLAIN: dict[str, Any] = {"config": CONFIGS[0], "machine": H100}


@pytest.mark.parametrize(("reason", "options", "changed"), [*BOTH, *FP8], ids=lambda value: str(value)[:20])
def test_check_refuses_a_loss_that_does_not_work(reason: str, options: list[str], changed: Any) -> None:
    arguments = {**PLAIN, **changed}
    assert reason in reasons(["speed.loss=chunked_fp8", *options], **arguments)
    both = (reason, options, changed) in BOTH
    assert (reason in reasons(["speed.loss=chunked", *options], **arguments)) == both
    for loss in ("auto", "trl"):
        assert not reasons([f"speed.loss={loss}", *options], **arguments)


@pytest.mark.parametrize("loss", loss_support.CHUNKED)
def test_check_refuses_the_loss_under_launches_that_shard_the_head(loss: str, monkeypatch) -> None:
    assert not reasons([f"speed.loss={loss}"], **PLAIN)
    for reason, launch in (
        ("ZeRO-3", {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
        ("context parallelism", {**PARALLEL, "PARALLELISM_CONFIG_CP_SIZE": "2"}),
    ):
        with monkeypatch.context() as patch:
            for name, value in launch.items():
                patch.setenv(name, value)
            assert reason in reasons([f"speed.loss={loss}"], **PLAIN)


def test_check_notes_a_loss_that_this_machine_lacks(tmp_path) -> None:
    recipe = loader.load(QUICKSTART, ["speed.loss=chunked_fp8", f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="no fp8 GEMMs"):
        choice_checks.setup_of(recipe)
    (note,) = [note for note in checker.check(recipe) if note.startswith("train would stop")]
    assert "speed.loss" in note and "the chunked loss does not work for this run" in note


def test_a_plan_refuses_a_loss_that_the_gpu_lacks() -> None:
    recipe = loader.load(QUICKSTART, ["speed.loss=chunked_fp8"])
    with pytest.raises(UserError, match="no fp8 GEMMs"):
        planner.make(recipe, *planned_machine.find("a100-80gb", 1))
    assert planner.make(recipe, *planned_machine.find("h100-80gb", 1)).step_seconds


@pytest.mark.parametrize("loss", loss_support.CHUNKED)
def test_check_refuses_a_loss_that_the_recipe_excludes(loss: str) -> None:
    recipe = loader.load(QUICKSTART, [f"speed.loss={loss}", "train.label_smoothing_factor=0.1"])
    for look in (checker.check_without_examples, choice_checks.setup_of):
        with pytest.raises(UserError, match="label smoothing needs all logits") as raised:
            look(recipe)
        assert raised.value.code == Exit.INPUT


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model_type} {config.vocab_size}")
def test_the_config_and_the_live_head_give_the_same_reason(config: Any, monkeypatch) -> None:
    """On a GPU with fp8 GEMMs: only whether they are there is answered for it."""
    monkeypatch.setattr(fp8_cross_entropy, "has_gemm", lambda device: True)
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device="meta")
    softcap = lm_head_loss.formula(config).softcap
    for head_trains in (False, True):
        live = fp8_cross_entropy.unsupported_reason(
            weight.requires_grad_(head_trains), bias=False, softcap=softcap
        )
        assert live == loss_support.fp8_unsupported_reason(config, head_trains=head_trains)
        assert loss_support.auto_uses_fp8(config, head_trains=head_trains) == (not live)
