"""`finetune evaluate`: tasks of every kind, verdicts, evaluation in training, and runs that were moved."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA, ROOT, metrics, receipts

from finetune import cli, evaluate, recipe, results, scoring, tasks
from finetune.errors import UserError
from finetune.run_folder import RunFolder

KNOWLEDGE = str(ROOT / "examples" / "general" / "knowledge.yaml")
QUESTIONS = [
    {"question": f"What is {a} plus {b}?", "options": [str(a + b), str(a + b + 1), "a stone"], "right": 0}
    for a in range(4)
    for b in range(3)
]
ANSWERS = [{"asked": f"Say {word}.", "said": f"I say {word}."} for word in ("one", "two", "three")]
CHOICE = 'kind: multiple_choice\nprompt: "{{ question }}"\nchoices: "{{ options }}"\nanswer: "{{ right }}"\n'
ASKED = 'prompt: "{{ asked }}"\nanswer: "{{ said }}"\nmax_new_tokens: 6\n'


def write_task(folder: Path, name: str, rows: list[Any], text: str) -> str:
    """A task file and its rows; returns the path of the file."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / f"{name}.yaml").write_text(f"data: {name}.jsonl\n{text}")
    return str(folder / f"{name}.yaml")


@pytest.fixture
def task_files(tmp_path: Path) -> list[str]:
    """One task of each kind."""
    as_json = [{"asked": "JSON?", "said": {"a": [1, 2]}}]
    return [
        write_task(tmp_path, "choice", QUESTIONS, CHOICE),
        write_task(tmp_path, "exact", ANSWERS, f"kind: exact_match\nchat: true\n{ASKED}"),
        write_task(tmp_path, "found", ANSWERS, f"kind: regex_match\npattern: 'say (\\w+)'\n{ASKED}"),
        write_task(tmp_path, "as_json", as_json, f"kind: json_match\n{ASKED}"),
        write_task(tmp_path, "likely", ANSWERS, 'kind: perplexity\nprompt: "{{ said }}"\nforgetting: true\n'),
    ]


