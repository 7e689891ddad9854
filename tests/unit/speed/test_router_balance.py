"""The routers' load-balancing loss next to the chunked loss: transformers' own loss, in runs as with TRL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from finetune.cli import main
from finetune.speed import lm_head_loss, router_balance
from support.architectures import CONFIGS
from support.tiny_models import recipe, save, sizes

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "phimoe",
    "jamba",
    "qwen3_next",
    "gpt_oss",
]
IDS = torch.arange(2, 42).view(2, 20)
MASK = torch.ones(2, 20).long()
MASK[1, 13:] = 0


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    calm = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0} if family == "phimoe" else {}
    config = AutoConfig.for_model(family, **CONFIGS[family] | calm)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", [None, MASK], ids=["no padding", "padding"])
def test_loss_and_gradients_are_transformers(family: str, mask: torch.Tensor | None) -> None:
    """Of the logits that transformers captures, on a model whose layers have no dropout."""
    model = model_of(family)
    text = model.config.get_text_config()
    text.num_experts = getattr(text, "num_experts", None) or text.num_local_experts
    own = model.model(input_ids=IDS, attention_mask=mask, output_router_logits=True, use_cache=False)
    wanted: Any = load_balancing_loss_func(
        own.router_logits, text.num_experts, text.num_experts_per_tok, mask
    )
    trained = [p for p in model.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(wanted, trained, allow_unused=True)
    balance = router_balance.RouterBalance(model)
    for router, _ in balance.routers:
        router.training = True
    model.model(input_ids=IDS, attention_mask=mask, use_cache=False)
    ours = balance.loss(mask)
    assert len(balance.routers) == len(own.router_logits)
    assert torch.allclose(ours, wanted, rtol=1e-5)
    for one, right in zip(torch.autograd.grad(ours, trained, allow_unused=True), gradients, strict=True):
        assert (one is None) == (right is None)
        assert one is None or torch.allclose(one, right, rtol=1e-3, atol=1e-6)
    balance.remove()
    assert not [m for m in model.modules() if "forward" in vars(m) or router_balance.LOGITS in vars(m)]


def test_a_dense_model_has_no_router() -> None:
    assert not router_balance.routers_of(model_of("llama"))


def test_out_of_training_nothing_is_kept() -> None:
    model = model_of("mixtral")
    installed = lm_head_loss.install(model, compiled=False, balanced=True)
    assert model(input_ids=IDS, labels=IDS, num_labels=38).aux_loss is None
    assert model.train()(input_ids=IDS, labels=IDS, num_labels=38).aux_loss > 0
    installed.undo()
    assert not [m for m in model.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("coefficient", ["null", "1"])
def test_a_run_is_what_it_was_with_trl(coefficient: str, tmp_path: Path, capsys) -> None:
    """Losses and what is logged of the balance, over accumulated and padded micro-batches."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes(**experts), router_aux_loss_coef=0.5, router_jitter_noise=0.0)
    model = save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    lines = []
    for loss in ("trl", "chunked"):
        given = [f"speed.loss={loss}", f"train.output_dir={tmp_path / loss}", "train.max_steps=3"]
        given += ["train.per_device_train_batch_size=2", "train.effective_batch_size=4"]
        given += [f"train.router_aux_loss_coef={coefficient}"]
        path = recipe(tmp_path, model, adapter=adapter)
        assert main.main(["train", str(path), *given]) == 0, capsys.readouterr().err
        logged = [json.loads(line) for line in (tmp_path / loss / "metrics.jsonl").read_text().splitlines()]
        lines.append([line for line in logged if "loss" in line])
    for own, ours in zip(*lines, strict=True):
        assert own["aux_loss"] > 0.5 and ours["aux_loss"] == pytest.approx(own["aux_loss"], rel=1e-4)
        assert ours["loss"] == pytest.approx(own["loss"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-3)
