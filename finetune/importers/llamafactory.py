"""Translate a LLaMA-Factory config. Source: its arguments, src/llamafactory/hparams (August 2026)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from finetune.core import regular_files
from finetune.importers import common
from finetune.importers.common import NO_EFFECT
from finetune.importers.translation import DIFFERS, NOT_SUPPORTED, SAME, TRANSLATED, Rule, Translation

TOOL = "LLaMA-Factory"
STAGES = {"pt": "pretraining", "rm": "reward", "ppo": "PPO", "dpo": "DPO", "kto": "KTO"}
OTHER_METHODS = (
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_adam_mini",
    "use_muon",
    "use_llama_pro",
    "mixture_of_depths",
    "use_dft_loss",
    "use_asft_loss",
    "use_eaft_loss",
    "use_kt",
    "use_mca",
    "use_megatron_bridge",
    "shift_attn",
    "train_from_scratch",
)
RULES = {
    "model_revision": Rule("model.revision"),
    "cutoff_len": Rule("data.max_length"),
    "streaming": Rule("data.streaming"),
    "buffer_size": Rule("data.shuffle_buffer"),
    "val_size": Rule("data.validation_fraction"),
    "lora_dropout": Rule("adapter.lora_dropout"),
    "loraplus_lr_ratio": Rule("adapter.loraplus_lr_ratio"),
    "adapter_name_or_path": Rule("adapter.init_from"),
    "warmup_steps": Rule("train.warmup_steps"),
    "warmup_ratio": Rule("train.warmup_steps"),
    "eval_steps": Rule("eval.eval_steps"),
    "eval_strategy": Rule(same="`eval.eval_steps` sets evaluations during training"),
    "save_strategy": Rule("train.save_strategy"),
    "early_stopping_steps": Rule("eval.early_stopping_patience"),
    "predict_with_generate": Rule(same="finetune always generates answers to the validation set"),
    "max_new_tokens": Rule("eval.max_new_tokens"),
    "moe_aux_loss_coef": Rule("train.router_aux_loss_coef"),
    "disable_shuffling": Rule("train.train_sampling_strategy", lambda on: "sequential" if on else "random"),
    "default_system": Rule(reason="write the system message into the data"),
    "tool_format": Rule(reason="the chat template decides how tools are written"),
    "mask_history": Rule("data.train_on", lambda on: "last_turn" if on else "assistant"),
    "max_samples": Rule(reason="use a smaller file, or a split such as `train[:1000]` of a Hub dataset"),
    "mix_strategy": Rule(reason="set `weight` for each source in `data.name`", off=(None, "concat")),
    "interleave_probs": Rule(reason="set `weight` for each source in `data.name`"),
    "tokenized_path": Rule(same="`data.cache_dir` is the folder of prepared data"),
    "additional_target": Rule(
        "adapter.modules_to_save", lambda text: [name.strip() for name in text.split(",")]
    ),
    "pissa_init": Rule("adapter.init_lora_weights", lambda on: f"pissa_niter_{on}"),
    "resize_vocab": Rule(same="finetune adds only the rows of new tokens"),
    "add_tokens": Rule("model.add_tokens", lambda text: [name.strip() for name in text.split(",")]),
    "add_special_tokens": Rule("model.add_tokens", lambda text: [name.strip() for name in text.split(",")]),
    "rope_scaling": Rule(reason="set rope_scaling in the model's config.json"),
    "ray_num_workers": Rule(reason="see scripts/slurm and scripts/skypilot"),
    "fp8": Rule(reason="use `finetune train --accelerate 8xh100_fp8`, or `model.quantization: fp8`"),
    "freeze_language_model": Rule(same="it belongs to models with images"),
    **{name: Rule(reason=f"finetune has no {name.removeprefix('use_')}") for name in OTHER_METHODS},
    **{
        name: Rule(same=NO_EFFECT)
        for name in (
            "overwrite_cache",
            "preprocessing_num_workers",
            "preprocessing_batch_size",
            "plot_loss",
            "cache_dir",
            "data_shared_file_system",
            "low_cpu_mem_usage",
            "use_fast_tokenizer",
            "use_reentrant_gc",
            "enable_thinking",
            "include_num_input_tokens_seen",
            "include_effective_tokens_per_second",
            "compute_accuracy",
            "infer_backend",
            "image_max_pixels",
            "video_max_pixels",
            "video_fps",
            "video_maxlen",
            "freeze_vision_tower",
            "quantization_method",
            "freeze_multi_modal_projector",
            "use_unsloth",
            "use_unsloth_gc",
            "enable_liger_kernel",
            "use_v1_kernels",
            "upcast_layernorm",
            "upcast_lmhead_output",
            "print_param_status",
            "double_quantization",
            "quantization_type",
            "fp8_backend",
            "fp8_enable_fsdp_float8_all_gather",
            "pissa_convert",
            "create_new_adapter",
            "use_kv_cache",
        )
    },
}


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from a LLaMA-Factory config."""
    stage = state.take("stage", "sft")
    if stage != "sft" or (state.source.get("do_predict") and not state.source.get("do_train")):
        raise common.not_sft(TOOL, f"{STAGES.get(stage, 'prediction')} training", where)
    state.record(SAME, "stage", "sft", "finetune trains with supervision")
    model = state.take("model_name_or_path")
    state.set("model.name", model, "model_name_or_path", model)
    _datasets(state, where)
    _adapter(state)
    _template(state)
    _attention(state)
    common.batch_size(state, ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), gpus)
    if state.source.get("max_steps", -1) == -1:
        state.source.pop("max_steps", None)
    else:
        state.source.pop("num_train_epochs", None)
    if (neat := state.take("neat_packing", False)) or state.source.get("packing") is not None:
        on = bool(neat or state.take("packing", False))
        state.set("data.packing", on, "neat_packing" if neat else "packing", on)
    for key in ("deepspeed", "fsdp"):
        if value := state.take(key):
            common.launch(state, key, value, gpus)
    state.take("fsdp_transformer_layer_cls_to_wrap")
    if state.take("pissa_init", False):
        state.source["pissa_init"] = state.take("pissa_iter", 16)
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state)
    state.finish()


