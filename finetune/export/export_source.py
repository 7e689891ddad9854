"""Open the source of an export: a run, or an adapter without a run (a folder of PEFT, or on the Hub)."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import shipped_files, untrusted_files
from finetune.core.errors import Problem, UserError
from finetune.core.paths import local_path
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.evaluation import reopen, tasks, validation_set
from finetune.export import serving_check, verify_merge
from finetune.export.serving_check import Texts
from finetune.hub import client
from finetune.models import tokenizer_setup
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.recipe.schema import Recipe

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
        what, fix = f"the adapter has no {', '.join(missing)}", "save the adapter again with PEFT"
        raise UserError(Problem(what, where=str(folder.path), fix=fix, code="adapter-files"))


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
    if not name or (local_path(name) and not Path(name).expanduser().exists()):
        what, fix = "the base model of the adapter is not on this machine", "add model.name=PATH"
        raise UserError(Problem(what, "model.name", str(place), name or "no name", fix=fix, code="path"))
    kind = "full" if not config.get("peft_type") else str(config["peft_type"]).lower()
    values: dict[str, Any] = {
        "model": {**base, "name": name, "quantization": "none"},
        "data": {"name": str(shipped_files.folder("examples") / "general" / "text.jsonl")},
        "adapter": {"type": kind},
    }
    values["model"] |= {"revision": None} if chosen else {}
    recipe = loader.from_values(values, place, list(overrides))
    added = _added_tokens(source.folder, recipe.model)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"add_tokens": added})})


def _added_tokens(folder: RunFolder, base: Model) -> list[str]:
    """Return the tokens of the adapter's tokenizer that its base model lacks, in the order of their ids."""
    if not _has_tokenizer(folder):
        return []
    known = tokenizer_setup.load_tokenizer(base).get_vocab()
    theirs = reopen.tokenizer_of(folder).get_vocab()
    return sorted(theirs.keys() - known.keys(), key=lambda token: theirs[token])


def _has_tokenizer(folder: RunFolder) -> bool:
    return (folder.weights / "tokenizer_config.json").exists()


def tokenizer_of(source: Source, recipe: Recipe) -> Any:
    """Return the tokenizer that is saved with the weights, or else the base model's."""
    if source.has_run or _has_tokenizer(source.folder):
        return reopen.tokenizer_of(source.folder)
    return tokenizer_setup.load_tokenizer(recipe.model)


def texts_of(source: Source, recipe: Recipe, tokenizer: Any) -> Texts:
    """Return the validation set of a run. For an adapter without a run, return texts that finetune ships."""
    if not source.has_run:
        return _shipped(recipe, tokenizer)
    held_out, _ = validation_set.held_out(source.folder, recipe, tokenizer)
    rows, _ = verify_merge.probes(recipe, tokenizer, held_out)
    examples = [row.example for row in held_out if row.example.asks][: serving_check.CHATS]
    documents = [document for row in held_out for document in row.documents]
    return Texts(rows, examples, first_of(documents))


def first_of(documents: list[Encoded]) -> list[Encoded]:
    """Return the first documents, with about as many trained tokens as the check compares losses of."""
    counts = [sum(end - start for start, end in document.trained) for document in documents]
    before = [0, *accumulate(counts)]
    return [one for one, total in zip(documents, before, strict=False) if total < serving_check.LOSS_TOKENS]


def _shipped(recipe: Recipe, tokenizer: Any) -> Texts:
    """Return questions and texts that finetune ships, as chats if the tokenizer has a template."""
    path = shipped_files.folder("examples") / "general" / "knowledge.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    examples = [_asked(row["question"], tokenizer) for row in rows[: serving_check.CHATS]]
    texts = tasks.general_texts(recipe.eval.model_copy(update={"forgetting": True}))[
        : verify_merge.PROBE_ROWS
    ]
    ids = [tokenizer(text)["input_ids"][: verify_merge.PROBE_TOKENS] for text in texts]
    documents = [Encoded(row, [(0, len(row))]) for row in ids]
    return Texts(ids, examples, first_of(documents))


def _asked(question: str, tokenizer: Any) -> Example:
    if not tokenizer.chat_template:
        return Example("shipped", prompt=question)
    answer = {"role": "assistant", "content": "Yes."}
    return Example("shipped", messages=[{"role": "user", "content": question}, answer], trained=(True,))
