"""Tasks of `finetune evaluate`: every kind, compared with lm-eval itself, and the errors of wrong tasks."""

from __future__ import annotations

import copy
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data.encoding import make_encoder
from finetune.data.examples import Row
from finetune.data.formats import convert
from finetune.evaluation import lm_eval_harness, scoring, tasks
from finetune.export import serving_check
from finetune.recipe.schema import Data, Eval, Model
from support.paths import MODEL, QUICKSTART, ROOT
from support.small_tasks import ANSWERS, ASKED, CHOICE, QUESTIONS, write_task


@pytest.fixture(autouse=True)
def no_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here lm-eval itself evaluates too, and then asks pip for all packages, which takes a second."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")


KNOWLEDGE = str(ROOT / "examples" / "general" / "knowledge.yaml")


def test_every_kind_of_task_gives_lm_evals_own_numbers(train, two_layers, task_files, tmp_path) -> None:
    """Base and tuned by the command, against lm-eval given the adapter's path and a YAML of its own form."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    named = json.dumps([*task_files, "general_knowledge"])
    run = train(f"model.name={two_layers}", f"eval.tasks={named}", "eval.limit=12", "eval.forgetting=true")
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
    words = [
        "evaluate",
        str(run.path),
        "eval.forgetting=false",
        "--tasks",
        str(theirs / "choice.yaml"),
        "--quiet",
    ]
    assert main.main(words) == 0
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
    assert right("json_match", "[1.0, 2e1]", "[1, 20]") == 1.0
    assert right("json_match", "[true]", "[1]") == right("json_match", "[false]", "[0.0]") == 0.0
    assert right("json_match", "{broken", '{"a": 1}') == 0.0
    assert right("json_match", "[" * 3000, '{"a": 1}') == 0.0
    extract = "answer1|answer2"
    assert right("regex_match", "the correct answer is answer2, not answer1", "answer2", extract) == 1.0
    assert right("regex_match", "Answer2", "answer2", extract) == 0.0  # case-sensitive, as the paper's script
    assert right("regex_match", "The total is 42 or 43", "42", r"is (\d+)") == 1.0


def test_a_number_is_an_index_and_a_text_a_choice() -> None:
    asked = {"task": "t", "data": "d", "kind": "multiple_choice", "prompt": "?", "choices": "{{ c }}"}
    task = tasks.Task.model_validate({**asked, "answer": "{{ a }}"})
    numbers = ["4", "3", "2", "1"]
    for answer, index in (("1", 3), ("4", 0), (0, 0)):
        assert tasks._document(task, {"c": numbers, "a": answer})["answer"] == index
    assert tasks._document(task, {"c": ["x", "1"], "a": 1})["answer"] == 1
    with pytest.raises(
        ValueError,
        match="answer 1 is the index of one choice and the text of another; write the correct choice as text",
    ):
        tasks._document(task, {"c": numbers, "a": 1})  # as a .csv has it, the last one
    assert tasks._document(task, {"c": ["x", "y"], "a": "1"})["answer"] == 1
    with pytest.raises(ValueError, match="is not one of the choices"):
        tasks._document(task, {"c": ["x", "y"], "a": "²"})  # a digit, and no number


def test_a_null_is_no_text() -> None:
    """It was asked, and scored, as "None"; a template may look whether there is one."""
    asked = {"task": "t", "data": "d", "kind": "exact_match", "answer": "b"}
    row = {"text": None, "said": "yes"}
    for prompt in ("{{ text }}", "Q: {{ text }}", "{{ text }}{{ said }}"):
        with pytest.raises(ValueError, match="null"):
            tasks._document(tasks.Task.model_validate({**asked, "prompt": prompt}), row)
    guarded = {**asked, "prompt": "{% if text %}{{ text }}{% endif %}{{ said }}"}
    assert tasks._document(tasks.Task.model_validate(guarded), row)["prompt"] == "yes"
    choice = {**asked, "kind": "multiple_choice", "prompt": "?", "choices": ["b", "{{ text }}"]}
    with pytest.raises(ValueError, match="null"):
        tasks._document(tasks.Task.model_validate(choice), row)


def test_spaces_around_a_value_reach_the_model() -> None:
    row = {"q": "Name a color", "a": "red", "n": 1}
    asked = {"task": "t", "data": "d", "kind": "exact_match", "answer": "{{ a }}\n"}
    for prompt, expected in (
        ("{{ q }}\n", "Name a color\n"), (" {{ q }}", " Name a color"), ("Q: {{ q }}\n", "Q: Name a color\n"),
        ("{{- q -}}", "Name a color"), ("{{ n }}", "1"),
    ):  # fmt: skip
        made = tasks._document(tasks.Task.model_validate({**asked, "prompt": prompt}), row)
        assert made == {"prompt": expected, "answer": "red"}
    choice = {**asked, "kind": "multiple_choice", "prompt": "?", "answer": "{{- n -}}\n"}
    task = tasks.Task.model_validate({**choice, "choices": [" {{ a }}", " blue"]})
    assert tasks._document(task, row)["choices"] == [" red", " blue"]
    task = tasks.Task.model_validate({**choice, "choices": "{{ listed }}\n", "answer": " {{ gold }}"})
    for listed, gold, index in (([" 1", " 2"], 1, 0), ([" yes", " no"], "no", 1)):
        assert tasks._document(task, {"listed": listed, "gold": gold})["answer"] == index


@pytest.mark.parametrize("kind", ["json_match", "exact_match"])
@pytest.mark.parametrize("levels", [150, 980, 3000])
def test_nested_values_of_a_task_are_no_bug(kind: str, levels: int, tmp_path, small, capsys) -> None:
    nested = "[" * levels + "1" + "]" * levels
    for row in (f'{{"q": "a", "a": "{nested}"}}', f'{{"q": "a", "a": "[1]", "b": {nested}}}'):
        (tmp_path / "deep.jsonl").write_text(f"{row}\n")
        text = f'data: deep.jsonl\nkind: {kind}\nprompt: "{{{{ q }}}}"\nanswer: "{{{{ a }}}}"\n'
        (tmp_path / "deep.yaml").write_text(text)
        code = main.main(["check", str(QUICKSTART), f"eval.tasks=[{tmp_path / 'deep.yaml'}]", *small])
        assert code == (0 if kind == "exact_match" and '"b"' not in row else 2)
        assert "internal-error" not in capsys.readouterr().err


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
    from support.paths import ASSETS

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
        ("kind: multiple_choise\nprompt: a\n", ("help:      kind: multiple_choice", "bad.yaml:2:1")),
        (
            "kind: multiple_choice\nprompt: '{{ question }}'\n",
            ("choices: a task of the kind `multiple_choice` needs this key",),
        ),
        (
            CHOICE.replace("question", "qestion"),
            ("'qestion' is undefined", "columns question, options, right"),
        ),
        (CHOICE.replace("options", "right"), ("and not a list with two or more choices",)),
        (CHOICE.replace("right", "question"), ("is not one of the choices",)),
        (CHOICE.replace("{{ options }}", "{{ ['', 'a'] }}"), ("a choice is empty",)),
        (CHOICE.replace("{{ options }}", "{{ ['a', 'b', 'a'] }}"), ("the right answer twice",)),
        (CHOICE.replace("{{ options }}", "{{ ['a 1 ' * 600, 'a'] }}"), ("a choice has more tokens than",)),
        (CHOICE + "chioces: a\n", ("unknown key", "choices")),
        (CHOICE.replace("question", "'a' * 10 ** 10"), ("the template took more than 256 MB",)),
        ("kind: exact_match\nprompt: 'a{{'\nanswer: a\n", ("the template is not valid",)),
        ("kind: json_match\nprompt: a\nanswer: '{{ right }}'\n", ("0 and not a JSON object",)),
        (
            "kind: json_match\nprompt: a\nanswer: yes {{ right }}\n",
            ("'yes 0' and not a JSON object or list",),
        ),
        ("kind: exact_match\nprompt: a\nanswer: '{{ none }}'\n", ("the answer is null",)),
        ("kind: exact_match\nprompt: ''\nanswer: a\n", ("the prompt is empty",)),
        (
            "kind: regex_match\npattern: '('\nprompt: a\nanswer: b\n",
            ("pattern: the pattern is not a valid regular expression",),
        ),
        (
            "kind: exact_match\nprompt: a\nanswer: b\npattern: c\ndelimiter: ''\n",
            (
                "pattern: a task of the kind `exact_match` does not use this key",
                "kind: regex_match",
                "delimiter: a task of the kind `exact_match`",
            ),
        ),
        (
            "kind: perplexity\nprompt: a\nstop: [b]\n",
            ("stop: a task of the kind `perplexity` does not use this key",),
        ),
    ],
)
def test_a_task_file_that_is_wrong_is_explained(text, said, tmp_path, capsys, small) -> None:
    path = write_task(tmp_path, "bad", QUESTIONS, text)
    assert main.main(["check", "recipes/quickstart.yaml", f"eval.tasks=[{path}]", *small]) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in said), printed


@pytest.mark.soak  # lm-eval lists its tasks in 15 s
def test_stated_names_are_the_names_that_lm_eval_lists() -> None:
    from lm_eval import tasks as lm_eval_tasks

    listed = set(lm_eval_tasks.TaskManager().all_tasks)
    stated = tasks.stated_names(Path(lm_eval_tasks.__file__).parent)
    assert not listed - stated
    assert stated - listed <= {"flores_tasks", "scrolls", "winogenerated"}, "tags and groups without a task"


@pytest.mark.soak
def test_tasks_that_are_not_there(train, two_layers, tmp_path, capsys) -> None:
    missing = tmp_path / "knowlege.yaml"
    assert main.main(["check", "recipes/quickstart.yaml", f"eval.tasks=[{missing}]"]) == 2
    assert "finetune can't read the task file" in capsys.readouterr().err
    run = train(f"model.name={two_layers}")
    before = run.read("eval.json")
    assert main.main(["evaluate", str(run.path), "--tasks", "arc_eazy"]) == 2
    assert "lm-eval has no such task" in capsys.readouterr().err and run.read("eval.json") == before


def test_a_missing_package_is_said_before_anything_loads(monkeypatch, capsys) -> None:
    found = tasks.find_spec
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    assert main.main(["check", "recipes/quickstart.yaml", "eval.tasks=[arc_easy]"]) == 3
    assert "[eval]" in capsys.readouterr().err
    with pytest.raises(UserError, match="need the package lm-eval") as raised:  # a local task needs it too
        lm_eval_harness.check(Eval(tasks=["general_knowledge"]))
    assert raised.value.code == 3
    monkeypatch.undo()
    if found("vllm") is None:
        asked = ["eval.tasks=[arc_easy]", "eval.engine=vllm"]
        assert main.main(["check", "recipes/quickstart.yaml", *asked]) == 3
        assert "pip install vllm" in capsys.readouterr().err


def test_tasks_are_found_before_weights_are_read(two_layers, tmp_path, capsys, small, monkeypatch) -> None:
    from finetune.models import loading

    def never(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load", never)
    asked = [f"model.name={two_layers}", "eval.tasks=[arc_eazy]", f"train.output_dir={tmp_path / 'run'}"]
    assert main.main(["train", "recipes/quickstart.yaml", *asked, *small, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "no such task" in said and "arc_easy" in said


def test_two_tasks_of_one_name_are_refused(tmp_path) -> None:
    """One would disappear; the same file twice is one task."""
    one = write_task(tmp_path, "choice", QUESTIONS, CHOICE)
    for other, more in (("choice2", "task: choice\n"), ("third", "task: arc_easy\n")):
        path = write_task(tmp_path, other, QUESTIONS, more + CHOICE)
        with pytest.raises(UserError, match="two task files have the same task name"):
            tasks.check(Eval(tasks=[one, path, "arc_easy"]))
    with pytest.raises(UserError, match="the list names one task file several times"):
        tasks.check(Eval(tasks=[one, f"{tmp_path}/../{tmp_path.name}/{Path(one).name}"]))
    tasks.check(Eval(tasks=[one, one, "arc_easy"]))


def test_an_answer_as_long_as_the_model_is_refused_before_it_loads(tmp_path) -> None:
    longest = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    base = Model(name=str(MODEL))
    for tokens, kind, ok in (
        (longest, "exact", False),
        (longest - 1, "exact", True),
        (longest, "regex", False),
    ):
        text = f"kind: {kind}_match\nprompt: a\nanswer: b\nmax_new_tokens: {tokens}\n"
        path = write_task(tmp_path, "long", ANSWERS, text + "pattern: a\n" * (kind == "regex"))
        asked = ["check", "recipes/quickstart.yaml", f"model.name={MODEL}", f"eval.tasks=[{path}]"]
        assert main.main(asked) == (0 if ok else 2)
        if ok:
            lm_eval_harness.check(Eval(tasks=[path]), base)
            continue
        with pytest.raises(UserError) as raised:
            lm_eval_harness.check(Eval(tasks=[path]), base)
        (problem,) = raised.value.problems
        assert (problem.key, problem.where) == ("max_new_tokens", path)


def test_a_check_knows_the_names_of_lm_evals_tasks(capsys, monkeypatch) -> None:
    """Without lm-eval's list of them, which takes 15 s. `ai2_arc` and `anli` are no names of files."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: pytest.fail("lm-eval lists its tasks"))
    asked = ["check", "recipes/quickstart.yaml"]
    known = "arc_easy, mmlu, winogrande, general_knowledge, ai2_arc, anli"
    assert main.main([*asked, f"eval.tasks=[{known}]"]) == 0, capsys.readouterr().err
    assert main.main([*asked, "eval.tasks=[arc_eazy, arc_easy, gsm8x]"]) == 2
    said = capsys.readouterr().err
    assert said.count("no such task") == 2
    assert "arc_eazy\n  help:      arc_easy" in said and "gsm8x\n  help:      gsm8k" in said