def test_every_kind_of_task_gives_lm_evals_own_numbers(train, two_layers, task_files, tmp_path) -> None:
    """Base and tuned by the command, against lm-eval given the adapter's path and a YAML of its own form."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    named = json.dumps([*task_files, "general_knowledge"])
    run = train(f"model.name={two_layers}", f"eval.tasks={named}", "eval.limit=12", "eval.general=true")
    found = run.read("eval.json")
    assert set(found["tasks"]) == {
        *("general_text", "general_knowledge", "choice", "exact", "found", "as_json", "likely")
    }
    assert found["tasks"]["choice"]["rows"] == 12 and found["tasks"]["general_text"]["rows"] == 48
    forgetting = {name for name, task in found["tasks"].items() if task["forgetting"]}
    assert forgetting == {"general_text", "general_knowledge", "likely"}
    assert found["tasks"]["exact"]["settings"]["apply_chat_template"] is True

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "choice.yaml").write_text(
        "task: theirs\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'choice.jsonl'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{options}}"\ndoc_to_target: "{{right}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    for side, adapter in (("base", {}), ("tuned", {"peft": str(run.adapter)})):
        loaded = {"pretrained": str(two_layers), "dtype": "float32", **adapter}
        manager = TaskManager(include_path=str(theirs), include_defaults=False)
        own: Any = simple_evaluate("hf", loaded, ["theirs"], task_manager=manager, device="cpu", batch_size=5)
        assert own["results"]["theirs"]["acc,none"] == found["tasks"]["choice"][side]["acc"]
    # lm-eval's own file as a task of ours: the same again, and what was evaluated before is kept
    assert cli.main(["evaluate", str(run.path), "--tasks", str(theirs / "choice.yaml"), "--quiet"]) == 0
    again = run.read("eval.json")["tasks"]
    assert again["theirs"]["tuned"]["acc"] == found["tasks"]["choice"]["tuned"]["acc"]
    assert again["choice"] == found["tasks"]["choice"]


def test_what_an_answer_must_be_to_be_right() -> None:
    def right(kind: str, said: str, wanted: str, pattern: str | None = None) -> float:
        named: Any = kind
        asked = tasks.Task(task="t", data="d", kind=named, prompt="", pattern=pattern)
        return tasks.right(asked, said, wanted)

    assert right("exact_match", " <think>no</think> yes\n", "yes") == 1.0
    assert right("exact_match", "yes.", "yes") == 0.0
    assert right("json_match", 'Here: {"b": 2, "a": [1]} and more', '{"a": [1], "b": 2}') == 1.0
    assert right("json_match", "{broken", '{"a": 1}') == 0.0
    extract = "answer1|answer2"
    assert right("regex_match", "the correct answer is answer2, not answer1", "answer2", extract) == 1.0
    assert right("regex_match", "Answer2", "answer2", extract) == 0.0  # case-sensitive, as the paper's script
    assert right("regex_match", "The total is 42 or 43", "42", r"is (\d+)") == 1.0


def test_a_number_is_an_index_and_a_text_a_choice() -> None:
    asked = {"task": "t", "data": "d", "kind": "multiple_choice", "prompt": "?", "choices": "{{ c }}"}
    task = tasks.Task.model_validate({**asked, "answer": "{{ a }}"})
    numbers = ["4", "3", "2", "1"]
    for answer, index in ((1, 1), ("1", 3), ("4", 0)):
        assert tasks._document(task, {"c": numbers, "a": answer})["answer"] == index
    assert tasks._document(task, {"c": ["x", "y"], "a": "1"})["answer"] == 1


def test_shipped_tasks_are_whole() -> None:
    asked = tasks.read(KNOWLEDGE)
    assert asked
    rows = tasks.documents(asked, KNOWLEDGE)
    assert len(rows) == 100 and all(len(row["choices"]) == 4 for row in rows)
    files = sorted((ROOT / "examples" / "commonsense").glob("*.yaml"))
    assert len(files) == 8
    for path in files:
        task = tasks.read(str(path))
        assert task and task.kind == "regex_match" and task.chat and task.pattern


def test_commonsense_rows_of_the_papers(tmp_path: Path) -> None:
    from test_shared_assets import ASSETS

    for name, file in (("arc_easy", "ARC-Easy"), ("openbookqa", "openbookqa")):
        source = ASSETS / "commonsense" / f"{file}_train.json"
        if not source.exists():
            pytest.skip(f"needs {source}")
        shipped = ROOT / "examples" / "commonsense" / f"{name}.yaml"
        (tmp_path / file).mkdir()
        shutil.copy(source, tmp_path / file / "test.json")
        path = shutil.copy(shipped, tmp_path)
        task = tasks.read(str(path))
        assert task
        rows = tasks.documents(task, str(path))
        outputs = [row["output"] for row in json.loads(source.read_text())]
        assert all(tasks.right(task, said, row["answer"]) for said, row in zip(outputs, rows, strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: multiple_choise\nprompt: a\n", ("try:       multiple_choice", "bad.yaml:2:1")),
        ("kind: multiple_choice\nprompt: '{{ question }}'\n", ("choices", "is required")),
        (
            CHOICE.replace("question", "qestion"),
            ("'qestion' is undefined", "columns question, options, right"),
        ),
        (CHOICE.replace("options", "right"), ("not a list of two or more",)),
        (CHOICE.replace("right", "question"), ("none of the choices",)),
        (CHOICE + "chioces: a\n", ("unknown key", "choices")),
        ("kind: json_match\nprompt: a\nanswer: '{{ right }}'\n", ("0, not a JSON object",)),
        ("kind: exact_match\nprompt: a\nanswer: '{{ none }}'\n", ("the answer is null",)),
        ("kind: regex_match\npattern: '('\nprompt: a\nanswer: b\n", ("not a regular expression",)),
    ],
)
def test_a_task_file_that_is_wrong_is_explained(text, said, tmp_path, capsys, small) -> None:
    path = write_task(tmp_path, "bad", QUESTIONS, text)
    assert cli.main(["check", "recipes/quickstart.yaml", f"eval.tasks=[{path}]", *small]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in said), printed


def test_tasks_that_are_not_there(train, two_layers, tmp_path, capsys) -> None:
    missing = tmp_path / "knowlege.yaml"
    assert cli.main(["check", "recipes/quickstart.yaml", f"eval.tasks=[{missing}]"]) == 2
    assert "cannot read the task" in capsys.readouterr().err
    run = train(f"model.name={two_layers}")
    before = run.read("eval.json")
    assert cli.main(["evaluate", str(run.path), "--tasks", "arc_eazy"]) == 2
    assert "no such task" in capsys.readouterr().err and run.read("eval.json") == before


def test_a_missing_package_is_said_before_anything_loads(monkeypatch, capsys) -> None:
    found = tasks.find_spec
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    assert cli.main(["check", "recipes/quickstart.yaml", "eval.tasks=[arc_easy]"]) == 3
    assert "finetune-toolkit[eval]" in capsys.readouterr().err
    monkeypatch.undo()
    if found("vllm") is None:
        asked = ["eval.tasks=[arc_easy]", "eval.engine=vllm"]
        assert cli.main(["check", "recipes/quickstart.yaml", *asked]) == 3
        assert "pip install vllm" in capsys.readouterr().err


def test_noise_is_worse_and_an_untrained_adapter_the_same(train, two_layers, tmp_path, capsys) -> None:
    from peft import LoraConfig, get_peft_model

    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()[:96]]
    for index, row in enumerate(rows):
        row["messages"][-1]["content"] = f"{index * 7919 % 10007:x} zqx vjk"
    noise = tmp_path / "noise.jsonl"
    noise.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked = [f"data.name={noise}", "train.max_steps=12", "train.learning_rate=1e-2"]
    run = train(*asked, "eval.samples=2")
    worse = run.read("eval.json")
    assert worse["verdict"]["word"] == "worse" and worse["difference"]["loss"]["low"] > 0
    assert "worse: " in (run.path / "log.txt").read_text()
    losses = [row["tuned_loss"] for row in worse["worst"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 12 and len(worse["samples"]) == 2
    assert worse["worst"][0]["where"].rpartition(":")[2].isdigit()

    untrained = get_peft_model(evaluate.open_base(recipe.load(run.recipe)), LoraConfig(r=4))
    untrained.save_pretrained(str(run.adapter))
    assert cli.main(["evaluate", str(run.path), "--quiet"]) == 0
    same = run.read("eval.json")
    assert same["verdict"]["word"] == "same" and same["difference"]["loss"]["value"] == 0.0


def test_a_verdict_needs_something_to_judge() -> None:
    empty: dict[str, Any] = {"difference": {}, "tasks": {}}
    assert results.verdict(empty)["word"] == "unknown"


def test_a_verdict_is_of_what_was_asked() -> None:
    """Subtasks of a group don't decide; a task that got worse is not called better."""

    def task(word: str, asked: bool = True, forgetting: bool = False) -> dict[str, Any]:
        scores = {"base": {"acc": 0.5}, "tuned": {"acc": 0.3}, "difference": {"acc": {"verdict": word}}}
        return {**scores, "main": "acc", "asked": asked, "forgetting": forgetting}

    loss = {"base": {"loss": 1.0}, "tuned": {"loss": 0.9}, "difference": {"loss": {"verdict": "better"}}}
    nothing: dict[str, Any] = {"difference": {}}
    assert results.verdict({**loss, "tasks": {"a": task("same")}})["word"] == "better"
    assert results.verdict({**loss, "tasks": {"a": task("worse")}})["word"] == "mixed"
    assert results.verdict({**nothing, "tasks": {"a": task("worse"), "b": task("better")}})["word"] == "mixed"
    part = {"part": task("worse", asked=False), "group": task("same")}
    assert results.verdict({**nothing, "tasks": part})["word"] == "same"
    forgot = results.verdict({**loss, "tasks": {"a": task("worse", forgetting=True)}})
    assert forgot["word"] == "better" and forgot["forgot"] == ["a"]


