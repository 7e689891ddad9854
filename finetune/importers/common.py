"""Rules that several tools share: Trainer arguments, adapters, batch sizes, launch files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.core import strict_yaml
from finetune.core.errors import Problem, UserError
from finetune.importers.translation import SAME, Rule, Translation
from finetune.recipe import build

NO_EFFECT = "it changes no result"
ALWAYS = "finetune always does this"
LAUNCH = "the precision comes from the launch: accelerate_configs/"
TRACKER = "set `train.report_to` and the tracker's own environment variables"

# Arguments of transformers.Trainer whose values finetune owns elsewhere, or that change no result
TRAINER = {
    "bf16": Rule(same=LAUNCH),
    "fp16": Rule(reason=f"{LAUNCH}; fp16 needs `mixed_precision: fp16` in the accelerate config"),
    "pure_bf16": Rule(reason="trainable weights stay in fp32; use `optim: adamw_torch_8bit` to save memory"),
    "do_train": Rule(same=ALWAYS),
    "do_eval": Rule(same="a validation set is always evaluated"),
    "remove_unused_columns": Rule(same="finetune reads only the columns of the format"),
    "dataloader_num_workers": Rule("train.dataloader_num_workers"),
    "overwrite_output_dir": Rule(same="a run never overwrites another run"),
    "save_safetensors": Rule(same=ALWAYS),
    "save_only_model": Rule(same="a checkpoint always has the optimizer's state, so that a run can resume"),
    "resume_from_checkpoint": Rule(reason="use `finetune train RECIPE --resume`"),
    "ddp_find_unused_parameters": Rule(same="finetune decides this for the launch"),
    "ddp_timeout": Rule(same="$FINETUNE_TIMEOUT sets the time limit of collectives"),
    "gradient_checkpointing_kwargs": Rule(same=NO_EFFECT),
    "push_to_hub": Rule(reason="set `publish.repo`", off=(None, False)),
    "hub_model_id": Rule("publish.repo"),
    "hub_private_repo": Rule("publish.private"),
    "report_to": Rule("train.report_to"),
    "run_name": Rule("train.run_name"),
    "per_device_eval_batch_size": Rule("eval.batch_size"),
    "eval_batch_size": Rule("eval.batch_size"),
    "load_best_model_at_end": Rule("eval.load_best_model_at_end"),
    "use_liger_kernel": Rule(same="finetune's own fused kernels run by default on GPUs"),
    "trust_remote_code": Rule(
        reason="finetune runs no code of a model's repository; models that transformers knows need none"
    ),
    "disable_tqdm": Rule(same=NO_EFFECT),
    "local_rank": Rule(same="the launcher sets it"),
}
SCHEDULES = {"cosine_with_min_lr": "cosine_with_min_lr", "one_cycle": "cosine"}
OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw_bnb_8bit": "adamw_bnb_8bit",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
}
TEMPLATES = {  # names of other tools -> a bundled template; the empty string: the tokenizer's own template
    "tokenizer_default": "",
    "chatml": "chatml",
    "llama3": "llama3",
    "llama-3": "llama3",
    "mistral": "mistral",
    "mistral_v1": "mistral",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "phi_3": "phi3",
    "phi_35": "phi3_5",
    "phi": "phi3",
    "qwen": "qwen2_5",
    "qwen_25": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "cohere": "cohere",
    "deepseek3": "deepseekv3",
    "deepseek_v3": "deepseekv3",
    "gpt": "gptoss",
    "gpt_oss": "gptoss",
}


def trainer_arguments(state: Translation) -> None:
    """Translate arguments of transformers.Trainer: the keys of `train:` have the same names."""
    state.apply(TRAINER)
    known = build.known_keys()["train"]
    for key in [key for key in state.source if key in known]:
        value = number(state.source.pop(key))
        if value is None:
            state.record(SAME, key, value, "it is not set")
        else:
            state.set(f"train.{key}", value, key, value)


def number(value: Any) -> Any:
    """Return the number in a string: YAML 1.1 reads 2e-5 as a string."""
    return strict_yaml.scalar(value) if isinstance(value, str) else value


def batch_size(state: Translation, micro: tuple[str, int], steps: tuple[str, int], gpus: int) -> None:
    """Translate micro-batch size and accumulation steps into the effective batch size.

    Args:
        micro: the tool's key and default.
        steps: the same for the accumulation steps.
        gpus: the number of GPUs that the tool trained on.
    """
    names = [name for name in (micro[0], steps[0]) if state.source.get(name) is not None]
    per_device = int(state.take(micro[0], micro[1]))
    accumulated = int(state.take(steps[0], steps[1]))
    total = per_device * accumulated * gpus
    text = f"train.effective_batch_size: {total} = {per_device} x {accumulated} steps x {gpus} GPUs (--gpus)"
    state.recipe |= {"train.effective_batch_size": total, "train.per_device_train_batch_size": per_device}
    for name in names:
        state.record("translated", name, per_device if name == micro[0] else accumulated, text)
    for name, default in (micro, steps):
        if name not in names:
            state.record(
                "differs by default", name, default, f"not set; the default of {state.tool} is {default}"
            )


def lora(state: Translation, keys: dict[str, str], quantized: str = "") -> None:
    """Translate the options of a LoRA adapter.

    Args:
        keys: the tool's key -> PEFT's key.
        quantized: the quantization of the base model; the empty string: none.
    """
    kind = "lora"
    for key, name in (
        ("use_dora", "dora"),
        ("peft_use_dora", "dora"),
        ("use_rslora", "rslora"),
        ("peft_use_rslora", "rslora"),
    ):
        if state.take(key, False):
            kind = name
            state.record("translated", key, True, f"adapter.type: {name}")
    if quantized == "nf4" and kind in ("lora", "dora"):
        kind = {"lora": "qlora", "dora": "qdora"}[kind]
    elif quantized:
        state.recipe["model.quantization"] = quantized
    state.recipe["adapter.type"] = kind
    for key, name in keys.items():
        if key in state.source:
            state.apply_rule(key, state.source.pop(key), Rule(f"adapter.{name}"))


def keep_unquantized(state: Translation) -> None:
    """Keep the base model unquantized. finetune's default is `auto`."""
    why = "on an H100, auto may store the base model in fp8"
    state.keep_default("model.quantization", "none", "auto", why)


