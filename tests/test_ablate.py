"""finetune ablate: a ladder measured on the tiny model; what is kept and why; A against B; the docs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from conftest import QUICKSTART, ROOT, module_of

from finetune import ab_test, ablate, cli, hardware, ladder, measured, plots, recipe
from finetune.errors import UserError
from finetune.ladder import Rung, Variant
from finetune.run_folder import RunFolder
from finetune.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = ladder.read(ROOT / "recipes" / "ladder.yaml")
SHORT = """
measure: {steps: 3, warm_up: 1, repeats: 1, held_out_rows: 4, min_gain: 0}
baseline:
  mixed_precision: "no"
  set: {model.attention: eager, speed.recompute: all, speed.loss: trl, train.optim: adamw_torch}
rungs:
  - {name: no_recompute, kind: memory, what: it, set: {speed.recompute: none}}
  - {name: broken, kind: data, what: it, set: {data.max_length: 8}}
  - {name: refused, kind: data, what: it, set: {data.max_length: 4}}
  - {name: faster_than_light, kind: precision, what: it, set: {train.tf32: true}, needs: {device: cuda}}
  - {name: packing, kind: data, what: it, set: {data.packing: true}, same_tokens: true, gate: held_out}
  - {name: nothing, kind: noop, what: it, noop: there is nothing to switch}
"""


class Climbed:
    """A ladder that was measured once for all tests."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words

    def again(self, folder: Path) -> int:
        return cli.main([*self.words, "--output", str(folder)])

    def found(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "quickstart" / "ladder.json").read_text())


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory, small, two_layers) -> Iterator[Climbed]:
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "ladder.yaml").write_text(SHORT)
    words = ["ablate", str(QUICKSTART), *small, f"model.name={two_layers}", "train.effective_batch_size=4"]
    words.append("train.per_device_train_batch_size=4")  # more than a step of packed rows has
    made = Climbed(folder / "results", [*words, "--ladder", str(folder / "ladder.yaml")])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert made.again(made.folder) == 0
    yield made
    shutil.rmtree(folder)


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["rungs"]}


def test_a_ladder_is_measured_and_what_fails_is_named(climbed: Climbed) -> None:
    found = climbed.found(climbed.folder)
    row = rows(found)
    assert row["nothing"]["status"] == "no-op" and row["nothing"]["why"] == "there is nothing to switch"
    assert (row["faster_than_light"]["status"], row["faster_than_light"]["why"]) == ("skipped", "no GPU here")
    assert row["refused"]["status"] == "refused" and "data.max_length" in row["refused"]["why"]
    assert row["broken"]["status"] == "error" and "longer than data.max_length" in row["broken"]["why"]
    assert row["no_recompute"]["status"] in ("kept", "dropped")
    assert row["no_recompute"]["alone"]["apart"] < 1e-3, "recomputing changes no loss"
    packed = recipe.load(
        climbed.folder / "data" / "packing_rank16" / "quickstart-alone-1" / "recipe.resolved.yaml"
    )
    assert packed.train.effective_batch_size == packed.train.per_device_train_batch_size == 2
    assert found["baseline"]["held_out"] is not None and found["as_is"]["tokens_per_second"] > 0
    text = (climbed.folder / "quickstart" / "ladder.md").read_text()
    assert "| no_recompute |" in text and "nothing no-op: there is nothing to switch" in text


def test_runs_are_ordinary_run_folders_by_kind_name_and_rank(climbed: Climbed) -> None:
    run = climbed.folder / "memory" / "no_recompute_rank16" / "quickstart-alone-1"
    assert (run / "adapter").exists() and (run / "metrics.jsonl").exists()
    assert (climbed.folder / "baseline" / "quickstart-baseline-1" / "receipts.json").exists()
    resolved = recipe.load(run / "recipe.resolved.yaml")
    assert resolved.speed.recompute == "none" and resolved.model.attention == "eager"


