"""Continue from a saved adapter (`adapter.init_from`): check its type, its options and its base model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.adapters import initialization, saved_layout, target_modules
from finetune.adapters.saved_layout import INIT_FROM, MERGED
from finetune.core import regular_files, untrusted_files, upstream_private
from finetune.core.errors import Exit, Problem, UserError, raise_if_any
from finetune.core.paths import local_path, on_the_hub, similar_files
from finetune.hub import client
from finetune.models import checkpoint_headers, module_names
from finetune.recipe import adapter_types
from finetune.recipe.adapter_rules import EMBEDDINGS, HEADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks
    from finetune.models.module_names import Names
    from finetune.recipe.schema import Adapter

# Whole embeddings and heads, which PEFT saves if they were resized or adapted
WHOLE = re.compile(
    rf"(^|\.)({'|'.join((*EMBEDDINGS, *HEADS))})"
    r"(\.(base_layer|token_adapter|original_module|modules_to_save))*\.(weight|bias)$"
)
# Keys of numbers that are no sizes, and keys of repetitions
_NO_SIZE = re.compile(
    "seed|prng_key|step|tinit|tfinal|deltaT|alpha|lambda|indices|token_ids|layers_to_transform|warmup|interval"
)
_REPEATED = re.compile("iter|terms|depth|num_samples|num_layers")
MOST_REPEATED, SMALL = 1000, 4096
FILES = ("adapter_config.json", "adapter_model.safetensors")


# Keys of a saved config that name files and versions
NAMES = (
    "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "parent_library", "peft_version",
    "task_type",
)  # fmt: skip


def check(adapter: Adapter, base: str, revision: str | None) -> list[str]:
    """Check whether training can continue from `adapter.init_from`. Read only its config, without torch.

    Returns:
        Notes on checks that need the loaded adapter.

    Raises:
        UserError: the adapter is missing, or has another type, options or base model (exit 2).
    """
    if adapter.source is None:
        return []
    folder = source_folder(adapter.source)
    if folder is None:
        repo, revision = client.split(adapter.source)
        client.check_name(repo, "adapter.init_from")
        note = f"adapter.init_from: {on_the_hub(adapter.source)}, so finetune checks it when it loads"
        is_pinned = client.COMMIT.fullmatch(revision or "")
        return [note if is_pinned else f"{note}. It can change: {repo}@<commit> pins it"]
    check_weights(folder, adapter.source)
    saved = untrusted_files.read_object(folder / "adapter_config.json", "adapter.init_from")
    raise_if_any(_source_problems(saved, adapter, base, revision))
    return []


def config_values(adapter: Adapter) -> dict[str, Any]:
    """Return the values in the config of `adapter.init_from` that decide how it trains."""
    if not adapter.source:
        return {}
    folder = source_folder(adapter.source)
    if folder is None:
        folder, _ = client.download("@".join(_pinned(adapter.source)), [FILES[0]], "adapter.init_from")
    saved = untrusted_files.read_object(folder / FILES[0], "adapter.init_from")
    return {
        key: sorted(map(str, value)) if isinstance(value, list) else value
        for key, value in saved.items()
        if key not in NAMES
    }


def check_weights(folder: Path, source: str) -> None:
    """Check that a folder has an adapter in safetensors, the only supported format (exit 2)."""
    untrusted_files.check_adapter(folder, "adapter.init_from")
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise UserError(
            Problem(
                f"the adapter has no {', '.join(missing)}",
                INIT_FROM,
                found=source,
                expected=f"a folder with {' and '.join(FILES)}",
                fix=untrusted_files.SAVE_AGAIN,
                why="finetune reads only adapters in safetensors",
                code="adapter-files",
            )
        )
    wrong = checkpoint_headers.adapter_problems(checkpoint_headers.stored(folder, INIT_FROM))
    raise_if_any([replace(one, key=INIT_FROM, where=source) for one in wrong])


def source_folder(source: str) -> Path | None:
    """Return the local folder of `adapter.init_from`: a PEFT folder or a run's adapter; `None` on the Hub.

    Raises:
        UserError: the folder has no adapter (exit 2).
    """
    path = Path(source)
    if not path.exists():
        if local_path(source):
            near = similar_files(path)
            raise UserError(
                Problem(
                    f"the path {source} does not exist",
                    INIT_FROM,
                    found=f"looked in {Path.cwd()} and the recipe's folder",
                    fix=f"init_from: {near}" if near else "name a run folder, such as runs/quickstart",
                    code="adapter-files",
                )
            )
        return None
    for folder in (path, path / "adapter"):
        if (folder / "adapter_config.json").exists():
            return folder
    raise UserError(
        Problem(
            f"{path} holds no adapter",
            INIT_FROM,
            found=", ".join(sorted(entry.name for entry in path.iterdir())[:6])
            if path.is_dir()
            else "a file",
            expected="a run folder, or a folder with adapter_config.json",
            fix="name a run folder, such as runs/quickstart",
            code="adapter-files",
        )
    )


def _source_problems(
    saved: dict[str, Any], adapter: Adapter, base: str, revision: str | None
) -> list[Problem]:
    """Return the problems that prevent training of a saved adapter with this recipe."""
    kind, problems = adapter_types.find(adapter.type), []
    if kind.prompt or kind.peft == "adalora":
        return [
            Problem(
                f"PEFT can't continue to train a saved {adapter.type} adapter",
                INIT_FROM,
                found=str(adapter.source),
                fix=(
                    "remove `init_from`"
                    if kind.prompt
                    else "merge the adapter (finetune merge), and train the result"
                ),
                code="adapter-type",
            )
        ]
    init = str(saved.get("init_lora_weights")).lower()
    if init.startswith(adapter_types.REBASING_INITS):
        return [
            Problem(
                "the adapter needs a modified base model",
                INIT_FROM,
                found=f"init_lora_weights: {init}",
                fix=(
                    "convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
                ),
                why=f"{init} moved a part of the base into it",
                code="adapter-files",
            )
        ]
    for key, why in adapter_types.UNSERVED.get(kind.peft, {}).items():
        if saved.get(key) is not None and saved[key] is not False:
            problems.append(
                Problem(
                    "finetune does not support an option of the saved adapter",
                    INIT_FROM,
                    found=f"{key}: {saved[key]}",
                    why=why,
                    fix="train a new adapter: remove `init_from`",
                    code="adapter-option",
                )
            )
    type_saved = str(getattr(saved.get("peft_type"), "value", saved.get("peft_type"))).lower()
    type_saved = f"{type_saved} {_variant(saved)}".strip()
    type_asked = f"{kind.peft} {_variant({**adapter.options(), **kind.sets})}".strip()
    if type_saved != type_asked:
        problems.append(
            Problem(
                "the saved adapter has another type",
                INIT_FROM,
                found=type_saved,
                expected=type_asked,
                fix=f"adapter.type: {type_saved.split()[0]}",
                code="adapter-type",
            )
        )
    for key, value in adapter.options().items():
        have = saved.get(key)
        same = _same(key, value, saved) if isinstance(value, list) else value == have
        is_every = value == target_modules.EVERYTHING
        is_every |= value == target_modules.WITH_EXPERTS and bool(saved.get("target_parameters"))
        if not same and not is_every:
            problems.append(
                Problem(
                    "the saved adapter has another value",
                    f"adapter.{key}",
                    found=str(value),
                    expected=str(have),
                    fix=f"remove `{key}`",
                    code="adapter-option",
                )
            )
    if not adapter.ours("from_other_base"):
        of, commit = str(saved.get("base_model_name_or_path")), saved.get("revision")
        same = of == base or (Path(of).exists() and Path(base).exists() and Path(of).samefile(base))
        known = [one for one in (commit, revision) if client.COMMIT.fullmatch(str(one))]
        if not same or len({*known}) > 1:  # two branches or tags may name the same commit
            problems.append(
                Problem(
                    "the adapter was trained on another base model",
                    INIT_FROM,
                    found=f"{of} {commit or ''}".strip(),
                    expected=f"{base} {revision or ''}".strip(),
                    fix=f"model.name: {of}, or from_other_base: true",
                    code="adapter-files",
                )
            )
    return problems


def _same(key: str, value: list[Any], saved: dict[str, Any]) -> bool:
    """Return whether a recipe's list equals the list in a saved config.

    With `ensure_weight_tying`, PEFT saves the full name of tied embeddings, with or without the other names.
    """
    requested, have = set(value), set(saved.get(key) or ())
    tied = set[str]()
    if saved.get("ensure_weight_tying") and key in ("modules_to_save", "target_modules"):
        tied = {name for name in requested | have if module_names.short(name) in (*EMBEDDINGS, *HEADS)}
    if tied & requested and any("." in name for name in tied & have):
        return requested - tied == have - tied
    return requested == have


def _variant(options: Mapping[str, object]) -> str:
    return " ".join(key for key in ("use_dora", "use_rslora") if options.get(key))


def check_tokens(adapter: Adapter, added: Sequence[str], known: Mapping[str, int], rows: int) -> list[str]:
    """Check that `model.add_tokens` holds the tokens of `adapter.init_from` that the base model lacks.

    Args:
        known: ids of the base model's tokens and of the added tokens.
        rows: size of the base model's embeddings, without added tokens.

    Returns:
        Notes on texts that are one token for the saved adapter, but several tokens in this run.

    Raises:
        UserError: the tokens differ, or whole saved embeddings do not fit (exit 2).
    """
    saved = _source_file(adapter.source, "adapter_config.json") if adapter.source else None
    if saved is None:
        return []
    tokenizer = _source_file(str(adapter.source), "tokenizer.json") or {}
    theirs = _added_in(tokenizer)
    lacking = [token for token in theirs if token not in known]
    trained = _rows_of(saved)
    needed = {
        token: place
        for token, place in theirs.items()
        if (token in added or token in lacking) and (trained is None or place in trained)
    }
    have = {token: known[token] for token in added}
    whole = _whole_rows(str(adapter.source))
    if whole and trained is not None and whole != rows:
        its = ", ".join(token for token in theirs if token in added or token in lacking)
        raise UserError(
            Problem(
                "the adapter's file holds embeddings of another size than the base model's",
                INIT_FROM,
                found=f"{whole:,} rows" + (f"; tokens that the base model lacks: {its}" if its else ""),
                expected=f"{rows:,} rows",
                fix=MERGED,
                code="adapter-files",
            )
        )
    if needed != have:
        tokens = json.dumps(sorted(needed, key=needed.__getitem__))
        raise UserError(
            Problem(
                "the saved adapter has trained other new tokens",
                "model.add_tokens",
                found=str(have or "none"),
                expected=str(needed or "none"),
                fix=f"model.add_tokens: {tokens}" if needed else "remove `add_tokens`",
                code="adapter-files",
            )
        )
    _check_rows(trained, whole, max([rows, *(place + 1 for place in have.values())]))
    if not lacking or needed:
        return []
    split = ", ".join(lacking[:6])
    return [
        f"adapter.init_from: the adapter did not train these tokens, and the base model lacks them: {split}"
    ]


def _added_in(tokenizer: Any) -> dict[str, int]:
    """Return the added tokens of a tokenizer.json, by their text.

    Raises:
        UserError: the file has another shape (exit 2).
    """
    added = (tokenizer.get("added_tokens") or []) if isinstance(tokenizer, dict) else None
    right = isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
        for token in added
    )
    if not right or added is None:
        raise UserError(
            Problem(
                "the tokenizer.json of the saved adapter is damaged",
                INIT_FROM,
                found=f"added_tokens: {added!r}"[:100],
                expected="a list of tokens, each with a text `content` and an integer `id`",
                fix="copy the file of the run again, or remove it",
                code="adapter-files",
            )
        )
    return {token["content"]: token["id"] for token in added}


def _check_rows(trained: set[int] | None, whole: int | None, rows: int) -> None:
    """Stop if the adapter's vocabulary differs from the base model's, including its new tokens (exit 2).

    Args:
        trained: ids of the embeddings that the adapter trains, or `None` if it trains all of them.
        whole: size of the embeddings in the adapter's file.
        rows: size of the base model's embeddings, including the tokens of `model.add_tokens`.
    """
    expected = f"{rows:,} rows"
    if trained is None and whole not in (None, rows):
        raise UserError(
            Problem(
                "the adapter's file holds embeddings of another size",
                INIT_FROM,
                found=f"{whole:,} rows",
                expected=expected,
                fix=MERGED,
                code="adapter-files",
            )
        )
    if unnamed := sorted(row for row in trained or () if row >= rows):
        raise UserError(
            Problem(
                "the adapter has trained token ids that the base model lacks",
                INIT_FROM,
                found=f"rows {unnamed}",
                expected=expected,
                fix="save the adapter's tokenizer.json in its folder",
                code="adapter-files",
            )
        )


def _pinned(source: str) -> tuple[str, str]:
    """Return the repository and the commit of an adapter on the Hub."""
    repo, revision = client.split(source)
    return repo, client.commit(repo, revision or "main")


def _source_file(source: str, name: str) -> Any:
    """Return the content of a JSON file of a saved adapter; `None` if it is missing or damaged."""
    with contextlib.suppress(UserError, OSError, ValueError):
        if folder := source_folder(source):
            path = folder / name
        else:
            repo, commit = _pinned(source)
            with client.explained(repo):
                path = Path(untrusted_files.from_hub(repo, commit, name) or "")
        if path.is_file():
            return regular_files.read_json(path, "adapter.init_from")
    return None


def slow_patterns(adapter: Adapter, names: Names) -> list[Problem]:
    """Return problems of regular expressions that take too long on the model's module names."""
    saved = _source_file(str(adapter.source), "adapter_config.json")
    options = {**(saved if isinstance(saved, dict) else {}), **adapter.options()}
    return target_modules.slow_patterns(options, [*names.kinds, *names.tower_kinds], "adapter.init_from")


