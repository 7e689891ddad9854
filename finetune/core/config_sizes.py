"""The sizes that a model's config names: no model is built of numbers that none has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LAYERS, PARTS, WIDTH, VOCABULARY, POSITIONS = 1000, 2**14, 2**24, 2**26, 2**32
# The most that a size may be, by the last words of its name; the first that fits holds
_MOST = (
    ("layers", LAYERS),
    ("n_layer", LAYERS),
    ("heads", PARTS),
    ("n_head", PARTS),
    ("experts", PARTS),
    ("vocab_size", VOCABULARY),
    ("hidden_size", WIDTH),
    ("intermediate_size", WIDTH),
    ("state_size", WIDTH),
    ("dim", WIDTH),
    ("rank", WIDTH),
    ("d_model", WIDTH),
    ("d_ff", WIDTH),
    ("d_kv", WIDTH),
    ("n_embd", WIDTH),
    ("n_inner", WIDTH),
    ("n_positions", POSITIONS),
    ("position_embeddings", POSITIONS),
)
# Sizes that are at least 1; others may be 0, where a model lacks the part
_POSITIVE = frozenset(
    {
        "hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
        "vocab_size",
    }
)  # fmt: skip


def problems(entries: Iterable[tuple[str, Any]], path: str, key: str) -> Iterator[Problem]:
    """Sizes that are negative, zero or too large, of the keys and values of a config."""
    for name, value in entries:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        most = next((most for end, most in _MOST if f"_{name}".endswith(f"_{end}")), None)
        if most is None:
            continue
        least = int(name in _POSITIVE)
        if not least <= value <= most:
            what, expected = "a size that no model has", f"from {least:,} to {most:,}"
            yield Problem(what, key, path, f"{name}: {value}"[:200], expected)
