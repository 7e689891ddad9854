"""Task files that were changed at random, toward code, addresses and other files. A case is a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import yaml

from support.scripts import module_of

if TYPE_CHECKING:
    from pathlib import Path

fuzz = module_of("benchmarks", "fuzz")

ROWS = [
    {"question": f"{a}+1", "options": [str(a), str(a + 1)], "right": 1, "answer": str(a + 1), "text": "a b"}
    for a in range(4)
]
DATA: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}}
ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
EXACT = {"metric": "exact_match", "ignore_case": True, "regexes_to_ignore": [",", "\\$"]}
FIRST = {"function": "take_first"}
VALID: list[dict[str, Any]] = [
    {
        **DATA, "task": "choice", "output_type": "multiple_choice", "test_split": "test",
        "doc_to_text": "Q: {{ question }}", "doc_to_choice": "{{ options }}", "doc_to_target": "right",
        "metric_list": [ACC, {"metric": "acc_norm"}], "metadata": {"version": 1.0}, "tag": ["a"],
        "fewshot_config": {"sampler": "first_n", "split": "test"}, "num_fewshot": 1,
    },
    {
        **DATA, "task": "answer", "output_type": "generate_until", "test_split": "test",
        "doc_to_text": "{{ question }}", "doc_to_target": "answer", "metric_list": [EXACT],
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8},
        "filter_list": [
            {"name": "strict", "filter": [{"function": "regex", "regex_pattern": "(\\d+)"}, FIRST]},
            {"name": "map", "filter": [{"function": "map", "mapping_dict": {"a": 1}}, FIRST]},
        ],
    },
    {
        "dataset_path": "data", "task": "text", "output_type": "loglikelihood_rolling", "test_split": "test",
        "doc_to_text": "", "doc_to_target": "{{ text }}", "metric_list": [{"metric": "word_perplexity"}],
        "should_decontaminate": True, "doc_to_decontamination_query": "text",
    },
    {
        "task": "own", "data": "rows.jsonl", "kind": "exact_match", "prompt": "{{ question }}",
        "answer": "{{ answer }}",
    },
    {
        "task": "pattern", "data": "rows.jsonl", "kind": "regex_match", "prompt": "{{ question }}",
        "answer": "{{ answer }}", "pattern": "\\d+", "stop": ["\n"], "max_new_tokens": 4,
    },
    {
        "task": "likely", "data": "rows.jsonl", "kind": "multiple_choice", "prompt": "{{ question }}",
        "choices": "{{ options }}", "answer": "{{ right }}",
    },
]  # fmt: skip
HOSTILE: list[Any] = [
    "evil_module", "evil_module.Evil", "evil_module.py", "./evil_module.py", "evil", "evil-org/evil",
    "evil.json", "http://127.0.0.1:9/x.jsonl", "hf://datasets/evil/x/a.jsonl",
    "zip://a::http://127.0.0.1:9/a.zip", "file:///etc/hosts", "s3://evil/x", "/etc/passwd", "/dev/zero",
    "../../etc", "~", ".", "data", "rows.jsonl", "*", "**", "**/*", "a\0b", "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}", "{% include 'x' %}",
    "{% for a in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**10 }}", "{{ question", "{{ options[9] }}",
    "{{ none }}", "(a+)+$", "(", "(a|a)*b", "[" * 500, "pandas", "webdataset", "pickle", "sql", "json",
    "text", "arrow", "custom", "code_eval", "exact_match", "acc", "f1", "bleu", "brier_score",
    "decontaminate", "take_first_k", "first_n", {"function": "custom", "filter_fn": "evil_module.run"},
    {"metric": "evil_module.py"}, {"hf_evaluate": True}, {"trust_remote_code": True},
    {"data_files": "http://127.0.0.1:9/x.jsonl"}, {"custom_generate": "evil-org/evil"}, 10**9, 10**30, -5,
    0.1, float("inf"), float("nan"), True, None, [], {}, [None], [[["x"]]], [1, "a"],
]  # fmt: skip
KEYS = [
    "class", "custom_dataset", "process_docs", "process_results", "use_prompt", "unsafe_code",
    "doc_to_image", "group", "task_list", "include", "hf_evaluate", "metric", "function", "filter_fn",
    "trust_remote_code", "data_dir", "data_files", "dataset_path", "dataset_name", "description",
    "gen_prefix", "repeats", "num_fewshot", "fewshot_split", "samples", "target_delimiter",
    "fewshot_delimiter", "doc_to_text", "doc_to_target", "doc_to_choice", "output_type", "pattern", "data",
    "kind", "prompt", "answer", "choices", "chat", "__class__", "storage_options", "callback",
    "aggregation",
]  # fmt: skip


def write(seed: int, folder: Path) -> Path:
    """The task file of a case, its data, and modules that nothing may import."""
    draw = random.Random(seed)
    content = copy.deepcopy(draw.choice(VALID))
    for _ in range(draw.choice([1, 1, 1, 2, 2, 4])):
        draw.choice(_CHANGES)(content, draw)
    text = yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=draw.random() < 0.5)
    if draw.random() < 0.1:
        text = draw.choice(_TEXTS)(text, draw)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "data" / "test.jsonl").write_text(lines)
    code = f"open({str(folder / 'canary')!r}, 'w')\ndef run(docs):\n    return docs\n"
    for name in ("evil_module.py", "evil.py", "data/data.py"):
        (folder / name).write_text(code)
    path = folder / "task.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def _hostile_value(content: Any, draw: random.Random) -> None:
    held, key = draw.choice(fuzz._places(content) or [({}, "")])
    held[key] = copy.deepcopy(draw.choice(HOSTILE))


def _hostile_key(content: Any, draw: random.Random) -> None:
    holders = [content, *(held[key] for held, key in fuzz._places(content) if isinstance(held[key], dict))]
    draw.choice(holders)[draw.choice(KEYS)] = copy.deepcopy(draw.choice(HOSTILE))


def _odd_value(content: Any, draw: random.Random) -> None:
    held, key = draw.choice(fuzz._places(content) or [({}, "")])
    held[key] = copy.deepcopy(draw.choice(fuzz.ODD))


def _drop(content: Any, draw: random.Random) -> None:
    held, key = draw.choice(fuzz._places(content) or [([0], 0)])
    del held[key]


def _move(content: Any, draw: random.Random) -> None:
    """A value of another task."""
    other = draw.choice(VALID)
    key = draw.choice(list(other))
    content[key] = copy.deepcopy(other[key])


def _tag(text: str, draw: random.Random) -> str:
    tags = [
        "!function evil.run",
        "!!python/object/apply:os.system [touch canary]",
        "&a [*a]",
        "!!python/name:os.system",
    ]
    return f"{text}process_docs: {draw.choice(tags)}\n"


def _include(text: str, draw: random.Random) -> str:
    named = ["task.yaml", "../task.yaml", "/etc/passwd", "evil.py", ".", "data", "[task.yaml, none.yaml]"]
    return f"{text}include: {draw.choice(named)}\n"


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)]


_CHANGES = (
    _hostile_value,
    _hostile_value,
    _hostile_value,
    _hostile_key,
    _hostile_key,
    _odd_value,
    _drop,
    _move,
)
_TEXTS = (_tag, _include, _cut)
