"""Write a tokenizer and its chat template as llama.cpp reads them.

llama.cpp knows the ways to split a text by name (`tokenizer.ggml.pre`). finetune refuses a tokenizer that
splits in another way, because its tokens would differ.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, pre_tokenizers

from finetune.core.errors import Problem, UserError
from finetune.core.visible_text import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    # What a tokenizer splits at, in order -> llama.cpp's name, without and with `ignore_merges`
    (WORDS + r"\p{N}{1,3}" + REST, "bytes"): ("smaug-bpe", "llama-bpe"),
    (WORDS + r"\p{N}" + REST, "bytes"): ("qwen2", ""),
    (f"{MARKED}|{CAPITALS}" + r"|\p{N}" + TAIL, "bytes"): ("", "tekken"),
    (f"{MARKED}{ENDINGS}|{CAPITALS}{ENDINGS}" + r"|\p{N}{1,3}" + TAIL, "bytes"): ("gpt-4o", ""),
    ("words",): ("gpt-2", ""),
    ("digits", "words"): ("smollm", ""),
}
SPACES = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]
"""The normalizers of SentencePiece's tokenizers, which llama.cpp has too."""
CUT_AT_SPACES = {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False
}  # fmt: skip
"""The pre-tokenizer of Gemma. Its normalizer leaves no space, so it cuts nothing."""
UNSPLIT = "superbpe"
"""A way to split that only cuts numbers out, so it fits a tokenizer whose tokens never cross its cuts."""
TRIES, PIECES = 500, 12
LONGEST = 100  # characters of a tested text. The time of a test grows with the square
END_KEYS = ("eos", "eot", "eom")


def entries(tokenizer: Any, rows: int, stops: Sequence[int], *, opens: bool, chats: bool) -> dict[str, Any]:
    """Return llama.cpp's keys for a tokenizer.

    Args:
        rows: rows of the embedding; ids without a token get a placeholder.
        stops: ids that end an answer.
        opens: whether prompts start with the BOS token.
        chats: whether the chat template writes the prompts.

    Raises:
        UserError: llama.cpp has no such tokenizer (exit 2).
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if content["model"]["type"] != "BPE":
        raise _unsupported(f"a tokenizer of type {content['model']['type']}", "BPE")
    check_count(tokenizer, rows)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if mark := content["model"].get(key):
            raise _unsupported(f"tokens with a mark of their place in a word: {key} {mark!r}", "no mark")
    check_normalizer(content)
    check_start(tokenizer, chats=chats)
    if is_byte_level(content):
        found: dict[str, Any] = {
            "model": "gpt2",
            "pre": pre_of(content),
            "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        }
        if not found["merges"]:
            raise _unsupported("a BPE tokenizer without merges", "a tokenizer with merges")
    elif content["model"].get("byte_fallback"):
        found = {
            "model": "llama",
            "pre": "default",
            "add_space_prefix": starts_with_space(content, chats=chats),
            "scores": scores(content, rows),
        }
        check_joins(content, found["scores"])
    else:
        raise _unsupported("a BPE tokenizer without bytes", "byte-level BPE, or BPE with byte_fallback")
    found["tokens"], found["token_type"] = vocabulary(content, rows)
    found |= special(tokenizer, stops, opens)
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | templates(tokenizer)


def check_count(tokenizer: Any, rows: int) -> None:
    """Check that the embedding has a row for each token (exit 2)."""
    ids = tokenizer.get_vocab().values()
    if rows < (needed := max(len(tokenizer), *(token + 1 for token in ids))):
        raise UserError(
            Problem(
                "the tokenizer has more tokens than the model has embeddings",
                found=f"{needed:,}",
                expected=f"at most {rows:,}",
                fix="train again with these tokens in `model.add_tokens`, or remove them from tokenizer.json",
                why="the model has no embeddings for the other tokens",
                code="tokenizer",
            )
        )


def check_normalizer(content: dict[str, Any]) -> None:
    """Check that llama.cpp, which has no normalizers, reads every text as the tokenizer does.

    llama.cpp writes `▁` in place of spaces by itself. NFC changes few texts, so `notes` names it.

    Raises:
        UserError: the tokenizer changes texts in another way (exit 2).
    """
    normal = [step for step in steps(content["normalizer"], "normalizers") if step["type"] != "NFC"]
    if is_byte_level(content):
        strange, expected = normal, "no normalizer, or NFC"
    else:
        before = steps(content["pre_tokenizer"], "pretokenizers")
        replaces = [step for step in before if step["type"] == "Metaspace" and step["replacement"] == "▁"]
        strange = [step for step in normal if step not in SPACES]
        strange += [step for step in before if step not in [*replaces, CUT_AT_SPACES]]
        if not replaces and SPACES[1] not in normal:
            strange.append({"type": "spaces that stay spaces"})
        expected = "▁ in place of spaces, and no other change"
    if strange:
        shown = ", ".join(json.dumps(step, ensure_ascii=False) for step in strange)
        raise _unsupported(f"how this tokenizer changes a text: {shown[:100]}", expected)


def notes(tokenizer: Any) -> list[str]:
    """Return notes on texts that llama.cpp reads in another way than the tokenizer."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    found = list[str]()
    if any(step["type"] == "NFC" for step in steps(content["normalizer"], "normalizers")):
        found.append("llama.cpp does not apply the tokenizer's NFC: send texts in the form NFC, as most are")
    flags = ("single_word", "lstrip", "rstrip")
    flagged = [token["content"] for token in content["added_tokens"] if any(token[flag] for flag in flags)]
    if flagged:
        shown = visible(", ".join(flagged[:3])) + (
            f" and {len(flagged) - 3} more" if len(flagged) > 3 else ""
        )
        found.append(f"llama.cpp does not read single_word, lstrip and rstrip of added tokens: {shown}")
    return found


