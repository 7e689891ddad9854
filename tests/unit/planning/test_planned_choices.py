"""A plan chooses, counts and offers what the run does: launches, fused forwards, experts, saved modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.adapters import attach, trainable_parameters
from finetune.autoconfig import memory_estimate
from finetune.autoconfig.compilation import Work
from finetune.cli import doctor_choices, main
from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import RunChecks
from finetune.hardware import detection
from finetune.models import architecture
from finetune.planning import (
    adapter_size,
    plan_report,
    planned_machine,
    planned_run,
    planned_spec,
    sharding_cost,
    suggestions,
)
from finetune.preflight import adapter_names
from finetune.recipe import loader
from finetune.speed import apply_to_model, chunked_cross_entropy, fused_layers, live_model_spec
from support.paths import MODEL, QUICKSTART, ROOT
from support.plans import LLAMA_8B, planned

EXPERTS: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LARGE_70B = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.fixture
def seventy(large: Path) -> Path:
    """The recipe on a 70B Llama's config."""
    (large.parent / "8b" / "config.json").write_text(json.dumps(LARGE_70B))
    return large


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["adapter.type=adalora"], "AdaLoRA does not work with FSDP"),
        (["adapter.loraplus_lr_ratio=16"], "LoRA+ does not work with FSDP"),
        (["adapter.init_lora_weights=pissa"], "init_lora_weights: pissa does not work with"),
        (["adapter.type=vera", "adapter.r=256"], "does not send buffers, and vera has"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_auto_starts_no_fsdp2_that_would_be_refused(seventy: Path, given: list[str], said: str) -> None:
    made = planned(seventy, *given, "train.effective_batch_size=8", gpu="h100-80gb", count=8)
    name, reason = made.choices["launch"]
    assert (
        name == "ddp_8" and not made.fits and "because FSDP2 does not work here" in reason and said in reason
    )
    split = planned(seventy, "train.effective_batch_size=8", gpu="h100-80gb", count=8)
    assert split.choices["launch"].value == "fsdp2_8" and split.fits


@pytest.mark.parametrize(
    ("kind", "gpu", "advice"),
    [
        ("full", "h100-80gb", "--accelerate fsdp2_8_offload"),
        ("lora", "a100-40gb", "adapter.type=qlora"),
        ("lora", "h100-80gb", "model.quantization=fp8"),
    ],
)
def test_advice_of_a_launch_is_not_refused(seventy: Path, kind: str, gpu: str, advice: str) -> None:
    full, fp8 = 900.0, gpu != "a100-40gb"
    smaller = sharding_cost.smaller("fp32" if kind == "full" else "bf16", kind, fp8=fp8)
    said = sharding_cost.reason(2, sharding_cost.Sizes(80, 70, full, full / 2), smaller)
    assert f"may not fit either; try {advice}" in said
    change = advice.split()[0].rstrip(",")
    if not change.startswith("--"):
        planned(seventy, f"adapter.type={kind}", change, gpu=gpu)


# PEFT looks for the keys that its own conversion has made among modules alone (peft 0.21.2, tuners_utils.py)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
@pytest.mark.parametrize(
    "targets",
    [
        "all-linear", "[q_proj, gate_proj, up_proj, down_proj]", r".*(q_proj|gate_proj|up_proj|down_proj)",
        "[q_proj]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("parameters", ["null", "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"])
def test_what_trains_of_experts_is_counted(
    family: str, targets: str, parameters: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **EXPERTS)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    given = f"adapter.target_modules={targets}", f"adapter.target_parameters={parameters}"
    loaded = loader.load(QUICKSTART, [f"model.name={tmp_path}", *given])
    real, checks = AutoModelForCausalLM.from_config(config), RunChecks()
    try:
        adapted = attach.attach(real, loaded.adapter, 100, checks)
    except UserError:
        pytest.skip("not the names of this family")
    has = adapter_size.adapted(loaded.adapter, loaded.model, architecture.read(loaded.model), 100)
    assert has.trained == sum(p.numel() for p in trainable_parameters.trainable(adapted).values())
    wrapped = getattr(adapted, "targeted_parameter_names", ())
    assert bool(has.experts) == bool(wrapped) == bool(live_model_spec.breaking(adapted)) and not has.fusable
    said = [check for check in checks.entries if check.option == "adapter.target_parameters"]
    assert len(said) == bool(wrapped)
    if wrapped:
        dora = loaded.model_copy(update={"adapter": loaded.adapter.model_copy(update={"type": "dora"})})
        found = architecture.read(loaded.model)
        (problem,) = adapter_names.check_names(dora, found.names, found.config)
        assert problem.what == "PEFT has no use_dora for parameters such as the weights of experts"
        with pytest.raises(UserError, match=problem.what):
            attach.attach(AutoModelForCausalLM.from_config(config), dora.adapter, 100, RunChecks())


@pytest.mark.parametrize(
    ("given", "gpu"),
    [
        (["adapter.type=dora", "adapter.lora_dropout=0.05"], "h100-80gb"),
        (["model.quantization=torchao_int8"], "a100-40gb"),
        (["model.quantization=int8"], "a100-40gb"),
        (["adapter.type=qdora"], "t4"),
        (["adapter.r=300"], "h100-80gb"),
        (["adapter.type=oft"], "h100-80gb"),
    ],
    ids=lambda given: given[-1] if isinstance(given, list) else "",
)
def test_what_can_t_run_fused_is_not_planned_so(large: Path, given: list[str], gpu: str) -> None:
    made = planned(large, *given, gpu=gpu)
    assert made.choices["fused"].value == "off" and made.choices["fused"].reason.startswith("auto: ")
    assert "mlp" not in made.choices["activation checkpointing"].value
    if "dora" in given[0]:
        assert "breaks the graph" in made.choices["compile"].reason
        with pytest.raises(UserError, match="PEFT's forward pass of DoRA breaks the graph") as caught:
            planned(large, *given, "speed.compile=true", gpu=gpu)
        assert caught.value.code == Exit.ENVIRONMENT
        offered = suggestions.changes(loader.load(large, given), given, made)
        assert not [one for one in offered if "speed.compile=true" in one.overrides]


@pytest.mark.parametrize(
    ("targets", "bias", "whole"),
    [
        ("all-linear", False, 6),
        ("[q_proj, v_proj]", False, 0),
        ("all-linear", True, 0),
        ("[up_proj]", False, 6),
    ],
)
def test_mlps_are_whole_in_a_plan_where_they_are_in_a_run(
    targets: str, bias: bool, whole: int, tmp_path: Path
) -> None:
    """Half of an MLP can be recomputed only where one forward of ours makes all of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.mlp_bias = bias
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    loaded = loader.load(QUICKSTART, [f"model.name={tmp_path}", f"adapter.target_modules={targets}"])
    real = AutoModelForCausalLM.from_config(config)
    adapted = attach.attach(real, loaded.adapter, 9, RunChecks())
    assert fused_layers.Fused(adapted, real.model.layers).mlps == whole
    run, _ = planned_run.planned_run(loaded, detection.detect(), 1, sharding_cost.ONE)
    assert planned_spec.model_spec(run, fused=True).fused_mlps == bool(whole)


def test_dora_with_dropout_is_neither_fused_nor_compiled_by_a_run() -> None:
    """What the plan says of it is what the run's own functions say."""
    loaded = loader.load(QUICKSTART, ["adapter.type=dora", "adapter.lora_dropout=0.05"])
    from transformers import AutoModelForCausalLM

    adapted = attach.attach(
        AutoModelForCausalLM.from_pretrained(loaded.model.name), loaded.adapter, 9, RunChecks()
    )
    layer = next(m for m in adapted.modules() if getattr(m, "lora_magnitude_vector", None))
    has = adapter_size.adapted(loaded.adapter, loaded.model, architecture.read(loaded.model), 9)
    assert (
        fused_layers.unsupported_reason(layer)
        == has.unsupported_reason
        == "DoRA with dropout also changes the base layer's input"
    )
    speed = loaded.speed.model_copy(update={"compile": True})
    with pytest.raises(UserError, match=r"speed\.compile: PEFT's forward pass of DoRA breaks the graph"):
        apply_to_model.apply(adapted, speed, Work(64, None), detection.detect(), RunChecks())


def test_saved_modules_are_no_thin_products(large: Path) -> None:
    """A look-up has none; a head that trains has one more of its own, and a gradient in fp32 at the loss."""
    plain, embedded, head = (
        planned(large, "model.quantization=none", *given)
        for given in ([], ["adapter.modules_to_save=[embed_tokens]"], ["adapter.modules_to_save=[lm_head]"])
    )
    assert embedded.trained == head.trained == plain.trained + 128256 * 4096
    assert embedded.parts["products"] == plain.parts["products"]
    assert 1.01 < head.parts["products"] / plain.parts["products"] < 1.12
    more = 8 * 128256 * 4096 / 2**30
    assert head.phases["step"]["logits"] == pytest.approx(plain.phases["step"]["logits"] + more)


def test_rows_of_each_file_count_by_their_number(large: Path) -> None:
    for name, rows, words in (("a", 4000, 30), ("b", 100, 1200)):
        line = json.dumps({"text": "w" * 4 * words})
        (large.parent / f"{name}.jsonl").write_text(f"{line}\n" * rows)
    names = f"data.name=[{large.parent}/a.jsonl, {large.parent}/b.jsonl]"
    made = planned(large, names, "train.max_steps=null", "train.num_train_epochs=1")
    assert made.row_tokens == pytest.approx((4000 * 30 + 100 * 1200) / 4100, rel=0.05)
    weighted = f"data.name=[{{name: {large.parent}/a.jsonl, weight: 0.025}}, {large.parent}/b.jsonl]"
    even = planned(large, weighted, "train.max_steps=null", "train.num_train_epochs=1")
    assert even.row_tokens == pytest.approx((30 + 1200) / 2, rel=0.05)


def test_what_comes_with_a_change_is_in_its_price(seventy: Path) -> None:
    (seventy.parent / "rows.jsonl").write_text(f"{json.dumps({'text': 'w' * 1600})}\n" * 99)
    short = ["train.effective_batch_size=8", "eval.batch_size=64", "data.validation_fraction=0.2"]
    now = planned(seventy, *short, gpu="h100-80gb", count=8)
    found = suggestions.changes(loader.load(seventy, short), short, now)
    assert found and suggestions.evaluation_fits(loader.load(seventy, short), now)
    for change in found:
        made = change.plan
        assert suggestions.evaluation_fits(loader.load(seventy, short), made)
        assert made.by.name == now.by.name or f"{made.by.name} instead of" in change.cost
        base = made.choices["quantization"].value
        named = change.overrides[0].startswith(("model.quantization", "adapter.type"))
        assert (
            base == now.choices["quantization"].value or named or f"the base model in {base}" in change.cost
        )
        assert made.host <= now.host or "GiB of CPU memory" in change.cost
    packed = dict(suggestions.faster(loader.load(seventy, short), now))["data.packing=true"]
    after = planned(seventy, *short, "data.packing=true", gpu="h100-80gb", count=8)
    assert packed == "fewer steps, each with several examples per sequence"
    (said,) = suggestions.side_effects(("data.packing=true",), now, after)
    assert said == f"{8 * 4096:,} tokens per step instead of {8 * 400:,}"


def test_a_change_is_offered_once(large: Path) -> None:
    given = ["speed.activation_checkpointing=full:4"]
    now = planned(large, *given, gpu="a100-40gb")
    offered = [one.overrides for one in suggestions.changes(loader.load(large, given), given, now)]
    assert len(offered) == len(set(offered))


def test_doctor_names_the_model_s_own_attention(large: Path, capsys) -> None:
    config = {**LLAMA_8B, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 256}
    (large.parent / "8b" / "config.json").write_text(json.dumps(config))
    assert main.main(["doctor", str(large)]) == 0
    assert "which gemma2 needs" in " ".join(capsys.readouterr().out.split())
    (large.parent / "8b" / "config.json").write_text("no json")
    chosen = doctor_choices.attention(loader.load(large), planned_machine.find("h100-80gb", None)[0])
    assert chosen[0] == "cudnn" and "no config of" in chosen[1], "doctor answers without the model, too"


def test_a_cache_that_can_t_be_written_is_said_before_anything_is_measured(monkeypatch, capsys) -> None:
    from finetune.planning import measured_rates

    monkeypatch.setenv("FINETUNE_CACHE", "/dev/null/x")
    monkeypatch.setattr(measured_rates, "products", lambda *_: pytest.fail("measured"))
    assert main.main(["doctor", str(QUICKSTART), "--measure"]) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err


def test_the_plan_in_the_documentation_is_today_s(large: Path, monkeypatch) -> None:
    (large.parent / "rows.jsonl").write_text(f"{json.dumps({'text': 'w' * 4 * 4096})}\n" * 9)
    monkeypatch.chdir(large.parent)
    made = planned(large, "model.name=8b", gpu="rtx4090", count=2)
    said = plan_report.headline(loader.load(large, ["model.name=8b"]), made)
    said = said.replace("on 8b,", "on models/8b,")
    assert said in (ROOT / "docs" / "explanation" / "performance.md").read_text()


def test_a_dry_run_looks_for_what_it_would_go_on_from(tmp_path: Path, capsys) -> None:
    for asked, code, said in (("step-999", 2, "no checkpoint"), ("auto", 0, "--resume=auto")):
        words = [str(QUICKSTART), f"train.output_dir={tmp_path}/none", f"--resume={asked}", "--dry-run"]
        assert main.main(["train", *words]) == code
        assert said in " ".join("".join(capsys.readouterr()).split()) and not (tmp_path / "none").exists()


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_has_the_chunks_that_are_planned(compiled: bool, softcap: float | None, monkeypatch) -> None:
    """Eager softmax makes copies of a chunk's logits, which both count."""
    most, chunk_rows = [], memory_estimate.chunk_rows
    for module in (chunked_cross_entropy, memory_estimate):
        monkeypatch.setattr(module, "chunk_rows", lambda rows, of: most.append(of) or chunk_rows(rows, of))
    monkeypatch.setattr(chunked_cross_entropy, "_compiled", lambda: chunked_cross_entropy.softmax_in_place)
    hidden, weight = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(99, 16, dtype=torch.bfloat16)
    chunked_cross_entropy.token_loss(
        hidden, chunked_cross_entropy.Head(weight, softcap=softcap), torch.arange(8), compiled=compiled
    )
    config = AutoConfig.for_model("gemma2", vocab_size=99, final_logit_softcapping=softcap)
    memory_estimate.loss_gib(config, 8, compiled=compiled)
    assert len(most) == 2 and most[0] == most[1]
