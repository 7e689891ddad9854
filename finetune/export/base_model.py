"""Describe the base model of a run for readers elsewhere: its name, commit or hashes, and license."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from finetune.core import foreign_yaml, regular_files, untrusted_files
from finetune.core.errors import UserError
from finetune.core.paths import local_path
from finetune.core.weight_files import find_weight_files
from finetune.hub import client
from finetune.models import checkpoint_headers, model_files
from finetune.recipe.schema import Model, Publish

KEY = "model.name"
LICENSES = {  # start of a LICENSE file (a regular expression) -> the Hub's name of the license
    r"\s*Apache License\s+Version 2\.0": "apache-2.0",
    r"\s*(The )?MIT License": "mit",
}
# Keys of a model card, and what finetune copies of them to the card of a run: plain names and addresses
COPIED = {
    "license": r"[\w.+-]{1,96}",
    "license_name": r"[\w .,+()-]{1,96}",
    "license_link": r"https?://[!-~]{1,500}|[\w.-]{1,96}",
}


@dataclass(frozen=True)
class Base:
    """The base model as a reader elsewhere can find it."""

    name: str
    """The Hub id, or the folder name if the model is a local folder."""
    on_hub: bool
    revision: str | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    """Weight file -> sha256, if the base model is a local folder."""
    license: dict[str, str] = field(default_factory=dict)
    """`license` of the model card, with `license_name` and `license_link` if it has them."""
    license_from: str = ""


def find(model: Model, publish: Publish, config: dict[str, Any], *, online: bool) -> Base:
    """Return the base model of a run.

    Args:
        model: the recipe's model section.
        publish: the recipe's publish section, which can set the name and the license.
        config: adapter_config.json, or an empty mapping.
        online: whether to look up the license on the Hub.

    Raises:
        UserError: the model is a local folder with links that leave it, special files, files that are too
            large to read, or damaged weights. Or a folder here has the name of a model on the Hub (exit 2).
    """
    of_run = model.model_copy(update={"revision": config.get("revision") or model.revision})
    model_files.check_revision(of_run)
    local = Path(model.name) if local_path(model.name) else None
    name = publish.base_model or (model.name if local is None else local.name)
    on_hub = publish.base_model is not None or local is None
    revision = of_run.revision if local is None else None
    hashes = {}
    if local and local.is_dir():
        untrusted_files.check_links(regular_files.entries(local), KEY)
        regular_files.check_folder(local, KEY)
    if not on_hub and local and local.is_dir():
        checkpoint_headers.tensors(local)
        hashes = {path.name: client.sha256(path) for path in find_weight_files(local)}
    if publish.license:
        license, source = {"license": publish.license}, "publish.license"
    else:
        license, source = _license(local, name if on_hub else None, revision, online)
    return Base(name, on_hub, revision, hashes, license, source)


def _license(
    folder: Path | None, hub_id: str | None, revision: str | None, online: bool
) -> tuple[dict[str, str], str]:
    """Return the license of the base model and its source: README, LICENSE, or the card on the Hub."""
    if folder and (folder / "README.md").is_file():
        said = _license_of_card(folder / "README.md")
        if said:
            return said, "the README of the base model"
    if folder and (folder / "LICENSE").is_file():
        text = _text_of(folder / "LICENSE")
        for start, name in LICENSES.items():
            if re.match(start, text):
                return {"license": name}, "the LICENSE of the base model"
    if hub_id:
        readme = _hub_readme(hub_id, revision, online)
        if readme and (said := _license_of_card(readme)):
            return said, f"the card of {hub_id}"
    return {"license": "other"}, ""


def _hub_readme(hub_id: str, revision: str | None, online: bool) -> Path | None:
    """Return the README of the base model from the Hub or its cache. A missing README is not an error."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "README.md", revision=revision, local_files_only=not online))
    except (client.http_error(), OSError, ValueError):
        return None


def _text_of(path: Path) -> str:
    """Return the text of a file, or the empty string if it is not in UTF-8."""
    try:
        return regular_files.read_text(path, KEY)
    except UnicodeDecodeError:
        return ""


def _license_of_card(path: Path) -> dict[str, str]:
    block = REGEX_YAML_BLOCK.search(_text_of(path))
    try:
        data = foreign_yaml.read(block[2], path.name) if block else None
    except UserError:  # the card has no readable metadata
        data = None
    given = data if isinstance(data, dict) else {}
    texts = {key: given[key] for key in COPIED if isinstance(given.get(key), str)}
    found = {key: text for key, text in texts.items() if re.fullmatch(COPIED[key], text, re.ASCII)}
    return found if "license" in found else {}
