"""accelerate_configs/: Accelerate reads each file as it is written."""

from pathlib import Path

import pytest
import yaml

from support.paths import ROOT

CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))


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
