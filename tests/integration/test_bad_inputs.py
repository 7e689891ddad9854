"""The table of bad inputs, by its numbers: what a user gets for each way to get it wrong.

Exit code, place (file:line:col), the words that say what to do, and the time it takes to hear of it. Rows of
a recipe are answered without torch in under a second, those of the data before any weight is loaded.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from finetune.checkpointing import checkpoints, training_state
from finetune.cli import main
from finetune.data import template_sandbox
from finetune.run_folder import lock
from support.paths import DATA, MODEL, ROOT
from support.recipe_texts import ANSWER, CHAT, GOOD_ROW, LINEAR, RECIPE, USER, rows

NUMBERS = {*range(1, 6), *range(7, 14), *range(15, 23), *range(25, 33), *range(34, 37), *range(39, 49)}
NUMBERS |= {*range(50, 57), 58, 60, 61, 62} - {6, 14, 23, 24, 33}
CHANGED_ROW = GOOD_ROW.replace('"a"', f'"{"word " * 300}"')
QUIETLY = GOOD_ROW.replace('"b"', '"b", "train": false')
CHATML = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class World:
    """What a row may change before its command is given."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder, self.request = folder, request
        self.run = folder / "run"

    def fixture(self, name: str) -> Any:
        return self.request.getfixturevalue(name)

    def model(self, file: str = "", content: str = "", **config: Any) -> list[str]:
        """A copy of the embedded model, with one more file, or with a changed config."""
        folder = self.folder / "model"
        if not folder.exists():
            shutil.copytree(MODEL, folder)
        if file:
            (folder / file).write_text(content)
        if config:
            said = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(said | config))
        return [f"model.name={folder}"]


class Row(NamedTuple):
    number: int
    says: tuple[str, ...]
    old: str = ""
    """What of RECIPE is replaced by `new`."""
    new: str = ""
    data: bytes | None = None
    """The rows, in rows.jsonl."""
    make: Callable[[World], list[str]] | None = None
    """Sets up more; what it returns is added to the command."""
    command: str = "check"
    code: int = 2
    seconds: float = 1.0


def of_data(number: int, content: bytes, *says: str, **more: Any) -> Row:
    """Rows that a run refuses."""
    given = {"make": World.model, "command": "train", "seconds": 20.0, **more}
    return Row(number, says, '"{data}"', "rows.jsonl\n  max_length: 64", content, **given)


def of_run(number: int, make: Callable[[World], list[str]], code: int, *says: str) -> Row:
    return Row(number, says, make=make, command="train", code=code, seconds=20.0)


def without_template(world: World) -> list[str]:
    named = world.model()
    (world.folder / "model" / "chat_template.jinja").unlink()
    return named


def with_bos(world: World) -> list[str]:
    """A tokenizer that begins each text with a special token."""
    named, start = world.model(), "<|im_start|>"
    path = world.folder / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    (number,) = (token["id"] for token in content["added_tokens"] if token["content"] == start)
    single = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {start: {"id": start, "ids": [number], "tokens": [start]}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special
    }  # fmt: skip
    path.write_text(json.dumps(content))
    path = world.folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": start}))
    return named


def no_bitsandbytes(world: World) -> list[str]:
    world.fixture("monkeypatch").setitem(sys.modules, "bitsandbytes", None)
    return ["adapter.type=qlora"]


def old_kernels(world: World) -> list[str]:
    """A version of `kernels` that the installed transformers does not take."""
    place = world.folder / "site"
    (place / "kernels").mkdir(parents=True)
    (place / "kernels" / "__init__.py").touch()
    (place / "kernels-0.0.1.dist-info").mkdir()
    (place / "kernels-0.0.1.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.0.1\n")
    world.fixture("monkeypatch").syspath_prepend(place)
    return []


def on_the_hub(world: World, answer: int, **headers: str) -> list[str]:
    world.fixture("hub").fail("/org/gated/", answer, times=99, **headers)
    return ["model.name=org/gated"]


def public_there(world: World) -> list[str]:
    world.fixture("hub").add("me/open", private=False)
    return ["publish.repo=me/open"]


def pickled(world: World) -> list[str]:
    given = world.model("pytorch_model.bin", "weights")
    (world.folder / "model" / "model.safetensors").unlink()
    return given


def code_of_its_own(world: World) -> list[str]:
    return world.model(model_type="evil", auto_map={"AutoConfig": "configuration_evil.Evil"})


