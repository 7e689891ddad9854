"""Today's names for old names, for names of other tools, and for keys that another section owns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from finetune.core.errors import nearest

_NO_SUCH_CHECKPOINTS = "remove it: finetune always saves complete checkpoints, once"
_PRECISION = "remove it, and set `mixed_precision` in the accelerate config"

OWNED = {  # SFTConfig fields that `train:` refuses -> the owner
    "packing": "`data.packing`",
    "packing_strategy": "`data.packing`, which packs best-fit decreasing",
    "eval_packing": "`data.packing` (evaluation never packs)",
    "padding_free": "`data.padding_free`",
    "max_length": "`data.max_length`",
    "truncation_mode": "`data.too_long`",
    "assistant_only_loss": "`data.train_on: assistant`",
    "completion_only_loss": "`data.train_on`",
    "chat_template_path": "`data.chat_template`",
    "eos_token": "a tokenizer with this token",
    "pad_token": "a tokenizer with this token",
    "remove_unused_columns": "the keys of `data:`",
    "shuffle_dataset": "`train.train_sampling_strategy`",
    "length_column_name": "the keys of `data:` (finetune counts the lengths)",
    "label_names": "the keys of `data:`",
    "gradient_checkpointing": "`speed.activation_checkpointing`",
    "gradient_checkpointing_kwargs": "`speed.activation_checkpointing`",
    "activation_checkpointing": "`speed.activation_checkpointing`",
    "activation_checkpointing_kwargs": "`speed.activation_checkpointing`",
    "activation_offloading": "`speed.offload`",
    "torch_compile": "`speed.compile`",
    "torch_compile_backend": "`speed.compile`",
    "torch_compile_mode": "`speed.compile`",
    "use_liger_kernel": "`speed.loss`",
    "liger_kernel_config": "the keys of `speed:`",
    "use_cache": "the keys of `speed:`",
    "bf16": "`mixed_precision` in the accelerate config",
    "fp16": "`mixed_precision` in the accelerate config",
    "bf16_full_eval": "`mixed_precision` in the accelerate config",
    "fp16_full_eval": "`mixed_precision` in the accelerate config",
    "use_cpu": "`use_cpu` in the accelerate config",
    "fsdp": "`fsdp_config` in the accelerate config",
    "fsdp_config": "`fsdp_config` in the accelerate config",
    "deepspeed": "`deepspeed_config` in the accelerate config",
    "parallelism_config": "`parallelism_config` in the accelerate config",
    "accelerator_config": "the accelerate config",
    "local_rank": "the accelerate config",
    "gradient_accumulation_steps": "`train.effective_batch_size` (finetune derives the accumulation steps)",
    "per_device_eval_batch_size": "`eval.batch_size`",
    "push_to_hub": "`publish.repo`, and run `finetune publish`",
    "resume_from_checkpoint": "--resume on the command line",
    "auto_find_batch_size": "`train.per_device_train_batch_size: auto`",
    "model_init_kwargs": "the keys of `model:`",
    "trust_remote_code": "a model without code of its own",
    "loss_type": "the default, nll, which is the only loss that finetune supports",
    "do_train": "remove it: `finetune train` always trains",
    "do_eval": "the keys of `eval:`",
    "do_predict": "the keys of `eval:`",
    "disable_tqdm": "--quiet on the command line",
    "log_level": "--debug on the command line",
    "log_level_replica": "--debug on the command line",
    "logging_nan_inf_filter": "remove it: a loss that is NaN or Inf stops the run",
    "batch_eval_metrics": "the keys of `eval:`",
    "include_for_metrics": "the keys of `eval:`",
    "prediction_loss_only": "the keys of `eval:`",
    "logging_strategy": "`train.logging_steps`",
    "save_only_model": _NO_SUCH_CHECKPOINTS,
    "save_on_each_node": _NO_SUCH_CHECKPOINTS,
    "enable_jit_checkpoint": "remove it: finetune always saves a checkpoint on a signal",
    "restore_callback_states_from_checkpoint": "remove it: finetune always restores its callbacks",
    "ignore_data_skip": "remove it: a resumed run continues with the next batch",
    "eval_steps": "`eval.eval_steps`",
    "load_best_model_at_end": "`eval.load_best_model_at_end`",
    "metric_for_best_model": "`eval.metric_for_best_model`",
    "greater_is_better": "`eval.metric_for_best_model`, which also sets whether greater is better",
}
OWNED_PREFIXES = {
    "dataset_": "the keys of `data:`",
    "ddp_": "the accelerate config",
    "eval_": "the keys of `eval:`",
    "hub_": "the keys of `publish:`, and HF_TOKEN in the environment for a token",
    "trackio_": "environment variables",
}

# Keys of format 1 -> today's names. Old run folders are read with this table. In a recipe, they are errors.
KEYS = {
    "speed.base": "model.quantization",
    "speed.recompute": "speed.activation_checkpointing",
    "adapter.from": "adapter.init_from",
    "data.cache": "data.cache_dir",
    "eval.every": "eval.eval_steps",
    "eval.best": "eval.metric_for_best_model",
    "eval.keep_best": "eval.load_best_model_at_end",
    "eval.patience": "eval.early_stopping_patience",
    "eval.answers": "eval.generate",
    "eval.general": "eval.forgetting",
}
RECORDED = {"speed.storage": "model.storage"}  # entries of recipe.resolved.yaml that are not keys
VALUES = {  # today's key -> a value of format 1 -> its name today
    "model.quantization": {"bf16": "none"},
    "speed.activation_checkpointing": {"cheap": "norms", "int8": "mlp_int8", "all": "full"},
}
# Keys -> values that people carry over from other tools, in lower case and without signs -> the value here
MEANT: dict[str, dict[str, str]] = {
    "model.quantization": {
        **dict.fromkeys(
            ("4bit", "int4", "bnb4bit", "bnb", "bitsandbytes", "loadin4bit", "q4", "true"), "nf4"
        ),
        **dict.fromkeys(("8bit", "bnb8bit", "loadin8bit", "q8", "8"), "int8"),
        **dict.fromkeys(("float8", "fp8e4m3", "e4m3"), "fp8"),
        **dict.fromkeys(("false", "off", "fp16", "bfloat16", "float16", "16bit", "fp32"), "none"),
        **dict.fromkeys(("gptq", "awq", "mxfp4"), "auto"),  # a checkpoint that is stored so says so itself
    },
    "model.attention": {
        **dict.fromkeys(("fa2", "flash2", "flashattention"), "flash_attention_2"),
        **dict.fromkeys(("fa3", "flash3"), "flash_attention_3"),
        **dict.fromkeys(("xformers", "math", "memefficient", "paged", "true"), "sdpa"),
        **dict.fromkeys(("none", "false", "default"), "auto"),
    },
    "data.format": {
        **dict.fromkeys(("chatml", "openai", "chat", "chattemplate"), "messages"),
        **dict.fromkeys(("instruct", "instruction"), "alpaca"),
        **dict.fromkeys(("raw", "pretrain", "pretraining"), "text"),
        **dict.fromkeys(("json", "jsonl", "csv", "parquet"), "auto"),
        "conversations": "sharegpt",
    },
    "data.train_on": {
        **dict.fromkeys(("answers", "responses", "turns", "assistantonly", "assistants"), "assistant"),
        **dict.fromkeys(("everything", "inputs", "fullsequence"), "all"),
    },
    "data.reasoning": {**dict.fromkeys(("strip", "remove", "drop", "none", "false"), "cut"), "true": "keep"},
    "data.too_long": {**dict.fromkeys(("cut", "left", "truncate"), "truncate_prompt"), "skip": "drop"},
    "speed.activation_checkpointing": {
        **dict.fromkeys(("on", "yes", "true", "unsloth", "offload"), "full"),
        **dict.fromkeys(("off", "no", "false"), "none"),
        "selective": "mlp",
    },
    "speed.offload": {
        **dict.fromkeys(("cpu", "true", "on", "yes", "disk", "nvme"), "all"),
        **dict.fromkeys(("off", "no", "false"), "none"),
    },
    "speed.compile": {
        **dict.fromkeys(("on", "yes", "inductor"), "true"),
        **dict.fromkeys(("off", "no"), "false"),
    },
    "speed.loss": {
        **dict.fromkeys(("liger", "fused", "cce", "cutcrossentropy", "true"), "chunked"),
        **dict.fromkeys(("default", "false"), "auto"),
    },
    "train.save_strategy": dict.fromkeys(("never", "none"), "no"),
    "train.report_to": {"wb": "wandb", "tb": "tensorboard", "none": "none", "no": "none"},
    "train.lr_scheduler_type": {
        "wsd": "warmup_stable_decay",
        "cosinewithwarmup": "cosine",
        "onecycle": "cosine",
    },
    "adapter.bias": {"true": "all", "false": "none"},
    "adapter.init_lora_weights": dict.fromkeys(("kaiming", "none", "zero", "default", "lora"), "true"),
    "adapter.type": dict.fromkeys(("freeze", "none", "fullfinetune", "finetune", "sft"), "full"),
    "eval.metric_for_best_model": {"accuracy": "exact_match", "acc": "exact_match", "perplexity": "loss"},
}
FILES = {  # today's name of a file in a run folder -> its name in format 1
    "checks.json": "receipts.json",
    "validation.jsonl": "held_out.jsonl",
}
COMMANDS = {  # an old name, or a name that other tools have -> the command
    "tune": "sweep",
    "serve": "chat",
    "inference": "chat",
    "generate": "chat",
    "run": "train",
    "sft": "train",
    "eval": "evaluate",
    "convert": "export",
    "gguf": "export",
    "ollama": "export",
    "quantize": "merge",
    "push": "publish",
    "upload": "publish",
    "validate": "check",
    "preprocess": "data",
    "new": "init",
    "version": "--version",
    "help": "--help",
}
OPTIONS = {"--ladder": "--optimizations", "--prove-resume": "--verify-resume", "--preflight": "--rehearse"}
CHECK_FIELDS = {"asked": "expected", "got": "actual", "ok": "passed"}  # of checks.json, format 1 -> today

RENAMED = {  # a key of older Hugging Face releases or of other tools -> today's key here
    "granularity": "`group_size: 32` for torchao's PerGroup(32), or `group_size: null` for PerAxis(0)",
    "weight_granularity": "`group_size: 32` for torchao's PerGroup(32), or `group_size: null` for PerAxis(0)",
    "warmup_ratio": "`train.warmup_steps`, where a number below 1 is a ratio: `warmup_steps: 0.03`",
    "max_seq_length": "`data.max_length`",
    "max_seq_len": "`data.max_length`",
    "sequence_len": "`data.max_length`",
    "cutoff_len": "`data.max_length`",
    "torch_dtype": _PRECISION,
    "dtype": _PRECISION,
    "mixed_precision": _PRECISION,
    "evaluation_strategy": "`eval.eval_steps`, the number of steps between two evaluations",
    "eval_strategy": "`eval.eval_steps`, the number of steps between two evaluations",
    "val_set_size": "`data.validation_fraction`",
    "load_in_4bit": "`adapter.type: qlora`, or `model.quantization: nf4`",
    "bnb_4bit_quant_type": "`adapter.type: qlora`, or `model.quantization: nf4`",
    "quantization_bit": "`adapter.type: qlora`, or `model.quantization: nf4`",
    "use_peft": "`adapter.type`",
    "peft_type": "`adapter.type`",
    "finetuning_type": "`adapter.type`",
    "use_dora": "`adapter.type: dora`",
    "peft_use_dora": "`adapter.type: dora`",
    "lora_r": "`adapter.r`",
    "lora_rank": "`adapter.r`",
    "rank": "`adapter.r`",
    "alpha": "`adapter.lora_alpha`",
    "dropout": "`adapter.lora_dropout`",
    "lora_target": "`adapter.target_modules`",
    "lora_target_modules": "`adapter.target_modules`",
    "total_step": "remove it: AdaLoRA's schedule uses the number of steps of the run",
    "model_name_or_path": "`model.name`",
    "base_model": "`model.name`",
    "model_id": "`model.name`",
    "attn_implementation": "`model.attention`",
    "use_flash_attention_2": "`model.attention: flash_attention_2`",
    "dataset_name": "`data.name`",
    "dataset": "`data.name`",
    "datasets": "`data.name`",
    "chat_template_path": "`data.chat_template`",
    "train_on_inputs": "`data.train_on: all`",
    "batch_size": "`train.effective_batch_size`",
    "global_batch_size": "`train.effective_batch_size`",
    "total_batch_size": "`train.effective_batch_size`",
    "micro_batch_size": "`train.per_device_train_batch_size`",
    "per_gpu_train_batch_size": "`train.per_device_train_batch_size`",
    "num_epochs": "`train.num_train_epochs`",
    "epochs": "`train.num_train_epochs`",
    "lr": "`train.learning_rate`",
    "optimizer": "`train.optim`",
    "lr_scheduler": "`train.lr_scheduler_type`",
    "group_by_length": "`train.train_sampling_strategy: group_by_length`",
    "overwrite_output_dir": "remove it, and set `train.output_dir` to a new folder",
    "save_safetensors": "remove it: finetune always saves safetensors",
    "logging_dir": "remove it: all output is in the run folder, `train.output_dir`",
    "no_cuda": "`use_cpu` in the accelerate config",
    "hub_model_id": "`publish.repo`",
    "push_to_hub_model_id": "`publish.repo`",
    "fsdp_transformer_layer_cls_to_wrap": "`fsdp_config` in the accelerate config",
    "use_liger": "`speed.loss`",
}


def meant(key: str, value: object, allowed: Iterable[str]) -> str:
    """Return the value that a misspelled value, or one of another tool, means; empty: none is near."""
    plain = re.sub(r"[^a-z0-9]", "", str(value).lower())
    return MEANT.get(key, {}).get(plain) or nearest(str(value), allowed)


def owner_of(key: str) -> str:
    """Return the owner of an SFTConfig field that `train:` refuses; the empty string if `train:` takes it."""
    if key in OWNED:
        return OWNED[key]
    return next((who for prefix, who in OWNED_PREFIXES.items() if key.startswith(prefix)), "")


def current(key: str, value: object) -> tuple[str, Any]:
    """Return today's names of a dotted key and of its value. Other names stay as they are."""
    key = KEYS.get(key) or RECORDED.get(key, key)
    return key, current_value(key, value)