def test_a_group_s_difference_is_dropped_where_it_is_no_mean_over_rows() -> None:
    from finetune.evaluation import lm_eval_harness

    def row(index: int, right: float) -> dict[str, Any]:
        return {"doc_id": index, "filter": "none", "prompt_hash": "a", "doc_hash": f"{index}", "acc": right}

    def side(values: list[float], said: float) -> dict[str, Any]:
        rows = [row(index, value) for index, value in enumerate(values)]
        common = {"higher_is_better": {"acc": True}, "settings": {}}
        part = {**common, "rows": rows, "subtasks": [], "metrics": {"acc": sum(values) / len(values)}}
        return {"part": part, "group": {**common, "rows": [], "subtasks": ["part"], "metrics": {"acc": said}}}

    base, tuned = side([0.0] * 10, 0.0), side([1.0] * 9 + [0.0], 0.9)
    found = lm_eval_harness.compare(base, tuned, set())
    assert found["group"]["difference"]["acc"]["p"] < 0.01 and found["group"]["asked"]
    assert found["group"]["difference"]["acc"]["distinct"] == 10, "one prompt for all tells nothing apart"
    assert not found["part"]["asked"]
    assert found["part"]["tuned"]["acc_stderr"] == pytest.approx(0.1)
    weighted = lm_eval_harness.compare(base, side([1.0] * 9 + [0.0], 0.7), set())
    assert weighted["group"]["difference"] == {}


