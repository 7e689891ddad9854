"""`finetune report`: the verdict first, from the run folder alone, on a page that stands by itself."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.core.formatting import duration, figure
from finetune.reporting import html_report, run_files
from finetune.run_folder.run_folder import RunFolder
from support.paths import ROOT

VOID = {"meta", "br", "hr", "img", "input", "link"}
NASTY = "<script>alert(1)</script></style><b>&amp; \u202e \x07 {{ 7 * 7 }} https://example.org"


class Page(HTMLParser):
    """Text, what a page would load, and whether each tag is closed; scripts and styles are no text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.text, self.loaded, self.ids, self.classes = "", [], [], []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]
        self.ids += [given["id"]] if "id" in given else []
        self.classes += (given.get("class") or "").split()
        assert not any(name.startswith("on") for name in given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    def said(self) -> str:
        return " ".join(self.text.split())


def difference(value: float, spread: float, verdict: str) -> dict:
    return {"value": value, "low": value - spread, "high": value + spread, "rows": 300, "verdict": verdict}


EVALUATED = {  # what evaluation adds to base, tuned and samples
    "base": {"loss": 1.8, "exact_match": 0.1, "ended": 0.2},
    "tuned": {"loss": 0.3, "exact_match": 0.9, "ended": 1.0},
    "difference": {"loss": difference(-1.5, 0.1, "better"), "exact_match": difference(0.8, 0.05, "better")},
    "verdict": {"word": "better", "why": "validation loss 1.9 to 0.3 on 300 rows", "forgot": []},
    "tasks": {
        "arith": {
            "base": {"acc": 0.25, "acc_stderr": 0.01, "acc_norm": 0.3},
            "tuned": {"acc": 0.5, "acc_stderr": 0.02, "acc_norm": 0.31},
            "difference": {
                "acc": difference(0.25, 0.03, "better"),
                "acc_norm": difference(0.01, 0.02, "same"),
            },
            "rows": 1000,
            "higher_is_better": {"acc": True, "acc_norm": True},
            "main": "acc",
            "forgetting": False,
        },
        "general_text": {
            "base": {"loss": 3.1},
            "tuned": {"loss": 4.2},
            "difference": {"loss": difference(1.1, 0.2, "worse")},
            "rows": 50,
            "higher_is_better": {"loss": False},
            "main": "loss",
            "forgetting": True,
        },
    },
    "sources": [
        {
            "source": f"/data/{name}.jsonl",
            "rows": 150,
            "base": {"loss": 2.0},
            "tuned": {"loss": 0.5},
            "difference": {"loss": difference(-1.5, 0.2, "better")},
        }
        for name in ("one", "two")
    ],
    "worst": [
        {
            "where": f"test.jsonl:{7 + n}",
            "prompt": f"What is {n} times {n}?",
            "reference": str(n * n),
            "base": "I see.",
            "tuned": "4",
            "base_loss": 3.0,
            "tuned_loss": 2.0 - n / 20,
        }
        for n in range(20)
    ],
    "settings": {
        "rows": 300,
        "batch_size": 64,
        "seed": 0,
        "seconds": {"base": 3.1, "tuned": 3.4},
        "notes": ["a note"],
    },
}
TRAINED: list[Path] = []


@pytest.fixture
def folder(train, tmp_path: Path) -> RunFolder:
    """A copy of a run of the quickstart that was cut short, with an eval.json as it is written today."""
    if not TRAINED:
        TRAINED.append(
            train("train.max_steps=4", "model.name=examples/tiny_llama/model", name="trained once").path
        )
    run = RunFolder(Path(shutil.copytree(TRAINED[0], tmp_path / "my run")))
    run.write("eval.json", {**run.read("eval.json"), **EVALUATED})
    return run


def page_of(folder: RunFolder, capsys=None, code: int = 0, **options: str) -> Page:
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert main.main(["report", str(folder.path), *given]) == code
    return Page(Path(options.get("output", folder.path / "report.html")))


def change(folder: RunFolder, **parts: object) -> None:
    """Put parts of eval.json in place of its own."""
    found = {**folder.read("eval.json"), **parts}
    folder.write("eval.json", found)


def test_the_page_needs_nothing_but_itself(folder: RunFolder) -> None:
    page = page_of(folder)
    assert page.open == [] and page.source.startswith("<!doctype html>")
    assert page.loaded and all(target.startswith("#") for target in page.loaded)
    assert len(page.ids) == len(set(page.ids)) and {link[1:] for link in page.loaded} <= set(page.ids)
    assert "<script" not in page.source and "@import" not in page.source
    assert not re.search(r"url\(\s*['\"]?(?!#)", page.source)
    assert set(re.findall(r"https?://[^\s\"<]*", page.source)) == {"http://www.w3.org/2000/svg"}
    assert "color-scheme" in page.source and "viewport" in page.source and "@media print" in page.source
    assert 40_000 < len(page.source) < 300_000


def test_the_verdict_comes_first_then_what_supports_it(folder: RunFolder, capsys) -> None:
    page = page_of(folder)
    order = [
        "Better than the base model",
        "validation loss 1.9 to 0.3 on 300 rows",
        "lora (r 16) on tiny_llama/model, trained on 96 examples of train.jsonl for 4 steps",
        "Base model and fine-tuned model",
        "−1.5 (95% CI −1.6 to −1.4) ✓ better",  # noqa: RUF001 (a real minus)
        "arith: acc",
        "Forgetting check",
        "loss on general text",
        "✗ higher loss",
        "Validation loss by source",
        "Samples side by side",
        "highest loss of the fine-tuned model",
        "test.jsonl:7",
        "Training",
        "Run checks",
        "Data",
        "Recipe",
        "train.learning_rate",
        "Environment",
        "transformers",
        "Next steps",
        "finetune train",
    ]
    said, place = page.said(), 0
    for part in order:
        assert part in said[place:], part
        place = said.index(part, place)
    assert "good" in page.classes and page.source.count('role="img"') >= 6
    printed = capsys.readouterr().out
    assert "Better than the base model. validation loss" in printed and "report.html" in printed


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(folder: RunFolder, tmp_path: Path) -> None:
    first = page_of(folder).source
    again = page_of(folder, output=str(tmp_path / "again.html")).source
    (tmp_path / "elsewhere").mkdir()
    moved = RunFolder(Path(shutil.move(folder.path, tmp_path / "elsewhere" / "my run")))
    assert first == again == page_of(moved).source


def test_the_page_has_the_serving_check_of_each_export(folder: RunFolder) -> None:
    assert "Exports" not in Page(html_report.run(folder.path)[0]).said()
    check = {"reader": "llama.cpp", "token_ids": {"prompts": 50, "different": 0}}
    check["loss"] = {"tokens": 512, "finetune": 0.3142, "runtime": 0.3151, "tolerance": 0.1, "agree": True}
    shown = {"target": "gguf", "quantize": "q8_0", "serving_check": check}
    folder.write("export.json", {"export-gguf-q8_0": shown, NASTY: {"target": "mlx"}})
    said = Page(html_report.run(folder.path)[0]).said()
    assert "gguf, q8_0 (export-gguf-q8_0)" in said and "50 prompts, 0 differ" in said
    assert "0.3151, in finetune 0.3142, tolerance 0.1" in said and "<script>" in said
    (folder.path / "export.json").write_text("{")
    assert "the report can't show the exports" in Page(html_report.run(folder.path)[0]).said()


def test_what_the_data_holds_is_shown_as_text(folder: RunFolder) -> None:
    sample = {"prompt": NASTY, "reference": NASTY, "base": NASTY * 400, "tuned": "\ud800"}
    chat = [{"role": "system", "content": NASTY}, {"role": "user", "content": NASTY}]
    change(
        folder,
        samples=[sample, {**sample, "prompt": chat}],
        worst=[{**sample, "where": NASTY, "base_loss": 2.0, "tuned_loss": float("nan")}],
        verdict={"word": "better", "why": NASTY, "forgot": [NASTY]},
        sources=[{"source": NASTY, "rows": 1, "base": {"loss": 1.0}, "tuned": {"loss": 1.0}}] * 2,
    )
    folder.write("checks.json", [{**folder.read("checks.json")[0], "actual": NASTY, "passed": False}])
    page = page_of(folder)
    assert page.open == [] and "<script" not in page.source and page.source.count("</style>") == 1 + 6
    assert page.text.count("<script>alert(1)</script></style><b>&amp; \\u202e \\u0007 {{ 7 * 7 }}") > 8
    assert "more characters" in page.text and "\u202e" not in page.source and "\x07" not in page.source


@pytest.mark.parametrize(
    ("word", "forgot", "kind", "title"),
    [
        ("better", [], "good", "Better than the base model"),
        ("better", ["general_text"], "mixed", "Better than the base model, but worse on general tasks"),
        ("same", [], "same", "No significant difference from the base model"),
        ("no significant difference", [], "same", "No significant difference from the base model"),
        ("worse", [], "bad", "Worse than the base model"),
        ("worse", ["general_text"], "bad", "Worse than the base model; worse on general tasks"),
        ("unknown", [], "unknown", "Not enough data to compare with the base model"),
    ],
)
def test_verdicts(word: str, forgot: list, kind: str, title: str, folder: RunFolder) -> None:
    change(folder, verdict={"word": word, "why": "because", "forgot": forgot})
    found = html_report.judge(run_files.read(folder.path))
    assert (found.kind, found.title) == (kind, title) and found.why.startswith("because")
    assert (forgot == []) == (found.doubts == [])
    assert title in page_of(folder).said()


@pytest.mark.parametrize(
    ("adapter", "merges"), [("type: lora", True), ("type: prompt_tuning", False), ("type: full", False)]
)
def test_what_can_t_be_merged_is_not_advised_to_be(adapter: str, merges: bool, folder: RunFolder) -> None:
    folder.recipe.write_text(f"adapter: {{{adapter}}}\n")
    assert ("finetune merge" in page_of(folder).said()) == merges


def test_without_a_verdict_nothing_is_claimed(folder: RunFolder) -> None:
    folder.write("eval.json", {})
    found = html_report.judge(run_files.read(folder.path))
    assert found.kind == "unknown" and "not evaluated" in found.why and page_of(folder).open == []


@pytest.mark.parametrize("splitter", ["", "FSDP"])
def test_the_command_that_makes_it_again_has_the_launch_s_precision(splitter: str, folder: RunFolder) -> None:
    """Accelerate's own, without a config, is none."""
    environment = folder.read("environment.json")
    environment["launch"] |= {"processes": 8, "precision": "bf16", "splitter": splitter}
    folder.write("environment.json", environment)
    command, needs = html_report.reproduce(run_files.read(folder.path))
    assert command.startswith("accelerate launch --num_processes 8 --mixed_precision bf16 -m finetune train ")
    split = ", base model sharded by FSDP" if splitter else ""
    assert needs[0] == f"8 processes, precision bf16{split}"


def test_a_run_check_that_does_not_match_comes_first_and_spoils_the_verdict(folder: RunFolder) -> None:
    run_checks = folder.read("checks.json")
    run_checks[-1] |= {"passed": False, "expected": "one thing", "actual": "another"}
    folder.write("checks.json", run_checks)
    page = page_of(folder)
    said = page.said()
    assert f"1 of {len(run_checks)} run checks failed" in said and "mixed" in page.classes
    section = said[said.index("Run checks", said.index("Training")) :]
    assert (
        section.index("✗ failed") < section.index("✓ passed")
        and "expected one thing, found another" in section
    )
    assert re.search(r"base weights after training\s*:\s*unchanged", section)


def test_without_held_out_rows(train) -> None:
    run = train("data.validation=null", "train.max_steps=1")
    page = page_of(run)
    assert (
        "Not enough data to compare with the base model" in page.said()
        and "the run has no validation set" in page.said()
    )
    assert "Training loss: " in page.said()
    assert "data.validation_fraction=0.02" in page.said() and page.open == []


def test_a_run_that_failed(train, capsys) -> None:
    run = train("train.learning_rate=1e-30", "train.max_steps=5", code=5)
    run.recipe.write_text(run.recipe.read_text().replace("learning_rate: 1e-30", "learning_rate: 0.0"))
    said = page_of(run).said()
    assert "The run failed and saved no weights" in said and "The run ended after step 5." in said
    assert "trained weights changed" in said and "Set a learning rate above 0" in said and "✗ failed" in said


def test_training_ends_with_a_page_and_is_not_spoilt_by_it(train, monkeypatch, capsys) -> None:
    short = ("train.max_steps=1", "data.validation=null")
    assert Page(train(*short).path / "report.html").open == []

    def broken(*_: object) -> None:
        raise RuntimeError("a page that can't be made")

    monkeypatch.setattr("finetune.reporting.html_report.render", broken)
    run = train(*short, name="other")
    assert not (run.path / "report.html").exists() and (run.path / "adapter").exists()
    assert (run.path / "log.txt").read_text().count("a page that can't be made") == 1


@pytest.mark.parametrize("name", list(run_files.FILES))
def test_a_missing_part_is_said(name: str, folder: RunFolder) -> None:
    (folder.path / name).unlink()
    page = page_of(folder)
    assert f"{name} is missing, so the report" in page.said() and page.open == []
    (folder.path / name).write_text('{"torn')
    page = page_of(folder)
    assert f"{name}" in page.said() and "finetune can't read" in page.said() and page.open == []


@pytest.mark.parametrize("name", list(run_files.FILES))
def test_one_part_alone_is_a_page(name: str, folder: RunFolder) -> None:
    for other in folder.path.iterdir():
        if other.name != name:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    page = page_of(folder)
    assert page.open == [] and page.said().count("is missing, so the report") == len(run_files.FILES) - 1


@pytest.mark.parametrize("word", ["better", "same", "worse", "unknown"])
def test_weights_and_an_evaluation_alone_are_a_page(word: str, folder: RunFolder) -> None:
    change(folder, verdict={"word": word, "why": "because", "forgot": []})
    for other in folder.path.iterdir():
        if other.name not in ("eval.json", "adapter"):
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    page = page_of(folder)
    assert page.open == [] and "because" in page.said() and "learning_rate=" not in page.said()


@pytest.mark.parametrize("name", [name for name in run_files.FILES if name.endswith(".json")])
def test_a_part_with_nothing_in_it(name: str, folder: RunFolder) -> None:
    (folder.path / name).write_text("[]" if name == "checks.json" else "{}")
    page = page_of(folder)
    assert page.open == []
    assert ("finetune can't read data_report.json" in page.said()) == (name == "data_report.json")


def test_what_is_shown_in_percent(folder: RunFolder) -> None:
    def task(key: str, base: float, tuned: float) -> dict:
        sides = {"base": {key: base}, "tuned": {key: tuned}}
        return {**sides, "difference": {key: difference(tuned - base, 0.01, "better")}, "main": key}

    tasks = {"gsm8k": task("exact_match,strict-match", 0.25, 0.5), "wmt": task("bleu", 23.4, 25.0)}
    change(folder, tasks=tasks | {"squad": task("f1", 0.9, 61.5)})
    said = page_of(folder).said()
    assert "25.0% 50.0%" in said and "23.4 25" in said and "0.9 61.5" in said
    assert "2340" not in said and "6150" not in said


def test_what_is_no_run_folder(tmp_path: Path, capsys) -> None:
    assert main.main(["report", str(tmp_path)]) == 2
    assert "the path is not a run folder" in capsys.readouterr().err


def test_a_page_that_can_t_be_written(folder: RunFolder, tmp_path: Path, capsys) -> None:
    assert main.main(["report", str(folder.path), "--output", str(tmp_path / "no" / "a.html")]) == 2
    assert "finetune can't write to this path" in capsys.readouterr().err


def test_losses_that_are_not_finite_and_evaluations_in_between(folder: RunFolder) -> None:
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"loss": "nan", "grad_norm": "inf"}
    lines[2:2] = [{"step": 2, "epoch": 0.2, "eval_loss": 0.7}, {"step": 3, "epoch": 0.3, "eval_loss": 0.9}]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = page_of(folder).said()
    assert "the loss of 1 steps is NaN or Inf; lowest validation loss 0.7 at step 2" in said
    assert "best: step 2" in said and "validation" in said


