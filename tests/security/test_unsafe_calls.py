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
                assert ast.unparse(node.func) not in calls, f"{path}:{node.lineno}"
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
