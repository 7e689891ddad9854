"""A tokenizer that writes other words than the data has, or none, is refused before training."""

import json
import shutil
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from finetune.cli import main
from finetune.core import untrusted_files
from finetune.data import text_changes
from support.paths import MODEL, QUICKSTART

ROWS = [{"prompt": f"Is {n} ham?", "completion": "It is ham + 3, not eggs."} for n in range(40)]


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"String": text}, "behavior": "Removed", "invert": False}


METASPACE = {"type": "Metaspace", "prepend_scheme": "never", "split": True}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "a word": ("normalizer", replaced({"String": "ham"}, "spam")),
    "a dropped word": ("normalizer", replaced({"String": "not "}, "")),
    "digits": ("normalizer", replaced({"Regex": "[0-9]"}, "7")),
    "the end": ("normalizer", replaced({"Regex": "^(.{4}).*"}, "$1")),
    "a word before": ("normalizer", {"type": "Prepend", "prepend": "evil "}),
    "letters for spaces": ("pre_tokenizer", {**METASPACE, "replacement": "e"}),
    "a sign": ("normalizer", replaced({"String": " + "}, " - ")),
    "a sign before digits": ("normalizer", replaced({"Regex": "\\+ (?=[0-9])"}, "")),
    "a space": ("normalizer", replaced({"Regex": " (?=not)"}, "")),
    "a removed sign": ("pre_tokenizer", split("+")),
    "a removed word": ("pre_tokenizer", split("ham")),
    "all between words": ("pre_tokenizer", {**split(" "), "invert": True}),
}


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """`changed(part, step)`: the words of a command on a model whose tokenizer has this step first."""
    (data := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def words(part: str, step: Any) -> list[str]:
        model = shutil.copytree(MODEL, tmp_path / "model")
        content = json.loads((path := model / "tokenizer.json").read_text())
        own = [content[part]] if content[part] else []
        kinds = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
        content[part] = {"type": "Sequence", kinds[part]: [step, *own]}
        path.write_text(json.dumps(content))
        return [str(QUICKSTART), f"model.name={model}", f"data.name={data}", "data.validation=null"]

    return words


@pytest.mark.parametrize("case", CHANGES)
def test_tokenizer_that_changes_texts_is_refused(case: str, changed: Any, capsys) -> None:
    words = changed(*CHANGES[case])
    for command in ("check", "data"):
        assert main.main([command, *words]) == 2
        said = capsys.readouterr().err
        refused = (
            "the tokenizer changes the text of an example",
            "can't encode every text",
            "writes other words",
        )
        assert any(what in said for what in refused)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, None),
        (normalizers.NFKC(), pre_tokenizers.ByteLevel()),
        (normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
        (normalizers.Replace(Pattern(" {2,}"), "▁"), pre_tokenizers.Metaspace()),
        (normalizers.Replace("``", '"'), pre_tokenizers.Split(Pattern(r"\s+"), "removed")),
        (normalizers.ByteLevel(), pre_tokenizers.Punctuation()),
    ],
)
def test_usual_steps_are_not_doubtful_and_change_no_letter(normalizer: Any, pre_tokenizer: Any) -> None:
    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    assert text_changes.comparison(backend) is None
    kinds = frozenset(step["type"] for step in text_changes.steps(text_changes.state(normalizer)))
    for text in ("Ünï ½ ß İ ﬁ Ⅷ", "``It's''  3.5 \t\n中文, ok", "", " "):
        assert not text_changes.find(backend, text, text_changes.Comparison(kinds, pre_tokenizer is not None))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1),
            ]
        ),
        decoders.Replace("\u0120", " "),
        decoders.Replace("</w>", " "),
        decoders.Replace(Pattern(r"\s+|\u2581"), " "),
        decoders.BPEDecoder("</w>"),
        decoders.WordPiece("##"),
        decoders.ByteLevel(),
        decoders.Metaspace(),
    ],
)
def test_usual_decoders_write_no_other_words(decoder: Any) -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoder
    assert not text_changes.writes_other_words(backend)


def test_changes_behind_a_normalizer_of_bytes_are_found_in_every_script() -> None:
    backend = Tokenizer(models.BPE())
    for word, other in (("ham", "spam"), ("Мир", "Война"), ("3", "7"), ("中", "")):
        steps = [normalizers.Replace(word, other), normalizers.ByteLevel()]
        backend.normalizer = normalizers.Sequence(steps)
        assert (how := text_changes.comparison(backend))
        assert text_changes.find(backend, f"Мы: {word}!", how)
        assert not text_changes.find(backend, "Мы: é ▁ ok\n", how)


def test_accents_case_and_form_do_not_count() -> None:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    how = text_changes.Comparison(frozenset(), False)
    for code in (*range(0x20, 0x0900), *range(0x1E00, 0x2100)):
        text = f"a{chr(code)}b c"
        if unicodedata.category(chr(code)) != "Cn":
            assert not text_changes.find(backend, text, how), hex(code)


def test_tokenizers_of_the_tests_are_not_doubtful() -> None:
    assert text_changes.comparison(AutoTokenizer.from_pretrained(MODEL).backend_tokenizer) is None


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"type": "Strip", "content": "_", "start": 5, "stop": 5}, "the tokenizer can't encode every text"),
        ({"type": "Strip", "content": "s", "start": 1, "stop": 1}, "writes other words"),
        (replaced({"String": "ham"}, "spam"), "writes other words"),
        (replaced({"Regex": "ham|eggs"}, ""), "writes other words"),
        ({"type": "BPEDecoder", "suffix": "am"}, "writes other words"),
        ({**METASPACE, "replacement": "m"}, "writes other words"),
        (
            {"type": "CTC", "pad_token": "1", "word_delimiter_token": "|", "cleanup": True},
            "writes other words",
        ),
    ],
)
def test_decoder_that_fails_or_changes_words_is_refused(step, said: str, tmp_path, capfd) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    content = json.loads((path := model / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Sequence", "decoders": [*filter(None, [content["decoder"]]), step]}
    path.write_text(json.dumps(content))
    assert main.main(["check", str(QUICKSTART), f"model.name={model}"]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("name", sorted(untrusted_files.TOKENIZER_ARGUMENTS))
def test_settings_of_a_tokenizer_take_no_argument_of_transformers(name: str, tmp_path, capsys) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    content = json.loads((path := model / "tokenizer_config.json").read_text())
    for value, code in ((None, 0), ("x", 2)):
        path.write_text(json.dumps({**content, name: value}))
        assert main.main(["check", str(QUICKSTART), f"model.name={model}"]) == code
    assert f"remove {name} from the file" in capsys.readouterr().err


def test_long_rows_of_marks_are_compared_at_once() -> None:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace("zqzq", "zqzq")
    assert (how := text_changes.comparison(backend))
    started = time.process_time()
    assert not text_changes.find(backend, "a" + "\u0316\u0301" * 100_000, how)
    assert time.process_time() - started < 2
