"""Translate an axolotl config. Source: axolotl's schema, src/axolotl/utils/schemas (July 2026)."""

from __future__ import annotations

import os
import re
from typing import Any

from finetune.data.messages import REASONING_KEYS
from finetune.importers import common
from finetune.importers.common import NO_EFFECT
from finetune.importers.translation import DIFFERS, NOT_SUPPORTED, SAME, TRANSLATED, Rule, Translation, number

TOOL = "axolotl"
KERNELS = "finetune chooses its own fused kernels (`speed.fused: auto`)"
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
    "torchdistx_path",
    "gc_steps",
    "gc_collect_steps",
    "torch_empty_cache_steps",
    "num_dataset_shards_to_save",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp",
    "lora_on_cpu",
    "is_preprocess",
    "axolotl_config_path",
    "dispatch_batches",
    "sample_packing_mp_start_method",
    "qlora_sharded_model_loading",
)
SCHEDULER = "finetune has the schedulers of transformers"
ANOTHER_OPTIMIZER = "finetune has no such optimizer"
RULES = {
    **dict.fromkeys(WITHOUT_EFFECT, Rule(same=NO_EFFECT)),
    "sequence_len": Rule("data.max_length", int),
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
    "batch_flattening": Rule("data.padding_free", bool),
    "shuffle_merged_datasets": Rule(same="both shuffle the examples of all sources in each epoch"),
    "shuffle_before_merging_datasets": Rule(same="both shuffle the examples of all sources in each epoch"),
    "revision_of_model": Rule("model.revision"),
    "neftune_noise_alpha": Rule("train.neftune_noise_alpha"),
    "early_stopping_patience": Rule("eval.early_stopping_patience"),
    "noisy_embedding_alpha": Rule("train.neftune_noise_alpha"),
    "num_generation_samples": Rule("eval.samples"),
    "generation_max_new_tokens": Rule("eval.max_new_tokens"),
    "generate_samples": Rule(same="finetune always generates answers to the validation set"),
    "generation_*": Rule(reason="finetune generates greedy answers"),
    **{name: Rule(reason=SCHEDULER) for name in ("cosine_constant_lr_ratio", "lr_quadratic_warmup")},
    **{name: Rule(reason=SCHEDULER) for name in ("lr_div_factor", "jagged_restart_*")},
    **{
        name: Rule(reason="all trainable weights have one learning rate, except in LoRA+")
        for name in ("embedding_lr", "embedding_lr_scale", "lr_groups")
    },
    "loraplus_lr_embedding": Rule(reason="LoRA+ has one ratio for all layers in finetune"),
    **{name: Rule(reason=ANOTHER_OPTIMIZER) for name in ("adam_beta3", "adam_epsilon2", "dion_*")},
    "qgalore_*": Rule(reason=ANOTHER_OPTIMIZER),
    "optim_target_modules": Rule(
        "train.optim_target_modules", lambda names: "all-linear" if names == "all_linear" else names
    ),
    "optim_args": Rule(
        "train.optim_args",
        lambda given: ",".join(f"{k}={v}" for k, v in given.items()) if isinstance(given, dict) else given,
    ),
    "eta_min": Rule(same="axolotl does not read this key either; its key is cosine_min_lr_ratio"),
    **{name: Rule(reason="finetune has no expert parallelism") for name in ("expert_parallel*",)},
    **{
        name: Rule(reason="finetune has no NVFP4 weights of experts")
        for name in ("nvfp4_*", "dsv4_fp4_grouped_mode")
    },
    **{name: Rule(same=KERNELS) for name in ("use_dsv4_kernels", "use_glm_dsa_kernels")},
    "gemma4_hybrid_attn_impl": Rule(same="`model.attention: auto` chooses a kernel that the model supports"),
    "gptq_*": Rule(same="finetune reads the quantization of the checkpoint"),
    "llmcompressor": Rule(
        reason="finetune has no sparse training; see `finetune export --to compressed-tensors`"
    ),
    "hub_strategy": Rule(same="finetune uploads after the run, with `finetune publish`"),
    "hub_revision": Rule("publish.revision"),
    "accelerator_config": Rule(reason="pass an accelerate config to `finetune train --accelerate`"),
    **{
        name: Rule(reason="finetune does not extend the context")
        for name in ("use_pose", "pose_*", "s2_attention", "scaling_softmax*")
    },
    "rope_scaling": Rule(reason="set rope_scaling in the model's config.json"),
    "added_tokens_overrides": Rule(reason="save another tokenizer into the model's folder"),
    "fix_untrained_tokens": Rule(reason="finetune does not change the rows of tokens that never trained"),
    "shrink_embeddings": Rule(reason="finetune keeps all rows of the embeddings"),
    "reinit_weights": Rule(reason="finetune starts from the weights of the base model"),
    "embeddings_skip_upcast": Rule(same="frozen embeddings keep the precision of the base model"),
    "fp32_norm*": Rule(reason="norms have the precision of the base model"),
    "float32": Rule(same=common.LAUNCH),
    "selective_checkpointing": Rule(reason="see `speed.activation_checkpointing` for what finetune keeps"),
    "layer_offloading": Rule(reason="see `speed.offload` for what finetune moves to the CPU"),
    "peft": Rule(reason="finetune does not initialize with LoftQ; see `adapter.init_lora_weights`"),
    "gptq": Rule(same="finetune reads the quantization of the checkpoint"),
    "quantization": Rule(reason="use `finetune merge --quantize` or `finetune export`"),
    "deepcompile": Rule(reason="finetune compiles with torch.compile; see `speed.compile`"),
    "dynamic_checkpoint": Rule(reason="SIGTERM saves a checkpoint and stops the run"),
    "use_onebitllms": Rule(reason="finetune has no 1.58-bit training"),
    **{name: Rule(reason="set `eval.tasks`") for name in ("do_bench_eval", "bench_*")},
    **{name: Rule(reason="see scripts/slurm and scripts/skypilot") for name in ("use_ray", "ray_*")},
    "resources_per_worker": Rule(reason="see scripts/slurm and scripts/skypilot"),
    **{name: Rule(same="it belongs to pretraining") for name in ("pretraining_*", "pretrain_*")},
    **{name: Rule(same="it belongs to inference") for name in ("gradio_*",)},
    **{name: Rule(same="it belongs to `rl`") for name in ("dpo_*", "kto_*", "trl", "vllm", "ebft")},
    **{
        name: Rule(same="it belongs to `rl`")
        for name in (
            "orpo_alpha",
            "simpo_gamma",
            "cpo_alpha",
            "rl_beta",
            "rpo_alpha",
            "max_prompt_len",
            "precompute_ref_log_probs",
            "center_rewards_coefficient",
        )
    },
    "loss_watchdog_threshold": Rule(
        reason="`train.stop_at_spike` stops a run whose loss rises by a factor, not above a limit"
    ),
    "loss_watchdog_patience": Rule(reason="see loss_watchdog_threshold"),
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
    "sample_packing": Rule("data.packing", bool),
    "curriculum_sampling": Rule("train.train_sampling_strategy", lambda on: "sequential" if on else "random"),
    "tf32": Rule("train.tf32", bool),
    "bfloat16": Rule(same=common.LAUNCH),
    "float16": Rule(reason="use an accelerate config with `mixed_precision: fp16`"),
    "fp8": Rule(reason="use `finetune train --accelerate 8xh100_fp8`, or `model.quantization: fp8`"),
    "fp8_enable_fsdp_float8_all_gather": Rule(same="it belongs to fp8"),
    "torch_compile": Rule("speed.compile", lambda value: "auto" if value == "auto" else bool(value)),
    "torch_compile_mode": Rule("speed.compile"),
    "torch_compile_backend": Rule(reason="finetune compiles with inductor", off=(None, "inductor")),
    "torch_compile_options": Rule(reason="`speed.compile` takes a mode of torch.compile"),
    "activation_offloading": Rule("speed.offload", lambda on: "activations" if on else "none"),
    "hf_use_auth_token": Rule(same="set HF_TOKEN in the environment"),
    "model_type": Rule(same="transformers chooses the class by config.json"),
    "tokenizer_type": Rule(same="transformers chooses the class by tokenizer_config.json"),
    "tokenizer_use_fast": Rule(same="finetune always uses the fast tokenizer"),
    "tokenizer_use_mistral_common": Rule(reason="finetune uses the tokenizer of transformers"),
    "tokenizer_config": Rule(reason="save the tokenizer into the model's folder"),
    "tokenizer_save_jinja_files": Rule(same=NO_EFFECT),
    "chat_template_kwargs": Rule(reason="write the values into a Jinja file for `data.chat_template`"),
    **{
        name: Rule(reason="finetune loads the model with the settings of its config.json")
        for name in ("model_kwargs", "overrides_of_model_kwargs", "cls_model_config")
    },
    "base_model_config": Rule(reason="finetune reads the config of the base model"),
    "mean_resizing_embeddings": Rule(reason="finetune's new rows are the mean of all rows"),
    "relora*": Rule(reason="finetune does not restart an adapter during training"),
    "lisa_*": Rule(reason="finetune trains the same layers in each step"),
    **{name: Rule(reason="finetune has the cross-entropy loss") for name in ("use_eaft", "eaft_*")},
    "trainer_cls": Rule(reason="finetune has one Trainer"),
    "gpu_memory_limit": Rule(reason="finetune places the whole model on the GPU of each process"),
    "max_memory": Rule(reason="finetune places the whole model on the GPU of each process"),
    "streaming": Rule("data.streaming"),
    "streaming_multipack_buffer_size": Rule("data.shuffle_buffer"),
    "device_map": Rule(same="finetune places the model on the GPU of each process"),
    "low_cpu_mem_usage": Rule(same=common.ALWAYS),
    "base_model_ignore_patterns": Rule(same="finetune reads only the files that the index names"),
    "strict": Rule(same="finetune always refuses weights that do not fit the model"),
    "debug": Rule(same="use `finetune train --debug`"),
    "eval_table_size": Rule("eval.samples"),
    "eval_max_new_tokens": Rule("eval.max_new_tokens"),
    "eval_causal_lm_metrics": Rule(reason="finetune reports loss, exact match and the tasks of `eval.tasks`"),
    "do_causal_lm_eval": Rule(same="finetune always generates answers to the validation set"),
    "save_first_step": Rule(reason="use `train.save_steps`"),
    "auto_resume_from_checkpoints": Rule(same="use `finetune train --resume=auto`"),
    "include_tokens_per_second": Rule(same=common.ALWAYS),
    "include_tkps": Rule(same=common.ALWAYS),
    "profiler_*": Rule(reason="use `finetune profile RECIPE`"),
    "resize_token_embeddings_to_32x": Rule(same="finetune adds only the rows of new tokens"),
    "lora_fan_in_fan_out": Rule(same="finetune sets it for Conv1D layers"),
    "lora_modules_to_save": Rule("adapter.modules_to_save"),
    "lora_model_dir": Rule("adapter.init_from"),
    "model_quantization_config": Rule(same="finetune reads the quantization of the checkpoint"),
    "model_quantization_config_kwargs": Rule(
        reason="finetune reads the quantization of the checkpoint as it is", off=(None, {})
    ),
    "quantize_moe_experts": Rule(same="finetune quantizes the experts of a 4-bit or 8-bit base model too"),
    "lora_rank_pattern": Rule("adapter.rank_pattern"),
    "lora_alpha_pattern": Rule("adapter.alpha_pattern"),
    "lora_exclude_modules": Rule("adapter.exclude_modules"),
    "loraplus_lr_ratio": Rule("adapter.loraplus_lr_ratio"),
    "peft_layers_to_transform": Rule("adapter.layers_to_transform"),
    "peft_layers_pattern": Rule("adapter.layers_pattern"),
    "peft_init_lora_weights": Rule("adapter.init_lora_weights"),
    "peft_trainable_token_indices": Rule("adapter.trainable_token_indices"),
    "peft_ensure_weight_tying": Rule("adapter.ensure_weight_tying"),
    "peft_layer_replication": Rule(reason="finetune does not copy layers"),
    "peft_autocast_adapter_dtype": Rule(same="trainable weights are in fp32"),
    "merge_method": Rule(same="it belongs to merging"),
    "merge_lora": Rule(same="use `finetune merge`"),
    "unfrozen_parameters": Rule(reason="finetune trains all weights (`full`) or an adapter"),
    "tensor_parallel_size": Rule(reason="finetune trains with data parallelism and FSDP2", off=(None, 1)),
    **{
        name: Rule(reason="see accelerate_configs/context_parallel_4.yaml")
        for name in ("heads_k_stride", "ring_attn_func")
    },
    "context_parallel_size": Rule(reason="see accelerate_configs/context_parallel_4.yaml", off=(None, 1)),
    "sequence_parallel_degree": Rule(reason="see accelerate_configs/context_parallel_4.yaml", off=(None, 1)),
    "dp_shard_size": Rule(same="the accelerate config sets it"),
    "dp_replicate_size": Rule(reason="the accelerate config sets it", off=(None, 1)),
    "fsdp_version": Rule(same="finetune uses FSDP2, which computes the same as FSDP1"),
    "fsdp_final_state_dict_type": Rule(same="finetune saves one full adapter or model"),
    "save_strategy": Rule("train.save_strategy", lambda value: "auto" if value == "best" else value),
    "max_packed_sequence_len": Rule(reason="set `data.packing` and `data.max_length`"),
    "min_sample_len": Rule(reason="remove short examples from the data"),
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
            "chunked_cross_entropy_num_chunks",
            "tiled_mlp_*",
            "sdpa_varlen",
            "flash_optimum",
            "large_head_attention",
        )
    },
    **{
        name: Rule(same="finetune chooses the kernel of experts by itself")
        for name in ("use_scattermoe", "use_sonicmoe", "experts_implementation", "llama4_linearized_experts")
    },
    **{name: Rule(reason="finetune has no OpenTelemetry metrics") for name in ("use_otel_metrics", "otel_*")},
    "hf_mlflow_log_artifacts": Rule(reason="set the environment variable HF_MLFLOW_LOG_ARTIFACTS"),
}
TRACKERS = {  # axolotl's name -> the name in `train.report_to`, and the key that switches the tracker on
    "wandb": ("wandb", "wandb_project"),
    "mlflow": ("mlflow", "mlflow_experiment_name"),
    "comet": ("comet_ml", "comet_project_name"),
    "trackio": ("trackio", "trackio_project_name"),
    "swanlab": ("swanlab", "swanlab_project"),
    "tensorboard": ("tensorboard", ""),
}
TRACKER_KEYS = {
    "wandb_name": "train.run_name",
    "mlflow_run_name": "train.run_name",
    "trackio_run_name": "train.run_name",
    "trackio_project_name": "train.project",
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
READERS = ("json", "csv", "parquet", "arrow", "text")
TEMPLATES = {  # axolotl's templates that render what a bundled template renders
    "chatml": "chatml",
    "nemotron_h": "chatml",
    "llama3": "llama3",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "gemma3n": "gemma3",
    "qwen_25": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "cohere": "cohere",
    "aya": "cohere",
    "deepseek_v3": "deepseekv3",
}
ROLES = {"human": "user", "gpt": "assistant"}
END_OF_TURN = (
    "axolotl trains on the end of a turn only if it is the EOS token or one of eot_tokens; finetune always "
    "does, so that the model learns to stop"
)
OWN_TYPE = {  # keys of a type that the config describes -> finetune's column
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
}
COLUMNS = (("field_messages", "messages"), ("field", "text"), ("field_tools", "tools"))
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
DATASET = {  # keys of an entry of `datasets` that finetune has for each source
    "path": "name",
    "name": "subset",
    "split": "split",
    "revision": "revision",
}


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from an axolotl config."""
    _only_sft(state, where)
    state.move("base_model", "model.name")
    entries = state.take("datasets") or []
    _datasets(state, entries, where)
    types = [str(entry.get("type")).partition(":")[0].partition(".")[0] for entry in entries]
    _too_long(state, types)
    _validation(state, state.take("test_datasets"))
    _adapter(state)
    _attention(state)
    _template(state)
    _batch_size(state, gpus)
    common.batch_size(state, ("micro_batch_size", 1), ("gradient_accumulation_steps", 1), gpus)
    _qat(state)
    common.launch(state, gpus)
    _schedule(state)
    _evaluations(state)
    for plugin in state.take("plugins", []):
        if any(word in plugin.lower() for word in ("liger", "cut_cross_entropy", "kernels")):
            state.record(SAME, "plugins", plugin, KERNELS)
        else:
            state.unsupported("plugins", plugin, "finetune runs no plugins of axolotl")
    _compile(state)
    _model_config(state)
    _special_tokens(state)
    _trackers(state)
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state, gpus, is_chat=bool({"chat_template", "sharegpt"} & set(types)))
    state.finish()


def _only_sft(state: Translation, where: str) -> None:
    kind = state.take("rl") or next(
        (key for key in ("reward_model", "process_reward_model") if state.source.get(key)), ""
    )
    if kind:
        raise common.not_sft(TOOL, f"{kind} training", where)
    if state.source.get("pretraining_dataset"):
        raise common.not_sft(
            TOOL,
            "pretraining",
            where,
            "write the files under `datasets` with `type: completion`, and import that",
        )
    if state.source.get("processor_type") or state.source.get("freeze_mm_modules"):
        raise common.not_sft(TOOL, "a model with images, audio or video", where)
    if state.source.get("num_labels") or state.source.get("diffusion"):
        raise common.not_sft(TOOL, "a model that is no causal language model", where)


def _datasets(state: Translation, entries: list[dict[str, Any]], where: str) -> None:
    sources, columns, roles = [], {}, {}
    for place, given in enumerate(entries):
        entry, key = dict(given), f"datasets.{place}"
        sources += _sources_of(state, entry, key)
        if isinstance(entry.get("type"), dict):
            _own_type(state, entry.pop("type"), columns, key)
        _format(state, entry, key, where)
        _trained(state, entry, _role_map(entry.get("roles") or {}) or ROLES, key)
        if kind := entry.pop("ds_type", None):
            state.record(SAME, f"{key}.ds_type", kind, "finetune detects the type of a file")
        if template := entry.pop("chat_template", None):
            if state.source.setdefault("chat_template", template) != template:
                state.unsupported(
                    f"{key}.chat_template", template, "finetune has one template for all sources"
                )
            else:
                state.record(TRANSLATED, f"{key}.chat_template", template, "see chat_template")
        if jinja := entry.pop("chat_template_jinja", None):
            state.source.setdefault("chat_template_jinja", jinja)
            state.record(TRANSLATED, f"{key}.chat_template_jinja", "(a template)", "see chat_template_jinja")
        _columns(state, entry, columns, key)
        mapped = dict(entry.pop("message_property_mappings", None) or {})
        for theirs, name in (("message_field_role", "role"), ("message_field_content", "content")):
            mapped |= {name: value} if (value := entry.pop(theirs, None)) else {}
        if mapped:
            _message_keys(state, mapped, f"{key}.message_property_mappings")
        if given_roles := entry.pop("roles", None):
            roles |= {name: role for name, role in _role_map(given_roles).items() if name != role}
            state.record(TRANSLATED, f"{key}.roles", given_roles, f"data.role_map: {roles}")
        _thinking(state, entry, key)
        for name, value in entry.items():
            state.unsupported(f"{key}.{name}", value, "finetune has no such setting for a source")
    plain = [source.pop("name") if set(source) == {"name"} else source for source in sources]
    state.recipe["data.name"] = plain[0] if len(plain) == 1 and isinstance(plain[0], str) else plain
    if len(sources) == 1 and isinstance(plain[0], dict):
        state.recipe |= {f"data.{name}": value for name, value in plain[0].items()}
    common.other_columns(state, [_renamed(entry) for entry in entries])
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    state.recipe |= {"data.columns": columns} if columns else {}
    state.recipe |= {"data.role_map": roles} if roles else {}


def _sources_of(state: Translation, entry: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Take the path, the files and the split from an entry of `datasets`."""
    source = {ours: entry.pop(theirs) for theirs, ours in DATASET.items() if entry.get(theirs) is not None}
    path = source.get("name", "")
    named = entry.pop("data_files", None)
    files = _files(path, named)
    if named:
        state.record(TRANSLATED, f"{key}.data_files", named, f"data.name: {', '.join(map(str, files))}")
    state.record(TRANSLATED, key, path, f"data.name: {', '.join(map(str, files)) or path}")
    names = files or [path]
    split = source.get("split")
    if split is not None and all(str(name).endswith(FILES) for name in names):
        del source["split"]
        listed = SAME if split == "train" else NOT_SUPPORTED
        state.record(listed, f"{key}.split", split, "finetune reads the whole file")
    for theirs, ours in DATASET.items():
        if theirs != "path" and ours in source:
            state.record(TRANSLATED, f"{key}.{theirs}", source[ours], f"{ours} of the source in data.name")
    return [{**source, "name": name} for name in names]


def _renamed(entry: dict[str, Any]) -> dict[str, str]:
    """Return finetune's column -> the column of a source."""
    own = entry["type"] if isinstance(entry.get("type"), dict) else {}
    found = {ours: own[theirs] for theirs, ours in OWN_TYPE.items() if own.get(theirs)}
    found |= {ours: entry[theirs] for theirs, ours in COLUMNS if entry.get(theirs)}
    return {ours: theirs for ours, theirs in found.items() if (ours, theirs) != ("messages", "conversations")}


def _columns(state: Translation, entry: dict[str, Any], columns: dict[str, str], key: str) -> None:
    """Translate the names of the columns of a source."""
    for theirs, ours in COLUMNS:
        value = entry.pop(theirs, None)
        if ours == "messages" and value == "conversations":
            state.record(SAME, f"{key}.{theirs}", value, "finetune detects the column conversations")
        elif value is None and ours == "messages" and columns.setdefault(ours, ours) != ours:
            common.column(state, columns, ours, ours, f"{key}.{theirs}")  # axolotl's default
        elif value is not None:
            common.column(state, columns, ours, value, f"{key}.{theirs}")


def _message_keys(state: Translation, mapped: dict[str, str], key: str) -> None:
    """Record the names of the keys of a message."""
    known = {"role": ("role", "from"), "content": ("content", "value")}
    text = "finetune reads role or from, and content or value"
    if all(theirs in known.get(ours, (ours,)) for ours, theirs in mapped.items()):
        state.record(SAME, key, mapped, text)
    else:
        state.unsupported(key, mapped, f"{text}; rename the keys in the data")


def _thinking(state: Translation, entry: dict[str, Any], key: str) -> None:
    """Record the key of a message that has its reasoning, and the key that the chat template reads."""
    given = {name: entry.pop(name) for name in ("field_thinking", "template_thinking_key") if entry.get(name)}
    theirs, read = (
        given.get(name, REASONING_KEYS[0]) for name in ("field_thinking", "template_thinking_key")
    )
    for name, value in given.items():
        if theirs == read and theirs in REASONING_KEYS:
            state.record(SAME, f"{key}.{name}", value, "finetune passes this key to the chat template too")
        else:
            state.unsupported(
                f"{key}.{name}",
                value,
                f"rename {theirs} in the messages to {read}, the key that the chat template reads",
            )


def _format(state: Translation, entry: dict[str, Any], key: str, where: str) -> None:
    kind = str(entry.pop("type", "") or "")
    base = kind.partition(":")[0].partition(".")[0]
    if base in ("bradley_terry", "stepwise_supervised") or "dpo" in base or "kto" in base:
        raise common.not_sft(TOOL, f"{kind} data", where)
    if base == "completion":
        state.record(
            SAME, f"{key}.type", kind, "finetune trains on all tokens of plain text, without a template"
        )
    elif base in ("chat_template", "sharegpt"):
        state.record(TRANSLATED, f"{key}.type", kind, "finetune detects messages and sharegpt")
    elif base == "alpaca":
        text = "axolotl writes alpaca columns in its own prompt; finetune uses the chat template"
        state.record(DIFFERS, f"{key}.type", kind, f"{text} (`data.chat_template` takes a file)")
    elif kind:
        text = "finetune knows messages, prompt and completion, alpaca, sharegpt and text"
        state.unsupported(f"{key}.type", kind, f"{text}; convert the data or set `data.columns`")


def _role_map(given: dict[str, str | list[str]]) -> dict[str, str]:
    """Return the role of each name of the data."""
    lists = {role: [names] if isinstance(names, str) else names for role, names in given.items()}
    return {name: role for role, names in lists.items() for name in names}


def _own_type(state: Translation, own: dict[str, Any], columns: dict[str, str], key: str) -> None:
    """Translate a type that the config describes: its columns, but not its formats."""
    for name, value in own.items():
        if name in OWN_TYPE:
            common.column(state, columns, OWN_TYPE[name], value, f"{key}.type.{name}")
        elif value is not None:
            state.unsupported(
                f"{key}.type.{name}",
                value,
                "finetune uses the chat template, which takes a file (`data.chat_template`)",
            )


def _trained(state: Translation, entry: dict[str, Any], roles: dict[str, str], key: str) -> None:
    """Record which turns and which ends of turns of a source train."""
    if (given := entry.pop("roles_to_train", None)) is not None:
        _default_or_not(
            state,
            f"{key}.roles_to_train",
            given,
            is_default={roles.get(role, role) for role in given} == {"assistant"},
        )
    for name in ("train_on_eos", "train_on_eot"):
        if (value := entry.pop(name, None)) is not None:
            _default_or_not(state, f"{key}.{name}", value, is_default=value == "turn")


def _default_or_not(state: Translation, key: str, value: object, *, is_default: bool) -> None:
    if is_default:
        state.record(SAME, key, value, "data.train_on: assistant")
    else:
        state.unsupported(key, value, "see `data.train_on` for the choices of finetune")


def _validation(state: Translation, tests: list[dict[str, Any]] | None) -> None:
    """Translate the validation set: files, or a share of the data."""
    for place, entry in enumerate(tests or []):
        key, path = f"test_datasets.{place}", entry.get("path", "")
        files = _files(path, entry.get("data_files")) or [path]
        if place or len(files) > 1 or entry.get("name") or entry.get("split") not in (None, "train"):
            state.unsupported(key, entry, "`data.validation` takes one file or folder")
        else:
            state.set("data.validation", files[0], key, entry)
    size = float(state.take("val_set_size") or 0)
    given = state.given.get("val_set_size")
    if not size:
        text = "it is off" if "data.validation" in state.recipe else "there is no validation set"
        state.record(SAME, "val_set_size", given, text)
    elif size >= 1:
        state.unsupported(
            "val_set_size",
            given,
            "it counts examples; set `data.validation_fraction` to their share of the data",
        )
    else:
        state.set("data.validation_fraction", size, "val_set_size", given)


def _files(path: str, files: str | list[str] | None) -> list[str]:
    """Return the paths of `data_files`. The path of a source can be the name of a reader, such as json."""
    names = [files] if isinstance(files, str) else files or []
    return list(names) if path in READERS else [os.path.join(path, name) for name in names]


def _too_long(state: Translation, types: list[str]) -> None:
    value = state.take("excess_length_strategy", "drop")
    if set(types) == {"completion"}:
        state.recipe["data.too_long"] = "split"
        state.record(
            TRANSLATED,
            "excess_length_strategy",
            value,
            "axolotl cuts a longer text into pieces, whatever its value; data.too_long: split",
        )
        return
    if "completion" in types:
        state.unsupported(
            "data.too_long",
            "split",
            "axolotl cuts a longer text into pieces; finetune does so only if all sources are plain text",
        )
    if value == "truncate":
        state.recipe["data.too_long"] = "truncate_prompt"
        state.unsupported(
            "excess_length_strategy",
            value,
            "axolotl cuts the end of a longer example; finetune never cuts an answer; kept truncate_prompt",
        )
    else:
        kept = "error" if value == "raise" else "drop"
        kind = TRANSLATED if "excess_length_strategy" in state.given else SAME
        state.recipe["data.too_long"] = kept
        state.record(kind, "excess_length_strategy", value, f"data.too_long: {kept}")


# Names of linear layers that `all-linear` has; other names may be of the embeddings or the head
_LINEAR = re.compile(r"([\w.]*_)?(proj|dense|query|key|value|query_key_value|fc\d?|c_attn|w[123])")


def _adapter(state: Translation) -> None:
    kind = state.take("adapter")
    given = [number for number in (4, 8) if f"load_in_{number}bit" in state.source]
    bits = {4: state.take("load_in_4bit", False), 8: state.take("load_in_8bit", False)}
    kwargs = dict(state.take("bnb_config_kwargs") or {})
    four = "fp4" if kwargs.get("bnb_4bit_quant_type") == "fp4" else "nf4"
    quantized = four if bits[4] or kind == "qlora" else "int8" if bits[8] else ""
    if kind is None:
        for name in [name for name in state.source if name.startswith(("lora_", "peft", "gptq", "loraplus"))]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains")
        state.recipe["adapter.type"] = "full"
        state.record(TRANSLATED, "adapter", kind, "adapter.type: full")
        for number in given:
            state.record(
                NOT_SUPPORTED if bits[number] else SAME,
                f"load_in_{number}bit",
                bits[number],
                "no adapter trains, and finetune trains all weights in full precision",
            )
        return
    for number in given:
        listed, text = (TRANSLATED, quantized) if bits[number] else (SAME, "no quantization to this size")
        state.record(listed, f"load_in_{number}bit", bits[number], f"model.quantization: {text}")
    linear, modules = state.take("lora_target_linear", False), state.take("lora_target_modules")
    common.lora(state, ADAPTER, quantized)
    if kind in ("lora", "qlora"):
        state.record(TRANSLATED, "adapter", kind, f"adapter.type: {state.recipe['adapter.type']}")
    else:
        state.unsupported("adapter", kind, f"set `adapter.type`; kept {state.recipe['adapter.type']}")
    for key, kept in (("r", 16), ("lora_alpha", 32)):
        if f"adapter.{key}" not in state.recipe:
            name = "lora_r" if key == "r" else key
            state.keep_default(f"adapter.{key}", kept, kept, f"axolotl needs {name}; kept finetune's default")
    if linear:
        state.set("adapter.target_modules", "all-linear", "lora_target_linear", True)
    if modules and linear:
        names = modules if isinstance(modules, list) else [modules]
        more = [str(name) for name in names if not _LINEAR.fullmatch(str(name))]
        if more:
            why = f"all-linear leaves out {', '.join(more)}: name all modules in adapter.target_modules"
            state.unsupported("lora_target_modules", modules, why)
        else:
            state.record(SAME, "lora_target_modules", modules, "lora_target_linear has them too")
    elif modules:
        state.set("adapter.target_modules", modules, "lora_target_modules", modules)
    elif not linear:
        state.record(
            DIFFERS,
            "adapter.target_modules",
            None,
            "axolotl needs lora_target_linear or lora_target_modules; kept all-linear",
        )
    plain = {"bnb_4bit_quant_type": four, "bnb_4bit_use_double_quant": True}
    for name, value in kwargs.items():
        listed, text = SAME, f"finetune quantizes in {four} with double quantization"
        listed = listed if plain.get(name) == value else NOT_SUPPORTED
        state.record(listed, f"bnb_config_kwargs.{name}", value, text)
    if not quantized:
        common.keep_unquantized(state)


def _attention(state: Translation) -> None:
    named = state.take("attn_implementation")
    for kind in ("flash", "xformers", "sdp", "flex", "eager"):
        state.same(f"{kind}_attention", "`model.attention: auto` uses FlashAttention where it runs")
    if named in ATTENTION:
        state.record(SAME, "attn_implementation", named, common.KERNEL)
    elif named:
        state.unsupported("attn_implementation", named, "`model.attention: auto` chooses a kernel")
    on = state.take("gradient_checkpointing", False)
    config = state.source.get("fsdp_config")
    names = ("activation_checkpointing", "fsdp_activation_checkpointing")
    if not on and isinstance(config, dict):
        on = any(config.get(name) for name in names)
    state.set("speed.activation_checkpointing", "full" if on else "none", "gradient_checkpointing", on)
    if on in ("offload", "offload_disk"):
        state.set("speed.offload", "activations", "gradient_checkpointing", on)


def _qat(state: Translation) -> None:
    """Translate quantization-aware training, which finetune has for integer weights."""
    if not (given := state.take("qat")):
        return
    configs = {"int8": "Int8DynamicActivationIntxWeightConfig", None: "IntxWeightOnlyConfig"}
    weights, activations = given.get("weight_dtype", "int8"), given.get("activation_dtype")
    odd = {
        name: given[name] for name in ("quantize_embedding", "fake_quant_after_n_steps") if given.get(name)
    }
    if weights not in ("int4", "int8") or activations not in configs:
        text = "finetune trains for int4 and int8 weights, with int8 activations or unquantized ones"
        state.unsupported("qat", given, f"{text}; see `speed.qat`")
        return
    values = {"config": configs[activations], "weight_dtype": weights}
    state.set("speed.qat", values | {"group_size": given.get("group_size", 32)}, "qat", given)
    for name, value in odd.items():
        state.unsupported(f"qat.{name}", value, "finetune rounds the adapted layers from the first step on")


def _model_config(state: Translation) -> None:
    """Translate `model_config`, which changes the base model's config.json."""
    for key in ("model_config", "overrides_of_model_config"):
        values = dict(state.take(key) or {})
        if (logits := values.pop("output_router_logits", None)) is True:
            state.record(
                SAME,
                f"{key}.output_router_logits",
                logits,
                "finetune adds the router's loss if the model's config has a coefficient",
            )
        elif logits is False:
            state.set("train.router_aux_loss_coef", 0.0, f"{key}.output_router_logits", logits)
        if (share := values.pop("router_aux_loss_coef", None)) is not None:
            state.set("train.router_aux_loss_coef", share, f"{key}.router_aux_loss_coef", share)
        for name, value in values.items():
            state.unsupported(f"{key}.{name}", value, "change the model's config.json")


def _trackers(state: Translation) -> None:
    """Translate the trackers. axolotl uses a tracker if the name of its project is set."""
    names = []
    for tracker, (name, switch) in TRACKERS.items():
        asked = state.take(f"use_{tracker}")
        if on := bool(asked or state.source.get(switch)):
            names.append(name)
            state.record(TRANSLATED, f"use_{tracker}", asked, f"train.report_to: {name}")
        elif asked is not None:
            state.record(SAME, f"use_{tracker}", asked, "it is off")
        for key in [key for key in state.source if key.startswith(f"{tracker}_")]:
            value = state.take(key)
            if not on or value in (None, "", False):
                state.record(SAME, key, value, f"{name} is off" if value else "it is not set")
            elif key in TRACKER_KEYS:
                state.set(TRACKER_KEYS[key], value, key, value)
            else:
                state.unsupported(key, value, f"set the environment variable {key.upper()}")
    if names:
        state.recipe["train.report_to"] = names[0] if len(names) == 1 else names


def _compile(state: Translation) -> None:
    """Refuse the compile modes that exclude activation checkpointing, and compile in the default mode."""
    mode = str(state.source.get("torch_compile_mode"))
    if mode.startswith("max-autotune") and state.recipe["speed.activation_checkpointing"] == "full":
        state.source.pop("torch_compile_mode")
        state.unsupported(
            "torch_compile_mode",
            mode,
            "finetune excludes it with gradient_checkpointing; kept the default mode of torch.compile",
        )


def _template(state: Translation) -> None:
    name, jinja = state.take("chat_template"), state.take("chat_template_jinja")
    if jinja:
        if "{" in jinja:
            state.unsupported(
                "chat_template_jinja", "(a template)", "save it to a file, and set `data.chat_template`"
            )
        else:
            state.set("data.chat_template", jinja, "chat_template_jinja", jinja)
        if name:
            state.record(SAME, "chat_template", name, "see chat_template_jinja")
    elif name in TEMPLATES:
        state.set("data.chat_template", TEMPLATES[name], "chat_template", name)
    elif name == "tokenizer_default":
        state.record(SAME, "chat_template", name, "finetune uses the tokenizer's own template too")
    elif name:
        state.record(
            DIFFERS,
            "chat_template",
            name,
            "finetune uses the tokenizer's own template; check it with `finetune data`",
        )
    ends = state.take("eot_tokens", [])
    for token in ends:
        state.record(SAME, "eot_tokens", token, "finetune reads the tokens that end a turn from the template")
    kind = state.take("train_on_inputs", False)
    if kind:
        state.set("data.train_on", "all", "train_on_inputs", True)
    else:
        state.record(SAME, "train_on_inputs", False, "data.train_on: assistant")
    if tokens := state.take("tokens"):
        state.set("model.add_tokens", list(tokens), "tokens", tokens)


def _batch_size(state: Translation, gpus: int) -> None:
    """Translate `batch_size`, axolotl's older key for the batch of all GPUs."""
    if total := int(state.take("batch_size") or 0):
        micro = int(state.source.get("micro_batch_size") or 1)
        if state.source.get("gradient_accumulation_steps") is None:
            state.source["gradient_accumulation_steps"] = max(1, total // (micro * gpus))
        state.record(TRANSLATED, "batch_size", total, "see gradient_accumulation_steps")


def _schedule(state: Translation) -> None:
    steps, ratio = state.take("warmup_steps"), state.take("warmup_ratio")
    if steps is not None or ratio is not None:
        key, value = ("warmup_steps", steps) if steps is not None else ("warmup_ratio", ratio)
        state.set("train.warmup_steps", value, key, value)
        if steps is not None and ratio is not None:
            state.record(SAME, "warmup_ratio", ratio, "warmup_steps has priority")
    if state.source.get("lr_scheduler") in ("one_cycle", "rex"):
        state.unsupported(
            "lr_scheduler", state.take("lr_scheduler"), f"{SCHEDULER}; kept cosine, the default of axolotl"
        )
    epochs = float(state.source.get("num_epochs") or 1.0)
    if (top := state.take("max_steps")) is not None and top > 0:
        state.set("train.max_steps", top, "max_steps", top)
        state.same("num_epochs", "max_steps ends the training")
    low = state.take("cosine_min_lr_ratio")
    if low and state.source.get("lr_scheduler") in (None, "cosine"):
        state.recipe["train.lr_scheduler_kwargs"] = {"min_lr_rate": low}
        if (name := state.take("lr_scheduler")) is not None:
            state.record(TRANSLATED, "lr_scheduler", name, "train.lr_scheduler_type: cosine_with_min_lr")
        state.set("train.lr_scheduler_type", "cosine_with_min_lr", "cosine_min_lr_ratio", low)
    elif low is not None:
        state.record(SAME, "cosine_min_lr_ratio", low, "axolotl reads it for the scheduler cosine only")
    if saves := state.take("saves_per_epoch", 0):
        if share := common.share_of_run(1 / (saves * epochs)):
            state.set("train.save_steps", share, "saves_per_epoch", saves)
        else:
            state.set("train.save_strategy", "epoch", "saves_per_epoch", saves)


def _evaluations(state: Translation) -> None:
    """Translate the evaluations during training, and which weights axolotl keeps at the end."""
    epochs = float(state.given.get("num_epochs") or 1.0)
    if evaluations := state.take("evals_per_epoch", 0):
        share = common.share_of_run(1 / (evaluations * epochs))
        common.set_evaluations(state, "evals_per_epoch", evaluations, share)
    common.evaluations(state, ("eval_strategy", "evaluation_strategy"), ("num_epochs", 1.0), 500)
    if "eval.eval_steps" not in state.recipe and (patience := state.take("early_stopping_patience")):
        state.unsupported("early_stopping_patience", patience, "it needs evaluations during training")
    named = state.take("load_best_model_at_end")
    if "eval.eval_steps" in state.recipe:
        state.recipe["eval.load_best_model_at_end"] = best = _keeps_best(state.given, epochs)
        text = "axolotl keeps the best weights if save_steps is a multiple of eval_steps"
        state.record(
            TRANSLATED, "load_best_model_at_end", named, f"eval.load_best_model_at_end: {best}; {text}"
        )
    elif named is not None:
        state.record(SAME, "load_best_model_at_end", named, "there is no evaluation during training")


def _keeps_best(given: dict[str, Any], epochs: float) -> bool:
    """Whether axolotl sets `load_best_model_at_end`: its own rule, with its own numbers."""
    steps = []
    for name, often in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        share = 1 / (given[often] * epochs) if given.get(often) else 1.0
        steps.append(number(share if share < 1 else given.get(name)) or 0)
    wanted = given.get("load_best_model_at_end") is not False or given.get("early_stopping_patience")
    return bool(wanted and all(steps) and steps[0] % steps[1] == 0)


def _special_tokens(state: Translation) -> None:
    """Translate `special_tokens`. A padding token never contributes to the loss."""
    tokens = dict(state.take("special_tokens") or {})
    if pad := tokens.pop("pad_token", None):
        state.record(SAME, "special_tokens.pad_token", pad, "padding does not contribute to the loss")
    for name, token in tokens.items():
        state.unsupported(
            f"special_tokens.{name}",
            token,
            "finetune keeps the special tokens of the tokenizer, so nothing changes if this is its token; "
            "otherwise save another tokenizer into the model's folder",
        )


def _defaults(state: Translation, gpus: int, *, is_chat: bool) -> None:
    state.keep_default("data.max_length", 512, 1024)
    if "train.max_steps" not in state.recipe:
        state.keep_default("train.num_train_epochs", 1.0, 3)
    state.keep_default("train.lr_scheduler_type", "cosine", "linear")
    state.keep_default("train.optim", "adamw_torch_fused", "adamw_torch_fused")
    state.keep_default("train.warmup_steps", 0.03, 0, "axolotl warms up for 3% of the steps, at most 100")
    if "data.train_on" not in state.recipe:
        state.recipe["data.train_on"] = "assistant"
        differs = is_chat and "eot_tokens" not in state.given
        text = END_OF_TURN if differs else "both train on the answers and their ends"
        state.record(DIFFERS if differs else SAME, "data.train_on", "assistant", text)
    if gpus > 1:
        state.keep_default(
            "train.average_tokens_across_devices",
            False,
            True,
            "axolotl averages the loss on each GPU first, so tokens of short examples weigh more",
        )
    precision = any(state.given.get(key) for key in ("bf16", "bfloat16", "fp16", "float16"))
    if state.recipe["adapter.type"] == "full" and precision and not state.given.get("deepspeed"):
        text = "axolotl trains 16-bit weights; finetune trains fp32 weights in mixed precision"
        state.record(DIFFERS, "adapter.type", "full", f"{text}, which needs more memory")
    common.keep_without_router_loss(state)
