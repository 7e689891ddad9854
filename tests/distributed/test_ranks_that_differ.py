"""Two ranks of one launch with other recipes, or with damaged prepared data: both agree, and none waits."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.cli import main
from finetune.recipe.loader import load
from support import two_ranks
from support.paths import QUICKSTART

SECONDS = 5.0  # in which all ranks stop
DIFFERENT = {
    "train.learning_rate": (["train.learning_rate=1e-3"], []),
    "train.seed": ([], ["train.seed=7"]),
    "train.max_steps": (["train.max_steps=3"], ["train.max_steps=4"]),
    "data.packing": (["data.packing=true"], []),
    "adapter.r": (["adapter.r=4"], ["adapter.r=8"]),
    "eval.eval_steps": ([], ["eval.eval_steps=2"]),
    "speed.activation_checkpointing": (["speed.activation_checkpointing=full"], []),
    "the run's state": (["train.output_dir=finished", "--resume=auto"], ["--resume=auto"]),
}


def each_case_is_refused(words: list[str]) -> None:
    """Run every pair of commands of `DIFFERENT`, as rank 0 or rank 1."""
    rank = int(os.environ["RANK"])
    for name, given in DIFFERENT.items():
        started = time.monotonic()
        print(f"case {name}", flush=True)
        assert main.main([*words, *given[rank]]) == 2, name
        print(f"took {time.monotonic() - started:.1f}", flush=True)


@pytest.mark.usefixtures("the_only_launch")
def test_ranks_with_different_recipes_stop_with_one_error(small, two_layers, tmp_path) -> None:
    finished = tmp_path / "finished"
    (finished / "adapter").mkdir(parents=True)
    (finished / "eval.json").write_text("{}")
    words = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", "eval.forgetting=false", "--quiet"]
    said = two_ranks.run(each_case_is_refused, [*words, "train.output_dir=run"], cwd=tmp_path)
    of_ranks = said.split("case train.learning_rate")[1:]
    assert len(of_ranks) == 2
    for text in of_ranks:
        assert text.count("error:") == len(DIFFERENT), text
        for name in DIFFERENT:
            assert f"the processes of this launch differ in {name} [launch-config]\n" in text, text
    assert "adapter.r: rank 0: 4, rank 1: 8" in said
    took = [float(line.partition(" ")[2]) for line in said.splitlines() if line.startswith("took ")]
    assert len(took) == 2 * len(DIFFERENT) and max(took[1:]) < SECONDS, "none waits for the other"
    assert not (tmp_path / "run").exists(), "nothing was begun"


def flip(cache: Path) -> None:
    (rows,) = cache.glob("*/rows.arrow")
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)


def open_damaged_data(recipe_words: list[str]) -> None:
    """Open prepared data that is whole, or damaged: for all, for rank 1, after rank 0 looked."""
    from finetune.distributed import collectives
    from finetune.training import load_data, resume_facts, training_data

    collectives.start("cpu")
    rank, load_first = int(os.environ["RANK"]), load_data.prepare_data
    setup: Any = SimpleNamespace()

    def load_damaged(recipe: Any) -> Any:
        patch.setattr(load_data, "prepare_data", load_first)
        flip(Path("shared"))
        return load_first(recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_facts, "facts", lambda *_: {})
        for case in ("whole", "shared", "own", "later"):
            if case == "shared" and rank == 0:
                flip(Path("shared"))
            if case == "own" and rank == 1:
                flip(Path("own-1"))
            if case == "later" and rank == 1:
                patch.setattr(load_data, "prepare_data", load_damaged)
            collectives.wait()
            folder = f"own-{rank}" if case == "own" else "shared"
            recipe = load(str(QUICKSTART), [*recipe_words, f"data.cache_dir={folder}"])
            prepared = training_data.prepare_in_turn(recipe, setup)[1]
            rows = prepared.train.to_list()
            notes = [note for note in prepared.report["train"].notes if "damaged" in note]
            Path(f"{case}-{rank}.json").write_text(json.dumps([rows, notes]))
            collectives.wait()  # the other rank may still read the file that the next case damages


@pytest.mark.usefixtures("the_only_launch")
def test_ranks_that_find_damaged_data_agree_on_it(small, two_layers, tmp_path) -> None:
    from finetune.training import load_data

    words = [*small, f"model.name={two_layers}"]
    load_data.prepare_data(load(str(QUICKSTART), [*words, f"data.cache_dir={tmp_path / 'shared'}"]))
    for rank in (0, 1):
        shutil.copytree(tmp_path / "shared", tmp_path / f"own-{rank}")
    two_ranks.run(open_damaged_data, words, cwd=tmp_path)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*-?.json")}
    whole = found["whole-0"][0]
    for case, damaged in (("whole", ""), ("shared", "shared"), ("own", "own-1"), ("later", "shared")):
        for rank in (0, 1):
            rows, notes = found[f"{case}-{rank}"]
            assert rows == whole, (case, rank)
            assert len(notes) == bool(damaged), (case, rank, notes)
            assert all(damaged in note and "prepared it again" in note for note in notes)
