"""recipes/gpus: each fits, by the plan, on every GPU of its size, without a weight being read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finetune.planning import plan, planned_machine, planner
from finetune.recipe import loader
from support.paths import ROOT

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
GPUS = {
    "24gb": ["l4", "rtx4090", "rtx3090", "a10g"],
    "32gb": ["rtx5090"],
    "40gb": ["a100-40gb"],
    "80gb": ["a100-80gb", "h100-80gb"],
    "141gb": ["h200"],
}
NO_FP8 = ("rtx3090", "a10g")
FILES = {path.stem: path for path in sorted((ROOT / "recipes" / "gpus").glob("*.yaml"))}
MARGIN = 0.93  # of a GPU's memory


def test_there_are_three_for_each_size() -> None:
    assert set(FILES) == {f"{size}_{kind}" for size in GPUS for kind in ("fastest", "balanced", "smallest")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    lines = "".join(json.dumps({"text": "word " * 400}) + "\n" for _ in range(64))
    (folder / "rows.jsonl").write_text(lines)
    return folder


def planned(name: str, gpu: str, llama: Path) -> plan.Plan:
    overrides = [f"model.name={llama}", f"data.name={llama}/rows.jsonl", "data.validation_fraction=null"]
    loaded = loader.load(FILES[name], [*overrides, "train.max_steps=300"])
    return planner.make(loaded, *planned_machine.find(gpu, 1))


@pytest.mark.parametrize("size", GPUS)
def test_each_fits_with_room_to_spare(size: str, llama: Path, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))  # no ceilings of this machine
    for gpu in GPUS[size]:
        found = {}
        for kind in ("fastest", "balanced", "smallest"):
            name = f"{size}_{kind}"
            if gpu in NO_FP8 and kind == "fastest":
                continue
            one = found[kind] = planned(name, gpu, llama)
            assert one.fits, f"{name} on {gpu}: {one.peak:.1f} of {one.usable:.1f} GiB"
            assert one.peak <= MARGIN * one.machine.memory_gib
            assert sum(one.phases["evaluation"].values()) <= one.usable
        rates = {kind: one.tokens_per_second or 0.0 for kind, one in found.items()}
        assert max(rates, key=lambda kind: rates[kind]) == next(iter(found)), f"{gpu}: {rates}"
        assert found["smallest"].peak == min(one.peak for one in found.values())


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_says_its_size_and_kind(name: str) -> None:
    size, kind = name.split("_")
    head = FILES[name].read_text().splitlines()[1]
    assert re.match(rf"# Llama 3\.1 8B on one GPU of {size[:-2]} GB, {kind}: ", head)


@pytest.mark.parametrize("size", GPUS)
def test_a_recipe_says_what_the_plan_says(size: str, llama: Path, monkeypatch, tmp_path) -> None:
    """Of an H100 and an A100 where both are named."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    name = f"{size}_smallest"
    said = re.search(r"estimates (\d+) GiB(?:.* and (\d+) GiB on an A100)?", FILES[name].read_text())
    assert said
    gpus = (GPUS[size][-1], "a100-80gb") if said[2] else (GPUS[size][0],)
    assert [round(planned(name, gpu, llama).peak) for gpu in gpus] == [int(n) for n in said.groups() if n]
