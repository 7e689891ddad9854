"""The steps of the guide to migration: another tool's config becomes a model that answers in llama.cpp."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune.cli import main
from finetune.core import packages
from finetune.evaluation import reopen
from finetune.export import gguf_readers, serving_check
from finetune.recipe import loader
from finetune.run_folder.run_folder import RunFolder
from support import pages
from support.paths import DATA, QUICKSTART, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not packages.installed("xllamacpp") or not packages.installed("gguf"),
    reason="needs llama.cpp (the package xllamacpp) and the extra `export`",
)
PAGE = ROOT / "docs" / "guides" / "migrate.md"
SHORT = ["data.validation_fraction=0.005", "eval.forgetting=false"]
FAST = ["train.max_steps=12", "train.learning_rate=4e-3"]  # the first token of an answer becomes certain


def answers_of(path: Path, prompts: list[list[int]], room: int) -> list[list[int]]:
    """Return llama.cpp's greedy answers to prompts."""
    context = max(map(len, prompts)) + room + 8
    with gguf_readers.llama_cpp(path, context) as reader:
        assert reader and reader.answer and reader.stop_ids
        stops = reader.stop_ids()
        found = [[step.token for step in reader.answer(prompt, room)] for prompt in prompts]
    return [[token for token in answer if token not in stops] for answer in found]


@pytest.mark.soak
def test_the_steps_of_the_guide_lead_to_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name, text in pages.saved_files(PAGE).items():
        Path(name).write_text(text)
    steps = [shlex.split(command) for _, command in pages.commands(PAGE)]
    assert [words[1] for words in steps if words[0] == "finetune"] == ["import", "check", "train", "export"]
    for words in steps:
        if words[0] == "finetune":
            more = [*SHORT, *FAST] if words[1] == "train" else []
            assert main.main([*words[1:], *more, "--quiet"]) == 0, words
    model = Path(steps[-1][steps[-1].index("-m") + 1])
    check = json.loads((model.parent / "export.json").read_text())["serving_check"]
    assert check["reader"].startswith("llama.cpp") and check["answers"]["agree"] and check["loss"]["agree"]
    assert check["token_ids"]["different"] == 0 and check["token_ids"]["prompts"] > 5
    run = RunFolder(Path("runs/from_axolotl"))
    tuned = reopen.reopen(run, loader.load(run.recipe)).eval()
    row = json.loads((DATA / "test.jsonl").read_text().splitlines()[0])
    tokenizer: Any = reopen.tokenizer_of(run)
    text = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    stops = check["stop_tokens"]["expected"]
    ((wanted,), _) = serving_check.answers(tuned, [prompt], stops, 3)
    assert answers_of(model, [prompt], 3) == [[token for token in wanted if token not in stops]]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_quickstart_answers_as_well_in_llama_cpp(
    kind: str, train: Callable[..., RunFolder], tmp_path: Path
) -> None:
    """Train the quickstart as it is. The exact match may differ by one point."""
    run = RunFolder(tmp_path / "whole")
    assert main.main(["train", str(QUICKSTART), f"train.output_dir={run.path}", "--quiet"]) == 0
    assert main.main(["export", str(run.path), "--to", "gguf", "--quantize", kind, "--quiet"]) == 0
    rows = [json.loads(line)["messages"] for line in (DATA / "test.jsonl").read_text().splitlines()]
    tokenizer: Any = reopen.tokenizer_of(run)
    texts = [
        tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        for turns in rows
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = answers_of(run.path / f"export-gguf-{kind}" / f"whole-{kind}.gguf", prompts, 64)
    pairs = zip(found, rows, strict=True)
    matches = sum(tokenizer.decode(ids).strip() == turns[-1]["content"].strip() for ids, turns in pairs)
    assert abs(matches / len(rows) - run.read("eval.json")["tuned"]["exact_match"]) <= 0.01
