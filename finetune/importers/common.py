"""Rules that several tools share: Trainer arguments, adapters, batch sizes, launch files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from finetune.core.errors import Problem, UserError
from finetune.importers.translation import SAME, Rule, Translation, number
from finetune.recipe import build, renames

_STAGE = re.compile(r"(?:zero|stage|z)[-_]?([0-3])")
NO_EFFECT = "it changes no result"
ALWAYS = "finetune always does this"
LAUNCH = "the precision comes from the launch: accelerate_configs/"
KERNEL = "`model.attention: auto` chooses the fastest kernel that runs here"

# Arguments of transformers.Trainer whose values finetune owns elsewhere, or that change no result
TRAINER = {
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
    "group_by_length": Rule(
        "train.train_sampling_strategy", lambda on: "group_by_length" if on else "random"
    ),
    "run_name": Rule("train.run_name"),
    "per_device_eval_batch_size": Rule("eval.batch_size"),
    "eval_batch_size": Rule("eval.batch_size"),
    "load_best_model_at_end": Rule("eval.load_best_model_at_end"),
    "metric_for_best_model": Rule("eval.metric_for_best_model"),
    "greater_is_better": Rule(same="`eval.metric_for_best_model` also sets whether greater is better"),
    "use_liger_kernel": Rule(same="finetune's own fused kernels run by default on GPUs"),
    "trust_remote_code": Rule(
        reason="finetune runs no code of a model's repository; models that transformers knows need none"
    ),
    "disable_tqdm": Rule(same=NO_EFFECT),
    "torch_compile": Rule("speed.compile", bool),
    "torch_compile_mode": Rule("speed.compile"),
    "local_rank": Rule(same="the launcher sets it"),
}
OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw_bnb_8bit": "adamw_bnb_8bit",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
}


def trainer_arguments(state: Translation) -> None:
    """Translate arguments of transformers.Trainer: the keys of `train:` have the same names."""
    _precision(state)
    state.apply(TRAINER)
    known = build.known_keys()["train"]
    for key in [key for key in state.source if key in known]:
        value = number(state.source.pop(key))
        if value is None:
            state.record(SAME, key, value, "it is not set")
        else:
            state.set(f"train.{key}", value, key, value)
    for key in [key for key in state.source if renames.owner_of(key)]:
        owner = renames.owner_of(key)
        text = owner if owner.startswith("remove") else f"use {owner}"
        state.apply_rule(key, state.source.pop(key), Rule(reason=text))


def _precision(state: Translation) -> None:
    """Translate `bf16`. Without it and fp16, the tools train in fp32."""
    if (value := state.take("bf16")) is not None:
        others = ("fp16", "float16", "bfloat16", "pure_bf16", "fp8")
        if value is False and not any(state.given.get(name) for name in others):
            text = "finetune trains in bf16 where the GPU has it; use an accelerate config with "
            state.unsupported("bf16", value, f"{text}`mixed_precision: no` for fp32")
        else:
            state.record(SAME, "bf16", value, LAUNCH)


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
            why = f"the default of {state.tool} is {default}, and finetune's default batch has 32 examples"
            state.record("differs by default", name, default, f"{why}; kept {default}")


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
            if kind not in ("lora", name):
                state.unsupported(key, True, f"finetune trains {kind} or {name}, not both in one adapter")
                continue
            kind = name
            state.record("translated", key, True, f"adapter.type: {name}")
    if quantized == "nf4" and kind in ("lora", "dora"):
        kind = {"lora": "qlora", "dora": "qdora"}[kind]
    elif quantized:
        state.recipe["model.quantization"] = quantized
    state.recipe["adapter.type"] = kind
    adapter_options(state, keys)


def adapter_options(state: Translation, keys: dict[str, str]) -> None:
    """Translate the options of an adapter.

    Args:
        keys: the tool's key -> PEFT's key.
    """
    for key, name in keys.items():
        if key in state.source:
            state.apply_rule(key, state.source.pop(key), Rule(f"adapter.{name}"))


def keep_unquantized(state: Translation) -> None:
    """Keep the base model unquantized. finetune's default is `auto`."""
    state.keep_default(
        "model.quantization", "none", "auto", "on an H100, auto may store the base model in fp8"
    )


