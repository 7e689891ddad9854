"""Load a tokenizer, add tokens, and set its chat template."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import regular_files, untrusted_files
from finetune.core.errors import Problem, UserError, is_process_limit, panics_as_errors, stage
from finetune.core.weight_files import DOWNLOAD
from finetune.models import model_files, tokenizer_limits
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.schema import Model


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
WORDS, LETTERS = "The cat, 12 dogs", ("x", "\u00e9", "\u4f60", "\U0001f600")
ALPHABETS = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.punctuation)
PROBE = "x \u00e9 \u4f60 \u0378 \U0001f600"
SHORTEST = 300  # tokens whose text is decoded as a test, because a decoder can fail on short texts
UNLIMITED = int(1e30)  # transformers' own value for a tokenizer without a limit


def load_tokenizer(model: Model, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with a padding token and, if given, another chat template (Jinja source)."""
    from transformers import AutoTokenizer

    model_files.check_exists(model)
    if Path(model.name).is_dir():  # the folder of a model, or of an adapter with its tokenizer
        untrusted_files.check_files(Path(model.name), "model.name")
    with stage("loaded the tokenizer", "model.name"), _damage_named(Path(model.name)):
        tokenizer = model_files.from_hub(AutoTokenizer.from_pretrained, model)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            Problem(
                "the tokenizer has no tokenizer.json",
                "model.name",
                found=f"{type(tokenizer).__name__}, a tokenizer in Python",
                fix="use a model with a tokenizer.json",
                why="finetune needs the positions of tokens in the text",
                code="tokenizer",
            )
        )
    check_backend(backend, model.name)
    if tokenizer.eos_token_id is None:
        raise UserError(
            Problem(
                "the tokenizer has no eos token",
                "model.name",
                found=model.name,
                fix="set eos_token in the model's tokenizer_config.json",
                code="tokenizer",
            )
        )
    tokenizer.model_max_length = UNLIMITED  # `token_limits.apply` sets the model's limit
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding has no labels, so the model still learns eos
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif not is_template(tokenizer.chat_template):
        raise UserError(
            Problem(
                "the tokenizer's chat template is not a text, or not a list of texts with plain names",
                "data.chat_template",
                found=f"{tokenizer.chat_template!r}"[:200],
                fix="data.chat_template: chatml",
                code="chat-template",
            )
        )
    _check_new(model.add_tokens, tokenizer.get_vocab())
    _add_tokens(tokenizer, model.add_tokens)
    return tokenizer


def check_backend(backend: Tokenizer, name: str) -> None:
    """Switch off truncation and padding of tokenizer.json, and check that the tokenizer can be used (exit 2).

    `fit` cuts examples, and the collator pads them.

    Args:
        name: the name of the model, for messages.
    """
    cut = backend.truncation or {"stride": 0}
    # transformers refuses some of them, and others panic
    if cut["stride"] and cut["stride"] >= cut["max_length"]:
        raise UserError(
            Problem(
                "the tokenizer's truncation has a stride that is not below its max_length",
                "model.name",
                where=name,
                found=f"stride: {cut['stride']}, max_length: {cut['max_length']}",
                fix='set "truncation": null in tokenizer.json',
                code="tokenizer",
            )
        )
    backend.no_truncation()
    backend.no_padding()
    keep_spaces_in_offsets(backend)
    tokenizer_limits.check(backend, name)
    if not can_encode(backend):
        raise UserError(
            Problem(
                "the tokenizer can't encode every text",
                "model.name",
                found=name,
                fix="use the tokenizer of another checkpoint",
                why="it loses or confuses letters, spaces or rare characters, or it fails on them",
                code="tokenizer",
            )
        )


def keep_spaces_in_offsets(backend: Tokenizer) -> None:
    """Let the offsets of a token include its spaces.

    The loss mask finds the first token of an answer by its offsets. Tokens of spaces would have none. The ids
    do not change.
    """
    if backend.post_processor is None:
        return
    content = backend.post_processor.__getstate__()
    untrimmed = content.replace(b'"trim_offsets":true', b'"trim_offsets":false')
    if untrimmed != content:
        from tokenizers import Tokenizer, models

        plain = json.loads(Tokenizer(models.BPE()).to_str())
        made = Tokenizer.from_str(json.dumps({**plain, "post_processor": json.loads(untrimmed)}))
        backend.post_processor = made.post_processor


def is_template(template: object) -> bool:
    """Return whether a tokenizer's chat template is Jinja source, named sources, or missing.

    transformers saves each source in a file of its name.
    """
    named = template if isinstance(template, dict) else {"default": template}
    return template is None or all(
        isinstance(source, str) and re.fullmatch(r"[\w-]+", str(name), re.ASCII)
        for name, source in named.items()
    )


