"""Tiny models of several families with tokenizers of their own, as jobs of an export."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from finetune.core import model_config
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.export import gguf_tokenizer, serving_check
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import Expected
from support.paths import DATA, MODEL

QUICKSTART_TOKENIZER = MODEL / "tokenizer.json"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] }}"
    "{{ '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name -> tokenizer, config
    "llama": ("llama3", {"model_type": "llama", "tie_word_embeddings": False}),
    "llama_tied": ("chatml", {"model_type": "llama", "tie_word_embeddings": True}),
    "llama_wide": (
        "chatml",
        {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8},
    ),
    "llama_rope": ("llama3", {"model_type": "llama", "rope_parameters": LLAMA3_ROPE}),
    "llama_linear": (
        "chatml",
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
        },
    ),
    "llama_bias": ("chatml", {"model_type": "llama", "attention_bias": True}),
    "mistral": ("spm", {"model_type": "mistral", "sliding_window": None, "head_dim": 16}),
    "qwen2": (
        "chatml",
        {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2_yarn": (
        "chatml",
        {
            "model_type": "qwen2",
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("chatml", {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"model_type": "gemma", "head_dim": 16}),
    "gemma2": (
        "gemma",
        {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    ),
    "gemma3": (
        "gemma",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "num_hidden_layers": 6,
        },
    ),
    "phi3": ("spm", {"model_type": "phi3", "sliding_window": None}),
    "olmo2": ("gpt2", {"model_type": "olmo2"}),
    "granite": (
        "digits",
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("llama3", {"model_type": "smollm3", "num_hidden_layers": 4}),
    "mixtral": (
        "spm",
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": ("chatml", {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **EXPERTS}),
    "qwen2_moe": (
        "chatml",
        {
            "model_type": "qwen2_moe",
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 64,
            **EXPERTS,
        },
    ),
    "olmoe": (
        "gpt2",
        {
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
_SPLITS = {
    "chatml": gguf_tokenizer.WORDS + r"\p{N}" + gguf_tokenizer.REST,
    "llama3": gguf_tokenizer.WORDS + r"\p{N}{1,3}" + gguf_tokenizer.REST,
}
_SPECIAL = {
    "chatml": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, {"eos_token": "<|im_end|>"}),
    "gpt2": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, {"eos_token": "<|im_end|>"}),
    "digits": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML, {"eos_token": "<|im_end|>"}),
    "llama3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "spm": (
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        LLAMA2,
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "gemma": (
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        GEMMA,
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>"},
    ),
}


@cache
def chats() -> list[Example]:
    """The first validation chats of the quickstart, and some with unusual text."""
    rows = [json.loads(line)["messages"] for line in (DATA / "test.jsonl").read_text().splitlines()[:5]]
    for text in ("It's  12345 pears,   isn't it?\n\n  Yes!", "Żółć 🦙 — naïve ٣٤\t{'a': [1,2]}"):
        rows.append([{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}])
    rows.append([{"role": "system", "content": "Be short."}, *rows[0]])
    return [Example("-", messages=messages) for messages in rows]


@cache
def tokenizer_of(kind: str) -> Any:
    """Train a small tokenizer of a kind on the quickstart's data."""
    special, template, named = _SPECIAL[kind]
    lines = (DATA / "train.jsonl").read_text().splitlines()[:300]
    by_bytes = kind not in ("spm", "gemma")
    made = Tokenizer(models.BPE(byte_fallback=not by_bytes, unk_token=None if by_bytes else "<unk>"))
    options: dict[str, Any] = {"vocab_size": 700, "special_tokens": special, "show_progress": False}
    if by_bytes:
        first: list[Any] = [pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")] if kind in _SPLITS else []
        first += [pre_tokenizers.Digits(individual_digits=True)] if kind == "digits" else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in _SPLITS)
        made.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
        made.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        steps = [normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(
            steps if kind == "gemma" else [normalizers.Prepend("▁"), *steps]
        )
        options["special_tokens"] = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        lines = [line.replace(" ", "▁") for line in lines]
    if not by_bytes:
        made.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+"), "isolated")
    made.train_from_iterator(lines, trainers.BpeTrainer(**options))
    if not by_bytes:
        made = _as_sentencepiece(made, special)
    found = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **named)
    found.add_special_tokens({"additional_special_tokens": [AddedToken(word) for word in special]})
    return found


def _as_sentencepiece(made: Tokenizer, special: list[str]) -> Tokenizer:
    """Bytes are no special tokens, and the text is not split before it is merged."""
    content = json.loads(made.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(content))


def model_of(family: str, folder: Path) -> Path:
    """Save a random model of a family with its tokenizer. Its weights are large, so its answers vary."""
    kind, given = FAMILIES[family]
    tokenizer = tokenizer_of(kind)
    known = {
        "pad_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    options = {**SIZES, "vocab_size": len(tokenizer) + 3, **known, **given}
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(3 if "embed" not in name else 10)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def job_of(folder: Path, quantize: str = "f16", name: str = "tiny") -> ExportJob:
    """The job of exporting a saved model, with what transformers answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(example.messages[:-1], tokenize=False, add_generation_prompt=True)
        for example in chats()
        if example.messages
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    stops = [tokenizer.eos_token_id]
    answers, logits = serving_check.answers(model, prompts[: serving_check.ANSWERS], stops, 8)
    documents = [Encoded(ids, [(len(ids) - 8, len(ids))]) for ids in prompts]
    loss = serving_check.mean(serving_check.losses_of(model, documents))
    routed = model_config.experts(model.config.get_text_config()) > 1
    expected = Expected(chats(), prompts, answers, logits, stops, documents, loss, routed)
    return ExportJob(name, folder, model.config, tokenizer, expected, quantize, str(folder))
