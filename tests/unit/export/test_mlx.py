"""`--to mlx`: the names of config.json that mlx-lm reads, and mlx-lm's answers for each family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from finetune.export import mlx_export
from support import exports

# mlx-lm's gemma2 has no sliding window, and the tiny model's is shorter than its prompts
FAMILIES = [
    name
    for name, (_, given) in exports.FAMILIES.items()
    if given["model_type"] in mlx_export.FAMILIES and name != "gemma2"
]
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"model_type": "llama", "rope_parameters": exports.LLAMA3_ROPE},
            {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0},
        ),
        (
            {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_theta": 1e6},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_type": "linear", "factor": 8.0},
        ),
        ({"model_type": "qwen3_moe", "num_experts": 4}, {"num_experts": 4}),
    ],
)
def test_config_has_the_names_that_mlx_lm_reads(given, expected, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**exports.SIZES, **given})
    config.save_pretrained(tmp_path)
    mlx_export.write_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    flat = {**(written.get("rope_scaling") or {}), **written}
    assert {name: flat.get(name) for name in expected} == expected
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_answers_as_transformers_for_a_family(family: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    job = exports.job_of(exports.model_of(family, tmp_path / "model"), "f32")
    (tmp_path / "out").mkdir()
    check = mlx_export.write(job, tmp_path / "out")["serving_check"]
    assert check["reader"].startswith("mlx-lm") and check["token_ids"]["different"] == 0
    assert check["answers"]["agree"] and check["loss"]["agree"]
