"""Task files in lm-eval's form that somebody else made: they run nothing, and say the same as in lm-eval."""

import io
import json
import pickle
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest

from finetune.core.errors import UserError
from finetune.evaluation import (
    limited_patterns,
    lm_eval_harness,
    lm_eval_tasks,
    results,
    task_data,
    task_guard,
    task_keys,
    tasks,
)
from finetune.hub import client
from finetune.recipe.schema import Eval
from support.paths import ROOT
from support.scripts import module_of

PLAIN = """task: theirs
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ question }} {{ 'a-b' | regex_replace('-', '+') }}"
doc_to_choice: "{{ options }}"
doc_to_target: "{{ right }}"
"""
METRIC = "metric_list: [{{metric: {}, aggregation: mean, higher_is_better: true}}]\n"
FILTER = "filter_list: [{{name: all, filter: [{{function: {}}}]}}]\n"
ATTACKS = {
    "a function beside it": ("process_docs: !function evil.run\n", "tags are not allowed"),
    "an object": ("description: !!python/object/apply:os.system [touch owned]\n", "tags are not allowed"),
    "an alias": ("a: &a [1]\nb: *a\n", "alias"),
    "a function by name": ("process_docs: evil.run\n", "runs code"),
    "a function of results": ("process_results: evil.run\n", "runs code"),
    "a class": ("class: evil.Task\n", "runs code"),
    "a dataset by function": ("custom_dataset: evil.run\n", "runs code"),
    "a prompt of promptsource": ("use_prompt: promptsource:evil\n", "runs code"),
    "code of the answer": ("unsafe_code: true\n", "code that the model writes"),
    "an unknown key": ("callbacks: [evil.run]\n", "unknown key"),
    "a metric that is a script": (METRIC.format("evil.py"), "metric_list"),
    "a metric that is a path": (METRIC.format("./evil"), "metric_list"),
    "a metric that is a folder": (METRIC.format("evil"), "metric_list"),
    "a metric of the Hub": (METRIC.format("evil-org/metric"), "metric_list"),
    "a metric of evaluate": (METRIC.format("code_eval"), "metric_list"),
    "a metric with a dot": (METRIC.format("evil.run"), "metric_list"),
    "a metric that lm-eval has, by evaluate": (
        "metric_list: [{metric: acc, hf_evaluate: true}]\n",
        "hf_evaluate",
    ),
    "a metric's module": ("metric_list: [{metric: acc, config_name: evil}]\n", "config_name"),
    "options of another metric": (
        "metric_list: [{metric: acc, ignore_case: true}]\n",
        "`acc` has no option `ignore_case`",
    ),
    "an aggregation by name": ("metric_list: [{metric: acc, aggregation: evil.run}]\n", "aggregation"),
    "a filter by name": (FILTER.format("evil.run"), "function"),
    "a filter of a function": (FILTER.format("custom, filter_fn: evil.run"), "filter_fn"),
    "a sampler by name": ("fewshot_config: {sampler: evil.Sampler}\n", "sampler"),
    "few-shot examples by function": ("fewshot_config: {samples: evil.run}\n", "samples"),
    "a template of few-shot examples": (
        "fewshot_config: {doc_to_text: '{{ x }}'}\n",
        "can't hold a template",
    ),
    "generation by code": ("generation_kwargs: {custom_generate: evil-org/evil}\n", "custom_generate"),
    "a second model": ("generation_kwargs: {assistant_model: evil-org/evil}\n", "assistant_model"),
    "an image": ("doc_to_image: ['{{ x }}']\n", "doc_to_image"),
    "another output": ("output_type: evil.run\n", "output_type"),
    "trust": ("dataset_kwargs: {trust_remote_code: true}\n", "trust_remote_code"),
    "options of datasets": ("dataset_kwargs: {storage_options: {a: b}}\n", "storage_options"),
    "pickles": ("dataset_path: pandas\n", "dataset_path"),
    "archives": ("dataset_path: webdataset\n", "dataset_path"),
    "a database": ("dataset_path: sql\n", "dataset_path"),
    "a script": ("dataset_path: evil.py\n", "dataset_path"),
    "a script by path": ("dataset_path: ./evil.py\n", "dataset_path"),
    "an address of a dataset": (
        "dataset_path: http://127.0.0.1/x\n",
        "does not download data from an address",
    ),
    "a storage bucket": ("dataset_path: buckets/evil\n", "dataset_path"),
    "an address": (
        "dataset_kwargs: {data_files: 'http://127.0.0.1/x.jsonl'}\n",
        "does not download data from an address",
    ),
    "an address in a chain": (
        "dataset_kwargs: {data_files: 'zip::http:/127.0.0.1/x.jsonl'}\n",
        "does not download data from an address",
    ),
    "files of another kind": (
        "dataset_kwargs: {data_files: {test: evil.py}}\n",
        "can't read this type of file",
    ),
    "no files": ("dataset_kwargs: {data_files: {test: none.jsonl}}\n", "no file has this name"),
    "a folder's parent": ("dataset_kwargs: {data_dir: ../..}\ndataset_path: .\n", "data_dir"),
    "a template elsewhere": ("description: '{{ cycler.__init__.__globals__ }}'\n", "can't hold a template"),
    "a template of contamination": ("doc_to_decontamination_query: '{% x %}'\n", "can't hold a template"),
    "a template of a prefix": ("gen_prefix: '{{ x }}'\n", "can't hold a template"),
    "a file elsewhere": ("include: ../other.yaml\n", "outside the folder of the task file"),
    "a file by its path": ("include: /etc/passwd\n", "outside the folder of the task file"),
    "no file": ("include: [1, null]\n", "this name can't be a file name"),
    "a name with NUL": ('include: "a\\0b"\n', "this name can't be a file name"),
    "itself": ("include: task.yaml\n", "more than 5 files include each other"),
    "a group": ("group: all\n", "a group of tasks is not supported"),
    "tasks in a list": ("task: [arc_easy, {task: evil}]\n", "the task has no name"),
    "a name that is a path": ("task: ../../evil\n", "task"),
    "answers without end": ("repeats: 1000000000\n", "repeats"),
    "examples without end": ("num_fewshot: 1000000000\n", "num_fewshot"),
    "a broken template": ("doc_to_text: '{{ question'\n", "the template is not valid Jinja"),
    "a broken pattern": (FILTER.format("regex, regex_pattern: '('"), "not a valid regular expression"),
}


