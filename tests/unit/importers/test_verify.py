"""`finetune import --verify`: the first batch next to the tool's ids and labels."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data import chat_templates
from finetune.data.chat_texts import render_chat
from finetune.data.examples import Example, Row
from finetune.importers import llamafactory, prompt_formats, reading, recipe_text, verify
from finetune.importers.prompt_formats import NotCompared
from finetune.recipe import loader
from support.paths import DATA, MODEL

TURNS = [{"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Maria did."}]
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "learning_rate": 1e-4}


def verified(
    tmp_path: Path, given: dict[str, Any], rows: list[dict[str, Any]] | None = None
) -> verify.Verified:
    tmp_path.mkdir(exist_ok=True)
    name = tmp_path / "rows.jsonl"
    lines = (DATA / "train.jsonl").read_text().splitlines()[:3]
    name.write_text("\n".join(map(json.dumps, rows) if rows else lines) + "\n")
    (tmp_path / "data").mkdir()
    info = {"mine": {"file_name": str(name), "formatting": "sharegpt", "columns": {"messages": "messages"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    path, recipe = tmp_path / "theirs.yaml", tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given).replace("ROWS", str(name)))
    state = reading.import_recipe(path)
    recipe.write_text(recipe_text.write(state, "theirs.yaml"))
    return verify.verify(state, loader.load(recipe))


def axolotl(kind: str, **more: Any) -> dict[str, Any]:
    datasets = [{"path": "ROWS", "type": kind}]
    return {"base_model": str(MODEL), "datasets": datasets, "micro_batch_size": 2, **LORA, **more}


def trl(**more: Any) -> dict[str, Any]:
    return {"model_name_or_path": str(MODEL), "dataset_name": "ROWS", "use_peft": True, **more}


def texts(found: verify.Verified) -> list[str]:
    return [difference.text for difference in found.differences]


@pytest.mark.parametrize("more", [{}, {"assistant_only_loss": True}])
def test_trls_own_ids_and_labels_of_chats_are_finetunes(more, tmp_path) -> None:
    found = verified(tmp_path, trl(**more))
    assert found.by.startswith("TRL 1.") and (found.examples, found.same) == (3, 3), found.lines()


def test_what_trl_cuts_and_finetune_skips_is_named(tmp_path) -> None:
    found = verified(tmp_path, trl(max_length=24))
    assert found.same == 0 and texts(found) == ["finetune skips the example: too_long; the tool may cut it"]


def test_template_that_does_not_end_is_not_given_to_trl(tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    with pytest.raises(
        UserError, match="loop iterations"
    ):  # finetune's encoder refuses it; TRL would not end
        verified(tmp_path, trl(model_name_or_path=str(model)))


def test_axolotls_chats_are_finetunes_and_its_alpaca_prompt_is_not(tmp_path) -> None:
    found = verified(tmp_path, axolotl("chat_template"))
    assert (found.examples, found.same) == (2, 2) and "own implementation of axolotl" in found.by
    (tmp_path / "alpaca").mkdir()
    rows = [{"instruction": "Add 1 and 2.", "input": "", "output": "3"}] * 2
    found = verified(tmp_path / "alpaca", axolotl("alpaca"), rows)
    assert found.same == 0 and found.differences[0].examples == 2
    assert any("Below is an instruction" in text for text in texts(found))


def test_axolotl_on_all_inputs_trains_on_the_prompt_too(tmp_path) -> None:
    found = verified(tmp_path, axolotl("chat_template", train_on_inputs=True))
    assert found.same == 2, found.lines()


@pytest.mark.parametrize("template", ["qwen", "chatml", "qwen3_nothink"])
def test_llamafactorys_line_break_is_named_and_its_template_is_kept(template, tmp_path) -> None:
    given = {"model_name_or_path": str(MODEL), "stage": "sft", "dataset": "mine", "cutoff_len": 512}
    found = verified(tmp_path, {**given, "template": template, "finetuning_type": "lora"})
    if template not in prompt_formats.TEMPLATES:
        assert texts(found) == [f"not compared: finetune does not know LLaMA-Factory's template {template}"]
        return
    assert found.same == 0 and found.differences[0].examples == 3
    assert texts(found) == ["labels: LLaMA-Factory trains on '\\n', and finetune does not"]


def test_templates_of_the_same_text_are_translated_and_no_others() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    chats = [[{"role": "system", "content": "Be brief."}, *TURNS], [*TURNS, *TURNS]]
    compared = 0
    for name, template in prompt_formats.TEMPLATES.items():
        bundled = llamafactory.TEMPLATES.get(name)
        for messages in chats:
            tokenizer.chat_template = chat_templates.bundled()[bundled or "chatml"]
            text = render_chat(tokenizer, messages, None, prompt=False)
            example = Example("a:1", messages, trained=(True,))
            ids, _ = prompt_formats.of_llamafactory(
                example, tokenizer, name, on_prompt=False, last_turn=False
            )
            same = tokenizer.decode(ids) == text
            assert same is bool(bundled), (name, template)
            compared += same
    assert compared >= 10


@pytest.mark.parametrize(
    ("eos", "ends", "trained"),
    [
        ("<|im_end|>", [], "Maria did.<|im_end|>"),
        ("<|endoftext|>", [], "Maria did."),
        ("<|endoftext|>", ["<|im_end|>"], "Maria did.<|im_end|>"),
    ],
)
def test_axolotl_trains_on_the_end_of_a_turn_only_if_it_is_an_eos_or_eot_token(eos, ends, trained) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"eos_token": eos})
    example, row = Example("a:1", TURNS, trained=(True,)), Row({}, "a:1")
    _, labels = prompt_formats.of_axolotl(
        example, row, tokenizer, "chat_template", on_prompt=False, ends=ends
    )
    assert tokenizer.decode([label for label in labels if label != -100]) == trained


@pytest.mark.parametrize("more", [{"train_on_eos": "all"}, {"roles_to_train": ["user", "assistant"]}])
def test_labels_of_axolotl_that_finetune_does_not_know_are_not_compared(more, tmp_path) -> None:
    given = axolotl("chat_template")
    given["datasets"][0] |= more
    (text,) = texts(verified(tmp_path, given))
    assert text.startswith(
        f"not compared: finetune does not know axolotl's labels with datasets.0.{next(iter(more))}"
    )


def test_a_template_that_changes_earlier_turns_is_not_compared_with_axolotl(tmp_path) -> None:
    rows = [{"messages": [*TURNS, *TURNS]}, {"messages": TURNS}]
    found = verified(tmp_path, axolotl("chat_template", chat_template="qwen3"), rows)
    assert any("the chat template changes earlier turns" in text for text in texts(found)), texts(found)


def test_what_is_not_compared_says_so(tmp_path) -> None:
    given = {"model_name_or_path": str(MODEL), "stage": "sft", "dataset": "mine", "template": "intern3"}
    (text,) = texts(verified(tmp_path, given))
    assert text == "not compared: finetune does not know LLaMA-Factory's template intern3"
    (tmp_path / "other").mkdir()
    (text,) = texts(verified(tmp_path / "other", axolotl("jeopardy")))
    assert text == "not compared: finetune does not know axolotl's type jeopardy"


def test_formats_write_what_the_tools_document() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    example = Example(
        "a:1", [{"role": "system", "content": "Be brief."}, *TURNS, *TURNS], trained=(True, True)
    )

    def written(template: str, **more: Any) -> tuple[str, str]:
        how = {"on_prompt": False, "last_turn": False} | more
        ids, labels = prompt_formats.of_llamafactory(example, tokenizer, template, **how)
        return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label != -100])

    eos = tokenizer.eos_token
    text, trained = written("default")
    turn = f"Human: Who came?{eos}\nAssistant:Maria did.{eos}\n"
    assert text == f"System: Be brief.{eos}\n{turn}{turn}" and trained == f"Maria did.{eos}\n" * 2
    assert written("default", last_turn=True)[1] == f"Maria did.{eos}\n"
    assert written("default", on_prompt=True)[1] == text
    assert "Be brief.\n\nWho came?" in written("gemma")[0].replace("<start_of_turn>user\n", "")
    with pytest.raises(NotCompared, match="how LLaMA-Factory writes this example"):
        tools = Example("a:1", TURNS, tools=[{"function": {"name": "look"}}], trained=(True,))
        prompt_formats.of_llamafactory(tools, tokenizer, "chatml", on_prompt=False, last_turn=False)
    row = Row({"instruction": "Add.", "input": "1, 2", "output": "3"}, "a:1")
    ids, labels = prompt_formats.of_axolotl(example, row, tokenizer, "alpaca", on_prompt=False)
    assert "further context. Write a response" in tokenizer.decode(ids)
    assert tokenizer.decode(ids).endswith(f"### Input:\n1, 2\n\n### Response:\n3{eos}")
    assert tokenizer.decode([label for label in labels if label != -100]) == f"3{eos}"


def test_the_command_prints_the_comparison(tmp_path, capsys) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(axolotl("chat_template")).replace("ROWS", str(DATA / "train.jsonl")))
    assert main.main(["import", str(path), "--verify", "--output", str(tmp_path / "a.yaml")]) == 0
    assert "verify: 2 of the first 2 examples have the same" in capsys.readouterr().out
    assert main.main(["import", str(path), "--verify", "--json", "--output", str(tmp_path / "b.yaml")]) == 0
    said = json.loads(capsys.readouterr().out)["result"]["verify"]
    assert said["same"] == said["examples"] == 2 and said["differences"] == []


@pytest.fixture
def asked_of_axolotl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types that reach axolotl's loader, which imports a module of this name. A stand-in records them."""
    asked = list[str]()
    loader_of_types, settings = ModuleType("axolotl.prompt_strategies"), ModuleType("axolotl.utils.dict")
    monkeypatch.setattr(loader_of_types, "load", lambda *given: asked.append(given[0]), raising=False)
    monkeypatch.setattr(settings, "DictDefault", dict, raising=False)
    for module in (ModuleType("axolotl"), loader_of_types, settings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("finetune.core.packages.installed", lambda _: True)
    return asked


@pytest.mark.parametrize("kind", ["antigravity.x", "os.load", "this", "axolotl.cli.main", "alpaca_chat.load"])
def test_type_of_a_config_becomes_no_import(kind, asked_of_axolotl, tmp_path) -> None:
    found = verified(tmp_path, axolotl(kind))
    assert not asked_of_axolotl and f"does not compare axolotl's type {kind}" in found.by
    verified(tmp_path / "known", axolotl("chat_template"))
    assert asked_of_axolotl == ["chat_template"]


@pytest.mark.parametrize("in_source", [False, True])
def test_template_of_a_config_is_not_given_to_axolotl(in_source, asked_of_axolotl, tmp_path) -> None:
    """axolotl would render it without limits. The recipe does not have it."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    given = axolotl("chat_template", chat_template="jinja")
    (given["datasets"][0] if in_source else given)["chat_template_jinja"] = loop
    found = verified(tmp_path, given)
    assert not asked_of_axolotl and "the recipe does not have the config's chat_template_jinja" in found.by


@pytest.mark.parametrize("kind", ["chat_template", "alpaca", "completion"])
def test_an_installed_axolotl_gives_the_ids_of_finetunes_implementation(kind, tmp_path, monkeypatch) -> None:
    pytest.importorskip("axolotl.prompt_strategies", reason="needs axolotl")
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"} if kind == "alpaca" else {"text": "One."}
    rows = None if kind == "chat_template" else [row] * 2
    same_as_its_own_code(axolotl(kind), rows, tmp_path, monkeypatch)


@pytest.mark.parametrize("more", [{}, {"train_on_prompt": True}, {"mask_history": True}])
@pytest.mark.parametrize("template", ["default", "alpaca", "chatml", "qwen"])
def test_an_installed_llamafactory_gives_the_ids_of_finetunes_implementation(
    template, more, tmp_path, monkeypatch
) -> None:
    pytest.importorskip("llamafactory.data.template", reason="needs LLaMA-Factory")
    given = {"model_name_or_path": str(MODEL), "stage": "sft", "dataset": "mine", "template": template}
    same_as_its_own_code({**given, **more}, None, tmp_path, monkeypatch)


def same_as_its_own_code(
    given: dict[str, Any], rows: list[dict[str, Any]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the lines that the tool gives with those of finetune's implementation of its formats."""
    lines = []
    for name in ("installed", "own"):
        (tmp_path / name).mkdir()
        found = verified(tmp_path / name, given, rows)
        assert ("own implementation" in found.by) is (name == "own")
        lines.append(found.lines()[1:])
        monkeypatch.setattr(verify, "reader_of", lambda *_: None)
    assert lines[0] == lines[1]