def keep_trainer_defaults(state: Translation, max_length: int, learning_rate: float) -> None:
    """Keep the defaults of transformers.Trainer, with the tool's own length and learning rate."""
    state.keep_default("data.max_length", max_length, 1024)
    if "train.max_steps" not in state.recipe:
        state.keep_default("train.num_train_epochs", 3.0, 3)
    state.keep_default("train.learning_rate", learning_rate, 2e-4)
    state.keep_default("train.lr_scheduler_type", "linear", "linear")
    state.keep_default("train.warmup_steps", 0, 0)


def not_sft(tool: str, what: str, where: str) -> UserError:
    """Refuse training that is not supervised fine-tuning (exit 2)."""
    text = f"finetune imports supervised fine-tuning only, and this file is for {what}"
    fix = f"train it with {tool}"
    why = "finetune has no preference tuning, no reinforcement learning and no pretraining"
    return UserError(Problem(text, where=where, why=why, fix=fix, code="import"))


def launch(state: Translation, key: str, value: Any, gpus: int) -> None:
    """Name the shipped accelerate config that is nearest to a DeepSpeed or FSDP setting."""
    text = str(value).lower()
    offload = "offload" in text
    if key == "deepspeed":
        stage = "zero3" if "3" in Path(text).name or '"stage": 3' in text else "zero2"
        name = f"{stage}_8_offload" if offload and stage == "zero3" else f"{stage}_8"
    else:
        name = "fsdp2_8_offload" if offload else "fsdp2_8"
    if "zero0" in text or "z0" in text or "zero1" in text:
        name = f"ddp_{gpus}" if gpus in (2, 4, 8) else "ddp_8"
    state.accelerate = name
    state.record("translated", key, value, f"--accelerate {name} on the command line of `finetune train`")
