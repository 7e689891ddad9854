"""Check that a model or adapter cannot run code, choose kernels or name files outside of its folder.

transformers and PEFT check most of this themselves. Past versions had holes
(tests/security/test_advisories.py), so finetune checks the files before these libraries open them. This
module imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from finetune.core import config_values, quantization_values, regular_files, safe_files, strict_json
from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.weight_files import ADAPTER, INDEX, find_weight_files, is_plain_name

DOWNLOAD_AGAIN = "download the model again (hf download MODEL --local-dir FOLDER), or use another model"
SAVE_AGAIN = "save the adapter again: model.save_pretrained(FOLDER)"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
MOST_NAMES = 1_000_000  # of a tokenizer.json; Gemma's vocabulary has 262,144
MOST_ADDED = 100_000  # tokens in addition to the vocabulary
MOST_CHARACTERS = 2_000_000  # of all added tokens; each takes 2 microseconds and 75 bytes
# Files of `save_pretrained(distributed_checkpoint=True)`. With one, transformers reads all safetensors
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_ADDED = re.compile(r'"added_tokens"\s*:\s*')
_ESCAPED = re.compile(r"\\u00[567]")  # an escape in place of an ASCII letter, which no library writes
_IMPLEMENTATION = re.compile(r"_?(attn|attention|experts)_implementation(_internal)?")
# Keys that name files which transformers reads in place of config.json and tokenizer.json
_IN_PLACE = {"configuration_files", "fast_tokenizer_files"}
_LARGEST_ID = 10_000_000
_LARGEST_NUMBER = 2**31  # of an adapter's rank and alpha
_CODE_OF = ("transformers.", "peft.")  # packages that the `auto_mapping` of an adapter may name


def check_files(folder: Path, key: str) -> None:
    """Check the links and the JSON files of a model or tokenizer (exit 2).

    Raises:
        UserError: finetune refuses an entry. The error names each file and entry.
    """
    check_links(regular_files.entries(folder), key)
    problems = list[Problem]()
    regular_files.check_folder(folder, key)
    for name, look in _LOOKS.items():
        if (folder / name).is_file():
            problems += look(folder / name, key)
    raise_if_any(problems)


def check_model(folder: Path, key: str) -> None:
    """Call `check_files`, and check that the weights are safetensors of a whole model (exit 2)."""
    check_files(folder, key)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(_not_a_model(key, str(folder)))
    if (folder / "adapter_config.json").exists():  # transformers would load the adapter's base model instead
        raise UserError(
            Problem(
                "the folder holds a model and an adapter",
                key,
                where=str(folder / "adapter_config.json"),
                fix="move adapter_config.json to another folder",
                why="transformers would load the adapter's base model",
                code="model-files",
            )
        )
    names = sorted(entry.name for entry in folder.iterdir())
    if shards := list(filter(_DISTRIBUTED.fullmatch, names)):
        raise UserError(
            Problem(
                "the folder holds a distributed checkpoint, which finetune does not read",
                key,
                where=str(folder),
                found=", ".join(shards[:3]),
                fix="load the model with transformers, and save it with save_pretrained(FOLDER)",
                why="transformers would read all weight files of the folder in place of the model's own",
                code="model-files",
            )
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not find_weight_files(folder, key):
        raise UserError(only_pickles(key, ", ".join(pickles[:6])))


def check_adapter(folder: Path, key: str) -> None:
    """Check the links and the config of an adapter, and that its weights are safetensors (exit 2)."""
    check_files(folder, key)
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in PICKLES)
    if pickles and not (folder / ADAPTER).exists():
        raise UserError(only_pickles(key, ", ".join(pickles[:6])))


@cache
def check_hub(name: str, revision: str, key: str) -> None:
    """Check a model on the Hub in the same way (exit 2). Download only its JSON files."""
    problems: list[Problem] = []
    for file, look in {**_LOOKS, "adapter_config.json": _redirects}.items():
        path = from_hub(name, revision, file)
        problems += look(Path(path), key) if path else ()
    raise_if_any(problems)


def from_hub(name: str, revision: str, file: str) -> str | None:
    """Return the local path of a repository's file, or `None` without the file or the Hub."""
    from transformers.utils.hub import cached_file

    return cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def check_links(files: Iterable[Path], key: str) -> None:
    """Refuse links that lead out of their folder (exit 2)."""
    raise_if_any(_links(files, key))


def real_path(path: Path) -> Path:
    """Return a path without links. `Path.resolve` raises for a link to itself; this returns the link."""
    return Path(os.path.realpath(path))


