"""Comparing: adapter types on one recipe, and two runs with each other."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from finetune.cli import main
from finetune.core import console, verified_files
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.experiments.comparison import comparison, comparison_report, run_diff
from finetune.experiments.runner import kept_runs
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder import comparability
from finetune.run_folder.run_folder import RunFolder
from support import tables, two_ranks
from support.paths import DATA, QUICKSTART
from support.printed_commands import assert_commands_run
from support.runs import metrics
from support.small_tasks import CHOICE, QUESTIONS, write_task

DONE: list[Path] = []  # the comparison that most tests look at, made once


@pytest.fixture
def short(two_layers, small) -> list[str]:
    """Overrides for runs of two steps."""
    given = [f"model.name={two_layers}", *small, "train.max_steps=2", "train.warmup_steps=0"]
    return [*given, "train.effective_batch_size=8", "eval.max_new_tokens=4", "eval.forgetting=false"]


@pytest.fixture
def run(short, capsys):
    """`run(folder, "--adapters", "lora", ..., code=0)`: the command -> what it said."""

    def command(folder: Path, *options: str, code: int = 0) -> str:
        given = ["compare", str(QUICKSTART), *short, "--output", str(folder), *options]
        assert main.main(given) == code, capsys.readouterr().err
        said = capsys.readouterr()
        return said.err if code else said.out

    return command


@pytest.fixture
def done(run, tmp_path) -> Path:
    """A copy of a comparison of lora and ia3 with two seeds."""
    if not DONE:
        run(tmp_path / "once", "--adapters", "lora,ia3@0.05", "--seeds", "2")
        DONE.append(tmp_path / "once")
    return Path(shutil.copytree(DONE[0], tmp_path / "copy"))


AGAIN = ("--adapters", "lora,ia3@0.05", "--seeds", "2")


def found(folder: Path) -> dict:
    return json.loads((folder / "compare.json").read_text())


def test_each_run_is_an_ordinary_one_and_the_winner_trains(done, train, capsys) -> None:
    result = found(done)
    names = ["lora-seed42", "ia3-seed42", "lora-seed43", "ia3-seed43"]
    assert [row["run"] for row in result["runs"]] == names and not result["not_comparable"]
    row = result["runs"][0]
    folder = RunFolder(done / "lora-seed42")
    assert row["loss"] == folder.read("eval.json")["tuned"]["loss"]
    assert row["bytes"] == (folder.adapter / "adapter_model.safetensors").stat().st_size
    assert row["train_seconds"] == pytest.approx(2 * metrics(folder)[1]["step_seconds"])
    losses = [each["loss"] for each in result["runs"] if each["type"] == "lora"]
    summed = result["types"]["lora"]["loss"]
    assert summed["mean"] == pytest.approx(sum(losses) / 2)
    assert summed["sd"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    text = (done / "compare.md").read_text()
    assert "| lora |" in text and "| ia3 |" in text and result["winner"]["why"] in text
    assert ElementTree.parse(done / "compare.svg").getroot().tag.endswith("svg")
    won, winner = load_recipe(done / "best.yaml"), result["winner"]
    assert (won.adapter.type, won.train.seed) == (winner["type"], winner["seed"])
    assert won.train.learning_rate == result["types"][winner["type"]]["rate"]
    again = train("train.effective_batch_size=8", recipe=done / "best.yaml")
    assert run_diff.weights(again, RunFolder(done / winner["run"])).rows == []


def test_a_run_among_others_is_the_run_alone(done, train, short) -> None:
    """The third run of one process, hash for hash."""
    alone = train(*short, "train.seed=43")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        own, among = ((place / name).read_bytes() for place in (alone.adapter, done / "lora-seed43/adapter"))
        assert own == among
    assert [line["loss"] for line in metrics(alone)] == [
        line["loss"] for line in metrics(RunFolder(done / "lora-seed43"))
    ]
    assert main.main(["compare", str(alone.path), str(done / "lora-seed43"), "--assert-equal"]) == 0


def test_what_is_finished_is_kept_and_the_rest_made_again(done, run, impatient) -> None:
    (done / "ia3-seed43" / comparison_report.MARK).unlink()  # as if it was stopped in the middle
    before = (done / "lora-seed42" / "eval.json").stat().st_mtime_ns
    said = run(done, *AGAIN)
    assert "1/4  lora-seed42: kept" in said and "2/4  ia3-seed42: kept" in said
    assert (
        said.count("the earlier run is not finished; finetune moved it to") == 1
        and said.count("running") == 1
    )
    assert re.search(r"^compare, ia3-seed43: \d+%", said, re.MULTILINE)
    assert len(list((done / "aside").iterdir())) == 1
    assert (done / "lora-seed42" / "eval.json").stat().st_mtime_ns == before


def test_a_run_of_another_recipe_is_not_kept(done, run) -> None:
    said = run(done, "--adapters", "lora", "--seeds", "1", "eval.samples=1")
    assert "lora-seed42: the earlier run has another recipe, base model or data; finetune moved it to" in said
    assert [row["run"] for row in found(done)["runs"]] == ["lora-seed42"]


def test_a_run_of_files_that_changed_places_is_not_kept(run, tmp_path) -> None:
    train, test = (shutil.copy(DATA / f"{name}.jsonl", tmp_path) for name in ("train", "test"))
    given = [f"data.name={train}", f"data.validation={test}", "--adapters", "lora", "--seeds", "1"]
    run(tmp_path / "all", *given)
    Path(train).rename(tmp_path / "x")
    Path(test).rename(train)
    (tmp_path / "x").rename(test)
    assert "the earlier run has another recipe, base model or data" in run(tmp_path / "all", *given)


@pytest.mark.parametrize("changed", ["the data", "the base model", "the tokenizer", "a template"])
def test_a_file_that_changes_between_two_runs_is_an_error(
    changed: str, run, two_layers, tmp_path, monkeypatch
) -> None:
    model, data = shutil.copytree(two_layers, tmp_path / "model"), shutil.copy(DATA / "train.jsonl", tmp_path)
    template = shutil.copy(two_layers / "chat_template.jinja", tmp_path / "own.jinja")
    files = {
        "the data": data, "the base model": model / "config.json", "the tokenizer": model / "tokenizer.json",
        "a template": template,
    }  # fmt: skip
    content, trained, train = Path(files[changed]).read_text(), list[Path](), comparison.pipeline.run

    def then_changes(recipe, verbosity) -> None:
        train(recipe, verbosity=verbosity)
        trained.append(Path(recipe.train.output_dir))
        if changed == "the base model":
            Path(files[changed]).write_text(json.dumps({**json.loads(content), "rms_norm_eps": 0.1}))
        else:
            Path(files[changed]).write_text(content + "\n")

    monkeypatch.setattr(comparison.pipeline, "run", then_changes)
    given = [f"model.name={model}", f"data.name={data}", f"data.chat_template={template}"]
    said = run(tmp_path / "out", *given, "--adapters", "lora", "--seeds", "2", code=2)
    assert "a file that the runs read changed" in said and "[data-changed]" in said
    assert len(trained) == 1 and not (trained[0] / comparison.MARK).exists()


def test_two_comparisons_at_once_in_one_folder_are_an_error(run, tmp_path, monkeypatch) -> None:
    """The second one would move the run aside that the first one trains."""
    train = comparison.pipeline.run
    said = list[str]()

    def another_starts(recipe, verbosity) -> None:
        words = [
            "compare",
            str(QUICKSTART),
            "--adapters",
            "lora",
            "--seeds",
            "1",
            "--output",
            str(tmp_path / "c"),
        ]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "finetune", *words], capture_output=True, text=True, check=False
        )
        said.append(f"{done.returncode} {done.stderr}")
        train(recipe, verbosity=verbosity)

    monkeypatch.setattr(comparison.pipeline, "run", another_starts)
    run(tmp_path / "c", "--adapters", "lora", "--seeds", "1")
    assert said[0].startswith("2 ") and "another command uses the folder of this experiment" in said[0]
    assert sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir()) == ["lora-seed42"]


def test_stopped_by_ctrl_c_it_goes_on(run, tmp_path, monkeypatch) -> None:
    from finetune.training import pipeline

    real, calls = pipeline.run, []

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(pipeline, "run", stopped)
    assert "interrupted" in run(tmp_path / "c", "--adapters", "lora", "--seeds", "2", code=130)
    assert len(found(tmp_path / "c")["runs"]) == 1, "the table of what is finished is there already"
    said = run(tmp_path / "c", "--adapters", "lora", "--seeds", "2")
    assert "lora-seed42: kept" in said and len(calls) == 3 and len(found(tmp_path / "c")["runs"]) == 2


def test_a_run_that_fails_is_a_row_and_the_others_go_on(run, tmp_path) -> None:
    said = run(tmp_path / "c", "--adapters", "full@1e30,lora", "--seeds", "1")
    result = found(tmp_path / "c")
    assert list(result["failed"]) == ["full-seed42"] and "NaN or Inf" in result["failed"]["full-seed42"]
    assert result["winner"]["type"] == "lora" and "full-seed42 FAILED" in said
    assert "full-seed42 FAILED" in (tmp_path / "c" / "compare.md").read_text()
    said = run(tmp_path / "d", "--adapters", "full@1e30", "--seeds", "1", code=5)
    assert "full-seed42 failed" in said


def together(who: str, folder: str) -> None:
    """One run of a comparison whose training fails: on both ranks, or on the first alone."""
    from types import SimpleNamespace

    from accelerate import PartialState

    from finetune.core.errors import Problem, UserError
    from finetune.distributed import collectives

    def training(recipe, verbosity):
        if who == "all" or state.process_index == 0:
            raise UserError(Problem("gradients of step 1 are not finite"))
        state.wait_for_everyone()

    state = PartialState(cpu=True)
    collectives.AGREEMENT_SECONDS = 2
    collectives.failures()
    comparison.pipeline = SimpleNamespace(run=training)
    reason = comparison.run_one(comparison.ComparedRun(None, 1, None, RunFolder(Path(folder)), "x", {}))
    state.wait_for_everyone()
    print(f"went on: {reason}|", flush=True)


def test_of_several_processes_all_end_unless_all_failed_alike(tmp_path) -> None:
    said = two_ranks.run(together, "all", str(tmp_path))
    assert said.count("went on: gradients of step 1 are not finite|") == 2
    with pytest.raises(AssertionError, match="failed on process 0, but not on all processes") as raised:
        two_ranks.run(together, "one", str(tmp_path))
    assert "went on" not in str(raised.value)


def test_ranked_by_the_first_task_that_was_asked_for() -> None:
    def task(value: float, **more: bool) -> dict:
        return {"main": "acc", "tuned": {"acc": value}, "higher_is_better": {"acc": True}, **more}

    tasks = {"text": task(0.1, asked=True, forgetting=True), "mmlu_law": task(0.2, asked=False)}
    tasks |= {"mmlu": task(0.3, asked=True), "arith": task(0.4, asked=True)}
    assert comparison_report.main_metric({"tasks": tasks}) == ("mmlu acc", 0.3, True)
    assert comparison_report.main_metric({"tasks": {"older": task(0.5), **tasks}}) == ("older acc", 0.5, True)


def test_a_run_on_other_hardware_never_wins(done, run) -> None:
    winner = found(done)["winner"]["run"]
    folder = RunFolder(done / winner)
    environment = folder.read("environment.json")
    environment["hardware"] |= {"device": "cuda", "name": "NVIDIA H100"}
    folder.write("environment.json", environment)
    said = run(done, *AGAIN)
    result = found(done)
    (reason,) = result["not_comparable"][winner]
    assert reason.startswith("hardware: 1 x NVIDIA H100") and "and 1 x CPU" in reason
    assert f"{winner} is NOT COMPARABLE" in said and result["winner"]["run"] != winner
    assert result["types"][winner.partition("-")[0]]["runs"] == 1


@pytest.mark.parametrize("change", ["data", "versions", "base", "steps"])
def test_what_makes_runs_not_comparable(change, done, capsys) -> None:
    a, b = RunFolder(done / "lora-seed42"), RunFolder(done / "lora-seed43")
    assert comparability.obstacles(a, b) == []
    name, key = {
        "data": ("data_report.json", "train"),
        "versions": ("environment.json", "packages"),
        "base": ("eval.json", "base"),
        "steps": ("metrics.jsonl", ""),
    }[change]
    if change == "steps":
        lines = (b.path / name).read_text().splitlines()
        (b.path / name).write_text(lines[0] + "\n")
    else:
        content = b.read(name)
        new = {"data": {"sources": {"x": "0" * 64}}, "versions": {"torch": "1.0"}, "base": {"loss": 9.0}}
        content[key] |= new[change]
        b.write(name, content)
    (reason,) = comparability.obstacles(a, b)
    expected = {
        "data": "train files",
        "versions": "torch",
        "base": "base model: the weights differ",
        "steps": "steps",
    }
    assert reason.startswith(expected[change])
    assert main.main(["compare", str(a.path), str(b.path)]) == 0
    assert f"NOT COMPARABLE: {expected[change]}" in capsys.readouterr().out


def test_runs_whose_sources_have_other_weights_are_not_comparable(done) -> None:
    a, b = RunFolder(done / "lora-seed42"), RunFolder(done / "lora-seed43")
    for run, folder, weight in ((a, "x", 4.0), (b, "y", 1.0)):
        text = run.recipe.read_text()
        one = json.dumps([{"name": f"{folder}/a.jsonl", "weight": weight}, {"name": f"{folder}/b.jsonl"}])
        run.recipe.write_text(re.sub(r'(?m)^(data:\n(?: .*\n)*?)  name: "[^"]*"', rf"\1  name: {one}", text))
    assert [reason.partition(":")[0] for reason in comparability.obstacles(a, b)] == ["sources"]
    assert "data.name" in [row[0] for row in comparability.recipes(a, b).rows]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (["eval.generate=false"], "evaluation measures"),
        (["eval.max_new_tokens=1"], "evaluation max_new_tokens"),
        (["eval.tasks=[TASK]", "eval.limit=5"], "settings of sums"),
        ("another file", "evaluation data"),
    ],
)
def test_other_evaluation_of_one_run_is_not_compared(other, reason: str, done, tmp_path) -> None:
    task = write_task(tmp_path, "sums", QUESTIONS, CHOICE)
    a, b = RunFolder(done / "lora-seed42"), RunFolder(done / "ia3-seed42")

    def evaluate(run: RunFolder, *overrides: str) -> None:
        given = [override.replace("TASK", task) for override in overrides]
        assert main.main(["evaluate", str(run.path), "--quiet", *given]) == 0

    if "sums" in reason or reason.endswith("data"):
        evaluate(a, "eval.tasks=[TASK]", "eval.generate=false")
    if reason.endswith("data"):
        write_task(tmp_path, "sums", QUESTIONS[1:], CHOICE)
        evaluate(b, "eval.tasks=[TASK]", "eval.generate=false")
        for run in (a, b):  # which keeps the task's result, and what it was measured on
            evaluate(run, "eval.generate=false")
    else:
        evaluate(b, *other, *["eval.generate=false"] * ("sums" in reason))
    said = comparability.obstacles(a, b)
    assert any(one.startswith(reason) for one in said), said


def test_tables_of_a_comparison_fit_80_and_120_columns(done, capsys) -> None:
    recipes = {row["run"]: load_recipe(QUICKSTART) for row in found(done)["runs"]}
    tables.assert_tables_fit(lambda: comparison_report.show(done, found(done), recipes, Console()))
    assert_commands_run(capsys.readouterr().out)
    lora, ia3 = (str(done / name) for name in ("lora-seed42", "ia3-seed42"))
    tables.assert_tables_fit(lambda: run_diff.run(lora, ia3, Console()))


def test_two_runs_that_differ(done, capsys) -> None:
    a, b = str(done / "lora-seed42"), str(done / "lora-seed43")
    assert main.main(["compare", a, b, "--assert-equal"]) == 4
    said = capsys.readouterr()
    assert "train.seed  42  (override)  43  (override)" in " ".join(said.out.split(" ")).replace("   ", "  ")
    assert "2 of 2 steps differ, first step 1" in said.out
    last = said.out.rstrip().splitlines()[-1]
    assert last.startswith("The runs differ in: losses, weights, evaluation (2 of 2 steps differ")
    assert " Different: recipe" in last
    assert said.err.startswith("error: the losses of the runs differ")
    assert main.main(["compare", a, b]) == 0


# huggingface_hub hands httpx its LFS parts as `data` (2.4, lfs.py, _upload_single_part)
@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
def test_runs_on_the_hub(hub, trained, tmp_path, monkeypatch, capsys) -> None:
    """RUN_A as well as RUN_B."""
    folder = trained()
    assert main.main(["publish", str(folder.path), "--repo", "me/notes", "--quiet"]) == 0
    pinned = f"me/notes@{folder.read('publish.json')['commit']}"
    monkeypatch.chdir(tmp_path)
    assert main.main(["compare", pinned, pinned, "--assert-equal"]) == 0, capsys.readouterr().err
    assert "evaluation of the runs are equal, bit for bit" in capsys.readouterr().out
    assert main.main(["compare", "me/notes@" + "0" * 40, pinned]) == 3
    assert "no such repository or revision" in capsys.readouterr().err


def test_one_changed_number_is_found(done, capsys) -> None:
    from safetensors.torch import load_file, save_file

    a, b = done / "lora-seed42", done / "same"
    shutil.copytree(a, b)
    assert main.main(["compare", str(a), str(b), "--assert-equal"]) == 0
    assert "evaluation of the runs are equal, bit for bit" in capsys.readouterr().out
    path = b / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[5] += 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    (b / "weights.json").unlink()
    assert main.main(["compare", str(a), str(b), "--assert-equal"]) == 4
    said = capsys.readouterr().err
    assert (
        "1 of 28 tensors differ, by at most 0.25" in said
        and name in said
        and "the losses of the runs" not in said
    )


@pytest.mark.soak
def test_a_budget_gives_each_type_the_same_time(run, short, tmp_path, monkeypatch) -> None:
    """The steps are measured with a large budget; then a comparison of few steps goes by such a plan."""
    monkeypatch.setattr(comparison, "PILOT_STEPS", 4)
    monkeypatch.setattr(comparison, "PILOT_TIMED", 2)
    place = tmp_path / "c"
    asked = comparison.ComparisonRequest(
        str(QUICKSTART), [*short, "publish.repo=null"], ["lora", "dora"], 1, 900.0, place
    )
    jobs = comparison.plan(asked)
    kept_runs.make_folder(place, "compare")
    screen = console.Console(quiet=True)
    planned = comparison.measure(900.0, jobs, asked, screen)
    times = {kind: n * planned["step_seconds"][kind] for kind, n in planned["steps"].items()}
    assert times["lora"] == pytest.approx(times["dora"], rel=0.05) and 300 < times["lora"] < 450
    assert [path.name for path in place.iterdir()] == []
    jobs = comparison.plan(asked._replace(adapters=["lora"]))
    kept = {"budget_seconds": 900.0, "runs": [job.identity for job in jobs]}
    content = planned | kept | {"steps": {"lora": 4}}
    signed = verified_files.signed(content)
    (place / "budget.json").write_text(signed.replace('"lora": 4', '"lora": 9'))  # a flipped byte
    changed = comparison.plan(asked._replace(adapters=["lora"]))
    measured = list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "measure", lambda *_: measured.append("again") or content)
        comparison.within(900.0, changed, asked._replace(adapters=["lora"]), screen)
    assert measured == ["again"]
    (place / "budget.json").write_text(signed)
    said = run(place, "--adapters", "lora", "--seeds", "1", "--budget", "15m")
    lines = metrics(RunFolder(place / "lora-seed42"))
    assert len(lines) == 4 and lines[-1]["learning_rate"] < 0.7 * lines[0]["learning_rate"]
    assert "timing" not in said, "what was measured is kept"


def test_a_type_whose_timing_failed_is_timed_anew(tmp_path, monkeypatch) -> None:
    """It has the time of the others, whose steps stay; those are not timed again."""
    timed, fails = list[str](), True

    def run_one(job: comparison.ComparedRun) -> str:
        timed.append(job.entrant.type)
        if fails and job.entrant.type == "ia3":
            return "out of memory"
        job.folder.path.mkdir()
        line = {"loss": 1, "step_seconds": 0.5 if job.entrant.type == "lora" else 1.0}
        text = "".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 9))
        job.folder.write_text("metrics.jsonl", text)
        job.folder.write(comparison_report.MARK, {"identity": "", "seconds": 10.0})
        return ""

    monkeypatch.setattr(comparison, "run_one", run_one)
    asked = comparison.ComparisonRequest(str(QUICKSTART), [], ["lora", "ia3"], 1, 600.0, tmp_path)
    jobs, screen = comparison.plan(asked), console.Console(quiet=True)
    runs, failed = comparison.within(600.0, jobs, asked, screen)
    assert failed == {"ia3-seed42": "out of memory"} and timed == ["lora", "ia3"]
    fails = False
    again, failed = comparison.within(600.0, jobs, asked, screen)
    assert failed == {} and timed == ["lora", "ia3", "ia3"] and again[0].identity == runs[0].identity
    steps = [job.recipe.train.max_steps or 0 for job in again]
    assert steps[1] == steps[0] // 2 > 500
    assert comparison.within(600.0, jobs, asked, screen)[1] == {} and len(timed) == 3


def test_evaluations_on_top_of_a_budget_are_said_beforehand(short, tmp_path, capsys) -> None:
    for every, budget, said in ((1, 900.0, True), (1, None, False), (None, 900.0, False)):
        given = [*short, f"eval.eval_steps={every}" if every else "eval.eval_steps=null"]
        asked = comparison.ComparisonRequest(str(QUICKSTART), given, ["lora"], 1, budget, tmp_path)
        comparison.introduce(comparison.plan(asked), asked, console.Console())
        assert ("--budget counts only the final evaluation" in capsys.readouterr().out) == said


def test_a_budget_that_is_too_short(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "PILOT_STEPS", 2)
    said = run(tmp_path / "c", "--adapters", "lora", "--seeds", "1", "--budget", "1s", code=2)
    assert "too small for 1 runs of 10 steps" in said and "m or more" in said


def test_warm_up_fits_the_steps() -> None:
    recipe = load_recipe(QUICKSTART)  # 12 steps of warm-up
    assert comparison.limit(recipe, 50) == ["train.max_steps=50", "train.warmup_steps=5"]
    assert comparison.limit(recipe, 200) == ["train.max_steps=200"]


def test_rates_keep_their_place_in_the_usual_range() -> None:
    recipe = load_recipe(QUICKSTART)
    entrants = {
        e.type: e for e in comparison.enter(recipe, ["lora", "qlora", "ia3", "full", "oft", "dora@0.1"])
    }
    rates = {kind: entrant.rate for kind, entrant in entrants.items()}
    assert rates == {"lora": 4e-3, "qlora": 4e-3, "ia3": 0.054, "full": 4e-4, "oft": 4e-3, "dora": 0.1}
    assert "no usual range" in entrants["oft"].why and entrants["dora"].why == "--adapters"


def test_mistakes_are_said_before_anything_is_trained(done, tmp_path, capsys) -> None:
    runs = [str(done / "lora-seed42"), str(done / "lora-seed43")]
    recipe = str(QUICKSTART)
    for command, expected in (
        ([recipe], "--adapters lora,dora,ia3"),
        ([recipe, "--adapters", "lora", "--assert-equal"], "--assert-equal needs two run folders"),
        ([recipe, "--adapters", "lara,lora,lora,ia3@x"], "help:      lora"),
        ([recipe, "--adapters", "lora,lora"], "names an adapter type twice"),
        ([recipe, "--adapters", "lora, lora "], "names an adapter type twice"),
        ([recipe, "--adapters", "ia3@x"], "help:      ia3@1e-3"),
        ([recipe, "--adapters", "lora,full", "model.quantization=nf4"], "full"),
        ([recipe, "--adapters", "lora", "--output", runs[0]], "found:     a run folder"),
        ([recipe, runs[0], "--adapters", "lora"], "not an override"),
        ([runs[0]], "help:      finetune compare RUN_A RUN_B"),
        ([*runs, "--adapters", "lora"], "--adapters can't be used to compare two runs"),
        ([runs[0], str(tmp_path)], "not a finished run"),
        (["nowhere.yaml", "--adapters", "lora"], "nowhere.yaml"),
    ):
        assert main.main(["compare", *command]) == 2, command
        assert expected in capsys.readouterr().err, command
    for budget in ("soon", "0m", "30"):
        assert main.main(["compare", recipe, "--adapters", "lora", "--budget", budget]) == 2


def test_what_two_gpus_say_of_one_failure_is_one_reason() -> None:
    """The memory that each had is another; the row of the table has rank 0's."""
    one, other = (UserError(Problem("out of memory", "train", found=f"{held} GiB")) for held in (75.1, 76.9))
    assert comparison.kind(one) == comparison.kind(other) and comparison.why(one) != comparison.why(other)
    assert comparison.kind(one) != comparison.kind(UserError(Problem("not finite", "train")))
    assert comparison.kind(RuntimeError("GPU 1")) == comparison.kind(RuntimeError("GPU 0")) == "RuntimeError"