def another_run_s_folder(world: World) -> list[str]:
    world.run.mkdir()
    (world.run / "weights.safetensors").write_text("mine")
    return []


def a_live_run_s_folder(world: World) -> list[str]:
    held, told = os.pipe()
    child = os.fork()
    if not child:
        with lock.claimed(str(world.run), "run"):
            os.write(told, b"1")
            signal.pause()
    os.read(held, 1)

    def end() -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    world.request.addfinalizer(end)
    return []


def below_a_file(world: World) -> list[str]:
    (world.folder / "file").touch()
    return [f"train.output_dir={world.folder / 'file' / 'run'}"]


def resumed(world: World, *given: str, damage: bool = False) -> list[str]:
    """A copy of a run with checkpoints of its first two steps."""
    shutil.copytree(world.fixture("stopped"), world.folder / "stopped")
    if damage:
        path = world.folder / "stopped" / "checkpoints" / "step-2" / "trained.safetensors"
        path = path if path.exists() else next(path.parent.glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-8])
    return [*STOPPED, f"train.output_dir={world.folder / 'stopped'}", *given]


def damaged_newest(world: World) -> list[str]:
    return resumed(world, "--resume", "--until=2", damage=True)


def damaged_named(world: World) -> list[str]:
    return resumed(world, "--resume=step-2", damage=True)


def another_recipe(world: World) -> list[str]:
    return resumed(world, "--resume", "adapter.r=4")


def adalora(world: World, tinit: int, tfinal: int) -> list[str]:
    return ["adapter.type=adalora", f"adapter.tinit={tinit}", f"adapter.tfinal={tfinal}"]