def only_pickles(key: str, found: str) -> Problem:
    return Problem(
        "the weights are only in pickles",
        key,
        found=found,
        expected="safetensors",
        fix="convert the files where you trust them: from_pretrained(...), then save_pretrained(...)",
        why="a pickle can run code when it is opened",
        code="unsafe-file",
    )


def _not_a_model(key: str, found: str) -> Problem:
    return Problem(
        "this is an adapter, not a model",
        key,
        found=found,
        fix="name the adapter in adapter.init_from, and its base model in model.name",
        code="model-not-found",
    )


def _links(files: Iterable[Path], key: str) -> Iterator[Problem]:
    for entry in files:
        if not entry.is_symlink():
            continue
        home, target = real_path(entry.parent), real_path(entry)
        # the Hub's cache: snapshots/<commit>/config.json -> ../../blobs/<hash>
        cached = (above for above in (home, *home.parents) if above.parent.name == "snapshots")
        blobs = next((commit.parent.parent / "blobs" for commit in cached), home)
        if target.is_symlink():
            yield Problem(
                "a link leads to itself",
                key,
                where=str(entry),
                found=f"a link to {os.readlink(entry)}",
                fix=f"rm {shlex.quote(str(entry))}",
                why="no program can open it",
                code="unsafe-file",
            )
        elif not (target.is_relative_to(home) or target.is_relative_to(blobs)):
            yield Problem(
                "a link leads out of its folder",
                key,
                where=str(entry),
                found=f"a link to {target}",
                fix=safe_files.copy_of_link(entry),
                why="it could name any file of this machine",
                code="unsafe-file",
            )


def read_object(path: Path, key: str) -> dict[str, Any]:
    """Return the content of a JSON file that must hold an object (exit 2)."""
    content = _read(path, key)
    if not isinstance(content, dict):
        raise UserError(_no_object("the file has no JSON object", content, path, key))
    return content


def _no_object(what: str, content: object, path: Path, key: str) -> Problem:
    return Problem(
        what,
        key,
        where=str(path),
        found=f"a {type(content).__name__}",
        expected="{...}",
        fix=DOWNLOAD_AGAIN,
        why="transformers expects an object in this file",
        code="model-files",
    )


def _read(path: Path, key: str) -> Any:
    try:
        return regular_files.read_json(path, key)
    except ValueError as error:
        raise UserError(
            Problem(
                "the file is not JSON",
                key,
                where=str(path),
                found=str(error)[:200],
                fix=DOWNLOAD_AGAIN,
                code="model-files",
            )
        ) from None


def _index(path: Path, key: str) -> Iterator[Problem]:
    """Check that the files of an index are in its folder."""
    content = _read(path, key)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict):
        yield Problem(
            "the file is not an index of weight files",
            key,
            where=str(path),
            expected="weight_map: {tensor: file}",
            fix=DOWNLOAD_AGAIN,
            why="the index says which file holds a tensor",
            code="model-files",
        )
        return
    if not isinstance(content.get("metadata"), dict):  # transformers 5.22 would raise a KeyError
        yield Problem(
            "the index of weight files has no metadata",
            key,
            where=str(path),
            fix='add "metadata": {} to the file',
            why="transformers reads this key",
            code="model-files",
        )
    outside = {str(file): None for file in named.values() if not is_plain_name(file)}
    if outside:
        yield Problem(
            "the index names files outside of its folder",
            key,
            where=str(path),
            found=", ".join(outside)[:200],
            expected="names of safetensors files in its folder",
            fix="use a model from a source that you trust",
            why="these files could be anywhere on this machine",
            code="unsafe-file",
        )


def _config(path: Path, key: str) -> Iterator[Problem]:
    """Check that a config does not choose kernels or trust remote code. Only the recipe may do that."""
    content = _read(path, key)
    if not isinstance(content, dict):
        yield _no_object("the config has no JSON object", content, path, key)
        return
    for name, value in _entries(content):
        if _IMPLEMENTATION.fullmatch(name):
            texts = [text for _, text in _entries({name: value})] if isinstance(value, dict) else [value]
            if any(isinstance(text, str) and "/" in text for text in texts):
                yield Problem(
                    "the config names a kernel to download",
                    key,
                    where=str(path),
                    found=f"{name}: {value}"[:200],
                    fix=f"remove {name} from the file",
                    why="a kernel can run any code. `model.attention` sets the kernel",
                    code="unsafe-file",
                )
        if name in _IN_PLACE:
            yield Problem(
                "the config names files that transformers reads in place of others",
                key,
                where=str(path),
                found=f"{name}: {value}"[:200],
                fix=f"remove {name} from the file",
                why="finetune checks config.json and tokenizer.json alone",
                code="unsafe-file",
            )
        if name == "trust_remote_code" and value:
            yield Problem(
                "the config asks to run code of the model",
                key,
                where=str(path),
                found=f"{name}: {value}"[:200],
                fix=f"remove {name} from the file",
                why="finetune runs no code of a model",
                code="unsafe-file",
            )


