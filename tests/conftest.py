"""Shared by all tests: the embedded model, small cuts of its data, and `train`, the command in process."""

from __future__ import annotations

import fcntl
import gc
import getpass
import hashlib
import json
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's library is imported: no test reaches for a network
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if os.environ.get("FINETUNE_CACHE_OF") != os.environ.get("PYTEST_XDIST_WORKER", "all"):  # else forked by it
    # Temporary files of the tests, and of the commands they start, go with the session. pytest keeps its own
    # folders, and torch its compiled kernels, where they were
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    )
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="finetune-tests-")
    os.environ["FINETUNE_CACHE"] = tempfile.mkdtemp(prefix="cache-")
    os.environ["FINETUNE_CACHE_OF"] = os.environ.get("PYTEST_XDIST_WORKER", "all")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # has `finetune`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on a busy machine are ten times slower than one

from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support import hub_server, small_tasks, warning_filters
from support.paths import DATA, MODEL, QUICKSTART, ROOT
from support.plans import LLAMA_8B
from support.runs import keep_what_is_imported, show_progress_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TRAINED: dict[str, Path] = {}


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: it would look at each syntax tree many times
    for line in warning_filters.third_party_filters(ROOT):
        config.addinivalue_line("filterwarnings", line)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier: the name of the first folder under tests/."""
    for item in items:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker(getattr(pytest.mark, tier))


def pytest_unconfigure() -> None:
    multiprocessing.util._run_finalizers()  # at exit it would look for its own folder in TMPDIR
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped recipes name their files from the root of the project."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def few_first_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` in process reads 40 examples of a source, not 200: most tests check those of the quickstart."""
    monkeypatch.setattr("finetune.data.example_errors.FIRST", 40)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases print their progress at once and often, not after 3 s and each 30 s."""
    show_progress_at_once(monkeypatch)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Overrides for a short run: 96 rows to train on, 3 held out."""
    folder = tmp_path_factory.mktemp("data")
    names = []
    for name, rows in (("train", 96), ("test", 3)):
        lines = (DATA / f"{name}.jsonl").read_text().splitlines()[:rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        names.append(str(folder / f"{name}.jsonl"))
    return f"data.name={names[0]}", f"data.validation={names[1]}"


def _cut(folder: Path, *, tied: bool) -> Path:
    """The embedded model's first two layers; its head tied to its embeddings, or a copy of its own."""
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _cut(tmp_path_factory.mktemp("two_layers"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _cut(tmp_path_factory.mktemp("untied"), tied=False)


def pytest_collection_finish() -> None:
    """Search for garbage less often, and not in what is imported: a seventh of the unit tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture
def train(tmp_path: Path, small: tuple[str, str], two_layers: Path) -> Callable[..., RunFolder]:
    """`train(*overrides, name="run", code=0)`: the quickstart by the command, cut short, on two layers."""

    def run(*overrides: str, name: str = "run", code: int = 0, recipe: Path = QUICKSTART) -> RunFolder:
        folder = tmp_path / name
        short = ["train.max_steps=2", "train.warmup_steps=0", "train.effective_batch_size=4", *small]
        short += [
            f"model.name={two_layers}",
            "eval.max_new_tokens=4",
            "eval.forgetting=false",
            f"train.output_dir={folder}",
        ]
        given = {override.partition("=")[0] for override in overrides}
        defaults = [override for override in short if override.partition("=")[0] not in given]
        assert main.main(["train", str(recipe), *defaults, *overrides, "--quiet"]) == code
        keep_what_is_imported()
        return RunFolder(folder)

    return run


@pytest.fixture
def in_bf16(monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs in bf16, for which a CPU that has none takes ten times as long: an override for fewer rows."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    return "train.effective_batch_size=2"


@pytest.fixture
def trained(train: Callable[..., RunFolder], tmp_path: Path) -> Callable[..., RunFolder]:
    """`trained(type, *overrides)`: a copy of a run of two steps on the whole model.

    A session trains each recipe once: the key is a hash of its overrides. The copy has no weights.json, as a
    run that a stranger sends, so that a test may change its weights.
    """

    def run(kind: str = "lora", *overrides: str) -> RunFolder:
        rate = "1e-3" if kind == "full" else "4e-3"
        options = [f"adapter.type={kind}", f"train.learning_rate={rate}", "eval.max_new_tokens=2"]
        options.append("model.name=examples/tiny_llama/model")
        given = {override.partition("=")[0] for override in overrides}
        options = [option for option in options if option.partition("=")[0] not in given]
        key = hashlib.sha256(json.dumps(sorted([*options, *overrides])).encode()).hexdigest()[:16]
        if key not in _TRAINED:
            _TRAINED[key] = train(*options, *overrides, name=f"trained-{key}").path
        names = f"run-{kind}", f"run-{kind}-{key}"
        folder = RunFolder(Path(shutil.copytree(_TRAINED[key], tmp_path / names[bool(overrides)])))
        (folder.path / "weights.json").unlink()
        return folder

    return run


@pytest.fixture
def the_only_launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launched processes share a port, and fill both cores: one launch at a time, of all workers' tests.

    `xdist_group` does not do it: pytest-xdist 3.8 names groups in `_nodeid`, which pytest 9.2 never reads.
    """
    shared = tmp_path_factory.getbasetemp().parent  # of all workers of one `pytest -n`
    with (shared / "launch.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def task_files(tmp_path: Path) -> list[str]:
    """One task file of each kind."""
    return small_tasks.one_of_each(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub_server.Hub]:
    """A Hub on localhost that huggingface_hub talks to here, as HF_ENDPOINT makes it in a new process."""
    from huggingface_hub.utils import close_session

    from finetune.hub import client

    with hub_server.serve() as server:
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.endpoint)  # made when imported
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # kept since it was first asked for
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setattr("finetune.hub.client.PAUSES", (0.01, 0.01, 0.01))
        monkeypatch.setenv(client.COMMITS, "{}")  # of another test's Hub
        yield server
        close_session()


@pytest.fixture
def datasets_hub(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> hub_server.Hub:
    """The Hub on localhost, for `datasets` too."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    files = hub.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}"
    monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", files)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    # A later Hub of the tests can have the same port and the same commits
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "finetune-cache"))
    return hub


@pytest.fixture
def recipe_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a recipe; `{model}` and `{data}` stand for the embedded ones."""

    def write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text.replace("{model}", str(MODEL)).replace("{data}", str(DATA / "test.jsonl")))
        return path

    return write


@pytest.fixture
def weightless(tmp_path: Path) -> Path:
    """A model with a config and a tokenizer and no weights: what errs here errs before they load."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.fixture
def saved_lora(tmp_path: Path) -> Path:
    """A LoRA as PEFT saves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers = 1
    base = AutoModelForCausalLM.from_config(config)
    base.name_or_path = base.config.name_or_path = str(MODEL)
    made = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    made.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    return tmp_path / "adapter"


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of LoRA on an 8B Llama, of which there is only the config; no ceilings of this machine."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "8b").mkdir()
    (tmp_path / "8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "word " * 2000}) + "\n" for _ in range(9))
    )
    text = f"""
    model: {{name: {tmp_path}/8b}}
    data: {{name: {tmp_path}/rows.jsonl, format: text, train_on: all, max_length: 4096}}
    adapter: {{type: lora, r: 16}}
    train: {{effective_batch_size: 4, max_steps: 1000}}
    """
    (tmp_path / "large.yaml").write_text(text)
    return tmp_path / "large.yaml"
