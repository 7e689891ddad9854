"""Canaries in the environment, a run's whole life, and then each byte of what it wrote, printed and sent."""

import base64
import html
import importlib.metadata
import json
import logging
import os
import random
import re
import shlex
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import pytest
from safetensors.torch import load_file, save_file

from finetune.autoconfig.launch_settings import Launch
from finetune.cli import main
from finetune.core import errors, packages, privacy, standard_streams, untrusted_files
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.data.examples import short
from finetune.distributed import launch_environment, recorded_variables
from finetune.export import published_text
from finetune.hardware.detection import Hardware
from finetune.recipe.loader import load
from finetune.run_folder.run_folder import RunFolder
from finetune.training import environment_of_run
from support.hub_server import TOKEN, Hub, serve
from support.paths import DATA, MODEL, QUICKSTART, ROOT
from support.runs import run_checks

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
    assert "uploaded 12 of 12 files" in done.stdout
    written = contents(tmp_path / "run")
    assert any(name.startswith("tensorboard/") for name in written) == (tracker != "none")
    assert any(name.startswith("checkpoints/step-1/") for name in written)
    pickles = [name for name in written if Path(name).suffix in untrusted_files.PICKLES]
    assert not pickles, "no training_args.bin, no other pickle"
    assert all(check["passed"] for check in run_checks(RunFolder(tmp_path / "run")).values())


def test_datasets_counts_no_downloads() -> None:
    """It would send the name of each dataset to s3.amazonaws.com."""
    script = (
        "from finetune.cli import main; main.main(['explain', '--quiet']); "
        "import datasets; print('counts:', datasets.config.HF_UPDATE_DOWNLOAD_COUNTS)"
    )
    unset = {name: value for name, value in os.environ.items() if name not in privacy.SWITCHES}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=unset, check=True)
    assert "counts: False" in done.stdout


def test_a_traceback_of_a_defect_is_masked() -> None:
    command, environment = [sys.executable, "-c", DEFECT], {**os.environ, **CANARIES}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 3 and "report this bug of finetune" in done.stderr
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
    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token")
    assert privacy.logged_in() == ""  # a read of it would wait for a writer


