"""Translate a config or a command line of `trl sft`.

Source: TRL's SFTConfig, ModelConfig and ScriptArguments.
"""

from __future__ import annotations

from finetune.importers import common
from finetune.importers.translation import SAME, TRANSLATED, Rule, Translation

TOOL = "TRL"
OTHERS = ("dpo", "kto", "grpo", "rloo", "reward", "orpo", "cpo", "ppo", "online-dpo")
RULES = {
    "model_revision": Rule("model.revision"),
    "dtype": Rule(same=common.LAUNCH),
    "torch_dtype": Rule(same=common.LAUNCH),
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
    "truncation_mode": Rule(same="finetune skips longer examples; see `data.too_long`"),
    "chat_template_path": Rule("data.chat_template"),
    "eos_token": Rule(reason="save another tokenizer into the model's folder"),
    "pad_token": Rule(reason="save another tokenizer into the model's folder"),
    "lora_task_type": Rule(same="finetune trains causal language models"),
    "lora_modules_to_save": Rule("adapter.modules_to_save"),
    "lora_target_parameters": Rule("adapter.target_parameters"),
    "bnb_4bit_quant_type": Rule(same="finetune uses nf4"),
    "use_bnb_nested_quant": Rule(same="finetune uses double quantization"),
    "bnb_4bit_quant_storage": Rule(same=common.NO_EFFECT),
    "ignore_bias_buffers": Rule(same=common.NO_EFFECT),
    "shuffle_dataset": Rule(same="finetune shuffles the examples"),
    "activation_offloading": Rule("speed.offload", lambda on: "activations" if on else "none"),
    "loss_type": Rule(reason="finetune has the nll loss", off=(None, "nll", "chunked_nll")),
    "eval_strategy": Rule(same="`eval.eval_steps` sets evaluations during training"),
    "eval_steps": Rule("eval.eval_steps", int),
    "warmup_ratio": Rule("train.warmup_steps"),
}
ADAPTER = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def translate(state: Translation, where: str, gpus: int) -> None:
    """Fill a translation from the arguments of `trl sft`."""
    model = state.take("model_name_or_path")
    state.set("model.name", model, "model_name_or_path", model)
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
    _adapter(state)
    _loss(state)
    attention = state.take("attn_implementation")
    if attention:
        state.record(
            SAME,
            "attn_implementation",
            attention,
            "`model.attention: auto` chooses the fastest kernel that runs here",
        )
    on = state.take("gradient_checkpointing", True)
    state.set("speed.activation_checkpointing", "full" if on else "none", "gradient_checkpointing", on)
    common.batch_size(state, ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1), gpus)
    if int(state.source.get("max_steps") or -1) == -1:
        state.source.pop("max_steps", None)
    else:
        state.source.pop("num_train_epochs", None)
    for key in ("deepspeed", "fsdp", "fsdp_config"):
        if value := state.take(key):
            common.launch(state, key, value, gpus)
    state.apply(RULES)
    common.trainer_arguments(state)
    _defaults(state)
    state.finish()


def _adapter(state: Translation) -> None:
    bits = {"nf4": state.take("load_in_4bit", False), "int8": state.take("load_in_8bit", False)}
    quantized = next((name for name, on in bits.items() if on), "")
    if not state.take("use_peft", False):
        for name in [name for name in state.source if name.startswith("lora_")]:
            state.record(SAME, name, state.source.pop(name), "no adapter trains without use_peft")
        state.set("adapter.type", "full", "use_peft", False)
        return
    modules = state.take("lora_target_modules")
    common.lora(state, ADAPTER, quantized)
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
        why = (
            "TRL trains on all tokens of a chat; it trains on the completion only if the data has that column"
        )
        state.keep_default("data.train_on", "all", "assistant", why)


def _defaults(state: Translation) -> None:
    common.keep_trainer_defaults(state, max_length=1024, learning_rate=2e-5)
