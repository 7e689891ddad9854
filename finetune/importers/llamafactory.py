"""Translate a LLaMA-Factory config. Source: its arguments, src/llamafactory/hparams (August 2026)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from finetune.core import regular_files
from finetune.importers import common
from finetune.importers.common import NO_EFFECT
from finetune.importers.translation import DIFFERS, NOT_SUPPORTED, SAME, TRANSLATED, Rule, Translation

TOOL = "LLaMA-Factory"
GREEDY = "finetune generates greedy answers"
TEMPLATES = {  # LLaMA-Factory's templates that render what a bundled template renders
    "chatml": "chatml",
    "qwen3_nothink": "chatml",
    "qwen3_5_nothink": "chatml",
    "smollm": "chatml",
    "yi": "chatml",
    "qwen": "qwen2_5",
    "llama3": "llama3",
    "mistral": "mistral",
    "gemma": "gemma3",
    "gemma2": "gemma3",
    "gemma3": "gemma3",
}
STAGES = {"pt": "language model", "rm": "reward", "ppo": "PPO", "dpo": "DPO", "kto": "KTO"}
OTHER_METHODS = (
    "use_badam",
    "use_adam_mini",
    "use_muon",
    "use_llama_pro",
    "mixture_of_depths",
    "use_dft_loss",
    "use_asft_loss",
    "use_eaft_loss",
    "use_mca",
    "use_megatron_bridge",
    "shift_attn",
    "train_from_scratch",
)
LARGEST = 100 * 2**20  # bytes of a data file whose examples are counted
MEGATRON = (  # keys of MCA and Megatron Bridge
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_*",
    "bias_activation_fusion",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "recompute_granularity",
    "mixed_precision",
    "use_packed_sequences",
)
RULES = {
    "model_revision": Rule("model.revision"),
    "cutoff_len": Rule("data.max_length"),
    "streaming": Rule("data.streaming"),
    "buffer_size": Rule("data.shuffle_buffer"),
    "lora_dropout": Rule("adapter.lora_dropout"),
    "loraplus_lr_ratio": Rule("adapter.loraplus_lr_ratio"),
    "adapter_name_or_path": Rule("adapter.init_from"),
    "warmup_steps": Rule("train.warmup_steps"),
    "warmup_ratio": Rule("train.warmup_steps"),
    "save_strategy": Rule("train.save_strategy"),
    "early_stopping_steps": Rule("eval.early_stopping_patience"),
    "predict_with_generate": Rule(same="finetune always generates answers to the validation set"),
    "max_new_tokens": Rule("eval.max_new_tokens"),
    "moe_aux_loss_coef": Rule("train.router_aux_loss_coef"),
    "disable_shuffling": Rule("train.train_sampling_strategy", lambda on: "sequential" if on else "random"),
    "default_system": Rule(reason="write the system message into the data"),
    "tool_format": Rule(reason="the chat template decides how tools are written"),
    "mask_history": Rule("data.train_on", lambda on: "last_turn" if on else "assistant"),
    "mix_strategy": Rule(reason="set `weight` for each source in `data.name`", off=(None, "concat")),
    "interleave_probs": Rule(reason="set `weight` for each source in `data.name`"),
    "tokenized_path": Rule(same="`data.cache_dir` is the folder of prepared data"),
    "additional_target": Rule(
        "adapter.modules_to_save", lambda text: [name.strip() for name in text.split(",")]
    ),
    "pissa_init": Rule("adapter.init_lora_weights", lambda on: f"pissa_niter_{on}"),
    "resize_vocab": Rule(same="finetune adds only the rows of new tokens"),
    "add_tokens": Rule("model.add_tokens", lambda text: [name.strip() for name in text.split(",")]),
    "new_special_tokens": Rule("model.add_tokens", lambda text: [name.strip() for name in text.split(",")]),
    "add_special_tokens": Rule("model.add_tokens", lambda text: [name.strip() for name in text.split(",")]),
    "rope_scaling": Rule(reason="set rope_scaling in the model's config.json"),
    "fp8": Rule(reason="use `finetune train --accelerate 8xh100_fp8`, or `model.quantization: fp8`"),
    "enable_thinking": Rule(
        reason="the chat template decides how reasoning is written; see `data.reasoning`", off=(None, True)
    ),
    "preserve_thinking": Rule(reason="the chat template decides how reasoning is written"),
    "create_new_adapter": Rule(
        reason="merge the first adapter with `finetune merge`, and train on the merged model",
        off=(None, False),
    ),
    "quantization_method": Rule(
        reason="finetune quantizes with bitsandbytes, and reads GPTQ and AWQ checkpoints as they are",
        off=(None, "bitsandbytes", "bnb"),
    ),
    "double_quantization": Rule(
        reason="finetune's 4-bit weights always have double quantization", off=(None, True)
    ),
    "upcast_layernorm": Rule(reason="norms have the precision of the base model"),
    "upcast_lmhead_output": Rule(same="finetune computes the loss in fp32"),
    "pissa_convert": Rule(same="finetune always saves an adapter of PiSSA as plain LoRA"),
    "compute_accuracy": Rule(reason="finetune reports loss, exact match and the tasks of `eval.tasks`"),
    "eval_on_each_dataset": Rule(reason="finetune reports one validation loss"),
    "freeze_language_model": Rule(same="it belongs to models with images"),
    "freeze_trainable_layers": Rule(same="it belongs to finetuning_type: freeze"),
    "freeze_trainable_modules": Rule(same="it belongs to finetuning_type: freeze"),
    "freeze_extra_modules": Rule(same="it belongs to finetuning_type: freeze"),
    **{
        name: Rule(reason="set `train.report_to` and the tracker's own environment variables")
        for name in ("use_swanlab", "swanlab_*")
    },
    "loraplus_lr_embedding": Rule(reason="LoRA+ has one ratio for all layers in finetune"),
    "split_special_tokens": Rule(reason="finetune reads special tokens as one token"),
    "new_special_tokens_config": Rule(reason="set `model.add_tokens`"),
    "init_special_tokens": Rule(reason="finetune's new rows are the mean of all rows"),
    "asft_alpha": Rule(reason="finetune has the cross-entropy loss"),
    "eaft_alpha": Rule(reason="finetune has the cross-entropy loss"),
    "quantization_device_map": Rule(same="finetune places the model on the GPU of each process"),
    **{name: Rule(same="set HF_TOKEN in the environment") for name in ("hf_hub_token", "ms_hub_token")},
    **{name: Rule(reason="use `finetune profile RECIPE`") for name in ("enable_torch_profiler", "profil*")},
    **{name: Rule(reason=GREEDY) for name in ("do_sample", "temperature", "top_p", "top_k", "num_beams")},
    **{name: Rule(reason=GREEDY) for name in ("eval_num_beams", "repetition_penalty", "length_penalty")},
    **{
        name: Rule(reason=f"finetune has no {optimizer}")
        for optimizer in ("badam",)
        for name in (f"{optimizer}_*",)
    },
    **{
        name: Rule(same="it belongs to another stage")
        for name in (
            "pref_*",
            "dpo_*",
            "kto_*",
            "ppo_*",
            "simpo_*",
            "ref_model*",
            "reward_model*",
            "ld_alpha",
        )
    },
    **{
        name: Rule(same="it belongs to models with images, audio or video")
        for name in ("media_dir", "image_*", "video_*", "audio_*", "crop_to_patches", "use_audio_in_video")
    },
    **{
        name: Rule(same="it belongs to inference or to an export")
        for name in ("infer_*", "vllm_*", "sglang_*", "export_*", "adapter_folder", "offload_folder")
    },
    **{name: Rule(reason="finetune has no KTransformers") for name in ("use_kt", "kt_*")},
    **{name: Rule(reason="finetune does not train with Megatron") for name in MEGATRON},
    **{name: Rule(reason="finetune has no HyperParallel") for name in ("use_hyper_parallel", "hyper_*")},
    "ray_*": Rule(reason="see scripts/slurm and scripts/skypilot"),
    "ignore_pad_token_for_loss": Rule(same="padding does not contribute to the loss"),
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
            "include_num_input_tokens_seen",
            "include_effective_tokens_per_second",
            "freeze_vision_tower",
            "freeze_multi_modal_projector",
            "use_unsloth",
            "use_unsloth_gc",
            "enable_liger_kernel",
            "use_v1_kernels",
            "print_param_status",
            "fp8_backend",
            "fp8_enable_fsdp_float8_all_gather",
            "use_kv_cache",
        )
    },
}


PROJECTIONS = {  # use_METHOD -> LLaMA-Factory's defaults
    "galore": {"rank": 16, "update_interval": 200, "scale": 2.0, "proj_type": "std"},
    "apollo": {
        "rank": 16,
        "update_interval": 200,
        "scale": 32.0,
        "proj_type": "std",
        "proj": "random",
        "scale_type": "channel",
    },
}
OF_GALORE = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "adafactor": "adafactor",
}
OF_TRANSFORMERS = {"update_interval": "update_proj_gap"}
OFT = {"oft_block_size": "oft_block_size", "oft_rank": "r", "module_dropout": "module_dropout"}
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from a LLaMA-Factory config."""
    stage = state.take("stage", "sft")
    if stage != "sft" or (state.source.get("do_predict") and not state.source.get("do_train")):
        kind = f"{STAGES[stage]} training" if stage in STAGES else "predictions"
        text = "see `data.format: text` and `data.too_long: split`" if stage == "pt" else ""
        raise common.not_sft(TOOL, kind, where, text)
    state.record(SAME, "stage", "sft", "finetune trains with supervision")
    state.move("model_name_or_path", "model.name")
    _datasets(state, where)
    _adapter(state)
    _template(state)
    _attention(state)
    common.batch_size(state, ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), gpus)
    common.duration(state)
    common.warmup(state)
    _new_tokens(state)
    common.launch(state, gpus)
    _validation(state)
    if (neat := state.take("neat_packing", False)) or state.source.get("packing") is not None:
        packing = state.take("packing")
        state.recipe["data.packing"] = bool(neat or packing)
        for key, value in (("neat_packing", neat), ("packing", packing)):
            if value:
                state.record(TRANSLATED, key, value, "data.packing: true")
        if packing and not neat:
            state.unsupported(
                "neat_packing",
                False,
                "without neat_packing, packed examples attend to each other; in finetune they never do",
            )
    state.same("fsdp_transformer_layer_cls_to_wrap", "finetune finds the class of the layers")
    iterations = state.take("pissa_iter")
    if state.take("pissa_init", False):
        state.source["pissa_init"] = 16 if iterations is None else iterations
    if iterations is not None:
        state.record(SAME, "pissa_iter", iterations, "it belongs to pissa_init")
    _gradient_projection(state)
    if state.source.get("bf16") is False:
        state.record(
            SAME, "bf16", state.take("bf16"), "LLaMA-Factory then computes in the precision of the checkpoint"
        )
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state)
    state.finish()


