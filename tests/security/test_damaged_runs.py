"""Damaged and hostile run folders: a command ends with finetune's own error, and writes nothing outside."""

import contextlib
import functools
import io
import json
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.checkpointing import checkpoints, training_state
from finetune.cli import main
from finetune.core import safe_files, verified_files
from finetune.core.errors import UserError
from finetune.evaluation import reopen
from finetune.experiments.comparison import comparison_report
from finetune.experiments.runner import measured_run
from finetune.hub import client
from finetune.recipe import adapter_types
from finetune.run_folder.run_folder import RunFolder
from support import damaged_runs
from support.paths import MODEL
from support.soak import soak_except

SEEDS, BLOCK = 5000, 2  # damages in `make soak`, and of one test
SECONDS = 120  # for one command on a busy machine; a hang is endless
MADE: dict[str, Path] = {}
MERGED = {
    "path": "merged",
    "dtype": "bfloat16",
    "quantized": None,
    "rows": {"from": "held-out", "rows": 6, "tokens": 300},
    "scores": {"tuned": {"loss": 1.5, "exact_match": 0.0}, "merged": {"loss": 1.5, "exact_match": None}},
    "against_tuned": {"largest": 0.1, "scale": 9.0, "kl": 0.01, "relative": 0.1, "same_top": 0.9},
    "bytes": 1000,
    "seconds": 1.5,
}


@pytest.fixture
def whole(trained, tmp_path_factory) -> Path:
    """A finished run with merged weights, which no test changes."""
    if "whole" not in MADE:
        run = shutil.copytree(trained().path, tmp_path_factory.mktemp("whole") / "run")
        shutil.copytree(MODEL, run / "merged")
        RunFolder(run).write("merge.json", {"merged": MERGED})
        shutil.copy(run / "eval.json", run / "eval.other.json")
        MADE["whole"] = run
    return MADE["whole"]


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Interrupt what hangs, in a system call too."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(words: list[str]) -> int:
    """The exit code of a command; an exception that is no UserError is raised."""
    options = main.parse(words)
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries that read odd values
            options.command(options)
    except UserError as error:
        assert all(problem.what for problem in error.problems)
        return error.code
    return 0


def damaged(whole: Path, place: Path, seed: int) -> tuple[Path, Path, str]:
    """A copy of the run with one damage, a folder beside it, and what was damaged."""
    place.mkdir()
    run, outside = damaged_runs.copied(whole, place / "run"), place / "outside"
    outside.mkdir()
    return run, outside, damaged_runs.damage(run, seed, outside)


def hold(words: Callable[[Path], list[str]], whole: Path, place: Path, seed: int) -> None:
    """One command on one damaged run."""
    run, outside, what = damaged(whole, place, seed)
    before = damaged_runs.content_of(outside)
    try:
        code = answer(words(run))
    except Exception as error:  # any other exception is a traceback for the user
        raise AssertionError(f"{words(run)[0]} after {what}") from error
    assert code in (0, 2, 3, 4), what
    assert damaged_runs.content_of(outside) == before, what
    shutil.rmtree(place)


