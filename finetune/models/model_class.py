"""Decide whether finetune can train a checkpoint: a causal language model, alone or in a multimodal model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.models import model_files
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig

GENERATES_TEXT = re.compile(
    r"(ForCausalLM|LMHeadModel|LMHead|ForConditionalGeneration|Decoder)$", re.IGNORECASE
)
# The head or its input is at another place than in the text model of the same family (transformers 5.22)
OTHER_HEAD = ("aya_vision", "mllama")
# Families whose attention always sees later tokens (transformers 5.22)
NOT_CAUSAL = ("cpmant", "xlnet")
# Families whose tokens are audio codes (transformers 5.22)
OF_SOUND = ("moshi", "musicgen", "musicgen_melody")
# Families whose `base_model` is the whole model, so the loss needs all logits (transformers 5.22)
NO_BASE_MODEL = ("llama4", "llama4_text")


def check(config: ModelConfig) -> None:
    """Stop if the config.json of a checkpoint is not of a causal language model (exit 2)."""
    known = {
        **upstream_options.model_classes("CAUSAL_LM"),
        **upstream_options.model_classes("IMAGE_TEXT_TO_TEXT"),
    }
    if config.model_type not in known and getattr(config, "auto_map", None):
        raise UserError(model_files.custom_code(f"auto_map of model_type {config.model_type}"))
    if reason := unsupported(config):
        name = next(iter(getattr(config, "architectures", None) or ()), config.model_type)
        raise UserError(
            Problem(
                f"finetune does not support {name}",
                "model.name",
                found=f"model_type: {config.model_type}",
                fix="use a checkpoint whose config.json names a class that ends in ForCausalLM",
                why=reason,
                code="model-unsupported",
            )
        )


def unsupported(config: ModelConfig) -> str:
    """Return why finetune can't train a checkpoint; the empty string if it can."""
    family, text = config.model_type, config.get_text_config()
    if family in OF_SOUND:
        return "it generates sound, and finetune trains models of text"
    causal = upstream_options.model_classes("CAUSAL_LM").get(family)
    known = causal or upstream_options.model_classes("IMAGE_TEXT_TO_TEXT").get(family)
    named = next(iter(getattr(config, "architectures", None) or ()), known or "")
    if any(getattr(each, "is_encoder_decoder", None) for each in (config, text)):
        return "it is an encoder-decoder model, and finetune trains decoders"
    encodes = family in upstream_options.model_classes("MASKED_LM") or family == "bert-generation"
    if encodes and not getattr(config, "is_decoder", None):
        return "it is an encoder, and finetune trains decoders"
    if not known:
        return f"transformers has no causal language model of {family or 'no model_type'}"
    if family in OTHER_HEAD:
        return "its class computes other logits than its text model"
    if needed := upstream_options.needed_inputs(family, known):
        return f"its forward pass needs {', '.join(needed)} in addition to the text"
    if sees_later_tokens(text):
        return "its attention sees later tokens, and finetune trains causal language models"
    if family in NO_BASE_MODEL:
        return "its class has no submodule without the output head, and finetune's loss needs one"
    headless = re.search(r"Model$", named) and not GENERATES_TEXT.search(named)
    if headless and not has_tied_head(config):
        return "its checkpoint has no output head"
    return (
        ""
        if headless or GENERATES_TEXT.search(named)
        else "its output head is not the head of a language model"
    )


def sees_later_tokens(text: PreTrainedConfig) -> bool:
    """Return whether a text model's attention sees the tokens that it predicts, by its config."""
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    return both_ways or getattr(text, "is_causal", None) is False or text.model_type in NOT_CAUSAL


def has_tied_head(config: ModelConfig) -> bool:
    """Return whether the output head is tied to the embeddings, by the config of the whole model."""
    return bool(getattr(config, "tie_word_embeddings", False))


def auto_class(config: ModelConfig) -> Any:
    """Return the class of transformers that loads a checkpoint with this config.

    Args:
        config: a config object of transformers.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = config.model_type in upstream_options.model_classes("CAUSAL_LM")
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def open_folder(folder: Path, **options: object) -> Any:
    """Load a model that finetune saved with plain transformers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    return auto_class(config).from_pretrained(str(folder), **options)