@pytest.mark.parametrize("name", CANARIES)
def test_a_recipe_holds_no_secret_of_this_environment(name: str, canaries, recipe_file) -> None:
    """Whatever it is called there, and although nothing tells by its form."""
    text = 'model:\n  name: "{model}"\ndata:\n  name: "{data}"\nadapter:\n  type: lora\ntrain:\n  run_name: '
    with pytest.raises(UserError, match="the recipe holds a secret") as raised:
        load(recipe_file(f'{text}"x {CANARIES[name]}"\n'))
    assert CANARIES[name] not in str(raised.value) and "recipe.yaml:8:3" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "examples"),
        ("SSH_KEY_PATH", "examples/tiny"),
        ("SSH_SECRET", str(QUICKSTART)),
        ("S3_KEY", "examples/train.jsonl"),
        ("SONAR_PROJECT_KEY", "stories260K"),
        ("API_TOKEN", "short"),
        ("OLDPWD", "examples"),
        ("MONKEY", "examples"),
    ],
)
def test_what_is_no_secret_stays(name: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert privacy.masked(f"a {value} b") == f"a {value} b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "correct-horse") for name in ("PGPASSWORD", "MYSQL_PWD", "DB_PASS", "SSH_PASSPHRASE")),
        *((name, "correct-horse") for name in ("HFTOKEN", "MYSECRET", "db_password", "openai_api_key")),
        *((name, "q7Lm2Xv9Tb4Kc8Wd1Zr6") for name in ("OPENAI_KEY", "GITHUB_PAT", "mistral_key")),
        ("DATABASE_URL", "postgres://me:correct-horse@localhost/db"),
    ],
)
def test_variables_of_other_tools_hold_secrets_too(name: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    secret = "correct-horse" if "://" in value else value
    assert privacy.masked(f"a {secret} b") == "a **** b"


def test_ordinary_word_as_the_password_of_an_address_stays(monkeypatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://postgres:postgres@localhost:5432/test")
    assert privacy.masked("postgres is a database") == "postgres is a database"


SHAPES = {  # keys of services as they look, each made up
    "hub": "hf_" + "aB3" * 11,
    "openai": "sk-proj-" + "aB3_" * 8,
    "github": "ghp_" + "aB3c" * 9,
    "github fine-grained": "github_pat_" + "11AB_" * 8,
    "gitlab": "glpat-" + "aB3-c" * 4,
    "aws": "AKIA" + "ABCD1234" * 2,
    "slack": "xoxb-1234567890-" + "aB3c" * 5,
    "google": "AIza" + "aB3c_" * 7,
    "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjYW5hcnkifQ.c2lnbmF0dXJlY2FuYXJ5",
    "wandb": "wandb_v1_" + "aB3c" * 8,
    "pypi": "pypi-AgEI" + "aB3c" * 14,
    "npm": "npm_" + "aB3c" * 9,
    "docker": "dckr_pat_" + "aB3c_" * 6,
    "stripe": "sk_live_" + "aB3c" * 6,
    "sendgrid": "SG." + "aB3c" * 5 + "." + "aB3c" * 8,
    "nvidia": "nvapi-" + "aB3c_" * 10,
    "pem": "-----BEGIN PRIVATE KEY-----\n" + "MIIcanary0123456" * 4 + "\n-----END PRIVATE KEY-----",
}
RANDOM = "q7Lm2Xv9Tb4Kc8Wd1Zr6Qp3S"
IN_PLACE = {  # text -> what must not stay of it
    "https://user:canary-pw@example.org/x": "canary-pw",
    "postgresql://user:canary-pw@db/finetune": "canary-pw",
    str(Path("https://user:canary-pw@example.org/x")): "canary-pw",
    "Authorization: Basic Y2FuYXJ5OmNhbmFyeQ==": "Y2FuYXJ5OmNhbmFyeQ==",
    '{"authorization": "Bearer canary0123456789canary"}': "canary0123456789canary",
    r"{\"Authorization\": \"token canary0123456789\"}": "canary0123456789",
    "https://h/f.json?X-Amz-Signature=canarycanary1234&a=b": "canarycanary1234",
    "https://h/f.json?a=b&token=canarycanary1234": "canarycanary1234",
    "WANDB_API_KEY: " + "0c" * 20: "0c" * 20,
    "aws_secret_access_key = " + "cA9/+nAry" * 5: "cA9/+nAry",
    'api_key = "q7Lm2Xv9Tb4Kc8Wd1Zr6"': "q7Lm2Xv9Tb4Kc8Wd1Zr6",
    "DB_PASSWORD=q7Lm2Xv9Tb4Kc8Wd1Zr6": "q7Lm2Xv9Tb4Kc8Wd1Zr6",
    '{"SecretAccessKey": "' + "cA9/+nAry" * 5 + '"}': "cA9/+nAry",
    **{
        text.format(RANDOM): RANDOM
        for text in (
            "x-api-key: {}",
            "curl -H 'api-key: {}'",
            "--api-key {}",
            "access-token: {}",
            "token={}",
            '"refresh_token": "{}"',
            "MISTRAL_KEY={}",
        )
    },
}
READABLE = [
    "tokenizer_class: PreTrainedTokenizerFast, token_type_ids=attention_mask, sort_key: validation_fraction",
    "commit 31899f0d5e0c6a7b8c9d0e1f2a3b4c5d6e7f8091 of finetune",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "550e8400-e29b-41d4-a716-446655440000",
    "/home/user/runs/Llama-3.1-8B-Instruct-lora-r16-2026-11-27/adapter/adapter_model.safetensors",
    "model-00001-of-00002.safetensors",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "Qwen3VLMoeForConditionalGeneration, LlamaDecoderLayer,MistralDecoderLayer",
    "eos_token: <|im_end|>, pad_token='<|endoftext|>', the password is in the environment",
    "NVIDIA H100 80GB HBM3, torch 2.13.0+cu130, Linux-6.8.0-1021-aws-x86_64-with-glibc2.39",
    "https://huggingface.co/org/name/tree/31899f0d5e0c6a7b8c9d0e1f2a3b4c5d6e7f8091",
    "git@github.com:org/name.git and user@host:22",
    "models--meta-llama--Llama-3.1-8B/snapshots/31899f0d5e0c6a7b8c9d0e1f2a3b4c5d6e7f8091",
    "step 10/20  loss 1.234  lr 2.0e-04  1,234 tokens/s",
]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("around", ["{}", "a {} b", '"{}"', "x={}", "\\n{}", "%3D{}", "https://h/{}/f"])
def test_secret_of_a_known_form_is_masked(kind: str, around: str) -> None:
    """Whatever the environment of today holds."""
    text = around.format(SHAPES[kind])
    assert SHAPES[kind][-8:] not in privacy.masked(text, []) or kind == "pem"
    assert "canary0123456" not in privacy.masked(text, [])
    assert privacy.find_secrets(text, [])


@pytest.mark.parametrize("text", IN_PLACE)
def test_secret_in_its_place_is_masked_and_the_rest_stays(text: str) -> None:
    shown = privacy.masked(text, [])
    assert IN_PLACE[text] not in shown and "****" in shown and privacy.find_secrets(text, [])
    assert shown.startswith(text[:4])


@pytest.mark.parametrize("command", ("check", "import", "report", "evaluate", "merge"))
def test_password_of_an_address_is_in_no_message(command: str, capsys) -> None:
    assert main.main([*command.split(), "https://user:canary-pw@example.org/x"]) == 2
    said = "".join(capsys.readouterr())
    assert "canary-pw" not in said and "https:/" in said


HEADERS, END = (
    "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0123456789ABCDEF\n\n",
    "-----END RSA PRIVATE KEY-----",
)


# A key without its last line is found by its headers and its lines of base64
@pytest.mark.parametrize(
    ("header", "end"), [(HEADERS, END), ("", f"=aB3c\n{END}"), ("x: \0\n", END), (HEADERS, ""), ("", "")]
)
@pytest.mark.parametrize("form", (str, json.dumps, html.escape, lambda key: key.replace("\n", "<br>")))
def test_private_key_is_masked_with_its_headers(header: str, end: str, form: Callable[[str], str]) -> None:
    key = form(f"a -----BEGIN RSA PRIVATE KEY-----\n{header}" + ("MIIcanary0123456" * 4 + "\n") * 9 + end)
    masked = privacy.masked(key)
    assert "canary" not in masked and "aB3c" not in masked and "a ****" in masked
    (found,) = privacy.find_secrets(key, [])
    assert "canary" not in key[: found.start] + key[found.end :]


def test_file_of_many_secrets_is_refused_at_once(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("-----BEGIN PRIVATE KEY-----\n" * 40_000)
    started = time.process_time()
    with pytest.raises(UserError) as refused:
        published_text.refuse_secrets({"tokenizer.json": tmp_path / "tokenizer.json"})
    assert time.process_time() - started < 5
    problems = refused.value.problems
    assert len(problems) == published_text.MOST_SHOWN and "39,995 more in this file" in problems[0].found
    assert [problem.where for problem in problems][:2] == ["tokenizer.json:1", "tokenizer.json:2"]


@pytest.mark.parametrize(
    "text",
    ("-eyJaaaaaa", "-eyJaaaaaa.eyJ", "_eyJ", "eyJaaaaaa.eyJaaaaaa.", "-sk-", ":/a:b",
     "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nAbc: d\n", "\nAbc: Abc: Abc: d"),
)  # fmt: skip
def test_search_for_secrets_takes_linear_time(text: str) -> None:
    started = time.process_time()
    privacy.find_secrets(text * 100_000, [])
    assert time.process_time() - started < 3


@pytest.mark.parametrize("text", READABLE)
def test_hash_name_or_setting_stays_readable(text: str) -> None:
    assert privacy.masked(text, []) == text and not privacy.find_secrets(text, [])
    assert privacy.masked_setting(text) == text


def test_random_values_are_found_and_names_are_not() -> None:
    """Rates of `is_random`: of keys as services make them, and of the names of files here and in packages."""
    draw = random.Random(0)
    signs = string.ascii_letters + string.digits
    for length, least in ((20, 0.85), (24, 0.9), (32, 0.9), (40, 0.95), (64, 0.98)):
        keys = ["".join(draw.choices(signs, k=length)) for _ in range(400)]
        assert sum(map(privacy.is_random, keys)) >= least * len(keys), length
    names = [str(path) for path in ROOT.rglob("*") if ".venv" not in path.parts and ".git" not in path.parts]
    names += [
        str(file) for name in ("transformers", "torch") for file in importlib.metadata.files(name) or ()
    ]
    assert len(names) > 5000 and not [name for name in names if privacy.is_random(name)]


def test_run_folder_has_nothing_that_looks_like_a_secret(trained) -> None:
    files = [path for path in trained().path.rglob("*.*") if path.is_file() and path.suffix != ".safetensors"]
    texts = [path.read_text(errors="replace") for path in files]
    words = [word for text in texts for word in re.findall(r"[^\s\"',]{8,}", text)]
    assert len(words) > 1000 and not [word for word in words if privacy.is_random(word)]
    assert not [one for text in texts for one in privacy.find_secrets(text, [])]


ONE_STEP = ("train.max_steps=1", "train.warmup_steps=0", "eval.max_new_tokens=2", "eval.forgetting=false")
HIDDEN = 'canary "quoted" \\ & käse=' + "q7" * 6


@pytest.mark.parametrize(
    "form",
    [
        lambda value: value,
        lambda value: json.dumps(value),
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps({"a": [value]}),
        lambda value: quote(value),
        lambda value: quote(value, safe=""),
        lambda value: quote_plus(value, safe=" ").replace("+", "%20"),
        lambda value: html.escape(value),
        lambda value: repr(value),
        lambda value: json.dumps(json.dumps({"arguments": value})),
        lambda value: html.escape(json.dumps(json.dumps([value]), ensure_ascii=False)),
        lambda value: repr(json.dumps(value)),
        lambda value: json.dumps({"said": repr({"a": value})}),
        lambda value: value.encode().hex(),
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
        lambda value: base64.b64encode(f"user:{value}".encode()).decode(),
        lambda value: base64.b64encode(f"me:{value}@".encode()).decode(),
    ],
)
def test_secret_of_today_is_masked_in_every_form(form: Callable[[str], str], monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", HIDDEN)
    text = f"before {form(HIDDEN)} after"
    shown = privacy.masked(text)
    assert "****" in shown and shown.startswith("before ") and shown.endswith(" after")
    assert len(shown) < 50 and privacy.find_secrets(text, privacy.secrets())


@pytest.mark.parametrize("around", ["{}\n", "{}\r\n", " {} ", '"{}"', "'{}'", '"{}"\n'])
def test_secret_is_known_without_the_space_and_quotes_around_its_variable(around: str, monkeypatch) -> None:
    """As files of secrets end in a line break, and `docker run --env-file` keeps quotes."""
    monkeypatch.setenv("DB_PASSWORD", around.format("x9aKqbz7Lp2vR8"))
    assert privacy.masked("it is x9aKqbz7Lp2vR8, says he") == "it is ****, says he"


VARIABLES = {
    "ACCELERATE_CANARY": "canary of accelerate",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/home/canary/ds.json",
    "FSDP_CANARY_TOKEN_OF_OURS": "canary of fsdp",
    "FSDP_IGNORED_MODULES": "canary|x",
    "OMP_NUM_CANARY": "canary of openmp",
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_VERSION": "hf_" + "Canary" * 5,
    "FSDP_STATE_DICT_TYPE": "canary://" + "x" * 8,
    "PARALLELISM_CONFIG_CANARY": "canary of sizes",
    "FSDP_BACKWARD_PREFETCH": "cAnArY7Lm2Xv9Tb4Kc8Wd1Zr6",
}


def test_only_listed_variables_are_written_down() -> None:
    kept = recorded_variables.recorded(VARIABLES)
    assert kept["OMP_NUM_THREADS"] == "1" and kept["ACCELERATE_MIXED_PRECISION"] == "no"
    assert set(kept.values()) == {"1", "no", "****"} and "canary" not in json.dumps(kept).lower()


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of huggingface_hub 2.4
def test_run_folder_page_and_upload_hold_no_other_variable(hub: Hub, trained, monkeypatch) -> None:
    """What a run writes, and what `report` and `publish` make of an older run that has written more."""
    folder = trained()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    machine, launch = Hardware("cpu", "CPU", 1, None, 8.0, 2), Launch("none", 1, 0, "no", "hardware", "")
    written = environment_of_run.describe(machine, launch)
    assert "canary" not in json.dumps(written).lower()
    assert "canary" not in json.dumps(launch_environment.ways()).lower(), "checkpoints keep these"
    older = folder.read("environment.json")
    older["launch"]["environment"] = VARIABLES
    (folder.path / "environment.json").write_text(json.dumps(older))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main.main(["report", str(folder.path)]) == 0
    assert "canary" not in (folder.path / "report.html").read_text().lower()
    assert main.main(["publish", str(folder.path), "--repo", "me/notes", "--quiet"]) == 0
    assert "canary" not in "".join(map(str, hub.repos["me/notes"].files.values())).lower()


@pytest.mark.parametrize("kind", ["hub", "gitlab", "slack", "google", "web token", "pem"])
@pytest.mark.parametrize(
    "place", ["eval.json", "adapter/tokenizer_config.json", "adapter/adapter_model.safetensors"]
)
def test_publish_refuses_a_secret_of_nobody_here(kind: str, place: str, hub: Hub, trained, capsys) -> None:
    """In results, in a tokenizer's config, and in the metadata of weights."""
    folder = trained()
    hub.requests.clear()
    file = folder.path / place
    if file.suffix == ".safetensors":
        tensors = load_file(file)
        save_file(tensors, file, metadata={"format": "pt", "note": SHAPES[kind]})
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"note": SHAPES[kind]}))
    assert main.main(["publish", str(folder.path), "--repo", "me/notes"]) == 2
    said = capsys.readouterr().err
    assert (
        "a file to publish contains a secret" in said and file.name in said and SHAPES[kind][-9:] not in said
    )
    assert not hub.repos and not hub.requests


def test_command_line_with_a_secret_is_printed_masked(monkeypatch, capsys) -> None:
    words = ["accelerate", "launch", "-m", "finetune", "train", f"train.run_name={SHAPES['gitlab']}"]
    standard_streams.say(shlex.join(words), "storage postgresql://me:canary-pw@db/x")
    assert main.main(["check", "a.yaml", f"--{SHAPES['hub']}"]) == 2
    said = capsys.readouterr()
    assert SHAPES["gitlab"][-8:] not in said.out and "canary-pw" not in said.out
    assert SHAPES["hub"] not in said.err and "has no option" in said.err


def test_folder_with_the_name_of_a_secret_is_masked_in_reports(
    trained, tmp_path, monkeypatch, capsys
) -> None:
    """The report of an export has the path of its folder."""
    run = tmp_path / "canary-of-a-folder" / "run"
    shutil.copytree(trained().path, run)
    monkeypatch.setenv("MY_API_KEY", "canary-of-a-folder")
    assert main.main(["export", str(run), "--to", "vllm"]) == 0
    assert main.main(["report", str(run)]) == 0
    texts = [path.read_text() for path in run.rglob("*") if path.suffix in (".json", ".html", ".txt")]
    assert texts and not any("canary-of-a-folder" in text for text in texts)
    assert "canary-of-a-folder" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["check", "train"])