def interrupted(world: World) -> list[str]:
    """Ctrl-C in the second step."""
    original, seen = training_state.digest, []

    def digest(so_far: Any, inputs: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(so_far, inputs)

    world.fixture("monkeypatch").setattr(training_state, "digest", digest)
    return STOPPED


STOPPED = [
    "train.max_steps=4",
    "train.warmup_steps=0",
    "train.effective_batch_size=2",
    "eval.forgetting=false",
]
STOPPED += ["train.save_steps=1"]
TABLE = [
    Row(1, (":9:3", "unknown key", "learning_rate"), "learning_rate:", "learning_rat:"),
    Row(2, (":11:3", "move it to `adapter:`"), "  max_steps: 4", "  max_steps: 4\n  lora_alpha: 4"),
    Row(3, (":7:3", "an integer", '"eight"'), "r: 8", "r: eight"),
    Row(4, ("fine:",), "learning_rate: 1e-4", "learning_rate: 1e-4", code=0),  # its value: test_strict_yaml
    Row(5, (":8:3", "the same key twice", ":7:3"), "  r: 8", "  r: 8\n  r: 16"),
    Row(7, (":7:6", "tags are not allowed"), "r: 8", "r: !!python/object/apply:os.system [exit]"),
    Row(8, ("aliases are not allowed",), "r: 8", "r: &a [1]\n  s: [*a, *a]"),
    Row(8, ("too large",), "r: 8", "r: " + "8" * 50_000_000),
    Row(9, (":7:3", "at least 1"), "r: 8", "r: 0"),
    Row(9, (":7:3", "less than 1"), "r: 8", "lora_dropout: 1.5"),
    Row(9, (":9:3", "at least 1"), "learning_rate: 1e-4", "effective_batch_size: 0"),
    Row(9, (":9:3", "at least 0"), "learning_rate: 1e-4", "learning_rate: -1e-4"),
    Row(10, (":5:3", "data.max_length", "at least 8"), '"{data}"', '"{data}"\n  max_length: 0'),
    Row(
        11, ("model.quantization", "adapter.type: lora"), "type: lora", "type: qlora",
        make=lambda _: ["model.quantization=fp8"],
    ),
    Row(11, ("adapter.use_dora", "use `adapter.type: dora`"), "type: lora", "type: ia3\n  use_dora: true"),
    Row(11, ("train.num_train_epochs", "remove `"), "max_steps: 4", "max_steps: 4\n  num_train_epochs: 1"),
    Row(12, (":7:28", '"v_porj"', LINEAR, "v_proj"), "r: 8", "target_modules: [q_proj, v_porj]"),
    Row(13, ('"wq"', '"wv"', LINEAR), "r: 8", "target_modules: [wq, wv]"),
    *(
        of_run(15, partial(adalora, tinit=tinit, tfinal=tfinal), 2, "adapter.tinit", "4 steps")
        for tinit, tfinal in ((2, 2), (0, 5), (6, 0))
    ),
    Row(16, (":4:3", "the file train.jsnl does not exist", str(ROOT)), '"{data}"', "train.jsnl"),
    Row(16, (":4:3", str(DATA / "train.jsonl")), '"{data}"', str(DATA / "tran.jsonl")),
    of_data(17, b"", "the data has no example", "rows.jsonl"),
    of_data(18, b"\n\n  \n", "the data has no example", "rows.jsonl"),
    of_data(19, rows(GOOD_ROW, "{'messages': 1}", GOOD_ROW), "rows.jsonl:2:2", "'messages'"),
    of_data(
        19, rows(*["{"] * 7, good=3), "rows.jsonl:1:1, :2:1", ":5:1", "7 of 10 examples", "can't be read",
        "unreadable: 0.7",
    ),
    of_data(20, f"{GOOD_ROW}\n{GOOD_ROW[:-30]}".encode(), "rows.jsonl:2:", "is cut off"),
    of_data(
        21, GOOD_ROW.encode() + b'\n{"prompt": "\xff"}', "rows.jsonl:2, byte", "not UTF-8", "Windows-1252"
    ),
    of_data(
        22, b"\xef\xbb\xbf" + f"{GOOD_ROW}\r\n{QUIETLY}\r\n".replace(', "train": false', "").encode(),
        "1 of 2 examples repeat", "2 of 2", command="data", code=0,
        make=lambda _: ["data.expect={duplicates: 1}"],
    ),
    of_data(25, rows('{"question": "a", "reply": "b"}'), "question, reply", "columns: {instruction: "),
    of_data(
        26, rows('{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'),
        "sharegpt", command="data", code=0,
    ),
    of_data(27, rows(GOOD_ROW.replace("assistant", "gpt")), "rows.jsonl:1, message 1", "gpt", "role_map"),
    of_data(28, rows(CHAT % f"{ANSWER}, {USER}"), "rows.jsonl:1", "not allowed in the", "assistant, user"),
    of_data(28, rows(CHAT % f"{USER}, {USER}, {ANSWER}"), "rows.jsonl:1", "user is not allowed after user"),
    of_data(29, rows(CHAT % USER, good=9), "rows.jsonl:1", "the last message is not from the assistant"),
    of_data(30, rows(GOOD_ROW.replace('"b"', "null")), "rows.jsonl:1, message 1", "must be a string", "None"),
    of_data(30, rows(GOOD_ROW.replace('"b"', "12")), "rows.jsonl:1, message 1", "must be a string", "12"),
    of_data(30, rows(GOOD_ROW.replace('"b"', '""')), "rows.jsonl:1, message 1", "`content` is empty"),
    of_data(30, rows('{"prompt": "a", "completion": 1}'), "rows.jsonl:1", "`completion` must be a string"),
    of_data(31, rows(GOOD_ROW), "no chat template", "chatml", "Jinja file", make=without_template),
    of_data(
        32, rows(GOOD_ROW), "neither marks the assistant's tokens nor renders turn by turn", "rows.jsonl:1",
        make=lambda world: world.model("chat_template.jinja", CHATML),
    ),
    of_data(34, rows(CHANGED_ROW, good=9), "1 of 10 examples", "rows.jsonl:1"),
    of_data(35, rows(CHANGED_ROW), "none of the 1 examples", "data.max_length: "),
    of_data(36, rows(QUIETLY, QUIETLY, good=2), "2 of 4 examples", "rows.jsonl:1, :2"),
    of_data(
        39, rows('{"text": "<|im_start|>one two"}', '{"text": "three four"}'), "second BOS", "rows.jsonl:1",
        command="data", code=0, make=with_bos,
    ),
    of_run(
        40, lambda _: ["model.quantization=fp8"], 3, "model.quantization", "compute capability 8.9", "CPU"
    ),
    *(
        of_run(41, lambda _, v=version: [f"model.attention=flash_attention_{v}"], 3,
               "model.attention", "NVIDIA GPU", "attention: auto")
        for version in (2, 3, 4)
    ),
    Row(
        42, ("kernels", "0.0.1", "disables all Hub kernels"), make=old_kernels, command="doctor",
        code=0, seconds=20.0,
    ),
    Row(43, ("bitsandbytes", "pip install"), make=no_bitsandbytes, code=3),
    Row(44, (":2:3", "the path ./nowhere/model does not exist"), '"{model}"', "./nowhere/model"),
    of_run(45, lambda _: ["model.name=org/absent"], 3, "config.json", "offline", "hf download"),
    of_run(46, partial(on_the_hub, answer=401), 3, "org/gated", "not know this token", "hf auth login"),
    of_run(46, partial(on_the_hub, answer=403, X_Error_Code="GatedRepo"), 3, "is gated", "/org/gated"),
    Row(47, ("pytorch_model.bin", "only in pickles", "safetensors", "convert"), make=pickled),
    of_run(48, code_of_its_own, 2, "model.name", "its own Python code"),
    of_run(50, another_run_s_folder, 2, "is not empty", "weights.safetensors", "overwrites no files"),
    of_run(51, a_live_run_s_folder, 2, "train.output_dir", "another run uses this folder", "process "),
    of_run(52, below_a_file, 3, "train.output_dir", "can't create the folder", "Not a directory"),
    of_run(53, damaged_newest, 75, "skips the damaged checkpoint step-2", ".safetensors has", "after step 2"),
    of_run(54, damaged_named, 4, "step-2", "the checkpoint is damaged", ".safetensors has"),
    of_run(55, another_recipe, 4, "adapter.r", "8", "4"),
    of_run(56, lambda _: ["--resume"], 2, "the run has no checkpoint to resume from", "--resume=auto"),
    Row(58, ("24 or 32",), "max_steps: 4", "effective_batch_size: 30\n  per_device_train_batch_size: 8"),
    Row(60, (":10:3", "HF_TOKEN", "****"), "max_steps: 4", "hub_token: hf_" + "a" * 30),
    Row(60, (":5:3", "HF_TOKEN"), '"{data}"', '"{data}"\n  revision: hf_' + "b" * 30),
    of_run(61, public_there, 3, "publish.repo", "repository is public", "--public"),
    of_run(62, interrupted, 75, "stopped by SIGINT after step 2", "resume with:", "--resume"),
]  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    text = RECIPE.replace("{model}", str(MODEL)).replace("{data}", str(DATA / "test.jsonl"))
    (folder / "recipe.yaml").write_text(text)
    given = [*STOPPED, f"train.output_dir={folder / 'run'}", "--until=2", "--quiet"]
    assert main.main(["train", str(folder / "recipe.yaml"), *given]) == 75
    return folder / "run"


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Libraries are imported, and templates' process begun, before any time is taken."""
    from finetune.training import pipeline  # noqa: F401 (imported before time is taken)

    template = template_sandbox.ChatTemplate("{{ messages[0].content }}", {})
    template_sandbox.render(template, [([{"role": "user", "content": "a"}], None)])
    yield


def name_of(row: Row) -> str:
    return f"{row.number}-{row.says[0][:20]}"


PARAMETERS = [
    pytest.param(row, id=name_of(row), marks=[pytest.mark.alone] if row.seconds <= 1 else []) for row in TABLE
]


@pytest.mark.parametrize("row", PARAMETERS)
def test_every_bad_input(row: Row, recipe_file, tmp_path, request, capsys) -> None:
    world = World(tmp_path, request)
    if row.data is not None:
        (tmp_path / "rows.jsonl").write_bytes(row.data)
    path = recipe_file(RECIPE.replace(row.old, row.new) if row.old else RECIPE)
    given = row.make(world) if row.make else []
    if row.command == "train" and not any(text.startswith("train.output_dir") for text in given):
        given = [*given, f"train.output_dir={world.run}"]
    command = [row.command, *([str(path)] if row.command != "doctor" else []), *given]
    capsys.readouterr()
    started = time.monotonic()
    assert main.main(command) == row.code
    took, said = time.monotonic() - started, capsys.readouterr()
    where = said.err if row.code else said.out
    where = where if row.number != 53 else said.out + said.err
    assert all(phrase in where for phrase in row.says), where
    assert took < row.seconds
    assert "Traceback" not in said.err and "aaaa" not in said.err and "bbbb" not in said.err
    if row.data is not None and row.code:
        assert not world.run.exists(), "a run that never began leaves nothing behind"
    if row.number == 50:
        assert [entry.name for entry in world.run.iterdir()] == ["weights.safetensors"]
    if row.number == 62:
        assert [entry.name for entry in checkpoints.published(world.run / "checkpoints")] == [
            "step-2",
            "step-1",
        ]


def test_every_row_of_the_table_is_there() -> None:
    assert {row.number for row in TABLE} == NUMBERS and len(NUMBERS) == 52