def _new_tokens(state: Translation) -> None:
    """Translate the keys for new tokens. LLaMA-Factory adds the tokens of all of them."""
    given = [
        key for key in ("add_tokens", "new_special_tokens", "add_special_tokens") if state.source.get(key)
    ]
    if len(given) > 1:  # one alone has a rule
        texts = [state.take(key) for key in given]
        tokens = [name.strip() for text in texts for name in text.split(",")]
        state.recipe["model.add_tokens"] = list(dict.fromkeys(tokens))
        for key, text in zip(given, texts, strict=True):
            state.record(TRANSLATED, key, text, "a part of model.add_tokens")


def _validation(state: Translation) -> None:
    """Translate the validation set that is drawn from the data, and the evaluations during training."""
    size = float(state.source.get("val_size") or 0)
    if size >= 1:
        state.unsupported(
            "val_size",
            state.take("val_size"),
            "it counts examples; set `data.validation_fraction` to their share of the data",
        )
    elif size:
        state.set("data.validation_fraction", size, "val_size", state.take("val_size"))
    common.evaluations(state, ("eval_strategy", "evaluation_strategy"), ("num_train_epochs", 3.0), 500)


def _gradient_projection(state: Translation) -> None:
    """Translate GaLore and APOLLO, which are optimizers of transformers."""
    for method, options in PROJECTIONS.items():
        given = {key: state.take(key) for key in list(state.source) if key.startswith(f"{method}_")}
        if not state.take(f"use_{method}", False):
            for key, value in given.items():
                state.record(SAME, key, value, f"it belongs to use_{method}")
            continue
        plain = str(state.take("optim", "adamw_torch"))
        kind = OF_GALORE.get(plain, "adamw") if method == "galore" else "adamw"
        by_layer = given.pop(f"{method}_layerwise", False)
        layers = "_layerwise" if by_layer else ""
        if f"{method}_layerwise" in state.given:
            state.record(TRANSLATED, f"{method}_layerwise", by_layer, f"train.optim: {method}_{kind}{layers}")
        state.set("train.optim", f"{method}_{kind}{layers}", f"use_{method}", True)
        if front := given.pop(f"{method}_scale_front", False):
            state.unsupported(f"{method}_scale_front", front, "transformers scales the gradients at the end")
        target = given.pop(f"{method}_target", None) or "all"
        modules = target if isinstance(target, list) else [name.strip() for name in target.split(",")]
        named = "all-linear" if modules == ["all"] else modules
        state.set("train.optim_target_modules", named, f"{method}_target", target)
        values = options | {key.removeprefix(f"{method}_"): value for key, value in given.items()}
        values = {OF_TRANSFORMERS.get(name, name): value for name, value in values.items()}
        state.recipe["train.optim_args"] = ", ".join(f"{k}={v}" for k, v in values.items())
        defaults = [f"{method}_{key}" for key in options if f"{method}_{key}" not in given]
        for key in given:
            state.record(TRANSLATED, key, given[key], f"train.optim_args: {state.recipe['train.optim_args']}")
        if defaults:
            state.record(
                DIFFERS,
                "train.optim_args",
                state.recipe["train.optim_args"],
                f"train.optim_args has LLaMA-Factory's defaults of {', '.join(defaults)}",
            )


