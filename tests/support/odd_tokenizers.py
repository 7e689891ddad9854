"""Odd files of a tokenizer: values of tokenizer_config.json, parts of tokenizer.json, other files."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from support.paths import MODEL

if TYPE_CHECKING:
    from pathlib import Path

_BOXED = {"__type": "AddedToken", "content": "<|im_end|>"}
_CONSTANT = [{"name": "tool_use", "template": "{{ messages }}"}]
SETTINGS: dict[str, tuple[Any, ...]] = {
    "eos_token": ("<|endoftext|>", "the", "<none>", "", " ", None, 2, ["<|im_end|>"], _BOXED, {"x": 1}),
    "pad_token": ("<|im_end|>", "the", "<none>", "", None, 2),
    "unk_token": ("<|im_end|>", "<none>", None, 5),
    "sep_token": ({"x": 1},),
    "image_token": (5, {"content": "<im>"}),
    "tokenizer_class": (
        None, 5, "AutoTokenizer", "BertTokenizer", "ByT5Tokenizer", "GemmaTokenizerFast", "GPT2Tokenizer",
        "GPTSw3Tokenizer", "LlamaTokenizer", "NoSuchTokenizer", "PreTrainedTokenizer", "RobertaTokenizer",
        "SentencePieceBackend", "T5Tokenizer", "TokenizersBackend", "WhisperTokenizer",
    ),
    "added_tokens_decoder": ({"2": _BOXED}, {"x": _BOXED}, {"2": {}}, [1]),
    "extra_special_tokens": (["<x>"], {"x_token": "<x>"}, 5),
    "additional_special_tokens": (["<x>", "<x>"], [5], "x"),
    "padding_side": ("left", "both"),
    "truncation_side": ("left", "both"),
    "model_max_length": (4, 0, None, "long"),
    "init_inputs": (5, []),
    "split_special_tokens": (True,),
    "add_bos_token": (True, "x"),
    "name_or_path": (5,),
    "auto_map": ({"AutoTokenizer": ["a.B", None]},),
}  # fmt: skip
_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
ADDED: tuple[tuple[int, str], ...] = (
    (4096, "<new>"), (9000, "<new>"), (4096, "\n"), (4096, "Answer"), (4096, ""), (2, "<new>"), (-1, "<new>"),
    (2**40, "<new>"),
)  # fmt: skip
PARTS: dict[str, Any] = {
    "model": None,
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "normalizer": {"type": "Replace", "pattern": {"Regex": r"[\s\S]"}, "content": ""},
}
FILES: dict[str, tuple[str | None, ...]] = {
    "tokenizer.json": (None, "{", "[]"),
    "tokenizer_config.json": (None, "[]", "null", "{"),
    "added_tokens.json": ('{"<new>": 9000}', "{"),
    "special_tokens_map.json": ("[", '{"eos_token": "<none>"}'),
    "generation_config.json": ("{", "[]", '{"eos_token_id": "x"}'),
    "chat_template.jinja": (
        None, "", "hello", "{% for %}", "{{ raise_exception('no') }}",
        "{{ strftime_now('%d') }}", "{{ strftime_now(5) }}",
    ),
}  # fmt: skip
TEMPLATES: tuple[Any, ...] = (
    5,
    ["x"],
    _CONSTANT,
    [{"name": 5, "template": 7}],
    {"default": "{{ messages }}"},
)
CASES = [
    *(("settings", key, value) for key, values in SETTINGS.items() for value in values),
    *(("added", str(number), text) for number, text in ADDED),
    *(("part", key, value) for key, value in PARTS.items()),
    *(("file", key, text) for key, texts in FILES.items() for text in texts),
    *(("template", "", value) for value in TEMPLATES),
]


def write_model(folder: Path, case: tuple[str, str, Any]) -> None:
    """Copy the embedded model into a folder, with one odd file."""
    kind, key, value = case
    shutil.copytree(MODEL, folder)
    if kind == "file":
        (folder / key).unlink(missing_ok=True)
        if value is not None:
            (folder / key).write_text(value)
        return
    name = "tokenizer_config.json" if kind in ("settings", "template") else "tokenizer.json"
    content = json.loads((folder / name).read_text())
    if kind == "template":
        (folder / "chat_template.jinja").unlink()
        content["chat_template"] = value
    elif kind == "added":
        content["added_tokens"].append({"id": int(key), "content": value, **_TOKEN})
    else:
        content[key] = value
    (folder / name).write_text(json.dumps(content))
