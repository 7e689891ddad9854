"""The house keeps its own rules: imports, size, the schema, the recipes, the launch configs, the README."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ADAPTERS, ROOT, module_of

from finetune.cli import main
from finetune.core import shipped_files
from finetune.recipe import build

PACKAGE = ROOT / "finetune"
# Who may import whom, lowest first: a module imports only from the layers under its own, or its own layer's
# modules named before it. Only `train` (and what drives it) sees everything.
LAYERS = (
    ("privacy",),
    ("errors",),
    ("faults", "signals", "claim"),
    ("strict_yaml", "strict_json", "upstream", "renames", "sections", "arguments", "gpus"),
    ("adapter_types",),
    (
        "adapter_conflicts",
        "qat",
        "attention_choice",
        "optimizers",
        "launch_env",
        "launch_config",
        "shards",
        "zero",
    ),
    ("train_conflicts",),
    ("recipe_errors", "shipped", "te", "launch_conflicts"),
    (
        "recipe",
        "receipts",
        "batch",
        "hardware",
        "modules",
        "adapter_init",
        "hub",
        "ranks",
        "nested",
        "untrusted",
    ),
    (
        "ladder",
        "run_folder",
        "screen",
        "adapter_source",
        "plots",
        "estimate",
        "shapes",
        "checkpoint",
        "base_model",
    ),
    ("architecture", "keeping", "given"),
    ("cuda_graphs",),
    ("speed",),
    (
        "data",
        "model",
        "adapters",
        "adalora",
        "callbacks",
        "trackers",
        "stopping",
        "resume",
        "measure",
    ),
    ("state", "exchange", "loraplus", "nonfinite", "task_files", "report_scores"),
    ("rescue",),
    ("batch_search",),
    ("trainer", "summary", "paired", "scoring", "tasks", "quantize", "card", "differences"),
    ("trial",),
    ("tied", "measured"),
    ("ablate_table", "ablate_judge"),
    ("plan_launch",),
    ("plan_tokens",),
    ("plan_adapter", "plan_memory", "plan_rows", "plan_time"),
    ("plan_notes",),
    ("harness", "check"),
    ("results",),
    ("evaluate", "validate"),
    ("verify", "proof", "publish", "compare_table", "report"),
    ("launch_receipts", "apart", "stages"),
    ("study_storage", "tune_space"),
    ("tune_report", "tune_check", "sweep"),
    ("plan_choices",),
    ("train", "merge", "doctor", "launch", "chat", "plan", "prove", "tune"),
    ("operations",),
    ("levers",),
    ("plan_changes", "profile", "warm", "preflight", "ablate", "ab_test"),
    ("compare", "dry_run"),
    ("tune_command",),
    ("cli",),
    ("__main__",),
)
RECIPES = shipped_files.recipes()
CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports at run time (not for type checking only)."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "finetune":
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("finetune.")}
    return found


def test_imports_point_downwards() -> None:
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    files = [
        path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts and path.name != "__init__.py"
    ]
    assert len(files) > 20
    for path in files:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert own in level, f"{own} has no layer: say in LAYERS who may import it"
        for other in imports(path) - {own}:
            assert level[other] < level[own], f"{own} imports {other}"


def test_every_module_stands_in_the_table() -> None:
    told = set(re.findall(r"`([a-z0-9_/]+\.py)`", (PACKAGE.parent / "CONTRIBUTING.md").read_text()))
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if not p.name.startswith("__")}
    assert {name for name in found if not name.startswith("examples")} - told == set()


def test_only_train_and_what_drives_it_sees_the_whole_recipe() -> None:
    """Every other function receives its own section."""
    takers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                annotations = [ast.unparse(a.annotation) for a in node.args.args if a.annotation]
                if any(re.fullmatch(r"(finetune\.)?Recipe( \| None)?", a) for a in annotations):
                    takers.add(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    drivers = {
        "train",
        "summary",
        "run_folder",
        "evaluate",
        "check",
        "doctor",
        "cli",
        "dry_run",
        "plan",
        "plan_changes",
        "plan_choices",
        "profile",
        "levers",
        "prove",
        "given",
        "stages",
        "preflight",
        "tune",
        "tune_space",
        "tune_check",
        "tune_report",
        "sweep",
    }
    sees_all = {"ab_test", "ablate_table", "merge", "proof", "publish", "card", "compare", "compare_table"}
    assert takers <= drivers | sees_all


def test_files_and_functions_fit_a_screen() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 420, f"{path}: does it hold one concept?"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path}: {node.name} is long"


def test_nothing_unsafe_is_called() -> None:
    """No call trusts code, starts a shell, unpickles, executes text or listens; none that opens a model
    leaves open whether it may run the model's code."""
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "socketserver", "http.server"}
    calls = {"eval", "exec", "compile", "os.system", "os.popen", "torch.load", "np.load", "numpy.load"}
    calls |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "subprocess.getoutput"}
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not named & modules, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in calls, f"{path}:{node.lineno}"
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code", "False") == "False", f"{path}:{node.lineno}"
                assert not given.keys() & {"shell", "allow_pickle", "allow_all_kernels"}, (
                    f"{path}:{node.lineno}"
                )
                assert given.get("weights_only", "True") == "True", f"{path}:{node.lineno}"
    text = (PACKAGE / "model.py").read_text()
    assert "revision=revision, trust_remote_code=False" in text, (
        "not given, transformers asks at the terminal"
    )


