"""Write and read the run folder, the only input of later commands.

recipe.resolved.yaml  environment.json  data_report.json  checks.json  metrics.jsonl  eval.json  log.txt
adapter/ (or model/ after full fine-tuning)
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetune.core import safe_files, standard_streams, strict_json, untrusted_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.folder_search import match_paths, walk
from finetune.core.paths import local_path, similar_files
from finetune.core.privacy import masked_json
from finetune.hub import client
from finetune.recipe import renames
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Recipe, Source
from finetune.run_folder.saved_weights import check_files, described

FORMAT_VERSION = 2  # the format of run folders, stored in environment.json; without it, the format is 1
EVALUATED = "eval.json"
EVALUATIONS = (EVALUATED, "eval.other.json")
_REPAIR = {  # how to repair a damaged file
    EVALUATED: "delete the file and run `finetune evaluate RUN`",
    "eval.other.json": "delete the file and run `finetune evaluate RUN`",
    "merge.json": "delete the file and merge again",
    "export.json": "delete the file and export again",
}
# Largest size in bytes of a file that grows with the run or its data, and of each other file
_LARGEST: dict[str, int] = dict.fromkeys(
    (*EVALUATIONS, "metrics.jsonl", "validation.jsonl"), safe_files.LARGEST
)
_LARGEST |= {"data_report.json": 16 * 2**20}
_LARGEST_OF_OTHERS = 4 * 2**20
UNPUBLISHED = "name a run that `finetune publish` has uploaded"
WEIGHTS = "weights.json"  # the files of the trained weights, each with a hash
WANDB = "wandb"  # W&B's folder in a run folder
HELD_OUT = "validation.jsonl"  # a copy of the validation set, so that the run can be evaluated anywhere
# Files that are published with the weights, so that the run can be opened elsewhere
PUBLISHED = (
    "recipe.resolved.yaml",
    "eval.json",
    "checks.json",
    "data_report.json",
    "environment.json",
    "metrics.jsonl",
    "merge.json",
    "export.json",
)
PACKAGES = [
    "finetune-toolkit",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "torchao",
    "tokenizers",
    "safetensors",
]


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def is_plain_adapter(self) -> bool:
        """Return whether this is a folder of PEFT, which no run of finetune has."""
        return (self.path / "adapter_config.json").exists() and not self.recipe.exists()

    @property
    def adapter(self) -> Path:
        """Return the folder of the adapter: `adapter/`. A folder of PEFT is its own adapter."""
        return self.path if self.is_plain_adapter else self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def weights(self) -> Path:
        """Return the folder of the trained weights: `model/` after full fine-tuning, else `adapter/`."""
        return self.model if self.model.exists() else self.adapter

    @property
    def staging(self) -> Path:
        """Return the Trainer's own output_dir."""
        return self.path / "checkpoints" / ".staging"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.resolved.yaml"

    @property
    def format_version(self) -> int:
        """Return the format version of this folder; 1 if it has none.

        Raises:
            UserError: a newer version of finetune wrote the folder (exit 2).
        """
        path = self.path / "environment.json"
        try:
            stated = _parse(self.read_text("environment.json")).get("format_version", 1)
        except (OSError, ValueError, AttributeError, UserError):
            # It is missing or damaged: the names of the other files tell the version
            old = any((self.path / name).exists() for name in renames.FILES.values())
            return 1 if old else FORMAT_VERSION
        if type(stated) is int and 1 <= stated <= FORMAT_VERSION:
            return stated
        newer = type(stated) is int and stated > FORMAT_VERSION
        raise UserError(
            Problem(
                "this release of finetune can't read the format of the run folder",
                where=str(path),
                found=f"format_version {json.dumps(stated)[:80]}",
                expected=f"1 to {FORMAT_VERSION}",
                fix="install a newer release of finetune"
                if newer
                else "restore environment.json from a copy",
                code="run-folder",
            )
        )

    def file(self, name: str) -> Path:
        """Return the path of a file by its current name. In format 1 the file may have an older name."""
        path = self.path / name
        old = self.path / renames.FILES.get(name, name)
        return old if old.exists() and not path.exists() else path

    @property
    def finished(self) -> bool:
        """Return whether the run is trained, saved and evaluated."""
        return self.weights.exists() and (self.path / "eval.json").exists()

    def write(self, name: str, value: object) -> None:
        """Write `value` as JSON atomically, without secrets, and with NaN and Inf as text."""
        text = masked_json(strict_json.spelt(value), indent=1) + "\n"
        try:
            _usable(name, text, name)
        except ValueError as error:  # a wrong file must not end the run
            standard_streams.say(
                f"warning: later commands can't read {name} ({error}); please report this as a bug",
                error=True,
            )
        self.write_text(name, text)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        safe_files.write_text(self.path, name, text)

    def record_weights(self, folder: Path) -> None:
        """Write weights.json for a new `adapter/` or `model/`."""
        self.write(WEIGHTS, {"folder": folder.name, "files": described(folder)})

    def check_weights(self) -> None:
        """Check that the files of the trained weights are as the run wrote them.

        A run of an earlier version has no record. Neither has a run that was published.

        Raises:
            UserError: a file changed or is missing (exit 4).
        """
        recorded = self.found(WEIGHTS)
        if recorded and recorded["folder"] == self.weights.name:
            check_files(self.weights, recorded["files"], f"delete {WEIGHTS} to use the files as they are")

    def read_text(self, name: str) -> str:
        """Return the text of a file of this run.

        Raises:
            OSError: the file is missing or can't be opened.
            UserError: a link leads out of the folder, or the file is not regular or too large (exit 2).
            ValueError: the text is not UTF-8.
        """
        path = self.file(name)
        below = path.relative_to(self.path)
        untrusted_files.check_links([self.path / part for part in (*below.parents[-2::-1], below)], "")
        real = untrusted_files.real_path(path)
        return safe_files.read_text(real.parent, real.name, _LARGEST.get(name, _LARGEST_OF_OTHERS))

    def read_recipe(self) -> str:
        """Return the text of recipe.resolved.yaml (exit 4 if it is not text)."""
        try:
            return self.read_text(self.recipe.name)
        except (OSError, ValueError) as error:
            raise UserError(
                Problem(
                    "finetune can't read the recipe of the run",
                    where=str(self.recipe),
                    found=str(error)[:200],
                    fix="restore the file from a copy",
                    code="run-damaged",
                ),
                code=Exit.ARTIFACT,
            ) from None

    def read(self, name: str, shape: str = "") -> Any:
        """Return the content of a JSON file of this run, and check its shape with `file_shapes`.

        Args:
            shape: a name of `file_shapes.SHAPES`; by default the name of the file.

        Raises:
            UserError: the file is missing or damaged (exit 4), or is a link or not a regular file (exit 2).
        """
        path = self.file(name)
        try:
            return _usable(name, self.read_text(name), shape or name, old=path.name != name)
        except FileNotFoundError:
            problem = Problem(
                f"{path.name} is missing",
                where=str(path),
                fix=_REPAIR.get(name, "restore the file from a copy").removeprefix("delete the file and "),
                code="run-damaged",
            )
        except (OSError, ValueError) as error:
            problem = Problem(
                f"{path.name} is damaged",
                where=str(path),
                found=" ".join(str(error).split())[:200],
                fix=_REPAIR.get(name, "restore the file from a copy"),
                code="run-damaged",
            )
        raise UserError(problem, code=Exit.ARTIFACT)

    def found(self, name: str) -> Any:
        """Return the result of `read`, or an empty dict if the file does not exist."""
        return self.read(name) if self.file(name).exists() else {}

    def measured_steps(self) -> list[dict[str, Any]]:
        """Return `steps` with NaN and Inf as numbers. Each step has every value that an experiment needs."""
        lines = self.steps("measured steps")
        return [{key: strict_json.number(value) for key, value in line.items()} for line in lines]

    def steps(self, shape: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl for training steps.

        Raises:
            UserError: a line is damaged (exit 4).
        """
        path = self.path / "metrics.jsonl"
        try:
            lines = self.read_text(path.name).splitlines() if path.exists() else []
            found = [line for line in map(read_step, lines) if "loss" in line]
            _check_steps(shape, found)
        except (OSError, ValueError) as error:
            raise UserError(
                Problem(
                    "metrics.jsonl is damaged",
                    where=str(path),
                    found=" ".join(str(error).split())[:200],
                    fix="restore the file from a copy, or delete the damaged lines",
                    code="run-damaged",
                ),
                code=Exit.ARTIFACT,
            ) from None
        return found


def read_step(line: str) -> dict[str, Any]:
    """Return the values of a line of metrics.jsonl.

    Raises:
        ValueError: the line is damaged.
    """
    from finetune.run_folder import file_shapes

    record = file_shapes.parse(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    _check_steps("metrics.jsonl", [record])
    return record


def _check_steps(shape: str, records: list[dict[str, Any]]) -> None:
    from finetune.run_folder import file_shapes

    numbers = [{key: strict_json.number(value) for key, value in record.items()} for record in records]
    file_shapes.check(shape, numbers)


def _parse(text: str) -> Any:
    from finetune.run_folder import file_shapes  # it imports pydantic, which not all callers need

    return file_shapes.parse(text)


def _usable(name: str, text: str, shape: str, *, old: bool = False) -> Any:
    """Return the content of a JSON file, with NaN and Inf as numbers.

    Args:
        old: whether the file has format 1.

    Raises:
        ValueError: the content does not have its shape.
    """
    from finetune.run_folder import file_shapes

    try:
        found: Any = file_shapes.parse(text)
        if name == "checks.json" and old:
            found = [{renames.CHECK_FIELDS.get(key, key): row[key] for key in row} for row in found]
        found = strict_json.scores(found) if name in EVALUATIONS else found
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    file_shapes.check(shape, found)
    return found


_AT_COMMIT = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")


def _instead(run: RunFolder) -> str:
    """Suggest a run for a path that is not a finished run."""
    if run.recipe.exists():
        return "continue the run: repeat the `finetune train` command with --resume=auto"
    named = run.path.parent.glob(f"{escape(run.path.name)}-[0-9]*")
    dated = [path for path in named if RunFolder(path).finished]
    if dated:
        return str(max(dated, key=lambda path: path.stat().st_mtime))
    if RunFolder(run.path.parent).finished:
        return str(run.path.parent)
    inside = [path for path in sorted(run.path.glob("*/")) if RunFolder(path).finished]
    if inside:
        return str(max(inside, key=lambda path: path.stat().st_mtime))
    near = similar_files(run.path)
    if near and RunFolder(Path(near)).finished:
        return near
    return "name the train.output_dir of a finished run, or ORGANIZATION/NAME@REVISION for a run on the Hub"


def open_run(path: str | Path) -> RunFolder:
    """Open a run folder, or a published run `organization/name@revision`.

    Raises:
        UserError: there is no run (exit 2), or its weights have changed (exit 4).
    """
    run = RunFolder(Path(path))
    if isinstance(path, str) and _AT_COMMIT.fullmatch(path) and run.path.exists():
        raise UserError(
            Problem(
                "the name means a run on the Hub and a folder",
                found=path,
                fix=f"name the folder ./{path}, or run the command in another folder",
                code="run-folder",
            )
        )
    of_hub = "@" in str(path) and not run.path.exists()
    if of_hub:
        run = _fetch(str(path))
    if not run.recipe.exists() or not run.weights.exists():
        missing = "recipe.resolved.yaml" if not run.recipe.exists() else "adapter/ or model/"
        raise UserError(
            Problem(
                "the path is not a finished run",
                where=str(path),
                found=f"no {missing}",
                fix=UNPUBLISHED if of_hub else _instead(run),
                code="run-folder",
            )
        )
    refuse_links(run.path)
    check = untrusted_files.check_adapter if run.weights == run.adapter else untrusted_files.check_model
    check(run.weights, "")
    run.check_weights()
    return run


def check_adapter(folder: Path) -> None:
    """Call `RunFolder.check_weights` if a folder is the `adapter/` of a run."""
    run = RunFolder(folder.resolve().parent)
    if run.recipe.exists() and folder.resolve() == run.adapter:
        run.check_weights()


def refuse_links(folder: Path) -> None:
    """Stop if a folder has links that leave it, or entries that are neither files nor folders (exit 2).

    The link to the Hub's cache that `_fetch` makes is allowed. finetune does not search W&B's own folder,
    which has links to W&B's logs. It neither reads nor publishes this folder.
    """
    root, problems = untrusted_files.real_path(folder), list[Problem]()
    for entry in walk(root) if root.is_dir() else ():
        if root / WANDB in entry.parents:
            continue
        mode = entry.lstat().st_mode
        target = untrusted_files.real_path(entry) if stat.S_ISLNK(mode) else entry
        if stat.S_ISLNK(mode) and target.is_symlink():
            problems.append(
                Problem("the link leads to itself", where=str(entry), fix="delete it", code="unsafe-file")
            )
        elif stat.S_ISLNK(mode) and not target.is_relative_to(root) and not _is_own_link(entry):
            problems.append(
                Problem(
                    "the link leads out of its folder",
                    where=str(entry),
                    found=os.readlink(entry),
                    fix="replace the link with a copy of the file",
                    code="unsafe-file",
                )
            )
        elif not (stat.S_ISLNK(mode) or stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            problems.append(
                Problem(
                    "the entry is neither a file nor a folder",
                    where=str(entry),
                    fix="delete it",
                    code="unsafe-file",
                )
            )
    if problems:
        raise UserError(*problems[:10])


def _is_own_link(entry: Path) -> bool:
    """Return whether `_fetch` made a link. It leads to a snapshot in the Hub's cache with the same recipe."""
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshot, recipe = entry.resolve(), "recipe.resolved.yaml"
    if entry.name not in ("adapter", "model") or snapshot.parent.name != "snapshots":
        return False
    if snapshot.parents[1].parent != Path(HF_HUB_CACHE).resolve():
        return False
    try:
        return (snapshot / recipe).read_bytes() == safe_files.read_bytes(entry.parent, recipe)
    except (OSError, UserError):
        return False


def _fetch(name: str) -> RunFolder:
    """Download a published run to runs/<name>-<commit>. The weights stay in the Hub's cache.

    A repository without a recipe is no run, so no folder is made for it.
    """
    patterns = ["*.safetensors", "*.json", "*.jsonl", "*.yaml", "*.jinja", "*.model", "*.txt"]
    snapshot, commit = client.download(name, patterns)
    if not RunFolder(snapshot).recipe.exists():
        return RunFolder(snapshot)
    target = Path("runs") / f"{client.split(name)[0].rpartition('/')[2]}-{commit[:8]}"
    if os.path.lexists(target):
        _check_fetched(target, snapshot, name)
    else:
        target.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
        for file in (RunFolder(snapshot).file(name) for name in PUBLISHED):
            if file.exists():
                shutil.copyfile(file, made / file.name)
        kind = "adapter" if (snapshot / "adapter_config.json").exists() else "model"
        (made / kind).symlink_to(snapshot.absolute())
        try:
            os.rename(made, target)
        except OSError:  # another process made the folder first
            shutil.rmtree(made)
    return RunFolder(target)


def _check_fetched(folder: Path, snapshot: Path, name: str) -> None:
    """Check that a folder is what `_fetch` made of this snapshot (exit 2).

    It may come with the files of another person.
    """
    weights = RunFolder(folder).weights
    if weights.resolve() != snapshot.resolve() or not _is_own_link(weights):
        raise UserError(
            Problem(
                f"the folder for {name} exists, and holds another run",
                where=str(folder),
                fix="rename or delete the folder, or name it in place of the run on the Hub",
                code="run-folder",
            )
        )


def recipe_of(run: RunFolder, overrides: Sequence[str] = (), *, files: bool = True) -> Recipe:
    """Return the recipe of a run with `overrides`. A run of another machine may need overrides of its paths.

    Args:
        files: whether to check that the base model and the validation examples exist (exit 2).
    """
    recipe = load_recipe(run.recipe, list(overrides), run.format_version)
    data, needed = recipe.data, [("model.name", recipe.model.name)]
    kept = run.file(HELD_OUT).exists() and not any(text.startswith("data.") for text in overrides)
    if data.validation is not None and not kept:
        needed.append(("data.validation", data.validation))
    elif data.validation_fraction is not None and not kept:
        names = data.name if isinstance(data.name, list) else [data.name]
        needed += [("data.name", name.name if isinstance(name, Source) else name) for name in names]
    needed += [("eval.tasks", name) for name in recipe.eval.tasks if name.endswith((".yaml", ".yml"))]
    needed += [("eval.forgetting", recipe.eval.forgetting)] if isinstance(recipe.eval.forgetting, str) else []
    gone = [
        (key, name)
        for key, name in (needed if files else ())
        if local_path(name) and not os.path.exists(name) and not _is_pattern_of_files(name, key)
    ]
    fix = "add {}=PATH to the command"
    fixes = {
        "model.name": fix,
        "data.validation": fix + ", or {}=null",
        "data.name": fix,
        "eval.tasks": "add {}=[PATH] to the command, or {}=[]",
        "eval.forgetting": fix + ", or {}=true",
    }
    if gone:
        what, where = "this path of the run does not exist on this machine", str(run.recipe)
        raise UserError(
            *(
                Problem(what, key, where, name, fix=fixes[key].format(key, key), code="path")
                for key, name in gone
            )
        )
    _check_base(run, recipe)
    return recipe


def own_recipe(run: RunFolder) -> Recipe:
    """Return the recipe of a run without overrides. Its paths may be of another machine."""
    return load_recipe(run.recipe, (), run.format_version)


def _check_base(run: RunFolder, recipe: Recipe) -> None:
    """Stop if the adapter's config names another base model or another commit than the recipe (exit 2).

    Args:
        recipe: the recipe with the overrides of the command, which may name the base model.
    """
    config = RunFolder(run.adapter).found("adapter_config.json")
    allowed = [named(one.model.name, one.model.revision) for one in (own_recipe(run), recipe)]
    name = named(str(config.get("base_model_name_or_path")), config.get("revision")) if config else allowed[0]
    if name not in allowed:
        raise UserError(
            Problem(
                "the adapter and the recipe of the run name different base models",
                where=str(run.adapter / "adapter_config.json"),
                found=name,
                expected=allowed[0],
                fix="restore the run folder from a copy, or set model.name and model.revision of the adapter",
                code="run-damaged",
            )
        )


def named(base: str, commit: str | None) -> str:
    """Return the name of a base model with its commit, without its folder, which differs between machines."""
    name = Path(base).absolute().name if local_path(base) else base
    return f"{name} {commit or ''}".strip()


@functools.cache
def packages() -> dict[str, str | None]:
    """Return the versions of the packages that training uses; `None` for packages that are not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def local_paths(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's files and folders on this machine as absolute paths."""
    named = {
        "model.name": recipe.model.name,
        "data.name": recipe.data.name,
        "data.validation": recipe.data.validation,
        "data.chat_template": recipe.data.chat_template,
        "data.cache_dir": recipe.data.cache_dir,
    }
    found = {key: _absolute(name) for key, name in named.items()}
    named |= {"eval.tasks": recipe.eval.tasks, "eval.forgetting": recipe.eval.forgetting}
    is_file = [name.endswith((".yaml", ".yml")) for name in recipe.eval.tasks]
    tasks = zip(recipe.eval.tasks, is_file, strict=True)
    found["eval.tasks"] = [_absolute(name) if file else name for name, file in tasks]
    found["eval.forgetting"] = _absolute(recipe.eval.forgetting)
    return {key: path for key, path in found.items() if path != named[key]}


def _is_pattern_of_files(name: str, key: str = "data.name") -> bool:
    """Return whether a name has wildcards and matches local files."""
    return any(mark in name for mark in "*?[") and bool(match_paths(name, Path(), key))


def _absolute(name: object) -> Any:
    if isinstance(name, list):
        return [_absolute(item) for item in name]
    if isinstance(name, Source):
        return name.model_copy(update={"name": _absolute(name.name)})
    if isinstance(name, str) and (os.path.exists(name) or _is_pattern_of_files(name)):
        return os.path.abspath(name)
    return name