def _datasets(state: Translation, where: str) -> None:
    names = [name.strip() for name in str(state.take("dataset", "")).split(",") if name.strip()]
    folder = Path(state.take("dataset_dir", "data"))
    if not folder.is_absolute() and not folder.is_dir():  # the tool runs in a folder above its configs
        above = (parent / folder for parent in Path(where).resolve().parents)
        folder = next((path for path in above if path.is_dir()), folder)
    known = _dataset_info(folder)
    sources, columns, roles = [], {}, {}
    for name in names:
        info = known.get(name)
        if info is None:
            state.unsupported(
                "dataset",
                name,
                f"no entry of this name in {folder / 'dataset_info.json'}; write its path into `data.name`",
            )
            sources.append(name)
            continue
        if info.get("ranking") or info.get("kto_tag"):
            raise common.not_sft(TOOL, f"preference data ({name})", where)
        sources.append(_source(info, folder))
        for ours, theirs in _columns(info).items():
            columns |= {ours: theirs} if ours != theirs else {}
        tags = info.get("tags") or {}
        for role in ("user", "assistant", "system", "tool"):
            tag = tags.get({"tool": "observation_tag"}.get(role, f"{role}_tag"))
            roles |= {tag: role} if tag and tag != role else {}
        state.record(TRANSLATED, "dataset", name, f"data.name: {sources[-1]}")
    state.recipe["data.name"] = sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources
    state.recipe |= {"data.columns": columns} if columns else {}
    state.recipe |= {"data.role_map": roles} if roles else {}
    if (tests := state.take("eval_dataset")) is not None:
        first = known.get(str(tests).partition(",")[0].strip())
        path = _source(first, folder) if first else str(tests)
        state.set("data.validation", path, "eval_dataset", tests)


def _dataset_info(folder: Path) -> dict[str, Any]:
    path = folder / "dataset_info.json"
    return regular_files.read_json(path) if path.is_file() else {}