def keep_trainer_defaults(state: Translation, max_length: int, learning_rate: float) -> None:
    """Keep the defaults of transformers.Trainer, with the tool's own length and learning rate."""
    state.keep_default("data.max_length", max_length, 1024)
    if "train.max_steps" not in state.recipe:
        state.keep_default("train.num_train_epochs", 3.0, 3)
    state.keep_default("train.learning_rate", learning_rate, 2e-4)
    state.keep_default("train.lr_scheduler_type", "linear", "linear")
    state.keep_default("train.warmup_steps", 0, 0)
    keep_last_weights(state)


def warmup(state: Translation) -> None:
    """Translate the warm-up as transformers does: a number of steps has priority over a share of them."""
    if float(number(state.source.get("warmup_steps")) or 0) > 0:
        state.same("warmup_ratio", "warmup_steps has priority")
    elif state.source.get("warmup_ratio") is not None and "warmup_steps" in state.source:
        state.record(SAME, "warmup_steps", state.take("warmup_steps"), "it is off")


def duration(state: Translation) -> None:
    """Translate the length of the training: a number of steps has priority over epochs."""
    if int(number(state.source.get("max_steps")) or -1) > 0:
        state.same("num_train_epochs", "max_steps ends the training")
    elif "max_steps" in state.source:
        state.record(SAME, "max_steps", state.take("max_steps"), "it is off")


def evaluations(
    state: Translation, strategies: tuple[str, ...], epochs: tuple[str, float], logging_steps: int
) -> None:
    """Translate the steps between two evaluations.

    Args:
        strategies: the tool's keys that switch evaluation on.
        epochs: the tool's key and default of the number of epochs.
        logging_steps: the tool's default, which is also the default of `eval_steps`.
    """
    strategy = next((value for key in strategies if (value := state.source.get(key)) is not None), None)
    named = next((key for key in strategies if state.source.get(key) is not None), "")
    steps = number(state.take("eval_steps"))
    if steps is not None and strategy in ("no", "epoch", False):
        state.record(SAME, "eval_steps", steps, f"{named}: {strategy} ignores it")
    elif steps is not None:
        set_evaluations(state, "eval_steps", steps, steps if steps < 1 else int(steps))
    elif strategy == "steps":
        every = int(number(state.source.get("logging_steps")) or logging_steps)
        set_evaluations(state, named, strategy, every)
    if strategy == "epoch":
        if int(number(state.given.get("max_steps")) or -1) > 0:
            state.unsupported(
                named,
                strategy,
                (
                    "finetune does not know the steps of an epoch before it reads the data; "
                    "set `eval.eval_steps`"
                ),
            )
        else:
            share = 1 / float(number(state.given.get(epochs[0])) or epochs[1])
            set_evaluations(state, named, strategy, share_of_run(share))
    recorded = {entry.key for entry in state.entries}
    for key in strategies:
        if (value := state.take(key)) is not None and key not in recorded:
            state.record(SAME, key, value, "`eval.eval_steps` sets the evaluations during training")


def share_of_run(share: float) -> float | None:
    """Return a share of the run with six digits, rounded down, or `None` for the whole run."""
    return math.floor(share * 10**6) / 10**6 if share < 1 else None


def set_evaluations(state: Translation, key: str, given: object, steps: float | None) -> None:
    """Set the steps between two evaluations.

    Args:
        key: the key of the tool.
        given: its value.
        steps: a number of steps, or a share of the run below 1. `None`: one evaluation at the end.
    """
    if not {"data.validation", "data.validation_fraction"} & set(state.recipe):
        state.record(SAME, key, given, "the recipe has no validation set")
    elif not steps or steps < 0:
        state.record(SAME, key, given, "finetune always evaluates at the end")
    elif state.accelerate.startswith(("fsdp", "zero3")):
        state.unsupported(
            key,
            given,
            "evaluation during training does not work with FSDP or ZeRO-3; finetune evaluates at the end",
        )
    else:
        state.set("eval.eval_steps", steps, key, given)


def column(state: Translation, columns: dict[str, str], ours: str, theirs: str, key: str) -> None:
    """Add a column of one source to `data.columns`, which holds for all sources."""
    if columns.setdefault(ours, theirs) != theirs:
        text = f"`data.columns` holds for all sources, and another source has {columns[ours]}"
        state.unsupported(key, theirs, f"{text}; rename the column in the data")
    else:
        state.record("translated", key, theirs, f"data.columns: {{{ours}: {theirs}}}")


