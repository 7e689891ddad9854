"""Download the files of a dataset for `datasets`, and unpack no archive.

`datasets` looks at the content of each file and unpacks archives of any name. A link in a tar file can lead
its members out of the folder, so a dataset could write any file of the user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import DownloadConfig, DownloadManager
from datasets.utils.py_utils import map_nested

from finetune.data import hub_sizes

if TYPE_CHECKING:
    from datasets import DatasetBuilder

    from finetune.data.read_limits import Limits

# First bytes of the compressed files that `datasets` reads while it decompresses them, and its names for them
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz"}


class PlainDownloads(DownloadManager):
    """Give the readers of `datasets` each file as it is, or its decompressed content.

    Args:
        limits: the limits of a file, which finetune checks before a reader gets the file.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self.limits = limits

    def download(self, url_or_urls: Any) -> Any:
        found = super().download(url_or_urls)
        map_nested(lambda path: hub_sizes.check(Path(path), self.limits), found)
        return found

    def extract(self, path_or_paths: Any) -> Any:
        return map_nested(_content, path_or_paths)


def prepare(builder: DatasetBuilder, limits: Limits) -> None:
    """Download and read the files of a dataset with the options that `datasets` chooses itself.

    Raises:
        UserError: a file expands to more bytes than the limits allow, or is an archive (exit 2).
    """
    config = DownloadConfig(use_etag=False, token=builder.token, storage_options=builder.storage_options)
    downloads = PlainDownloads(
        limits,
        dataset_name=builder.dataset_name,
        data_dir=builder.config.data_dir,
        download_config=config,
    )
    builder.download_and_prepare(dl_manager=downloads)


def _content(path: str) -> str:
    """Return a path, or for a compressed file the address of its decompressed content."""
    with open(path, "rb") as file:
        start = file.read(6)
    kind = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    return f"{kind}://{os.path.splitext(os.path.basename(path))[0]}::{path}" if kind else path