def is_byte_level(content: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps(content["pre_tokenizer"], "pretokenizers"))


def steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which can be a sequence of several."""
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def pre_of(content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the way in which a byte-level tokenizer splits a text."""
    signature = tuple(_signature(step) for step in steps(content["pre_tokenizer"], "pretokenizers"))
    names = SPLITS.get(signature, ("", ""))
    ignores = bool(content["model"].get("ignore_merges"))
    if names[ignores]:
        return names[ignores]
    if not ignores and is_inert(content):
        return UNSPLIT
    found = " then ".join(signature) + (" with ignore_merges" if ignores else "")
    raise _unsupported(f"how this tokenizer splits a text: {found}", ", ".join(sorted(set(known()))))


def known() -> list[str]:
    return [name for names in SPLITS.values() for name in names if name] + [UNSPLIT]


def _signature(step: dict[str, Any]) -> str:
    """Return one step of a pre-tokenizer as in `SPLITS`."""
    if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
        return "words" if step.get("use_regex", True) else "bytes"
    if step["type"] == "Digits" and step.get("individual_digits"):
        return "digits"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex", step["pattern"]))
    return json.dumps(step, sort_keys=True)


def is_inert(content: dict[str, Any]) -> bool:
    """Return whether a tokenizer gives the same tokens if it splits only at numbers.

    Holds if no token has a number next to other text and no join of tokens changes across a cut. Joins are
    tested on random texts that are made of the tokenizer's own tokens.
    """
    whole = Tokenizer.from_str(json.dumps(content))
    unsplit = Tokenizer.from_str(json.dumps(content))
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [whole.decode([index], skip_special_tokens=False) for index in range(whole.get_vocab_size())]
    texts = [text for text in texts if text and "�" not in text]
    if any(len(text) > 1 and any(unicodedata.category(sign)[0] == "N" for sign in text) for text in texts):
        return False
    choose = random.Random(0)
    samples = texts + ["".join(choose.choices(texts, k=PIECES)) for _ in range(TRIES)]
    pairs = zip(whole.encode_batch(samples), unsplit.encode_batch(samples), strict=True)
    return all(one.ids == other.ids for one, other in pairs)