def test_a_task_may_not_differ_between_base_and_tuned() -> None:
    from finetune.evaluation import lm_eval_harness

    row = {"doc_id": 0, "filter": "none", "prompt_hash": "a", "acc": 1.0}
    side = {"t": {"rows": [row], "subtasks": [], "metrics": {}, "higher_is_better": {}, "settings": {}}}
    other = {"t": {**side["t"], "rows": [{**row, "prompt_hash": "b"}]}}
    with pytest.raises(UserError, match="got different prompts"):
        lm_eval_harness.compare(side, other, set())


@pytest.fixture(scope="module")
def engine() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ROOT / "examples" / "tiny_llama" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    return lm_eval_harness.language_model(model, AutoTokenizer.from_pretrained(folder), 1, None)


OPTIONS: dict[str, Any] = {
    "repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 3, "do_sample": True,
    "guidance_scale": 5.0, "max_time": 1e-9, "forced_eos_token_id": 5, "min_new_tokens": 9,
    "exponential_decay_length_penalty": (1, 1e30), "sequence_bias": [[[1], 1e30]], "stop_strings": ["a"],
    "penalty_alpha": 0.6, "dola_layers": "high", "prompt_lookup_num_tokens": 3, "suppress_tokens": [2],
    "return_dict_in_generate": True, "cache_implementation": "offloaded_hybrid",
}  # fmt: skip


