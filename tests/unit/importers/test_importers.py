"""Each key of another tool ends in one of four lists, and the recipe loads."""

import ast
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.importers import common, reading, recipe_text, trl
from finetune.importers.translation import DIFFERS, KINDS, NOT_SUPPORTED, SAME, TRANSLATED, Translation
from finetune.recipe import loader
from support.paths import DATA, MODEL
from support.scripts import module_of

AXOLOTL = {
    "base_model": str(MODEL),
    "datasets": [{"path": str(DATA / "train.jsonl"), "type": "chat_template"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-4,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
}
LLAMA_FACTORY = {
    "model_name_or_path": str(MODEL),
    "stage": "sft",
    "do_train": True,
    "dataset": "mine",
    "template": "llama3",
    "finetuning_type": "lora",
    "cutoff_len": 512,
}
TRL = {"model_name_or_path": str(MODEL), "dataset_name": str(DATA / "train.jsonl"), "use_peft": True}
BASES = {"axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "trl": TRL}
INFO = {
    "mine": {"file_name": "rows.jsonl"},
    "chats": {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "system": "sys"},
        "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "bot"},
    },
    "hub": {"hf_hub_url": "someone/rows", "subset": "en", "split": "train"},
    "pairs": {"file_name": "pairs.json", "ranking": True},
}


def imported(tmp_path: Path, tool: str, **more: Any) -> Translation:
    given = {key: value for key, value in (BASES[tool] | more).items() if value != "ABSENT"}
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    return reading.import_recipe(path)


def kind_of(state: Translation, key: str) -> set[str]:
    return {entry.kind for entry in state.entries if entry.key.split(".")[0] == key or entry.key == key}


@pytest.mark.parametrize(
    ("tool", "key", "value", "expected"),
    [
        ("axolotl", "sequence_len", 4096, {"data.max_length": 4096}),
        ("axolotl", "sample_packing", True, {"data.packing": True}),
        ("axolotl", "batch_flattening", "auto", {"data.padding_free": True}),
        ("axolotl", "num_epochs", 2, {"train.num_train_epochs": 2.0}),
        ("axolotl", "max_steps", 100, {"train.max_steps": 100}),
        ("axolotl", "optimizer", "adamw_bnb_8bit", {"train.optim": "adamw_bnb_8bit"}),
        ("axolotl", "lr_scheduler", "constant", {"train.lr_scheduler_type": "constant"}),
        ("axolotl", "warmup_ratio", 0.1, {"train.warmup_steps": 0.1}),
        ("axolotl", "warmup_steps", 10, {"train.warmup_steps": 10}),
        ("axolotl", "val_set_size", 0.05, {"data.validation_fraction": 0.05}),
        ("axolotl", "train_on_inputs", True, {"data.train_on": "all"}),
        ("axolotl", "excess_length_strategy", "raise", {"data.too_long": "error"}),
        ("axolotl", "gradient_checkpointing", True, {"speed.activation_checkpointing": "full"}),
        ("axolotl", "adapter", "qlora", {"adapter.type": "qlora"}),
        ("axolotl", "load_in_8bit", True, {"adapter.type": "lora", "model.quantization": "int8"}),
        ("axolotl", "adapter", None, {"adapter.type": "full"}),
        ("axolotl", "peft_use_dora", True, {"adapter.type": "dora"}),
        ("axolotl", "peft_use_rslora", True, {"adapter.type": "rslora"}),
        ("axolotl", "lora_modules_to_save", ["lm_head"], {"adapter.modules_to_save": ["lm_head"]}),
        ("axolotl", "chat_template", "chatml", {"data.chat_template": "chatml"}),
        ("axolotl", "chat_template", "mistral_v1", {"data.chat_template": None}),
        ("axolotl", "chat_template", "phi_3", {"data.chat_template": None}),
        ("axolotl", "batch_size", 16, {"train.effective_batch_size": 8}),
        ("axolotl", "chat_template_jinja", "mine.jinja", {"data.chat_template": "mine.jinja"}),
        ("axolotl", "lr_scheduler", "rex", {"train.lr_scheduler_type": "cosine"}),
        ("axolotl", "lora_r", None, {"adapter.r": 16}),
        ("axolotl", "noisy_embedding_alpha", 5, {"train.neftune_noise_alpha": 5}),
        (
            "axolotl",
            "fsdp_config",
            {"activation_checkpointing": True},
            {"speed.activation_checkpointing": "full"},
        ),
        ("axolotl", "saves_per_epoch", 4, {"train.save_steps": 0.25}),
        ("axolotl", "saves_per_epoch", 1, {"train.save_strategy": "epoch"}),
        ("axolotl", "tokens", ["<a>"], {"model.add_tokens": ["<a>"]}),
        ("axolotl", "cosine_min_lr_ratio", 0.1, {"train.lr_scheduler_type": "cosine_with_min_lr"}),
        ("axolotl", "neftune_noise_alpha", 5, {"train.neftune_noise_alpha": 5}),
        ("axolotl", "hub_model_id", "me/mine", {"publish.repo": "me/mine"}),
        ("llamafactory", "cutoff_len", 2048, {"data.max_length": 2048}),
        ("llamafactory", "lora_rank", 4, {"adapter.r": 4, "adapter.lora_alpha": 8}),
        ("llamafactory", "lora_alpha", 64, {"adapter.lora_alpha": 64}),
        ("llamafactory", "lora_target", "q_proj,v_proj", {"adapter.target_modules": ["q_proj", "v_proj"]}),
        ("llamafactory", "quantization_bit", 4, {"adapter.type": "qlora"}),
        ("llamafactory", "finetuning_type", "full", {"adapter.type": "full"}),
        ("llamafactory", "use_rslora", True, {"adapter.type": "rslora"}),
        ("llamafactory", "loraplus_lr_ratio", 16.0, {"adapter.loraplus_lr_ratio": 16.0}),
        ("llamafactory", "val_size", 0.1, {"data.validation_fraction": 0.1}),
        ("llamafactory", "learning_rate", "1.0e-4", {"train.learning_rate": 1e-4}),
        ("llamafactory", "train_on_prompt", True, {"data.train_on": "all"}),
        ("llamafactory", "mask_history", True, {"data.train_on": "last_turn"}),
        ("llamafactory", "neat_packing", True, {"data.packing": True}),
        ("llamafactory", "template", "qwen", {"data.chat_template": "qwen2_5"}),
        ("llamafactory", "template", "gemma", {"data.chat_template": "gemma3"}),
        ("llamafactory", "template", "qwen3", {"data.chat_template": None}),
        ("llamafactory", "dataset", ["org/a", "org/b"], {"data.name": ["org/a", "org/b"]}),
        ("llamafactory", "dataset_dir", "ONLINE", {"data.name": "mine"}),
        ("llamafactory", "disable_gradient_checkpointing", True, {"speed.activation_checkpointing": "none"}),
        ("llamafactory", "pissa_init", True, {"adapter.init_lora_weights": "pissa_niter_16"}),
        ("trl", "max_length", 2048, {"data.max_length": 2048}),
        ("trl", "packing", True, {"data.packing": True}),
        ("trl", "assistant_only_loss", True, {"data.train_on": "assistant"}),
        ("trl", "completion_only_loss", True, {"data.train_on": "completion"}),
        ("trl", "lora_r", 64, {"adapter.r": 64}),
        ("trl", "use_peft", False, {"adapter.type": "full"}),
        ("trl", "load_in_4bit", True, {"adapter.type": "qlora"}),
        ("trl", "lora_target_modules", "all-linear", {"adapter.target_modules": "all-linear"}),
        ("trl", "dataset_config", "en", {"data.subset": "en"}),
        ("trl", "streaming", True, {"data.streaming": True}),
        ("trl", "test_split_size", 0.1, {"data.validation_fraction": 0.1}),
        ("trl", "num_processes", 4, {"train.effective_batch_size": 32}),
        ("trl", "chat_template_path", "a/b.jinja", {"data.chat_template": "a/b.jinja"}),
        ("trl", "chat_template_path", "org/model", {"data.chat_template": None}),
        ("trl", "gradient_checkpointing", False, {"speed.activation_checkpointing": "none"}),
    ],
)
def test_key_is_translated(tool, key, value, expected, tmp_path) -> None:
    state = imported(tmp_path, tool, **{key: value})
    assert {name: state.recipe.get(name) for name in expected} == expected
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text.write(state, "theirs.yaml"))
    loader.load(path)


@pytest.mark.parametrize(
    ("tool", "key", "value", "kind"),
    [
        ("axolotl", "loss_watchdog_threshold", 5.0, NOT_SUPPORTED),
        ("axolotl", "evals_per_epoch", 4, SAME),  # there is no validation set
        ("axolotl", "evals_per_epoch", 0, SAME),
        ("axolotl", "torch_compile_mode", "max-autotune", TRANSLATED),
        ("axolotl", "wandb_project", "mine", NOT_SUPPORTED),
        ("axolotl", "use_tensorboard", True, TRANSLATED),
        ("axolotl", "optim_target_modules", ["q_proj"], NOT_SUPPORTED),  # of another optimizer
        ("axolotl", "bf16", False, NOT_SUPPORTED),
        ("axolotl", "qat", {"weight_dtype": "nvfp4"}, NOT_SUPPORTED),
        ("axolotl", "eta_min", 1e-7, SAME),
        ("llamafactory", "bf16", False, SAME),
        ("llamafactory", "group_by_length", True, TRANSLATED),
        ("llamafactory", "pipeline_model_parallel_size", 2, NOT_SUPPORTED),
        ("trl", "dtype", "bfloat16", SAME),
        ("trl", "dtype", "float32", DIFFERS),
        ("trl", "bf16", False, NOT_SUPPORTED),
        ("axolotl", "wandb_project", None, SAME),
        ("axolotl", "special_tokens", {"pad_token": "<pad>"}, SAME),
        ("axolotl", "special_tokens", {"eos_token": "<end>"}, NOT_SUPPORTED),
        ("axolotl", "attn_implementation", "xformers", NOT_SUPPORTED),
        ("axolotl", "micro_bacth_size", 1, NOT_SUPPORTED),
        ("llamafactory", "use_badam", True, NOT_SUPPORTED),
        ("llamafactory", "use_galore", False, SAME),
        ("llamafactory", "max_samples", 1000, NOT_SUPPORTED),
        ("llamafactory", "plot_loss", True, SAME),
        ("llamafactory", "finetuning_type", "freeze", NOT_SUPPORTED),
        ("axolotl", "adapter", "llama-adapter", NOT_SUPPORTED),
        ("axolotl", "loraplus_lr_embedding", 1e-6, NOT_SUPPORTED),
        ("axolotl", "lr_scheduler", "one_cycle", NOT_SUPPORTED),
        ("axolotl", "chat_template_jinja", "{{ messages }}", NOT_SUPPORTED),
        ("axolotl", "chat_template", "phi_3", DIFFERS),
        ("axolotl", "comet_workspace", "mine", SAME),  # Comet is off
        ("axolotl", "dpo_label_smoothing", 0.1, SAME),
        ("llamafactory", "galore_rank", 16, SAME),
        ("llamafactory", "template", "qwen3", DIFFERS),
        ("trl", "mixed_precision", "bf16", NOT_SUPPORTED),
        ("trl", "chat_template_path", "org/model", NOT_SUPPORTED),
        ("trl", "eos_token", "<end>", NOT_SUPPORTED),
        ("trl", "packing_strategy", "wrapped", NOT_SUPPORTED),
        ("trl", "loss_type", "dft", NOT_SUPPORTED),
    ],
)
def test_key_is_in_its_list_with_a_text(tool, key, value, kind, tmp_path) -> None:
    state = imported(tmp_path, tool, **{key: value})
    assert kind_of(state, key) == {kind}
    assert all(entry.kind in KINDS and entry.text for entry in state.entries)


@pytest.mark.parametrize("tool", BASES)
def test_every_key_is_in_a_list(tool, tmp_path) -> None:
    state = imported(tmp_path, tool)
    named = {entry.key.split(".")[0] for entry in state.entries}
    ours = {"model", "data", "adapter", "train", "speed"}
    assert set(BASES[tool]) - {"do_train"} <= named | ours | {"do_train"} and not state.source


@pytest.mark.parametrize("tool", BASES)
def test_defaults_of_the_tool_are_kept(tool, tmp_path) -> None:
    state = imported(tmp_path, tool, max_length="ABSENT", cutoff_len="ABSENT", lora_alpha="ABSENT")
    kept = {entry.key: entry.value for entry in state.entries if entry.kind == DIFFERS}
    assert all(state.recipe[key] == value for key, value in kept.items() if key in state.recipe)
    assert kept["model.quantization"] == "none"
    expected = {
        "axolotl": {"data.max_length": 512, "train.num_train_epochs": 1.0},
        "llamafactory": {"data.max_length": 2048, "train.learning_rate": 5e-5, "adapter.lora_alpha": 16},
        "trl": {"data.train_on": "all", "train.learning_rate": 2e-5, "adapter.lora_dropout": 0.05},
    }[tool]
    assert {key: kept.get(key) for key in expected} == expected


def test_defaults_of_trl_are_those_of_the_installed_trl(tmp_path) -> None:
    from trl import ModelConfig, SFTConfig

    installed = {
        field.name: field.default for kind in (SFTConfig, ModelConfig) for field in dataclasses.fields(kind)
    }
    recipe = imported(tmp_path, "trl").recipe
    for name in ("learning_rate", "num_train_epochs", "warmup_steps"):
        assert recipe[f"train.{name}"] == installed[name], name
    assert str(installed["lr_scheduler_type"]) == recipe["train.lr_scheduler_type"]
    for name in ("lora_r", "lora_alpha", "lora_dropout"):
        assert recipe[f"adapter.{trl.ADAPTER[name]}"] == installed[name], name
    assert recipe["train.effective_batch_size"] == installed["per_device_train_batch_size"]
    assert installed["assistant_only_loss"] is False and recipe["data.train_on"] == "all"
    assert installed["gradient_checkpointing"] and recipe["speed.activation_checkpointing"] == "full"


def test_batch_size_counts_gpus(tmp_path) -> None:
    imported(tmp_path, "axolotl")
    state = reading.import_recipe(tmp_path / "theirs.yaml", gpus=4)
    assert state.recipe["train.effective_batch_size"] == 2 * 4 * 4
    assert state.recipe["train.per_device_train_batch_size"] == 2


@pytest.mark.parametrize(
    ("tool", "given", "config"),
    [
        ("axolotl", {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, "zero3_8_offload"),
        ("axolotl", {"deepspeed": "deepspeed_configs/zero2.json"}, "zero2_8"),
        ("axolotl", {"fsdp_version": 2, "fsdp_config": {"offload_params": True}}, "fsdp2_8_offload"),
        ("axolotl", {"fsdp_version": 2, "fsdp_config": {"offload_params": False}}, "fsdp2_8"),
        ("axolotl", {"adapter": "qlora", "fsdp": ["full_shard", "auto_wrap"]}, "fsdp2_8_quantized"),
        ("axolotl", {"deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": 32}}, "zero2_8"),
        ("axolotl", {"deepspeed": "deepspeed_configs/zero1_torch_compile.json"}, "ddp_8"),
        ("trl", {"accelerate_config": "zero3"}, "zero3_8"),
        ("trl", {"accelerate_config": "single_gpu"}, ""),
        ("trl", {"deepspeed": "mine.json"}, ""),
        ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z3_config.json"}, "zero3_8"),
        ("trl", {"fsdp": "full_shard auto_wrap"}, "fsdp2_8"),
    ],
)
def test_launch_files_name_an_accelerate_config(tool, given, config, tmp_path) -> None:
    state = imported(tmp_path, tool, **given)
    assert state.accelerate == config
    assert kind_of(state, "--gpus") == ({DIFFERS} if config else set()), "the batch size is of one GPU"


def test_dataset_info_gives_paths_columns_and_roles(tmp_path) -> None:
    state = imported(tmp_path, "llamafactory", dataset="mine, hub, absent")
    assert state.recipe["data.name"] == [
        str(tmp_path / "data" / "rows.jsonl"),
        {"name": "someone/rows", "subset": "en", "split": "train"},
        "absent",
    ]
    assert NOT_SUPPORTED in kind_of(state, "dataset")
    chats = imported(tmp_path, "llamafactory", dataset="chats").recipe
    assert chats["data.columns"] == {"conversations": "turns", "system": "sys"}
    assert chats["data.role_map"] == {"human": "user", "bot": "assistant"}


def test_axolotl_sources_keep_files_splits_and_columns(tmp_path) -> None:
    sources = [
        {
            "path": "a/b",
            "name": "en",
            "split": "train[:5%]",
            "type": "chat_template",
            "field_messages": "turns",
        },
        {"path": "json", "data_files": ["x.jsonl"], "type": "completion", "roles": {"assistant": ["bot"]}},
        {"path": "c", "type": "jeopardy", "train_on_eos": "all", "shards": 4},
    ]
    state = imported(tmp_path, "axolotl", datasets=sources)
    assert state.recipe["data.name"] == [
        {"name": "a/b", "subset": "en", "split": "train[:5%]"},
        "x.jsonl",
        "c",
    ]
    assert state.recipe["data.columns"] == {"messages": "turns"}
    assert state.recipe["data.role_map"] == {"bot": "assistant"}
    assert state.recipe["data.train_on"] == "assistant", "plain text trains on all tokens anyway"
    unsupported = {entry.key for entry in state.entries if entry.kind == NOT_SUPPORTED}
    assert {"datasets.2.type", "datasets.2.train_on_eos", "datasets.2.shards"} <= unsupported
    translated = {entry.key: entry.text for entry in state.entries if entry.kind == TRANSLATED}
    assert translated["datasets.0.name"] == "subset of the source in data.name"
    assert translated["datasets.0.split"] == "split of the source in data.name"


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("axolotl", {"rl": "dpo"}),
        ("axolotl", {"reward_model": True}),
        ("axolotl", {"pretraining_dataset": [{"path": "c4"}]}),
        ("axolotl", {"processor_type": "AutoProcessor"}),
        ("axolotl", {"datasets": [{"path": "a", "type": "bradley_terry.chat_template"}]}),
        ("llamafactory", {"stage": "dpo"}),
        ("llamafactory", {"stage": "pt"}),
        ("llamafactory", {"dataset": "pairs"}),
        ("trl", {"beta": 0.1}),
        ("trl", {"reward_funcs": ["accuracy"]}),
        ("trl", {"desirable_weight": 1.0}),
    ],
)
def test_other_training_is_refused_and_names_the_tool(tool, given, tmp_path) -> None:
    with pytest.raises(UserError) as raised:
        imported(tmp_path, tool, **given)
    (problem,) = raised.value.problems
    assert "supervised fine-tuning only" in problem.what and problem.fix.startswith(
        f"train it with {reading.TOOLS[tool].TOOL}"
    )