def vocabulary(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each id."""
    tokens, types = [f"[PAD{index}]" for index in range(rows)], [UNUSED] * rows
    for token, index in content["model"]["vocab"].items():
        tokens[index] = token
        is_byte = not is_byte_level(content) and re.fullmatch(r"<0x[0-9A-F]{2}>", token)
        types[index] = BYTE if is_byte else NORMAL
    if (unknown := content["model"].get("unk_token")) in content["model"]["vocab"]:
        types[content["model"]["vocab"][unknown]] = UNKNOWN
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        if types[added["id"]] != UNKNOWN:
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def scores(content: dict[str, Any], rows: int) -> list[float]:
    """Return a score for each token: llama.cpp joins the pair whose join has the highest score first."""
    vocab, found = content["model"]["vocab"], [-1e6] * rows
    for rank, (left, right) in reversed(list(enumerate(content["model"]["merges"]))):
        found[vocab[left + right]] = -float(rank)
    return found


def starts_with_space(content: dict[str, Any], *, chats: bool) -> bool:
    """Return whether a tokenizer with byte_fallback adds a space before a text.

    llama.cpp adds it after each special token too. A tokenizer with the scheme `first` does not, and chats
    start with a special token.
    """
    normal = steps(content["normalizer"], "normalizers")
    before = steps(content["pre_tokenizer"], "pretokenizers")
    schemes = {step.get("prepend_scheme", "always") for step in before if step["type"] == "Metaspace"}
    return (
        any(step["type"] == "Prepend" for step in normal)
        or "always" in schemes
        or ("first" in schemes and not chats)
    )


def check_start(tokenizer: Any, *, chats: bool) -> None:
    """Check that llama.cpp can write what the tokenizer adds before a text: nothing, or the BOS token.

    Chat templates write such tokens themselves.

    Raises:
        UserError: the tokenizer adds other tokens (exit 2).
    """
    found = tokenizer.backend_tokenizer.encode("x", add_special_tokens=True)
    opening = found.ids[: found.special_tokens_mask.index(0)]
    if not chats and opening not in ([], [tokenizer.bos_token_id]):
        shown = " ".join(found.tokens[: len(opening)])
        raise _unsupported(f"the tokens that the tokenizer adds before a text: {shown}", "one BOS token")


def check_joins(content: dict[str, Any], ranks: Sequence[float]) -> None:
    """Check that llama.cpp joins characters to the tokens of a tokenizer with byte_fallback.

    llama.cpp joins each pair that is a token. The highest score comes first. The tokenizer has a list of
    pairs. finetune compares both on tokens, and on random texts that are made of tokens.

    Raises:
        UserError: they differ (exit 2).
    """
    model = content["model"]
    plain = {**content, "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    tokenizer, vocab = Tokenizer.from_str(json.dumps(plain)), model["vocab"]
    joined = {left + right for left, right in model["merges"]}
    known = [token for token in vocab if all(sign in vocab for sign in token)]
    choose = random.Random(0)
    samples = [token for token in known if len(token) > 1 and token not in joined][:TRIES]
    samples += choose.sample(known, min(TRIES, len(known)))
    samples += ["".join(choose.choices(known, k=PIECES)) for _ in range(TRIES) if known]
    for text in (sample[:LONGEST] for sample in samples):
        expected = [vocab[token] for token in _join(text, vocab, ranks)]
        if tokenizer.encode(text, add_special_tokens=False).ids != expected:
            raise _unsupported(
                f"how this tokenizer joins the characters of {text[:40]!r}", "SentencePiece's BPE"
            )


def _join(text: str, vocab: dict[str, int], ranks: Sequence[float]) -> list[str]:
    """Return the tokens of a text as llama.cpp makes them (`llm_tokenizer_spm_session`)."""
    found = list(text)
    while True:
        pairs = [(ranks[vocab[a + b]], -n) for n, (a, b) in enumerate(pairwise(found)) if a + b in vocab]
        if not pairs:
            return found
        _, place = max(pairs)
        found[-place : -place + 2] = [found[-place] + found[-place + 1]]


def special(tokenizer: Any, stops: Sequence[int], opens: bool) -> dict[str, Any]:
    """Return the special tokens, and which of them llama.cpp adds to a prompt."""
    found: dict[str, Any] = {"add_bos_token": opens, "add_eos_token": False}
    ids = {
        "bos": tokenizer.bos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
    }
    own = tokenizer.eos_token_id
    ends = [stop for stop in stops if stop == own] + [stop for stop in stops if stop != own]
    if len(ends) > len(END_KEYS):
        raise UserError(
            Problem(
                "GGUF can't name all tokens that end an answer",
                fix="--to vllm",
                found=f"{len(ends)} tokens",
                expected=f"at most {len(END_KEYS)}",
                code="export",
            )
        )
    ids |= dict(zip(END_KEYS, ends, strict=False))
    return found | {f"{name}_token_id": int(index) for name, index in ids.items() if index is not None}


def templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the chat templates. The marks of TRL's training templates become comments."""
    given: Any = tokenizer.chat_template
    named = given if isinstance(given, dict) else {"default": given} if given else {}
    found = {}
    for name, text in named.items():
        key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        found[key] = re.sub(r"\{%(-?)\s*((?:end)?generation)\s*(-?)%\}", r"{#\1 \2 \3#}", text)
    return found


def _unsupported(what: str, expected: str) -> UserError:
    return UserError(
        Problem(f"llama.cpp does not support {what}", expected=expected, fix="--to vllm", code="export")
    )
