"""Hash a model's tensors."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of names, shapes and bytes, computed on each tensor's device. Shards give the full hash.

    Two 64-bit sums for each tensor (plain, and weighted by position) see any single changed byte for certain.
    """
    from finetune.distributed import sharded_tensors

    digest, found = hashlib.sha256(), sharded_tensors.sums(tensors)
    for name in sorted(tensors):
        plain, weighted = found[name]
        digest.update(f"{name} {tuple(sharded_tensors.shape(tensors[name]))} {plain} {weighted}\n".encode())
    return digest.hexdigest()[:16]
