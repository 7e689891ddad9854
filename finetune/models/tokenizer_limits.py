"""Check that a tokenizer's patterns are fast and that it does not expand texts without limit.

The tokenizers library runs in Rust and can't be interrupted. It stops a pattern after 10 million steps at
each position of a text, and a text has thousands of positions.
"""

from __future__ import annotations

import json
import string
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from finetune.core import pattern_time
from finetune.core.errors import Problem, UserError
from finetune.data.text_changes import state, steps, writes_other_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# CPU time for each pattern. Usual patterns take 0.1 s
SECONDS = 0.5
# Characters of the texts with which the patterns are tried
LONG_RUN = 20_000
MOST_STEPS, MOST_PATTERNS, LONGEST_PATTERN = 50, 50, 10_000
# Characters that a tokenizer may write for one character
MOST_GROWTH = 100
# Tokens that a post-processor may add to a text
MOST_ADDED = 1000
# The library allocates memory for each id up to the largest one
LARGEST_ID = 10_000_000
# Characters of an entry of a Unigram vocabulary. The library tries each entry at each position of a text
LONGEST_PIECE = 256
# Characters of a word. WordPiece tries each beginning of a word
LONGEST_WORD = 1000
# Patterns that are known to be fast: those of the shipped model, Llama 3 and Qwen 2
_KNOWN = frozenset(
    {
        r"\n|\d| +|\p{L}+|[^\s\d\p{L}]+|\s",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_RUNS = ("a", "A", "1", " ", "\n", ".", "-", "'", "_", "é", "中", "aA1 .", "ab")
_TRY = """
import json, signal, sys
from tokenizers import Regex, pre_tokenizers
patterns, texts, seconds = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print(number, flush=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in texts:
        split.pre_tokenize_str(text)
print(len(patterns))
"""


def check(backend: Tokenizer, name: str) -> None:
    """Stop if a tokenizer takes too long or needs too much memory (exit 2).

    Args:
        backend: a tokenizer of the tokenizers library.
        name: the name of the model, for messages.
    """
    if (largest := max(backend.get_vocab().values(), default=0)) > LARGEST_ID:
        raise UserError(
            Problem(
                "the tokenizer has an id that is too large",
                "model.name",
                where=name,
                found=f"{largest:,}",
                expected=f"at most {LARGEST_ID:,}",
                fix="name another checkpoint in model.name",
                why="finetune keeps a table of all ids",
                code="tokenizer",
            )
        )
    ids = backend.get_vocab(with_added_tokens=False)
    if (shared := len(ids) - len({*ids.values()})) > 0:
        raise UserError(
            Problem(
                "the tokenizer has one id for two tokens",
                "model.name",
                where=name,
                found=f"{shared:,} tokens",
                fix="use the tokenizer of another checkpoint",
                why="the tokenizers library can't save such a tokenizer",
                code="tokenizer",
            )
        )
    found = [step for part in PARTS for step in steps(state(getattr(backend, part)))]
    if len(found) > MOST_STEPS:
        raise _refused("has too many steps", name, f"{len(found):,}", f"at most {MOST_STEPS:,}")
    growth = prod(map(_growth, found))
    if growth > MOST_GROWTH:
        raise _refused("makes texts too long", name, "the normalizer", f"at most {MOST_GROWTH} times as long")
    if (added := backend.num_special_tokens_to_add(False)) > MOST_ADDED:
        raise _refused("adds too many tokens", name, f"{added:,}", f"at most {MOST_ADDED:,} to each text")
    patterns = list(dict.fromkeys(text for step in found if (text := _regex(step)) and text not in _KNOWN))
    if len(patterns) > MOST_PATTERNS or any(len(text) > LONGEST_PATTERN for text in patterns):
        raise _refused(
            "has too many or too long patterns",
            name,
            f"{len(patterns):,}",
            f"at most {MOST_PATTERNS}, of at most {LONGEST_PATTERN:,} characters",
        )
    if patterns and (slow := _find_slow(tuple(patterns))) is not None:
        raise _refused("has a pattern that takes too long", name, patterns[slow][:200], "another pattern")
    if writes_other_words(backend):
        raise _refused("writes other words", name, "a step with letters", "steps that change no letters")
    _check_model(backend, name)


def _check_model(backend: Tokenizer, name: str) -> None:
    """Check the part of a tokenizer that finds the tokens in a text."""
    from tokenizers import models

    model: Any = backend.model
    longest = max(map(len, backend.get_vocab()), default=0) if isinstance(model, models.Unigram) else 0
    if longest > LONGEST_PIECE:
        expected = f"at most {LONGEST_PIECE} characters"
        raise _refused("has tokens that are too long", name, f"{longest:,} characters", expected)
    if isinstance(model, models.WordPiece) and (most := model.max_input_chars_per_word) > LONGEST_WORD:
        expected = f"max_input_chars_per_word: at most {LONGEST_WORD:,}"
        raise _refused("takes too long for long words", name, f"{most:,}", expected)
    affixes = (getattr(model, name, None) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    if (longest := max(map(len, filter(None, affixes)), default=0)) > LONGEST_PIECE:
        expected = f"at most {LONGEST_PIECE} characters"
        raise _refused("marks parts of words with a text that is too long", name, f"{longest:,}", expected)
    if isinstance(model, models.BPE) and model.dropout:
        raise UserError(
            Problem(
                "the tokenizer is random",
                "model.name",
                where=name,
                found=f"dropout: {model.dropout}",
                fix='set "dropout": null in tokenizer.json',
                why="the same text would get other tokens each time",
                code="tokenizer",
            )
        )

    for step in steps(state(backend.post_processor)):
        parts = [*(step.get("single") or ()), *(step.get("pair") or ())]
        named = {part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part}
        if step.get("type") == "TemplateProcessing" and (
            lost := named - {*(step.get("special_tokens") or ())}
        ):
            expected = "tokens that special_tokens defines"
            raise _refused("adds tokens that it does not define", name, min(lost)[:200], expected)
        texts = [part["Sequence"]["id"] for part in step.get("single") or () if "Sequence" in part]
        if step.get("type") == "TemplateProcessing" and texts != ["A"]:
            raise UserError(
                Problem(
                    "the tokenizer repeats or loses texts",
                    "model.name",
                    where=name,
                    found=f"single: {', '.join(texts[:5])}",
                    expected="the text A once",
                    fix="use the tokenizer of another checkpoint",
                    code="tokenizer",
                )
            )


def _refused(what: str, name: str, found: str, expected: str) -> UserError:
    return UserError(
        Problem(
            f"the tokenizer {what}",
            "model.name",
            where=name,
            found=found,
            expected=expected,
            fix="download tokenizer.json again from the model's page, or name another model in model.name",
            why="such a tokenizer can fill the memory or never end",
            code="unsafe-file",
        )
    )


def _growth(step: dict[str, Any]) -> int:
    """Return how many characters a step makes of one: of a match, or before the text."""
    kind = str(step.get("type"))
    if kind == "ByteLevel":  # a character for each byte, and each of these has two bytes
        return 2
    return max(1, len(str(step.get({"Replace": "content", "Prepend": "prepend"}.get(kind, ""), ""))))


def _regex(step: dict[str, Any]) -> str:
    pattern = step.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""


@cache  # several parts of a command read the tokenizer
def _find_slow(patterns: tuple[str, ...]) -> int | None:
    """Return the index of the first pattern that takes too long on runs of characters, tested in a process.

    The library skips a text that lacks a letter of the pattern. So some texts end with the pattern itself.
    """
    ends = ("", "!", "\n" + string.punctuation + "".join(patterns)[:1000])
    texts = [run * (length // len(run)) + end for run in _RUNS for length in (30, 2000) for end in ends]
    # The time of some patterns grows with the square of the length
    texts += [run * (LONG_RUN // len(run)) + ends[-1] for run in _RUNS]
    return pattern_time.first_slow(_TRY, json.dumps([patterns, texts, SECONDS]))