def current_value(key: str, value: object) -> Any:
    """Return today's name of a value of format 1.

    Args:
        key: today's name of the dotted key.
    """
    if key not in VALUES or isinstance(value, bool):
        return value
    if key == "speed.activation_checkpointing":
        if re.fullmatch(r"[1-9]\d*", str(value)):
            return f"full:{value}"
        if match := re.fullmatch(r"int8:([1-9]\d*)", str(value)):
            return f"mlp_int8:{match[1]}"
    return VALUES[key].get(value, value) if isinstance(value, str) else value


def current_recipe(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe of format 1 under today's names."""
    found: dict[str, Any] = {name: {} if isinstance(keys, dict) else keys for name, keys in raw.items()}
    for section, keys in raw.items():
        for name, old in keys.items() if isinstance(keys, dict) else ():
            key, value = current(f"{section}.{name}", old)
            home, _, today = key.partition(".")
            found.setdefault(home, {})[today] = value
    return found


OLD_FACTS = {"storage of the base": "base model weights"}  # of a contract


def current_contract(contract: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's contract with its dotted keys and its facts under today's names."""
    held = [name for name in ("recipe", "chosen") if name in contract]
    parts: dict[str, Any] = {name: dict(current(*item) for item in contract[name].items()) for name in held}
    if facts := contract.get("facts"):
        parts["facts"] = {OLD_FACTS.get(name, name): value for name, value in facts.items()}
    return {**contract, **parts}