def test_a_report_of_what_was_just_trained(train) -> None:
    """No file of it was made by hand."""
    run = train("adapter.type=ia3", "eval.samples=2")
    page, evaluation = page_of(run), run.read("eval.json")
    assert page.open == [] and evaluation["samples"][1]["reference"] in page.text
    assert figure(evaluation["tuned"]["loss"]) in page.said() and "ia3 on " in page.said()
    assert all(check["option"] in page.text for check in run.read("checks.json"))


def test_a_long_run_with_long_answers_stays_small(folder: RunFolder) -> None:
    line = json.loads((folder.path / "metrics.jsonl").read_text().splitlines()[0])
    lines = (json.dumps({**line, "step": n, "loss": n % 7 + 0.1}) + "\n" for n in range(1, 20_001))
    (folder.path / "metrics.jsonl").write_text("".join(lines))
    sample = {
        "where": "a:1",
        "prompt": "x" * 9999,
        **dict.fromkeys(("reference", "base", "tuned"), "y " * 9999),
    }
    change(folder, worst=[sample] * 20)
    assert len(page_of(folder).source) < 600_000


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.005049, "0.005049"),
        (3.53819, "3.538"),
        (12345.6, "12,346"),
        (1e-7, "1e-07"),
        (0.0, "0"),
        (None, "-"),
    ],
)
def test_numbers(value: float | None, said: str) -> None:
    assert figure(value) == said


