"""Read a tokenizer from its files without transformers, which takes seconds to load one.

transformers may build some tokenizers differently from their files. So if an example fails with this
tokenizer, `finetune check` tries it again with `tokenizer_setup.load_tokenizer`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import regular_files
from finetune.models import tokenizer_setup

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from finetune.recipe.schema import Model


# Classes of transformers that use the steps of tokenizer.json unchanged (transformers 5.22)
AS_WRITTEN = ("", "LlamaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# Classes that build their own steps, which equal those of a byte-level tokenizer.json
BYTE_LEVEL = (
    "CodeGenTokenizer", "CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
)  # fmt: skip


@dataclass
class TokenizerFiles:
    """The methods of a tokenizer that `data.encoding` uses, with the names of transformers."""

    backend_tokenizer: Any
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    model_max_length: int = tokenizer_setup.UNLIMITED

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.special_tokens_map.values())

    @property
    def eos_token(self) -> str:
        return self.special_tokens_map["eos_token"]

    @property
    def pad_token(self) -> str:
        return self.special_tokens_map["pad_token"]

    @pad_token.setter
    def pad_token(self, text: str) -> None:
        self.special_tokens_map["pad_token"] = text

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    def get_chat_template(self) -> str:
        """Return the template of chats without tools."""
        named = self.chat_template
        return named["default"] if isinstance(named, dict) else str(named)

    def _id(self, name: str) -> int | None:
        return self.backend_tokenizer.token_to_id(self.special_tokens_map.get(name, ""))


def read(model: Model, chat_template: str | None = None) -> TokenizerFiles | None:
    """Read the tokenizer of a local model; `None` if only transformers can load it correctly.

    Args:
        chat_template: Jinja source that replaces the tokenizer's own.
    """
    settings = tokenizer_setup.settings(Path(model.name))
    backend = tokenizer_setup.read_tokenizer(model)
    if settings is None or backend is None:
        return None
    if not _is_read_as_written(settings["tokenizer_class"], backend):
        return None
    if not tokenizer_setup.can_encode(backend):
        return None
    special = {
        name: str(token["content"] if isinstance(token, dict) else token)
        for name, token in settings.items()
        if token and name.endswith("_token") and (name in tokenizer_setup.NAMED or isinstance(token, str))
    }
    special.setdefault("pad_token", special["eos_token"])
    extra = [
        token["content"] if isinstance(token, dict) else token
        for token in tokenizer_setup.extra_tokens(settings)
    ]
    if any(
        backend.token_to_id(text) is None for text in (special["eos_token"], special["pad_token"], *extra)
    ):
        return None
    try:
        template = chat_template or tokenizer_setup.own_template(model)
    except (OSError, ValueError, TypeError, KeyError):  # transformers will report the fault
        return None
    return TokenizerFiles(backend, template, special) if tokenizer_setup.is_template(template) else None


def _is_read_as_written(tokenizer_class: str, backend: Tokenizer) -> bool:
    """Return whether transformers builds the same tokenizer from the files of this class."""
    name = tokenizer_class.removesuffix("Fast")
    if name == "GemmaTokenizer":
        return type(backend.normalizer).__name__ == "Replace"
    return name in AS_WRITTEN or (name in BYTE_LEVEL and "ByteLevel" in repr(backend.pre_tokenizer))


def has_id(folder: Path, rows: int) -> bool:
    """Return whether a folder's tokenizer.json may have a token id of `rows` or more.

    The ids of a vocabulary have no gaps, so a vocabulary with a higher id has the id `rows`. The ids of added
    tokens may have gaps. A vocabulary without written ids is a list in the order of the ids.
    """
    try:
        text = regular_files.read_text(folder / "tokenizer.json", "model.name")
        _, found, rest = text.partition('"added_tokens":')
        added: list[dict[str, Any]] = json.JSONDecoder().raw_decode(rest.lstrip())[0] if found else []
        if any(int(token["id"]) >= rows for token in added) or re.search(rf'":\s*{rows}\b', text):
            return True
        return '"Unigram"' in text and len(json.loads(text)["model"]["vocab"]) > rows
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
