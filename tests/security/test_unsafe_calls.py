"""The source calls nothing that runs the code of somebody else."""

import ast

from support.paths import ROOT

PACKAGE = ROOT / "finetune"


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
                name = ast.unparse(node.func)
                assert name not in calls, f"{path}:{node.lineno}"
                assert not name.endswith(".apply_chat_template"), f"{path}:{node.lineno}: it has no limits"
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code", "False") == "False", f"{path}:{node.lineno}"
                assert not given.keys() & {"shell", "allow_pickle", "allow_all_kernels"}, (
                    f"{path}:{node.lineno}"
                )
                assert given.get("weights_only", "True") == "True", f"{path}:{node.lineno}"
    text = (PACKAGE / "models" / "model_files.py").read_text()
    assert "revision=revision, trust_remote_code=False" in text, (
        "not given, transformers asks at the terminal"
    )


# What writes outside of `core/safe_files.py`: its calls, and why no stranger's link is in their way
OWN_FOLDERS: dict[str, tuple[set[str], str]] = {
    "cli/data.py": ({"mkdir"}, "the folder that the command line names"),
    "cli/import_recipe.py": ({"mkdir"}, "the folder that the command line names"),
    "cli/init.py": ({"mkdir"}, "the folder that the command line names"),
    "cli/sweep.py": ({"mkdir"}, "the folder that the command line names"),
    "core/shipped_files.py": ({"mkdir"}, "the folder that the command line names"),
    "core/standard_streams.py": ({"open"}, "/dev/null"),
    "data/arrow_store.py": ({"open", "unlink"}, "the user's own cache"),
    "data/hub_datasets.py": (
        {"TemporaryDirectory", "mkdir", "copyfile", "touch"},
        "a new temporary folder",
    ),
    "data/preparation.py": ({"rmtree"}, "a new folder in the cache"),
    "data/prepared_cache.py": (
        {"mkdir", "rename", "rmtree", "unlink"},
        "names below the cache that the user chose",
    ),
    "data/readers.py": ({"mkdtemp", "rmtree", "open"}, "a new temporary folder"),
    "distributed/launch_environment.py": ({"write_text"}, "the file that torch's launcher names"),
    "experiments/runner/kept_runs.py": ({"mkdir"}, "the folder that the command line names"),
    "experiments/runner/measured_run.py": ({"mkdir"}, "folders; `refuse_links` came first"),
    "experiments/runner/rehearsal.py": ({"mkdtemp", "rmtree"}, "a new temporary folder"),
    "experiments/runner/verify_resume.py": (
        {"mkdtemp", "rmtree", "copytree"},
        "a new temporary folder",
    ),
    "export/folder_export.py": ({"copyfile"}, "a new folder of `private_folder`"),
    "export/gguf_export.py": ({"TemporaryDirectory"}, "a new temporary folder"),
    "export/gguf_readers.py": ({"TemporaryDirectory"}, "a new temporary folder"),
    "export/staged_files.py": (
        {"mkdtemp", "rmtree", "mkdir", "symlink_to", "unlink", "write_text", "copyfile"},
        "a new temporary folder",
    ),
    "hub/dataset_repository.py": ({"mkdir"}, "the user's own cache"),
    "importers/verify.py": ({"TemporaryDirectory"}, "a new temporary folder"),
    "models/module_lists.py": ({"mkdir"}, "the user's own cache"),
    "planning/measured_rates.py": ({"mkdir"}, "the user's own cache"),
    "profiling/profiler.py": ({"mkdir", "mkdtemp", "rmtree", "rmdir"}, "the folder of the command line"),
    "run_folder/lock.py": (
        {"mkdir", "rmdir", "unlink", "NamedTemporaryFile"},
        "folders, and names that are deleted",
    ),
    "run_folder/run_folder.py": (
        {"mkdir", "mkdtemp", "copyfile", "symlink_to", "rename", "rmtree"},
        "`_fetch`: a new folder",
    ),
}
# Libraries that write by themselves: into a folder of `private_folder` or `replace_folder`, by these names
SAVERS = {"save_file", "save_pretrained", "save_to_disk", "export_chrome_trace", "write_memory_snapshot"}
PRIVATE = {
    "adapters/initialization.py": ("target", "initial"),  # parameters; training/ gives `private`
    "checkpointing/checkpoints.py": ("path",),
    "export/gguf_export.py": ("base.source",),
    "export/merged_files.py": ("whole", "packed"),
    "export/compressed_export.py": ("folder", "stored"),
    "core/upstream_private.py": ("path",),
    "profiling/profiler.py": ("private.path / file.name", "private.path / path.name"),
    "training/nan_detection.py": ("private.path / name",),
    "training/saving.py": ("private",),
}


def test_only_safe_files_writes_into_run_folders() -> None:
    """Every other call that writes is listed with the reason why no link can be in its way."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or name == "core/safe_files.py":
                continue
            if written_by(node):
                found.setdefault(name, set()).add(ast.unparse(node.func).rpartition(".")[2])
            if ast.unparse(node.func).rpartition(".")[2] in SAVERS:
                targets = [
                    ast.unparse(argument).removeprefix("str(").removesuffix(")") for argument in node.args
                ]
                assert set(targets) & set(PRIVATE.get(name, ())), f"{path}:{node.lineno}"
    assert found == {name: calls for name, (calls, _) in OWN_FOLDERS.items()}


MADE = {"mkdir", "makedirs", "unlink", "remove", "rmdir", "rename", "renames", "link", "symlink", "truncate"}
PATHS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "rename", "replace"}
COPIES = {"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "copyfileobj"}
TEMPORARY = {"mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory"}


def written_by(call: ast.Call) -> bool:
    """Whether a call makes, changes or deletes a file or folder by its name."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if owner in ("os", "shutil", "tempfile"):
        opened = name == "open" and any(
            "os.O_WRONLY" in a or "os.O_RDWR" in a for a in map(ast.unparse, call.args)
        )
        return name in MADE | COPIES | TEMPORARY | {"replace"} or opened
    if owner in ("safe_files", "dataclasses"):
        return False
    if name == "open":
        modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
        modes += call.args[1:2] if not owner else call.args[:1]
        return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)
    paths_only = name in ("mkdir", "unlink", "rmdir") and bool(owner)
    return paths_only or (name in PATHS and bool(owner) and len(call.args) <= 1 and not given_by_name(call))


def given_by_name(call: ast.Call) -> bool:
    """Whether `replace` is that of a date or a text."""
    of_paths = ("encoding", "errors", "exist_ok", "target_is_directory")
    return any(keyword.arg not in of_paths for keyword in call.keywords)
