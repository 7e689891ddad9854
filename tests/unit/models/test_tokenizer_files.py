"""A tokenizer read from its files is the tokenizer that transformers loads from them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import UserError
from finetune.data.encoding import make_encoder
from finetune.models import tokenizer_files, tokenizer_setup
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Model
from support.paths import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAME = ("train_on", "own", "template", "way", "prompt_end", "after_turn", "leaves_out", "opening", "stops")
WRITTEN = {
    "content": "<|im_end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "class of PreTrainedTokenizerFast": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "no padding": {"pad_token": None},
    "token as a mapping": {"eos_token": {"__type": "AddedToken", **WRITTEN}},
    "with bos": {"bos_token": "<|im_start|>"},
    "token of its own": {"image_token": "<|endoftext|>"},
    "length": {"model_max_length": 16},
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("tokens", [[], ["<|look|>"]])
def test_read_gives_the_tokenizer_that_transformers_loads(
    kind: str, tokens: list[str], tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SETTINGS[kind]}))
    model = Model(name=str(tmp_path / "model"), add_tokens=tokens)
    loaded, found = load_tokenizer(model), tokenizer_files.read(model)
    assert found
    assert found.special_tokens_map == loaded.special_tokens_map
    for name in (
        "chat_template",
        "eos_token",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "model_max_length",
    ):
        assert getattr(found, name) == getattr(loaded, name), name
    data = Data(name="rows.jsonl")
    encoders = [make_encoder(one, data, True) for one in (found, loaded)]  # pyright: ignore[reportArgumentType] (one is ours)
    for name in SAME:
        assert getattr(encoders[0], name) == getattr(encoders[1], name), name
    text = "<|im_start|>user\nWho <|look|> came?<|im_end|>"
    backends: list[Any] = [one.backend_tokenizer for one in (found, loaded)]
    ids = [backend.encode(text).ids for backend in backends]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": None},
        {"eos_token": "<no such token>"},
        {"tokenizer_class": "ByT5Tokenizer"},
        {"pad_token": {"lstrip": False}},
        {"additional_special_tokens": ["<no such token>"]},
        {"extra_special_tokens": {"image_token": "<no such token>"}},
        {"additional_special_tokens": [None, 5]},
        {"extra_special_tokens": {"x": 5}},
    ],
)
def test_read_leaves_a_doubtful_tokenizer_to_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    assert tokenizer_files.read(Model(name=str(tmp_path / "model"))) is None


@pytest.mark.parametrize("tokens", [[None, 5], [""], ["<one>", {"content": 5}]])
@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_check_accepts_the_special_tokens_that_loading_accepts(
    key: str, tokens: list[Any], tmp_path: Path
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: tokens}))
    assert is_refused(tokenizer_setup.check, path.parent) == is_refused(load_tokenizer, path.parent)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a\0b", "\ud800", "", "x.y"])
def test_chat_templates_whose_names_are_no_file_names_are_refused(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path, template = folder / "tokenizer_config.json", "{{ messages }}"
    named = [{"name": one, "template": template} for one in ("default", name)]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    assert tokenizer_files.read(Model(name=str(folder))) is None and is_refused(load_tokenizer, folder)


def is_refused(function: Callable[[Model], object], folder: Path) -> bool:
    try:
        function(Model(name=str(folder)))
    except UserError:
        return True
    return False


def test_read_ignores_padding_that_the_file_asks_for_as_loading_does(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding": padding}))
    found = tokenizer_files.read(Model(name=str(tmp_path / "model")))
    assert found
    assert len(found.backend_tokenizer.encode("hi").ids) < 64


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"version": "1.0", "model": {"type": "BPE", "merges": [1]}}']
)
def test_load_tokenizer_of_a_damaged_file_names_it(content: str, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json") as caught:
        load_tokenizer(Model(name=str(folder)))
    assert caught.value.code == 2