@pytest.mark.parametrize(
    ("time", "said"),
    [(0.42, "0.42 s"), (45.2, "45 s"), (184, "3 min 4 s"), (750, "12 min"), (7800, "2 h 10 min")],
)
def test_durations(time: float, said: str) -> None:
    assert duration(time) == said


def test_templates_are_in_the_package() -> None:
    """The wheel takes all files under finetune/; these must lie there."""
    for name in ("reporting/report.html.jinja", "core/html/page.css.jinja", "core/html/parts.html.jinja"):
        assert (ROOT / "finetune" / name).exists()


@pytest.mark.parametrize("count", [5, 60])
def test_caption_of_the_loss_curve_has_the_ends_of_the_curve(count: int, tmp_path: Path) -> None:
    """Not means over parts of the run, which the curve does not show."""
    losses = [4.0 - 3.0 * step / (count - 1) for step in range(count)]
    steps = [{"step": step + 1.0, "loss": loss} for step, loss in enumerate(losses)]
    run = run_files.Run(tmp_path, steps=steps)
    svg, caption = html_report._loss_chart(run)
    assert caption == "Training loss: 4 \N{RIGHTWARDS ARROW} 1" and f"loss: {caption}" in svg


def test_each_figure_has_a_unit_or_none_to_have(folder: RunFolder) -> None:
    """And the large figures have the interval of their change."""
    units = {"GiB", "tokens/s", "% of a step", "%"}
    without = {"learning rate", "gradient norm (L2)"}
    names = [name for _, name, _, _ in html_report.CHARTS]
    assert [name for name in names if name not in without and not name.endswith(tuple(units))] == []
    page = page_of(folder)
    assert "loss, nats per token" in page.said()
    minus = "\N{MINUS SIGN}"
    assert f"change {minus}1.5 (95% CI {minus}1.6 to {minus}1.4)" in page.said()