def in_one_order(value: object) -> object:
    """A schema with the alternatives of each union sorted: `typing` keeps the order that was asked for first
    in a process, by whichever library."""
    if isinstance(value, dict):
        sorted_items = {key: in_one_order(part) for key, part in value.items()}
        if isinstance(sorted_items.get("anyOf"), list):
            sorted_items["anyOf"] = sorted(sorted_items["anyOf"], key=lambda part: json.dumps(part))
        return sorted_items
    return [in_one_order(part) for part in value] if isinstance(value, list) else value


def test_the_schema_is_current() -> None:
    now = json.loads(json.dumps(build.json_schema()))
    assert in_one_order(json.loads(shipped_files.SCHEMA.read_text())) == in_one_order(now), "make schema"


def test_every_key_of_a_recipe_is_in_the_docs() -> None:
    make_schema = module_of("scripts", "make_schema")
    assert (ROOT / "docs" / "recipe.md").read_text() == make_schema.page(), "make schema"


def test_there_are_recipes_for_each_model_and_adapter() -> None:
    others = {"adapters", "baselines", "gpus", "isc25"}
    models = {name.partition("/")[0] for name in RECIPES if "/" in name} - others
    assert models == {"llama3_8b", "llama3_1b", "qwen3_8b", "mistral_7b"}
    for model in models:
        kinds = {name.partition("/")[2] for name in RECIPES if name.startswith(f"{model}/")}
        assert kinds == set(ADAPTERS) - {"qdora"}


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_checks(name: str, capsys) -> None:
    assert main.main(["check", str(RECIPES[name])]) == 0, capsys.readouterr().err
    first = RECIPES[name].read_text().splitlines()[0]
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert schema and (RECIPES[name].parent / schema[1]).resolve() == shipped_files.SCHEMA
    assert shipped_files.purpose(RECIPES[name])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_launch_config(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    text = path.read_text()
    config = load_config_from_file(str(path))
    for key, value in yaml.safe_load(text).items():
        got = getattr(config, key)
        assert str(getattr(got, "value", got)) == str(value), key
    assert text.startswith("# "), "its first line says when to use it"


def test_there_are_launch_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"cpu", "cpu_2", "single_gpu", "ddp_8"}


def test_extras_of_doctor_are_those_of_the_package() -> None:
    import tomllib

    from finetune.cli import doctor_report

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {*doctor_report.EXTRAS, "dev"}


def test_constraints_are_within_the_ranges() -> None:
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    allowed = {Requirement(line).name.lower(): Requirement(line).specifier for line in ranges}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for name, _, version in (line.partition("==") for line in pins):
        if name.lower() in allowed:
            assert allowed[name.lower()].contains(version), name


def test_the_wheel_alone_can_train_the_quickstart(tmp_path) -> None:
    """Recipes, configs and the embedded model are inside it, and found there."""
    import zipfile

    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("finetune_toolkit-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    program = "import sys; from finetune.cli.main import main; sys.exit(main(sys.argv[1:]))"

    def finetune(*command: str) -> None:
        run = [sys.executable, "-c", program, *command]
        environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
        done = subprocess.run(run, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout

    finetune("recipes", "quickstart", "--copy", ".")
    short = ["train.max_steps=1", "train.warmup_steps=0", "data.validation=null", "train.output_dir=run"]
    finetune("train", "quickstart.yaml", *short, "train.effective_batch_size=4")
    assert (work / "run" / "adapter" / "adapter_model.safetensors").exists()