def check_layout(adapter: Adapter, names: Names) -> list[Problem]:
    """Return the problems of a local adapter's modules. An adapter on the Hub is checked when it loads."""
    folder = source_folder(str(adapter.source))
    return saved_layout.check_layout(folder, names, adapter_types.find(adapter.type).peft) if folder else []


def check_patterns(folder: Path, model: nn.Module) -> None:
    """Stop if the adapter has a regular expression that takes too long on the model's names (exit 2)."""
    path = folder / "adapter_config.json"
    options = untrusted_files.read_object(path, str(path))
    names = [name for name, _ in model.named_modules() if name]
    raise_if_any(target_modules.slow_patterns(options, names, str(path)))


def check_config(folder: Path) -> None:
    """Check the type and the keys in adapter_config.json, before PEFT loads the adapter.

    PEFT ignores an unknown key, and takes the default of a key that is missing.

    Raises:
        UserError: finetune trains no such type, or a size does not fit the weights (exit 2). PEFT's own
            version does not write a key (exit 4).
    """
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = folder / "adapter_config.json"
    options = untrusted_files.read_object(path, str(path))
    kinds: dict[str, Any] = {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    _check_type(str(options.get("peft_type")), path)
    _check_sizes(options, folder)
    kind = kinds.get(str(options.get("peft_type")))
    if kind is None or options.get("peft_version") != peft.__version__:
        return
    if unknown := sorted(options.keys() - {field.name for field in dataclasses.fields(kind)}):
        raise UserError(
            Problem(
                "PEFT does not know a key of the adapter's config",
                where=str(path),
                found=", ".join(unknown[:5]),
                fix="restore the file from a copy, or train again",
                why="the file is damaged, and PEFT would use the default of another key",
                code="run-damaged",
            ),
            code=Exit.ARTIFACT,
        )


def is_rebased(config: Any) -> bool:
    """Return whether PEFT subtracts a part from the base model's weights when it loads an adapter."""
    init = str(getattr(config, "init_lora_weights", "")).lower()
    return init.startswith(adapter_types.REBASING_INITS)


def _check_type(name: str, path: Path) -> None:
    """Refuse the types that no recipe can have. PEFT opens other files for some of them (exit 2)."""
    kinds = [kind for kind in adapter_types.all_types().values() if kind.peft == name.lower()]
    why = kinds[0].refused if kinds else "PEFT does not know it"
    if why:
        raise UserError(
            Problem(
                "finetune does not read this type of adapter",
                where=str(path),
                found=f"peft_type: {name[:200]}",
                expected="a type of the adapters that finetune trains",
                fix="load the adapter with PEFT, if you trust it",
                why=why,
                code="adapter-type",
            )
        )


def _check_sizes(options: dict[str, Any], folder: Path) -> None:
    """Refuse sizes beyond those of the adapter's tensors, which PEFT would build first (exit 2)."""
    shapes = checkpoint_headers.tensors(folder).values()
    largest = max([SMALL, *(size for shape in shapes for size in shape)])
    waiting, wrong = list(options.items()), list[str]()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            # The keys of a pattern are the stranger's own, and may hold words such as alpha
            waiting += [(name if name.endswith("_pattern") else key, one) for key, one in value.items()]
        elif isinstance(value, list):
            waiting += [(name, one) for one in value]
        elif isinstance(value, str) and name == "init_lora_weights":
            wrong += [f"{name}: {value[:200]}"] * bool(re.search(r"\d{4}", value))
        elif isinstance(value, int | float) and not _NO_SIZE.search(name):
            limit = MOST_REPEATED if _REPEATED.search(name) else largest
            limit *= 4 if name == "encoder_hidden_size" else 1  # of P-tuning, which saves no encoder
            wrong += [f"{name}: {value}"] * (value > limit)
    if wrong:
        raise UserError(
            Problem(
                "the config of the adapter has sizes that do not fit its weights",
                where=str(folder / FILES[0]),
                found=", ".join(wrong[:5]),
                expected=f"sizes up to {largest:,}, and repetitions up to {MOST_REPEATED:,}",
                fix=untrusted_files.SAVE_AGAIN,
                code="adapter-files",
            )
        )


def _whole_rows(source: str) -> int | None:
    """Return the number of rows of whole embeddings or a whole head in an adapter's file, or `None`."""
    folder = None
    with contextlib.suppress(UserError):
        folder = source_folder(source)
    if folder is None:
        return None
    layers = {*EMBEDDINGS, *HEADS}
    for name, shape in checkpoint_headers.tensors(folder).items():
        part, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(shape) == 2 and module_names.short(part) in layers:
            return shape[0]
    return None


def _rows_of(saved: dict[str, Any]) -> set[int] | None:
    """Return the ids of the tokens whose embeddings an adapter trains; `None` for all tokens."""
    if {*EMBEDDINGS} & set(map(module_names.short, saved.get("modules_to_save") or ())):
        return None
    rows = saved.get("trainable_token_indices") or ()
    return set.intersection(*map(set, rows.values())) if isinstance(rows, dict) else set(rows)


def load(
    model: PreTrainedModel, adapter: Adapter, names: Names, added: Sequence[int], checks: RunChecks
) -> Any:
    """Load the adapter of `adapter.init_from` for training, and check that its whole file is used.

    Args:
        names: the names of the model, with the modules that get no gradient.
        added: ids of new tokens, whose embeddings train.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    source = str(adapter.source)
    folder = source_folder(source)
    if folder is None:
        pinned = "@".join(_pinned(source))
        folder, pinned = client.download(pinned, list(FILES), "adapter.init_from")
        source = f"{client.split(source)[0]}@{pinned}"
    check_weights(folder, source)
    misfit = f"the adapter of {source} does not fit this model"
    check_config(folder)
    with refusals(misfit):
        saved = PeftConfig.from_pretrained(str(folder)).to_dict()
    commit = upstream_private.commit_hash(model.config)
    problems = _source_problems(saved, adapter, str(model.name_or_path), commit)
    if (rows := _rows_of(saved)) is not None and (bare := len(set(added) - rows)):
        problems.append(
            Problem(
                "the saved adapter does not train the new tokens",
                "model.add_tokens",
                found=f"{bare} new tokens",
                fix="remove `add_tokens`",
                code="adapter-files",
            )
        )
    raise_if_any(problems)
    check_patterns(folder, model)
    raise_if_any(saved_layout.check_layout(folder, names, adapter_types.find(adapter.type).peft))
    with refusals(misfit):
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True, torch_device="cpu")
    config: Any = adapted.peft_config["default"]
    # From now on, this model is the adapter's base model.
    config.base_model_name_or_path, config.revision = model.name_or_path, commit
    # PEFT stacks the tensors of an adapter with one module per expert when it loads them
    on_disk = convert_peft_adapter_state_dict_for_transformers(
        adapted, config, load_peft_weights(str(folder), device="cpu")
    )
    live = get_peft_model_state_dict(adapted, **initialization.embeddings(adapted))
    check_whole(adapted, list(on_disk), source)
    if model.device.type == "meta":  # `check` tries the adapter on a model without weights
        check_finite(on_disk, source)
        return adapted
    equal = sum(
        name in live and bool((live[name].float().cpu() == tensor.float()).all())
        for name, tensor in on_disk.items()
    )
    checks.add(
        "adapter.init_from",
        expected=f"all {len(on_disk)} of {source}",
        actual=f"all {equal} of {source}",
        how="tensors of its file, compared with the model's",
        code=Exit.ARTIFACT,
    )
    return adapted


def check_whole(adapted: nn.Module, names: Sequence[str], source: str) -> None:
    """Check that the file has every tensor of the adapter and no others, and no NaN or Inf (exit 4).

    PEFT leaves missing tensors random. It ignores other tensors, or loads them into the base model.

    Args:
        names: names of the tensors in the file.
    """
    from peft import get_peft_model_state_dict

    # Otherwise PEFT would ask the Hub whether the embeddings were resized.
    live = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if missing := sorted(live.keys() - set(names)):
        what, found = (
            f"the file lacks {len(missing)} of the adapter's tensors",
            f"no {', '.join(missing[:3])}",
        )
    elif others := sorted(name for name in set(names) - live.keys() if not WHOLE.search(name)):
        what, found = f"the file has {len(others)} tensors that the adapter lacks", ", ".join(others[:3])
    else:
        return check_finite(live, source)
    raise UserError(
        Problem(what, where=source, found=found, fix=untrusted_files.SAVE_AGAIN, code="adapter-files"),
        code=Exit.ARTIFACT,
    )


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Check that saved weights have no NaN or Inf (exit 4). Skip weights that are quantized or offloaded."""
    whole = {name: one for name, one in tensors.items() if one.is_floating_point() and one.itemsize > 1}
    if broken := [name for name, one in whole.items() if not (one.is_meta or bool(one.isfinite().all()))]:
        raise UserError(
            Problem(
                "the saved weights have NaN or Inf",
                where=source,
                found=", ".join(sorted(broken)[:3]),
                fix="restore the folder from a copy, or train again",
                code="non-finite",
            ),
            code=Exit.ARTIFACT,
        )


@contextlib.contextmanager
def refusals(
    what: str,
    code: Exit = Exit.INPUT,
    *,
    where: str = "",
    key: str = "adapter",
    fix: str = "change the option, or run the command again with --debug",
) -> Iterator[None]:
    """Raise PEFT's errors as a UserError. Errors of memory or of a device pass unchanged."""
    import torch
    from accelerate.utils.memory import should_reduce_batch_size
    from safetensors import SafetensorError

    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (
        ValueError,
        TypeError,
        NotImplementedError,
        RuntimeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        AssertionError,
        re.error,  # from a pattern in the config of a saved adapter
        SafetensorError,
    ) as error:
        if should_reduce_batch_size(error):
            raise
        said = " ".join(str(error).split())
        raise UserError(
            Problem(
                what,
                key,
                where=where,
                found=said if len(said) <= 300 else f"{said[:300]} ...",
                fix=fix,
                code="adapter-option",
            ),
            code=code,
        ) from error