def test_command_line_of_trl(tmp_path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/sh\n# a comment\naccelerate launch --num_processes 2 trl sft \\\n"
        f"  --model_name_or_path {MODEL} --dataset_name {DATA / 'train.jsonl'} \\\n"
        "  --learning_rate 2.0e-4 --use_peft --lora_target_modules q_proj v_proj --packing\n"
    )
    state = reading.import_recipe(script)
    assert state.tool == "TRL" and state.recipe["train.learning_rate"] == 2e-4
    assert state.recipe["adapter.target_modules"] == ["q_proj", "v_proj"]
    assert state.recipe["data.packing"] is True
    script.write_text("trl dpo --model_name_or_path a\n")
    with pytest.raises(UserError, match="supervised fine-tuning only"):
        reading.import_recipe(script)


@pytest.mark.parametrize(
    ("launch", "processes"),
    [
        ("accelerate launch --num_processes 4 scripts/sft.py", 4),
        ("accelerate launch --num_processes=4 --config_file zero3.yaml trl/scripts/sft.py", 4),
        ("torchrun --nproc_per_node 8 scripts/sft.py", 8),
        ("torchrun --nproc-per-node=8 --nnodes 1 scripts/sft.py", 8),
        ("torchrun --nnodes=2 --nproc_per_node=4 scripts/sft.py", 8),
        ("torchrun --nproc_per_node gpu scripts/sft.py", 1),
        ("trl sft --accelerate_config multi_gpu", 8),
        ("trl sft --num_processes 4", 4),
        ("python scripts/sft.py", 1),
    ],
)
def test_processes_of_the_launch_of_trl_are_in_the_batch(launch: str, processes: int, tmp_path) -> None:
    rest = (
        f"--model_name_or_path {MODEL} --dataset_name {DATA / 'train.jsonl'} --per_device_train_batch_size 2"
    )
    (script := tmp_path / "run.sh").write_text(f"{launch} {rest}\n")
    state = reading.import_recipe(script)
    assert state.recipe["train.effective_batch_size"] == 2 * processes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from unsloth import FastLanguageModel\n", "can't import a script of Unsloth"),
        ("model:\n  _component_: torchtune.models.llama3\n", "can't import a torchtune config"),
        ("a: 1\n", "can't tell which tool"),
        ("- a\n", "no mapping of settings"),
        ("a: [\n", "not valid YAML"),
        ("base_model: a\nlearning_rate: 1\nlearning_rate: 2\n", "same key twice(.|\n)*found: +learning_rate"),
        ("base_model: a\ndatasets:\n- path: a\n  path: b\n", "same key twice"),
        ("accelerate launch trl/scripts/grpo.py --beta 1\n", "supervised fine-tuning only(.|\n)*with TRL"),
        ("python examples/scripts/dpo.py --model_name_or_path a\n", "supervised fine-tuning only"),
        ("stage: sft\nfinetuning_type: lora\n", "names no model"),
        ("model_name_or_path: a\ntemplate: qwen3\nexport_dir: b\n", "names no dataset(.|\n)*finetune merge"),
        ("base_model: a\nmicro_batch_size: 1\n", "names no dataset"),
    ],
)
def test_other_files_are_errors(text, said, tmp_path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        reading.import_recipe(path)


def test_command_writes_a_recipe_that_passes_check(tmp_path, capsys) -> None:
    secrets = {"wandb_api_key": "abc", "hub_token": "hf_abcdefghijklmnopqrstuv"}
    imported(tmp_path, "axolotl", sequence_len=512, **secrets)
    recipe = tmp_path / "new" / "recipe.yaml"
    words = ["import", str(tmp_path / "theirs.yaml"), "--output", str(recipe)]
    assert main.main(words) == 0
    said = capsys.readouterr().out
    assert "translated from axolotl" in said and f"check {recipe}" in said
    text = recipe.read_text()
    assert "hf_abc" not in text and ": abc" not in text and "# not supported" in text
    assert main.main(["check", str(recipe)]) == 0, capsys.readouterr().err
    assert main.main(words) == 2 and "exists" in capsys.readouterr().err
    assert main.main(["import", str(tmp_path / "absent.yaml"), "--output", f"{recipe}2"]) == 2


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("mode", [[], ["--json"], ["--quiet"]])
def test_secrets_of_a_config_are_on_no_screen(nested: bool, mode: list[str], tmp_path, capsys) -> None:
    secrets = {"swanlab_api_key": "Qm7xK2pLw9RtYz4vNb", "hub_token": "my-password", "db_password": "horse"}
    config = {"base_model": "a/b", "datasets": [{"path": "x/y", "type": "alpaca"}]}
    config |= {"logging": [{"more": secrets}]} if nested else secrets
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    output = tmp_path / "recipe.yaml"
    assert main.main(["import", str(tmp_path / "c.yaml"), "--output", str(output), *mode]) == 0
    text = "".join(capsys.readouterr()) + output.read_text()
    assert not [value for value in secrets.values() if value in text]
    assert all(name in text for name in secrets)


def test_long_line_of_a_script_is_read_at_once(tmp_path) -> None:
    words = " ".join(["accelerate launch", *(["-x"] * 30_000), "scripts/sft.py --model_name_or_path a/b"])
    (tmp_path / "run.sh").write_text(f"{words} --dataset_name x/y\n")
    started = time.process_time()
    assert reading.import_recipe(str(tmp_path / "run.sh")).recipe["model.name"] == "a/b"
    assert time.process_time() - started < 5


@pytest.mark.parametrize("joined", [True, False])
def test_hyphens_in_the_values_of_a_command_line_are_kept(joined, tmp_path) -> None:
    given = {"--model_name_or_path": "org/a-model", "--dataset-name": "org/my-data", "--use_peft": "True"}
    given |= {"--lora_target_modules": "all-linear"}
    words = [f"{name}={value}" if joined else f"{name} {value}" for name, value in given.items()]
    script = tmp_path / "run.sh"
    script.write_text(f"trl sft {' '.join(words)}\n")
    recipe = reading.import_recipe(script).recipe
    assert recipe["model.name"] == "org/a-model" and recipe["data.name"] == "org/my-data"
    assert recipe["adapter.target_modules"] == "all-linear"


def test_a_mixture_of_trl_is_not_taken_for_axolotls_datasets(tmp_path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "a", "datasets": [{"path": "b"}]}))
    assert reading.import_recipe(path).tool == "TRL"


