"""`--to mlx`: the names of config.json that mlx-lm reads, and mlx-lm's answers for each family."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoConfig

from finetune.core.errors import UserError
from finetune.export import mlx_export, mlx_families
from finetune.export.export_job import ExportJob
from finetune.export.serving_check import Expected
from support import exports, mlx_models

# mlx-lm's gemma2 has no sliding window, and the tiny model's is shorter than its prompts
FAMILIES = [
    name
    for name, (_, given) in exports.FAMILIES.items()
    if given["model_type"] in mlx_families.FAMILIES and name != "gemma2"
]
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


HALF = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (
            "llama",
            {"rope_parameters": exports.LLAMA3_ROPE},
            {"rope_theta": 500000.0, "rope_type": "llama3", "type": "llama3", "factor": 8.0, "head_dim": 16},
        ),
        ("llama", {"tie_word_embeddings": True}, {"tie_word_embeddings": True, "rope_scaling": None}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_type": "linear", "factor": 8.0},
        ),
        ("gemma3_text", {"layer_types": mlx_models.layers("SSFSSFSS")}, {"sliding_window_pattern": 3}),
        ("cohere2", {"layer_types": mlx_models.layers("SFSFSFSF")}, {"sliding_window_pattern": 2}),
        ("exaone4", {"layer_types": mlx_models.layers("SSSFSSSF")}, {"sliding_window_pattern": "LLLGLLLG"}),
        ("exaone4", {}, {"head_dim": 16, "rope_scaling": None}),
        ("qwen3_next", {"layer_types": mlx_models.layers("LFLF")}, {"full_attention_interval": 2}),
        ("qwen3_moe", {"num_experts": 4}, {"num_experts": 4}),
        ("mamba2", {}, {"intermediate_size": 128}),
        ("gpt_neox", {"rope_parameters": HALF}, {"rotary_emb_base": 2e4, "rotary_pct": 0.5}),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
                "original_max_position_embeddings": 64,
            },
            {"original_max_position_embeddings": 64, "type": "longrope", "long_factor": [2.0] * 8},
        ),
        *(
            (kind, {"rope_parameters": HALF}, {"rope_theta": 2e4, "partial_rotary_factor": 0.5})
            for kind in ("glm4", "glm4_moe", "nemotron", "phi", "phi3", "qwen3_next", "stablelm")
        ),
    ],
)
def test_config_has_the_names_that_mlx_lm_reads(kind, given, expected, tmp_path: Path) -> None:
    config = mlx_models.config_of(kind, **given)
    config.save_pretrained(tmp_path)
    mlx_export.write_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    flat = {**(written.get("rope_scaling") or {}), **written}
    assert {name: flat.get(name, "missing") for name in expected} == expected
    assert _without_type(AutoConfig.from_pretrained(tmp_path)) == _without_type(config)


def _without_type(config: Any) -> dict[str, Any]:
    """The rotary settings as transformers reads them. It ignores `type`."""
    every = getattr(config, "rope_parameters", None) or {}
    parts = every if "full_attention" in every else {"": every}
    return {name: {key: part[key] for key in part if key != "type"} for name, part in parts.items()}


def test_config_of_a_multimodal_model_has_the_names_in_its_text_config(tmp_path: Path) -> None:
    config = _multimodal("mistral3", "mistral", rope_parameters=LINEAR)
    config.save_pretrained(tmp_path)
    mlx_export.write_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    inner = written["text_config"]
    assert inner["rope_theta"] == 1e6 and inner["rope_scaling"]["factor"] == 8.0
    assert inner["tie_word_embeddings"] is config.tie_word_embeddings and written["vocab_size"] == 320


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_answers_as_transformers_for_a_family(family: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    job = exports.job_of(exports.model_of(family, tmp_path / "model"), "f32")
    (tmp_path / "out").mkdir()
    check = mlx_export.write(job, tmp_path / "out")["serving_check"]
    assert check["reader"].startswith("mlx-lm") and check["token_ids"]["different"] == 0
    assert check["answers"]["agree"] and check["loss"]["agree"]


YARN = mlx_models.YARN
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
    "short_factor": [1 + each / 10 for each in range(8)], "long_factor": [1 + each / 10 for each in range(8)],
}  # fmt: skip
LONGER = LONG | {"long_factor": [2.0 + each for each in range(8)], "original_max_position_embeddings": 256}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.1}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_parameters": SCALED | {"rope_type": "dynamic"}, "max_position_embeddings": 64}
ODD = {
    "clip_qkv": 0.5, "final_logit_softcapping": 2.0, "time_step_limit": (0.01, 0.1), "mlp_only_layers": [0],
    "decoder_sparse_step": 2, "moe_layer_freq": 2, "num_experts_per_tok": 1, "topk_method": "greedy",
    "layer_norm_epsilon": 1e-2, "key_multiplier": 0.5, "attention_in_multiplier": 0.5,
}  # fmt: skip
WINDOWS = ("mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2")
USED = {"use_sliding_window": True, "max_window_layers": 0}


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": values}


def _by_layer(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _order(letters: str, **more: Any) -> dict[str, Any]:
    return {"layer_types": mlx_models.layers(letters), "num_hidden_layers": len(letters), **more}


def _refused() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each feature that a family lacks: model type, values, and the feature in the error."""
    for kind, family in mlx_families.FAMILIES.items():
        for key, wanted in family.fixed.items():
            yield kind, {key: ODD.get(key, not wanted)}, f"{key}: "
        config = mlx_models.config_of(kind)
        name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
        yield kind, {name: "relu"}, "the activation relu"
        if not family.head_dim:
            yield kind, {"head_dim": 32}, "head_dim: 32 with 4 heads"
        one = getattr(config, "rope_parameters", None) or {}
        if one and "full_attention" not in one and kind not in ("phi3", "phimoe"):
            theirs = {key: one[key] for key in ("partial_rotary_factor",) if key in one}
            if "linear" not in family.ropes:
                yield kind, _rope(**SCALED, **theirs), "rope scaling of type linear"
            if "yarn" not in family.ropes:
                yield kind, _rope(**YARN, **theirs), "rope scaling of type yarn"
            if "dynamic" not in family.ropes:
                values = {**DYNAMIC["rope_parameters"], **theirs}
                yield kind, {**DYNAMIC, "rope_parameters": values}, "rope scaling of type dynamic"
    for kind in WINDOWS:
        values = {"sliding_window": 16}
        if kind == "qwen2_moe":
            values |= {"use_sliding_window": True, **_order("SS")}
        elif kind.startswith("qwen"):
            values |= USED
        yield kind, values, "a sliding window"


