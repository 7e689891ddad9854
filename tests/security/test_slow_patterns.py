"""Regular expressions that would take years are refused, whichever file they come from."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from finetune.cli import main
from finetune.core import pattern_time
from finetune.core.errors import UserError
from finetune.core.pattern_time import Pattern
from finetune.evaluation import reopen
from finetune.models import tokenizer_limits, tokenizer_setup
from finetune.recipe.schema import Model
from finetune.run_folder import run_folder
from support.paths import MODEL, QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

BOMBS = [
    r"((\w|\.)+)+#",
    r"(.|\w)*#",
    ".*" * 12 + "#",
    ".?" * 40 + "#",
    "(.|.)" * 30 + "#",
    r"(?=(.+)+#).*",
]
OF_LISTS = ("modules_to_save", "layers_pattern")
OF_TEXTS = ("target_modules", "exclude_modules", *OF_LISTS)
OF_MAPS = ("rank_pattern", "alpha_pattern")


def options(key: str, pattern: str) -> dict[str, Any]:
    """LoRA's, with a pattern in one of them."""
    value: Any = {pattern: 4} if key in OF_MAPS else [pattern] if key in OF_LISTS else pattern
    found: dict[str, Any] = {"target_modules": ["q_proj"], "r": 8, "lora_alpha": 16, key: value}
    return {**found, "layers_to_transform": [0]} if key == "layers_pattern" else found


CASES = [*((key, BOMBS[0]) for key in (*OF_TEXTS, *OF_MAPS)), *(("target_modules", one) for one in BOMBS[1:])]


@pytest.mark.parametrize("command", soak_except(["check"], ["check", "plan"]))
@pytest.mark.parametrize(("key", "pattern"), soak_except(CASES[::4], CASES))
def test_recipe_with_a_slow_pattern_is_refused(
    key: str, pattern: str, command: str, tmp_path, commands
) -> None:
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["model"] = {"name": str(MODEL)}
    recipe["adapter"] = {"type": "lora", **options(key, pattern)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ended = commands.run(command, str(tmp_path / "recipe.yaml"))
    assert not ended.wrong and ended.code == 2, ended
    assert f"adapter.{key}: " in ended.said and "takes too long" in ended.said


def write_adapter(folder: Path, key: str, pattern: str) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": str(MODEL), **options(key, pattern)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


@pytest.mark.parametrize("key", soak_except(["target_modules"], [*OF_TEXTS, *OF_MAPS]))
def test_adapter_to_continue_from_with_a_slow_pattern_is_refused(key: str, tmp_path, commands) -> None:
    write_adapter(tmp_path, key, BOMBS[0])
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["model"] = {"name": str(MODEL)}
    recipe["adapter"] = {"type": "lora", "init_from": str(tmp_path), "from_other_base": True}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ended = commands.run("check", str(tmp_path / "recipe.yaml"))
    assert not ended.wrong and ended.code == 2, ended
    assert f"{key}: " in ended.said and "takes too long" in ended.said


def test_run_whose_adapter_has_a_slow_pattern_is_not_opened(trained, capsys) -> None:
    run = trained()
    path = run.path / "adapter" / "adapter_config.json"
    saved = json.loads(path.read_text())
    for key in ("target_modules", "rank_pattern"):
        path.write_text(json.dumps({**saved, **options(key, BOMBS[0])}))
        with pytest.raises(UserError, match="takes too long"):
            reopen.reopen(run, run_folder.recipe_of(run))
    assert main.main(["merge", str(run.path)]) == 2
    assert "takes too long" in capsys.readouterr().err


LONG = ["[\0-\U0010ffff]" * 1500, r"[\0-\U0010ffff]" * 600, "a" * 10_001]


@pytest.mark.parametrize("pattern", soak_except(LONG[:1], LONG), ids=lambda one: ascii(one[-2:]))
def test_pattern_that_takes_long_to_compile_is_refused(pattern: str, tmp_path, commands) -> None:
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["adapter"] = {"type": "lora", **options("target_modules", pattern)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=False))
    ended = commands.run("check", str(tmp_path / "recipe.yaml"))
    assert not ended.wrong and ended.code == 2 and "would take too long to compile" in ended.said, ended


@pytest.mark.parametrize(
    "program", ["", "print(0, flush=True)", "print(0, flush=True); print(1, flush=True)"]
)
def test_process_of_the_patterns_that_is_killed_is_an_error_and_no_verdict(program: str) -> None:
    with pytest.raises(UserError, match="ended without a result"):
        pattern_time.first_slow(f"import os; {program}\nos.kill(os.getpid(), 9)", "")


def test_process_of_the_patterns_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_time, "HANGS", 1)
    with pytest.raises(UserError, match="ended without a result"):
        pattern_time.first_slow("import time; time.sleep(60)", "")