def test_sources_are_told_apart(train, two_layers, tmp_path) -> None:
    names = []
    for name in ("one", "two"):
        lines = (DATA / "train.jsonl").read_text().splitlines()
        part = lines[:80] if name == "one" else lines[80:160]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n")
        names.append(str(tmp_path / f"{name}.jsonl"))
    asked = ["data.validation_fraction=0.15", f"data.name={json.dumps(names)}"]
    run = train(f"model.name={two_layers}", *asked, "data.validation=null")
    found = run.read("eval.json")
    assert [source["source"] for source in found["sources"]] == names
    total = sum(source["rows"] for source in found["sources"])
    assert total == found["settings"]["rows"] > 12


def test_a_run_can_be_evaluated_where_only_its_folder_and_its_base_are(train, two_layers, tmp_path, capsys):
    """Another place for the run and for the base, and no data at all."""
    base, data = tmp_path / "base", tmp_path / "here"
    shutil.copytree(two_layers, base)
    data.mkdir()
    for name, rows in (("train", 96), ("test", 12)):
        lines = (DATA / f"{name}.jsonl").read_text().splitlines()[:rows]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task = write_task(data, "choice", QUESTIONS, CHOICE)
    given = [f"data.name={data / 'train.jsonl'}", f"data.validation={data / 'test.jsonl'}"]
    run = train(f"model.name={base}", *given, f"eval.tasks=[{task}]")
    before = run.read("eval.json")
    moved = RunFolder(tmp_path / "moved" / "away")
    moved.path.parent.mkdir()
    shutil.move(run.path, moved.path)
    shutil.rmtree(data)
    base.rename(tmp_path / "base2")
    assert cli.main(["evaluate", str(moved.path), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "model.name" in said and "eval.tasks=[], to do without" in said
    here = [f"model.name={tmp_path / 'base2'}", "eval.tasks=[]"]
    assert cli.main(["evaluate", str(moved.path), *here, "--quiet"]) == 0
    assert moved.read("eval.json")["tuned"] == before["tuned"]
    assert moved.read("eval.json")["base"] == before["base"]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join((DATA / "test.jsonl").read_text().splitlines()[20:30]) + "\n")
    asked = [*here, f"data.validation={other}"]
    assert cli.main(["evaluate", str(moved.path), *asked]) == 0
    assert "is not what the run held out" in capsys.readouterr().out
    assert moved.read("eval.json")["settings"]["rows"] == 12  # what the run held out stays its result
    assert moved.read("eval.other.json")["settings"]["rows"] == 10


def test_the_best_weights_are_kept_and_a_run_that_gets_worse_stops(train, two_layers) -> None:
    """A rate that is far too high: every step after the first ones makes it worse."""
    asked = [f"model.name={two_layers}", "train.learning_rate=0.3", "train.lr_scheduler_type=constant"]
    run = train(*asked, "train.max_steps=12", "eval.every=1", "eval.patience=3")
    lines = [line for line in metrics(run) if "eval_loss" in line]
    losses = [line["eval_loss"] for line in lines]
    best = losses.index(min(losses))
    assert len(losses) == best + 4 < 12
    assert run.read("eval.json")["tuned"]["loss"] == pytest.approx(losses[best], rel=1e-6)
    got = receipts(run)
    assert got["best weights kept"]["asked"].startswith(f"step {best + 1},")
    assert got["eval.every"]["got"] == str(len(losses))
    assert "stopped at step" in (run.path / "log.txt").read_text()
    assert [line["step"] for line in metrics(run) if "loss" in line][-1] == best + 4


def test_evaluating_does_not_change_the_training(train, two_layers, task_files) -> None:
    asked = [f"model.name={two_layers}", "train.max_steps=4", "adapter.lora_dropout=0.1"]
    plain = train(*asked, name="plain")
    named = f"eval.tasks={json.dumps([task_files[0], task_files[1]])}"
    watched = train(
        *asked, "eval.every=1", "eval.keep_best=false", "eval.best=choice/acc", named, name="watched"
    )
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (plain, watched)]
    assert weights[0] == weights[1]
    lines = [line for line in metrics(watched) if "eval_loss" in line]
    assert len(lines) == 4 and all(0 <= line["eval_choice/acc"] <= 1 for line in lines)
    assert [line["loss"] for line in metrics(plain)] == [x["loss"] for x in metrics(watched) if "loss" in x]