def _datasets(state: Translation, where: str) -> None:
    given = state.take("dataset", "")
    parts = given if isinstance(given, list) else str(given).split(",")
    names = [name.strip() for name in parts if name.strip()]
    folder = Path(state.take("dataset_dir", "data"))
    if str(folder) == "ONLINE":
        for name in names:
            state.record(TRANSLATED, "dataset", name, f"data.name: {name}")
        state.record(SAME, "dataset_dir", "ONLINE", "the datasets are on the Hub")
        sources = [_first_examples(state, name, name, on_hub=True) for name in names]
        state.recipe["data.name"] = (
            sources[0] if sources[1:] == [] and isinstance(sources[0], str) else sources
        )
    else:
        _described(state, names, _found_from(where, folder), where)
    if (most := state.take("max_samples")) and not any(entry.key == "max_samples" for entry in state.entries):
        state.unsupported("max_samples", most, "name a smaller file, or a split such as `train[:1000]`")


def _found_from(where: str, folder: Path) -> Path:
    """Return the folder of the datasets. The tool runs in a folder above its configs."""
    if folder.is_absolute() or folder.is_dir():
        return folder
    above = (parent / folder for parent in Path(where).resolve().parents)
    return next((path for path in above if path.is_dir()), folder)


def _described(state: Translation, names: list[str], folder: Path, where: str) -> None:
    """Translate the datasets that dataset_info.json describes."""
    known = _dataset_info(folder)
    if "dataset_dir" in state.given:
        state.record(SAME, "dataset_dir", state.given["dataset_dir"], f"read dataset_info.json in {folder}")
    sources, columns, roles = [], {}, {}
    missing = f"no entry of this name in {folder / 'dataset_info.json'}"
    if str(folder).startswith("REMOTE:"):
        missing = f"its description is in the Hub repository {str(folder).removeprefix('REMOTE:')}"
    for name in names:
        info = known.get(name)
        if info is None:
            state.unsupported(
                "dataset",
                name,
                f"{missing}; write its path into `data.name`",
            )
            sources.append(name)
            continue
        if info.get("ranking") or info.get("kto_tag"):
            raise common.not_sft(TOOL, f"preference data ({name})", where)
        if {"images", "videos", "audios"} & set(info.get("columns") or {}):
            raise common.not_sft(TOOL, f"data with images, audio or video ({name})", where)
        sources.append(_first_examples(state, name, _source(info, folder), on_hub="file_name" not in info))
        has_input = "query" in (info.get("columns") or {"query": "input"})
        if info.get("formatting", "alpaca") == "alpaca" and has_input:
            text = "LLaMA-Factory joins the instruction and the input with one line break, and finetune "
            state.record(DIFFERS, f"dataset.{name}.formatting", "alpaca", f"{text}with an empty line")
        for ours, theirs in _columns(info).items():
            common.column(state, columns, ours, theirs, f"dataset.{name}.columns")
        for key in ("num_samples", "folder", *(() if info.get("hf_hub_url") else ELSEWHERE)):
            if value := info.get(key):
                state.unsupported(
                    f"dataset.{name}.{key}",
                    value,
                    "finetune reads the whole files of the Hub and of this machine",
                )
        tags = info.get("tags") or {}
        if tags.get("role_tag", "from") not in ("from", "role") or tags.get("content_tag", "value") not in (
            "value",
            "content",
        ):
            state.unsupported(
                f"dataset.{name}.tags",
                tags,
                "finetune reads role or from, and content or value; rename the keys in the data",
            )
        for role in ("user", "assistant", "system", "tool"):
            tag = tags.get({"tool": "observation_tag"}.get(role, f"{role}_tag"))
            roles |= {tag: role} if tag and tag != role else {}
        if tags:
            state.record(TRANSLATED, f"dataset.{name}.tags", tags, f"data.role_map: {roles or 'not needed'}")
        state.record(TRANSLATED, "dataset", name, f"data.name: {sources[-1]}")
    compared = [*names, *[name.strip() for name in str(state.source.get("eval_dataset") or "").split(",")]]
    common.other_columns(state, [_columns(known[name]) for name in compared if name in known])
    state.recipe["data.name"] = sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    state.recipe |= {"data.columns": columns} if columns else {}
    state.recipe |= {"data.role_map": roles} if roles else {}
    _eval_dataset(state, known, folder)


