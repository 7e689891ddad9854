"""Canaries in the environment, a run's whole life, and then each byte of what it wrote, printed and sent."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.core import packages, privacy, untrusted_files
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.recipe.loader import load
from finetune.run_folder.run_folder import RunFolder
from support.hub_server import TOKEN, Hub, serve
from support.paths import QUICKSTART, ROOT
from support.runs import receipts

CANARIES = {
    "HF_TOKEN": TOKEN,
    "HUGGING_FACE_HUB_TOKEN": "hf_" + "Second" * 6,
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
    "AWS_ACCESS_KEY_ID": "AKIA" + "CANARY7890ABCDEF",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret" + "Q" * 23,
    "AWS_SESSION_TOKEN": "canary-session-token==",
    "GITHUB_TOKEN": "ghp_" + "c" * 36,
    "OPENAI_API_KEY": "sk-" + "canary" * 5,
    "COMET_API_KEY": "canary of comet",
    "MLFLOW_TRACKING_PASSWORD": "canary of mlflow",
    "DB_CONNECTION_STRING": "Account=canary;Key=xyz",
}
LIFE = """
import sys
from finetune.cli import main
run, *command = sys.argv[1:]
assert main.main(command) == 0
assert main.main(["report", run]) == 0
assert main.main(["publish", run, "--dry-run"]) == 0
print("the crash:", flush=True)
sys.argv = ["finetune", "publish", run, "--repo", "me/other", "--debug"]
sys.exit(main.main())
"""


DEFECT = """
import os, sys
from finetune.cli import check as command, main

def check(options):
    "A command with a defect."
    raise RuntimeError(os.environ["HF_TOKEN"] + " was refused")

command.check, sys.argv = check, ["finetune", "check", "a.yaml"]
sys.exit(main.main())
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leaks(hub: Hub, folder: Path, *said: str) -> list[str]:
    """Where a canary is: in a file, a request's address or body, or what was printed."""
    places = {**contents(folder), "requests": "\n".join(hub.requests).encode()}
    places |= {f"body {number}": body for number, body in enumerate(hub.bodies)}
    places |= {f"output {number}": text.encode() for number, text in enumerate(said)}
    return [
        f"{name} in {place}"
        for place, content in places.items()
        for name, value in CANARIES.items()
        if value.encode() in content
    ]


def test_no_secret_is_left_anywhere(small, two_layers, tmp_path) -> None:
    """train with a tracker and a push, report, publish --dry-run, and a crash with --debug whose cause has
    the token in its text, in a process of its own and by a user's environment."""
    (tmp_path / "tmp").mkdir()
    with serve() as hub:
        unset = {name: value for name, value in os.environ.items() if name not in privacy.SWITCHES}
        environment = {
            **unset,
            **CANARIES,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hf"),
            "TMPDIR": str(tmp_path / "tmp"),
        }
        tracker = "tensorboard" if packages.installed("tensorboard") else "none"
        hub.fail("/me/other/commit/", 403, times=9)
        short = ["train.max_steps=1", "train.warmup_steps=0", "train.effective_batch_size=4"]
        command = ["train", str(QUICKSTART), *short, *small, "publish.repo=me/notes", "eval.max_new_tokens=2"]
        command += ["eval.forgetting=false", f"model.name={two_layers}", "train.save_steps=1"]
        command += [f"train.report_to={tracker}", f"train.output_dir={tmp_path / 'run'}", "--debug"]
        done = subprocess.run(
            [sys.executable, "-c", LIFE, str(tmp_path / "run"), *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert done.returncode == 3 and "the crash:" in done.stdout, done.stderr
        assert "Traceback" in done.stderr and "told to say 403 to Bearer ****" in done.stderr
        assert len(hub.repos["me/notes"].files) > 10 and hub.repos["me/notes"].private
        assert not leaks(hub, tmp_path, done.stdout, done.stderr)
        assert not hub.asked("telemetry") and not hub.asked("convert"), "nothing is reported"
    assert "12 of 12 files sent" in done.stdout
    written = contents(tmp_path / "run")
    assert any(name.startswith("tensorboard/") for name in written) == (tracker != "none")
    assert any(name.startswith("checkpoints/step-1/") for name in written)
    pickles = [name for name in written if Path(name).suffix in untrusted_files.PICKLES]
    assert not pickles, "no training_args.bin, no other pickle"
    assert all(receipt["passed"] for receipt in receipts(RunFolder(tmp_path / "run")).values())


def test_a_traceback_of_a_defect_is_masked() -> None:
    command, environment = [sys.executable, "-c", DEFECT], {**os.environ, **CANARIES}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 3 and "this is a bug of finetune" in done.stderr
    assert "RuntimeError: **** was refused" in done.stderr and TOKEN not in done.stderr


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


def test_errors_screen_and_logs_mask_every_secret(canaries, tmp_path, capsys) -> None:
    screen, text = Console(), " ".join(CANARIES.values())
    screen.log_to(tmp_path / "log.txt")
    screen.say(f"said {text}")
    screen.table(f"title {text}", ("column",), [[f"cell {text}"]])
    screen.log(f"logged {text}")
    logging.getLogger("some.library").warning("warned of %s", text)
    screen.close()
    problem = Problem(f"what {text}", "data.name", text, text, text, text)
    said = [str(problem), str(UserError(problem)), (tmp_path / "log.txt").read_text(), *capsys.readouterr()]
    everything = "\n".join(said)
    assert "****" in everything and "warned of" in everything and "cell" in everything
    assert not [name for name, value in CANARIES.items() if value in everything]


def test_a_stored_login_is_masked_too(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    (tmp_path / "token").write_text("a login of the old form\n")
    assert privacy.masked("is: a login of the old form.") == "is: ****."


@pytest.mark.parametrize("name", CANARIES)
def test_a_recipe_holds_no_secret_of_this_environment(name: str, canaries, recipe_file) -> None:
    """Whatever it is called there, and although nothing tells by its form."""
    text = 'model:\n  name: "{model}"\ndata:\n  name: "{data}"\nadapter:\n  type: lora\ntrain:\n  run_name: '
    with pytest.raises(UserError, match="a secret in a recipe") as raised:
        load(recipe_file(f'{text}"x {CANARIES[name]}"\n'))
    assert CANARIES[name] not in str(raised.value) and "recipe.yaml:8:3" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKENIZERS_PARALLELISM", "examples"), ("SSH_KEY_PATH", "examples/tiny"), ("API_TOKEN", "short")],
)
def test_what_is_no_secret_stays(name: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert privacy.masked(f"a {value} b") == f"a {value} b"
