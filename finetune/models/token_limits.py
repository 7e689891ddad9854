"""What tokens a model takes: how many of them in a row, and which ids. A config says so, without a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.models import tokenizer_setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.schema import Eval

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")  # what families call it
UNSCALED = (None, "default", "mrope")  # rotary embeddings that end where they were trained to


def positions(config: Any) -> int | None:
    """How many tokens a model has positions for: of its table, or of rotary embeddings without scaling.

    `None`: its config names no such limit, or scales beyond it.
    """
    text = config.get_text_config()
    if getattr(text, "alibi", None) or _scaled(getattr(text, "rope_parameters", None)):
        return None
    if _scaled(getattr(text, "rope_scaling", None)):
        return None
    found = (getattr(text, name, None) for name in NAMES)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def text_limit(config: Any) -> int | None:
    """How many tokens of a text an evaluation reads at once: `positions`, or what scaled embeddings name."""
    return positions(config) or getattr(config.get_text_config(), "max_position_embeddings", None)


def _scaled(rope: Any) -> bool:
    """Whether rotary embeddings are scaled, in one of the layers' kinds at least.

    Gemma 4's `proportional` ones rotate a part of each head, and extend nothing without a `factor`.
    """
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type"))
    extends = kind not in UNSCALED and not (kind == "proportional" and rope.get("factor", 1.0) == 1.0)
    return extends or any(_scaled(inner) for inner in rope.values())


def apply(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, rows: int) -> str:
    """Hold a tokenizer to the positions and the embedding of its model.

    Args:
        config: the model's.
        rows: of its embedding.

    Returns:
        A note, if the padding token had to change.

    Raises:
        UserError: the token that ends a turn has no row (exit 2).
    """
    tokenizer.model_max_length = positions(config) or tokenizer_setup.UNLIMITED
    eos: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    if eos >= rows:
        what = f"the tokenizer's eos token {tokenizer.eos_token} has no row in the model's embedding"
        fix = "model.name: a model with its own tokenizer"
        raise UserError(Problem(what, "model.name", found=f"id {eos}", expected=f"< {rows}", fix=fix))
    if pad < rows:
        return ""
    own = f"the tokenizer's padding token {tokenizer.pad_token} has id {pad}"
    tokenizer.pad_token = tokenizer.eos_token
    return f"{own}, and the model's embedding {rows} rows: padding is {tokenizer.eos_token}, without loss"


def room_for_answer(longest_prompt: int, longest: int | None, settings: Eval) -> None:
    """Refuse answers that the model has no positions for (exit 2).

    Args:
        longest_prompt: tokens of the longest prompt that is answered.
        longest: positions of the model.
    """
    asked = settings.max_new_tokens or 1
    if not (settings.generate and longest and longest_prompt) or longest_prompt + asked <= longest:
        return
    room = longest - longest_prompt
    if room <= 0:
        what = f"a prompt of {longest_prompt} tokens leaves none of the model's {longest} positions"
        raise UserError(Problem(f"{what} for an answer", "eval.generate", fix="eval.generate: false"))
    what = f"a prompt of {longest_prompt} tokens leaves {room} of the model's {longest} positions"
    fix, expected = f"eval.max_new_tokens: {room}", f"at most {room}"
    raise UserError(Problem(what, "eval.max_new_tokens", found=str(asked), expected=expected, fix=fix))