def other_columns(state: Translation, renamed: list[dict[str, str]]) -> None:
    """Record that `data.columns` does not fit all sources.

    Args:
        renamed: finetune's column -> the column of the data, for each source.
    """
    kinds = [{ours: theirs for ours, theirs in one.items() if ours != theirs} for one in renamed]
    if any(kind != kinds[0] for kind in kinds):
        state.unsupported(
            "data.columns",
            {name: kind[name] for kind in kinds for name in kind},
            "it holds for all sources, and these have other columns; rename the columns in the data",
        )


def keep_without_router_loss(state: Translation) -> None:
    """Keep the loss without the load-balancing loss of a mixture of experts. finetune adds it by default."""
    if not any(entry.key.endswith("output_router_logits") for entry in state.entries):
        state.keep_default(
            "train.router_aux_loss_coef",
            0.0,
            None,
            "only a mixture of experts has this loss, and finetune adds it by default",
        )


def keep_last_weights(state: Translation) -> None:
    """Keep the weights of the last step, as the tools do. finetune's default keeps the best checkpoint."""
    if "eval.eval_steps" in state.recipe:
        state.keep_default("eval.load_best_model_at_end", False, True)


def not_sft(tool: str, what: str, where: str, plain_text: str = "") -> UserError:
    """Refuse training that is not supervised fine-tuning (exit 2).

    Args:
        plain_text: for pretraining, the settings with which finetune trains on plain text.
    """
    fix = f"train it with {tool}"
    why = "finetune has no preference tuning and no reinforcement learning, and reads only text"
    if plain_text:
        fix += f"; finetune can train an existing model on plain text: {plain_text}"
        why = "finetune starts from a model that is trained already"
    return UserError(
        Problem(
            f"finetune imports supervised fine-tuning only, and this file is for {what}",
            where=where,
            why=why,
            fix=fix,
            code="import",
        )
    )


def launch(state: Translation, gpus: int) -> None:
    """Name the shipped accelerate config that is nearest to the DeepSpeed and FSDP settings."""
    given = {key: value for key in ("deepspeed", "fsdp", "fsdp_config") if (value := state.take(key))}
    if "deepspeed" in given:
        stage, offload = _zero(given["deepspeed"])
        if stage is None:
            state.unsupported(
                "deepspeed",
                given.pop("deepspeed"),
                "the name of the file has no ZeRO stage; use --accelerate zero2_8 or zero3_8",
            )
        elif stage < 2:
            state.accelerate = f"ddp_{gpus}" if gpus in (2, 4, 8) else "ddp_8"
        else:
            state.accelerate = f"zero{stage}_8_offload" if offload and stage == 3 else f"zero{stage}_8"
    elif given:
        config = given.get("fsdp_config")
        config = config if isinstance(config, dict) else {}
        words, inner = str(given.get("fsdp", "")), {key.removeprefix("fsdp_"): config[key] for key in config}
        offload = "offload" in words or bool(inner.get("offload_params"))
        four_bit = state.recipe.get("adapter.type") in ("qlora", "qdora")
        quantized = four_bit or state.recipe.get("model.quantization") not in (None, "none")
        state.accelerate = f"fsdp2_8{'_quantized' if quantized else '_offload' if offload else ''}"
        if inner.get("activation_checkpointing"):
            state.recipe["speed.activation_checkpointing"] = "full"
    if state.accelerate and gpus == 1:
        text = "the launch is for several GPUs, and the effective batch size is that of one; add `--gpus N`. "
        own = f"For another number than 8, set `num_processes` in a copy of {state.accelerate}.yaml"
        state.record("differs by default", "--gpus", 1, text + own)
    for key, value in given.items():
        text = f"--accelerate {state.accelerate} on the command line of `finetune train`"
        state.record("translated", key, value, f"{text}; it has the nearest settings")


def _zero(value: object) -> tuple[int | None, bool]:
    """Return the ZeRO stage of a DeepSpeed setting, if it names one, and whether it offloads."""
    if isinstance(value, dict):
        zero = value.get("zero_optimization") or {}
        parts = (zero.get("offload_optimizer"), zero.get("offload_param"))
        offload = any(part.get("device", "none") != "none" for part in parts if isinstance(part, dict))
        return int(zero.get("stage", 0)), offload
    name = Path(str(value).lower()).name
    found = _STAGE.search(name)
    return (int(found[1]) if found else None), "offload" in name
