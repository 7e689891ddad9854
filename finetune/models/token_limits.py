"""Find the longest sequence and the largest token id of a model from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.models import tokenizer_setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.schema import Eval

NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")  # names of the limit in configs
UNSCALED = (None, "default", "mrope")  # types of rotary embeddings without scaling


def positions(config: PreTrainedConfig | ModelConfig) -> int | None:
    """Return the number of positions of a model: of its table, or of rotary embeddings without scaling.

    Return `None` if the config has no such limit, or scales the embeddings beyond it.
    """
    text = config.get_text_config()
    if getattr(text, "alibi", None) or _scaled(getattr(text, "rope_parameters", None)):
        return None
    if _scaled(getattr(text, "rope_scaling", None)):
        return None
    found = (getattr(text, name, None) for name in NAMES)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def text_limit(config: PreTrainedConfig) -> int | None:
    """Return how many tokens an evaluation reads at once: `positions`, or the limit of scaled embeddings."""
    return positions(config) or getattr(config.get_text_config(), "max_position_embeddings", None) or None


def batch_limit(config: PreTrainedConfig | ModelConfig) -> int | None:
    """Return the length in tokens at which a sequence begins to change the frequencies of its whole batch.

    transformers chooses the frequencies of `dynamic` and `longrope` embeddings by the longest sequence of a
    batch. `None`: the model has other rotary embeddings.
    """
    text = config.get_text_config()
    return min(_limits(getattr(text, "rope_parameters", None), text), default=None)


def _limits(rope: object, text: Any) -> Iterator[int]:
    """Yield the limit of each kind of layer."""
    if not isinstance(rope, dict):
        return
    kind = rope.get("rope_type", rope.get("type"))
    limits = {
        "dynamic": getattr(text, "max_position_embeddings", None),
        "longrope": rope.get("original_max_position_embeddings"),
    }
    if isinstance(limit := limits.get(str(kind)), int):
        yield limit
    for inner in rope.values():
        yield from _limits(inner, text)


def _scaled(rope: object) -> bool:
    """Return whether the rotary embeddings of at least one kind of layer are scaled.

    Gemma 4's `proportional` embeddings rotate a part of each head. They are scaled only with a `factor`.
    """
    if not isinstance(rope, dict):
        return False
    kind = rope.get("rope_type", rope.get("type"))
    extends = kind not in UNSCALED and not (kind == "proportional" and rope.get("factor", 1.0) == 1.0)
    return extends or any(_scaled(inner) for inner in rope.values())


def apply(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, rows: int) -> str:
    """Limit a tokenizer to the positions and the embeddings of its model.

    Args:
        config: the config of the model.
        rows: the size of its embeddings.

    Returns:
        A note, if the padding token had to change.

    Raises:
        UserError: the token that ends a turn has no embedding (exit 2).
    """
    tokenizer.model_max_length = positions(config) or tokenizer_setup.UNLIMITED
    eos: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    if eos >= rows:
        raise UserError(
            Problem(
                f"the model has no embedding for the tokenizer's eos token {tokenizer.eos_token}",
                "model.name",
                found=f"token id {eos}",
                expected=f"a token id < {rows}",
                fix="use the tokenizer of this model",
                code="token-limit",
            )
        )
    if pad < rows:
        return ""
    own = f"the model has no embedding for the tokenizer's padding token {tokenizer.pad_token} (id {pad})"
    tokenizer.pad_token = tokenizer.eos_token
    return f"{own}, so finetune pads with {tokenizer.eos_token}. Padding is never in the loss"


def room_for_answer(longest_prompt: int, longest: int | None, settings: Eval) -> None:
    """Stop if prompts and answers need more positions than the model has (exit 2).

    Args:
        longest_prompt: number of tokens of the longest prompt.
        longest: number of positions of the model.
    """
    new_tokens = settings.max_new_tokens or 1
    if not (settings.generate and longest and longest_prompt) or longest_prompt + new_tokens <= longest:
        return
    room = longest - longest_prompt
    if room <= 0:
        raise UserError(
            Problem(
                f"a prompt of {longest_prompt} tokens leaves no room for an answer",
                "eval.generate",
                found=f"the model has {longest} positions",
                fix="eval.generate: false",
                code="token-limit",
            )
        )
    raise UserError(
        Problem(
            f"a prompt of {longest_prompt} tokens leaves {room} of the model's {longest} positions",
            "eval.max_new_tokens",
            found=str(new_tokens),
            expected=f"at most {room}",
            fix=f"eval.max_new_tokens: {room}",
            code="token-limit",
        )
    )
