"""Recipes and model configs that were changed at random, toward what hangs, fills memory or reaches out.

A case is a seed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from typing import TYPE_CHECKING, Any

from support.paths import MODEL
from support.scripts import module_of

if TYPE_CHECKING:
    from pathlib import Path

fuzz = module_of("benchmarks", "fuzz")

EXAMPLE = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
LORA = {"type": "lora", "r": 4, "target_modules": ["q_proj"]}
ADAPTERS: list[dict[str, Any]] = [
    {**LORA, "rank_pattern": {"layers.0.self_attn.q_proj": 8}, "alpha_pattern": {"q_proj": 4}},
    {**LORA, "modules_to_save": ["lm_head"], "layers_to_transform": [0], "layers_pattern": "layers"},
    {**LORA, "target_modules": r".*\.(q|v)_proj", "exclude_modules": ["k_proj"]},
    {"type": "dora", "target_modules": "all-linear"},
    {"type": "adalora", "target_r": 4, "init_r": 6},
    {"type": "ia3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    {"type": "prompt_tuning", "num_virtual_tokens": 4},
    {"type": "full"},
]
SECTIONS: list[dict[str, Any]] = [
    {},
    {"eval": {"tasks": ["task.yaml"], "eval_steps": 5, "forgetting": "texts.txt"}},
    {"speed": {"activation_checkpointing": "norms", "compile": False}, "publish": {"repo": "a/b"}},
    {"train": {"learning_rate": 1e-3, "max_steps": 5, "output_dir": "run", "report_to": "none"}},
]
PATTERNS = [
    r"((\w|\.)+)+#",
    ".*" * 12 + "#",
    "(.|.)" * 30 + "#",
    "(" * 5000,
    "[" * 500,
    "(?i)[\0-\uffff]" * 99,
]
PATHS = [
    "/dev/zero",
    "/dev/stdin",
    "/",
    "/*/*/*/*/*/*/*/*",
    "/**/*",
    "~root",
    "a\0b",
    "../../../etc/passwd",
    "http://127.0.0.1:9/a",
    "hf://datasets/a/b",
    "file:///etc/hosts",
    "https://127.0.0.1:9/a.jsonl",
    "*/" * 3000,
    "[a]" * 3000,
    "k" * 70_000,
    "evil/model@main",
    "data/*.jsonl",
    ".",
    "",
    "pipe.jsonl",
    "\udcff",
    "\u202egnp.a",
]
HOSTILE: list[Any] = [*PATTERNS, *PATHS, 10**9, 10**12, 10**30, -5, 1e308, [0] * 4000, ["q_proj"] * 4000]
HOSTILE += [
    [f"k{number}" for number in range(4000)],
    {f"k{number}": 1 for number in range(2000)},
    [[0, 10**9]],
]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 4096}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **SMALL, "num_key_value_heads": 2},
    {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SMALL, "num_key_value_heads": 2},
    {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **SMALL, "num_key_value_heads": 2},
    {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **SMALL, "num_local_experts": 4},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2},
    {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **SMALL},
]
CONFIG_VALUES: list[Any] = [
    *PATTERNS,
    *PATHS[:12],
    10**9,
    10**12,
    10**30,
    2**31,
    2**63,
    -1,
    -5,
    0,
    0.5,
    3,
    7,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "x",
    "silu",
    "float16",
    [],
    {},
    [0],
    [10**9],
    [None],
    {"a": 1},
    [[1]] * 3000,
]
QUANTIZED = {"quant_method": "fp8", "modules_to_not_convert": [PATTERNS[0]], "ignore": [f"re:{PATTERNS[0]}"]}
CONFIG_KEYS: dict[str, Any] = {
    "quantization_config": QUANTIZED,
    "rope_scaling": {"rope_type": "yarn", "factor": 1e9},
    "auto_map": {"AutoModel": "evil.M"},
    "attn_implementation": "evil/kernel",
    "dtype": "float99",
    "layer_types": ["full_attention"] * 9,
    "text_config": {},
    "sliding_window": -1,
    "head_dim": 0,
    "num_key_value_heads": 3,
    "pad_token_id": 10**9,
    "architectures": ["Evil"],
    "model_type": "evil",
    "tie_word_embeddings": "x",
    "rope_parameters": {"rope_theta": -1},
    "rope_theta": 0,
    "torch_dtype": "os.system",
    "id2label": {str(number): "x" for number in range(5000)},
    "num_labels": 10**9,
    "transformers_version": [1],
    "is_encoder_decoder": True,
    "chunk_size_feed_forward": 10**9,
    "base_model_tp_plan": {"a": "b"},
    "n_layer": 10**9,
    "hidden_act": "evil",
    "initializer_range": "x",
    "max_position_embeddings": 10**18,
    "bos_token_id": "x",
}


def make_folder(folder: Path) -> None:
    """The files that the recipes name: a dataset, a task, texts, and a pipe."""
    lines = f"{json.dumps(EXAMPLE)}\n" * 6
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text(lines)
    (folder / "rows.jsonl").write_text('{"q": "1+1?", "a": "2"}\n' * 3)
    (folder / "task.yaml").write_text(
        'data: rows.jsonl\nkind: exact_match\nprompt: "{{ q }}"\nanswer: "{{ a }}"\n'
    )
    (folder / "texts.txt").write_text("One text.\n" * 5)
    os.mkfifo(folder / "pipe.jsonl")


def recipe(draw: random.Random, model: str = str(MODEL)) -> dict[str, Any]:
    data: dict[str, Any] = {"name": "data/train.jsonl", "max_length": 128}
    found = {
        "model": {"name": model},
        "data": data,
        "adapter": draw.choice(ADAPTERS),
        **draw.choice(SECTIONS),
    }
    found.setdefault("train", {"learning_rate": 1e-3, "max_steps": 5})
    return copy.deepcopy(found)


def write_recipe(seed: int, folder: Path) -> Path:
    draw = random.Random(seed)
    content = recipe(draw)
    for _ in range(draw.choice([1, 1, 1, 2, 2, 4])):
        draw.choice((*fuzz._CHANGES, *[_hostile_value] * 8, *[_hostile_key] * 4))(content, draw)
    try:
        text = fuzz._dump(content, draw)
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON writes as an escape
        text = json.dumps(content)
    if draw.random() < 0.1:
        text = draw.choice(fuzz._TEXTS)(text, draw)
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def _hostile_value(content: Any, draw: random.Random) -> None:
    held, key = fuzz._place(content, draw)
    held[key] = copy.deepcopy(draw.choice(HOSTILE))


def _hostile_key(content: Any, draw: random.Random) -> None:
    """A key that finetune knows, where it may not belong, or an odd one."""
    holders = [held for held, _ in fuzz._places(content) if isinstance(held, dict)]
    name = draw.choice([*fuzz._names(), *PATHS])
    draw.choice(holders or [content])[name] = copy.deepcopy(draw.choice(HOSTILE))


def write_model(seed: int, folder: Path) -> Path:
    """A recipe and the model that it names, with a changed config; returns the recipe."""
    draw = random.Random(seed)
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    os.link(MODEL / "model.safetensors", model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config = draw.choice([config, config, copy.deepcopy(draw.choice(FAMILIES))])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        draw.choice((_config_value, _config_value, _config_key, fuzz._drop))(config, draw)
    (model / "config.json").write_text(json.dumps(config))
    if draw.random() < 0.3:
        path = model / draw.choice(["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
        content = json.loads(path.read_text())
        _config_value(content, draw)
        path.write_text(json.dumps(content))
    (folder / "recipe.yaml").write_text(json.dumps(recipe(draw, str(model))))
    return folder / "recipe.yaml"


def _config_value(content: Any, draw: random.Random) -> None:
    held, key = fuzz._place(content, draw)
    held[key] = copy.deepcopy(draw.choice(CONFIG_VALUES))


def _config_key(content: Any, draw: random.Random) -> None:
    key = draw.choice(list(CONFIG_KEYS))
    content[key] = copy.deepcopy(
        draw.choice([CONFIG_KEYS[key], CONFIG_KEYS[key], draw.choice(CONFIG_VALUES)])
    )