def test_usual_patterns_are_not_slow() -> None:
    layers = range(100)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
    names = [f"model.layers.{layer}.{part}" for layer in layers for part in parts]
    usual = [
        r".*\.(q|k|v|o)_proj",
        r"(\w+\.)*self_attn\.\w+",
        r"model\.layers\.(?:[0-9]|[1-9][0-9])\.(?:self_attn|mlp)\.(?:q_proj|k_proj|gate_proj|down_proj)",
        # as Unsloth writes them
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:\w+_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj|k_proj|v_proj|o_proj|gate_proj))",
    ]
    started = time.process_time()
    assert pattern_time.find_slow([Pattern("fullmatch", one) for one in usual], names) is None
    assert pattern_time.find_slow([Pattern("match", rf"(.*\.)?({one})$") for one in usual], names) is None
    assert time.process_time() - started < 1
    assert [pattern_time.is_plain(one) for one in ("q_proj", r"layers\.1\.mlp", "a+", "[a]")] == [
        True, True, False, False,
    ]  # fmt: skip


def step(kind: str, **options: Any) -> dict[str, Any]:
    return {"type": kind, **options}


def split(pattern: str) -> dict[str, Any]:
    options = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": step("Split", **options)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return step("Replace", pattern=pattern, content=content)


MANY = [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1001
BPE = json.loads((MODEL / "tokenizer.json").read_text())["model"]
VOCABULARY = BPE["vocab"]
TRUNCATED = {"direction": "Right", "strategy": "LongestFirst"}


def template(count: int) -> dict[str, Any]:
    """A template that has the text several times."""
    text, other = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    parts = {"single": [text] * count, "pair": [text, other], "special_tokens": {}}
    return {"post_processor": step("TemplateProcessing", **parts)}


def unigram(length: int, unknown: int | None = 0) -> dict[str, Any]:
    """A Unigram model with tokens such as a, aa and aaa."""
    pieces = [*VOCABULARY][: len(VOCABULARY) - length] + ["a" * (number + 2) for number in range(length)]
    return {"model": {"type": "Unigram", "unk_id": unknown, "vocab": [[piece, -1.0] for piece in pieces]}}


TOKENIZERS: dict[str, dict[str, Any]] = {
    "endless split": split("(.|.)+#|a"),
    "slow split": split("(a|a)+#|."),
    "split whose time grows with the square of the length": split("a+#|."),
    "slow split of words": split(r"(\w+)+#"),
    "slow replacement": {"normalizer": replace({"Regex": r"(\s|\s)+zz"}, "")},
    "slow decoder": {"decoder": replace({"Regex": "(a|a)+#"}, "")},
    "many patterns": {
        "normalizer": step(
            "Sequence", normalizers=[replace({"Regex": f"a{number}"}, "") for number in range(51)]
        )
    },
    "long replacement": {"normalizer": replace({"String": "a"}, "a" * 1_000_000)},
    "many replacements": {"normalizer": step("Sequence", normalizers=[replace({"String": "a"}, "aa")] * 40)},
    "long prefix": {"normalizer": step("Prepend", prepend="a" * 10_000_000)},
    "many tokens": {
        "post_processor": step(
            "TemplateProcessing",
            single=[{"Sequence": {"id": "A", "type_id": 0}}, *MANY],
            pair=[{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            special_tokens={"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
        )
    },
    "text twice": template(2),
    "text a thousand times": template(1000),
    "no text": template(0),
    "a special token that is not defined": {
        "post_processor": step(
            "TemplateProcessing",
            single=[{"Sequence": {"id": "A", "type_id": 0}}, MANY[0]],
            pair=[{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            special_tokens={},
        )
    },
    "many bytes": {"normalizer": step("Sequence", normalizers=[step("ByteLevel")] * 30)},
    "many steps": {"normalizer": step("Sequence", normalizers=[step("NFKD")] * 5000)},
    "long tokens": {**unigram(2000), "pre_tokenizer": None},
    "no unknown token": {**unigram(0, None), "pre_tokenizer": None},
    "long words": {
        "model": step(
            "WordPiece",
            unk_token="a",
            continuing_subword_prefix="##",
            max_input_chars_per_word=10**9,
            vocab=VOCABULARY,
        )
    },
    "a long mark of parts of words": {
        "model": step(
            "WordPiece",
            unk_token="a",
            continuing_subword_prefix="#" * 1_000_000,
            max_input_chars_per_word=100,
            vocab=VOCABULARY,
        )
    },
    "dropout": {"model": {**BPE, "dropout": 0.5}},
    "no spaces": {"pre_tokenizer": step("Whitespace")},
    "no bytes": {"pre_tokenizer": None},
    "no rare letters": {
        "model": step("BPE", vocab={letter: id for id, letter in enumerate(map(chr, range(128)))}, merges=[]),
        "pre_tokenizer": None,
        "decoder": None,
    },
    "no letters from a to m": {"normalizer": replace({"Regex": "[a-m]"}, "")},
    "no capital letters": {"normalizer": replace({"Regex": "[A-Z]"}, "x")},
    "no digits": {"normalizer": replace({"Regex": "[0-9]"}, "0")},
    "no dot": {
        "pre_tokenizer": step(
            "Sequence",
            pretokenizers=[
                step("CharDelimiterSplit", delimiter="."),
                step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True),
            ],
        )
    },
    "an id twice": {"model": {**BPE, "vocab": {**VOCABULARY, "a": VOCABULARY["b"]}}},
    "a stride as long as a text": {"truncation": {**TRUNCATED, "max_length": 4, "stride": 4}},
    "a stride longer than a text": {"truncation": {**TRUNCATED, "max_length": 1, "stride": 9}},
    "pieces without length": {"pre_tokenizer": step("FixedLength", length=0)},
}


@pytest.mark.parametrize("command", soak_except(["check"], ["check", "plan"]))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_that_takes_too_long_is_refused(name: str, command: str, tmp_path, commands) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **TOKENIZERS[name]}))
    text = ("a" * 20 + " ") * 400
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": text, "completion": text}) + "\n")
    values = [f"model.name={folder}", f"data.name={tmp_path / 'data.jsonl'}", "data.format=auto"]
    ended = commands.run(command, str(QUICKSTART), *values)
    assert not ended.wrong and ended.code == 2 and "error: model.name: the tokenizer" in ended.said, ended


PADDED = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}


@pytest.mark.parametrize("options", [{"strategy": {"Fixed": 10**9}, "pad_to_multiple_of": None}])
def test_padding_of_a_tokenizer_takes_no_memory(options: dict[str, Any], tmp_path, commands) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "padding": {**PADDED, **options}}))
    ended = commands.run("check", str(QUICKSTART), f"model.name={tmp_path / 'model'}")
    assert not ended.wrong and ended.code == 0, ended


