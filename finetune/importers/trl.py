"""Translate a config or a command line of `trl sft`.

Source: TRL's SFTConfig, ModelConfig and ScriptArguments.
"""

from __future__ import annotations

from pathlib import Path

from finetune.importers import common
from finetune.importers.translation import DIFFERS, SAME, TRANSLATED, Rule, Translation

TOOL = "TRL"
RULES = {
    "model_revision": Rule("model.revision"),
    "dataset_name": Rule("data.name"),
    "dataset_config": Rule("data.subset"),
    "dataset_train_split": Rule("data.split"),
    "dataset_test_split": Rule(
        reason="set `data.validation` to a file or `data.validation_fraction`", off=(None, "test")
    ),
    "dataset_streaming": Rule("data.streaming"),
    "dataset_text_field": Rule("data.columns", lambda name: {"text": name}),
    "dataset_num_proc": Rule(same=common.NO_EFFECT),
    "max_length": Rule("data.max_length"),
    "max_seq_length": Rule("data.max_length"),
    "packing": Rule("data.packing"),
    "packing_strategy": Rule(reason="finetune packs by best-fit decreasing", off=(None, "bfd")),
    "eval_packing": Rule(same="evaluation never packs"),
    "padding_free": Rule("data.padding_free"),
    "pad_to_multiple_of": Rule(same="padding changes no result"),
    "eos_token": Rule(reason="save another tokenizer into the model's folder"),
    "pad_token": Rule(reason="save another tokenizer into the model's folder"),
    "lora_task_type": Rule(same="finetune trains causal language models"),
    "lora_modules_to_save": Rule("adapter.modules_to_save"),
    "lora_target_parameters": Rule("adapter.target_parameters"),
    "streaming": Rule("data.streaming"),
    **{
        name: Rule(reason="`finetune train --accelerate FILE` takes the settings of the launch")
        for name in (
            "mixed_precision",
            "main_process_*",
            "num_machines",
            "machine_rank",
            "multi_gpu",
            "dynamo_*",
            "gpu_ids",
            "use_fsdp",
            "fsdp_*",
            "use_deepspeed",
            "zero_stage",
            "zero3_*",
            "offload_*",
        )
    },
    "env": Rule(reason="set the variables in the shell"),
    "bnb_4bit_quant_storage": Rule(same=common.NO_EFFECT),
    "ignore_bias_buffers": Rule(same=common.NO_EFFECT),
    "shuffle_dataset": Rule(same="finetune shuffles the examples"),
    "activation_offloading": Rule("speed.offload", lambda on: "activations" if on else "none"),
    "loss_type": Rule(reason="finetune has the nll loss", off=(None, "nll", "chunked_nll")),
    "warmup_ratio": Rule("train.warmup_steps"),
}
OTHER_TRAINERS = {  # a key that SFT does not have -> what the file is for
    "reward_funcs": "GRPO",
    "num_generations": "GRPO",
    "reward_model_name_or_path": "GRPO",
    "max_completion_length": "GRPO",
    "desirable_weight": "KTO",
    "undesirable_weight": "KTO",
    "center_rewards_coefficient": "reward",
    "beta": "preference",
    "precompute_ref_log_probs": "preference",
    "max_prompt_length": "preference",
}
ADAPTER = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from the arguments of `trl sft`."""
    for key, kind in OTHER_TRAINERS.items():
        if state.source.get(key) is not None:
            raise common.not_sft(TOOL, f"{kind} training ({key})", where)
    gpus = _processes(state, gpus)
    _template(state)
    state.move("model_name_or_path", "model.name")
    if mixture := state.take("datasets"):
        names = [
            {
                k: v
                for k, v in {
                    "name": one.get("path"),
                    "subset": one.get("name"),
                    "split": one.get("split"),
                }.items()
                if v
            }
            for one in mixture
        ]
        state.set("data.name", names, "datasets", mixture)
        for number, one in enumerate(mixture):
            for key in one.keys() - {"path", "name", "split"}:
                state.unsupported(
                    f"datasets.{number}.{key}",
                    one[key],
                    "finetune has no such setting for a source; see `data.columns` and `data.name`",
                )
    _adapter(state)
    _loss(state)
    if attention := state.take("attn_implementation"):
        state.record(SAME, "attn_implementation", attention, common.KERNEL)
    on = state.take("gradient_checkpointing", True)
    state.set("speed.activation_checkpointing", "full" if on else "none", "gradient_checkpointing", on)
    common.batch_size(state, ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), gpus)
    common.duration(state)
    common.warmup(state)
    if config := state.take("accelerate_config"):
        _launch(state, str(config))
    common.launch(state, gpus)
    _validation(state)
    _dtype(state)
    mode = state.take("truncation_mode", "keep_start")
    state.unsupported(
        "truncation_mode",
        mode,
        "TRL cuts a longer example; finetune never cuts an answer and skips it; see `data.too_long`",
    )
    if "max_length" in state.source and state.source["max_length"] is None:
        state.unsupported(
            "max_length",
            state.take("max_length"),
            "finetune needs a length; set `data.max_length` to the longest example of `finetune data`",
        )
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state)
    state.finish()


def _adapter(state: Translation) -> None:
    four = state.take("bnb_4bit_quant_type", "nf4")
    if "bnb_4bit_quant_type" in state.given:
        state.record(TRANSLATED, "bnb_4bit_quant_type", four, "see load_in_4bit")
    bits = {four: state.take("load_in_4bit", False), "int8": state.take("load_in_8bit", False)}
    quantized = next((name for name, on in bits.items() if on), "")
    if not state.take("use_peft", False):
        for name in [name for name in state.source if name.startswith(("lora_", "use_dora", "use_rslora"))]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains without use_peft")
        for name in ("load_in_4bit", "load_in_8bit"):
            if state.given.get(name):
                state.unsupported(
                    name, True, "no adapter trains, and finetune trains all weights in full precision"
                )
        state.set("adapter.type", "full", "use_peft", False)
        return
    modules = state.take("lora_target_modules")
    common.lora(state, ADAPTER, quantized)
    for name, size in (("load_in_4bit", four), ("load_in_8bit", "int8")):
        if state.given.get(name):
            state.record(TRANSLATED, name, True, f"model.quantization: {size}")
    if quantized == four and (nested := state.take("use_bnb_nested_quant", False)):
        state.record(SAME, "use_bnb_nested_quant", nested, "finetune has double quantization")
    elif quantized == four:
        state.unsupported(
            "use_bnb_nested_quant",
            False,
            "TRL has no double quantization by default, and finetune always has it",
        )
    state.record(TRANSLATED, "use_peft", True, f"adapter.type: {state.recipe['adapter.type']}")
    for key, theirs, ours in (("r", 16, 16), ("lora_alpha", 32, 32), ("lora_dropout", 0.05, 0.0)):
        state.keep_default(f"adapter.{key}", theirs, ours)
    if modules:
        named = modules if isinstance(modules, list) else modules.split()
        state.set(
            "adapter.target_modules",
            named[0] if named == ["all-linear"] else named,
            "lora_target_modules",
            modules,
        )
    else:
        state.keep_default(
            "adapter.target_modules",
            ["q_proj", "v_proj"],
            "all-linear",
            "PEFT's default for Llama, Qwen and Mistral",
        )
    if not quantized:
        common.keep_unquantized(state)


def _loss(state: Translation) -> None:
    assistant, completion = state.take("assistant_only_loss", False), state.take("completion_only_loss")
    if assistant:
        state.set("data.train_on", "assistant", "assistant_only_loss", True)
    elif completion:
        state.set("data.train_on", "completion", "completion_only_loss", True)
    else:
        if completion is False:
            state.set("data.train_on", "all", "completion_only_loss", False)
        state.keep_default(
            "data.train_on",
            "all",
            "assistant",
            (
                "TRL trains on all tokens of a chat; if the data has the columns prompt and completion, it "
                "trains on the completion, so set `data.train_on: completion`"
            ),
        )
    for name, value in (("assistant_only_loss", assistant), ("completion_only_loss", completion)):
        if value and not any(entry.key == name for entry in state.entries):
            state.record(SAME, name, value, f"data.train_on: {state.recipe['data.train_on']}")


def _defaults(state: Translation) -> None:
    common.keep_trainer_defaults(state, max_length=1024, learning_rate=2e-5)


def _validation(state: Translation) -> None:
    """Translate the settings of evaluation. finetune has no validation set if the recipe names none."""
    if size := state.take("test_split_size"):
        state.set("data.validation_fraction", float(size), "test_split_size", size)
    elif state.given.get("eval_strategy") in ("steps", "epoch"):
        split = state.take("dataset_test_split", "test")
        state.unsupported(
            "dataset_test_split", split, "set `data.validation` to a file or `data.validation_fraction`"
        )
    common.evaluations(state, ("eval_strategy",), ("num_train_epochs", 3.0), 10)


def _dtype(state: Translation) -> None:
    """Record the dtype of the weights. TRL loads them in fp32 by default."""
    name = "torch_dtype" if state.source.get("torch_dtype") else "dtype"
    dtype = str(state.take(name, "float32"))
    is_full, is_quantized = state.recipe["adapter.type"] == "full", "load_in_4bit" in state.given
    if is_full == (dtype == "float32") or is_quantized:
        state.record(SAME, name, dtype, common.LAUNCH)
    elif is_full:
        state.record(DIFFERS, name, dtype, "finetune trains fp32 weights in mixed precision; kept fp32")
    else:
        text = "TRL loads the frozen weights in fp32; finetune loads them in the precision of the launch"
        state.record(DIFFERS, name, dtype, f"{text}, in half the memory; kept finetune's default")


def _launch(state: Translation, config: str) -> None:
    """Translate TRL's launch config, which is a file or a name such as zero3 or fsdp2."""
    name = Path(config).stem
    if "zero" in name:
        state.source["deepspeed"] = name
    elif "fsdp" in name:
        state.source["fsdp"] = name
    text = (
        "see --accelerate" if "zero" in name or "fsdp" in name else "finetune starts one process for each GPU"
    )
    state.record(TRANSLATED if "see" in text else SAME, "accelerate_config", config, text)


def _processes(state: Translation, gpus: int) -> int:
    """Return the number of GPUs that TRL trained on: --gpus, or else the processes of the launch."""
    processes = state.take("num_processes")
    if processes is None and state.source.get("accelerate_config") == "multi_gpu":
        processes = 8  # the number in TRL's own file of this name
    if processes is None or gpus > 1:
        if processes is not None:
            state.record(SAME, "num_processes", processes, "--gpus has priority")
        return gpus
    state.record(TRANSLATED, "num_processes", processes, "see train.effective_batch_size")
    return int(processes)


def _template(state: Translation) -> None:
    """Translate the path of the chat template, which can be a model on the Hub in TRL."""
    if path := state.take("chat_template_path"):
        if str(path).endswith(".jinja"):
            state.set("data.chat_template", path, "chat_template_path", path)
        else:
            state.unsupported(
                "chat_template_path",
                path,
                "save the chat template of this tokenizer to a file, and set `data.chat_template`",
            )
