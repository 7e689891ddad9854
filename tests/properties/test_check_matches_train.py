"""`check` accepts exactly the adapters that `train` accepts, over architectures, types and spellings.

"`train` accepts" means that the adapter attaches, every trained tensor is in the graph of the loss, and one
forward and backward pass of a two-layer model succeed. `support/adapter_cells.py` has the cells.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from support.adapter_cells import CELLS, FAMILIES, OTHERS, SPELLINGS, TYPES, Cell, verdicts

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = 15  # in CI, others each time; `make soak` takes all
SEED = int(os.environ.get("FINETUNE_CELLS_SEED") or time.time())
CASES = (  # of public reports
    Cell("qwen3_moe", "lora", "expert parameters"), Cell("qwen3_moe", "lora", "old experts"),
    Cell("mixtral", "lora", "all-linear"), Cell("gpt2", "lora", "all-linear"),
    Cell("gpt2", "dora", "suffixes"),
    Cell("openai-gpt", "adalora", "regex"), Cell("gpt2", "ia3", "default"), Cell("gpt2", "oft", "all-linear"),
    Cell("phimoe", "lora", "all-linear"), Cell("mamba", "lora", "all-linear"),
    Cell("bloom", "lora", "embedding"),
    Cell("jamba", "loha", "all-linear"), Cell("biogpt", "lora", "head"), Cell("llama", "lora", "commas"),
    Cell("mamba", "prompt_tuning", "default"),
    Cell("deepseek_v2", "oft", "default"), Cell("deepseek_v3", "gralora", "default"),
    Cell("mamba", "ln_tuning", "convolution"), Cell("bamba", "ln_tuning", "norm"),
    Cell("ctrl", "ia3", "all-linear"), Cell("jamba", "prefix_tuning", "default"),
    Cell("falcon", "cartridge", "default"), Cell("rwkv", "prefix_tuning", "default"),
    Cell("llama", "unilora", "default"), Cell("mamba", "unilora", "default"),
    Cell("deepseek_v32", "unilora", "default"),
    Cell("deepseek_v32", "lora", "all-linear"), Cell("deepseek_v4", "lora", "suffixes"),
    Cell("qwen3_next", "ln_tuning", "convolution"), Cell("deepseek_v4", "lora", "all-linear"),
    Cell("longcat_flash", "lora", "all-linear"), Cell("longcat_flash", "lora", "router"),
    Cell("jetmoe", "lora", "all-linear"), Cell("zamba", "lora", "all-linear"),
    Cell("gemma3 tied", "lora", "tied embedding"), Cell("llama tied", "lora", "tied regex"),
    Cell("qwen2_vl tied", "lora", "tied saved head"), Cell("llava tied", "lora", "saved head"),
    Cell("mistral3 tied", "full", "default"), Cell("internvl tied", "lora", "tied rows"),
    Cell("idefics3", "lora", "head"), Cell("qwen3_vl tied", "trainable_tokens", "default"),
    Cell("llama", "shira", "default"), Cell("llama", "adamss", "default"), Cell("gpt2", "shira", "default"),
)  # fmt: skip


def test_cells_cover_forty_architectures() -> None:
    assert len(FAMILIES) >= 40
    assert len(CELLS) == len(FAMILIES) * (len(TYPES) * len(SPELLINGS) + len(OTHERS) + 1)


def disagreements(cells: list[Cell], folder: Path) -> list[str]:
    """Each cell on which `check` and `train` differ, or that ends in an exception that is no `UserError`."""
    found = []
    for cell in cells:
        both = verdicts(cell, folder)
        if both and (bool(both[0]) != bool(both[1]) or both[1].startswith("UNCAUGHT")):
            found.append(f"{cell}\n  check: {both[0] or 'accepts'}\n  train: {both[1] or 'accepts'}")
    return found


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_verdict_of_check_on_a_reported_case_is_that_of_train(cell: Cell, tmp_path: Path) -> None:
    assert disagreements([cell], tmp_path) == []


def test_verdict_of_check_on_sampled_cells_is_that_of_train(tmp_path: Path) -> None:
    print(f"FINETUNE_CELLS_SEED={SEED}")
    cells = random.Random(SEED).sample(CELLS, SAMPLE)
    assert "\n".join(disagreements(cells, tmp_path)) == "", f"FINETUNE_CELLS_SEED={SEED}"


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_verdict_of_check_on_every_cell_is_that_of_train(family: str, tmp_path: Path) -> None:
    cells = [cell for cell in CELLS if cell.family == family]
    assert "\n".join(disagreements(cells, tmp_path)) == ""