def _source(info: dict[str, Any], folder: Path) -> Any:
    """The source of an entry of dataset_info.json: a path, or a Hub dataset."""
    if "file_name" in info:
        return os.path.join(folder, info["file_name"])
    source = {"name": info.get("hf_hub_url", ""), "subset": info.get("subset"), "split": info.get("split")}
    kept = {key: value for key, value in source.items() if value is not None}
    return kept["name"] if set(kept) == {"name"} else kept


def _columns(info: dict[str, Any]) -> dict[str, str]:
    """finetune's column -> the column of the data."""
    given = info.get("columns") or {}
    names = {"prompt": "instruction", "query": "input", "response": "output"}
    if info.get("formatting") == "sharegpt":
        names = {"messages": "conversations"}
    names |= {"system": "system", "tools": "tools", "history": "history"}
    return {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs)}


def _adapter(state: Translation) -> None:
    kind = state.take("finetuning_type", "lora")
    bits = state.take("quantization_bit")
    quantized = {None: "", 4: "nf4", 8: "int8"}.get(bits, "")
    if bits and not quantized:
        state.unsupported(
            "quantization_bit", bits, "finetune quantizes to 4 bits (nf4, fp4) and 8 bits (int8, fp8)"
        )
    if kind == "full":
        for name in [name for name in state.source if name.startswith(("lora_", "use_dora", "use_rslora"))]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains")
        state.set("adapter.type", "full", "finetuning_type", kind)
        return
    if kind == "lora":
        state.record(TRANSLATED, "finetuning_type", kind, "adapter.type: lora")
    elif kind != "oft":
        state.record(
            NOT_SUPPORTED,
            "finetuning_type",
            kind,
            "finetune trains all weights (`full`) or an adapter; kept lora",
        )
    if kind == "oft":
        state.set("adapter.type", "oft", "finetuning_type", kind)
        for key, name in (("oft_block_size", "oft_block_size"), ("oft_rank", "r")):
            if key in state.source:
                state.apply_rule(key, state.source.pop(key), Rule(f"adapter.{name}"))
        target = state.take("oft_target", "all")
    else:
        target = state.take("lora_target", "all")
        rank = state.take("lora_rank", 8)
        state.source["lora_rank"] = rank
        state.source.setdefault("lora_alpha", None)
        if state.source["lora_alpha"] is None:
            state.source.pop("lora_alpha")
            state.keep_default("adapter.lora_alpha", 2 * rank, 32, "LLaMA-Factory uses twice the rank")
        common.lora(state, {"lora_rank": "r", "lora_alpha": "lora_alpha"}, quantized)
    modules = "all-linear" if target == "all" else [name.strip() for name in target.split(",")]
    state.set("adapter.target_modules", modules, "lora_target", target)
    if not quantized:
        common.keep_unquantized(state)


def _template(state: Translation) -> None:
    name = state.take("template")
    base = str(name or "").removesuffix("_nothink").removesuffix("_think")
    if base in common.TEMPLATES or name in common.TEMPLATES:
        state.record(TRANSLATED, "template", name, "data.chat_template: null, the tokenizer's own template")
    if name:
        text = "LLaMA-Factory has its own template of this name; finetune uses the tokenizer's"
        state.record(DIFFERS, "template", name, f"{text}; compare the tokens with `finetune data`")
    if state.take("train_on_prompt", False):
        state.set("data.train_on", "all", "train_on_prompt", True)


def _attention(state: Translation) -> None:
    value = str(state.take("flash_attn", "auto"))
    names = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
    if value in names:
        state.record(
            SAME, "flash_attn", value, "`model.attention: auto` chooses the fastest kernel that runs here"
        )
    off = state.take("disable_gradient_checkpointing", False) or state.take("gradient_checkpointing") is False
    state.recipe["speed.activation_checkpointing"] = "none" if off else "full"
    kind = TRANSLATED if off else DIFFERS
    state.record(
        kind,
        "disable_gradient_checkpointing",
        off,
        f"speed.activation_checkpointing: {'none' if off else 'full'}",
    )


def _defaults(state: Translation) -> None:
    common.keep_trainer_defaults(state, max_length=2048, learning_rate=5e-5)
    state.keep_default("data.train_on", "assistant", "assistant", "both train on the answers only")