@pytest.mark.parametrize(
    ("more", "too_long"), [([], "split"), ([{"path": "b.jsonl", "type": "chat_template"}], "drop")]
)
def test_long_texts_are_cut_into_pieces_as_in_axolotl(more, too_long, tmp_path) -> None:
    state = imported(tmp_path, "axolotl", datasets=[{"path": "a.jsonl", "type": "completion"}, *more])
    assert state.recipe["data.too_long"] == too_long
    assert (kind_of(state, "data.too_long") == {NOT_SUPPORTED}) is bool(more)


@pytest.mark.parametrize(
    ("tool", "given", "named"),
    [
        ("axolotl", {"datasets": [{"path": "a", "field": "body"}, {"path": "b"}]}, True),
        ("axolotl", {"datasets": [{"path": "a", "field": "body"}, {"path": "b", "field": "body"}]}, False),
        ("axolotl", {"datasets": [{"path": "a"}, {"path": "b", "field_messages": "conversations"}]}, False),
        ("llamafactory", {"dataset": "mine,chats"}, True),
        ("llamafactory", {"dataset": "mine,hub"}, False),
        ("llamafactory", {"dataset": "mine", "eval_dataset": "chats"}, True),
    ],
)
def test_columns_that_not_all_sources_have_are_named(tool, given, named, tmp_path) -> None:
    state = imported(tmp_path, tool, **given)
    assert (NOT_SUPPORTED in kind_of(state, "data.columns")) is named


