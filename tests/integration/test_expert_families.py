"""Families of mixtures of experts: runs against a loop written by hand, and gradients against PEFT's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.adapters import expert_targets
from finetune.cli import main
from finetune.models import module_names
from finetune.run_folder.run_folder import RunFolder
from finetune.speed import fused_adapters, lm_head_loss
from support.expert_families import FAMILIES, SAMPLE, config_of
from support.paths import MODEL
from support.soak import soak_except
from support.tiny_models import recipe, save

if TYPE_CHECKING:
    from pathlib import Path

TYPES = [one.model_type for one in FAMILIES]
TEXTS = (
    "Once upon a time there was a little girl.",
    "The color of the sky",
    "Two.",
    "One plus one is two, I think.",
)
RATE, STEPS, COEFFICIENT = 0.01, 3, 2  # the coefficient is an integer
EXACT = 1e-9
REFUSED = "llama4_text"  # no loss without all logits: `model_class.NO_BASE_MODEL`


def tiny(model_type: str, **more: Any) -> Any:
    """A tiny model of a family in float32, with weights large enough that its parts matter."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoModelForCausalLM.from_config(config_of(model_type, vocab_size=len(tokenizer), **ids, **more))


def adapted(model: Any, **more: Any) -> Any:
    """PEFT's own model, with adapters on linear layers and experts that are not zero."""
    names = module_names.of_model(model)
    excluded = {"exclude_modules": ["dt_proj"]} if "dt_proj" in str(list(names.kinds)) else {}
    options = {"target_modules": expert_targets.WITH_EXPERTS, "r": 4, "lora_alpha": 8, **excluded}
    options = expert_targets.resolve(options, names, "lora").options
    torch.manual_seed(1)
    made = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return get_peft_model(model, made, **more)


def balance(logits: Any, real: torch.Tensor, each: int) -> torch.Tensor:
    """The load-balancing loss of the real tokens (arXiv 2101.03961), over all routers at once."""
    shares = torch.cat([one.view(*real.shape, -1)[real].softmax(-1) for one in logits])
    chosen = torch.zeros_like(shares).scatter(1, shares.topk(each, dim=-1).indices, 1.0)
    return shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum()


def by_hand(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], each: int) -> torch.Tensor:
    """One step's loss: tokens over all micro-batches, and the mean of the micro-batches' balance."""
    labels = sum(int(real[:, 1:].sum()) for _, real in batches)
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for ids, real in batches:
        out = model(input_ids=ids, attention_mask=real.long(), output_router_logits=True, use_cache=False)
        flat, wanted = out.logits[:, :-1].flatten(0, 1), ids[:, 1:].masked_fill(~real[:, 1:], -100).flatten()
        total = total + cross_entropy(flat, wanted, reduction="sum") / labels
        total = total + COEFFICIENT * balance(out.router_logits, real, each) / len(batches)
    return total


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[place < len(row) for place in range(longest)] for row in rows])