def can_encode(backend: Tokenizer) -> bool:
    """Return whether a tokenizer of the tokenizers library keeps usual and rare characters, and spaces.

    Usual letters, digits and punctuation also have different tokens, unless it does not know them.
    """
    try:
        with panics_as_errors():
            texts = (WORDS, *LETTERS, PROBE)
            ids = [backend.encode(text, add_special_tokens=False).ids for text in texts]
            shortest = heapq.nsmallest(SHORTEST, backend.get_vocab().items(), key=lambda token: len(token[0]))
            backend.decode_batch([[], *([number] for _, number in shortest)])
            loses_spaces = backend.decode(ids[0]).strip().casefold() == WORDS.replace(" ", "").casefold()
            return all(ids) and not loses_spaces and all(_tells_apart(backend, group) for group in ALPHABETS)
    except Exception as error:  # the library's one type for every fault
        if is_process_limit(error):
            raise
        return False


def _tells_apart(backend: Tokenizer, characters: str) -> bool:
    """Return whether each character that the tokenizer knows has tokens of its own, also inside a word."""
    rare = backend.encode("\U0002a6d6", add_special_tokens=False)  # a Chinese character of a late extension
    unknown = {*rare.ids[-1:]}
    texts = [f"{character} 0{character}0" for character in ("", *characters)]
    found = [tuple(one.ids) for one in backend.encode_batch(texts, add_special_tokens=False)]
    known = [ids for ids in found if not unknown & {*ids}]
    return len({*known}) == len(known)


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    """Stop with an error if a local tokenizer.json is damaged (exit 2)."""
    try:
        with panics_as_errors():
            yield
    except Exception:  # the libraries raise plain exceptions for a damaged file
        if (damage := _damage(folder / "tokenizer.json")) is None:
            raise
        raise UserError(
            Problem(
                "the tokenizer's file is damaged",
                "model.name",
                where=str(folder / "tokenizer.json"),
                found=damage[:200],
                fix=DOWNLOAD,
                code="tokenizer",
            )
        ) from None


def _damage(path: Path) -> str | None:
    """Return why the tokenizers library can't read a file; `None` if it can, or if there is no file."""
    from tokenizers import Tokenizer

    try:
        if path.is_file():
            with panics_as_errors():
                Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this type for every fault of the file
        return str(error)
    return None


def read_vocabulary(model: Model) -> dict[str, int] | None:
    """Return the ids of a local model's tokens and of `model.add_tokens`, without transformers.

    Return `None` if the model is on the Hub, or its tokenizer has no tokenizer.json.
    """
    tokenizer = read_tokenizer(model)
    return tokenizer.get_vocab() if tokenizer else None


def read_tokenizer(model: Model) -> Tokenizer | None:
    """Return a local model's tokenizer with `model.add_tokens`; `None` as in `read_vocabulary`."""
    from tokenizers import AddedToken, Tokenizer

    path = Path(model.name) / "tokenizer.json"
    if not path.is_file():
        return None
    regular_files.check_regular(path, "model.name", regular_files.limit_of(path))
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises this type for every fault; loading reports which one
        return None
    check_backend(tokenizer, model.name)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in model.add_tokens])
    return tokenizer


def read_added_tokens(model: Model) -> list[int] | None:
    """Return the ids of a local model's `model.add_tokens`, without transformers.

    Return `None` as in `read_vocabulary`, or if the tokenizer does not accept one of the tokens.
    """
    vocabulary = read_vocabulary(model) if model.add_tokens else {}
    if vocabulary is None or not vocabulary.keys() >= set(model.add_tokens):
        return None
    return [vocabulary[token] for token in model.add_tokens]


def check(model: Model) -> list[str]:
    """Check that the tokenizer of a local model loads.

    transformers takes seconds to load one. So finetune loads it only if its files do not show that it loads:
    a `tokenizer.json` with an end-of-text token, and without a Python class of transformers.

    Returns:
        A note, if the tokenizer was loaded.

    Raises:
        UserError: as `load_tokenizer`.
    """
    if settings(Path(model.name)) is not None:
        if model.add_tokens:
            _check_new(model.add_tokens, read_vocabulary(model.model_copy(update={"add_tokens": []})) or {})
        return []
    load_tokenizer(model)
    return ["finetune loaded the tokenizer to check it, which takes a few seconds"]


def _check_new(added: list[str], vocabulary: Collection[str]) -> None:
    """Stop if the tokenizer already has a token of `model.add_tokens` (exit 2)."""
    if known := ", ".join(token for token in added if token in vocabulary):
        raise UserError(
            Problem(
                "the tokenizer has these tokens already",
                "model.add_tokens",
                found=known,
                fix=f"remove {known} from model.add_tokens",
                code="tokenizer",
            )
        )