def written(folder: Path, more: str = "") -> Path:
    """The plain file, with other keys in place of its own."""
    keys = {line.partition(":")[0] for line in more.splitlines()}
    lines = [line for line in PLAIN.splitlines() if line.partition(":")[0] not in keys]
    (folder / "task.yaml").write_text("\n".join(lines) + "\n" + more)
    (folder / "evil.py").write_text("open('owned', 'w')\ndef run(docs):\n    return docs\n")
    (folder / "evil").mkdir(exist_ok=True)
    (folder / "evil" / "evil.py").write_text("open('owned', 'w')\n")
    row = {"question": "2+2", "options": ["3", "4"], "right": 1}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
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


def test_templates_of_a_task_that_are_slow_together_are_refused(tmp_path, monkeypatch) -> None:
    """Each rendering is below its limit."""
    rows = "".join(json.dumps({"q": str(number)}) + "\n" for number in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)

    def documents(prompt: str) -> list[Any]:
        content = {"task": "mine", "data": "rows.jsonl", "kind": "perplexity", "prompt": prompt}
        (tmp_path / "task.yaml").write_text(json.dumps(content))
        task = tasks.read(str(tmp_path / "task.yaml"))
        assert task
        return tasks.documents(task, str(tmp_path / "task.yaml"))

    assert len(documents("{{ q }}")) == 40  # this starts the process that renders
    monkeypatch.setattr(tasks, "PATIENCE", 0.2)
    monkeypatch.setattr(tasks, "SLOWEST", 0.01)
    assert len(documents("{{ q }}")) == 40
    with pytest.raises(UserError, match="too slow"):
        documents("{% for a in range(9999) %}{% for b in range(40) %}{% endfor %}{% endfor %}{{ q }}")


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


def test_names_of_a_task_file_are_registered_in_lm_eval() -> None:
    """A name that lm-eval does not register is looked for on the Hub, as a script."""
    import lm_eval.api.metrics
    import lm_eval.filters  # noqa: F401 (it registers its names)
    from lm_eval.api.registry import aggregation_registry, filter_registry, metric_registry
    from lm_eval.api.samplers import SAMPLER_REGISTRY

    for model, key, registry in (
        (task_keys.Metric, "metric", metric_registry),
        (task_keys.Metric, "aggregation", aggregation_registry),
        (task_keys.Step, "function", filter_registry),
        (task_keys.Fewshot, "sampler", SAMPLER_REGISTRY),
    ):
        names = literals(model.model_fields[key].annotation)
        assert names and names <= set(registry.keys()), key
    made = {"task": "t", "metric_list": [{"metric": "acc"}, {"metric": "evil"}]}
    with pytest.raises(UserError, match="the installed lm-eval does not have this name"):
        lm_eval_tasks.check_registered(made)