@pytest.mark.parametrize("block", soak_except([0, 7], range(SEEDS // BLOCK)))
def test_commands_on_damaged_runs_end_without_a_traceback(block: int, whole, tmp_path, capsys) -> None:
    commands: list[Callable[[Path], list[str]]] = [
        lambda run: ["report", str(run)],
        lambda run: ["compare", str(run), str(whole)],
        lambda run: ["publish", str(run), "--dry-run"],
        lambda run: ["publish", str(run), "--dry-run", "--merged"],
    ]
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        for number, words in enumerate(commands):
            hold(words, whole, tmp_path / f"{seed}-{number}", seed)


@pytest.mark.parametrize("seed", soak_except([3], range(300)))
@pytest.mark.parametrize("command", soak_except(["evaluate"], ["evaluate", "merge", "chat"]))
def test_commands_that_open_weights_of_damaged_runs_end_without_a_traceback(
    command: str, seed: int, whole, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    elsewhere = ["--output", str(tmp_path / "made")] if command == "merge" else []
    hold(lambda run: [command, str(run), *elsewhere], whole, tmp_path / "one", seed)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each key. Of the items of a list, only the first and the last count."""
    keys = list(value) if isinstance(value, dict) else sorted({0, len(value) - 1}) if value else []
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from places_of(value[key], (*path, key))


VALUES: list[Any] = [..., None, "x", {}, []]  # `...` deletes the key
FILES = ["eval.json", "merge.json", "environment.json", "checks.json", "data_report.json"]
ADAPTER = ["adapter/adapter_config.json", "merged/config.json", "adapter/tokenizer_config.json"]


@pytest.mark.parametrize("value", soak_except([...], VALUES), ids=str)
@pytest.mark.parametrize("name", soak_except(["merge.json"], [*FILES, *ADAPTER]))
def test_run_with_any_value_deleted_or_of_another_type_ends_without_a_traceback(
    name: str, value: Any, whole, tmp_path, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    text = (run / name).read_text()
    for path in places_of(json.loads(text)):
        content = json.loads(text)
        *above, key = path
        owner = functools.reduce(lambda held, one: held[one], above, content)
        if value is ...:
            del owner[key]
        else:
            owner[key] = value
        (run / name).write_text(json.dumps(content))
        for words in (["report"], ["publish", "--dry-run"], ["publish", "--dry-run", "--merged"]):
            try:
                assert answer([words[0], str(run), *words[1:]]) in (0, 2, 3, 4)
            except Exception as error:  # any other exception is a traceback for the user
                raise AssertionError(f"{words} with {name}: {path} = {value!r}") from error


@pytest.mark.parametrize(("command", "key"), [("publish", "answers"), ("report", "content")])
def test_command_on_an_evaluation_without_a_key_that_it_shows_ends_without_a_traceback(
    command: str, key: str, whole, tmp_path, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    content = json.loads((run / "eval.json").read_text())
    content["settings"]["stops"].pop(key, None)
    content["samples"][0]["prompt"] = [{"role": "user", "content": "a"}]
    content["samples"][0]["prompt"][0].pop(key, None)
    (run / "eval.json").write_text(json.dumps(content))
    assert answer([command, str(run), *(["--dry-run"] if command == "publish" else [])]) in (0, 4)


def test_report_of_a_run_with_a_damaged_file_lists_it_as_missing(whole, tmp_path, capsys) -> None:
    """Each JSON file in turn; the page has the other files' content."""
    for name in ("environment.json", "data_report.json", "checks.json", "eval.json", "metrics.jsonl"):
        run = damaged_runs.copied(whole, tmp_path / name)
        (run / name).write_text('[{"a": {"b": null}}, 1]')
        assert answer(["report", str(run)]) == 0
        page = (run / "report.html").read_text()
        part = page[page.index("Missing files") :].split("</ul>")[0]
        assert name in part, name


@pytest.mark.parametrize("name", ["eval.json", "eval.other.json"])
def test_evaluate_with_a_damaged_earlier_result_ends_before_a_model_is_loaded(
    name: str, whole, tmp_path, monkeypatch, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**content, "tasks": {"a": {"base": "no scores"}}}))
    monkeypatch.setattr("finetune.models.loading.load", lambda *_: pytest.fail("a model was loaded"))
    assert main.main(["evaluate", str(run)]) == 4
    assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x08" + b"\0" * 7 + b"[1, 2, 3", b"\xff" * 8])
def test_compare_and_publish_of_damaged_weights_end_without_a_traceback(
    content: bytes, whole, tmp_path, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    (run / "adapter" / "adapter_model.safetensors").unlink()  # a hard link of `whole`
    (run / "adapter" / "adapter_model.safetensors").write_bytes(content)
    assert answer(["compare", str(whole), str(run)]) == 4
    assert answer(["publish", str(run), "--dry-run"]) == 2


@pytest.mark.parametrize("command", [["evaluate"], ["merge"], ["export", "--to", "vllm"]])
def test_flipped_key_of_the_adapters_config_is_refused(command: list[str], whole, tmp_path, capsys) -> None:
    """PEFT would take the default of the key that is missing."""
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    path = run / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha"', '"lora_alphq"'))
    output = [] if command == ["evaluate"] else ["--output", str(tmp_path / "out")]
    assert main.main([command[0], str(run), *command[1:], *output]) == 4
    shown = capsys.readouterr().err
    assert "PEFT does not know a key" in shown and "lora_alphq" in shown


REFUSED = sorted({kind.peft for kind in adapter_types.all_types().values() if kind.refused})


@pytest.mark.parametrize("kind", [*REFUSED, "unknown"])
def test_adapter_of_a_type_that_no_recipe_can_have_is_refused(kind: str, whole, tmp_path, capsys) -> None:
    """PEFT loads the model that an adapter of the type `shadow` names, with any code and any pickle."""
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    path = run / "adapter" / "adapter_config.json"
    config = {**json.loads(path.read_text()), "peft_type": kind.upper(), "shadow_model": str(tmp_path)}
    path.write_text(json.dumps(config))
    for command in (["evaluate"], ["merge", "--output", "out"], ["export", "--to", "vllm", "--output", "o"]):
        assert main.main([command[0], str(run), *command[1:]]) == 2
        assert "does not read this type of adapter" in capsys.readouterr().err


SIZES = [
    {"r": 20_000},
    {"rank_pattern": {"q_proj": 10**8}},
    {"rank_pattern": {"(q_proj|alpha)": 10**8}},
    {"init_lora_weights": "pissa_niter_999999999"},
    {"loftq_config": {"loftq_iter": 10**9}},
    {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**8},
    {"peft_type": "P_TUNING", "encoder_num_layers": 10**6},
    {"peft_type": "VBLORA", "num_vectors": 10**8},
    {"peft_type": "UNILORA", "theta_d_length": 10**10},
    {"peft_type": "PEANUT", "depth": 10**7},
    {"peft_type": "PSOFT", "psoft_svd_lowrank_niter": 10**9},
]


@pytest.mark.parametrize("values", SIZES, ids=str)
@pytest.mark.parametrize("command", [["evaluate"], ["merge", "--output", "out"]])
def test_adapter_with_sizes_that_its_weights_do_not_have_is_refused(
    command: list[str], values: dict[str, Any], whole, tmp_path, capsys
) -> None:
    """PEFT builds an adapter of these sizes before it reads the weights."""
    run = shutil.copytree(whole, tmp_path / "run", symlinks=True)
    path = run / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reopen, "open_base", lambda *_: pytest.fail("the base model is loaded"))
        assert main.main([command[0], str(run), *command[1:]]) == 2
    assert "sizes that do not fit its weights" in capsys.readouterr().err


def test_compare_of_weights_of_any_dtype_ends_without_a_traceback(whole, tmp_path, capsys) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    weights = run / "adapter" / "adapter_model.safetensors"
    weights.unlink()  # a hard link of `whole`
    bits = {
        "F4": 4,
        "U8": 8,
        "BOOL": 8,
        "F8_E8M0": 8,
        "F8_E4M3": 8,
        "BF16": 16,
        "U16": 16,
        "U64": 64,
        "C64": 64,
    }
    for dtype, size in bits.items():
        spec = {"dtype": dtype, "shape": [2], "data_offsets": [0, size // 4]}
        header = json.dumps({"base_model.model.a.lora_A.weight": spec}).encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * (size // 4))
        assert answer(["compare", str(run), str(run)]) == 0, dtype
        assert "all 1 tensors are equal" in capsys.readouterr().out, dtype


@pytest.mark.parametrize("command", ["compare", "publish"])
def test_metrics_whose_numbers_are_text_are_refused(command: str, whole, tmp_path, capsys) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"step": 1,', '"step": "1",'))
    assert (run / "metrics.jsonl").read_text() != text
    assert answer([command, str(run), *([str(whole)] if command == "compare" else ["--dry-run"])]) == 4


def test_compare_shows_a_part_of_a_long_list(whole, tmp_path, capsys) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    content = json.loads((run / "data_report.json").read_text())
    content["train"]["sources"] = {str(number): str(number) for number in range(5000)}
    (run / "data_report.json").write_text(json.dumps(content))
    assert answer(["compare", str(whole), str(run)]) == 0
    shown = capsys.readouterr().out
    assert "4,992 more" in shown and len(shown) < 10_000


@pytest.mark.parametrize("value", [[1, 2], "text", 5, {"sources": 5}])
def test_compare_and_publish_of_a_report_with_another_part_refuse_it(
    value: Any, whole, tmp_path, capsys
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    content = json.loads((run / "data_report.json").read_text())
    (run / "data_report.json").write_text(json.dumps({**content, "another": value}))
    for words in (["compare", str(run), str(whole)], ["publish", str(run), "--dry-run", "--repo", "a/b"]):
        assert main.main(words) == 4
        assert "data_report.json" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["counts", "edges", "percentiles"])
def test_report_of_numbers_that_are_too_large_to_calculate_with_lists_their_file(
    key: str, whole, tmp_path, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    content = json.loads((run / "data_report.json").read_text())
    content["train"]["lengths"][key][-1] = 1e308
    (run / "data_report.json").write_text(json.dumps(content))
    assert answer(["report", str(run)]) == 0
    assert "data_report.json" in (run / "report.html").read_text().partition("Missing files")[2]


@pytest.mark.parametrize("name", ["checks.json", "environment.json", "data_report.json", "export.json"])
def test_report_of_a_run_with_a_file_that_is_too_large_lists_it(name: str, whole, tmp_path, capsys) -> None:
    """A page of millions of run checks would take minutes."""
    run = damaged_runs.copied(whole, tmp_path / "run")
    with (run / name).open("a+") as file:
        file.truncate(2**25)
    assert answer(["report", str(run)]) == 0
    missing = (run / "report.html").read_text().partition("Missing files")[2]
    assert f"finetune can&#39;t read {name} (the file is too large" in missing


@pytest.mark.parametrize("source", ["~nobody-of-this-name/a.jsonl", "~/a.jsonl", "x" * 5000])
def test_publish_of_an_evaluation_that_names_an_odd_file_ends_without_a_traceback(
    source: str, whole, tmp_path, capsys
) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    content = json.loads((run / "eval.json").read_text())
    content["sources"] = [{"source": source, "rows": 1}]
    (run / "eval.json").write_text(json.dumps(content))
    assert answer(["publish", str(run), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("words", "name"), [(["merge"], "merge.json"), (["export", "--to", "vllm"], "export.json")], ids=str
)
def test_command_with_a_damaged_report_ends_before_a_model_is_loaded(
    words: list[str], name: str, trained, monkeypatch, capsys
) -> None:
    run = trained()
    (run.path / name).write_text("[1]")
    monkeypatch.setattr("finetune.models.loading.load", lambda *_: pytest.fail("a model was loaded"))
    assert main.main([words[0], str(run.path), *words[1:]]) == 4
    assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adapter/tokenizer.json", "merged/tokenizer_config.json"])
def test_publish_of_a_huge_file_is_refused_before_it_is_read(name: str, whole, tmp_path, capsys) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    with (run / name).open("r+b") as file:
        file.truncate(safe_files.LARGEST + 1)  # sparse
    merged = ["--merged"] if name.startswith("merged") else []
    assert main.main(["publish", str(run), "--dry-run", *merged]) == 2
    assert "too large" in capsys.readouterr().err


def test_read_of_an_object_with_a_key_twice_is_refused(whole, tmp_path) -> None:
    run = damaged_runs.copied(whole, tmp_path / "run")
    text = (run / "environment.json").read_text()
    (run / "environment.json").write_text(text.rstrip().removesuffix("}") + ', "git": {"commit": "other"}}')
    with pytest.raises(UserError, match="a key twice"):
        RunFolder(run).read("environment.json")


@pytest.mark.parametrize("block", soak_except([0], range(40)))
def test_figures_of_damaged_runs_of_an_experiment_are_refused(block: int, whole, tmp_path) -> None:
    """What `ablate`, `sweep` and `compare` calculate of runs that an earlier start left."""
    run = damaged_runs.copied(whole, tmp_path / "ia3-seed42")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps if "loss" in one))
    for name in (measured_run.MARK, comparison_report.MARK):
        RunFolder(run).write(name, {"identity": "a", "seconds": 1.5, "failed": "", "date": "2026-01-02"})
    assert measured_run.figures(run, 0)["losses"] and comparison_report.row(RunFolder(run))["loss"]
    names = [
        "metrics.jsonl",
        "eval.json",
        "environment.json",
        "data_report.json",
        "ablate.json",
        "compare.json",
    ]
    for seed in range(block * 50, (block + 1) * 50):
        chance = random.Random(seed)
        file = run / chance.choice(names)
        before = file.read_bytes()
        damage = chance.choice([damaged_runs.change_value, damaged_runs.change_bytes])
        what = damage(file, run, chance, tmp_path)
        for calculate in (
            lambda: measured_run.figures(run, 0),
            lambda: comparison_report.row(RunFolder(run)),
        ):
            try:
                calculate()
            except UserError as error:
                assert error.code in (2, 4), (what, str(error))
            except Exception as error:  # any other exception is a traceback for the user
                raise AssertionError(f"seed {seed}: {file.name}: {what}") from error
        file.write_bytes(before)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"dict":' * 100_000, "5", "null", "[]", '{"ranks": []}', "\0", "NaN"]
)
def test_checkpoint_whose_state_is_none_is_refused(text: str, tmp_path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UserError, match="can't restore the checkpoint") as raised:
        training_state.structure(tmp_path)
    assert raised.value.code == 4


STATES = [False, None, [1, 2], {"state": 5}, {"state": {"0": 5}}, {"param_groups": 5}, {"param_groups": []}]
STATES += [{"state": {"7": {"step": torch.ones(1)}}}]


@pytest.mark.parametrize("saved", STATES, ids=str)
def test_checkpoint_with_an_odd_state_of_the_optimizer_is_refused(saved: Any) -> None:
    """The structure is JSON, so it can hold any value."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    trainer: Any = SimpleNamespace(optimizer=optimizer, resumed={"path": Path("step-3"), "optimizer": saved})
    with pytest.raises(UserError, match="can't restore the checkpoint") as raised:
        training_state.put_back(trainer, "optimizer")
    assert raised.value.code == 4


def changed_checkpoint(source: Path, folder: Path, name: str, place: tuple[Any, ...], value: Any) -> Path:
    """A copy of a stopped run, with one value of a JSON file of its checkpoint changed and signed again."""
    shutil.copytree(source, folder)
    (path,) = checkpoints.published(folder / "checkpoints")
    content = json.loads((path / name).read_text())
    *holders, last = place
    holder = functools.reduce(
        lambda part, key: dict(part["dict"])[key] if "dict" in part else part[key], holders, content
    )
    if "dict" in holder:
        holder["dict"] = [[key, value if key == last else part] for key, part in holder["dict"]]
    else:
        holder[last] = value
    (path / name).write_text(json.dumps(content))
    manifest = verified_files.read_signed(path / checkpoints.MANIFEST)
    size = (path / name).stat().st_size
    manifest["files"][name] = {"bytes": size, "sha256": client.sha256(path / name)}
    (path / checkpoints.MANIFEST).write_text(verified_files.signed(manifest))
    return folder


PLACES = [
    *[("trainer_state.json", (key,)) for key in ("epoch", "global_step", "train_batch_size", "total_flos")],
    *[("state.json", ("ranks", 0, "log", key)) for key in ("step", "metrics")],
    *[("state.json", ("callbacks", "Validate", key)) for key in ("best", "weights")],
    *[("state.json", ("optimizer", "param_groups", 0, key)) for key in ("lr", "params")],
    ("state.json", ("scheduler", "last_epoch")),
]


def test_resume_of_a_checkpoint_with_a_value_of_another_type_is_refused(train, tmp_path, capsys) -> None:
    options = ["train.max_steps=4", "train.effective_batch_size=2", "eval.eval_steps=1", "eval.samples=0"]
    stopped = train(*options, "--until=2", code=75).path
    for number, (name, place) in enumerate(PLACES):
        run = changed_checkpoint(stopped, tmp_path / str(number), name, place, "text")
        train(*options, "--resume", name=run.name, code=4)
        said = capsys.readouterr().err
        assert "[checkpoint]" in said and "-error]" not in said, (place, said)
        shutil.rmtree(run)