def test_an_answer_is_the_models_likeliest_whatever_its_generation_config_says(
    engine, tmp_path, monkeypatch
) -> None:
    """Of a task, of the validation set, and of the check of an export."""
    asked = "Rosa Ito from Oxford ordered 3 3 3 pears pears."
    task = write_task(
        tmp_path, "greedy", [{"asked": asked, "said": "-"}], f"kind: exact_match\nchat: true\n{ASKED}"
    )
    settings, ids = Eval(tasks=[task], batch_size=1), engine.tokenizer(asked).input_ids
    own = engine.model.generation_config

    def said() -> list[Any]:
        found = lm_eval_harness.run(engine.model, engine.tokenizer, settings)
        stops = scoring.stop_ids(engine.model, engine.tokenizer)
        return [
            found["greedy"]["rows"][0]["resps"][0][0],
            scoring.greedy_answers(engine.model, engine.tokenizer, [ids], 8, 1),
            serving_check.answers(engine.model, [ids], stops, 8)[0],
        ]

    plain = said()
    assert all(plain) and engine.model.generation_config is own
    for name, value in OPTIONS.items():
        with monkeypatch.context() as patch:
            patch.setattr(own, name, value)
            assert said() == plain, name


@pytest.mark.parametrize("opening", [[], ["<|im_start|>"]])
def test_prompts_and_choices_have_no_end_that_a_tokenizer_adds_after_a_text(engine, opening) -> None:
    """lm-eval would take it for a part of the prompt, and cut the choices at another token."""
    plain, ending = copy.deepcopy(engine.tokenizer), copy.deepcopy(engine.tokenizer)
    special = [(token, plain.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    for tokenizer, end in ((plain, []), (ending, ["<|im_end|>"])):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=[*opening, "$A", *end], special_tokens=special
        )
    wrapped = [lm_eval_harness.language_model(engine.model, each, 1, None) for each in (plain, ending)]
    for read in (
        lambda one: one._encode_pair("Once upon", " a time"),
        lambda one: one.tok_encode("Once upon"),
        lambda one: one.tok_batch_encode(["Once upon a time", "Once"])[0].tolist(),
    ):
        assert read(wrapped[0]) == read(wrapped[1])
    assert ending("Once")["input_ids"][-1] == special[1][1], "the tokenizer itself stays as it is"


def test_tasks_of_lm_eval_take_only_penalties_from_the_generation_config(engine, monkeypatch) -> None:
    own = engine.model.generation_config
    for name, value in OPTIONS.items():
        monkeypatch.setattr(own, name, value)
    kept = lm_eval_harness._generation_config(engine.model, lm_eval_harness.TextOptions(False))
    assert (kept.repetition_penalty, kept.no_repeat_ngram_size) == (5.0, 1)
    assert kept.eos_token_id == own.eos_token_id and kept.stop_strings is kept.max_time is None
    local = lm_eval_harness._generation_config(
        engine.model, lm_eval_harness.TextOptions(False, is_local=True)
    )
    assert local.repetition_penalty is local.eos_token_id is None


def test_a_text_without_spaces_is_infinitely_perplexing(engine, tmp_path, monkeypatch) -> None:
    """It is one word, whose perplexity no float holds; what lm-eval's own tasks end in is told."""
    rows = [{"said": "".join(chr(0x4E00 + 7 * row + at * 11) for at in range(168))} for row in range(7)]
    task = write_task(tmp_path, "word", rows, 'kind: perplexity\nprompt: "{{ said }}"\nanswer: null\n')
    found = lm_eval_harness.run(engine.model, engine.tokenizer, Eval(tasks=[task], batch_size=4))
    metrics = lm_eval_harness.compare(found, found, set())["word"]["tuned"]
    assert metrics["word_perplexity"] == math.inf and 1 < metrics["bits_per_byte"] < 100
    assert math.isfinite(metrics["bits_per_byte_stderr"])

    def fails(*_: Any, **__: Any) -> None:
        math.exp(1000)

    monkeypatch.setattr("lm_eval.evaluate", fails)
    with pytest.raises(UserError, match="math range error"):
        lm_eval_harness.run(engine.model, engine.tokenizer, Eval(tasks=[task], batch_size=4))


def test_evaluation_starts_no_program(engine, tmp_path, monkeypatch) -> None:
    """Git would run programs that a `.git` of the working directory names."""
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **_: started.append(words) or 1 / 0)
    task = write_task(tmp_path, "own", ANSWERS[:1], f"kind: exact_match\n{ASKED}")
    found = lm_eval_harness.run(engine.model, engine.tokenizer, Eval(tasks=[task], batch_size=1))
    assert found and not started


