"""Configs of other tools that were changed at random. A case is a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import yaml

from finetune.importers import axolotl, common, llamafactory, reading, trl
from support.mutated_inputs import HOSTILE, fuzz

if TYPE_CHECKING:
    from pathlib import Path

DATASETS = [
    {"path": "rows.jsonl", "type": "chat_template", "field_messages": "turns", "roles": {"user": ["human"]}},
    {"path": "json", "data_files": ["a.jsonl"], "type": "alpaca", "message_property_mappings": {"role": "a"}},
]
BASES: dict[str, dict[str, Any]] = {
    "axolotl": {
        **{"base_model": "some/model", "datasets": DATASETS, "test_datasets": [{"path": "held.jsonl"}]},
        **{"adapter": "qlora", "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["q_proj"]},
        **{"micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 2, "learning_rate": 2e-4},
        **{"saves_per_epoch": 2, "warmup_steps": 10, "eval_steps": 20, "special_tokens": {"pad_token": "x"}},
        **{"plugins": ["a.B"], "tokens": ["<a>"], "eot_tokens": ["<b>"], "deepspeed": "zero3.json"},
        **{"chat_template": "chatml", "hub_token": "hf_abcdefghijklmnopqrstuv", "cosine_min_lr_ratio": 0.1},
    },
    "llamafactory": {
        **{"model_name_or_path": "some/model", "stage": "sft", "do_train": True, "dataset": "mine, chats"},
        **{"template": "llama3", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "q_proj,v_proj"},
        **{"cutoff_len": 512, "quantization_bit": 4, "eval_dataset": "mine", "deepspeed": "ds_z3.json"},
        **{"pissa_init": True, "add_tokens": "<a>,<b>", "additional_target": "lm_head", "flash_attn": "fa2"},
    },
    "trl": {
        **{"model_name_or_path": "some/model", "dataset_name": "rows.jsonl", "use_peft": True, "lora_r": 8},
        **{"lora_target_modules": ["q_proj"], "max_length": 512, "packing": True, "max_steps": 10},
        **{"datasets": [{"path": "a/b", "split": "train"}], "dataset_text_field": "text", "eval_steps": 5},
    },
}
INFO = {
    "mine": {"file_name": "rows.jsonl", "columns": {"prompt": "q", "response": "a"}},
    "chats": {"hf_hub_url": "a/b", "formatting": "sharegpt", "tags": {"user_tag": "human"}},
}
FORGED = "x\npublish: {repo: evil/exfil}\n#"
VALUES: list[Any] = [*HOSTILE, *fuzz.ODD, FORGED, "\x1b[2J\u202e", {FORGED: FORGED}, [[["a"]]], [{"path": 1}]]
KEYS = [*common.TRAINER, FORGED, "\x1b]0;a\x07", "wandb_api_key", "config", "datasets", "dataset_dir"]
RULES = {"axolotl": axolotl.RULES, "llamafactory": llamafactory.RULES, "trl": trl.RULES}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{right}: &{right} [{', '.join([f'*{left}'] * 10)}]\n"
    for left, right in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = [
    BOMB,
    "long: &l " + "x" * 100_000 + f"\nall: [{', '.join(['*l'] * 30_000)}]\n",
    "loop: &l [*l]\n",
    "deep: " + "[" * 20_000 + "]" * 20_000 + "\n",
    "deep:\n" + "".join(f"{' ' * n}- \n" for n in range(400)),
    "n: 0x" + "f" * 100_000 + "\n",
    "n: " + "9" * 5000 + "\n",
    "day: 2020-99-99\n",
    "day: 2020-01-01\nset: {? a, ? b}\n",
    "? [a, b]\n: c\n",
    "1: 2\nnull: 3\ntrue: 4\n",
    "x: !!python/object/apply:os.system [touch canary]\n",
    "x: !!binary aGk=\nset: !!set {a, b}\n",
    "x: !!bool maybe\n",
    "<<: {base_model: 1}\n",
    "--- \na: 1\n",
    "%YAML 1.1\n",
    'x: "\\ud800"\n',
    "\x85\u2028: 1\n",
]
COMMANDS = [
    "trl sft --config theirs.yaml",
    "trl sft --config /dev/zero --model_name_or_path a",
    "trl sft --config absent.yaml",
    "trl sft --config pipe.yaml",
    'trl sft --model_name_or_path "a',
    "trl\nsft --model_name_or_path a",
    "# trl sft --model_name_or_path a",
    "trl sft",
    "trl sft --model_name_or_path a --lora_target_modules" + " q" * 100_000,
    "trl sft --model_name_or_path a " + "--" * 5000,
    "trl sft --model_name_or_path $(touch canary) --dataset_name `touch canary`",
    "python scripts/sft.py --model_name_or_path a --dataset_name",
    "trl sft " + "\\ " * 50_000,
    "trl " + " " * 200_000,
]


def write(seed: int, folder: Path) -> list[str]:
    """Write a config into a folder, and return the options of `finetune import` that fit."""
    draw = random.Random(seed)
    tool = draw.choice(list(BASES))
    content = copy.deepcopy(BASES[tool])
    for _ in range(draw.choice([1, 1, 2, 4])):
        draw.choice((*fuzz._CHANGES, *[_value] * 8, *[_key] * 8))(content, draw)
    info = copy.deepcopy(INFO)
    if draw.random() < 0.5:
        _value(info, draw)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    text = yaml.safe_dump(content, allow_unicode=True)
    if draw.random() < 0.2:
        text = draw.choice(TEXTS) + text
    if draw.random() < 0.1:
        text = draw.choice(fuzz._TEXTS)(text, draw)
    if draw.random() < 0.15:
        (folder / "theirs.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        text = f"#!/bin/sh\n{draw.choice(COMMANDS)}\n"
    (folder / "config").write_bytes(text.encode("utf-8", "surrogatepass"))
    return ["--from", tool] if draw.random() < 0.8 else []


def _value(content: Any, draw: random.Random) -> None:
    held, key = fuzz._place(content, draw)
    held[key] = copy.deepcopy(draw.choice(VALUES))


def _key(content: Any, draw: random.Random) -> None:
    """A key that a tool has, or an odd one, with an odd value."""
    key = draw.choice([*KEYS, *RULES[draw.choice(list(RULES))]])
    content[key] = copy.deepcopy(draw.choice(VALUES))


assert set(BASES) == set(reading.TOOLS)
