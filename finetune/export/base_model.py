"""Describe the base model of a run for readers elsewhere: its name, commit or hashes, and license."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard

from finetune.core.paths import local_path
from finetune.core.weight_files import find_weight_files
from finetune.hub import client

if TYPE_CHECKING:
    from finetune.recipe.schema import Model, Publish

LICENSES = {  # start of a LICENSE file (a regular expression) -> the Hub's name of the license
    r"\s*Apache License\s+Version 2\.0": "apache-2.0",
    r"\s*(The )?MIT License": "mit",
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
    """
    local = Path(model.name) if local_path(model.name) else None
    name = publish.base_model or (model.name if local is None else local.name)
    on_hub = publish.base_model is not None or local is None
    revision = (config.get("revision") or model.revision) if local is None else None
    hashes = {}
    if not on_hub and local and local.is_dir():
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
        text = (folder / "LICENSE").read_text(encoding="utf-8", errors="replace")
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


def _license_of_card(path: Path) -> dict[str, str]:
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError):  # the card has no readable metadata
        return {}
    keys = ("license", "license_name", "license_link")
    return (
        {key: str(data[key]) for key in keys if isinstance(data.get(key), str)} if "license" in data else {}
    )