def test_a_repeat_without_held_out_rows_is_of_the_same_data(climbed: Climbed, small) -> None:
    """Only the first run of a variant evaluates; what it evaluates on is not trained on."""
    run = RunFolder(climbed.folder / "memory" / "no_recompute_rank16" / "quickstart-alone-1")
    assert len(run.read("data_report.json")["train"]["sources"]) == 2
    trained = hashlib.sha256(Path(small[0].removeprefix("data.name=")).read_bytes()).hexdigest()
    expected = hashlib.sha256(json.dumps([trained]).encode()).hexdigest()[:12]
    assert measured.machine(run)["train files"] == expected


def test_a_ladder_is_copied_with_its_keys(tmp_path: Path, monkeypatch) -> None:
    """`on` and `off`, which YAML 1.1 takes for truths."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ladder as benchmark

    copy = benchmark.changed(ROOT / "recipes" / "ladder.yaml", tmp_path, ["packing"], {"repeats": 1})
    made = ladder.read(copy)
    assert made.measure.repeats == 1 and made.rung("packing").noop and not made.rung("bf16").noop
    assert [rung.on for rung in made.rungs] == [rung.on for rung in SHIPPED.rungs]


def test_what_runs_on_gpus_are_forked_from_asks_for_none() -> None:
    """A process that has asked for a GPU, as some packages do while they are imported, can't be forked."""
    asks = "print([name for name in ('bitsandbytes', 'torchao', 'peft') if name in sys.modules])"
    code = f"import sys, {', '.join(measured.PRELOADED)}; {asks}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"


def test_page_and_picture_need_nothing_else(climbed: Climbed) -> None:
    page = (climbed.folder / "quickstart" / "ladder.html").read_text()
    assert "<svg" in page and not re.search(r"(src|href)=.?https?:", page)
    assert (climbed.folder / "quickstart" / "ladder.svg").read_text().startswith("<svg")


def test_the_best_recipe_checks_and_says_where_values_are_from(climbed: Climbed, capsys) -> None:
    best = climbed.folder / "quickstart" / "best.yaml"
    assert cli.main(["check", str(best)]) == 0, capsys.readouterr().err
    text = best.read_text()
    assert re.search(r"recompute: .*ladder: no_recompute, (kept|dropped)", text)
    assert re.search(r"max_length: 256 .*ladder: broken, error", text)
    assert recipe.load(best).model.attention == "auto", "no rung was about it"


def test_a_measured_rung_is_not_measured_again(climbed: Climbed, tmp_path, capsys) -> None:
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder, copy)
    marks = sorted(copy.rglob(measured.MARK))
    before = [mark.read_text() for mark in marks]
    environment = copy / "memory" / "no_recompute_rank16" / "quickstart-alone-1" / "environment.json"
    changed = json.loads(environment.read_text())
    changed["packages"]["torch"] = "1.0"
    environment.write_text(json.dumps(changed))
    assert climbed.again(copy) == 0
    said = capsys.readouterr().out
    made = re.findall(r"^\S+-[1-9]: (kept: )?.*tokens/s$", said, re.M)
    assert len(made) >= 5 and all(made), "nothing was measured again"  # the stack, by what is kept now
    assert [mark.read_text() for mark in sorted(copy.rglob(measured.MARK))] == before
    row = rows(climbed.found(copy))["no_recompute"]
    assert row["status"] == "NOT COMPARABLE" and "torch: 1.0 against" in row["why"]