def settings(folder: Path) -> dict[str, Any] | None:
    """Return the tokenizer's settings in a folder.

    Return `None` if the tokenizer may run in Python, or if it has no tokenizer.json or no eos token.
    """
    said, config = (_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    older = _json(folder / "special_tokens_map.json")
    if said is None or config is None or older is None:
        return None
    named = said.get("tokenizer_class") or config.get("tokenizer_class")
    named = named or upstream_options.tokenizer_classes().get(str(config.get("model_type")), "")
    in_python = not isinstance(named, str) or upstream_options.runs_in_python(named)
    if "added_tokens_decoder" not in said:  # transformers reads the older file only then
        said |= older
    plain = (folder / "tokenizer.json").is_file() and not (folder / "tekken.json").exists()
    doubtful = in_python or not plain or not said.get("eos_token") or not _has_usual_values(said)
    return None if doubtful else {**said, "tokenizer_class": named}


def _has_usual_values(said: dict[str, Any]) -> bool:
    """Return whether the values of a tokenizer_config.json have the types that transformers expects."""
    tokens = [said.get(name) for name in NAMED]
    decoder = said.get("added_tokens_decoder") or {}
    sides = [said.get(f"{kind}_side") or "right" for kind in ("padding", "truncation")]
    return (
        all(token is None or _is_token(token) for token in tokens)
        and isinstance(decoder, dict)
        and all(number.isdecimal() and _is_token(token) for number, token in decoder.items())
        and all(side in ("left", "right") for side in sides)
        and isinstance(said.get("extra_special_tokens") or [], list | dict)
        and isinstance(said.get("additional_special_tokens") or [], list)
        and isinstance(said.get("init_inputs") or [], list)
        and all(map(_is_token, extra_tokens(said)))
        and not said.get("split_special_tokens")
    )


def extra_tokens(said: dict[str, Any]) -> list[Any]:
    """Return the special tokens without a usual name. transformers adds those that the vocabulary lacks."""
    extra, older = said.get("extra_special_tokens") or [], said.get("additional_special_tokens") or []
    return [*(extra.values() if isinstance(extra, dict) else extra), *older]


def _is_token(value: object) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and text != ""


def _json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file that may be missing; `None` if it is damaged (loading reports it)."""
    try:
        found = regular_files.read_json(path, "model.name") if path.exists() else {}
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _add_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    """Add new tokens, and check that the tokenizer finds each of them inside a text."""
    from transformers import AddedToken

    # Search the unchanged text, because a normalizer such as Llama 2's may put a space before it.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    vocabulary = tokenizer.get_vocab()
    lost = [t for t in texts if vocabulary.get(t) not in tokenizer.encode(f"0{t}0", add_special_tokens=False)]
    if lost:
        raise UserError(
            Problem(
                "the tokenizer does not find this new token inside a text",
                "model.add_tokens",
                found=", ".join(map(repr, lost)),
                fix="choose another text for the token, such as <my_token>",
                code="tokenizer",
            )
        )


def foreign_template(model: Model, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a note if chats use another template than the base model's, which could hide instructions."""
    own, used = own_template(model), tokenizer.chat_template
    if used is None or (own and digest(used) == digest(own)):
        return []
    if own is None:
        return [f"{model.name} has no chat template of its own; the run uses {digest(used)}"]
    return [f"the chat template ({digest(used)}) differs from the template of {model.name} ({digest(own)})"]


def own_template(model: Model) -> str | dict[str, str] | None:
    """Return the chat template of the base model's files, or its named templates.

    A recipe or an adapter's tokenizer may replace it.
    """
    found = {
        name: model_files.small_file(model, name) for name in ("chat_template.jinja", "tokenizer_config.json")
    }
    if path := found["chat_template.jinja"]:
        default = regular_files.read_text(path, "model.name")
        more = model_files.small_file(model, "additional_chat_templates/tool_use.jinja")
        return (
            {"default": default, "tool_use": regular_files.read_text(more, "model.name")} if more else default
        )
    path = found["tokenizer_config.json"]
    said = untrusted_files.read_object(path, "model.name").get("chat_template") if path else None
    return {one["name"]: one["template"] for one in said} if isinstance(said, list) else said


def digest(template: str | dict[str, str]) -> str:
    """Return a hash of a chat template, or of the two named templates that transformers uses for chats."""
    if isinstance(template, dict):
        used = [template.get(name, "") for name in ("default", "tool_use")]
        template = "\0".join(used) if used[1] else used[0]
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def declared_ends(model: Model, config: ModelConfig | None = None) -> set[int]:
    """Return the ids that end an answer, from the generation config or, without one, from the config.

    Args:
        config: the config of the model, if the caller has it.
    """
    path = model_files.small_file(model, "generation_config.json")
    if path:
        ends = untrusted_files.read_object(path, "model.name").get("eos_token_id")
    else:
        ends = getattr(config or model_files.read_config(model), "eos_token_id", None)
    return {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}


def added_tokens(model: Model, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `model.add_tokens`."""
    return [int(tokenizer.get_vocab()[token]) for token in model.add_tokens]


def vocabulary(model: Model, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int:
    """Return the size of the model's embeddings, from its config and the added tokens."""
    rows = config.get_text_config().vocab_size
    return max([rows, *(token + 1 for token in added_tokens(model, tokenizer))])
