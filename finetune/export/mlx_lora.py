"""Write an adapter in the layout of mlx-lm (`mlx_lm/tuner/utils.py`)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

from finetune.core import safe_files
from finetune.export import gguf_file, gguf_lora

if TYPE_CHECKING:
    from pathlib import Path

    import torch

HALF = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<half>[AB])\.weight")
KEY = re.compile(r"model\.layers\.\d+\.(?P<key>[\w.]+)")


def convert(adapter: Path, layers: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the config of an adapter for mlx-lm. It multiplies by transposed matrices.

    Args:
        layers: the number of layers of the model.

    Raises:
        UserError: mlx-lm has no place for a part of the adapter (exit 2).
    """
    config = gguf_lora.check(adapter, "mlx-lm")
    tensors, keys, unknown = dict[str, Any](), set[str](), list[str]()
    with gguf_file.opened(adapter) as source:
        for name in sorted(source.files):
            half = HALF.fullmatch(name)
            key = half and KEY.fullmatch(half["module"])
            if not half or not key or ".experts" in name:
                unknown.append(name)
                continue
            keys.add(key["key"])
            tensors[f"{half['module']}.lora_{half['half'].lower()}"] = source.tensor(name).T.contiguous()
    gguf_lora.refuse_tensors("mlx-lm", unknown)
    rank = int(config["r"])
    scale = float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
    lora = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(keys)}
    return tensors, {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora}


def write(adapter: Path, layers: int, folder: Path) -> dict[str, int]:
    """Write the two files, and return them with their sizes."""
    tensors, config = convert(adapter, layers)
    contents = {"adapters.safetensors": save(tensors), "adapter_config.json": json.dumps(config).encode()}
    for name, content in contents.items():
        safe_files.write_bytes(folder, name, content)
    return {name: len(content) for name, content in contents.items()}
