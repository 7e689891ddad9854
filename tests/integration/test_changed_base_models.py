"""A base model that has changed since the run is named by the commands that read it again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from finetune.cli import main
from finetune.export import merged_files
from finetune.hub import client
from finetune.models import base_identity, checkpoint_headers
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder
from support import tiny_models


def change_weights(model: Path) -> None:
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1000:] = bytes(byte ^ 1 for byte in content[-1000:])
    (model / "model.safetensors").write_bytes(content)


def change_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))


def change_generation(model: Path) -> None:
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [5]}))


@pytest.fixture(scope="module")
def finished(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    shutil.copytree(two_layers, place / "model")
    assert main.main(["train", str(tiny_models.recipe(place, place / "model")), "--quiet"]) == 0
    return place


@pytest.mark.parametrize("override", ["model.name=OTHER", "model.attention=eager"])
def test_evaluation_with_an_override_of_the_model_names_another_base(
    override: str, finished: Path, tmp_path: Path
) -> None:
    run, model = Path(shutil.copytree(finished / "run", tmp_path / "run")), finished / "model"
    before = (run / "eval.json").read_bytes()
    other = Path(shutil.copytree(model, tmp_path / "other"))
    words = ["evaluate", str(run), "--quiet", override.replace("OTHER", str(other))]
    if "OTHER" in override:
        assert main.main(words) == 0 and not (run / "eval.other.json").exists(), "a copy of the base model"
        (run / "eval.json").write_bytes(before)
    changed = other if "OTHER" in override else model
    try:
        change_weights(changed)
        assert main.main(words) == 0
    finally:
        shutil.copytree(tmp_path / "other", model, dirs_exist_ok=True) if changed == model else None
    assert (run / "eval.json").read_bytes() == before
    (note,) = json.loads((run / "eval.other.json").read_text())["settings"]["notes"][-1:]
    assert note == "the base model has changed since the run: model.safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    (
        (change_weights, "model.safetensors"),
        (change_config, "rms_norm_eps in config.json"),
        (change_generation, "eos_token_id in generation_config.json"),
    ),
)
def test_changed_base_model_is_named(change: Any, named: str, finished: Path, tmp_path: Path) -> None:
    run, model = tmp_path / "run", finished / "model"
    shutil.copytree(finished / "run", run)
    before = (run / "eval.json").read_bytes()
    kept = shutil.copytree(model, tmp_path / "kept")
    said = f"the base model has changed since the run: {named}"
    try:
        change(model)
        assert main.main(["evaluate", str(run), "--quiet"]) == 0
        assert main.main(["merge", str(run), "--quiet"]) == 0
    finally:
        shutil.copytree(kept, model, dirs_exist_ok=True)
    assert (run / "eval.json").read_bytes() == before, "the run's own result stays"
    assert said in json.loads((run / "eval.other.json").read_text())["settings"]["notes"]
    assert said in json.loads((run / "merge.json").read_text())["merged"]["notes"]


def test_base_model_that_is_replaced_during_a_merge_is_an_error(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    kept, write = shutil.copytree(finished / "model", tmp_path / "kept"), merged_files.write_merged

    def replaced(*given: Any) -> Any:
        change_weights(finished / "model")
        return write(*given)

    monkeypatch.setattr(merged_files, "write_merged", replaced)
    try:
        words = ["merge", str(finished / "run"), "--output", str(tmp_path / "merged"), "--quiet"]
        assert main.main(words) in (2, 4)
    finally:
        shutil.copytree(kept, finished / "model", dirs_exist_ok=True)
    assert not (tmp_path / "merged").exists()


def test_chat_with_one_prompt_names_a_changed_base_model(finished: Path, tmp_path: Path, capsys) -> None:
    kept = shutil.copytree(finished / "model", tmp_path / "kept")
    try:
        change_config(finished / "model")
        assert main.main(["chat", str(finished / "run"), "--prompt", "Hi", "--max-new-tokens", "2"]) == 0
    finally:
        shutil.copytree(kept, finished / "model", dirs_exist_ok=True)
    assert "the base model has changed since the run: rms_norm_eps" in capsys.readouterr().out


COMMITS = {"me/base@main": "b" * 40, "me/other@main": "a" * 40}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        ({"revision": None}, f"me/base at {'b' * 40} in place of me/base at {'a' * 40}"),
        ({"name": "me/other", "revision": None}, ""),  # the same commit, as of a renamed repository
        ({"name": "me/other", "revision": "c" * 40}, f"me/other at {'c' * 40} in place of"),
        ({"name": "/a/folder", "revision": None}, "can't compare the base model /a/folder with the run's"),
    ],
    ids=str,
)
def test_commit_of_a_base_model_on_the_hub_is_compared(
    now: dict[str, Any], said: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(client.COMMITS, json.dumps(COMMITS))  # the Hub's answers, as a process passes them on
    run = RunFolder(shutil.copytree(finished / "run", tmp_path / "run"))
    text = run.recipe.read_text().replace(json.dumps(str(finished / "model")), '"me/base"', 1)
    run.recipe.write_text(text.replace("revision: null", f'revision: "{"a" * 40}"', 1))
    own = run_folder.own_recipe(run).model
    assert (own.name, own.revision) == ("me/base", "a" * 40)
    notes = base_identity.notes(own.model_copy(update=now), run)
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_publish_of_another_base_model_is_refused(finished: Path, tmp_path: Path, capsys) -> None:
    other = shutil.copytree(finished / "model", tmp_path / "other")
    words = ["publish", str(finished / "run"), "--dry-run", f"model.name={other}"]
    assert main.main(words) == 0
    change_weights(other)
    capsys.readouterr()
    assert main.main(words) == 2
    assert "this is not the base model of the run" in capsys.readouterr().err


def test_merge_that_stores_the_base_model_otherwise_says_so(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished / "run", tmp_path / "run")
    assert main.main(["merge", str(run), "model.quantization=nf4", "--quiet"]) == 0
    (note,) = json.loads((run / "merge.json").read_text())["merged"]["notes"]
    assert note.startswith("the base model is stored in nf4, but this run used fp32")


def test_sample_reads_every_tensor_of_a_file(two_layers: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(two_layers / "model.safetensors", tmp_path))
    whole = checkpoint_headers.sample(file)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 2 + 1}, file, {"format": "pt"})
        assert checkpoint_headers.sample(file) != whole, name
    save_file(tensors, file, {"format": "pt"})
    assert checkpoint_headers.sample(file) == whole


def test_run_of_an_earlier_version_says_what_is_not_compared(finished: Path, tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(finished / "run", tmp_path / "run")))
    environment = run.read("environment.json")
    environment["base_model"] = {"config": environment["base_model"]["config"], "weights": {"a": "b"}}
    run.write("environment.json", environment)
    assert base_identity.notes(run_folder.own_recipe(run).model, run) == [base_identity.OLD]
