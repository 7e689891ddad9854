"""The wheel alone trains the quickstart."""

import subprocess
import sys

from support.paths import ROOT


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
    finetune("train", "quickstart.yaml", *short, "train.effective_batch_size=4", "eval.forgetting=false")
    assert (work / "run" / "adapter" / "adapter_model.safetensors").exists()