def _adapter_config(path: Path, key: str) -> Iterator[Problem]:
    """Check the modules that an adapter's config names, because PEFT imports them (peft 3085, 3090)."""
    yield from _config(path, key)
    content = _read(path, key)
    if not isinstance(content, dict):
        return  # reported above
    mapped = content.get("auto_mapping") or {}
    library = mapped.get("parent_library") or "transformers." if isinstance(mapped, dict) else repr(mapped)
    core = content.get("megatron_core") or "megatron.core"
    for name, value, allowed in (
        ("auto_mapping.parent_library", str(library), _CODE_OF),
        ("megatron_core", str(core), ("megatron.core",)),
    ):
        if not value.startswith(allowed):
            yield Problem(
                "the config names a Python module to import",
                key,
                where=str(path),
                found=f"{name}: {value}"[:200],
                expected=f"{' or '.join(allowed)} ...",
                why="PEFT would run the code of this module",
                fix=f"remove {name} from the file",
                code="unsafe-file",
            )
    yield from _other_files(content, path, key)
    yield from _odd_values(content, path, key)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER  # NaN is not less


def _is_scale(value: Any) -> bool:
    return _is_number(value) and value != 0


def _are_scales(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_scale, value.values()))


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) or _are_names(value)


def _are_places(value: object) -> bool:
    return all(type(one) is int for one in (value if isinstance(value, list) else [value]))


def _are_tokens(value: object) -> bool:
    lists = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(one, list) and _are_places(one) for one in lists)


_NAMES, _PATTERN = (_are_names, "a list of names"), (_is_pattern, "a list of names, or a pattern")
_USUAL: dict[str, tuple[Callable[[Any], bool], str]] = {  # what PEFT writes into adapter_config.json
    "r": (_is_number, "a number"),
    "lora_alpha": (_is_scale, "a number other than 0"),
    "alpha_pattern": (_are_scales, "an object of numbers other than 0"),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    **dict.fromkeys(("target_parameters", "modules_to_save"), _NAMES),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern", "feedforward_modules"), _PATTERN),
    "rank_pattern": (lambda value: isinstance(value, dict), "an object"),
    "layers_to_transform": (_are_places, "a list of integers"),
    "trainable_token_indices": (_are_tokens, "a list of token ids"),
}

_UNREAD = (  # keys of LoRA, why finetune reads no such adapter, and what to do
    (
        "alora_invocation_tokens",
        "finetune activates no adapter by tokens of the prompt",
        "train a plain LoRA",
    ),
    ("megatron_config", "it needs Megatron to load", "convert the adapter to plain PEFT"),
    (
        "layer_replication",
        "finetune does not copy layers",
        "copy the layers of the base model, and train again",
    ),
)


def _odd_values(content: dict[str, Any], path: Path, key: str) -> Iterator[Problem]:
    """Find values of LoRA that PEFT does not write."""
    for name, (is_usual, expected) in _USUAL.items():
        value = content.get(name)
        if value is not None and not is_usual(value):
            yield Problem(
                "the config of the adapter has an odd value",
                key,
                where=str(path),
                found=f"{name}: {value}"[:200],
                expected=expected,
                fix=SAVE_AGAIN,
                why="PEFT itself writes no such value",
                code="adapter-files",
            )
    for name, reason, instead in _UNREAD:
        if content.get(name) is not None:
            yield Problem(
                "finetune does not read this kind of adapter",
                key,
                where=str(path),
                found=f"{name}: {content[name]}"[:200],
                fix=instead,
                why=reason,
                code="adapter-files",
            )


def _other_files(content: dict[str, Any], path: Path, key: str) -> Iterator[Problem]:
    """Refuse names of files that PEFT would open to continue the training of an adapter."""
    base, tokenizer = content.get("base_model_name_or_path"), content.get("tokenizer_name_or_path")
    named = {
        "tokenizer_name_or_path": tokenizer if tokenizer != base else None,
        "tokenizer_kwargs": content.get("tokenizer_kwargs"),
        "prompt_tuning_init_state_dict_path": content.get("prompt_tuning_init_state_dict_path"),
        "adapters": content.get("adapters"),  # a key of X-LoRA
    }
    for name, value in named.items():
        if value:
            yield Problem(
                "the config names files outside of its folder",
                key,
                where=str(path),
                found=f"{name}: {value}"[:200],
                fix=f"remove {name} from the file",
                why="PEFT would open these files",
                code="unsafe-file",
            )