def _eval_dataset(state: Translation, known: dict[str, Any], folder: Path) -> None:
    if (tests := state.take("eval_dataset")) is None:
        return
    first, _, others = str(tests).partition(",")
    info = known.get(first.strip())
    path = _source(info, folder) if info else first.strip()
    if others or not isinstance(path, str):
        state.unsupported("eval_dataset", tests, "`data.validation` takes one file or folder")
    else:
        state.set("data.validation", path, "eval_dataset", tests)


def _first_examples(state: Translation, name: str, source: Any, *, on_hub: bool) -> Any:
    """Return a source with only its first `max_samples` examples, if it is on the Hub."""
    if not (most := state.source.get("max_samples")):
        return source
    if on_hub:
        given = source if isinstance(source, dict) else {"name": source}
        split = f"{given.get('split', 'train')}[:{most}]"
        state.record(TRANSLATED, "max_samples", most, f"split: {split} of {given['name']}")
        return given | {"split": split}
    number = _examples_in(Path(source))
    if number and number <= int(most):
        state.record(SAME, "max_samples", most, f"the file of {name} has {number} examples")
    else:
        state.unsupported(
            "max_samples",
            most,
            f"finetune reads the whole file of {name}; save its first {most} examples to another file",
        )
    return source


def _examples_in(path: Path) -> int | None:
    """Return the number of examples in a small JSON file, or `None` if it is not known."""
    if path.suffix not in (".json", ".jsonl") or not path.is_file() or path.stat().st_size > LARGEST:
        return None
    try:
        text = regular_files.read_text(path)
        return len(json.loads(text)) if text.lstrip().startswith("[") else len(text.strip().split("\n"))
    except (OSError, ValueError, RecursionError):
        return None


