"""Files named like packages, in the working directory and in folders of others: none of them is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.core import import_paths, library_calls, packages
from finetune.core.errors import UserError
from finetune.export import gguf_export, gguf_readers
from finetune.launch import launcher
from support.paths import DATA, MODEL, ROOT

NAMES = """accelerate argparse bitsandbytes datasets evaluate jinja2 json kernels lm_eval mlflow numpy peft
pydantic random rich tensorboard torch torchao trackio transformers trl triton typing vllm wandb yaml"""
PACKAGES = ("flash_attn", "deepspeed", "finetune", "comet_ml")
MARK = "imported"
RECIPE = """
model: {{name: "{model}"}}
data: {{name: "{data}"}}
adapter: {{type: lora}}
train: {{max_steps: 1, report_to: {tracker}, output_dir: run}}
"""


def plant(folder: Path) -> None:
    """A module for each name, which leaves a mark when it is imported."""
    code = f"open({str(folder / MARK)!r}, 'a').write(__name__ + '\\n')\n"
    for name in NAMES.split():
        (folder / f"{name}.py").write_text(code)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        (folder / name / "__main__.py").write_text(code)


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    given |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


def console_script(*words: str) -> list[str]:
    """What pip makes of the entry point: a file in a folder of its own, which comes first in sys.path."""
    code = "import sys; from finetune.cli.main import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code, *words]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe in a folder of somebody else."""
    (tmp_path / "theirs").mkdir()
    text = RECIPE.format(model=MODEL, data=DATA / "train.jsonl", tracker="none")
    (tmp_path / "theirs" / "recipe.yaml").write_text(text)
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    "words", [["check", "recipe.yaml"], pytest.param(["plan", "recipe.yaml"], marks=pytest.mark.soak)]
)
def test_command_in_a_folder_with_modules_imports_none(folder: Path, words: list[str]) -> None:
    plant(folder)
    done = run(console_script(*words), folder)
    assert done.returncode == 0, done.stderr
    assert not (folder / MARK).exists(), (folder / MARK).read_text()


def test_module_in_a_folder_with_modules_imports_none(folder: Path) -> None:
    """`python -m finetune`, whose own rule is to look in the working directory first."""
    plant(folder)
    for name in ("finetune", "typing"):  # what Python itself has imported when finetune begins
        (folder / name).rename(folder / f"{name}-") if name in PACKAGES else (folder / f"{name}.py").unlink()
    done = run([sys.executable, "-m", "finetune", "check", "recipe.yaml"], folder)
    assert done.returncode == 0, done.stderr
    assert not (folder / MARK).exists(), (folder / MARK).read_text()


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_tracker_in_the_working_directory_is_not_installed(folder: Path, tracker: str) -> None:
    if packages.installed(tracker):
        pytest.skip(f"{tracker} is installed")
    plant(folder)
    (folder / "recipe.yaml").write_text(
        RECIPE.format(model=MODEL, data=DATA / "train.jsonl", tracker=tracker)
    )
    done = run(console_script("check", "recipe.yaml"), folder)
    assert done.returncode == 3 and tracker in done.stderr
    assert not (folder / MARK).exists()


def test_processes_of_the_python_api_import_nothing_from_the_working_directory(
    folder: Path, monkeypatch
) -> None:
    plant(folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    @library_calls.library_call("tested")
    def call() -> None:
        words = [sys.executable, "-c", "import wandb"], [sys.executable, "-m", "mlflow"]
        for command in words:
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    call()
    assert not (folder / MARK).exists()
    assert "PYTHONSAFEPATH" not in os.environ, "the program's own processes start as before"


def test_link_src_to_itself_is_named(folder: Path) -> None:
    """transformers follows it when it is imported."""
    (folder / "src").symlink_to(folder / "src")
    done = run(console_script("check", "recipe.yaml"), folder)
    assert done.returncode == 3 and "its link `src` leads to itself" in done.stderr


@pytest.mark.parametrize(("name", "kind"), [("libgcc_s.so.1", "file"), ("libgcc.a", "link"), ("hf:", "link")])
def test_name_that_a_library_would_take_for_another_is_refused(
    name: str, kind: str, folder: Path, monkeypatch
) -> None:
    library = folder / name
    library.write_text("") if kind == "file" else library.symlink_to("/nowhere")
    done = run(console_script("check", "recipe.yaml"), folder)
    assert done.returncode == 3 and name in done.stderr
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=name):
        library_calls.library_call("tested")(lambda: None)()


