"""Write `locks/`: every package of every extra, pinned, with the hashes of its files (`make locks`).

    locks/base.txt      what the package itself needs but torch, and what builds it
    locks/<extra>.txt   what an extra needs beside that
    locks/torch.txt     torch as the registry has it: on Linux for CUDA, with CUDA's libraries
    locks/torch-cpu.txt its build for CPUs, where pip is pointed to one
    locks/tools.txt     what makes these files, and the bill of materials (`make sbom`)

One resolution for all extras, systems and Pythons, so that files go together:
`pip install --require-hashes --no-deps -r locks/base.txt -r locks/torch.txt`. Needs uv, and the network.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
BUILDS, TOOLS = "hatchling\neditables\n", "uv\ncyclonedx-bom\n"
TORCH = re.compile(r"(torch==|(nvidia|cuda|triton)\b)")
# PyTorch's own, of another index than the registry's: Python 3.11, Linux x86-64
CPU_BUILD = """\
torch==2.13.0+cpu \\
    --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"""


def compiled(more: str, *options: str) -> list[str]:
    """The pins with their hashes, one text a package, by uv's resolution of `more` and what options name."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--universal", "--generate-hashes"]
    command += ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", *options]
    done = subprocess.run(command, cwd=ROOT, input=more, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [text for text in re.split(r"\n(?=\S)", done.stdout.strip()) if text]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = compiled(BUILDS, "pyproject.toml", "--all-extras", "-c", "constraints.txt")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text("\n".join(one.partition(" \\\n")[0] for one in every))
        options = ("pyproject.toml", "-c", str(pins))
        base = set(compiled(BUILDS, *options))
        found = {name: compiled("", *options, "--extra", name) for name in project["optional-dependencies"]}
    files = {"base": {one for one in base if not TORCH.match(one)}}
    files["torch"], files["torch-cpu"] = base - files["base"], {CPU_BUILD}
    files |= {name: set(packages) - base for name, packages in found.items()}
    files["tools"] = set(compiled(TOOLS))
    LOCKS.mkdir(exist_ok=True)
    for name, packages in files.items():
        text = "\n".join(sorted(packages))
        (LOCKS / f"{name}.txt").write_text(f"# Made by `make locks`\n{text}\n", encoding="utf-8")
        print(f"locks/{name}.txt: {len(packages)} packages")


if __name__ == "__main__":
    main()