def _dataset_info(folder: Path) -> dict[str, Any]:
    path = folder / "dataset_info.json"
    return regular_files.read_json(path) if path.is_file() else {}


def _source(info: dict[str, Any], folder: Path) -> Any:
    """The source of an entry of dataset_info.json: a path, or a Hub dataset."""
    if "file_name" in info:
        return os.path.join(folder, info["file_name"])
    elsewhere = next((info[key] for key in ELSEWHERE if info.get(key)), "")
    source = {
        "name": info.get("hf_hub_url") or elsewhere,
        "subset": info.get("subset"),
        "split": info.get("split"),
    }
    kept = {key: value for key, value in source.items() if value is not None}
    return kept["name"] if set(kept) == {"name"} else kept


def _columns(info: dict[str, Any]) -> dict[str, str]:
    """finetune's column -> the column of the data."""
    given = info.get("columns") or {}
    names = {"prompt": "instruction", "query": "input", "response": "output"}
    if info.get("formatting") in ("sharegpt", "openai"):
        names = {"messages": "conversations"}
    names |= {"system": "system", "tools": "tools", "history": "history"}
    return {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs)}


def _adapter(state: Translation) -> None:
    kind = state.take("finetuning_type", "lora")
    bits = state.take("quantization_bit")
    four = state.take("quantization_type", "nf4")
    quantized = {None: "", 4: four, 8: "int8"}.get(bits, "")
    if "quantization_type" in state.given:
        state.record(TRANSLATED, "quantization_type", four, "see quantization_bit")
    if bits and not quantized:
        state.unsupported(
            "quantization_bit", bits, "finetune quantizes to 4 bits (nf4, fp4) and 8 bits (int8, fp8)"
        )
    elif bits and kind != "full":
        state.record(TRANSLATED, "quantization_bit", bits, f"model.quantization: {quantized}")
    if kind == "full":
        others = ("lora_", "loraplus", "use_dora", "use_rslora", "pissa_", "oft_", "additional_target")
        for name in [name for name in state.source if name.startswith(others)]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains")
        if bits:
            state.unsupported(
                "quantization_bit",
                bits,
                "no adapter trains, and finetune trains all weights in full precision",
            )
        state.set("adapter.type", "full", "finetuning_type", kind)
        return
    if kind not in ("lora", "oft"):
        state.record(
            NOT_SUPPORTED,
            "finetuning_type",
            kind,
            "finetune trains all weights (`full`) or an adapter; kept lora",
        )
    if kind == "oft":
        state.set("adapter.type", "oft", "finetuning_type", kind)
        common.adapter_options(state, OFT)
        target = state.take("oft_target", "all")
    else:
        target = _lora(state, kind, quantized)
    modules = "all-linear" if target == "all" else [name.strip() for name in target.split(",")]
    name = "oft_target" if kind == "oft" else "lora_target"
    if name in state.given:
        state.set("adapter.target_modules", modules, name, target)
    else:
        state.keep_default("adapter.target_modules", modules, "all-linear")
    if not quantized:
        common.keep_unquantized(state)