def test_folder_with_the_name_of_a_secret_is_refused_before_a_recipe_has_it(
    command: str, small, tmp_path, monkeypatch, capsys
) -> None:
    """The resolved recipe has absolute paths. Masked, no command could read them."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "canary-of-a-folder" / "model")).parent
    monkeypatch.setenv("MY_API_KEY", "canary-of-a-folder")
    monkeypatch.chdir(folder)
    words = [command, str(QUICKSTART), *small, *ONE_STEP, "model.name=model", "train.output_dir=run"]
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert "model.name: the path contains the value of a secret" in said and "canary-of" not in said
    assert not [path for path in folder.rglob("*.yaml") if "canary-of-a-folder" in path.read_text()]


@pytest.mark.parametrize("count", [12, 20, 39])
def test_part_of_a_secret_that_a_message_cuts_is_masked(count: int, monkeypatch) -> None:
    secret = "Zx81kQpW7rTn" * 3 + "Lm3v"
    monkeypatch.setenv("MYSERVICE_API_KEY", secret)
    monkeypatch.setenv("MY_TOKEN", f"github_pat_{secret}")
    for text in (f"role: us{secret[:count]}", f"'{secret[:count]}...'", f"{secret[-count:]} is no role"):
        assert secret[:8] not in privacy.masked(text) and secret[-8:] not in privacy.masked(text)
    assert privacy.masked("github_pages") == "github_pages"
    said = str(errors.Problem("a role is unknown", found="x" * (errors.LONGEST_TEXT - count) + secret))
    assert secret[:8] not in said
    assert secret[:8] not in str(
        errors.Problem("a role is unknown", found=short("x" * (60 - count) + secret))
    )


@pytest.mark.parametrize("secret", ["33333333", "58063832", "examples", "settings", "0.333333"])
def test_secret_that_is_a_part_of_a_number_or_a_key_leaves_json_whole(secret: str, monkeypatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", secret)
    value = {
        "settings": {"examples": [1 / 3, 3.58063832752, 58063832, 33333333]},
        "said": f"The PIN is {secret}.",
    }
    assert json.loads(privacy.masked_json(value)) == {**value, "said": "The PIN is ****."}
    assert secret not in privacy.masked(f"PIN {secret}, {secret} and ({secret})")


INSIDE = {
    "DB_CREDENTIALS": '{"username": "svc", "password": "PART"}',
    "AZURE_CREDENTIALS": '{"clientId": "1-2-3", "clientSecret": "PART", "tenantId": "9"}',
    "SERVICE_API_KEYS": "another9Key,PART",
    "BOT_TOKENS": "PART;another9Key",
    "AZURE_CONNECTION_STRING": "AccountName=me;AccountKey=PART;EndpointSuffix=core.windows.net",
    "PG_CONNECTION_STRING": "host=db user=svc password=PART dbname=x",
    "NEXUS_CREDENTIALS": "svc:PART",
    "DATABASE_URL": "postgres://h/db?user=svc&password=PART",
    "ARTIFACT_TOKEN": "Basic PART",
    "DB_PASSWORDS": "PART",
    "JWT_SIGNING_KEY": "PART",
    "SSHPASS": "PART",
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("part", ["Xk9vQ2mT7bLp", "Qz8~w3T.hN6kYv1RbLmP0sDfGj"])
def test_secret_inside_of_a_value_is_masked_alone(name: str, part: str, monkeypatch) -> None:
    monkeypatch.setenv(name, INSIDE[name].replace("PART", part))
    assert privacy.masked(f"the login {part} of svc failed") == "the login **** of svc failed"


@pytest.mark.parametrize("password", ["pa@ssWord9xK", "pa/ssWord9xK", "p%40ssWord9xK"])
def test_password_of_an_address_with_an_odd_sign_is_masked(password: str, monkeypatch) -> None:
    address = f"postgresql://svc:{password}@127.0.0.1:1/x"
    assert privacy.masked(f"{address}: failed") == "postgresql://svc:****@127.0.0.1:1/x: failed"
    monkeypatch.setenv("DATABASE_URL", address)
    for part in (password, unquote(password), re.split("[@/]", password)[-1]):
        assert part not in privacy.masked(f"failed to resolve host '{part}@127.0.0.1'"), part
    for plain in ("http://127.0.0.1:8000/@scope/package", "https://github.com/a/b@main: found"):
        assert privacy.masked(plain) == plain


@pytest.mark.parametrize("password", ["pa@ssWord9xK", "pa/ssWord9xK", "pa?ssWord9xK@"])
def test_storage_whose_password_a_driver_reads_otherwise_is_refused(password: str, tmp_path, capsys) -> None:
    (tmp_path / "space.yaml").write_text("space:\n  adapter.r: {low: 4, high: 8}\n")
    storage = f"postgresql://svc:{password}@127.0.0.1:1/x"
    words = ["sweep", str(QUICKSTART), "--space", str(tmp_path / "space.yaml"), "--trials", "1"]
    assert main.main([*words, "--output", str(tmp_path / "out"), "--storage", storage]) == 2
    said = "".join(capsys.readouterr())
    assert "must be escaped" in said and "ssWord9xK" not in said


def test_secret_of_several_lines_is_masked_in_the_samples(small, tmp_path, monkeypatch, capsys) -> None:
    """The table of samples has a row for each line, and cuts long texts."""
    middle = "MIICXAIBAAKBgQCqGKukO1De7zhZj6xH0qtjTkVxwTCpvKe4eCZ0FPqri0cb2JZf"
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{middle}\n-----END RSA PRIVATE KEY-----"
    monkeypatch.setenv("DB_PASSWORD", "my own password of words")
    rows = [
        [("user", f"Use {key} now"), ("assistant", f"{'x' * 385} my own password of words")],
        [("user", "Which key?"), ("assistant", key)],
    ]
    chats = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in rows]
    (data := tmp_path / "held.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    options = [*small, f"data.validation={data}", f"train.output_dir={tmp_path}/run", *ONE_STEP]
    assert main.main(["train", str(QUICKSTART), *options]) == 0
    said = capsys.readouterr().out + (tmp_path / "run/log.txt").read_text()
    assert "validation example" in said and "****" in said
    assert middle[:12] not in said and "my own pass" not in said


@pytest.mark.parametrize(
    "secret",
    [
        "Zx9KqW7bLp2vR8mNtY4sDfGh3JcXw6Qe",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzEXAMPLEKEY",
        "x9!Kq$z7Lp@2vR8#mNtY4s^DfGh3Jc",
        "correct-horse-battery-staple-42",
    ],
)
@pytest.mark.parametrize("words", range(20, 60, 8))
def test_end_of_a_secret_in_a_prompt_that_is_cut_is_masked(
    words: int, secret: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("DB_PASSWORD", secret)
    row = {
        "prompt": f"{'word ' * 40}password is {secret} {'and so on ' * (words // 4)}",
        "completion": " fine",
    }
    data = tmp_path / "rows" / ("rows.jsonl" if "/" in secret else f"{secret}.jsonl")
    data.parent.mkdir()
    data.write_text(f"{json.dumps(row)}\n")
    page = tmp_path / "page.html"
    options = [
        f"data.name={data.parent}",
        "data.validation=null",
        "data.too_long=truncate_prompt",
        "data.max_length=64",
    ]
    assert main.main(["data", str(QUICKSTART), *options, "--html", str(page)]) == 0
    shown = capsys.readouterr().out + html.unescape(re.sub("<[^>]*>", "", page.read_text()))
    parts = {
        secret[start : start + privacy.SHORTEST_PART]
        for start in range(len(secret) - privacy.SHORTEST_PART + 1)
    }
    assert not [part for part in parts if part in shown] and "fine" in shown


def test_secret_in_an_example_is_masked_on_the_screen_and_on_the_page(tmp_path, monkeypatch, capsys) -> None:
    known = {"HF_TOKEN": "hf_" + "CanaryCanary" * 3, "DB_PASSWORD": "hunter2hunter2"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    turns = [[("user", f"Open {value}?"), ("assistant", f"The key is {value}.")] for value in known.values()]
    rows = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in turns]
    rows = [{**row, f"of {value}": 1} for row, value in zip(rows, known.values(), strict=True)]
    (data := tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = [
        f"data.name={data}",
        "data.validation=null",
        "--show",
        "2",
        "--html",
        str(tmp_path / "page.html"),
    ]
    assert main.main(["data", str(QUICKSTART), *options]) == 0
    page = re.sub("<[^>]*>", "", (tmp_path / "page.html").read_text())
    said = capsys.readouterr().out
    for value in known.values():
        assert value not in said and value not in page
    assert "The key is" in said and "***" in said


def test_name_of_a_data_file_is_masked_in_the_finding_of_a_run_that_ends_by_nan(
    small, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "Zx9KqW7bLp2vR8mNtY4s")
    (tmp_path / "rows").mkdir()
    shutil.copy(DATA / "test.jsonl", tmp_path / "rows" / "k-Zx9KqW7bLp2vR8mNtY4s.jsonl")
    options = [f"data.name={tmp_path}/rows", "data.validation=null", "train.learning_rate=1e30"]
    options += [f"train.output_dir={tmp_path}/run", "train.max_steps=8", "train.max_grad_norm=0"]
    assert main.main(["train", str(QUICKSTART), *small, *options]) != 0
    texts = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert list((tmp_path / "run").glob("nonfinite-step-*")), "no step was not finite"
    assert not [text for text in texts if b"Zx9KqW7bLp2v" in text]
