"""Configs that name things as no other family does."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from finetune.autoconfig import memory_estimate
from finetune.core import model_config
from finetune.core.errors import UserError
from finetune.evaluation.scoring import batches
from finetune.models import architecture, model_class, router_loss, token_limits
from finetune.preflight import checker
from finetune.recipe import loader, upstream_options
from finetune.recipe.schema import Eval
from support.architectures import CONFIGS
from support.paths import MODEL, QUICKSTART
from support.soak import soak_except

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
BY_LAYER = {"full_attention": LINEAR, "sliding_attention": DEFAULT}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.GPT2Config(n_positions=64), 64),
        (transformers.OPTConfig(max_position_embeddings=48), 48),
        (transformers.MptConfig(max_seq_len=32), 32),
        (transformers.LlamaConfig(max_position_embeddings=512), 512),
        (transformers.LlamaConfig(max_position_embeddings=512, rope_parameters=LINEAR), None),
        (transformers.Gemma3TextConfig(rope_parameters=BY_LAYER), None),
        (transformers.LlamaConfig(max_position_embeddings=96, rope_parameters=PROPORTIONAL), 96),
        (transformers.FalconConfig(alibi=True), None),
        (transformers.BloomConfig(), None),
        (transformers.MambaConfig(), None),
        (transformers.LlavaConfig(text_config=transformers.LlamaConfig(max_position_embeddings=256)), 256),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)  # fmt: skip
def test_positions_of_each_family_are_its_limit_without_scaling(config, expected) -> None:
    assert token_limits.positions(config) == expected


@pytest.mark.parametrize("entries", [{"pad_token_id": 10**6}, {"attention_bias": True}], ids=str)
def test_check_builds_the_model_of_an_odd_config_and_compares_its_weights(entries, tmp_path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(UserError) as raised:
        checker.check(loader.load(QUICKSTART, [f"model.name={folder}"]))
    assert raised.value.problems[0].key == "model.name"


def test_room_for_answer_beyond_the_positions_names_a_number_that_fits() -> None:
    with pytest.raises(UserError, match=r"eval\.max_new_tokens: 14"):
        token_limits.room_for_answer(50, 64, Eval(max_new_tokens=15))
    token_limits.room_for_answer(50, 64, Eval(max_new_tokens=14))
    with pytest.raises(UserError, match=r"eval\.generate: false"):
        token_limits.room_for_answer(64, 64, Eval(max_new_tokens=1))


def test_batches_row_without_room_stands_alone() -> None:
    assert list(batches([50, 10, 10, 60], 8, room=16, alone=64)) == [[3], [0], [1, 2]]
    assert list(batches([50, 10, 10, 60], 8)) == [[3, 0, 1, 2]]


@pytest.mark.parametrize(
    "config", [transformers.MambaConfig(), transformers.Mamba2Config(), transformers.BltConfig()]
)
def test_widths_config_without_heads_is_estimated(config) -> None:
    assert (
        memory_estimate.kept_gib(config, 64, memory_estimate.Keeps(fused=False, compiled=False, adapted=True))
        >= 0
    )


def test_experts_of_each_spelling_are_counted() -> None:
    spelled = [
        {"num_local_experts": 4},
        {"n_routed_experts": 4},
        {"moe_num_experts": [4, 2]},
        {"ffn_config": {"moe_num_experts": 4}},
        {"num_experts": 4},
    ]
    assert [model_config.experts(SimpleNamespace(**values)) for values in spelled] == [4] * 5
    assert model_config.experts(SimpleNamespace(num_experts=None)) == 0


def test_router_loss_config_without_a_count_names_the_way_out() -> None:
    config = SimpleNamespace(model_type="odd", output_router_logits=False, router_aux_loss_coef=0.001)
    config.get_text_config = lambda: config
    with pytest.raises(UserError, match=r"help: +router_aux_loss_coef: 0\.0"):
        router_loss.check(config, None, "lora")
    router_loss.check(config, 0.0, "lora")


@pytest.mark.parametrize("counted", [True, False], ids=["with counts", "without counts"])
def test_router_loss_of_a_mixture_without_routers_is_zero_and_said(counted) -> None:
    """Jamba with one expert, Granite 4.0 micro and dense Doge have a coefficient and no router."""
    counts = {"num_experts": 4, "num_experts_per_tok": 2} if counted else {}
    config = SimpleNamespace(
        model_type="dense", output_router_logits=False, router_aux_loss_coef=0.001, **counts
    )
    config.get_text_config = lambda: config
    assert router_loss.check(config, None, "lora", 0).startswith("train.router_aux_loss_coef: 0, because")
    assert not router_loss.check(config, 0.0, "lora", 0)
    with pytest.raises(UserError, match="the base model has no router"):
        router_loss.check(config, 0.1, "lora", 0)


def test_router_loss_of_trl_leaves_the_config_as_it_was() -> None:
    config = transformers.GraniteMoeConfig(num_local_experts=4)
    own = config.to_dict()
    before = router_loss.count_experts(config)
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5  # TRL does
    router_loss.restore(config, before)
    assert config.to_dict() == own and not hasattr(config, "num_experts")


def test_runs_in_python_classes_of_both_kinds_are_told_apart() -> None:
    python = ("ByT5Tokenizer", "BioGptTokenizer", "CTRLTokenizer", "GPTSw3Tokenizer", "BertTokenizerLegacy")
    rust = ("Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2Tokenizer", "")
    assert all(map(upstream_options.runs_in_python, python))
    assert not any(map(upstream_options.runs_in_python, rust))


@pytest.mark.parametrize(
    ("named", "family", "reason"),
    [
        ("LlamaForCausalLM", "llama", ""),
        ("LlamaForSequenceClassification", "llama", "not the head of a language model"),
        ("GPT2LMHeadModel", "gpt2", ""),
        ("Blip2ForConditionalGeneration", "blip-2", "needs pixel_values"),
        ("LlavaForConditionalGeneration", "llava", ""),
        ("Kosmos2ForConditionalGeneration", "kosmos-2", "needs pixel_values"),
        ("Molmo2ForConditionalGeneration", "molmo2", "needs mm_token_type_ids"),
        ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", "needs past_key_values"),
        ("Gemma4ForConditionalGeneration", "gemma4", ""),
        ("MusicgenForCausalLM", "musicgen", "generates sound"),
        ("MusicgenMelodyForConditionalGeneration", "musicgen_melody", "generates sound"),
        ("MoshiForConditionalGeneration", "moshi", "generates sound"),
        ("WhisperForConditionalGeneration", "whisper", "encoder-decoder"),
        ("RobertaForMaskedLM", "roberta", "an encoder"),
        ("CLIPModel", "clip", "no causal language model"),
        ("MllamaForConditionalGeneration", "mllama", "other logits"),
        ("Llama4ForCausalLM", "llama4_text", "output head"),
        ("BertGenerationDecoder", "bert-generation", "an encoder"),
        ("XLNetLMHeadModel", "xlnet", "sees later tokens"),
        ("CpmAntForCausalLM", "cpmant", "sees later tokens"),
    ],
)
def test_unsupported_of_each_kind_of_checkpoint_says_why(named, family, reason) -> None:
    found = model_class.unsupported(architecture.as_config({"model_type": family, "architectures": [named]}))
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
        ("llama", {"is_causal": False}),
    ],
)
def test_unsupported_config_with_attention_both_ways_says_why(family: str, keys: dict[str, Any]) -> None:
    raw = {"model_type": family}
    assert "sees later tokens" in model_class.unsupported(architecture.as_config({**raw, **keys}))
    assert not model_class.unsupported(architecture.as_config(raw))
    vision = {"use_bidirectional_attention": "vision"} if family == "gemma4_text" else {}
    assert not model_class.unsupported(architecture.as_config({**raw, **vision}))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of GPTBigCode
@pytest.mark.parametrize(
    "family", soak_except(["llama", "gemma3_text", "gpt2", "mamba", "bloom"], sorted(CONFIGS))
)
def test_supported_model_does_not_see_later_tokens(family: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    assert not model_class.unsupported(config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    one, other = torch.arange(3, 15)[None], torch.arange(3, 15)[None]
    other[0, -1] = 40
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (one, other)]
    assert torch.allclose(*logits, atol=1e-5)