def _lora(state: Translation, kind: str, quantized: str) -> str:
    """Translate a LoRA adapter, and return its target."""
    target = state.take("lora_target", "all")
    rank = int(state.take("lora_rank", 8))
    state.source["lora_rank"] = rank
    state.source.setdefault("lora_alpha", None)
    if state.source["lora_alpha"] is None:
        state.source.pop("lora_alpha")
        state.keep_default("adapter.lora_alpha", 2 * rank, 32, "LLaMA-Factory uses twice the rank")
    if "lora_rank" not in state.given:
        state.keep_default("adapter.r", state.take("lora_rank"), 16)
    common.lora(state, {"lora_rank": "r", "lora_alpha": "lora_alpha"}, quantized)
    if kind == "lora":
        state.record(TRANSLATED, "finetuning_type", kind, f"adapter.type: {state.recipe['adapter.type']}")
    return target


def _template(state: Translation) -> None:
    name = state.take("template")
    if name in TEMPLATES:
        state.set("data.chat_template", TEMPLATES[name], "template", name)
    elif name:
        text = "LLaMA-Factory has its own template of this name; finetune uses the tokenizer's"
        state.record(DIFFERS, "template", name, f"{text}; compare the tokens with `finetune data`")
    if state.take("train_on_prompt", False):
        state.set("data.train_on", "all", "train_on_prompt", True)
    elif "train_on_prompt" in state.given:
        state.record(SAME, "train_on_prompt", False, "data.train_on: assistant")


def _attention(state: Translation) -> None:
    state.same("flash_attn", common.KERNEL)
    off = state.take("disable_gradient_checkpointing", False)
    kept = "none" if off else "full"
    state.same("gradient_checkpointing", "LLaMA-Factory reads disable_gradient_checkpointing")
    if "disable_gradient_checkpointing" in state.given:
        state.set("speed.activation_checkpointing", kept, "disable_gradient_checkpointing", off)
    else:
        state.keep_default(
            "speed.activation_checkpointing", kept, "auto", "LLaMA-Factory recomputes all layers"
        )


def _defaults(state: Translation) -> None:
    common.keep_without_router_loss(state)
    common.keep_trainer_defaults(state, max_length=2048, learning_rate=5e-5)
    state.keep_default("data.train_on", "assistant", "assistant", "both train on the answers only")
    text = "LLaMA-Factory cuts prompts and answers of a longer example; finetune never cuts an answer"
    state.unsupported("data.too_long", "drop", f"{text} and skips it; truncate_prompt cuts prompts only")