def test_run_reports_a_type_error_as_a_bug_unless_a_task_file_of_lm_eval_can_cause_it(
    engine, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(engine.model, "generate", lambda **_: len(3))  # pyright: ignore[reportArgumentType] (the planted bug)
    task = write_task(tmp_path, "own", ANSWERS[:1], f"kind: exact_match\n{ASKED}")
    with pytest.raises(TypeError, match="has no len"):
        lm_eval_harness.run(engine.model, engine.tokenizer, Eval(tasks=[task], batch_size=1))


def log_likelihood(model: Any, ids: list[int], start: int) -> float:
    """The log-likelihood of the tokens from `start` on, without lm-eval."""
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(scores[place - 1, ids[place]].item() for place in range(start, len(ids)))


def test_the_perplexity_of_a_text_counts_the_tokens_of_the_text_only(engine, tmp_path) -> None:
    """The tokenizer puts a BOS token before texts, and lm-eval puts one as well."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    bos = [("<|endoftext|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=bos
    )
    text = "Rosa Ito from Oxford ordered 3 pears."
    task = write_task(
        tmp_path, "text", [{"said": text}], 'kind: perplexity\nprompt: "{{ said }}"\nanswer: null\n'
    )
    model = copy.deepcopy(engine.model).float()
    found = lm_eval_harness.run(model, tokenizer, Eval(tasks=[task], batch_size=1))
    likelihood = log_likelihood(model, tokenizer(text)["input_ids"], 1)
    bits = -likelihood / math.log(2) / len(text.encode())
    metrics = lm_eval_harness.compare(found, found, set())["text"]["tuned"]
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("lead", ["", " ", "<think>\n\n</think>\n\n"])
def test_the_choices_of_a_chat_are_answers_as_the_template_writes_them(lead, engine, tmp_path) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    turn = "{% if m.role == 'user' %}Q: {{ m.content }}\nA:{% else %}" + lead + "{{ m.content }}\n{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    rows = [{"asked": "Who?", "choices": ["Rosa", "Omar"], "said": "Omar"}]
    values = 'kind: multiple_choice\nchat: true\nprompt: "{{ asked }}"\nanswer: "{{ said }}"\n'
    task = write_task(tmp_path, "choice", rows, values + 'choices: "{{ choices }}"\n')
    model = copy.deepcopy(engine.model).float()
    found = lm_eval_harness.run(model, tokenizer, Eval(tasks=[task], batch_size=1))
    said = [answer[0] for (answer,) in found["choice"]["rows"][0]["resps"]]
    for choice, value in zip(rows[0]["choices"], said, strict=True):
        prompt, whole = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in ("Q: Who?\nA:", f"Q: Who?\nA:{lead}{choice}")
        )
        assert value == pytest.approx(log_likelihood(model, whole, len(prompt)), abs=1e-3)


def test_a_chat_has_the_bos_that_its_template_writes(engine, tmp_path, monkeypatch) -> None:
    """One, or none, as in training and of held-out rows, whatever the tokenizer puts before a text."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    bos = [("<|endoftext|>", tokenizer.bos_token_id)]
    before = TemplateProcessing(single="<|endoftext|> $A", special_tokens=bos)
    tokenizer.backend_tokenizer.post_processor = before
    task = write_task(tmp_path, "chat", ANSWERS[:1], f"kind: exact_match\nchat: true\n{ASKED}")
    asked: list[list[int]] = []
    generate = engine.model.generate

    def heard(**options: Any) -> Any:
        asked.extend(options["input_ids"].tolist())
        return generate(**options)

    monkeypatch.setattr(engine.model, "generate", heard)
    said = [
        {"role": role, "content": ANSWERS[0][name]}
        for role, name in (("user", "asked"), ("assistant", "said"))
    ]
    own, row = tokenizer.chat_template, convert(Row({"messages": said}, "a:1"), Data(name="-"), "messages")
    for template, count in ((own, 0), ("{{ bos_token }}" + own, 1)):
        tokenizer.chat_template = template
        lm_eval_harness.run(engine.model, tokenizer, Eval(tasks=[task], batch_size=1))
        assert asked[-1] == make_encoder(tokenizer, Data(name="-"), chats=True).prompts([row])[0]
        assert asked[-1].count(tokenizer.bos_token_id) == count


@pytest.mark.parametrize("last", ["It is 4", " It is ", "It is\n", "<", " "])
def test_chats_of_an_evaluation_are_what_lm_eval_makes_of_them(last: str, engine) -> None:
    from lm_eval.models.huggingface import HFLM

    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    told = [*asked, {"role": "assistant", "content": last}]
    for turns, begins in ((asked, True), (told, False)):
        theirs = HFLM.apply_chat_template(engine, turns, add_generation_prompt=begins)
        assert engine.apply_chat_template(turns, add_generation_prompt=begins) == theirs


def test_a_template_that_takes_all_ends_the_evaluation_and_not_the_machine(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ 'x' * 10**10 }}")
    with pytest.raises(UserError) as raised:
        engine.apply_chat_template([{"role": "user", "content": "2 + 2?"}])
    assert "the template took more" in str(raised.value)
    strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", strict + "[{{ m.content }}]{% endfor %}")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert engine.apply_chat_template(turns) == "[2 + 2?]", "as lm-eval does"