OWN: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v2", _rope(**DEFAULT), "rope scaling of type default"),
    ("deepseek_v3", _rope(**LONG), "rope scaling of type longrope"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "norm_topk_prob: True with one expert per token"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "norm_topk_prob: True with one expert per token"),
    ("glm", _rope(**DEFAULT, partial_rotary_factor=0.5), "partial rotary embeddings"),
    ("gpt_neox", {"intermediate_size": 128}, "intermediate_size: 128, not 4 * hidden_size"),
    ("llama", _rope(**YARN, attention_factor=1.0), "yarn with another factor of the attention"),
    ("llama", _rope(**YARN, mscale=0.7), "yarn with another factor of the attention"),
    ("llama", _rope(**YARN, mscale_all_dim=0.7), "yarn with another factor of the attention"),
    ("qwen3", _rope(**YARN, truncate=False), "yarn with truncate: false"),
    ("qwen3", _rope(**LONGER), "longrope with other factors for short texts"),
    ("phi3", _rope(**LONGER) | {"original_max_position_embeddings": 256}, "factors for short texts"),
    ("phimoe", _rope(**LONGER, **MSCALES), "longrope with other factors for short texts"),
    ("olmo2", _rope(**LONG, factor=2.0), "longrope with another factor of the attention"),
    ("phi3", _rope(**LONG, attention_factor=1.5), "longrope with another factor of the attention"),
    ("llama", _order("SF", sliding_window=16), "this order of sliding and full attention layers"),
    ("cohere2", _order("FSFS"), "this order of sliding and full attention layers"),
    ("cohere2", _order("SSS"), "this order of sliding and full attention layers"),
    ("gemma3_text", _order("SSFF"), "this order of sliding and full attention layers"),
    ("qwen3_next", _order("LFFL"), "this order of sliding and full attention layers"),
    ("exaone4", _order("SSSS"), "this order of sliding and full attention layers"),
    ("olmo3", _order("FFFF"), "this order of sliding and full attention layers"),
    ("smollm3", _order("SSSS", sliding_window=16), "this order of sliding and full attention layers"),
    ("gemma3_text", _by_layer(DEFAULT, SCALED), "rope scaling of the layers with a sliding window"),
    ("olmo3", _by_layer(SCALED, SCALED), "rope scaling of the layers with a sliding window"),
    ("olmo3", _by_layer(DEFAULT, DEFAULT | {"rope_theta": 500.0}), "two values of rope_theta"),
    ("gemma2", {"final_logit_softcapping": None}, "null as softcapping of logits"),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 2}, "mamba_rms_norm with groups"),
    ("falcon_h1", {"mlp_bias": True, "mlp_multipliers": [0.5, 0.7]}, "mlp_bias with mlp_multipliers"),
    ("falcon_h1", {"attention_bias": True, "attention_out_multiplier": 0.5}, "attention_bias with"),
    ("falcon_h1", {"projectors_bias": True, "ssm_out_multiplier": 0.5}, "projectors_bias with"),
    ("falcon_h1", {"mamba_proj_bias": True, "ssm_multipliers": [0.5] * 5}, "mamba_proj_bias with"),
]
REFUSED = [*_refused(), *OWN]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in mlx_models.FAMILIES),
    ("llama", _rope(**SCALED)),
    ("llama", _rope(**exports.LLAMA3_ROPE)),
    ("llama", _rope(**YARN, attention_factor=0.1 * math.log(4.0) + 1)),
    ("llama", _rope(**YARN, mscale=0.7, mscale_all_dim=1.0, beta_fast=16.0, beta_slow=2.0)),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    ("qwen2", DYNAMIC),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, **_order("FF")}),
    ("qwen3", _rope(**LONG)),
    ("mistral", {"sliding_window": 512}),
    ("phi3", _rope(**LONG) | {"original_max_position_embeddings": 64}),
    ("phi3", _rope(**DEFAULT, partial_rotary_factor=0.75)),
    ("phimoe", _rope(**LONG, **MSCALES)),
    ("phi", _rope(**DEFAULT, partial_rotary_factor=0.4)),
    ("glm4", _rope(**DEFAULT, partial_rotary_factor=0.25)),
    ("gpt_neox", _rope(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)),
    ("nemotron", _rope(**SCALED, partial_rotary_factor=0.5) | {"head_dim": 32}),
    ("stablelm", _rope(**DEFAULT, partial_rotary_factor=0.5) | {"use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    ("qwen3_next", _rope(**YARN, partial_rotary_factor=0.5) | _order("LFLF") | {"mlp_only_layers": [0]}),
    ("gemma3_text", _by_layer(YARN, DEFAULT) | _order("SFSF")),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    ("cohere2", _order("SSFSSF")),
    ("exaone4", _order("SFFFSFFF")),
    ("exaone4", _order("FFFF", sliding_window=None, sliding_window_pattern=None)),
    ("olmo3", _by_layer(YARN, DEFAULT) | _order("FSSF")),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0], **_order("SFSF", sliding_window=16)}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("deepseek_v3", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": None}),
    ("deepseek_v3", _rope(**YARN, mscale=0.7, mscale_all_dim=1.0)),
    ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": True}),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0], "tie_word_embeddings": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("mamba2", {"n_groups": 2, "time_step_limit": (0.01, 0.1), "tie_word_embeddings": True}),
    ("falcon_h1", {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "tie_word_embeddings": True}),
    ("falcon_h1", {"ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "mlp_multipliers": [0.5, 0.7]}),
]
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
IMAGES = {"gemma3": "siglip_vision_model", "llava": "clip_vision_model", "mistral3": "pixtral"}
MULTIMODAL = [(whole, text) for whole, texts in mlx_families.MULTIMODAL.items() for text in texts]


def _multimodal(whole: str, text: str, **values: Any) -> Any:
    inner = mlx_models.config_of(text, **values).to_dict()
    vision, more = {**VISION, "model_type": IMAGES[whole]}, {"image_token_index": 7}
    more |= {"mm_tokens_per_image": 4} if whole == "gemma3" else {}
    return AutoConfig.for_model(whole, text_config=inner, vision_config=vision, **more)


def test_check_each_family_has_a_tiny_model() -> None:
    assert set(mlx_models.FAMILIES) == set(mlx_families.FAMILIES)


@pytest.mark.parametrize(("kind", "values"), ACCEPTED)
def test_check_features_that_mlx_lm_has_pass(kind: str, values: dict[str, Any]) -> None:
    mlx_export.check(mlx_models.config_of(kind, **values), "f32")


@pytest.mark.parametrize(("kind", "values", "feature"), REFUSED)
def test_check_a_feature_that_mlx_lm_lacks_is_refused(
    kind: str, values: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UserError) as caught:
        mlx_export.check(mlx_models.config_of(kind, **values), "f32")
    texts = [problem.what for problem in caught.value.problems]
    assert any(text.startswith("MLX export does not support ") and feature in text for text in texts)
    assert {(problem.fix, problem.code) for problem in caught.value.problems} == {("--to vllm", "export")}


@pytest.mark.parametrize("kind", ["deepseek", "gpt2", "gpt_oss", "olmo", "bloom"])
def test_check_a_family_that_mlx_lm_does_not_open_is_refused(kind: str) -> None:
    config = SimpleNamespace(model_type=kind)
    config.get_text_config = lambda: config
    with pytest.raises(UserError, match="does not have this model family"):
        mlx_export.check(cast(Any, config), "f32")


def test_check_a_multimodal_model_needs_its_text_model_in_mlx_lm() -> None:
    for whole, text in MULTIMODAL:
        mlx_export.check(_multimodal(whole, text), "f32")
    with pytest.raises(UserError, match="does not have this model family"):
        mlx_export.check(_multimodal("llava", "qwen2"), "f32")
    with pytest.raises(UserError, match="a sliding window"):
        mlx_export.check(_multimodal("mistral3", "mistral", sliding_window=16), "f32")


@pytest.mark.parametrize(("kind", "values"), ACCEPTED)
def test_mlx_lm_computes_as_transformers(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    assert mlx_models.difference(mlx_models.config_of(kind, **values), tmp_path) < 0.005


@pytest.mark.parametrize(("whole", "text"), MULTIMODAL)
def test_mlx_lm_computes_the_text_model_of_a_multimodal_model(whole: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    assert mlx_models.difference(_multimodal(whole, text), tmp_path) < 0.005


@pytest.mark.parametrize(("kind", "values", "feature"), REFUSED)
def test_mlx_lm_differs_for_a_refused_feature(
    kind: str, values: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm", reason="needs mlx-lm")
    assert mlx_models.difference(mlx_models.config_of(kind, **values), tmp_path) > 0.005, feature


def test_adapter_on_a_folder_without_the_names_of_mlx_lm_has_a_note(tmp_path: Path) -> None:
    """mlx-lm reads the base model's own config.json, in which transformers 5 writes other names."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    expected = Expected([], [], [], [], [], [], None)
    job = ExportJob("a", tmp_path, config, None, expected, "bf16", str(tmp_path))
    (note,) = mlx_export.missing_names(job)
    assert "rope_theta" in note and "remove --adapter" in note
    mlx_export.write_names(tmp_path)
    assert mlx_export.missing_names(job) == []
    assert mlx_export.missing_names(replace(job, base="organization/name")) == []
