"""A missing optional package is found at once, with the command that installs it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib

import pytest

from finetune.autoconfig import optimizer_choice, packing_support
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.evaluation import task_packages
from finetune.recipe.schema import Data, Train
from support.hybrid_families import config_of
from support.paths import QUICKSTART, ROOT

PROJECTED = "train.optim_target_modules=all-linear"
# Missing modules, overrides of the quickstart, what the error names, and the extra that brings it
CASES = [
    ("bitsandbytes", ["adapter.type=qlora"], "model.quantization", "bnb"),
    ("bitsandbytes", ["model.quantization=int8"], "model.quantization", "bnb"),
    ("bitsandbytes", ["train.optim=paged_adamw_8bit"], "train.optim", "bnb"),
    ("torchao", ["model.quantization=torchao_int8"], "model.quantization", "quantize"),
    ("torchao", ["train.optim=adamw_torch_4bit"], "train.optim", "quantize"),
    ("torchao", ["speed.offload=optimizer"], "speed.offload", "quantize"),
    ("torchao", ["speed.qat={config: IntxWeightOnlyConfig}"], "speed.qat", "quantize"),
    ("lm_eval", ["eval.tasks=[arc_easy]"], "eval.tasks", "eval"),
    ("lm_eval", ["eval.tasks=[general_knowledge]"], "eval.tasks", "eval"),
    ("vllm", ["eval.tasks=[arc_easy]", "eval.engine=vllm"], "eval.engine", "vllm"),
    ("sklearn", ["adapter.type=adamss"], "adapter.type", "scikit-learn"),
    ("flash_attn", ["model.attention=flash_attention_2"], "model.attention", "flash"),
    ("flash_attn", ["model.attention=flash_attention_4"], "model.attention", "kernels"),
    ("wandb", ["train.report_to=wandb"], "train.report_to", "wandb"),
    ("tensorboard", ["train.report_to=[tensorboard]"], "train.report_to", "tensorboard"),
    ("mlflow", ["train.report_to=mlflow"], "train.report_to", "mlflow"),
    ("galore_torch", ["train.optim=galore_adamw", PROJECTED], "train.optim", "galore-torch"),
    ("apollo_torch", ["train.optim=apollo_adamw", PROJECTED], "train.optim", "apollo-torch"),
    ("lomo_optim", ["train.optim=lomo"], "train.optim", "lomo-optim"),
    ("grokadamw", ["train.optim=grokadamw"], "train.optim", "grokadamw"),
    ("optimi", ["train.optim=stable_adamw"], "train.optim", "torch-optimi"),
    ("langdetect", ["eval.tasks=[ifeval]"], "eval.tasks", "lm-eval[ifeval]"),
    ("math_verify", ["eval.tasks=[minerva_math_algebra]"], "eval.tasks", "lm-eval[math]"),
]  # fmt: skip
LAUNCHES = [("deepspeed", "zero3_8", "deepspeed"), ("transformer_engine", "8xh100_fp8_te", "fp8")]
LAUNCHES += [("torchao", "8xh100_fp8_torchao", "quantize")]
# Missing modules, a family whose layers need it to separate packed examples, and how it is installed
KERNELS = [("causal_conv1d", "lfm2", "[hybrid]"), ("fla", "qwen3_next", "[hybrid]")]
KERNELS += [("mamba_ssm", "bamba", "install mamba-ssm --no-build-isolation")]
# One process for all: what it prints is `module, key, exit codes, errors`
SCRIPT = """
import contextlib, io, json, sys
from finetune.cli import main
cases, recipe = json.loads(sys.argv[1])
def run(module, *command):
    sys.modules[module], err = None, io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main.main(command)
    del sys.modules[module]
    return int(code), err.getvalue()
for module, overrides, key, extra in cases:
    for command in ("check", "train", "profile"):
        found = run(module, command, recipe, *overrides)
        print(json.dumps([[module, *overrides, command], key, extra, *found]))
