"""Kernels of gated delta nets that compute wrong gradients are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers

from finetune.autoconfig import compilation, delta_net_kernels
from finetune.core.errors import Exit, UserError
from finetune.hardware.detection import Hardware
from support.hybrid_families import config_of

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, triton: str, *modules: str) -> None:
    """Put empty packages and the metadata of a version of Triton on the path."""
    for module in modules:
        (folder / module).mkdir()
        (folder / module / "__init__.py").touch()
    metadata = folder / f"triton-{triton}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {triton}\n")
    monkeypatch.syspath_prepend(folder)


def gpu(major: int) -> Hardware:
    return Hardware("cuda", "a GPU", 1, (major, 0), 80.0, 8)


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0"])
def test_hopper_with_a_wrong_triton_is_refused(
    triton: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, triton, "fla")
    with pytest.raises(UserError, match=f"triton {triton} on a GPU") as error:
        delta_net_kernels.check(config_of("qwen3_5_text"), gpu(9))
    assert error.value.code == Exit.ENVIRONMENT


def test_a_gpu_build_without_triton_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "3.6.0", "fla")
    (tmp_path / "triton-3.6.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\n")
    (tmp_path / "triton-3.6.0.dist-info").rename(tmp_path / "other-3.6.0.dist-info")
    delta_net_kernels.check(config_of("qwen3_5_text"), gpu(9))


@pytest.mark.parametrize(
    ("triton", "modules", "major", "config"),
    [
        ("3.7.1", ["fla"], 9, "qwen3_5_text"),
        ("3.3.1", ["fla"], 9, "qwen3_5_text"),
        ("3.6.0", ["fla", "tilelang"], 9, "qwen3_5_text"),
        ("3.6.0", [], 9, "qwen3_5_text"),
        ("3.6.0", ["fla"], 8, "qwen3_5_text"),
        ("3.6.0", ["fla"], 9, ""),
    ],
)
def test_others_are_not(
    triton: str,
    modules: list[str],
    major: int,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, monkeypatch, triton, *modules)
    delta_net_kernels.check(config_of(config) if config else transformers.LlamaConfig(), gpu(major))


def test_auto_does_not_compile_layers_with_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step had not ended after three minutes (benchmarks/LOG.md)."""
    config = config_of("qwen3_5_text")
    assert not delta_net_kernels.not_compiled_reason(config)
    install(tmp_path, monkeypatch, "3.7.1", "fla")
    reason = delta_net_kernels.not_compiled_reason(config)
    assert "flash-linear-attention" in reason
    assert not delta_net_kernels.not_compiled_reason(transformers.LlamaConfig())
    work = compilation.Work(4096, 1e30, eager=reason)
    assert compilation.choose_compile("auto", work, gpu(9)) == ("off", f"auto: {reason}")
    assert compilation.choose_compile(True, work, gpu(9)).value == "on"
