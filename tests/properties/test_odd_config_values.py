"""`check` accepts a config.json with an odd value exactly if the model runs with it.

Transformers reads many values only when it builds a model or runs it: types of rotary positions, activations,
types of layers, dropout rates. A run would end there, so `check` must know.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.core.errors import UserError
from finetune.models import architecture, corrections, meta_forward, model_class, module_lists
from support.architectures import CONFIGS
from support.odd_configs import ODD_VALUES, OddValue, with_odd_value

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = sorted(json.loads(module_lists.SHIPPED.read_text())["families"])
CELLS = [(family, odd) for family in FAMILIES for odd in ODD_VALUES]
# A run loads the weights, so that it does not read `initializer_range`
OTHERS = [
    (family, odd)
    for family in sorted(CONFIGS.keys() - {*FAMILIES, *meta_forward.READ_VALUES, *model_class.NOT_CAUSAL})
    for odd in ODD_VALUES
    if odd.key != "initializer_range"
    and (family, odd) != ("xglm", OddValue("return_dict", None))  # its head asks its own config for the form
    and (family, odd.key)
    != ("rwkv", "hidden_size")  # `check` does not compare it with `attention_hidden_size`
]
# With their tiny configs, also without an odd value
FAIL_WITH_A_CACHE = ("nemotron_h", "xlstm", "zamba", "zamba2")
SAMPLE = 15  # in CI, others each time; `make soak` takes all
SEED = int(os.environ.get("FINETUNE_CELLS_SEED") or time.time())
REPORTED = (
    ("llama", OddValue("rope_scaling", {"type": "none"})),
    ("llama", OddValue("hidden_act", "none")),
    ("qwen3", OddValue("layer_types", ["full_attention", "none"])),
    ("gemma2", OddValue("rope_parameters", {"rope_type": "linear"})),
    ("gpt2", OddValue("activation_function", "swiglu")),
    ("llama", OddValue("pad_token_id", 500)),
    ("mistral", OddValue("num_key_value_heads", 3)),
    ("qwen2", OddValue("attention_dropout", 2.0)),
    ("llama", OddValue("torch_dtype", "none")),
    ("llama", OddValue("use_cache", None)),
    ("gemma2", OddValue("cache_implementation", 5)),
    ("mistral", OddValue("layer_types", ["linear_attention", "full_attention"])),
)


def by_check(folder: Path, raw: dict[str, Any]) -> str:
    """Why `check` refuses a config; the empty string if it accepts."""
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    try:
        config = architecture.config_in(path)
        model_class.check(config)
        module_lists.read(path, config)
    except UserError as error:
        return f"{error.problems[0].what} [{error.problems[0].found}]"
    return ""


def by_run(folder: Path) -> str:
    """Why the model does not train one step or generate; the empty string if it does both."""
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        corrections.choose_experts(model)
        ids = torch.arange(3, 15)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if config.model_type not in FAIL_WITH_A_CACHE:
            with torch.no_grad():
                model.eval()(input_ids=ids, use_cache=True)
    except Exception as error:  # of any kind
        return f"{type(error).__name__}: {error}"
    return ""


def disagreement(family: str, odd: OddValue, folder: Path) -> str:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    raw = json.loads(config.to_json_string(use_diff=False))
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # only errors count here
            check, run = by_check(folder, with_odd_value(raw, odd)), by_run(folder)
    finally:
        logging.disable(logging.NOTSET)
    if bool(check) == bool(run):
        return ""
    return f"{family}, {odd.key}: {odd.value!r}\n  check: {check or 'accepts'}\n  run: {run or 'accepts'}"


def disagreements(cells: list[tuple[str, OddValue]], folder: Path) -> str:
    return "\n".join(filter(None, (disagreement(*cell, folder) for cell in cells)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("family", "odd"), REPORTED)
def test_check_of_an_odd_config_refuses_what_the_model_class_refuses(
    family: str, odd: OddValue, tmp_path: Path
) -> None:
    assert disagreement(family, odd, tmp_path) == ""
    assert by_check(tmp_path, json.loads((tmp_path / "config.json").read_text()))


def test_check_of_sampled_odd_configs_agrees_with_the_model_class(tmp_path: Path) -> None:
    print(f"FINETUNE_CELLS_SEED={SEED}")
    cells = [cell for every in (CELLS, OTHERS) for cell in random.Random(SEED).sample(every, SAMPLE)]
    assert disagreements(cells, tmp_path) == "", f"FINETUNE_CELLS_SEED={SEED}"


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted({family for family, _ in [*CELLS, *OTHERS]}))
def test_check_of_every_odd_config_agrees_with_the_model_class(family: str, tmp_path: Path) -> None:
    assert disagreements([cell for cell in [*CELLS, *OTHERS] if cell[0] == family], tmp_path) == ""


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("llama", {
            "rope_theta": 500000.0, "eos_token_id": [1, 2], "torch_dtype": "bfloat16", "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        }),
        ("qwen2", {"max_window_layers": 28, "sliding_window": 131072, "use_mrope": False, "rope_theta": 1e6}),
        ("qwen3", {"rope_scaling": None, "use_sliding_window": False, "max_window_layers": 36}),
        ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
        ("gemma2", {
            "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
        }),
        ("gemma3_text", {"rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window_pattern": 6}),
        ("phi3", {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "sliding_window": 2047}),
        ("gpt2", {"task_specific_params": {"text-generation": {"do_sample": True}}, "n_ctx": 1024}),
        ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16"}),
        ("smollm3", {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}),
    ],
)  # fmt: skip
def test_published_config_of_a_family_is_read_without_the_model(
    family: str, published: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    raw = {**json.loads(config.to_json_string()), **published}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert module_lists.read(path, architecture.config_in(path)).source == "the list of its family"