print(json.dumps("torch" in sys.modules))
"""


def test_missing_package_is_found_before_torch_is_imported() -> None:
    begun = time.perf_counter()
    given = json.dumps([CASES, str(QUICKSTART)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *found, imported = [json.loads(line) for line in done.stdout.splitlines() if line[0] in "[tf"]
    assert len(found) == 3 * len(CASES) and not imported
    for case, key, extra, code, said in found:
        assert code == 3 and key in said and "pip install" in said, (case, code, said)
        assert extra in said.partition("pip install")[2], (case, said)
    assert time.perf_counter() - begun < 0.5 * len(found), "all of it is looked up, nothing is loaded"


@pytest.mark.parametrize(("module", "config", "extra"), LAUNCHES)
def test_missing_package_of_a_launch_is_found_before_it_starts(
    module: str, config: str, extra: str, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main.main(["train", str(QUICKSTART), "--accelerate", config]) == 3
    said = capsys.readouterr().err
    assert f"[{extra}]" in said and "not installed" in said


@pytest.mark.parametrize(("module", "family", "how"), KERNELS)
def test_missing_kernel_of_packed_examples_is_found_with_its_extra(
    module: str, family: str, how: str, monkeypatch
) -> None:
    monkeypatch.setattr(packing_support.packages, "installed", lambda name: name != module)
    data, train = Data(name="rows.jsonl", packing=True), Train()
    config = config_of(family)
    with pytest.raises(UserError) as caught:
        packing_support.check(config, data, train, "auto")
    (problem,) = caught.value.problems
    assert caught.value.code == 3 and packing_support.DISTRIBUTIONS[module] in problem.why
    assert problem.fix.startswith("data.packing: false; or, ") and how in problem.fix
    monkeypatch.setattr(packing_support.packages, "installed", lambda name: True)
    packing_support.check(config, data, train, "auto")


def test_each_extra_of_the_project_has_a_case() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    covered = {extra for *_, extra in (*CASES, *LAUNCHES)} | {"hybrid"}
    assert set(project["optional-dependencies"]) - {"dev", "docs", "sweep", "export"} <= covered, (
        "two are of commands"
    )


def test_every_optimizer_of_transformers_names_its_package(monkeypatch) -> None:
    from transformers.training_args import OptimizerNames

    from finetune.recipe.schema import Speed

    plain = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
    monkeypatch.setattr(optimizer_choice, "installed", lambda name: False)
    for name in {optimizer.value for optimizer in OptimizerNames} - plain:
        if not name.startswith("schedule_free"):  # which no recipe can name
            assert optimizer_choice.missing_packages(name, Speed()), name


@pytest.mark.parametrize("command", ["evaluate", "merge"])
def test_commands_on_a_run_find_a_missing_package_first(command: str, trained, monkeypatch, capsys) -> None:
    run = trained()
    options = {"evaluate": ["--tasks", "arc_easy"], "merge": ["--quantize", "int8"]}[command]
    monkeypatch.setitem(sys.modules, {"evaluate": "lm_eval", "merge": "torchao"}[command], None)
    monkeypatch.setattr(f"finetune.cli.{command}.fast_imports", None)  # before torch is imported
    assert main.main([command, str(run.path), *options]) == 3
    assert "pip install" in capsys.readouterr().err


# ---- what lm-eval's tasks import


@pytest.fixture
def tasks_folder(tmp_path):
    folder = tmp_path / "lm_eval" / "tasks"
    (folder / "own").mkdir(parents=True)
    return folder


def write(folder, **files: str) -> None:
    for name, content in files.items():
        name, _, kind = name.rpartition("_")
        (folder / f"{name}.{kind}").write_text(content)


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("import absent_one", "absent_one"),
        ("from absent_one.part import name", "absent_one"),
        ("import json, re\nimport numpy as np", None),
        ("try:\n    import absent_one\nexcept ImportError:\n    absent_one = None", None),
        ("try:\n    import absent_one\nexcept ImportError:\n    raise ValueError('pip')", "absent_one"),
        ("def later():\n    import absent_one", None),
        ("import helper", "absent_two"),
        ("from lm_eval.tasks.own import helper", "absent_two"),
        ("from lm_eval.tasks.own.helper import name", "absent_two"),
    ],
)  # fmt: skip
def test_missing_of_a_task_follows_what_its_code_imports(code: str, needs, tasks_folder) -> None:
    own = tasks_folder / "own"
    write(own, task_yaml="task: own\nprocess_results: !function utils.process\n", utils_py=code)
    write(own, helper_py="import absent_two\n")
    found = task_packages.missing("own", [own / "task.yaml"])
    assert (found and found.what) == (needs and f"the task `own` needs {needs}")


def test_missing_of_a_group_looks_into_its_tasks(tasks_folder) -> None:
    own = tasks_folder / "own"
    write(own, all_yaml="group: all\ntask:\n  - one\n  - two\n", one_yaml="task: one\ninclude: base_yaml\n")
    (own / "base_yaml").write_text("doc_to_text: !function utils.text\n")
    write(own, utils_py="import absent_one", other_yaml="task: other\ndoc_to_text: !function other.text\n")
    write(own, other_py="import absent_two")
    (tasks_folder / "elsewhere").mkdir()
    write(tasks_folder / "elsewhere", two_yaml="task: two\ndoc_to_text: !function code.text\n")
    write(tasks_folder / "elsewhere", code_py="import absent_three")
    found = task_packages.missing("all", [own / "all.yaml"])
    assert found and found.what == "the task `all` needs absent_one, absent_three"