def test_workers_of_deepspeed_do_not_get_the_working_directory(folder: Path, monkeypatch) -> None:
    """Accelerate would add it to their PYTHONPATH, where Python finds a `sitecustomize.py`."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    given = [
        "--use_deepspeed",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "-m",
        "finetune",
    ]
    arguments = launch_command_parser().parse_args(given)
    arguments.deepspeed_fields_from_accelerate_config = ""
    assert str(folder) in launch.prepare_deepspeed_cmd_env(arguments)[1]["PYTHONPATH"]
    with launcher.keep_import_path():
        assert launch.prepare_deepspeed_cmd_env(arguments)[1]["PYTHONPATH"] == str(ROOT)


PROGRAM = '#!/bin/sh\npwd > "{place}"\n[ -n "$3" ] && [ "$1" != -m ] && cp "$1" "$2"\nexit 0\n'


@pytest.mark.parametrize("program", ["llama-quantize", "llama-server"])
def test_programs_of_llama_cpp_start_in_a_folder_of_their_own(
    program: str, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    """llama.cpp loads `libggml-*.so` of the folder in which it starts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).write_text(PROGRAM.format(place=tmp_path / "started in"))
    (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    Path("whole.gguf").write_text("content")
    if program == "llama-quantize":
        gguf_export.quantize_with_llama_cpp(Path("whole.gguf"), Path("small.gguf"), "q4_k_m")
        assert Path("small.gguf").read_text() == "content"
    else:
        server = gguf_readers._llama_server(str(tmp_path / "bin" / program), Path("whole.gguf"), 8, None)
        with pytest.raises(ValueError, match="GGUF magic invalid"):  # of the file, after the start
            next(server)
    place = Path((tmp_path / "started in").read_text().strip())
    assert place != folder and not place.exists()


CHILDREN = """
import subprocess, sys
from finetune.core import import_paths
sys.path.append("")  # as DeepSpeed's launcher does
import_paths.leave_working_directory()
try:
    import wandb
except ImportError:
    pass
started = ["-m", "finetune", "--help"], ["-m", "finetune.launch", "--help"], ["-c", "import json, finetune"]
for words in started:
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
"""


@pytest.mark.parametrize("place", [str(ROOT), f"{ROOT}:"])
def test_processes_of_a_command_import_nothing_from_the_working_directory(folder: Path, place: str) -> None:
    """Workers, launchers and evaluations are `python -m` and `-c`; an open end of PYTHONPATH is `.`."""
    plant(folder)
    for name in ("argparse", "json", "random", "typing"):  # Python itself would begin with these, before us
        (folder / f"{name}.py").unlink()
    done = run([sys.executable, "-P", "-c", CHILDREN], folder, PYTHONPATH=place)
    assert done.returncode == 0, done.stderr
    assert not (folder / MARK).exists(), (folder / MARK).read_text()


def test_module_added_to_a_checkout_is_not_imported(monkeypatch, tmp_path: Path) -> None:
    """A checkout is where finetune is imported from; what somebody put beside it is not."""
    monkeypatch.setattr(import_paths, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    import_paths.leave_working_directory()
    assert str(tmp_path) in sys.path
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    import_paths.leave_working_directory()
    assert str(tmp_path) not in sys.path


@pytest.mark.soak
def test_training_in_a_folder_with_modules_imports_none(folder: Path) -> None:
    plant(folder)
    done = run(console_script("train", "recipe.yaml"), folder)
    assert done.returncode == 0, done.stderr
    assert not (folder / MARK).exists(), (folder / MARK).read_text()


def test_open_end_of_pythonpath_imports_nothing_that_finetune_needs(folder: Path) -> None:
    plant(folder)
    for name in ("finetune", "typing"):  # Python and the entry point themselves import these
        (folder / name).rename(folder / f"{name}-") if name in PACKAGES else (folder / f"{name}.py").unlink()
    for name in ("contextlib", "dataclasses", "difflib", "functools"):
        (folder / f"{name}.py").write_text(f"open({str(folder / MARK)!r}, 'a').write(__name__ + '\\n')\n")
    code = "import sys; from finetune.__main__ import main; sys.exit(main())"
    done = run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path[:0] = ['', {str(ROOT)!r}]; {code}",
            "check",
            "recipe.yaml",
        ],
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / MARK).exists(), (folder / MARK).read_text()