def test_adalora_keeps_no_weights_that_are_over_its_budget(train, two_layers) -> None:
    asked = [f"model.name={two_layers}", "adapter.type=adalora", "train.max_steps=12", "eval.every=1"]
    run = train(*asked, "train.learning_rate=0.1", "train.lr_scheduler_type=constant")
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    step = int(receipts(run)["best weights kept"]["asked"].split()[1].rstrip(","))
    assert step >= config["total_step"] - config["tfinal"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["eval.every=5", "data.validation=null"], "needs held-out rows"),
        (["eval.patience=2"], "needs eval.every"),
        (["eval.every=5", "eval.best=accuracy"], "task/metric"),
        (["eval.every=5", "eval.best=arc/acc"], "needs its task in eval.tasks"),
        (["eval.batch_size=atuo"], "auto"),
        (["eval.general=nowhere.jsonl"], "no such file"),
    ],
)
def test_settings_that_make_no_sense(asked, said, capsys) -> None:
    assert cli.main(["check", "recipes/quickstart.yaml", *asked]) == 2
    assert said in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch) -> None:
    tried = []

    def run(batch_size: int) -> str:
        tried.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return "done"

    assert scoring.fitting(run, "auto") == "done"
    assert tried == [64, 32, 16, 8, 4]
    with pytest.raises(torch.OutOfMemoryError):
        scoring.fitting(run, 16)
    with pytest.raises(torch.OutOfMemoryError):
        scoring.fitting(lambda batch_size: run(99), "auto")