def test_results_of_other_hardware_are_refused(climbed: Climbed, tmp_path, capsys) -> None:
    copy = tmp_path / "results"
    shutil.copytree(climbed.folder / "baseline", copy / "baseline")
    environment = copy / "baseline" / "quickstart-baseline-1" / "environment.json"
    changed = json.loads(environment.read_text())
    changed["hardware"]["name"] = "NVIDIA H100"
    environment.write_text(json.dumps(changed))
    assert climbed.again(copy) == 2
    assert "NOT COMPARABLE" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_ends_with_its_ladder(number: int, tmp_path, small, two_layers) -> None:
    """By SIGTERM with exit 75 and what to do next; by SIGKILL all the same, without a word."""
    (tmp_path / "ladder.yaml").write_text("measure: {steps: 9999}\nbaseline: {}\nrungs: []\n")
    words = ["ablate", str(QUICKSTART), *small, f"model.name={two_layers}", "train.effective_batch_size=2"]
    words += ["--ladder", str(tmp_path / "ladder.yaml"), "--output", str(tmp_path / "results")]
    command = [sys.executable, "-m", "finetune", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "results" / "baseline" / "quickstart-baseline-1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    made = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert len(made) >= 2 and psutil.wait_procs(made, timeout=30)[1] == []
    if number == signal.SIGTERM:
        assert process.returncode == 75
        assert "stopped by SIGTERM" in said and "the same command again goes on" in said


def job_of(climbed: Climbed, asked: ab_test.Asked, side: int, place: Path) -> measured.Job:
    """The run that an A/B test makes first of one side, taken from the ladder's."""
    fields = [*asked.overrides, *measured.length(asked.steps, asked.warm_up)]
    held = {"train.seed": 42, "data.validation": str(place / "held_out.jsonl")}
    fields += measured.overrides({**held, "data.validation_fraction": None})
    folder = place / f"{('baseline', 'optimised')[side]}-1"
    job = measured.Job((asked.baseline, asked.optimised)[side], fields, folder)
    source = ("baseline/quickstart-baseline-1", "memory/no_recompute_rank16/quickstart-alone-1")[side]
    shutil.copytree(climbed.folder / source, folder)
    mark = json.loads((folder / measured.MARK).read_text())
    (folder / measured.MARK).write_text(json.dumps({**mark, "identity": measured.identity(job)}))
    return job


def test_an_optimised_recipe_is_held_to_its_promises(climbed: Climbed, tmp_path, small, capsys) -> None:
    script = module_of("scripts", "validate_optimizations")
    base = str(ROOT / "recipes" / "baselines" / "quickstart.yaml")
    asked = ab_test.Asked(base, str(QUICKSTART), [*small], (None, None), tmp_path, 3, 1, 1)
    place = tmp_path / "ab" / "quickstart-against-quickstart"
    rows = Path(small[1].partition("=")[2])
    measured.cut_held_out(str(rows), place, ab_test.HELD_OUT_ROWS)
    for side in (0, 1):
        job_of(climbed, asked, side, place)
    words = ["--baseline", base, "--optimized", str(QUICKSTART), "--output", str(tmp_path), *small]
    words += ["--steps", "3", "--warm-up", "1", "--repeats", "1", "--price-per-hour", "2"]
    assert script.main([*words, "--min-speedup", "0.01", "--max-loss-delta", "0.5%"]) == 0
    assert "cost of that, 1 x 2 an hour" in capsys.readouterr().out
    assert "| tokens/s |" in (place / "ab.md").read_text()
    assert script.main([*words, "--min-speedup", "99", "--max-memory-gib", "0.01"]) == 5
    said = capsys.readouterr().err
    assert "speed-up does not hold" in said and "peak memory does not hold" in said
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert "Exit codes: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3", "--warm-up", "5"], "--warm-up below --steps"),
        (["--optimized", "recipes/quickstrat.yaml"], "recipes/quickstart.yaml"),
        (["--optimized", str(QUICKSTART), "--accelerate", "ddp_three"], "no such accelerate config"),
        (["--optimized", str(QUICKSTART), "train.optim=nonsense"], "train.optim"),
    ],
)
def test_a_wrong_comparison_ends_before_it_begins(words: list[str], said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(measured, "make", lambda *_, **__: pytest.fail("a run began"))
    script = module_of("scripts", "validate_optimizations")
    given = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1", *words]
    assert script.main(given) == 2
    assert said in capsys.readouterr().err


# Judged without training


def runs(rate: float, *, loss: float = 1.0, memory: float = 1.0, held_out: float | None = 1.0) -> list[Any]:
    one = {"failed": "", "step_seconds": 1.0, "first_step_seconds": 1.0, "mfu": None, "memory_gib": memory}
    one |= {"held_out": held_out, "losses": [2 * loss, loss, loss, loss]}
    rates = [rate * 0.99, rate * 1.01]
    return [one | {"tokens_per_second": value, "tokens_per_cpu_second": 50.0} for value in rates]


def bench(**groups: list[Any]) -> ablate.Bench:
    asked = ablate.Asked(str(QUICKSTART), [], Path("ladder.yaml"), Path("results"))
    made = ablate.Bench(asked, SHIPPED, hardware.detect(), Screen(quiet=True))
    made.groups = {ablate.key(Variant(None, {"is": name})): group for name, group in groups.items()}
    return made


def judged(after: list[Any], **rung: Any) -> dict[str, Any]:
    made = Rung.model_validate({"name": "it", "kind": "it", "what": "it", **rung})
    names = [Variant(None, {"is": name}) for name in ("after", "before")]
    return ablate.judge(bench(before=runs(100), after=after), made, *names, names[1])


def test_what_noise_explains_is_no_gain() -> None:
    assert judged(runs(101))["verdict"] == "dropped"
    assert judged(runs(110))["verdict"] == "kept"
    slower = judged(runs(90))
    assert slower["verdict"] == "dropped" and slower["worse"]


def test_a_busy_cpu_is_judged_by_cpu_seconds() -> None:
    quiet, busy = bench(a=runs(100)), bench(a=runs(100), b=[*runs(100), *runs(50)])
    quiet.choose_rate()
    busy.choose_rate()
    assert (quiet.rate, busy.rate) == ("tokens_per_second", "tokens_per_cpu_second")


def test_the_loss_gate() -> None:
    assert judged(runs(200, loss=1.01))["verdict"] == "kept"
    assert judged(runs(200, loss=1.03))["verdict"] == "failed"
    assert judged(runs(200, loss=float("nan")))["verdict"] == "failed"
    assert judged(runs(200, loss=1.3), gate="held_out")["verdict"] == "kept"
    assert judged(runs(200, held_out=1.06), gate="held_out")["verdict"] == "failed"
    assert judged(runs(200, loss=1.3, held_out=None), gate="held_out")["verdict"] == "failed"


def test_a_rung_for_memory_is_kept_for_memory_alone() -> None:
    assert judged(runs(100, memory=0.8), gain="memory")["verdict"] == "kept"
    assert judged(runs(90, memory=0.8), gain="memory")["verdict"] == "dropped"
    assert judged(runs(200, memory=1.0), gain="memory")["verdict"] == "dropped"


def test_noise_is_pooled_over_repeats() -> None:
    assert measured.noise([[100.0], [5.0]]) is None
    assert measured.noise([[99.0, 101.0], [990.0, 1010.0]]) == pytest.approx(0.01 * 2**0.5)


def test_why_a_run_failed_is_its_log_s_last_error() -> None:
    log = "warning\nerror: out of memory (a.yaml)\n  found:     at 1 row\n"
    assert measured.why(log, 5) == "out of memory (a.yaml): at 1 row"
    assert "signal 9" in measured.why("", -9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("baseline: {}\nrungs: [{name: a, kind: b, what: c, on: [d]}]", [":2:42", "names no earlier rung"]),
        ("baseline: {}\nrungs: [{name: a, kind: b, what: c}, {name: a, kind: b, what: c}]", ["one name"]),
        (
            "baseline: {}\nrungs: [{name: a, kind: b, what: c, sets: {}}]",
            [":2:37", "same_tokens, set,", "set\n"],
        ),
        ("baseline: {}\nrungs: []\nmeasure: {repeat: 2}", [":3:11", "held_out_rows", "repeats\n"]),
        ("baselin: {}\nrungs: []", ["baseline, measure, rungs"]),
        ("baseline: {}\nrungs: [{name: ../../evil, kind: b, what: c}]", [":2:10", "[a-z0-9_]+"]),
        ("baseline: {}\nrungs: [{name: a, kind: a/b, what: c}]", [":2:19", "[a-z]+"]),
        ("baseline: {}\nrungs: [{name: a, kind: baseline, what: c}]", [":2:19", "other results"]),
        ("baseline: {set: {train.optmi: x}}\nrungs: []", [":1:18", "train.optmi", "optim\n"]),
        (
            "baseline: {}\nrungs: [{name: a, kind: b, what: c, set: {optim: adamw_torch}}]",
            [":2:43", "train.optim\n"],
        ),
        ("baseline: {set: {train.optim: nonsense}}\nrungs: []", [":1:18", "train.optim"]),
        ("baseline: {}\nrungs: []\nmeasure: {steps: 3, warm_up: 3}", [":3:21", "warm_up below steps"]),
        ("- 1", ["a ladder is a mapping"]),
        (b"baseline: {}\n# caf\xe9", ["byte 18", "not UTF-8"]),
    ],
)
def test_a_wrong_ladder_is_exit_2(text: str | bytes, said: list[str], tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(measured, "make", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / "ladder.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    words = ["ablate", str(QUICKSTART), "--ladder", str(tmp_path / "ladder.yaml")]
    assert cli.main([*words, "--output", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


def test_keys_of_a_ladder_may_be_any_of_a_recipe() -> None:
    for key in ("adapter.r", "adapter.rank_pattern.q_proj", "speed.qat.group_size", "train.optim"):
        assert ladder.key_problem(key, 1, "") is None
    for key in ("adapter.rr", "speed.qat.group", "train", "train.", "nothing.at"):
        assert ladder.key_problem(key, 1, "") is not None


def test_bars_of_a_rung_that_was_not_stacked() -> None:
    drawn = plots.bars([plots.Bar("a", [1.0, None], [0.1, 0.0])], ("alone", "stacked"), "times")
    assert drawn.startswith("<svg") and "alone" in drawn


# The shipped ladder, its docs, and the baselines


def test_every_rung_loads_and_can_be_switched_off_alone() -> None:
    everything = ladder.baseline(SHIPPED)
    for rung in SHIPPED.rungs:
        if rung.noop:
            continue
        assert rung.off and rung.source
        on = ladder.add(ladder.below(SHIPPED, rung), rung, rows=4)
        recipe.load(QUICKSTART, on.overrides)
        everything = ladder.add(everything, rung, rows=4)
        assert re.match(r"(train|speed|data|model)\.\w+: |mixed_precision: ", rung.off), rung.off
        if not rung.off.startswith("mixed_precision"):
            key, _, value = rung.off.partition(": ")
            off = recipe.load(QUICKSTART, [*on.overrides, f"{key}={value}"])
            section, _, name = key.partition(".")
            assert getattr(getattr(off, section), name) != on.values.get(key, "what the recipe says")
    recipe.load(QUICKSTART, everything.overrides)


def test_the_page_of_optimisations_is_current() -> None:
    script = module_of("scripts", "make_optimizations")
    assert (ROOT / "docs" / "optimizations.md").read_text() == script.page(), "scripts/make_optimizations.py"


FROZEN = {
    "llama3_8b": "b146d34314b7b958",
    "quickstart": "f4c5fb23a496eb93",
}


@pytest.mark.parametrize("name", FROZEN)
def test_baselines_are_frozen(name: str) -> None:
    values = yaml.safe_load((ROOT / "recipes" / "baselines" / f"{name}.yaml").read_text())
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == FROZEN[name], "speed-ups are quoted over it: make another file"


def test_a_ladder_is_no_recipe(capsys) -> None:
    with pytest.raises(UserError, match="no shipped recipe"):
        from finetune import shipped

        shipped.copy("ladder", Path("nowhere"))


def test_the_readme_s_rungs_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "ladder.json").read_text())
    readme = (ROOT / "README.md").read_text()
    for name in ("bf16", "sdpa", "packing", "no_recompute"):
        row = rows(found)[name]
        line = re.search(rf"^    {name} .*$", readme, re.MULTILINE)
        assert line and line[0].endswith(f"{row['status']}: {row['why']}")
        assert f"{row['alone']['speedup']:.2f} ±{row['alone']['noise']:.2f}" in line[0]
