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
from finetune.core.run_checks import RunChecks
from finetune.speed import apply_to_model, lm_head_loss, router_balance
from finetune.speed.live_model_spec import decoder_layers
from finetune.training import expert_use
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
    ours, use = balance.read(mask)
    assert ours is not None
    assert len(balance.routers) == len(own.router_logits)
    assert torch.allclose(ours, wanted, rtol=1e-5)
    for one, right in zip(torch.autograd.grad(ours, trained, allow_unused=True), gradients, strict=True):
        assert (one is None) == (right is None)
        assert one is None or torch.allclose(one, right, rtol=1e-3, atol=1e-6)
    flat = [
        logits.view(2, 20, -1)[(mask if mask is not None else torch.ones(2, 20)).bool()]
        for logits in own.router_logits
    ]
    entropy = sum(torch.distributions.Categorical(logits=logits).entropy().sum() for logits in flat)
    assert float(use.entropy) == pytest.approx(float(torch.as_tensor(entropy).detach()), rel=1e-5)
    assert int(use.rows) == sum(map(len, flat))
    assert use.tokens.sum(1).tolist() == [len(logits) * text.num_experts_per_tok for logits in flat]
    balance.remove()
    assert not [m for m in model.modules() if "forward" in vars(m) or router_balance.KEPT in vars(m)]


def test_a_dense_model_has_no_router() -> None:
    assert not router_balance.routers_of(model_of("llama"))


def test_out_of_training_nothing_is_kept() -> None:
    model = model_of("mixtral")
    installed = lm_head_loss.install(model, compiled=False, balanced=True)
    out = model(input_ids=IDS, labels=IDS, num_labels=38)
    assert out.aux_loss is None and out.router_rows is None and len(installed.routers) == 2
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


def test_without_the_loss_the_use_of_experts_is_counted() -> None:
    model = model_of("qwen3_moe").train()
    lm_head_loss.install(model, compiled=False)
    out = model(input_ids=IDS, labels=IDS, num_labels=38, attention_mask=MASK)
    assert out.aux_loss is None and out.expert_tokens.shape == (2, 4)
    assert out.expert_tokens.sum(1).tolist() == [66, 66] and int(out.router_rows) == 66
    assert not any(
        value.requires_grad
        for module in model.modules()
        for value in vars(module).get(router_balance.KEPT, ())
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("balanced", [False, True])
def test_recomputed_layers_release_their_outputs(*, balanced: bool, compiled: bool) -> None:
    """With activation checkpointing, the backward pass runs the routers again."""
    model = model_of("qwen3_moe").train()
    checks = RunChecks()
    apply_to_model.add_activation_checkpointing(model, decoder_layers(model), 2, checks)
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(backend="aot_eager")
    lm_head_loss.install(model, compiled=False, balanced=balanced)
    for _ in range(2):
        out = model(input_ids=IDS, labels=IDS, num_labels=38, attention_mask=MASK)
        assert int(out.router_rows) == 66 and (out.aux_loss is not None) == balanced
        (out.nll + (out.aux_loss if balanced else 0)).backward()
        assert not [m for m in model.modules() if router_balance.KEPT in vars(m)]


def test_experts_without_tokens_are_named_by_layer() -> None:
    tokens = torch.tensor([[3, 0, 2, 0], [1, 1, 1, 1], [0, 9, 9, 9]])
    routers = ["layers.1.mlp.gate", "layers.2.mlp.gate", "layers.3.mlp.gate"]
    assert expert_use.describe_idle(tokens, routers) == "layer 1: 1, 3; layer 3: 0"
    assert expert_use.describe_idle(tokens[1:2], routers[1:2]) == ""
    many = torch.zeros(7, 12, dtype=torch.int64)
    said = expert_use.describe_idle(many, [f"layers.{n}.gate" for n in range(7)])
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in said and said.endswith("; and 2 more layers")


def test_run_says_which_experts_received_no_token(tmp_path: Path, capsys) -> None:
    """The router of the model never chooses expert 3, because its row is far below the others."""
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**sizes(**experts, num_key_value_heads=2))
    folder = save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for router in (layer.mlp.gate for layer in model.model.layers):
        router.weight.data[3] = router.weight.data[2]  # a tie, which the lower index wins
    model.save_pretrained(folder)
    adapter = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear-and-experts"}
    path = recipe(tmp_path, folder, adapter=adapter, train={"logging_steps": 1})
    assert main.main(["train", str(path)]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert all(0 < line["router_entropy"] <= 1.3863 and 0 < line["expert_utilization"] < 1 for line in lines)
    checks = {one["option"]: one for one in json.loads((tmp_path / "run" / "checks.json").read_text())}
    assert "without a token: layer 0: " in checks["experts that received tokens"]["actual"]
    assert "received no token in training" in " ".join(capsys.readouterr().out.split())


def test_default_loss_trains_routers_whose_output_has_missing_parts() -> None:
    """The router of JetMoE's attention returns `None` among its outputs."""
    model = model_of("jetmoe").train()
    kept = router_balance.RouterBalance(model)
    model(input_ids=IDS)
    loss, _ = kept.read(None)
    assert loss is not None and torch.isfinite(loss)
