"""`--json`: every command prints one object on standard output, and all other text on standard error."""

import json
import re
from typing import Any

import pytest

from finetune.cli import json_output, main
from support.json_fields import documented_fields
from support.paths import DATA, MODEL, QUICKSTART, ROOT

Capture = pytest.CaptureFixture[str]


def printed(words: list[str], capsys: Capture, code: int = 0) -> Any:
    """The object that a command prints; standard output has nothing else."""
    capsys.readouterr()
    ended = main.main([*words, "--json"])
    out, err = capsys.readouterr()
    assert ended == code, err
    content = json.loads(out)
    assert out.count("\n") == 1
    assert list(content) == ["format_version", "command", "exit_code", "result", "problems"]
    assert content["format_version"] == json_output.FORMAT_VERSION and content["exit_code"] == code
    assert content["command"] == words[0]
    return content


@pytest.mark.parametrize(
    "words",
    [
        ["check", str(QUICKSTART)],
        ["recipes"],
        ["recipes", "quickstart"],
        ["explain"],
        ["explain", "unknown-key"],
        ["doctor"],
        ["data", str(QUICKSTART)],
        ["plan", str(QUICKSTART), "--gpu", "l4"],
    ],
    ids=" ".join,
)
def test_result_of_a_command_has_the_documented_keys(words, capsys) -> None:
    content = printed(words, capsys)
    alternatives = {"recipes": {"recipes"}, "recipes quickstart": {"recipe"}}
    documented = alternatives.get(" ".join(words)) or documented_fields(words[0])
    assert set(content["result"]) == documented and content["problems"] == []
    assert set(content["result"]) <= documented_fields(words[0])


def test_the_page_on_json_has_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "json_output.md").read_text(encoding="utf-8")
    missing = {name for name in main.parser()[1] if not re.search(rf"`{name}( [^`]*)?`", page)}
    assert missing == set()


def test_init_and_plan(tmp_path, capsys) -> None:
    recipe = tmp_path / "recipe.yaml"
    given = ["--model", str(MODEL), "--data", str(DATA / "train.jsonl"), "--output", str(recipe)]
    written = printed(["init", *given], capsys)["result"]
    assert written["recipe"] == str(recipe) and set(written) == documented_fields("init")
    plan = printed(["plan", str(recipe), "--gpu", "l4"], capsys)["result"]
    assert plan["fits"] is True and plan["device"] == "NVIDIA L4" and plan["processes"] == 1
    assert plan["trainable_parameters"] > 0 and plan["tokens_per_second"] > 0
    assert plan["peak_memory"] < plan["usable_memory"] and plan["choices"]["compile"]["reason"]
    assert all({"overrides", "trade_off", "peak_memory"} <= set(one) for one in plan["suggestions"])


def test_errors_are_objects_with_place_and_code(tmp_path, capsys) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("model: {name: a}\ndata: {name: b}\nadapter:\n  type: lora\n  r: 0\n  rr: 1\n")
    content = printed(["check", str(recipe)], capsys, code=2)
    assert content["result"] is None
    found = {problem["key"]: problem for problem in content["problems"]}
    assert found["adapter.r"]["code"] == "value-range" and found["adapter.r"]["where"] == f"{recipe}:5:3"
    assert found["adapter.rr"]["fix"] == "rename it to `r`"


def test_chat_without_a_prompt_is_an_error(capsys) -> None:
    content = printed(["chat", "runs/absent"], capsys, code=2)
    assert content["problems"][0]["code"] == "command-line"


def test_commands_on_a_run(train, tmp_path, capsys, small, two_layers) -> None:
    folder = tmp_path / "run"
    words = ["train", str(QUICKSTART), "train.max_steps=2", "train.warmup_steps=0", *small]
    words += [f"model.name={two_layers}", "eval.max_new_tokens=4", "eval.forgetting=false"]
    words += ["train.effective_batch_size=4", f"train.output_dir={folder}"]
    dry = printed([*words, "--dry-run"], capsys)["result"]
    assert dry["plan"]["steps"] == 2 and dry["data"]["train"]["kept"] == 96 and "train" in dry["next"]
    assert set(dry) == documented_fields("train --dry-run") - {"run", "finished"}
    result = printed(words, capsys)["result"]
    assert set(result) == documented_fields("train")
    assert result["run"] == str(folder) and result["evaluation"]["tuned"]["loss"] > 0
    assert result["run_checks"]["passed"] == result["run_checks"]["total"] > 10
    run = str(folder)
    assert printed(["evaluate", run], capsys)["result"]["base"]["loss"] > 0
    assert printed(["report", run], capsys)["result"]["page"] == f"{run}/report.html"
    assert printed(["merge", run], capsys)["result"]
    assert set(printed(["chat", run, "--prompt", "a", "--max-new-tokens", "2"], capsys)["result"]) == {
        "answers"
    }
    staged = printed(["publish", run, "--dry-run"], capsys)["result"]
    assert "README.md" in staged["files"] and set(staged) == documented_fields("publish --dry-run")
    assert printed(["compare", run, run], capsys)["result"]["parts"]


def test_secrets_nan_and_paths_are_plain_values(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    result = {"path": tmp_path, "loss": float("nan"), "text": "hf_abcdefghijklmnopqrstuvwxyz", "set": {1}}
    content = json.loads(json_output.render("check", 0, result, ()))
    assert content["result"] == {"path": str(tmp_path), "loss": None, "text": "****", "set": [1]}
