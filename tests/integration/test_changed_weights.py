"""A changed file of a run's weights ends every command that uses them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest

import finetune
from finetune.cli import main
from finetune.core.errors import Exit, UserError
from support import tiny_models

SAID = "the saved weights have changed since finetune wrote them"
COMMANDS = [
    ["evaluate"],
    ["merge"],
    ["export", "--to", "vllm"],
    ["chat", "--prompt", "Hi"],
    ["publish", "--dry-run"],
]


@pytest.fixture(scope="module")
def finished(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    assert main.main(["train", str(tiny_models.recipe(place, two_layers)), "--quiet"]) == 0
    return place / "run"


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    os.unlink(file)
    file.write_bytes(content)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"])
def test_changed_file_of_the_weights_is_an_error(
    name: str, command: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    content = (run / "adapter" / name).read_bytes()
    at = content.index(b'"r": ') + 5 if name == "adapter_config.json" else len(content) // 2
    flip(run / "adapter" / name, at)
    assert main.main([command[0], str(run), *command[1:]]) == Exit.ARTIFACT
    said = capsys.readouterr().err
    assert SAID in said and f"{name} has another content than was written" in said
    with pytest.raises(UserError, match=SAID):
        finetune.Run(run).load_model()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "config.json"])
def test_new_file_that_a_library_reads_is_an_error(
    name: str, command: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "adapter" / name).write_text("{}")
    assert main.main([command[0], str(run), *command[1:]]) == Exit.ARTIFACT
    said = capsys.readouterr().err
    assert SAID in said and f"{name} is new" in said


@pytest.mark.parametrize("command", COMMANDS[:4], ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_file_of_the_weights_that_is_replaced_while_a_command_runs_is_an_error(
    name: str,
    command: list[str],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    path = run / "adapter" / name
    load = peft.PeftModel.from_pretrained

    def replaced(*given: Any, **options: Any) -> Any:
        content = path.read_bytes()
        new = (
            content.replace(b'"lora_alpha": ', b'"lora_alpha": 9') if name.endswith("json") else content[:-1]
        )
        path.unlink()
        path.write_bytes(new if name.endswith("json") else new + bytes([content[-1] ^ 1]))
        return load(*given, **options)

    monkeypatch.setattr(peft.PeftModel, "from_pretrained", replaced)
    assert main.main([command[0], str(run), *command[1:]]) == Exit.ARTIFACT
    assert SAID in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train"])
def test_training_from_a_changed_adapter_is_an_error(
    command: str, finished: Path, two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "first"))
    words = [command, str(tiny_models.recipe(tmp_path, two_layers)), f"adapter.init_from={run}", "--quiet"]
    flip(run / "adapter" / "adapter_model.safetensors", -1)
    assert main.main(words) == Exit.INPUT
    assert SAID in capsys.readouterr().err
    (run / "weights.json").unlink()
    assert main.main(words) == 0


def test_card_of_the_adapter_may_change(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "adapter" / "README.md").write_text("My adapter")
    assert main.main(["merge", str(run), "--quiet"]) == 0
    assert "README.md" not in json.loads((run / "weights.json").read_text())["files"]


def test_publish_of_changed_merged_weights_is_an_error(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    words = ["publish", str(run), "--merged", "--dry-run"]
    assert main.main(["merge", str(run), "--quiet"]) == 0 == main.main(words)
    flip(run / "merged" / "model.safetensors", -1)
    assert main.main(words) == Exit.ARTIFACT
    assert SAID in capsys.readouterr().err


def test_record_of_a_stranger_opens_no_file_outside_of_the_folder(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    outside = tmp_path / "outside"
    os.mkfifo(outside)  # opening it would wait
    record = json.loads((run / "weights.json").read_text())
    record["files"] |= {
        "../../outside": {"bytes": 0, "xxh3_128": ""},
        str(outside): {"bytes": 0, "xxh3_128": ""},
    }
    (run / "weights.json").write_text(json.dumps(record))
    assert main.main(["merge", str(run), "--quiet"]) == Exit.ARTIFACT