@pytest.mark.parametrize("rows_at_once", [4, 1], ids=["padded", "accumulated"])
@pytest.mark.parametrize("model_type", soak_except(SAMPLE[:2], [one for one in TYPES if one != REFUSED]))
def test_run_of_a_family_has_the_losses_of_a_loop_by_hand(
    model_type: str, rows_at_once: int, tmp_path: Path, capsys: Any
) -> None:
    folder = save(tmp_path / "model", tiny(model_type))
    start = adapted(AutoModelForCausalLM.from_pretrained(folder))
    start.save_pretrained(tmp_path / "start")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    adapter = {"type": "lora", "init_from": str(tmp_path / "start"), "from_other_base": True}
    train = {
        "per_device_train_batch_size": rows_at_once, "effective_batch_size": len(TEXTS), "max_steps": STEPS,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0,
        "weight_decay": 0.0, "router_aux_loss_coef": COEFFICIENT, "logging_steps": 1,
    }  # fmt: skip
    path = recipe(tmp_path, folder, adapter=adapter, train=train)
    assert main.main(["train", str(path), "speed.fused=true", "speed.compile=false"]) == 0, (
        capsys.readouterr().err
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    batches = [padded(rows)] if rows_at_once == 4 else [padded([row]) for row in rows]
    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "start", is_trainable=True
    ).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    each = model.config.get_text_config().num_experts_per_tok
    expected = []
    for _ in range(STEPS):
        loss = by_hand(model, batches, each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    trained = load_file(RunFolder(tmp_path / "run").adapter / "adapter_model.safetensors")
    model.save_pretrained(tmp_path / "hand")
    right = load_file(tmp_path / "hand" / "adapter_model.safetensors")
    assert trained.keys() == right.keys() and any("experts" in name for name in trained)
    for name, tensor in trained.items():
        assert torch.allclose(tensor, right[name], atol=1e-4), name


@pytest.mark.parametrize("model_type", soak_except(SAMPLE, TYPES))
def test_gradients_of_a_family_are_pefts_in_float64(model_type: str) -> None:
    """With finetune's forward of experts, its loss in chunks and its loss of the routers."""
    ids, real = padded([list(range(5, 25)), list(range(30, 41))])
    found = []
    for ours in (False, True):
        base = tiny(model_type, experts_implementation="eager").double()
        model = adapted(base, autocast_adapter_dtype=False).double().train()
        if ours:
            fused_adapters.apply(model)
        if ours and model_type != REFUSED:
            lm_head_loss.install(model, compiled=False, balanced=True)
            labels = ids.masked_fill(~real, -100)
            out = model(
                input_ids=ids, attention_mask=real.long(), labels=labels, num_labels=int(real[:, 1:].sum())
            )
            loss = out.nll / real[:, 1:].sum() + COEFFICIENT * out.aux_loss
        else:
            loss = by_hand(model, [(ids, real)], model.config.get_text_config().num_experts_per_tok)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (right, theirs), (loss, gradients) = found
    assert abs(float(loss - right)) < EXACT
    assert gradients.keys() == theirs.keys()
    worst = max(float((gradients[name] - theirs[name]).abs().max()) for name in theirs)
    assert worst < EXACT and all(float(g.abs().max()) > 0 for g in theirs.values())


@pytest.mark.parametrize("model_type", soak_except(("qwen3_moe",), ("qwen3_moe", "mixtral", "olmoe")))
def test_packed_loss_and_gradients_of_fused_experts_are_the_sums_of_unpacked_ones(model_type: str) -> None:
    base = tiny(model_type, attn_implementation="sdpa").double()
    model = adapted(base, autocast_adapter_dtype=False).double().train()
    fused_adapters.apply(model)
    assert any("finetune_experts" in vars(module) for module in model.modules())
    rows = [list(range(5, 25)), list(range(30, 41)), [7, 8, 9]]
    positions = [place for row in rows for place in range(len(row))]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def measured(ids: list[int], places: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        given = torch.tensor([ids])
        logits = model(input_ids=given, position_ids=torch.tensor([places]), use_cache=False).logits[0]
        inside = torch.tensor(places[1:]) > 0  # the first token of a text is no target
        loss = cross_entropy(logits[:-1][inside], given[0, 1:][inside], reduction="sum")
        return loss.detach(), list(torch.autograd.grad(loss, trained))

    whole, together = measured([token for row in rows for token in row], positions)
    alone = [measured(row, list(range(len(row)))) for row in rows]
    assert float(whole) == pytest.approx(sum(float(loss) for loss, _ in alone), rel=EXACT)
    for gradient, *parts in zip(together, *[each for _, each in alone], strict=True):
        assert torch.allclose(gradient, torch.stack(parts).sum(0), atol=EXACT)


def test_family_without_a_model_below_its_head_is_refused_by_check_and_train(
    tmp_path: Path, capsys: Any
) -> None:
    path = recipe(tmp_path, save(tmp_path / "model", tiny(REFUSED)))
    said = []
    for command in ("check", "train"):
        assert main.main([command, str(path)]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "its class has no submodule without the output head" in said[0]