def _redirects(path: Path, key: str) -> Iterator[Problem]:
    """Report an adapter config in a model's repository. transformers would load the adapter's base model."""
    yield _not_a_model(key, path.name)


def _entries(value: object) -> Iterator[tuple[str, Any]]:
    """Yield each key and value of nested JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key), item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)


def _model_config(path: Path, key: str) -> Iterator[Problem]:
    yield from _config(path, key)
    yield from problems_of_config(_read(path, key), path, key)


def problems_of_config(content: object, path: Path, key: str) -> Iterator[Problem]:
    """Find sizes and classes in a model's config.json that no model has."""
    yield from quantization_values.problems(_entries(content), str(path), key)
    if isinstance(content, dict):  # the axes of a quantization config are not sizes of the model
        content = {name: value for name, value in content.items() if name != "quantization_config"}
        yield from config_values.members(content, str(path), key)
    yield from config_values.problems(_entries(content), str(path), key)


# Arguments of transformers' tokenizers that are no settings of a file
TOKENIZER_ARGUMENTS = frozenset({
    "tokenizer_object", "__slow_tokenizer", "gguf_file", "post_processor", "vocab", "merges",
    "tokenizer_truncation", "tokenizer_padding", "_json_truncation", "_json_padding", "decoder",
    "_tokenizer", "backend_tokenizer",
})  # fmt: skip
_COUNT = re.compile("extra_ids|offset|num_.*")  # arguments of tokenizer classes that add tokens
LONGEST_TEKKEN = 20_000  # characters of a token in base64. transformers tries each cut of a token


def _tokenizer_config(path: Path, key: str) -> Iterator[Problem]:
    yield from _config(path, key)
    content = _read(path, key)
    added = content.get("added_tokens_decoder") if isinstance(content, dict) else None
    count = len(added) if isinstance(added, dict) else 0
    yield from _too_many_tokens(max(count, len(_texts(content))), path, key)
    yield from _too_long_tokens(content, path, key)
    yield from _odd_keys(content, path, key)
    given = content if isinstance(content, dict) else {}
    yield from _wrong_values(given, path, key)
    for name in sorted(TOKENIZER_ARGUMENTS & given.keys()):
        if given[name] is not None:
            yield Problem(
                "a key of the tokenizer's settings takes the place of an argument of transformers",
                key,
                where=str(path),
                found=f"{name}: {given[name]!r}"[:200],
                fix=f"remove {name} from the file",
                why="transformers sets it itself",
                code="model-files",
            )


def _wrong_values(content: dict[str, Any], path: Path, key: str) -> Iterator[Problem]:
    """Find counts of tokens that are too large, and values of a type with which transformers fails later."""
    names, processor = content.get("model_input_names"), content.get("processor_class")
    wrong = [("model_input_names", "a list of names")] * (names is not None and not _are_names(names))
    wrong += [("processor_class", "a name")] * (processor is not None and not isinstance(processor, str))
    for name, value in content.items():
        if _COUNT.fullmatch(name) and isinstance(value, int | float) and not abs(value) <= MOST_ADDED:
            wrong.append((name, f"at most {MOST_ADDED:,}"))
    for name, expected in wrong:
        yield Problem(
            "a value of the tokenizer's settings is wrong",
            key,
            where=str(path),
            found=f"{name}: {content[name]!r}"[:200],
            expected=expected,
            fix=DOWNLOAD_AGAIN,
            code="model-files",
        )


def _tekken(path: Path, key: str) -> Iterator[Problem]:
    """Check the counts and the lengths of Mistral's tokenizer, from which transformers makes its own."""
    content = read_object(path, key)
    config, vocabulary = content.get("config"), content.get("vocab")
    numbers: dict[str, Any] = config if isinstance(config, dict) else {}
    special = numbers.get("default_num_special_tokens")
    if isinstance(special, int | float):
        yield from _too_many_tokens(int(min(special, 2**31)), path, key)
    for name, value in numbers.items():
        if isinstance(value, int | float) and not abs(value) <= _LARGEST_ID:
            yield _wrong_tekken(f"{name}: {value}", f"at most {_LARGEST_ID:,}", path, key)
    texts = [entry.get("token_bytes") for entry in vocabulary or () if isinstance(entry, dict)]
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > LONGEST_TEKKEN:
        yield _wrong_tekken(f"a token of {longest:,} characters", f"{LONGEST_TEKKEN:,}", path, key)