def literals(annotation: Any) -> set[str]:
    found = {value for value in get_args(annotation) if isinstance(value, str)}
    return found.union(*(literals(part) for part in get_args(annotation) if not isinstance(part, str)))


def test_keys_of_a_task_file_are_lm_evals_and_each_other_key_is_refused_with_a_reason() -> None:
    import dataclasses

    from lm_eval.config.task import FewshotConfig, TaskConfig

    theirs = {field.name for field in dataclasses.fields(TaskConfig)}
    assert theirs == (set(task_keys.LmEvalTask.model_fields) | set(task_keys.REFUSED)) - {"class"}
    fewshot = {field.name for field in dataclasses.fields(FewshotConfig)}
    assert set(task_keys.Fewshot.model_fields) < fewshot


def test_docs_page_of_task_files_is_current() -> None:
    page = module_of("scripts", "make_task_files").page()
    assert (ROOT / "docs" / "reference" / "task_files.md").read_text(encoding="utf-8") == page, "make schema"


GENERATED = """task: theirs
output_type: generate_until
test_split: test
doc_to_text: "{{ question }}"
doc_to_target: answer
"""


def loaded(path: Path) -> Any:
    """The task as lm-eval makes it for a run."""
    from lm_eval.tasks import TaskManager

    spec = lm_eval_harness._theirs(str(path))
    return task_guard.load(TaskManager(include_defaults=False), [spec])["theirs"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.jsonl", '{"question": "1+1", "answer": "2"}\n'),
        ("test.csv", "question,answer\n1+1,2\n"),
        ("rows.json", '[{"question": "1+1", "answer": "2"}]'),
    ],
)
def test_local_folder_of_a_task_fetches_nothing_that_its_card_names(
    name, content, tmp_path, no_network
) -> None:
    """`datasets` fetches what README.md names, offline mode or not."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text(content)
    card = "---\nconfigs:\n- config_name: default\n  data_files: http://127.0.0.1:9/x.jsonl\n---\n"
    (folder / "README.md").write_text(card)
    (folder / ".huggingface.yaml").write_text(card.strip("-\n"))
    (folder / "data.py").write_text("open('owned', 'w')\n")
    split = "test" if name.startswith("test") else "train"
    text = GENERATED.replace("test_split: test", f"test_split: {split}")
    (tmp_path / "task.yaml").write_text(f"{text}dataset_path: data\n")
    with pytest.raises(UserError, match=r"can't use .*, which lists"):
        loaded(tmp_path / "task.yaml")
    for card in ("README.md", ".huggingface.yaml"):
        (folder / card).unlink()
    task = loaded(tmp_path / "task.yaml")
    (row,) = list(task.eval_docs)
    assert str(row["question"]) == "1+1" and str(row["answer"]) == "2"
    assert not no_network


def test_local_folder_of_archives_is_not_unpickled(tmp_path, no_network) -> None:
    """`datasets` opens the .pth members of a .tar with torch.load."""
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "test.tar", "w") as archive:
        for member, content in (("a.pth", pickle.dumps(Path)), ("a.json", b'{"question": "", "answer": ""}')):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (tmp_path / "task.yaml").write_text(f"{GENERATED}dataset_path: data\n")
    with pytest.raises(UserError, match=r"\.pth is not UTF-8 text or not JSON"):
        loaded(tmp_path / "task.yaml")
    assert not no_network


def test_local_zip_with_a_known_suffix_is_not_unpacked(tmp_path) -> None:
    """`datasets` unpacks a file by its first bytes, whatever its name."""
    with zipfile.ZipFile(tmp_path / "test.jsonl", "w") as archive:
        archive.writestr("a.jsonl", '{"question": "1", "answer": "2"}\n' * 99)
    text = f"{GENERATED}dataset_path: json\ndataset_kwargs: {{data_files: {{test: test.jsonl}}}}\n"
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(UserError):
        loaded(tmp_path / "task.yaml")


def test_local_parquet_with_images_fetches_nothing(tmp_path, no_network) -> None:
    """The decoder of `datasets` fetches the address that an example names."""
    import datasets
    from pyarrow import parquet

    rows = {
        "question": ["1+1"],
        "answer": ["2"],
        "image": [{"path": "http://127.0.0.1:9/x.png", "bytes": None}],
    }
    features = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    table = datasets.Dataset.from_dict(rows, features=features).data.table
    assert b"huggingface" in table.schema.metadata, "what names the decoder"
    parquet.write_table(table, tmp_path / "test.parquet")
    text = f"{GENERATED}dataset_path: parquet\ndataset_kwargs: {{data_files: {{test: test.parquet}}}}\n"
    (tmp_path / "task.yaml").write_text(text)
    (row,) = list(loaded(tmp_path / "task.yaml").eval_docs)
    assert row["image"] == {"path": "http://127.0.0.1:9/x.png"} and not no_network


def test_filters_and_metrics_of_a_task_file_are_lm_evals_and_have_a_time_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limited_patterns, "SECONDS", 0.2)
    (tmp_path / "test.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    text = (
        f"{GENERATED}dataset_path: json\ndataset_kwargs: {{data_files: {{test: test.jsonl}}}}\n"
        "metric_list: [{metric: exact_match, regexes_to_ignore: [',', '(a+)+$'], ignore_case: true}]\n"
        "filter_list: [{name: slow, filter: [{function: regex, regex_pattern: '(\\d+|(a+)+$)'}]}]\n"
    )
    (tmp_path / "task.yaml").write_text(text)
    task = loaded(tmp_path / "task.yaml")
    (step,) = task._filters[0].filters
    assert list(step().apply([["so 42"], ["none"]], [{}, {}])) == [["42"], ["[invalid]"]]
    assert task.process_results({"answer": "A,b"}, ["a,B"])["exact_match"] == 1.0
    bomb = "a" * 5000 + "!"
    for slow in (
        lambda: list(step().apply([[bomb]], [{}])),
        lambda: task.process_results({"answer": bomb}, [bomb]),
    ):
        with pytest.raises(UserError, match="s for one answer"):
            slow()


def test_pattern_of_a_task_has_a_time_limit(monkeypatch) -> None:
    monkeypatch.setattr(limited_patterns, "SECONDS", 0.2)
    task = tasks.Task(task="t", data="d", kind="regex_match", prompt="", pattern="(a+)+$")
    with pytest.raises(UserError, match="s for one answer"):
        tasks.right(task, "a" * 5000 + "!", "a")


def test_task_with_many_wrong_examples_is_not_read_to_its_end(tmp_path) -> None:
    """A task file may name a folder of millions of examples that are not its own."""
    (tmp_path / "rows.jsonl").write_text('{"other": 1}\n' * 5000)
    text = 'data: rows.jsonl\nkind: exact_match\nprompt: "{{ question }}"\nanswer: "{{ answer }}"\n'
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(UserError, match="after 1,000 examples with problems") as raised:
        tasks.check(Eval(tasks=[str(tmp_path / "task.yaml")]))
    assert len(raised.value.problems) == 6


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\\0b"], ids=["name", "path", "NUL"])
def test_name_that_no_file_can_have_is_refused(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = 'kind: exact_match\nprompt: "{{ question }}"\nanswer: "{{ answer }}"\n'
    theirs = f"{GENERATED}dataset_path: json\n"
    for text in (
        f'data: "{name}"\n{own}',
        f'{theirs}dataset_kwargs: {{data_files: {{test: "{name}"}}}}\n',
        f'{theirs}dataset_kwargs: {{data_dir: "{name}"}}\n',
        f'{GENERATED}dataset_path: "./{name}"\n',
        f'{theirs}include: "{name}"\n',
    ):
        (tmp_path / "task.yaml").write_text(text)
        with pytest.raises(UserError, match=r"name can't be a f|the dataset does not exist"):
            tasks.check(Eval(tasks=["task.yaml"]))


@pytest.mark.parametrize(
    "text", ["[" + "-" * 5000 + "1]", "[1" + "**1" * 5000 + "]", "[" * 500 + "]" * 500, "[²]"]
)
def test_literal_that_python_cannot_parse_is_text_or_an_error(text: str) -> None:
    template, row = "{{ right }}", {"right": text}
    assert lm_eval_tasks.sandboxed(template, "doc_to_target", False, "task.yaml")(row) == text
    with pytest.raises(UserError, match="the template gives no list of choices"):
        lm_eval_tasks.sandboxed(template, "doc_to_choice", True, "task.yaml")(row)
    with pytest.raises(UserError, match="the template gives no list of choices"):
        lm_eval_tasks.sandboxed(template, "doc_to_target", True, "task.yaml")({"right": "²"})


def test_lines_of_a_text_are_those_of_lm_eval(tmp_path) -> None:
    (path := tmp_path / "a.txt").write_bytes("a\x0cb\x85c\u2028d\r\n\ne\n".encode())
    assert [row["text"] for row in task_data.examples([path])] == ["a\x0cb\x85c\u2028d", "", "e"]


def test_empty_text_has_no_line(tmp_path) -> None:
    (path := tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="no examples"):
        task_data.examples([path])


@pytest.mark.parametrize("case", ["sparse", "columns", "names"])
def test_data_of_a_task_that_fills_the_memory_is_refused(case: str, tmp_path) -> None:
    path = tmp_path / ("a.jsonl" if case == "names" else "a.csv")
    with path.open("wb") as file:
        if case == "sparse":
            file.truncate(100_000_000)
        elif case == "columns":
            file.write(b",".join(b"c%d" % number for number in range(50_000)) + b"\n" + b"," * 49_999)
        else:
            file.write(b"".join(b'{"c%d": 1}\n' % number for number in range(3000)))
    started = time.process_time()
    with pytest.raises(UserError) as raised:
        task_data.examples([path])
    assert raised.value.problems[0].code == "data-size" and time.process_time() - started < 3


def test_data_and_included_files_of_a_task_are_part_of_its_hash(tmp_path) -> None:
    path = written(tmp_path, "include: other.yaml\n")
    (tmp_path / "other.yaml").write_text("description: a\n")
    before = results.files_hashed(Eval(tasks=[str(path)]))
    assert results.files_hashed(Eval(tasks=[str(path)])) == before
    for name in ("rows.jsonl", "other.yaml"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(
            content.replace("2+2", "2+3").replace("description: a", "description: b")
        )
        assert results.files_hashed(Eval(tasks=[str(path)])) != before
        (tmp_path / name).write_text(content)


def test_commit_of_a_tasks_dataset_is_part_of_its_hash(tmp_path, monkeypatch) -> None:
    (path := tmp_path / "task.yaml").write_text(PLAIN.replace("dataset_path: json", "dataset_path: me/q"))
    found = set()
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setenv(client.COMMITS, json.dumps({"datasets/me/q@main": commit}))
        found.add(lm_eval_tasks.digest(path))
    assert len(found) == 2


@pytest.mark.parametrize(
    "template",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{ " + "9" * 5000 + " }}"],
    ids=["brackets", "signs", "digits"],
)
@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target", "doc_to_choice"])
def test_template_that_jinja_cannot_parse_is_an_error(key: str, template: str) -> None:
    with pytest.raises(UserError, match="the template"):
        lm_eval_tasks.sandboxed(template, key, False, "task.yaml")({"question": "?"})


@pytest.mark.parametrize("key", ["doc_to_choice", "doc_to_target"])
def test_list_of_many_values_is_not_read(key: str) -> None:
    """Python takes 7 GB for a list of 16 MB."""
    number = {"doc_to_choice": 1, "doc_to_target": 2}[key]
    template = f"[{{{{ '{number},' * 4000000 }}}}]"  # all renderings of one template have a limit together
    rendered = lm_eval_tasks.sandboxed(template, key, False, "task.yaml")
    began = time.monotonic()
    if key == "doc_to_target":  # a text may hold commas
        assert isinstance(rendered({"question": "?"}), str)
    else:
        with pytest.raises(UserError, match="no list of choices"):
            rendered({"question": "?"})
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("key", ["prompt", "choices"])
def test_examples_that_become_long_together_are_refused(key: str, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"q": "question {n}", "a": "x"}}\n' for n in range(400)))
    long = {"prompt": "{{ q }}", "choices": "{{ ['x', 'y'] }}"}
    long[key] = {"prompt": "{{ 'word ' * 100000 }}", "choices": "{{ ['x'] + ['ab'] * 100000 }}"}[key]
    lines = [f"{name}: {json.dumps(value)}" for name, value in long.items()]
    own = ["task: mine", "data: rows.jsonl", "kind: multiple_choice", "answer: '{{ a }}'", *lines]
    (tmp_path / "task.yaml").write_text("\n".join(own) + "\n")
    began = time.monotonic()
    with pytest.raises(UserError, match="all renderings together wrote more than"):
        tasks.check(Eval(tasks=[str(tmp_path / "task.yaml")]))
    assert time.monotonic() - began < 20