@pytest.mark.parametrize(
    ("path", "split", "kept", "kind"),
    [
        ("rows.jsonl", "train", None, SAME),
        ("rows.jsonl", "train[:80%]", None, NOT_SUPPORTED),
        ("org/rows", "train[:80%]", "train[:80%]", TRANSLATED),
    ],
)
def test_a_file_has_no_split(path, split, kept, kind, tmp_path) -> None:
    state = imported(tmp_path, "axolotl", datasets=[{"path": path, "split": split}])
    assert state.recipe.get("data.split") == kept
    found = [entry.kind for entry in state.entries if entry.key == "datasets.0.split"]
    assert found == ([kind] if kind else [])


def test_a_type_that_the_config_describes_gives_columns(tmp_path) -> None:
    own = {"field_instruction": "question", "field_output": "answer", "format": "Q: {instruction}"}
    state = imported(tmp_path, "axolotl", datasets=[{"path": "a.jsonl", "type": own}])
    assert state.recipe["data.columns"] == {"instruction": "question", "output": "answer"}
    (entry,) = (one for one in state.entries if one.key == "datasets.0.type.format")
    assert entry.kind == NOT_SUPPORTED


@pytest.mark.parametrize(
    ("trained", "kind"), [(["gpt"], SAME), (["assistant"], SAME), (["human", "gpt"], NOT_SUPPORTED)]
)
def test_roles_to_train_can_have_the_names_of_the_data(trained, kind, tmp_path) -> None:
    source = {"path": "a.jsonl", "type": "chat_template", "roles_to_train": trained}
    state = imported(tmp_path, "axolotl", datasets=[source])
    (entry,) = (one for one in state.entries if one.key == "datasets.0.roles_to_train")
    assert entry.kind == kind


