"""Tiny models of many architectures in folders, with a few chats to train them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer

from support.paths import MODEL

CHATS = (
    ("Hi there", "Hello."),
    ("One plus one?", "Two."),
    ("Once upon a time", "there was a little girl."),
    ("Name a color", "Blue, the color of the sky."),
)
LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def sizes(**more: Any) -> dict[str, Any]:
    """A config's values for two layers, with the vocabulary of the embedded model."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**wide, "vocab_size": len(tokenizer), "max_position_embeddings": 512, **special, **more}


def save(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    """A model with random weights large enough that its parts matter, and a tokenizer."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv" not in name and "A_log" not in name:
            parameter.data.normal_(0, 0.08)
    model.save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(MODEL)).save_pretrained(folder)
    return folder


def rows(path: Path, chats: Any = CHATS) -> Path:
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in chats
    ]
    path.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in turns))
    return path


def recipe(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """A recipe of two steps in `folder`; `sections` add to its own."""
    data = folder / "rows.jsonl"
    raw: dict[str, dict[str, Any]] = {
        "model": {"name": str(model)},
        "data": {"name": str(data if data.exists() else rows(data)), "max_length": 64},
        "adapter": dict(LORA),
        "train": {"learning_rate": 0.01, "effective_batch_size": 2, "max_steps": 2},
        "eval": {"forgetting": False, "generate": False},
    }
    raw["train"]["output_dir"] = str(folder / "run")
    for name, values in sections.items():
        raw[name] = values if name == "adapter" else {**raw.get(name, {}), **values}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path
