"""Open the source of an export: a run, or an adapter without a run (a folder of PEFT, or on the Hub)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import shipped_files, untrusted_files
from finetune.core.errors import Problem, UserError
from finetune.core.paths import local_path
from finetune.evaluation import reopen
from finetune.hub import client
from finetune.models import model_files, tokenizer_setup
from finetune.recipe import loader
from finetune.recipe.schema import Model, Recipe
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

MOST_ADDED = 1000  # tokens that an adapter's tokenizer has in addition to those of its base model
FILES = ("adapter_config.json", "adapter_model.safetensors")
WITHOUT_RUN = (
    "this adapter has no run, so finetune skipped the comparison with an evaluation. It compared prompts, "
    "answers and the loss on texts that it ships, against the adapter on its base model"
)


class Source(NamedTuple):
    """A run, or an adapter without a run and the recipe that loads it."""

    folder: RunFolder
    name: str
    """The name of the exported model."""
    notes: list[str]

    @property
    def has_run(self) -> bool:
        return not self.folder.is_plain_adapter

    @property
    def output(self) -> tuple[Path, str]:
        """Return the folder for exports, and the start of their names."""
        return (self.folder.path, "export") if self.has_run else (Path(), f"{self.name}-export")


def open_source(name: str | Path) -> Source:
    """Open a run or an adapter by its folder, or by its name on the Hub.

    Raises:
        UserError: there is neither (exit 2), or the Hub can't be reached (exit 3).
    """
    path, notes = Path(name), list[str]()
    title = path.absolute().name
    if not path.exists() and not local_path(str(name)) and not path.parent.is_dir():
        repo, revision = client.split(str(name))
        path, commit = client.download(str(name), ["*.safetensors", "*.json", "*.jinja", "*.model", "*.yaml"])
        title = repo.rpartition("/")[2]
        if not (path / "recipe.resolved.yaml").exists():
            notes = [f"{name} is the adapter of commit {commit}"] if revision != commit else []
        else:
            path = run_folder.open_run(f"{repo}@{commit}").path
            title = path.name
    folder = RunFolder(path)
    if not folder.is_plain_adapter:
        folder = run_folder.open_run(path)
        return Source(folder, folder.path.absolute().name, notes)
    check_adapter(folder)
    return Source(folder, title, [*notes, WITHOUT_RUN])


def check_adapter(folder: RunFolder) -> None:
    """Raise a UserError if a folder of PEFT holds code, foreign links or no weights (exit 2)."""
    untrusted_files.check_adapter(folder.path, "")
    missing = [name for name in FILES if not (folder.path / name).exists()]
    if missing:
        raise UserError(
            Problem(
                f"the adapter has no {', '.join(missing)}",
                where=str(folder.path),
                found=", ".join(sorted(entry.name for entry in folder.path.iterdir())[:6])
                or "an empty folder",
                expected=f"a folder with {' and '.join(FILES)}",
                fix=untrusted_files.SAVE_AGAIN,
                why="finetune reads only adapters in safetensors",
                code="adapter-files",
            )
        )


def recipe_of(source: Source, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a run. For an adapter without a run, return the recipe that loads its base model.

    Raises:
        UserError: the base model is not on this machine, or an override is wrong (exit 2).
    """
    if source.has_run:
        return run_folder.recipe_of(source.folder, overrides)
    place = source.folder.path / "adapter_config.json"
    config = untrusted_files.read_object(place, "")
    base = {"name": config.get("base_model_name_or_path"), "revision": config.get("revision")}
    chosen = [text.partition("=")[2] for text in overrides if text.startswith("model.name=")]
    name = str((chosen or [base["name"] or ""])[-1])
    if not name or (local_path(name) and not os.path.exists(os.path.expanduser(name))):
        raise UserError(
            Problem(
                "the base model of the adapter is not on this machine",
                "model.name",
                where=str(place),
                found=name or "no name",
                fix="add model.name=PATH",
                code="path",
            )
        )
    kind = "full" if not config.get("peft_type") else str(config["peft_type"]).lower()
    values: dict[str, Any] = {
        "model": {**base, "name": name, "quantization": "none"},
        "data": {"name": str(shipped_files.folder("examples") / "general" / "text.jsonl")},
        "adapter": {"type": kind},
    }
    values["model"] |= {"revision": None} if chosen else {}
    recipe = loader.from_values(values, place, list(overrides))
    model_files.check_exists(recipe.model)
    pinned = model_files.pinned(recipe.model)
    added = _added_tokens(source.folder, pinned)
    return recipe.model_copy(update={"model": pinned.model_copy(update={"add_tokens": added})})


def _added_tokens(folder: RunFolder, base: Model) -> list[str]:
    """Return the tokens of the adapter's tokenizer that its base model lacks, in the order of their ids."""
    if not _has_tokenizer(folder):
        return []
    known = tokenizer_setup.load_tokenizer(base).get_vocab()
    theirs = reopen.tokenizer_of(folder).get_vocab()
    added = sorted(theirs.keys() - known.keys(), key=lambda token: theirs[token])
    if len(added) > MOST_ADDED:
        raise UserError(
            Problem(
                "the tokenizer of the adapter has too many new tokens",
                where=str(folder.weights / "tokenizer.json"),
                found=f"{len(added):,}",
                expected=f"at most {MOST_ADDED:,}",
                fix="merge the adapter with PEFT, and convert the merged model",
                code="tokenizer",
            )
        )
    return added


def _has_tokenizer(folder: RunFolder) -> bool:
    return (folder.weights / "tokenizer_config.json").exists()


def tokenizer_of(source: Source, recipe: Recipe) -> Any:
    """Return the tokenizer that is saved with the weights, or else the base model's."""
    if source.has_run or _has_tokenizer(source.folder):
        return reopen.tokenizer_of(source.folder)
    return tokenizer_setup.load_tokenizer(recipe.model)


def config_of(source: Source, recipe: Recipe) -> Any:
    """Return the config of the base model, or of the weights of full fine-tuning."""
    folder = source.folder
    is_adapter = folder.weights == folder.adapter
    return model_files.read_config(recipe.model if is_adapter else Model(name=str(folder.model)))
