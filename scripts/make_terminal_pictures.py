"""Draw pictures of the terminal as SVG files in docs/images (`make schema`). A test compares their text.

python scripts/make_terminal_pictures.py

The commands run in this process. The end of a run is printed from the result of a recorded run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from finetune.cli import main as commands
from finetune.core.console import Console
from finetune.core.run_checks import RunChecks
from finetune.planning import plan_report, planned_machine
from finetune.recipe import loader
from finetune.reporting import terminal
from finetune.run_folder.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
RECORDED = Path(__file__).with_name("recorded_result.json")
WIDTH = 100
MOST_LINES = 36  # of the output that a picture shows
RECIPE = """\
model:
  name: examples/tiny_llama/model
data:
  name: examples/tiny_llama/data/train.jsonl
adapter:
  type: lroa
train:
  learning_rat: 2e-4
"""


def main() -> None:
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def pictures() -> dict[str, str]:
    """Return each picture by its file name."""
    scenes: dict[str, tuple[str, Callable[[Console], None]]] = {
        "terminal_check.svg": ("finetune check my.yaml", check),
        "terminal_plan.svg": ("finetune plan quickstart --gpu l4", plan),
        "terminal_run.svg": ("finetune train quickstart train.output_dir=runs/quickstart", end_of_run),
    }
    return {name: draw(name, command, scene) for name, (command, scene) in scenes.items()}


def draw(name: str, command: str, scene: Callable[[Console], None]) -> str:
    """Return a picture of a command and its output, which needs no file from the network."""
    screen = Console()
    options: Any = {"highlight": False, "markup": False, "emoji": False}
    options |= {"record": True, "width": WIDTH, "file": io.StringIO()}
    screen.console = RichConsole(**options)  # no terminal, so that a slow machine draws no progress bar
    screen.say(f"$ {command}", style="bold")
    with _prepared():
        scene(screen)
    text = Text.from_ansi(screen.console.export_text(styles=True))
    recorder = RichConsole(force_terminal=True, **options)
    recorder.print(Text("\n").join(text.split("\n")[:MOST_LINES]))
    drawn = recorder.export_svg(title="finetune", unique_id=Path(name).stem)
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    lines = drawn.replace("Fira Code, monospace", "monospace").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def text_of(picture: str) -> list[str]:
    """Return the lines of text of a picture, without the title of its window."""
    lines: dict[str, str] = {}
    for place, text in re.findall(
        r'<text class="[^"]+-r\d+" x="[^"]+" y="([^"]+)"[^>]*>(.*?)</text>', picture
    ):
        lines[place] = lines.get(place, "") + unescape(text).replace("\xa0", " ")
    return [" ".join(line.split()) for line in lines.values()]


@contextlib.contextmanager
def _prepared() -> Any:
    """Work in a folder with the examples. The PATH has this installation, as after `source activate`."""
    before, path = Path.cwd(), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            Path("examples").symlink_to(ROOT / "examples")
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
            yield
        finally:
            os.chdir(before)
            os.environ["PATH"] = path


def check(screen: Console) -> None:
    """`finetune check` of a recipe with two mistakes."""
    Path("my.yaml").write_text(RECIPE, encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        commands.main(["check", "my.yaml"])
    screen.say(*printed.getvalue().splitlines())


def plan(screen: Console) -> None:
    """The first tables of a plan."""
    recipe = loader.load(ROOT / "recipes" / "quickstart.yaml", [])
    short = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name": "examples/tiny_llama/model"})}
    )
    plan_report.run(short, [], screen, planned_machine.PlanRequest("l4", None, None, None))


def end_of_run(screen: Console) -> None:
    """What a run prints at its end."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    checks = RunChecks()
    for number in range(recorded["run_checks"]):
        checks.add(str(number), "", "", "")
    folder = RunFolder(Path("runs/quickstart"))
    folder.adapter.mkdir(parents=True)
    (folder.path / "data_report.json").write_text(json.dumps(recorded["data_report"]), encoding="utf-8")
    terminal.show_result(screen, folder, checks, recorded["result"])


if __name__ == "__main__":
    main()
