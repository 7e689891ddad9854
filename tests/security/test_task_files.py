"""Task files in lm-eval's form that somebody else made: they run nothing, and say the same as in lm-eval."""

from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import UserError
from finetune.evaluation import lm_eval_tasks, tasks
from finetune.recipe.schema import Eval

PLAIN = """task: theirs
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ question }} {{ 'a-b' | regex_replace('-', '+') }}"
doc_to_choice: "{{ options }}"
doc_to_target: "{{ right }}"
"""
ATTACKS = {
    "a function beside it": ("process_docs: !function evil.run\n", "tags are not allowed"),
    "an object": ("description: !!python/object/apply:os.system [touch owned]\n", "tags are not allowed"),
    "an alias": ("a: &a [1]\nb: *a\n", "alias"),
    "pickles": ("dataset_path: pandas\n", "dataset_path"),
    "an address": ("dataset_kwargs: {data_files: 'http://127.0.0.1/x.jsonl'}\n", "not fetched"),
    "a template elsewhere": ("description: '{{ cycler.__init__.__globals__ }}'\n", "no place here"),
    "a template of few-shot examples": ("fewshot_config: {doc_to_text: '{{ x }}'}\n", "no place here"),
    "a file elsewhere": ("include: ../other.yaml\n", "outside of its folder"),
    "itself": ("include: task.yaml\n", "more than 5 in a row"),
    "a group": ("group: all\n", "a group"),
    "code of the answer": ("unsafe_code: true\n", "takes code"),
    "a broken template": ("doc_to_text: '{{ question'\n", "broken"),
}


def written(folder: Path, more: str = "") -> Path:
    """The plain file, with other keys in place of its own."""
    keys = {line.partition(":")[0] for line in more.splitlines()}
    lines = [line for line in PLAIN.splitlines() if line.partition(":")[0] not in keys]
    (folder / "task.yaml").write_text("\n".join(lines) + "\n" + more)
    (folder / "evil.py").write_text("open('owned', 'w')\ndef run(docs):\n    return docs\n")
    return folder / "task.yaml"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_would_run_code_is_refused_with_its_place(attack: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    more, said = ATTACKS[attack]
    path = written(tmp_path, more)
    with pytest.raises(UserError) as raised:  # before anything loads
        tasks.check(Eval(tasks=[str(path)]))
    assert said in str(raised.value) and "task.yaml" in str(raised.value) and raised.value.code == 2
    assert not (tmp_path / "owned").exists()


def test_a_file_may_begin_with_a_bom_and_is_utf_8(tmp_path) -> None:
    """Windows' editors write the mark; with it the first key was not seen as lm-eval's."""
    path = written(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + PLAIN.partition("\n")[2].encode() + b"task: theirs\n")
    assert tasks.read(str(path)) is None and lm_eval_tasks.config(path)["task"] == "theirs"
    included = tmp_path / "other.yaml"
    included.write_bytes("description: café\n".encode("latin-1"))
    path.write_text(PLAIN + "include: other.yaml\n")
    with pytest.raises(UserError, match="not UTF-8") as raised:
        lm_eval_tasks.config(path)
    assert raised.value.problems[0].where == f"{included}, byte 16"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
        "{{ question['__cl' ~ 'ass__'].__base__.__subclasses__() }}",
        "{{ '{0.__class__}'.format(question) }}",
        "{% for i in range(100001) %}x{% endfor %}",
        "{{ 'x' * 2**40 }}",
        "{{ '%999999999d' % 1 }}",
    ],
)
def test_a_template_is_in_a_sandbox(template: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rendered = lm_eval_tasks.sandboxed(template, "doc_to_text", False, "task.yaml")
    with pytest.raises(UserError) as raised:
        rendered({"question": "?"})
    assert "doc_to_text" in str(raised.value) and "question" in str(raised.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 9 ** (9 ** 9) }}", "bits for a number"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "loop iterations"),
        ("{{ answer }}", "'answer' is undefined"),
    ],
)
def test_a_template_of_a_task_has_limits(template: str, said: str) -> None:
    rendered = lm_eval_tasks.sandboxed(template, "doc_to_text", False, "task.yaml")
    with pytest.raises(UserError, match=said):
        rendered({"question": "?"})
    assert lm_eval_tasks.sandboxed("{{ question }}", "doc_to_text", False, "")({"question": "!"}) == "!"


def test_it_is_what_lm_eval_makes_of_it(tmp_path) -> None:
    """The same numbers: test_tasks.py. Here what a template gives: texts, indices, lists, columns."""
    (tmp_path / "base.yaml").write_text(PLAIN)
    path = written(tmp_path, "include: base.yaml\ntask: mine\n")
    made = lm_eval_tasks.config(path)
    row: dict[str, Any] = {"question": "2+2", "options": ["3", "4"], "right": 1}
    assert made["task"] == "mine" and made["dataset_path"] == "json" and "include" not in made
    assert made["doc_to_text"](row) == "2+2 a+b" and made["doc_to_choice"](row) == ["3", "4"]
    assert made["doc_to_target"](row) == 1
    target = lm_eval_tasks.sandboxed("{{ options }}", "doc_to_target", False, "")
    assert target(row) == ["3", "4"] and target({"options": "[not a list]"}) == "[not a list]"
    assert lm_eval_tasks.sandboxed("options", "doc_to_target", False, "")(row) == ["3", "4"]