def _wrong_tekken(found: str, expected: str, path: Path, key: str) -> Problem:
    return Problem(
        "the tokenizer's file has a value that no tokenizer has",
        key,
        where=str(path),
        found=found[:200],
        expected=expected,
        fix=DOWNLOAD_AGAIN,
        code="model-files",
    )


def _odd_keys(content: object, path: Path, key: str) -> Iterator[Problem]:
    """Find keys that are not printable, because the tokenizers library prints unknown keys of tokens."""
    odd = [name for name, _ in _entries(content) if not name.isprintable()]
    if odd:
        yield Problem(
            "a key of the tokenizer's settings has control characters",
            key,
            where=str(path),
            found=repr(odd[0])[:200],
            fix=DOWNLOAD_AGAIN,
            why="the tokenizers library prints such keys to the terminal",
            code="unsafe-file",
        )


def _added_tokens(path: Path, key: str) -> Iterator[Problem]:
    content = _read(path, key)
    yield from _too_many_tokens(len(content) if isinstance(content, dict) else 0, path, key)
    yield from _too_long_tokens(list(content) if isinstance(content, dict) else [], path, key)


def _tokens_by_name(path: Path, key: str) -> Iterator[Problem]:
    content = _read(path, key)
    yield from _too_many_tokens(len(_texts(content)), path, key)
    yield from _too_long_tokens(content, path, key)
    yield from _odd_keys(content, path, key)


def _tokenizer(path: Path, key: str) -> Iterator[Problem]:
    """Count the added tokens without a slow parse of the file. Each of them is an object."""
    text = path.read_bytes()
    try:
        strict_json.check_size(text)
        if (count := text.count(b":")) > MOST_NAMES:
            raise ValueError(f"about {count:,} names, and {MOST_NAMES:,} are allowed")
    except ValueError as error:
        yield Problem(
            "the tokenizer's file has too many values",
            key,
            where=str(path),
            found=str(error),
            fix=DOWNLOAD_AGAIN,
            code="unsafe-file",
        )
        return
    yield from _too_many_tokens(text.count(b"{"), path, key)
    yield from _too_long_tokens(_added(text.decode(errors="replace")), path, key)


def _added(text: str) -> Any:
    """Return the added tokens of a tokenizer.json, or its whole content if their place is not certain."""
    places = list(_ADDED.finditer(text))
    try:
        if len(places) == 1 and not _ESCAPED.search(text):
            return json.JSONDecoder().raw_decode(text, places[0].end())[0]
        return json.loads(text)
    except (ValueError, RecursionError):  # the tokenizers library reports what is wrong
        return None


def _texts(content: object) -> list[str]:
    """Return all strings in nested values, without the keys."""
    waiting, found = [content], list[str]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found


def _too_long_tokens(added: object, path: Path, key: str) -> Iterator[Problem]:
    """Check the length of all strings. A tokenizer builds a table with a row for each of their characters."""
    length = sum(map(len, _texts(added)))
    if length > MOST_CHARACTERS:
        yield Problem(
            "the added tokens of the tokenizer are too long",
            key,
            where=str(path),
            found=f"{length:,} characters",
            expected=f"at most {MOST_CHARACTERS:,}",
            fix="use a tokenizer with fewer added tokens",
            code="unsafe-file",
        )


def _too_many_tokens(count: int, path: Path, key: str) -> Iterator[Problem]:
    """Check the number of added tokens. A tokenizer adds them one by one and searches each text for them."""
    if count > MOST_ADDED:
        yield Problem(
            "the tokenizer has too many added tokens",
            key,
            where=str(path),
            found=f"{count:,}",
            expected=f"at most {MOST_ADDED:,}",
            fix="use a tokenizer with fewer added tokens",
            code="unsafe-file",
        )


_LOOKS: dict[str, Callable[[Path, str], Iterator[Problem]]] = {
    "config.json": _model_config,
    "generation_config.json": _model_config,
    "tokenizer_config.json": _tokenizer_config,
    "tokenizer.json": _tokenizer,
    "added_tokens.json": _added_tokens,
    "special_tokens_map.json": _tokens_by_name,
    "processor_config.json": _config,
    "tekken.json": _tekken,
    "adapter_config.json": _adapter_config,
    INDEX: _index,
}