@pytest.mark.parametrize("lengths", [(4, 0), (4, 3), (0, 0)])
def test_truncation_of_a_tokenizer_cuts_no_text(lengths: tuple[int, int], tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    options = dict(zip(("max_length", "stride"), lengths, strict=True))
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": {**TRUNCATED, **options}}))
    texts, model = "a long text of many words", Model(name=str(tmp_path / "model"))
    whole = tokenizer_setup.load_tokenizer(Model(name=str(MODEL)))(texts)["input_ids"]
    loaded, read = tokenizer_setup.load_tokenizer(model), tokenizer_setup.read_tokenizer(model)
    assert len(whole) > 4 and loaded(texts)["input_ids"] == whole
    assert read and read.encode(texts).ids == whole


LONG_TOKEN = "ab" * 1_500_000
OF_TOKENS: list[tuple[str, Any]] = [
    ("tokenizer.json", {"added_tokens": [{"id": 4096, "content": LONG_TOKEN, "special": True}]}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"4096": {"content": LONG_TOKEN}}}),
    ("tokenizer_config.json", {"extra_special_tokens": [LONG_TOKEN]}),
    ("special_tokens_map.json", {"additional_special_tokens": [LONG_TOKEN]}),
    ("added_tokens.json", {LONG_TOKEN: 4096}),
]


@pytest.mark.parametrize(("name", "entries"), OF_TOKENS, ids=lambda one: str(one)[:30])
@pytest.mark.parametrize("is_escaped", [False, True])
def test_long_added_tokens_are_refused(name: str, entries: Any, is_escaped: bool, tmp_path, commands) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / name
    text = json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **entries})
    if is_escaped:
        text = text.replace('"added_tokens"', r'"\u0061dded_tokens"')
        text = text[:-1] + ', "other": {"added_tokens": []}}'
    path.write_text(text)
    ended = commands.run("check", str(QUICKSTART), f"model.name={tmp_path / 'model'}")
    assert not ended.wrong and ended.code == 2, ended
    assert "the added tokens of the tokenizer are too long" in ended.said, ended


def test_usual_patterns_of_tokenizers_are_not_slow() -> None:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    ends = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{upper}*{lower}+{ends}|{first}{upper}+{lower}*{ends}|\p{{N}}{{1,3}}"
    usual = [
        *tokenizer_limits._KNOWN,
        r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"{words}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # GPT-4o
        "[一-龥]+",  # DeepSeek
        r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ]
    assert tokenizer_limits._find_slow(tuple(usual)) is None


def test_characters_that_the_tokenizer_does_not_know_are_counted(tmp_path, capsys) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    words = step("WordLevel", vocab={"<unk>": 9, "known": 8}, unk_token="<unk>")
    content |= {"model": words, "pre_tokenizer": step("WhitespaceSplit"), "decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    lines = [
        json.dumps({"prompt": "known", "completion": one}) for one in (" known", " other", " known known")
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    given = [f"model.name={folder}", f"data.name={tmp_path / 'data.jsonl'}", "data.format=auto"]
    assert main.main(["data", str(QUICKSTART), *given, "data.validation=null", "data.split=train"]) == 0
    assert "1 of 3 examples have characters that the tokenizer does not know" in " ".join(
        capsys.readouterr().out.split()
    )
