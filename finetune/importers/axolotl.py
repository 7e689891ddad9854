"""Translate an axolotl config. Source: axolotl's schema, src/axolotl/utils/schemas (July 2026)."""

from __future__ import annotations

import os
from typing import Any

from finetune.importers import common
from finetune.importers.common import NO_EFFECT, TRACKER
from finetune.importers.translation import DIFFERS, SAME, TRANSLATED, Rule, Translation

TOOL = "axolotl"
KERNELS = "finetune chooses its own fused kernels (`speed.fused: auto`)"
MOE = "finetune chooses the kernel of experts by itself"
WITHOUT_EFFECT = (
    "dataset_processes",
    "dataset_num_proc",
    "dataset_keep_in_memory",
    "skip_prepare_dataset",
    "sample_packing_eff_est",
    "sample_packing_seq_len_multiplier",
    "sample_packing_group_size",
    "sample_packing_bin_size",
    "total_num_tokens",
    "is_llama_derived_model",
    "is_mistral_derived_model",
    "is_qwen_derived_model",
    "is_falcon_derived_model",
    "tokenizer_legacy",
    "experimental_skip_move_to_device",
    "embeddings_skip_upcast",
    "lora_on_cpu",
)
RULES = {
    **dict.fromkeys(WITHOUT_EFFECT, Rule(same=NO_EFFECT)),
    "sequence_len": Rule("data.max_length", int),
    "excess_length_strategy": Rule(
        "data.too_long", lambda value: {"raise": "error", "truncate": "truncate_prompt"}.get(value, "drop")
    ),
    "num_epochs": Rule("train.num_train_epochs", float),
    "learning_rate": Rule("train.learning_rate", float),
    "optimizer": Rule("train.optim", lambda value: common.OPTIMIZERS.get(value, value)),
    "lr_scheduler": Rule("train.lr_scheduler_type"),
    "weight_decay": Rule("train.weight_decay", float),
    "adam_beta1": Rule("train.adam_beta1", float),
    "adam_beta2": Rule("train.adam_beta2", float),
    "adam_epsilon": Rule("train.adam_epsilon", float),
    "adam_eps": Rule("train.adam_epsilon", float),
    "max_grad_norm": Rule("train.max_grad_norm", float),
    "seed": Rule("train.seed"),
    "output_dir": Rule("train.output_dir"),
    "sample_packing": Rule("data.packing"),
    "batch_flattening": Rule("data.padding_free", bool),
    "shuffle_merged_datasets": Rule(same="finetune shuffles all examples of all sources"),
    "revision_of_model": Rule("model.revision"),
    "neftune_noise_alpha": Rule("train.neftune_noise_alpha"),
    "early_stopping_patience": Rule("eval.early_stopping_patience"),
    "loss_watchdog_threshold": Rule(
        reason="`train.stop_at_spike` stops a run whose loss rises by a factor, not above a limit"
    ),
    "loss_watchdog_patience": Rule(same="it belongs to loss_watchdog_threshold"),
    "group_by_length": Rule(
        "train.train_sampling_strategy", lambda on: "group_by_length" if on else "random"
    ),
    "default_system_message": Rule(reason="write the system message into the data"),
    "dataset_prepared_path": Rule(
        same="`data.cache_dir` is the folder of prepared data; the default is fine"
    ),
    "dataset_exact_deduplication": Rule(
        reason="remove duplicates from the data; `finetune data` counts them"
    ),
    "push_dataset_to_hub": Rule(reason="finetune uploads no data"),
    "pad_to_sequence_len": Rule(same="padding changes no result; packed sequences have one length anyway"),
    "pad_to_multiple_of": Rule(same="padding changes no result"),
    "eval_sample_packing": Rule(same="evaluation never packs, so a loss is the loss of one example"),
    "sample_packing_sequentially": Rule(reason="finetune packs by best-fit decreasing"),
    "curriculum_sampling": Rule(reason="finetune shuffles the examples"),
    "tf32": Rule("train.tf32", bool),
    "bfloat16": Rule(same=common.LAUNCH),
    "float16": Rule(reason="use an accelerate config with `mixed_precision: fp16`"),
    "fp8": Rule(reason="use `finetune train --accelerate 8xh100_fp8`, or `model.quantization: fp8`"),
    "fp8_enable_fsdp_float8_all_gather": Rule(same="it belongs to fp8"),
    "torch_compile": Rule("speed.compile", lambda value: "auto" if value == "auto" else bool(value)),
    "torch_compile_mode": Rule("speed.compile"),
    "torch_compile_backend": Rule(same="the backend is inductor"),
    "activation_offloading": Rule("speed.offload", lambda on: "activations" if on else "none"),
    "hf_use_auth_token": Rule(same="set HF_TOKEN in the environment"),
    "model_type": Rule(same="transformers chooses the class by config.json"),
    "tokenizer_type": Rule(same="transformers chooses the class by tokenizer_config.json"),
    "tokenizer_use_fast": Rule(same="finetune always uses the fast tokenizer"),
    "tokenizer_use_mistral_common": Rule(reason="finetune uses the tokenizer of transformers"),
    "tokenizer_config": Rule(reason="save the tokenizer into the model's folder"),
    "device_map": Rule(same="finetune places the model on the GPU of each process"),
    "low_cpu_mem_usage": Rule(same=common.ALWAYS),
    "base_model_ignore_patterns": Rule(same="finetune reads only the files that the index names"),
    "strict": Rule(same="a model that does not fit is always an error"),
    "debug": Rule(same="use `finetune train --debug`"),
    "val_set_size": Rule("data.validation_fraction", float),
    "eval_table_size": Rule("eval.samples"),
    "eval_max_new_tokens": Rule("eval.max_new_tokens"),
    "eval_causal_lm_metrics": Rule(reason="finetune reports loss, exact match and the tasks of `eval.tasks`"),
    "do_causal_lm_eval": Rule(same="finetune always generates answers to the validation set"),
    "save_first_step": Rule(reason="use `train.save_steps`"),
    "auto_resume_from_checkpoints": Rule(same="use `finetune train --resume=auto`"),
    "include_tokens_per_second": Rule(same=common.ALWAYS),
    "include_tkps": Rule(same=common.ALWAYS),
    "profiler_steps": Rule(reason="use `finetune profile RECIPE`"),
    "resize_token_embeddings_to_32x": Rule(same="finetune adds only the rows of new tokens"),
    "lora_fan_in_fan_out": Rule(same="finetune sets it for Conv1D layers"),
    "lora_modules_to_save": Rule("adapter.modules_to_save"),
    "lora_model_dir": Rule("adapter.init_from"),
    "model_quantization_config": Rule(same="finetune reads the quantization of the checkpoint"),
    "model_quantization_config_kwargs": Rule(same="finetune reads the quantization of the checkpoint"),
    "quantize_moe_experts": Rule(reason="`finetune plan` shows which weights are quantized"),
    "bnb_config_kwargs": Rule(same="finetune quantizes in nf4 with double quantization"),
    "use_tensorboard": Rule(reason="set `train.report_to: tensorboard`"),
    "unfrozen_parameters": Rule(reason="finetune trains all weights (`full`) or an adapter"),
    "tensor_parallel_size": Rule(reason="finetune trains with data parallelism and FSDP2", off=(None, 1)),
    "context_parallel_size": Rule(reason="see accelerate_configs/context_parallel_4.yaml", off=(None, 1)),
    "sequence_parallel_degree": Rule(reason="see accelerate_configs/context_parallel_4.yaml", off=(None, 1)),
    "dp_shard_size": Rule(same="the accelerate config sets it"),
    "dp_replicate_size": Rule(reason="the accelerate config sets it", off=(None, 1)),
    "fsdp_version": Rule(same="finetune uses FSDP2"),
    "fsdp_final_state_dict_type": Rule(same="finetune saves one full adapter or model"),
    "save_strategy": Rule("train.save_strategy", lambda value: "auto" if value == "best" else value),
    "max_packed_sequence_len": Rule(reason="set `data.packing` and `data.max_length`"),
    "min_sample_len": Rule(reason="remove short examples from the data"),
    "special_tokens": Rule(
        reason="finetune uses the tokens of the tokenizer; save another tokenizer into the model's folder",
        off=(None, {}),
    ),
    **{
        name: Rule(same=KERNELS)
        for name in (
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "lora_embedding_kernel",
            "flash_attn_fuse_mlp",
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
            "fused_attn_kernel",
            "tiled_mlp",
            "use_kernels",
            "liger_rms_norm",
            "liger_glu_activation",
            "liger_layer_norm",
            "liger_rope",
            "liger_cross_entropy",
            "liger_fused_linear_cross_entropy",
            "liger_rms_norm_gated",
            "cut_cross_entropy",
            "chunked_cross_entropy",
            "flex_attn_compile_kwargs",
            "torchdistx_path",
            "gc_steps",
            "gc_collect_steps",
        )
    },
    **{
        name: Rule(same=MOE)
        for name in ("use_scattermoe", "use_sonicmoe", "experts_implementation", "llama4_linearized_experts")
    },
    **{
        f"wandb_{name}": Rule(reason=TRACKER)
        for name in ("project", "entity", "name", "watch", "log_model", "run_id", "mode")
    },
    **{
        name: Rule(reason=TRACKER)
        for name in (
            "use_wandb",
            "trackio_project_name",
            "trackio_run_name",
            "trackio_space_id",
            "use_mlflow",
            "mlflow_tracking_uri",
            "mlflow_experiment_name",
            "use_swanlab",
            "use_otel_metrics",
        )
    },
}
ADAPTER = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_parameters": "target_parameters",
}
ATTENTION = {
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "sdpa": "sdpa",
    "eager": "eager",
    "flex_attention": "flex_attention",
}
DATASET = {  # keys of an entry of `datasets` that finetune has for each source
    "path": "name",
    "name": "subset",
    "split": "split",
    "revision": "revision",
}


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from an axolotl config."""
    _only_sft(state, where)
    model = state.take("base_model")
    state.set("model.name", model, "base_model", model)
    _datasets(state, state.take("datasets") or [], where)
    _validation(state, state.take("test_datasets"))
    _adapter(state)
    _attention(state)
    _template(state)
    common.batch_size(state, ("micro_batch_size", 1), ("gradient_accumulation_steps", 1), gpus)
    _schedule(state)
    for key in ("deepspeed", "fsdp", "fsdp_config"):
        if value := state.take(key):
            common.launch(state, key, value, gpus)
    for plugin in state.take("plugins", []):
        state.record(SAME, "plugins", plugin, KERNELS)
    if state.source.get("val_set_size") in (0, 0.0):
        state.record(SAME, "val_set_size", state.take("val_set_size"), "there is no validation set")
    _compile(state)
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state)
    state.finish()


def _only_sft(state: Translation, where: str) -> None:
    kind = state.take("rl") or next(
        (key for key in ("reward_model", "process_reward_model") if state.source.get(key)), ""
    )
    if kind:
        raise common.not_sft(TOOL, f"{kind} training", where)
    if state.source.get("pretraining_dataset"):
        raise common.not_sft(TOOL, "pretraining", where)
    if state.source.get("processor_type") or state.source.get("freeze_mm_modules"):
        raise common.not_sft(TOOL, "a model with images, audio or video", where)
    if state.source.get("num_labels") or state.source.get("diffusion"):
        raise common.not_sft(TOOL, "a model that is no causal language model", where)


def _datasets(state: Translation, entries: list[dict[str, Any]], where: str) -> None:
    sources, columns, roles = [], {}, {}
    for number, given in enumerate(entries):
        entry, key = dict(given), f"datasets.{number}"
        source = {
            ours: entry.pop(theirs) for theirs, ours in DATASET.items() if entry.get(theirs) is not None
        }
        files = entry.pop("data_files", None)
        if isinstance(files, (str, list)):
            files = [files] if isinstance(files, str) else files
            source["name"] = os.path.join(source.get("name", ""), files[0]) if len(files) == 1 else files
        sources.append(source)
        state.record(TRANSLATED, key, given.get("path"), f"data.name: {source.get('name')}")
        _format(state, entry, key, where)
        for theirs, ours in (("field_messages", "messages"), ("field", "text"), ("field_tools", "tools")):
            if value := entry.pop(theirs, None):
                columns |= {ours: value} if value != ours else {}
                state.record(TRANSLATED, f"{key}.{theirs}", value, f"data.columns: {{{ours}: {value}}}")
        mapped = entry.pop("message_property_mappings", None) or {}
        for theirs, name in (("message_field_role", "role"), ("message_field_content", "content")):
            mapped |= {name: value} if (value := entry.pop(theirs, None)) else {}
        if mapped:
            text = "finetune detects the sharegpt format (from, value)"
            state.record(SAME, f"{key}.message_property_mappings", mapped, text)
        for role, names in (entry.pop("roles", None) or {}).items():
            roles |= {name: role for name in names if name != role}
        for name, value in entry.items():
            state.unsupported(f"{key}.{name}", value, "finetune has no such setting for a source")
    plain = [source.pop("name") if set(source) == {"name"} else source for source in sources]
    state.recipe["data.name"] = plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain
    if len(sources) == 1 and isinstance(plain[0], dict):
        state.recipe |= {f"data.{name}": value for name, value in plain[0].items()}
    state.recipe |= {"data.columns": columns} if columns else {}
    state.recipe |= {"data.role_map": roles} if roles else {}


def _format(state: Translation, entry: dict[str, Any], key: str, where: str) -> None:
    kind = str(entry.pop("type", "") or "")
    base = kind.partition(":")[0].partition(".")[0]
    if base in ("bradley_terry", "stepwise_supervised") or "dpo" in base or "kto" in base:
        raise common.not_sft(TOOL, f"{kind} data", where)
    if base == "completion":
        state.recipe["data.train_on"] = "all"
        state.record(TRANSLATED, f"{key}.type", kind, "data.train_on: all, and plain text has no template")
    elif base in ("chat_template", "sharegpt"):
        state.record(TRANSLATED, f"{key}.type", kind, "finetune detects messages and sharegpt")
    elif base == "alpaca":
        state.record(TRANSLATED, f"{key}.type", kind, "finetune detects alpaca columns")
        text = "axolotl writes alpaca examples in its own prompt; finetune uses the chat template"
        state.record(DIFFERS, f"{key}.type", kind, f"{text} (`data.chat_template` takes a file)")
    elif kind:
        text = "finetune knows messages, prompt and completion, alpaca, sharegpt and text"
        state.unsupported(f"{key}.type", kind, f"{text}; convert the data or set `data.columns`")
    for name, default in (
        ("roles_to_train", ["assistant"]),
        ("train_on_eos", "turn"),
        ("train_on_eot", "turn"),
    ):
        value = entry.pop(name, None)
        if value not in (None, default):
            state.unsupported(f"{key}.{name}", value, "see `data.train_on` for the choices of finetune")


def _validation(state: Translation, tests: list[dict[str, Any]] | None) -> None:
    for number, entry in enumerate(tests or []):
        key, files = f"test_datasets.{number}", entry.get("data_files") or []
        path = os.path.join(entry.get("path", ""), *([files] if isinstance(files, str) else files[:1]))
        if number or entry.get("split") not in (None, "train"):
            state.unsupported(key, entry, "`data.validation` takes one file")
        else:
            state.set("data.validation", path, key, entry)


def _adapter(state: Translation) -> None:
    kind = state.take("adapter")
    given = [number for number in (4, 8) if f"load_in_{number}bit" in state.source]
    bits = {4: state.take("load_in_4bit", False), 8: state.take("load_in_8bit", False)}
    quantized = "nf4" if bits[4] or kind == "qlora" else "int8" if bits[8] else ""
    for number in given:
        kind, text = (TRANSLATED, quantized) if bits[number] else (SAME, "no quantization to this size")
        state.record(kind, f"load_in_{number}bit", bits[number], f"model.quantization: {text}")
    if kind is None:
        for name in [name for name in state.source if name.startswith(("lora_", "peft_", "gptq"))]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains")
        state.recipe["adapter.type"] = "full"
        state.record(TRANSLATED, "adapter", kind, "adapter.type: full")
        return
    state.record(TRANSLATED, "adapter", kind, f"adapter.type: {kind}")
    linear, modules = state.take("lora_target_linear", False), state.take("lora_target_modules")
    common.lora(state, ADAPTER, quantized)
    if linear:
        state.set("adapter.target_modules", "all-linear", "lora_target_linear", True)
    elif modules:
        state.set("adapter.target_modules", modules, "lora_target_modules", modules)
    if not quantized:
        common.keep_unquantized(state)


def _attention(state: Translation) -> None:
    named = state.take("attn_implementation")
    flags = [
        key
        for key in (
            "flash_attention",
            "xformers_attention",
            "sdp_attention",
            "flex_attention",
            "eager_attention",
        )
        if state.source.get(key) is not None
    ]
    for key in flags:
        state.record(
            SAME, key, state.source.pop(key), "`model.attention: auto` uses FlashAttention where it runs"
        )
    if named in ATTENTION:
        state.record(
            SAME,
            "attn_implementation",
            named,
            "`model.attention: auto` chooses the fastest kernel that runs here",
        )
    elif named:
        state.unsupported("attn_implementation", named, "`model.attention: auto` chooses a kernel")
    on = state.take("gradient_checkpointing", False)
    state.set("speed.activation_checkpointing", "full" if on else "none", "gradient_checkpointing", on)
    if on in ("offload", "offload_disk"):
        state.recipe["speed.offload"] = "activations"


def _compile(state: Translation) -> None:
    """Refuse the compile modes that exclude activation checkpointing, and compile in the default mode."""
    mode = str(state.source.get("torch_compile_mode"))
    if mode.startswith("max-autotune") and state.recipe["speed.activation_checkpointing"] == "full":
        state.source.pop("torch_compile_mode")
        text = "finetune excludes it with gradient_checkpointing; kept the default mode of torch.compile"
        state.unsupported("torch_compile_mode", mode, text)


def _template(state: Translation) -> None:
    name, jinja = state.take("chat_template"), state.take("chat_template_jinja")
    if jinja:
        state.unsupported(
            "chat_template_jinja", "(a template)", "save it to a file, and set `data.chat_template`"
        )
    elif name in common.TEMPLATES:
        state.record(
            TRANSLATED, "chat_template", name, f"data.chat_template: {common.TEMPLATES[name] or 'null'}"
        )
        state.recipe |= {"data.chat_template": common.TEMPLATES[name]} if common.TEMPLATES[name] else {}
    elif name:
        state.record(
            DIFFERS,
            "chat_template",
            name,
            "finetune uses the tokenizer's own template; check it with `finetune data`",
        )
    for token in state.take("eot_tokens", []):
        state.record(SAME, "eot_tokens", token, "finetune reads the tokens that end a turn from the template")
    kind = state.take("train_on_inputs", False)
    if kind:
        state.set("data.train_on", "all", "train_on_inputs", True)
    else:
        state.record(SAME, "train_on_inputs", False, "data.train_on: assistant")
    if tokens := state.take("tokens"):
        state.set("model.add_tokens", list(tokens), "tokens", tokens)


def _schedule(state: Translation) -> None:
    steps, ratio = state.take("warmup_steps"), state.take("warmup_ratio")
    if steps is not None or ratio is not None:
        key, value = ("warmup_steps", steps) if steps is not None else ("warmup_ratio", ratio)
        state.set("train.warmup_steps", value, key, value)
    if (top := state.take("max_steps")) is not None:
        state.set("train.max_steps", top, "max_steps", top)
        state.source.pop("num_epochs", None)
    if (low := state.take("cosine_min_lr_ratio")) is not None:
        state.recipe["train.lr_scheduler_kwargs"] = {"min_lr_rate": low}
        state.source["lr_scheduler"] = "cosine_with_min_lr"
        state.record(TRANSLATED, "cosine_min_lr_ratio", low, "train.lr_scheduler_type: cosine_with_min_lr")
    if saves := state.take("saves_per_epoch", 0):
        share = 1 / (saves * float(state.source.get("num_epochs") or 1.0))
        if share < 1:
            state.set("train.save_steps", round(share, 6), "saves_per_epoch", saves)
        else:
            state.set("train.save_strategy", "epoch", "saves_per_epoch", saves)
    if evaluations := state.take("evals_per_epoch", 0):
        text = "set `eval.eval_steps` to a number of steps; finetune evaluates at the end anyway"
        state.unsupported("evals_per_epoch", evaluations, text)
    for key in ("eval_strategy", "evaluation_strategy"):
        if (value := state.take(key)) is not None:
            state.record(SAME, key, value, "`eval.eval_steps` sets evaluations during training")
    if (value := state.take("eval_steps")) is not None:
        state.set("eval.eval_steps", int(value), "eval_steps", value)
    if "eval.eval_steps" not in state.recipe and (patience := state.take("early_stopping_patience")):
        state.unsupported("early_stopping_patience", patience, "set `eval.eval_steps` too")
    tokens = state.source.get("special_tokens") or {}
    if set(tokens) == {"pad_token"}:
        text = "padding does not contribute to the loss"
        state.record(SAME, "special_tokens", state.take("special_tokens"), text)


def _defaults(state: Translation) -> None:
    state.keep_default("data.max_length", 512, 1024)
    if "train.max_steps" not in state.recipe:
        state.keep_default("train.num_train_epochs", 1.0, 3)
    state.keep_default("train.lr_scheduler_type", "cosine", "linear")
    state.keep_default("train.optim", "adamw_torch_fused", "adamw_torch_fused")
    state.keep_default("train.warmup_steps", 0.03, 0, "axolotl warms up for 3% of the steps, at most 100")
    state.keep_default("data.train_on", "assistant", "assistant", "both train on the answers only")
