"""Find and read a model's small files, in a folder or on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.core import untrusted_files
from finetune.core.errors import Exit, Problem, UserError, first_line, stage
from finetune.core.paths import local_path, similar_files
from finetune.core.weight_files import check_weight_files
from finetune.hub import client
from finetune.models import checkpoint_headers
from finetune.quantization import stored_weights
from finetune.recipe.schema import Model

# Parts of transformers' errors for weights with wrong shapes, and for experts that it can't stack
WRONG_SHAPES = ("`ignore_mismatched_sizes`", "automatic conversion of the weights")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    "config.json", "generation_config.json",
)  # fmt: skip


def check_exists(model: Model) -> None:
    """Stop before anything loads if a local folder does not exist, or a name can't be on the Hub (exit 2)."""
    if not Path(model.name).is_dir() and not local_path(model.name):
        client.check_name(model.name, "model.name")
    if local_path(model.name) and not Path(model.name).exists():
        found = f"looked in {Path.cwd()} and in the recipe's folder"
        near = similar_files(Path(model.name))
        raise UserError(
            Problem(
                f"the path {model.name} does not exist",
                "model.name",
                found=found,
                fix=f"model.name: {near}"
                if near
                else "name a folder with config.json, or a model on the Hub",
                code="model-not-found",
            )
        )


def check_folder(model: Model) -> None:
    """Check the files of a local model, and that it has no revision (exit 2)."""
    check_exists(model)
    check_revision(model)
    if Path(model.name).is_dir():
        untrusted_files.check_model(Path(model.name), "model.name")
        _check_old_quantization(Path(model.name))


def check_revision(model: Model) -> None:
    """Check that a model with a revision is no local folder (exit 2)."""
    if model.revision and Path(model.name).exists():
        raise UserError(
            Problem(
                "a model in a local folder has no revisions",
                "model.revision",
                found=model.revision,
                fix="remove `revision`",
                why=f"{model.name} is a folder, and finetune reads the files in it",
                code="recipe-conflict",
            )
        )


def _check_old_quantization(folder: Path) -> None:
    """Stop if a file of AutoGPTQ or AutoAWQ declares quantized weights, but config.json does not."""
    name = next((name for name in stored_weights.OLD_FILES if (folder / name).is_file()), None)
    if name and any(tensor.endswith(".qweight") for tensor in checkpoint_headers.tensors(folder)):
        config = folder / "config.json"
        if config.is_file() and '"quantization_config"' in config.read_text(encoding="utf-8"):
            return  # the code that reads this file reports it
        raise UserError(
            Problem(
                "finetune can't train on these quantized weights",
                "model.name",
                found=f"{folder / name}",
                fix=stored_weights.WHOLE,
                code="quantization",
            )
        )


def check_weights(model: Model) -> None:
    """Stop if a local model has no weights that transformers reads (exit 2)."""
    if (Path(model.name) / "config.json").is_file():
        check_weight_files(Path(model.name))


def damaged_cache(model: Model, found: str) -> UserError:
    """Return the error of weights that were damaged before or after their download."""
    return UserError(
        Problem(
            "the weights in the Hub's cache are damaged",
            "model.name",
            where=model.name,
            found=found,
            fix=f"hf download {model.name} --revision {commit(model)} --force-download",
            why="the download was cut or changed, and later commands read the same file",
            code="model-files",
        ),
        code=Exit.ENVIRONMENT,
    )


def small_file(model: Model, name: str) -> Path | None:
    """Return an optional file of a model, from its folder or the Hub."""
    if local_path(model.name):
        path = Path(model.name) / name
        return path if path.is_file() else None
    with client.explained(model.name, read=True):
        found = untrusted_files.from_hub(model.name, commit(model), name)
    return Path(found) if found else None


def file_on_disk(model: Model, name: str) -> Path | None:
    """Return a file of a model in its folder or in the Hub's cache, without network access."""
    folder = Path(model.name)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.name, name, revision=model.revision)
    except HFValidationError:  # a path that does not exist
        return None
    return Path(found) if isinstance(found, str) else None


def tokenizer_files(model: Model) -> list[Path]:
    """Return the local files that decide a model's token ids and the tokens that end answers."""
    return [path for name in TOKENIZER_FILES if (path := file_on_disk(model, name))]


def read_config(model: Model) -> Any:
    """Return the model's config object of transformers."""
    from transformers import AutoConfig

    check_folder(model)
    with stage("read the model's config.json", "model.name"):
        return from_hub(AutoConfig.from_pretrained, model)


def custom_code(reason: str) -> Problem:
    """Return the problem of a model with its own code."""
    return Problem(
        "the model brings its own Python code, and finetune does not run it",
        "model.name",
        found=reason,
        fix="use a model whose architecture is part of transformers",
        code="unsafe-file",
    )


def pinned(model: Model) -> Model:
    """Return the section with the current commit of its revision, if the model is on the Hub."""
    return model if local_path(model.name) else model.model_copy(update={"revision": commit(model)})


def commit(model: Model) -> str:
    return client.commit(model.name, model.revision or "main")


def from_hub(load: Callable[..., Any], model: Model, **options: object) -> Any:
    """Call `from_pretrained`, and raise its errors as UserErrors with a fix. The model's code never runs."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    revision = "main" if local_path(model.name) else commit(model)
    try:
        if not local_path(model.name):
            untrusted_files.check_hub(model.name, revision, "model.name")
        # Without `trust_remote_code`, transformers would ask at the terminal whether to run the model's code
        return load(model.name, revision=revision, trust_remote_code=False, **options)
    except ImportError as error:  # a package of a tokenizer or a quantized checkpoint is missing
        raise UserError(
            Problem(
                "the model needs a package that is not installed",
                "model.name",
                found=first_line(error),
                fix="install the package",
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    except (LookupError, TypeError, AttributeError, RecursionError, StrictDataclassError) as error:
        raise UserError(
            Problem(
                "transformers can't read the model's files",
                "model.name",
                where=model.name,
                found=f"{type(error).__name__}: {error}"[:300],
                code="model-files",
                fix=untrusted_files.DOWNLOAD_AGAIN,
                why="a file is damaged, or from another version",
            )
        ) from error
    except RuntimeError as error:  # transformers' report in the log names the weights
        if not any(text in str(error) for text in WRONG_SHAPES):
            raise
        raise UserError(
            Problem(
                "the weights do not fit the model's config.json",
                "model.name",
                where=model.name,
                found=first_line(error),
                fix=untrusted_files.DOWNLOAD_AGAIN,
                why="a file is damaged, or from another model",
                code="model-files",
            )
        ) from error
    except SafetensorError as error:
        if local_path(model.name):  # the file was whole when finetune read its header
            raise
        raise damaged_cache(model, first_line(error)) from error
    except (OSError, ValueError, client.http_error()) as error:
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise UserError(custom_code(reason)) from error
        if "model.safetensors" in reason and "use_safetensors=True" in str(error):
            raise UserError(untrusted_files.only_pickles("model.name", model.name)) from error
        if local_path(model.name):
            raise UserError(
                Problem(
                    "transformers can't load the model in this folder",
                    "model.name",
                    found=reason,
                    code="model-files",
                    fix=untrusted_files.DOWNLOAD_AGAIN,
                    why="a file is missing or damaged",
                )
            ) from error
        raise UserError(client.unread(error, model.name, revision), code=Exit.ENVIRONMENT) from error
