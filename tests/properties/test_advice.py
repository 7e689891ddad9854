"""Make every change that a problem of `check` names after `help:`; the changed recipe passes `check`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.core.errors import UserError
from finetune.preflight import checker
from finetune.recipe import loader
from support import advice, tiny_models
from support.advice import DROP
from support.architectures import CONFIGS
from support.paths import DATA, MODEL, QUICKSTART

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune.core.errors import Problem

FAMILIES = {
    "BLOOM": "bloom", "GPT_OSS": "gpt_oss", "GPT2": "gpt2", "NEOX": "gpt_neox", "MIXTRAL": "mixtral",
    "MAMBA": "mamba", "UNTIED": "llama", "TIED": "llama",
}  # fmt: skip
ROUNDS = 3  # of advice, each on what the one before it left

# Overrides of the quickstart, each of which `check` refuses with advice; DROP leaves a key out
REFUSED: list[dict[str, Any]] = [
    {"adapter.target_modules": "q_proj,v_proj"},
    {"adapter.target_modules": "q_proj, v_proj"},
    {"adapter.target_modules": "q_proj,v_porj"},
    {"adapter.target_modules": "q_proj v_proj"},
    {"adapter.target_modules": ["q_proj,v_proj"]},
    {"adapter.target_modules": ["qproj"]},
    {"adapter.type": "dora", "adapter.lora_bias": True},
    {"adapter.target_modules": ["q_proj", "lm_head"]},
    {"adapter.target_modules": ["lm_head"]},
    {"adapter.target_modules": ["lm_head"], "adapter.modules_to_save": ["embed_tokens"]},
    {"adapter.target_modules": ["embed_tokens", "norm"]},
    {"adapter.target_modules": ["q_proj"], "adapter.exclude_modules": ["q_proj"]},
    {"adapter.target_modules": "all-linear", "adapter.exclude_modules": ".*"},
    {"adapter.target_modules": ".*q_proj", "adapter.layers_to_transform": [0]},
    {"adapter.modules_to_save": ["lmhead"]},
    {"adapter.rank_pattern": {"qproj": 4}},
    {"adapter.alpha_pattern": {"qproj": 4}},
    {"adapter.target_parameters": ["q_proj.weight"]},
    {
        "adapter.target_parameters": ["up_proj.weight"],
        "adapter.target_modules": ["q_proj"],
        "adapter.lora_dropout": 0.1,
    },
    {
        "adapter.type": "dora",
        "adapter.target_parameters": ["up_proj.weight"],
        "adapter.target_modules": ["q_proj"],
    },
    {"adapter.trainable_token_indices": {"embed": [1]}},
    {"adapter.trainable_token_indices": [1], "adapter.modules_to_save": ["lm_head"]},
    {"model.add_tokens": ["<a>"], "adapter.modules_to_save": ["embed_tokens"]},
    {"model.add_tokens": ["<a>"], "adapter.modules_to_save": ["lm_head"]},
    {"model.add_tokens": ["<a>", "<a>"]},
    {"model.add_tokens": ["<a>"], "adapter.type": "ia3"},
    {"model.add_tokens": ["<a>"], "adapter.type": "ln_tuning"},
    {"model.add_tokens": ["<a>"], "adapter.type": "prompt_tuning", "adapter.num_virtual_tokens": 3},
    {"model.add_tokens": ["<a>"], "adapter.type": "oft"},
    {
        "adapter.modules_to_save": ["embed_tokens"],
        "adapter.type": "prompt_tuning",
        "adapter.num_virtual_tokens": 3,
    },
    {"adapter.type": "prompt_tuning", "data.packing": True, "adapter.num_virtual_tokens": 3},
    {"adapter.type": "prompt_tuning", "data.padding_free": True, "adapter.num_virtual_tokens": 3},
    {"adapter.type": "prompt_tuning", "train.label_smoothing_factor": 0.1, "adapter.num_virtual_tokens": 3},
    {"adapter.type": "trainable_tokens", "adapter.token_indices": [1, 2]},
    {"adapter.type": "ia3", "adapter.target_modules": ["norm"]},
    {"adapter.type": "lroa"},
    {"adapter.type": "LoRA"},
    {"adapter.type": DROP},
    {"adapter.type": "xlora"},
    {"adapter.type": "poly"},
    {"adapter.type": "loha", "adapter.lora_alpha": 16},
    {"adapter.type": "vera", "adapter.lora_dropout": 0.1},
    {"adapter.init_lora_weights": "pisa"},
    {"adapter.init_lora_weights": "pissa", "adapter.type": "dora"},
    {"adapter.init_lora_weights": "pissa", "model.quantization": "nf4"},
    {"adapter.init_lora_weights": "pissa", "adapter.type": "qlora"},
    {"adapter.init_lora_weights": "pissa", "adapter.modules_to_save": ["lm_head"]},
    {"adapter.init_lora_weights": "pissa", "model.add_tokens": ["<a>"]},
    {"adapter.init_lora_weights": "pissa", "adapter.bias": "all"},
    {"adapter.init_lora_weights": "pissa", "adapter.rank_pattern": {"q_proj": 4}, "adapter.use_rslora": True},
    {"adapter.init_lora_weights": "pissa", "adapter.type": "rslora", "adapter.alpha_pattern": {"q_proj": 4}},
    {"adapter.init_lora_weights": "pissa", "adapter.target_modules": ["embed_tokens", "q_proj"]},
    {"adapter.init_lora_weights": "loftq"},
    {"adapter.init_lora_weights": "eva", "adapter.rank_pattern": {"q_proj": 4}},
    {"adapter.init_lora_weights": "eva", "model.add_tokens": ["<a>"]},
    {"adapter.init_lora_weights": "corda", "adapter.type": "dora"},
    {"adapter.init_lora_weights": "lora_ga", "adapter.type": "dora"},
    {"adapter.init_lora_weights": "eva", "adapter.type": "adalora"},
    {"adapter.eva_config": {"rho": 2.0}},
    {"adapter.corda_config": {}},
    {"adapter.init_lora_weights": "orthogonal", "model.quantization": "fp8"},
    {
        "adapter.target_parameters": ["up_proj.weight"],
        "adapter.target_modules": ["q_proj"],
        "model.quantization": "fp8",
    },
    {"adapter.modules_to_save": ["up_proj"], "model.quantization": "nf4"},
    {"adapter.modules_to_save": ["up_proj"], "adapter.type": "qlora"},
    {"adapter.modules_to_save": ["up_proj"], "model.quantization": "fp8"},
    {"adapter.type": "qlora", "model.quantization": "fp8"},
    {"adapter.type": "qlora", "model.quantization": "none"},
    {"adapter.type": "full", "model.quantization": "nf4"},
    {"adapter.type": "qadalora", "model.quantization": "none"},
    {"adapter.type": "hra", "model.quantization": "int8"},
    {"adapter.type": "hra", "model.quantization": "torchao_int8"},
    {"adapter.type": "adalora", "speed.offload": "optimiser"},
    {"adapter.type": "adalora", "speed.offload": "all"},
    {"speed.offload": "optimizer", "adapter.loraplus_lr_ratio": 16},
    {"speed.offload": "all", "adapter.loraplus_lr_ratio": 16},
    {"speed.offload": "activations", "speed.activation_checkpointing": "none"},
    {"speed.offload": "all", "speed.activation_checkpointing": "mlp:2"},
    {"train.per_device_train_batch_size": "auto", "train.dataloader_drop_last": True},
    {"train.per_device_train_batch_size": "auto", "data.streaming": True},
    {"data.packing": True, "train.pad_to_multiple_of": 8},
    {"data.packing": True, "train.neftune_noise_alpha": 5},
    {"data.padding_free": True, "train.neftune_noise_alpha": 5},
    {"data.packing": True, "data.padding_free": True, "train.neftune_noise_alpha": 5},
    {"train.max_steps": 10, "train.num_train_epochs": 2},
    {"data.validation_fraction": 0.1, "data.validation": str(DATA / "test.jsonl")},
    {"eval.eval_steps": 10},
    {"eval.early_stopping_patience": 3},
    {"eval.metric_for_best_model": "exact_match"},
    {"eval.metric_for_best_model": "arc_easy/acc", "eval.eval_steps": 5, "data.validation_fraction": 0.2},
    {"train.effective_batch_size": 1000},
    {"train.lr_scheduler_type": "cosin"},
    {"train.lr_scheduler_type": "reduce_lr_on_plateau"},
    {"train.lr_scheduler_type": "polynomial", "train.lr_scheduler_kwargs": {"pwer": 2}},
    {"train.lr_scheduler_type": "warmup_stable_decay"},
    {"train.lr_scheduler_type": "cosine_with_min_lr"},
    {"train.lr_scheduler_type": "cosine_warmup_with_min_lr"},
    {"train.lr_scheduler_type": "cosine_with_min_lr", "train.lr_scheduler_kwargs": {"min_lr": 1}},
    {"train.lr_scheduler_type": "polynomial", "train.lr_scheduler_kwargs": {"lr_end": 1}},
    {"train.lr_scheduler_kwargs": "a"},
    {"train.lr_scheduler_type": "inverse_sqrt", "train.lr_scheduler_kwargs": {"time": 1}},
    {"data.streaming": True, "train.train_sampling_strategy": "sequential"},
    {"data.streaming": True, "train.data_seed": 1},
    {"data.streaming": True, "train.max_steps": DROP, "train.warmup_steps": DROP},
    {"data.streaming": True, "train.save_strategy": "epoch"},
    {"train.save_strategy": "epoch", "train.save_steps": 5},
    {"train.optim": "schedule_free_adamw"},
    {"train.optim": "adamw_torch_fused", "train.optim_args": "a=1"},
    {"train.optim": "sgd", "train.optim_args": "momentun=0.9"},
    {"train.optim_target_modules": "all-linear"},
    {"train.optim": "adam"},
    {"train.optim": "adamw"},
    {"train.learning_rate": 0},
    {"train.max_steps": 1, "train.warmup_steps": 1},
    {"train.report_to": "wandbb"},
    {"train.report_to": ["wandb", "tensorbord"]},
    {"speed.qat": {"config": "Int4WeightOnly"}},
    {"speed.qat": {"config": "Int8DynamicActivationInt4Weight"}},
    {"speed.qat": {"config": "IntxWeightOnl"}},
    {"speed.qat": {"config": "IntxWeightOnlyConfig"}, "adapter.type": "qlora"},
    {"speed.qat": {"config": "IntxWeightOnlyConfig"}, "adapter.type": "qdora"},
    {"speed.qat": {"config": "IntxWeightOnlyConfig"}, "model.quantization": "nf4"},
    {"speed.qat": {"config": "IntxWeightOnlyConfig"}, "adapter.lora_dropout": 0.1},
    {"speed.qat": {"config": "IntxWeightOnlyConfig"}, "adapter.init_lora_weights": "pissa"},
    {"speed.qat": {"config": "IntxWeightOnlyConfig", "group_size": 7}},
    {"speed.qat": {"config": "IntxWeightOnlyConfig", "group_size": 96}},
    {"speed.compile": "reduce-overhead", "speed.activation_checkpointing": "full"},
    {"speed.compile": "reduce-overhead", "speed.offload": "activations"},
    {"speed.compile": "max-autotune", "speed.activation_checkpointing": "full"},
    {"speed.activation_checkpointing": "mlp:x"},
    {"speed.activation_checkpointing": "ful"},
    {"speed.attention": "sdpa"},
    {"model.attention": "flash"},
    {"model.attention": "flash_attention_2"},
    {"model.attention": "sdpaa"},
    {"model.quantization": "nf5"},
    {"model.load_in_4bit": True},
    {"model.revision": "main"},
    {"model.torch_dtype": "bf16"},
    {"data.chat_template": "qwen33"},
    {"data.chat_template": "chatlm"},
    {"data.train_on": "assistants"},
    {"data.max_lenght": 200},
    {"data.max_seq_length": 200},
    {"train.packing": True},
    {"train.gradient_checkpointing": True},
    {"train.lr": 0.001},
    {"train.batch_size": 4},
    {"train.metric_for_best_model": "loss"},
    {"train.r": 8},
    {"model.r": 8},
    {"adapter.rank": 8},
    {"adapter.alpha": 16},
    {"adapter.dropout": 0.1},
    {"adapter.learning_rate": 0.001},
    {"adapter.target_module": ["q_proj"]},
    {"adapter.use_dora": True},
    {"eval.general": False},
    {"eval.answers": False},
    {"eval.batchsize": 3},
    {"eval.max_tokens": 4},
    {"train.bias": "none"},
    {"adapter.bias": "non"},
    {"eval.engine": "vlm"},
    {"eval.engine": "vllm", "eval.tasks": ["arc_easy"]},
    {"data.reasoning": "kep"},
    {"adapter.megatron_config": {"a": 1}},
    {"adapter.layer_replication": [[0, 1]]},
    {"adapter.runtime_config": {"ephemeral_gpu_offload": True}},
    {"adapter.target_parameters": ["mlp.up_poj.weight"], "adapter.target_modules": ["q_proj"]},
    {"data.format": "mesages"},
    {"train.epochs": 3, "train.max_steps": DROP},
    {"train.max_seq_length": 200},
    {"train.eval_steps": 3, "data.validation_fraction": 0.2},
    {"train.router_aux_loss_coef": 0.1},
    {"data.columns": {"messages": "mesages"}},
    {"data.revision": "a"},
    {"data.subset": "a"},
    {"data.format": "text"},
    {"model.name": "BLOOM", "data.packing": True},
    {"model.name": "BLOOM", "data.padding_free": True},
    {"model.name": "BLOOM", "data.packing": True, "data.padding_free": True},
    {"model.name": "GPT_OSS", "data.packing": True},
    {"model.name": "GPT_OSS", "data.packing": True, "model.attention": "sdpa"},
    {"model.name": "GPT_OSS", "data.packing": True, "model.attention": "flash_attention_2"},
    {"model.name": "GPT_OSS", "adapter.target_modules": ["experts.gate_proj"]},
    {"model.name": "GPT_OSS", "adapter.target_modules": ["gate_proj"]},
    {
        "model.name": "GPT_OSS",
        "adapter.target_modules": ["q_proj"],
        "adapter.target_parameters": ["experts.gate_up_prj"],
    },
    {
        "model.name": "GPT_OSS",
        "adapter.target_modules": ["q_proj"],
        "adapter.target_parameters": ["mlp.experts.gate_up_proj"],
        "adapter.lora_dropout": 0.1,
    },
    {"model.name": "GPT2", "adapter.target_modules": ["q_proj"]},
    {"model.name": "GPT2", "adapter.target_modules": "c_attn,c_proj"},
    {"model.name": "GPT2", "model.quantization": "torchao_int8"},
    {"model.name": "GPT2", "adapter.type": "oft"},
    {"model.name": "GPT2", "adapter.type": "oft", "adapter.target_modules": ["c_attn"]},
    {"model.name": "GPT2", "model.add_tokens": ["<a>"], "adapter.modules_to_save": ["wte"]},
    {"model.name": "NEOX", "adapter.target_modules": ["embed_out"]},
    {"model.name": "NEOX", "model.add_tokens": ["<a>"], "adapter.modules_to_save": ["embed_in"]},
    {
        "model.name": "NEOX",
        "model.add_tokens": ["<a>"],
        "adapter.modules_to_save": ["embed_in"],
        "adapter.ensure_weight_tying": True,
    },
    {"model.name": "NEOX", "adapter.type": "ln_tuning"},
    {"model.name": "MIXTRAL", "adapter.target_modules": ["w1"]},
    {"model.name": "MIXTRAL", "adapter.target_modules": ["w1", "q_proj"]},
    {"model.name": "MIXTRAL", "adapter.target_modules": ["w1", "w3", "w2"], "adapter.lora_dropout": 0.1},
    {"model.name": "MIXTRAL", "adapter.target_modules": ["gate_proj"]},
    {"model.name": "MIXTRAL", "adapter.type": "dora", "adapter.target_modules": "all-linear-and-experts"},
    {
        "model.name": "MIXTRAL",
        "adapter.lora_dropout": 0.1,
        "adapter.target_modules": "all-linear-and-experts",
    },
    {"model.name": "MIXTRAL", "adapter.type": "adalora", "adapter.target_modules": ["gate"]},
    {"model.name": "MIXTRAL", "adapter.type": "ia3", "adapter.target_modules": "all-linear-and-experts"},
    {"model.name": "GPT_OSS", "adapter.type": "qlora", "adapter.target_modules": "all-linear-and-experts"},
    {"model.name": "MIXTRAL", "adapter.type": "dora", "adapter.target_modules": ["w1", "w2", "w3"]},
    {"model.name": "MAMBA", "data.packing": True},
    {"model.name": "MAMBA", "adapter.target_modules": ["in_proj", "dt_proj"]},
    {"model.name": "MAMBA", "adapter.target_modules": ["out_proj"]},
    {"model.name": "MAMBA", "adapter.target_modules": ["conv1d"]},
    {"model.name": "MAMBA", "adapter.type": "ia3", "adapter.target_modules": ["in_proj", "dt_proj"]},
    {"model.name": "UNTIED", "model.add_tokens": ["<a>"], "adapter.modules_to_save": ["embed_tokens"]},
    {
        "model.name": "UNTIED",
        "model.add_tokens": ["<a>"],
        "adapter.modules_to_save": ["norm", "embed_tokens"],
    },
    {
        "model.name": "UNTIED",
        "model.add_tokens": ["<a>"],
        "adapter.modules_to_save": ["embed_tokens"],
        "adapter.ensure_weight_tying": True,
    },
    {"model.name": "UNTIED", "adapter.target_modules": ["lm_head"]},
    {
        "model.name": "UNTIED",
        "adapter.target_modules": ["lm_head"],
        "adapter.modules_to_save": ["embed_tokens"],
    },
    {
        "model.name": "UNTIED",
        "adapter.target_modules": ["q_proj"],
        "adapter.target_parameters": ["lm_head.weight"],
    },
    {"model.name": "UNTIED", "adapter.type": "prompt_tuning", "model.add_tokens": ["<a>"]},
    {"model.name": "UNTIED", "adapter.type": "oft", "model.add_tokens": ["<a>"]},
    {
        "model.name": "UNTIED",
        "adapter.type": "ia3",
        "model.add_tokens": ["<a>"],
        "adapter.modules_to_save": ["embed_tokens"],
    },
    {"adapter.type": "ia3", "model.add_tokens": ["<a>"], "adapter.modules_to_save": ["lm_head"]},
    {"adapter.target_modules": "all_linear"},
    {"adapter.target_modules": "linear"},
    {"adapter.target_modules": ["all-linear"]},
    {"adapter.target_modules": []},
    {"adapter.layers_to_transform": [9]},
    {"adapter.layers_pattern": "layer", "adapter.layers_to_transform": [0]},
    {"adapter.modules_to_save": ["q_proj"], "adapter.target_modules": ["q_proj"]},
    {"adapter.exclude_modules": ["q_porj"]},
    {"adapter.type": "vera", "adapter.modules_to_save": ["lmhead"]},
    {"adapter.type": "adalora", "adapter.total_step": 5},
    {"adapter.init_lora_weights": "gausian"},
    {"adapter.bias": "lora"},
    {"train.train_sampling_strategy": "group_by_lenght"},
    {"train.dataloader_multiprocessing_context": "spwan", "train.dataloader_num_workers": 1},
    {"train.include_num_input_tokens_seen": "non-padding"},
    {"train.group_by_length": True},
    {
        "train.lr_scheduler_type": "warmup_stable_decay",
        "train.lr_scheduler_kwargs": {"num_decay_steps": 5, "decay_type": "cosin"},
    },
    {"train.optim": "galore_adamw"},
    {"model.dtype": "bfloat16"},
    {"model.quantization": "int4"},
    {"model.attention": "flash_attention_4"},
    {"data.too_long": "trunc"},
    {"data.role_map": {"human": "usr"}},
    {"data.expect": {"dropd": 0.1}},
    {"speed.compile": "reduce_overhead"},
    {"speed.loss": "chunk"},
    {"speed.offload": "optimiser"},
    {
        "model.name": "GPT2",
        "data.validation_fraction": 0.3,
        "eval.max_new_tokens": 500,
        "eval.generate": True,
    },
    {"model.name": "GPT2", "adapter.modules_to_save": ["lm_head"], "model.add_tokens": ["<a>"]},
    {"model.name": "BLOOM", "adapter.target_modules": ["word_embeddings", "lm_head"]},
    {"model.name": "GPT_OSS", "adapter.target_modules": ["router"], "adapter.type": "adalora"},
    {"model.name": "MIXTRAL", "adapter.target_modules": ["w1", "w2"], "adapter.type": "adalora"},
    {"model.name": "MAMBA", "adapter.type": "dora", "adapter.target_modules": ["x_proj", "dt_proj"]},
    {"model.name": "MAMBA", "adapter.type": "prefix_tuning", "adapter.num_virtual_tokens": 3},
    {"model.name": "UNTIED", "adapter.modules_to_save": ["lm_head", "embed_token"]},
    {"model.name": "UNTIED", "adapter.trainable_token_indices": {"lm_heads": [1]}},
    {"data.columns": {"mesages": "messages"}},
    {"model.add_tokens": ["<|im_end|>"]},
    *(
        {"model.name": model, "adapter.target_modules": targets}
        for model in ("BLOOM", "NEOX", "GPT2", "MAMBA")
        for targets in (
            ["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"],
            ".*q_proj", "q_proj|v_proj",
        )
    ),
    *(
        {"model.name": model, key: value}
        for model in ("BLOOM", "NEOX", "GPT2")
        for key, value in (
            ("adapter.exclude_modules", ["q_proj"]),
            ("adapter.rank_pattern", {"q_proj": 4}),
            ("adapter.modules_to_save", ["embed_tokens"]),
            ("adapter.trainable_token_indices", {"embed_tokens": [1]}),
        )
    ),
    {
        "model.name": "BLOOM",
        "adapter.type": "ia3",
        "adapter.target_modules": ["k_proj", "down_proj"],
        "adapter.feedforward_modules": ["down_proj"],
    },
    {"model.name": "TIED", "adapter.target_modules": ["embed_tokens"], "adapter.ensure_weight_tying": True},
    {"adapter.type": "adalora", "adapter.init_r": 4, "adapter.target_r": 8},
    {"adapter.type": "adalora", "adapter.init_r": 8, "adapter.target_r": 8},
    {"adapter.type": "adalora", "adapter.init_r": 4},
    {"adapter.type": "adalora", "adapter.tinit": 30},
    {"adapter.type": "adalora", "adapter.tfinal": 19},
    {"adapter.type": "adalora", "adapter.tinit": 10, "adapter.tfinal": 10},
    {"adapter.type": "adalora", "adapter.total_step": 1000},
    {"adapter.type": "adalora", "adapter.orth_reg_every": 100},
    {"eval.metric_for_best_model": "eval_los", "eval.eval_steps": 5, "data.validation_fraction": 0.2},
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models of other architectures."""
    folder, sizes = tmp_path_factory.mktemp("models"), tiny_models.sizes()
    tokens = {key: sizes[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    made = {}
    for name, family in FAMILIES.items():
        options = {**CONFIGS[family], **tokens}
        options |= {"tie_word_embeddings": False} if name in ("UNTIED", "NEOX") else {}
        options |= {"tie_word_embeddings": True} if name == "TIED" else {}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
        made[name] = str(tiny_models.save(folder / name, model))
    return made


@pytest.fixture
def changed(tmp_path: Path, models: dict[str, str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`changed(overrides)`: the quickstart with few rows and these overrides, as read."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join((DATA / "train.jsonl").read_text().splitlines(keepends=True)[:24]))

    def change(overrides: dict[str, Any]) -> dict[str, Any]:
        raw = yaml.safe_load(QUICKSTART.read_text())
        raw["model"]["name"], raw["data"] = str(MODEL), {"name": str(rows), "max_length": 256}
        raw["train"] |= {"max_steps": 20, "warmup_steps": 2, "output_dir": str(tmp_path / "run")}
        raw["eval"] = {"samples": 0, "forgetting": False}
        if "model.name" in overrides:
            chats = [(f"{asked} {n}", said) for n in range(6) for asked, said in tiny_models.CHATS]
            raw["data"] |= {"name": str(tiny_models.rows(tmp_path / "short.jsonl", chats)), "max_length": 64}
        named = {"model.name": models[overrides["model.name"]]} if "model.name" in overrides else {}
        return advice.make(copy.deepcopy({**overrides, **named}), raw)

    return change


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[dict[str, Any]], list[Problem]]:
    """`problems(raw)`: what `check` says of a recipe."""

    def look(raw: dict[str, Any]) -> list[Problem]:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        try:
            checker.check(loader.load(path))
        except UserError as error:
            return list(error.problems)
        return []

    return look


def _name(case: dict[str, Any]) -> str:
    return " ".join(f"{key.partition('.')[2]}={value}" for key, value in case.items())[:80]


@pytest.mark.parametrize(
    "case",
    [*REFUSED, pytest.param({"eval.tasks": ["arc_eazy"]}, marks=pytest.mark.soak)],  # reads lm-eval's tasks
    ids=_name,
)
def test_check_advice_followed_passes(case, changed, problems) -> None:
    raw = changed(case)
    said = problems(raw)
    assert said, "check accepts this recipe"
    tried = 0
    for problem in said:
        for change in advice.changes(problem, raw):
            tried += 1
            after = advice.make(change, raw)
            left = problems(after)
            same = [one for one in left if (one.key, one.what) == (problem.key, problem.what)]
            assert not same, f"{problem}\nis left after {change}"
            assert _can_be_mended(after, left, problems, ROUNDS), f"{problem}\nleads to\n{left}"
    assert tried, f"no advice names a change: {said}"


def _can_be_mended(raw: dict[str, Any], left: list[Problem], problems: Any, rounds: int) -> bool:
    """Whether advice that is followed leads to a recipe that passes, or to a package that is missing."""
    left = [problem for problem in left if "not installed" not in problem.what]
    if not left or not rounds:
        return not left
    ways = [advice.make(change, raw) for change in advice.changes(left[0], raw)[:2]]
    return any(_can_be_mended(way, problems(way), problems, rounds - 1) for way in ways)


@pytest.mark.parametrize(
    ("model", "attention"),
    [("BLOOM", ["query_key_value", "dense"]), ("NEOX", ["query_key_value", "dense"]),
     ("GPT2", ["c_attn", "c_proj"])],
)  # fmt: skip
def test_advice_on_layers_of_llama_names_those_of_the_model(
    model: str, attention: list[str], changed, problems
):
    """GPT-2's `c_proj` is like `q_proj` in letters only."""
    for targets in (["q_proj"], ["q_proj", "v_proj"], ".*q_proj"):
        raw = changed({"model.name": model, "adapter.target_modules": targets})
        for problem in problems(raw):
            assert advice.changes(problem, raw) == [{"adapter.target_modules": attention}]


@pytest.mark.parametrize("model", ["BLOOM", "GPT_OSS"])
def test_packing_advice_followed_passes_without_packing(model: str, changed, problems) -> None:
    raw = changed({"model.name": model, "data.packing": True, "data.padding_free": True})
    (problem,) = problems(raw)
    (change,) = advice.changes(problem, raw)
    assert change == {"data.packing": False, "data.padding_free": False}
    assert not problems(advice.make(change, raw))


@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj, v_proj", "q_proj v_proj", "q_porj,v_proj"])
def test_comma_list_advice_is_the_list(text: str, changed, problems) -> None:
    for given in (text, [text]):
        raw = changed({"adapter.target_modules": given})
        (problem,) = problems(raw)
        (change,) = advice.changes(problem, raw)
        assert change == {"adapter.target_modules": ["q_proj", "v_proj"]}
        assert not problems(advice.make(change, raw))


@pytest.mark.parametrize(("model", "embedding"), [("UNTIED", "embed_tokens"), ("NEOX", "embed_in")])
@pytest.mark.parametrize("tying", [True, False])
def test_new_tokens_advice_trains_the_head_of_an_untied_model(
    model: str, embedding: str, tying: bool, changed, problems
) -> None:
    saved = {"adapter.modules_to_save": ["norm", embedding], "model.add_tokens": ["<a>"]}
    raw = changed({"model.name": model, **({"adapter.ensure_weight_tying": True} if tying else {}), **saved})
    found = [change for problem in problems(raw) for change in advice.changes(problem, raw)]
    assert found and all(
        change == {"adapter.modules_to_save": [embedding, "lm_head", "norm"]} for change in found
    )
    assert not problems(advice.make(found[0], raw))


def test_no_advice_names_the_number_of_a_layer(changed, problems) -> None:
    cases = (("exclude_modules", ["w1"], "remove it"), ("rank_pattern", {"w1": 4}, "remove `w1`"))
    for key, value, fix in cases:
        (problem,) = problems(changed({"model.name": "MIXTRAL", f"adapter.{key}": value}))
        assert problem.fix == fix and "0" not in problem.found.split(", ")


def test_an_empty_new_token_is_an_error_of_its_key(changed, problems) -> None:
    (problem,) = problems(changed({"model.add_tokens": [""]}))
    assert problem.key.startswith("model.add_tokens") and problem.expected