@pytest.mark.parametrize(
    ("more", "kind"),
    [({}, DIFFERS), ({"eot_tokens": ["<|im_end|>"]}, SAME), ({"train_on_inputs": True}, None)],
)
def test_the_end_of_a_turn_that_axolotl_may_not_train_is_named(more, kind, tmp_path) -> None:
    state = imported(tmp_path, "axolotl", **more)
    assert kind_of(state, "data.train_on") == ({kind} if kind else set())


def test_a_rank_that_is_no_number_is_an_error_of_the_key(tmp_path) -> None:
    with pytest.raises(UserError, match=r"lora_rank(.|\n)*does not accept(.|\n)*eight"):
        imported(tmp_path, "llamafactory", lora_rank="eight")


def test_keys_of_other_trainers_are_keys_that_sft_lacks() -> None:
    from trl import DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig

    def names(*kinds: Any) -> set[str]:
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}

    ours = names(SFTConfig, ModelConfig, ScriptArguments)
    assert not ours & set(trl.OTHER_TRAINERS)
    for kind in (DPOConfig, GRPOConfig, KTOConfig, RewardConfig):
        assert names(kind) & set(trl.OTHER_TRAINERS), kind


def test_a_compile_mode_that_excludes_checkpointing_is_not_kept(tmp_path) -> None:
    mode = {"torch_compile": True, "torch_compile_mode": "max-autotune-no-cudagraphs"}
    state = imported(tmp_path, "axolotl", gradient_checkpointing=True, **mode)
    assert kind_of(state, "torch_compile_mode") == {NOT_SUPPORTED}
    assert state.recipe["speed.compile"] is True


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("tool", "given", "target", "value"),
    [
        ("llamafactory", {"add_tokens": "<a>,<b>", "add_special_tokens": "<c>"}, "model.add_tokens", 3),
        ("llamafactory", {"warmup_steps": 10, "warmup_ratio": 0.5}, "train.warmup_steps", 10),
        ("llamafactory", {"warmup_steps": 0, "warmup_ratio": 0.5}, "train.warmup_steps", 0.5),
        ("trl", {"warmup_steps": 10, "warmup_ratio": 0.5}, "train.warmup_steps", 10),
        ("axolotl", {"warmup_steps": 10, "warmup_ratio": 0.5}, "train.warmup_steps", 10),
    ],
)
def test_two_keys_with_one_meaning_do_not_depend_on_their_order(
    tool: str, given: dict[str, Any], target: str, value: Any, first: bool, tmp_path
) -> None:
    state = imported(tmp_path, tool, **dict(sorted(given.items(), reverse=first)))
    found = state.recipe[target]
    assert (len(found) if isinstance(found, list) else found) == value
    assert not any(NOT_SUPPORTED in kind_of(state, key) for key in given)


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "trl"])
def test_two_adapter_types_in_one_config_are_named(tool: str, tmp_path) -> None:
    start = "peft_" if tool == "axolotl" else ""
    state = imported(tmp_path, tool, **{f"{start}use_dora": True, f"{start}use_rslora": True})
    assert state.recipe["adapter.type"] == "dora"
    assert kind_of(state, f"{start}use_rslora") == {NOT_SUPPORTED}