@pytest.mark.xdist_group("launch")  # one port for all that are launched
def test_two_processes_give_the_numbers_of_one(train, two_layers, task_files) -> None:
    """`accelerate launch scripts/evaluate.py RUN`, as a user runs it."""
    named = json.dumps([task_files[0], task_files[2], task_files[4]])
    run = train(f"model.name={two_layers}", f"eval.tasks={named}")
    before = run.read("eval.json")
    config = str(ROOT / "accelerate_configs" / "cpu_2.yaml")
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = subprocess.run([*line, "scripts/evaluate.py", str(run.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    after = run.read("eval.json")
    assert after["settings"]["processes"] == 2 and done.stdout.count("held-out loss  ") == 1
    for name in ("choice", "found", "likely"):
        for side in ("base", "tuned"):
            assert after["tasks"][name][side] == pytest.approx(before["tasks"][name][side], rel=1e-5)
        assert after["tasks"][name]["rows"] == before["tasks"][name]["rows"]
    assert after["tuned"]["loss"] == pytest.approx(before["tuned"]["loss"], rel=1e-6)
    assert after["samples"] == before["samples"]


def test_tasks_are_found_before_weights_are_read(two_layers, tmp_path, capsys, small, monkeypatch) -> None:
    from finetune import model

    def never(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(model, "load", never)
    asked = [f"model.name={two_layers}", "eval.tasks=[arc_eazy]", f"train.output_dir={tmp_path / 'run'}"]
    assert cli.main(["train", "recipes/quickstart.yaml", *asked, *small, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "no such task" in said and "arc_easy" in said


def test_a_group_s_difference_is_dropped_where_it_is_no_mean_over_rows() -> None:
    from finetune import harness

    def row(index: int, right: float) -> dict[str, Any]:
        return {"doc_id": index, "filter": "none", "prompt_hash": "a", "acc": right}

    def side(values: list[float], said: float) -> dict[str, Any]:
        rows = [row(index, value) for index, value in enumerate(values)]
        common = {"higher_is_better": {"acc": True}, "settings": {}}
        part = {**common, "rows": rows, "subtasks": [], "metrics": {"acc": sum(values) / len(values)}}
        return {"part": part, "group": {**common, "rows": [], "subtasks": ["part"], "metrics": {"acc": said}}}

    base, tuned = side([0.0] * 10, 0.0), side([1.0] * 9 + [0.0], 0.9)
    found = harness.compare(base, tuned, set())
    assert found["group"]["difference"]["acc"]["verdict"] == "better" and found["group"]["asked"]
    assert not found["part"]["asked"]
    assert found["part"]["tuned"]["acc_stderr"] == pytest.approx(0.1)
    weighted = harness.compare(base, side([1.0] * 9 + [0.0], 0.7), set())
    assert weighted["group"]["difference"] == {}


def test_a_task_may_not_differ_between_base_and_tuned() -> None:
    from finetune import harness

    row = {"doc_id": 0, "filter": "none", "prompt_hash": "a", "acc": 1.0}
    side = {"t": {"rows": [row], "subtasks": [], "metrics": {}, "higher_is_better": {}, "settings": {}}}
    other = {"t": {**side["t"], "rows": [{**row, "prompt_hash": "b"}]}}
    with pytest.raises(UserError, match="not asked the same"):
        harness.compare(side, other, set())
