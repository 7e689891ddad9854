"""What is installed is what `locks/` names: every package of every extra, pinned, each file with its hash."""

import re
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.paths import ROOT

LOCKS = {path.stem: path for path in sorted((ROOT / "locks").glob("*.txt"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MADE = {"base", "torch", "torch-cpu", "tools"}
EXTRAS = re.findall(r"^EXTRAS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
CI = ("base", "torch", "torch-cpu", *EXTRAS)  # what `make test` installs


def pins(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each package of a lock, with the hashes of its files."""
    lines = [line for line in LOCKS[name].read_text().splitlines() if not line.startswith("#")]
    blocks = re.split(r"\n(?=\S)", "\n".join(lines))
    return [
        (Requirement(re.split(r"\s+\\\n", block)[0]), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
        for block in blocks
    ]


def here(*names: str) -> dict[str, list[Version]]:
    """What locks say for this Python and system: package -> versions."""
    found: dict[str, list[Version]] = {}
    for package, _ in (pin for name in names for pin in pins(name)):
        if package.marker is None or package.marker.evaluate():
            version = Version(str(package.specifier).removeprefix("=="))
            found.setdefault(canonicalize_name(package.name), []).append(version)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_file_has_a_version_and_a_hash(name: str) -> None:
    for package, hashes in pins(name):
        assert re.fullmatch(r"==[0-9][\w.!+]*", str(package.specifier)) and hashes, package
    assert "://" not in LOCKS[name].read_text(), "packages come by name"


def test_every_extra_has_a_lock_that_holds_what_it_asks_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert LOCKS.keys() == {*MADE, *extras}
    for name, asked in {"base": PROJECT["dependencies"], **extras}.items():
        held = here(*{"base", "torch", name})
        for requirement in map(Requirement, asked):
            versions = held[canonicalize_name(requirement.name)]
            assert all(requirement.specifier.contains(v, prereleases=True) for v in versions), requirement
    held = here(*LOCKS.keys() - {"tools"})
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            pin = Requirement(line)
            assert all(v in pin.specifier for v in held[canonicalize_name(pin.name)]), f"make locks: {line}"


def test_make_installs_by_hash_alone() -> None:
    text = (ROOT / "Makefile").read_text()
    named = dict(re.findall(r"^(LOCKED|OURSELVES|TORCH) := (.*)", text, re.MULTILINE))
    installs = re.findall(r"^.*pip install.*$", text, re.MULTILINE)
    assert len(installs) == 3 and text.count("$(LOCKED)") == 5
    for line in installs:
        ours = line.endswith(named["OURSELVES"]) and "--no-deps --no-build-isolation -e ." in line
        assert ours or "--require-hashes --no-deps" in line


@pytest.mark.skipif(
    not (Path(sys.prefix) / "installed-dev").exists(), reason="an environment that make has not made"
)
def test_what_is_installed_is_what_is_locked() -> None:
    """From this package through all that is asked for, as far as it goes."""
    locked, seen = here(*CI), set[tuple[str, str]]()
    waiting = [(Requirement(text), "") for text in distribution("finetune-toolkit").requires or ()]
    waiting = [
        (r, e) for r, _ in waiting for e in ("", *EXTRAS) if not r.marker or r.marker.evaluate({"extra": e})
    ]
    while waiting:
        requirement, _ = waiting.pop()
        name = canonicalize_name(requirement.name)
        installed = distribution(name)
        assert Version(installed.version) in locked[name], f"{name}: {installed.version} is not locked"
        assert requirement.specifier.contains(installed.version, prereleases=True), requirement
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for asked in map(Requirement, installed.requires or ()):
                if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                    waiting.append((asked, ""))
    assert len({name for name, _ in seen}) > 80