def test_second_key_that_sets_another_value_is_named(tmp_path) -> None:
    state = imported(tmp_path, "axolotl", adam_epsilon=1e-8, adam_eps=1e-6)
    assert kind_of(state, "adam_epsilon") == {TRANSLATED} and kind_of(state, "adam_eps") == {NOT_SUPPORTED}
    assert state.recipe["train.adam_epsilon"] == 1e-8


def test_migration_page_is_made_from_the_importers_tables() -> None:
    script = module_of("scripts", "make_migration")
    assert script.PAGE.read_text() == script.page(), "scripts/make_migration.py"


def keys_read_by(module: Any) -> list[str]:
    """Return the keys that an importer takes by name, and those of its rules."""
    tree = ast.parse(Path(module.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("take", "get", "pop")
        and ast.unparse(call.func.value) in ("state", "state.source")
        and isinstance(call.args[0], ast.Constant)
    ]
    return sorted({*map(str, named), *module.RULES, *common.TRAINER})


@pytest.mark.parametrize("tool", BASES)
def test_no_key_that_an_importer_reads_is_dropped(tool, tmp_path) -> None:
    required = {"base_model", "model_name_or_path", "dataset_name", "datasets", "dataset"}
    dropped = []
    for key in keys_read_by(reading.TOOLS[tool]):
        for value in (True, 2, "a", ["a"], None):
            try:
                state = imported(tmp_path, tool, **{key: value})
            except UserError:
                continue  # the tool does not accept such a value
            if key not in {entry.key.split(".")[0] for entry in state.entries}:
                dropped.append((key, value))
            if key not in required and value is not None:
                break
    assert not dropped


@pytest.mark.parametrize(
    ("tool", "given", "key"),
    [
        ("axolotl", {"optimizer": "muon"}, "optimizer"),
        ("axolotl", {"lr_scheduler": "rex"}, "lr_scheduler"),
        ("axolotl", {"val_set_size": 200}, "val_set_size"),
        ("axolotl", {"eval_steps": 5, "val_set_size": 0.1, "deepspeed": "zero3.json"}, "eval_steps"),
        ("axolotl", {"excess_length_strategy": "truncate"}, "excess_length_strategy"),
        ("axolotl", {"use_wandb": True, "wandb_mode": "offline"}, "wandb_mode"),
        ("axolotl", {"model_config": {"rope_theta": 1e6}}, "model_config"),
        ("axolotl", {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "plugins"),
        ("axolotl", {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, "bnb_config_kwargs"),
        ("llamafactory", {"val_size": 100}, "val_size"),
        ("llamafactory", {"optim": "adamw_apex_fused"}, "optim"),
        ("llamafactory", {"eval_dataset": "mine,chats"}, "eval_dataset"),
        ("llamafactory", {"eval_dataset": "hub"}, "eval_dataset"),
        ("llamafactory", {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        ("llamafactory", {"enable_thinking": False}, "enable_thinking"),
        ("llamafactory", {"eval_strategy": "epoch", "val_size": 0.1, "max_steps": 50}, "eval_strategy"),
        ("trl", {"max_length": None}, "max_length"),
        ("trl", {"eval_strategy": "steps", "eval_steps": 10}, "dataset_test_split"),
        ("trl", {"load_in_4bit": True}, "use_bnb_nested_quant"),
        ("trl", {"load_in_4bit": True, "use_peft": False}, "load_in_4bit"),
        ("trl", {"data_seed": 1, "logging_dir": "logs"}, "logging_dir"),
    ],
)
def test_values_that_finetune_does_not_take_are_listed_and_the_recipe_loads(
    tool, given, key, tmp_path
) -> None:
    state = imported(tmp_path, tool, **given)
    assert kind_of(state, key) == {NOT_SUPPORTED}, [one for one in state.entries if one.key == key]
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text.write(state, "theirs.yaml"))
    loader.load(path)


@pytest.mark.parametrize(
    ("tool", "given", "steps", "best"),
    [
        ("axolotl", {"evals_per_epoch": 4, "num_epochs": 2}, 0.125, False),
        ("axolotl", {"evals_per_epoch": 4, "saves_per_epoch": 2, "num_epochs": 2}, 0.125, True),
        ("axolotl", {"evals_per_epoch": 3, "saves_per_epoch": 2}, 0.333333, False),
        ("axolotl", {"evals_per_epoch": 2, "max_steps": 50}, 0.5, False),
        ("axolotl", {"evals_per_epoch": 1}, None, None),
        ("axolotl", {"eval_steps": 0.05, "save_steps": 0.1}, 0.05, True),
        ("axolotl", {"eval_strategy": "epoch", "num_epochs": 2}, 0.5, False),
        ("llamafactory", {"eval_strategy": "epoch", "num_train_epochs": 4}, 0.25, False),
        ("llamafactory", {"eval_strategy": "steps"}, 500, False),
        ("llamafactory", {"eval_strategy": "steps", "logging_steps": 20}, 20, False),
        ("trl", {"eval_strategy": "steps"}, 10, False),
        ("trl", {"eval_strategy": "steps", "eval_steps": 0.2}, 0.2, False),
        ("trl", {"eval_strategy": "steps", "eval_steps": 5, "accelerate_config": "fsdp2"}, None, None),
    ],
)
def test_evaluations_during_training_are_those_of_the_tool(tool, given, steps, best, tmp_path) -> None:
    size = {"axolotl": "val_set_size", "llamafactory": "val_size", "trl": "test_split_size"}[tool]
    state = imported(tmp_path, tool, **{size: 0.1}, **given)
    assert state.recipe.get("eval.eval_steps") == steps
    assert state.recipe.get("eval.load_best_model_at_end") is best
    assert set(given) <= {entry.key for entry in state.entries} | {"accelerate_config"}
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text.write(state, "theirs.yaml"))
    loader.load(path)


@pytest.mark.parametrize(
    ("tool", "given", "expected"),
    [
        (
            "axolotl",
            {"use_wandb": True, "wandb_name": "mine", "mlflow_experiment_name": "a"},
            {"train.report_to": ["wandb", "mlflow"], "train.run_name": "mine"},
        ),
        ("axolotl", {"wandb_project": "mine"}, {"train.report_to": "wandb"}),
        ("axolotl", {"wandb_name": "mine"}, {"train.report_to": None, "train.run_name": None}),
        (
            "axolotl",
            {"qat": {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": 16}},
            {
                "speed.qat": {
                    "config": "Int8DynamicActivationIntxWeightConfig",
                    "weight_dtype": "int4",
                    "group_size": 16,
                }
            },
        ),
        (
            "axolotl",
            {"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}},
            {"adapter.type": "lora", "model.quantization": "fp4"},
        ),
        ("axolotl", {}, {"train.router_aux_loss_coef": 0.0}),
        ("axolotl", {"model_config": {"output_router_logits": True}}, {"train.router_aux_loss_coef": None}),
        (
            "axolotl",
            {"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"},
            {"train.lr_scheduler_type": "linear", "train.lr_scheduler_kwargs": None},
        ),
        (
            "axolotl",
            {"optimizer": "galore_adamw", "optim_target_modules": "all_linear", "optim_args": {"rank": 4}},
            {"train.optim_target_modules": "all-linear", "train.optim_args": "rank=4"},
        ),
        (
            "llamafactory",
            {"finetuning_type": "full", "use_galore": True, "galore_rank": 4, "galore_layerwise": True},
            {
                "train.optim": "galore_adamw_layerwise",
                "train.optim_target_modules": "all-linear",
                "train.optim_args": "rank=4, update_proj_gap=200, scale=2.0, proj_type=std",
            },
        ),
        (
            "llamafactory",
            {"quantization_bit": 4, "quantization_type": "fp4"},
            {"adapter.type": "lora", "model.quantization": "fp4"},
        ),
        (
            "llamafactory",
            {"dataset": "hub", "max_samples": 100},
            {"data.name": [{"name": "someone/rows", "subset": "en", "split": "train[:100]"}]},
        ),
        (
            "trl",
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            {"adapter.type": "lora", "model.quantization": "fp4"},
        ),
    ],
)
def test_settings_of_several_keys_are_translated(tool, given, expected, tmp_path) -> None:
    state = imported(tmp_path, tool, **given)
    assert {key: state.recipe.get(key) for key in expected} == expected
    assert set(given) <= {entry.key.split(".")[0] for entry in state.entries}
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text.write(state, "theirs.yaml"))
    loader.load(path)


def test_defaults_that_change_the_training_are_named(tmp_path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | {"adapter": None, "bf16": "auto"}))
    state = reading.import_recipe(path, gpus=2)
    assert state.recipe["train.average_tokens_across_devices"] is False
    texts = {entry.key: entry.text for entry in state.entries if entry.kind == DIFFERS}
    assert "16-bit weights" in texts["adapter.type"]
    texts = {entry.key: entry.text for entry in imported(tmp_path, "llamafactory").entries}
    assert "one line break" in texts["dataset.mine.formatting"]


def test_few_examples_of_a_file_need_no_limit(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 3)
    for most, kind in ((3, SAME), (2, NOT_SUPPORTED)):
        state = imported(tmp_path, "llamafactory", max_samples=most, dataset_dir=str(tmp_path / "data"))
        assert kind_of(state, "max_samples") == {kind}


def test_weights_of_the_last_step_are_kept_as_in_the_tools(tmp_path) -> None:
    for tool, size in (("axolotl", "val_set_size"), ("llamafactory", "val_size")):
        given = {size: 0.1, "eval_steps": 10, "save_steps": 15}
        recipe = imported(tmp_path, tool, eval_strategy="steps", **given).recipe
        assert recipe["eval.eval_steps"] == 10 and recipe["eval.load_best_model_at_end"] is False
        given["save_steps"] = 20
        best = imported(tmp_path, tool, load_best_model_at_end=True, **given).recipe
        assert best["eval.load_best_model_at_end"] is True
    given = {"val_set_size": 0.1, "eval_steps": 10}
    recipe = imported(tmp_path, "axolotl", eval_strategy="epoch", **given).recipe
    assert "eval.eval_steps" not in recipe  # one epoch


@pytest.mark.parametrize("second", ["answer", "output"])
def test_sources_with_other_columns_are_named(second, tmp_path) -> None:
    info = {
        name: {"file_name": f"{name}.jsonl", "columns": {"response": column}}
        for name, column in (("mine", "answer"), ("other", second))
    }
    imported(tmp_path, "llamafactory")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(LLAMA_FACTORY | {"dataset": "mine,other"}))
    state = reading.import_recipe(tmp_path / "theirs.yaml")
    assert state.recipe["data.columns"] == {"output": "answer"}
    named = {entry.key for entry in state.entries if entry.kind == NOT_SUPPORTED}
    assert ("dataset.other.columns" in named) is (second == "output")


def test_data_with_images_is_refused(tmp_path) -> None:
    imported(tmp_path, "llamafactory")
    info = {"mine": {"file_name": "rows.json", "columns": {"messages": "messages", "images": "images"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="images, audio or video"):
        reading.import_recipe(tmp_path / "theirs.yaml")


@pytest.mark.parametrize(("keys", "known"), [({"role": "from"}, True), ({"role": "speaker"}, False)])
def test_other_keys_of_messages_are_named(keys, known, tmp_path) -> None:
    source = {"path": "a.jsonl", "type": "chat_template", "message_property_mappings": keys}
    state = imported(tmp_path, "axolotl", datasets=[source])
    (entry,) = (one for one in state.entries if one.key.endswith("message_property_mappings"))
    assert entry.kind == (SAME if known else NOT_SUPPORTED)


def test_a_script_of_trl_and_other_configs_say_what_they_are(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text('"""Run `trl sft`."""\nfrom trl import SFTConfig, SFTTrainer\n')
    with pytest.raises(UserError, match="Python script of TRL"):
        reading.import_recipe(script)
    script.write_text(
        f'"""\npython trl/scripts/sft.py \\\n  --model_name_or_path {MODEL} --dataset_name a\n"""\n'
    )
    assert reading.import_recipe(script).recipe["data.name"] == "a"
    script.write_text("print('no trainer here')\n")
    with pytest.raises(UserError, match="can't import a Python script "):
        reading.import_recipe(script)
    config = tmp_path / "config.yaml"
    for text, what in (("compute_environment: LOCAL\n", "accelerate config"), ("train_dataset: a\n", "v1")):
        config.write_text(text)
        with pytest.raises(UserError, match=what):
            reading.import_recipe(config)


def test_a_config_whose_recipe_is_too_large_is_refused(tmp_path) -> None:
    """An alias repeats a text that is small in the config."""
    text = yaml.safe_dump(AXOLOTL | {"lora_target_modules": ["q_proj"], "lora_target_linear": None})
    path = tmp_path / "theirs.yaml"
    name = "a" * 50_000
    path.write_text(text + f"unknown: &long {name}\ntokens: [{', '.join(['*long'] * 9)}]\n")
    with pytest.raises(UserError, match="too large"):
        reading.import_recipe(path)


STATED = "base_model: a/b\ndatasets: [{path: c/d, type: alpaca}]\nadapter: lora\nmicro_batch_size: 1\n"
OFF = ("train_on_inputs", "sample_packing", "load_in_4bit", "gradient_checkpointing")


@pytest.mark.parametrize("word", ["false", "False", "no", "off"])
def test_a_boolean_of_axolotl_in_quotes_is_a_boolean(word: str, tmp_path) -> None:
    recipes = []
    for value in ("false", f'"{word}"'):
        (tmp_path / "config.yaml").write_text(STATED + "".join(f"{key}: {value}\n" for key in OFF))
        recipes.append(reading.import_recipe(tmp_path / "config.yaml").recipe)
    assert recipes[0] == recipes[1]
    assert recipes[0]["data.packing"] is False and recipes[0]["adapter.type"] == "lora"


@pytest.mark.parametrize("after", ["", " 2>&1 | tee log.txt", " > log.txt", " && echo done", " ; date", " &"])
def test_a_shell_operator_ends_the_options_of_a_command(after: str, tmp_path) -> None:
    script = tmp_path / "train.sh"
    words = "--use_peft no --packing no --save_strategy no --gradient_checkpointing false"
    script.write_text(f"trl sft --model_name_or_path a/b --dataset_name c/d {words}{after}\n")
    found = reading.import_recipe(script).recipe
    assert found["adapter.type"] == "full" and found["data.packing"] is False
    assert found["train.save_strategy"] == "no" and found["speed.activation_checkpointing"] == "none"


@pytest.mark.parametrize("between", ["\n", " && ", " ; ", " & "])
@pytest.mark.parametrize("second", ["trl sft", "trl dpo", "python scripts/sft.py"])
def test_a_script_with_several_commands_is_refused(second: str, between: str, tmp_path) -> None:
    script, words = tmp_path / "train.sh", "--model_name_or_path a/b --dataset_name c/d"
    script.write_text(f"trl sft {words}{between}{second} {words}\n")
    with pytest.raises(UserError, match=r"several trl commands(.|\n)*found: +2 commands"):
        reading.import_recipe(script)


@pytest.mark.parametrize(
    ("modules", "kind"),
    [
        (["q_proj", "mlp.down_proj"], SAME),
        (["embed_tokens", "lm_head"], NOT_SUPPORTED),
        (["q_proj", "lm_head"], NOT_SUPPORTED),
        ("model.*q_proj", NOT_SUPPORTED),
    ],
)
def test_modules_that_all_linear_leaves_out_are_listed(modules: Any, kind: str, tmp_path) -> None:
    state = imported(tmp_path, "axolotl", lora_target_modules=modules)
    (entry,) = [one for one in state.entries if one.key == "lora_target_modules"]
    assert entry.kind == kind and state.recipe["adapter.target_modules"] == "all-linear"
