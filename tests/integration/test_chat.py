"""Talking to base and tuned: what is typed, piped in or asked once."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.evaluation import chat_session, scoring
from finetune.run_folder.run_folder import RunFolder
from support.paths import ROOT

QUESTION = "12 pears for Ada Lovelace in Utrecht."
RUNS: dict[str, Path] = {}
BEGINS = re.compile(  # of what is said; an answer may have several lines
    "^(?=base: |fine-tuned: |fine-tuned will|base will|base and|the conversation is|system message|no system"
    "|this model|/reset: |error: )",
    re.MULTILINE,
)


@pytest.fixture
def run(train, two_layers, tmp_path):
    """`run("type", *overrides)`: a run of two steps, trained once for all tests."""

    def of(kind: str = "lora", *overrides: str) -> RunFolder:
        key = " ".join((kind, *overrides))
        if key not in RUNS:
            given = [f"adapter.type={kind}", f"model.name={two_layers}", "train.learning_rate=2e-2"]
            given += ["eval.max_new_tokens=2", "eval.forgetting=false"]
            RUNS[key] = train(*given, *overrides, name=f"chat-{len(RUNS)}").path
        return RunFolder(RUNS[key])

    return of


@pytest.fixture
def talk(monkeypatch, capsys):
    """`talk(run, "a line", ..., "--option")`: the lines are piped in -> what was said, answer by answer."""

    def command(folder: RunFolder, *given: str, code: int = 0) -> list[str]:
        options = list(
            given[next((i for i, text in enumerate(given) if text.startswith("--")), len(given)) :]
        )
        typed = given[: len(given) - len(options)]
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        capsys.readouterr()
        assert main.main(["chat", str(folder.path), *options]) == code
        said = capsys.readouterr()
        return [part.removesuffix("\n") for part in BEGINS.split(said.err if code else said.out) if part]

    return command


def expected(folder: RunFolder, tuned: bool, messages: list[dict[str, str]], room: int = 8) -> str:
    """The answer as evaluation gives it."""
    from finetune.data import encoding
    from finetune.data.examples import Example
    from finetune.evaluation import reopen
    from finetune.recipe.loader import load

    recipe = load(folder.recipe)
    weights = reopen.reopen(folder, recipe) if tuned else reopen.open_base(recipe)
    tokenizer = reopen.tokenizer_of(folder)
    encoder = encoding.make_encoder(tokenizer, recipe.data, True)
    row = Example("x", [*messages, {"role": "assistant", "content": ""}])
    with scoring.inference(weights):
        ((text, _),) = scoring.greedy_answers(weights, tokenizer, encoder.prompts([row]), room, 1)
    return text


def test_both_answer_as_in_evaluation(run, talk) -> None:
    folder = run()
    asked = [{"role": "user", "content": QUESTION}]
    base, tuned = (expected(folder, side, asked) for side in (False, True))
    assert base != tuned
    said = talk(folder, "--prompt", QUESTION, "--max-new-tokens", "8")
    assert said == [f"base: {base}", f"fine-tuned: {tuned}"]
    assert talk(folder, QUESTION, "--max-new-tokens", "8") == said


def test_each_has_a_history_of_its_own(run, talk) -> None:
    folder = run()
    said = talk(folder, "/tuned", QUESTION, "/both", "And then?", "/reset", QUESTION, "--max-new-tokens", "8")
    assert said[0] == "fine-tuned will answer" and said[2] == "base and fine-tuned will answer"
    first = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": said[1][7:]}
    then = {"role": "user", "content": "And then?"}
    assert said[3] == f"base: {expected(folder, False, [then])}", "it was not asked before"
    assert said[4] == f"fine-tuned: {expected(folder, True, [*first, then])}"
    assert said[5] == "the conversation is empty again" and said[7] == said[1]


def test_text_that_is_not_utf_8_is_an_error_and_the_chat_goes_on(run, talk) -> None:
    folder = run()
    said = talk(folder, "\udcff", "/system \udcff", "/base", "Hi", "/system", "Hi", "--max-new-tokens", "1")
    wrong, *_ = said
    assert wrong.startswith("error: the text is not UTF-8") and "iconv" in wrong
    assert len(said) == 6 and said[3] == wrong and said[5].startswith("base: ")
    (wrong,) = talk(folder, "--prompt", "caf\udce9", code=2)
    assert wrong.startswith("error: the text is not UTF-8")


def test_a_system_message(run, talk) -> None:
    folder = run()
    said = talk(
        folder,
        "/system Be brief.",
        "/base",
        "Hello",
        "/system",
        "/nope",
        "/quit",
        "Hello",
        "--max-new-tokens",
        "8",
    )
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert said[0] == "system message: Be brief." and said[2] == f"base: {expected(folder, False, asked)}"
    assert said[3] == "no system message" and said[4] == chat_session.HELP and len(said) == 5, (
        "nothing after /quit"
    )


def test_a_base_that_training_changed_is_loaded_beside(run, talk) -> None:
    folder = run("full", "train.learning_rate=2e-3")
    asked = [{"role": "user", "content": QUESTION}]
    said = talk(folder, "--prompt", QUESTION, "--max-new-tokens", "8")
    assert said == [f"base: {expected(folder, False, asked)}", f"fine-tuned: {expected(folder, True, asked)}"]
    assert said[0][6:] != said[1][7:]


def test_plain_text_is_the_prompt_itself(run, talk, tmp_path) -> None:
    rows = [{"prompt": f"Question {n}:", "completion": f" {n} pears"} for n in range(40)]
    path = tmp_path / "plain.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = run("lora", f"data.name={path}", "data.validation=null")
    once, again = (
        talk(folder, *lines, "--max-new-tokens", "6") for lines in (["Question 3:"], ["x", "Question 3:"])
    )
    assert again[2:] == once, "nothing before it is seen"
    assert talk(folder, "/system x") == ["this model does not support a system message"]
    (said,) = talk(folder, "--prompt", "", code=2)
    assert "the prompt has no token" in said


def test_a_talk_that_is_too_long(run, talk) -> None:
    folder = run()
    said = talk(folder, "word " * 3000, "Hello", "--max-new-tokens", "4")
    assert "too long for the model" in said[0] and said[0].endswith("type a shorter prompt")
    assert said[1].startswith("base: "), "the long one is not in the history"
    asked_once = talk(folder, "--prompt", "word " * 2999 + "word", code=2)
    assert asked_once == said[:1], "the error is said, and is the command's"


def test_temperature_draws(run, talk) -> None:
    options = ("--prompt", QUESTION, "--max-new-tokens", "12", "--temperature", "3")
    assert len({tuple(talk(run(), *options)) for _ in range(3)}) > 1


def test_mistakes(run, talk, tmp_path, capsys) -> None:
    assert main.main(["chat", str(tmp_path)]) == 2
    assert "not a finished run" in capsys.readouterr().err
    done = run()  # runs/name-<date> is meant by runs/name, and a run by the folder of its adapter
    (tmp_path / "lora-20260101-000000").symlink_to(done.path)
    for wrong, meant in ((tmp_path / "lora", "lora-20260101"), (done.adapter, str(done.path))):
        assert main.main(["chat", str(wrong)]) == 2
        assert (
            f"help:      {tmp_path / meant if wrong.parent == tmp_path else meant}" in capsys.readouterr().err
        )
    for wrong in (["--temperature", "-1"], ["--max-new-tokens", "0"], ["--temperature", "warm"]):
        assert main.main(["chat", "run", *wrong]) == 2


@pytest.mark.soak
def test_at_a_terminal(run) -> None:
    """Columns side by side; Ctrl-C stops an answer, and ends the talk at the prompt."""
    ours, theirs = pty.openpty()
    program = (  # tests in the background of a shell inherit an interrupt that is ignored
        "import fcntl, signal, sys, termios; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); from finetune.cli.main import main; "
    )
    command = [sys.executable, "-c", program + "sys.exit(main(sys.argv[1:]))", "chat", str(run().path)]
    command += ["--max-new-tokens", "2000"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "PYTHONPATH": str(ROOT)}
    side: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    child = subprocess.Popen(command, **side, env=environment, cwd=ROOT, start_new_session=True)
    os.close(theirs)
    heard = ""

    def until(text: str, seconds: float = 90) -> str:
        nonlocal heard
        end = time.monotonic() + seconds
        while text not in heard and time.monotonic() < end:
            if select.select([ours], [], [], 0.5)[0]:
                heard += os.read(ours, 4096).decode(errors="replace")
        assert text in heard, heard
        before, _, heard = heard.partition(text)
        return before

    try:
        assert "/reset: new conversation" in until("> ")
        for _ in range(6):  # Python loses an interrupt that comes while a destructor or a C callback runs
            os.write(ours, b"Hello\n")
            until("base")
            os.write(ours, b"\x03")
            if stopped := "stopped; the conversation does not keep this answer" in until("> "):
                break
        assert stopped
        os.write(ours, b"/tuned\n")
        until("fine-tuned will answer")
        until("> ")
        os.write(ours, b"\x04")
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
