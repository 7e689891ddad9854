"""Gather the files of a run that are published."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import signals, strict_json, untrusted_files
from finetune.core.command_lines import command
from finetune.core.errors import Exit, Problem, Stopped, UserError
from finetune.core.weight_files import find_weight_files
from finetune.export import published_text
from finetune.models import checkpoint_headers
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.export.base_model import Base
    from finetune.recipe.schema import Recipe


# Only these files are uploaded. Checkpoints, logs and training_args.bin never are.
ADAPTER = ("adapter_config.json",)


MODEL = ("model.safetensors.index.json", "config.json", "generation_config.json")


TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


# Named templates of a tokenizer with several templates
TEMPLATES = "additional_chat_templates/*.jinja"


CONFIGS = ("adapter_config.json", "config.json", "tokenizer_config.json")


NAMES_BASE = ("base_model_name_or_path", "tokenizer_name_or_path", "_name_or_path", "name_or_path")


def find_weights(folder: RunFolder, merged: bool) -> tuple[str, Path]:
    """Return the kind of the weights (adapter | model | merged) and their folder.

    Raises:
        UserError: `merged` is set, but the run has no merged weights or several (exit 2).
    """
    if not merged:
        return ("adapter" if folder.weights == folder.adapter else "model"), folder.weights
    merged_to = folder.found("merge.json")
    inside = [name for name in merged_to if name == Path(name).name]
    if merged_to and not inside:  # a run from somebody else could name any folder of this machine
        raise UserError(
            Problem(
                "the merged weights are outside the run folder",
                where=str(folder.path),
                found=", ".join(merged_to),
                fix=command("merge", str(folder.path)),
                code="unsafe-file",
                why="`publish` uploads only files of the run folder",
            )
        )
    found = [path for name in inside if (path := folder.path / name).is_dir()]
    plain = [path for path in found if path == folder.path / "merged"] or found
    if len(plain) != 1:
        raise UserError(
            Problem(
                "the run folder has several merged models" if found else "the run folder has no merged model",
                where=str(folder.path),
                found=", ".join(path.name for path in found),
                fix="keep only one of them" if found else command("merge", str(folder.path)),
                code="merge",
            )
        )
    untrusted_files.check_model(plain[0], "")
    check_merged(folder, plain[0])
    return "merged", plain[0]


def check_merged(folder: RunFolder, merged: Path) -> None:
    """Check that merged weights are as `merge` wrote them (exit 4). Earlier versions recorded no hash."""
    recorded = merge_report(folder, merged).get("files", {})
    otherwise = f"delete this folder and run: {command('merge', str(folder.path))}"
    if recorded:
        run_folder.check_files(merged, recorded, otherwise)


def merge_report(folder: RunFolder, weights: Path) -> dict[str, Any]:
    """Return the report in merge.json for these weights, or an empty mapping."""
    reports = folder.found("merge.json")
    return next((report for name, report in reports.items() if folder.path / name == weights), {})


def stage(
    folder: RunFolder, recipe: Recipe, kind: str, weights: Path, base: Base, staged: Path
) -> dict[str, Path]:
    """Collect the files to upload, except the card: links to weights, and copies of the others."""
    check_shapes(folder)
    checkpoint_headers.tensors(weights, "")
    known = published_text.local_names(folder, recipe, base)
    patterns = (*(ADAPTER if kind == "adapter" else MODEL), *TOKENIZER)
    names = [file.name for name in run_folder.PUBLISHED if (file := folder.file(name)).exists()]
    sent = [file for file in sorted(weights.iterdir()) if any(fnmatch(file.name, one) for one in patterns)]
    sent += [*find_weight_files(weights, ""), *sorted(weights.glob(TEMPLATES))]
    untrusted_files.check_links([*sent, *(folder.path / name for name in names)], "")
    for file in sent:
        place = staged / file.relative_to(weights)
        place.parent.mkdir(exist_ok=True)
        if file.suffix == ".safetensors":
            place.symlink_to(file.resolve())
        else:  # another program may change the file after the search for secrets
            shutil.copyfile(file, place)
    for name in CONFIGS:
        if (staged / name).exists():
            content = untrusted_files.read_object(weights / name, "")
            named = {key: base.name for key in content if key in NAMES_BASE and content[key]}
            (staged / name).unlink()
            write_json(staged / name, content | named, indent=2)
    for name in names:
        if name == "merge.json" and kind != "merged":
            continue
        text = folder.read_text(name)
        if name.endswith(".json"):
            content = json.loads(text)
            if name == "environment.json":
                content = published_text.without_variables(content)
            if name == "eval.json" and not recipe.publish.samples:
                content |= {"samples": [], "worst": []}
            write_json(staged / name, published_text.without_paths(content, known), indent=1)
        else:
            text = published_text.recipe_without_paths(text, known, base) if name.endswith(".yaml") else text
            (staged / name).write_text(text, encoding="utf-8")
    # Verify that other users can load the recipe
    load_recipe(staged / folder.recipe.name, (), folder.format_version)
    if not any(path.suffix == ".safetensors" for path in staged.iterdir()):
        raise UserError(
            Problem(
                "the folder has no safetensors file to publish",
                where=str(weights),
                found=", ".join(sorted(path.name for path in weights.iterdir())[:6]) or "an empty folder",
                fix=command("merge", str(folder.path)),
                why="`publish` uploads weights only in safetensors",
                code="run-damaged",
            ),
            code=Exit.ARTIFACT,
        )
    return {str(path.relative_to(staged)): path for path in sorted(staged.rglob("*")) if path.is_file()}


def check_shapes(folder: RunFolder) -> None:
    """Raise a UserError if a file of the run is damaged, because the copies and the card use it (exit 4)."""
    for name in run_folder.PUBLISHED:
        if name.endswith(".json") and folder.file(name).exists():
            folder.read(name)
    folder.steps()


def write_json(path: Path, content: object, *, indent: int) -> None:
    text = json.dumps(strict_json.spelt(content), indent=indent, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair cannot be encoded
    path.write_text(text + "\n", encoding="utf-8", errors="replace")


def unnamed_base(name: str) -> str:
    fix = "set publish.base_model=ORGANIZATION/NAME if the model is on the Hub"
    return f"the base model is a local folder, which the model card calls `{name}`; {fix}"


def say_of(base: Base, files: dict[str, Path]) -> list[str]:
    """Return notes on the uploaded files."""
    notes = [] if base.on_hub else [unnamed_base(base.name)]
    if not base.license_from:
        notes.append(
            "the license of the base model is unknown, so the model card says `other`; set publish.license"
        )
    results = json.loads(files["eval.json"].read_text(encoding="utf-8")) if "eval.json" in files else {}
    shown = [*results.get("samples", []), *results.get("worst", [])]
    rows = len({json.dumps(one.get("prompt"), sort_keys=True) for one in shown})
    if rows:
        notes.append(
            f"eval.json contains {rows} validation examples; set publish.samples=false to remove them"
        )
    return notes


@contextlib.contextmanager
def staging_folder(*, kept: bool) -> Iterator[Path]:
    """Create a temporary folder. Delete it at the end, also if a signal ends the command.

    Args:
        kept: keep the folder if the command succeeds, for the user to look at.
    """
    folder = Path(tempfile.mkdtemp(prefix="finetune-publish-"))
    try:
        with signals.listening(_stop):
            yield folder
    except BaseException:  # Ctrl-C too
        kept = False
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _stop(name: str) -> None:
    if name == "SIGINT":
        raise KeyboardInterrupt
    raise Stopped(f"stopped by {name}; the run folder has not changed")
