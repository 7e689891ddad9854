"""Changed recipes and configs are refused or accepted: no traceback, hang, request or written file."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support import mutated_inputs
from support.limited_commands import LimitedCommands
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RECIPES, CONFIGS = 10_000, 2_000
RECIPE_PARTS, CONFIG_PARTS = 1000, 200


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[LimitedCommands]:
    imports = ("pyarrow.parquet", "tokenizers", "torch", "peft", "finetune.preflight.gradient_probe")
    with LimitedCommands(*imports, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))) as running:
        yield running


@contextlib.contextmanager
def listening() -> Iterator[tuple[dict[str, str], Callable[[], bool]]]:
    """A proxy to which every request would go: the variables that name it, and whether one came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

        def was_asked() -> bool:
            with contextlib.suppress(BlockingIOError):
                server.accept()
                return True
            return False

        yield {**dict.fromkeys(names, address), "no_proxy": "", "HF_HUB_OFFLINE": "1"}, was_asked


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_cases(write: Callable[[int, Path], Path], seeds: range, folder: Path, commands) -> Counter[int]:
    """`finetune check` of each case; how often it ended with each exit code."""
    home, codes = folder / "home", Counter[int]()
    home.mkdir()
    mutated_inputs.make_folder(home)
    with listening() as (variables, was_asked):
        for seed in seeds:
            path = write(seed, home)
            before = files_in(folder)
            ended = commands.run("check", str(path), **variables)
            assert not ended.wrong, f"seed {seed}: {ended}"
            assert files_in(folder) == before, f"seed {seed}"
            assert not was_asked(), f"seed {seed}"
            codes[ended.code] += 1
    assert set(codes) <= {0, 2, 3}, codes
    return codes


@pytest.mark.parametrize("part", soak_except([0], range(RECIPE_PARTS)))
def test_mutated_recipe_is_checked_or_refused(part: int, tmp_path, commands) -> None:
    codes = check_cases(mutated_inputs.write_recipe, range(part, RECIPES, RECIPE_PARTS), tmp_path, commands)
    assert codes[2] > 2, codes


@pytest.mark.parametrize("part", soak_except([0], range(CONFIG_PARTS)))
def test_mutated_config_of_a_model_is_checked_or_refused(part: int, tmp_path, commands) -> None:
    codes = check_cases(mutated_inputs.write_model, range(part, CONFIGS, CONFIG_PARTS), tmp_path, commands)
    assert codes[2] > 1, codes
