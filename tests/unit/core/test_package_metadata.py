"""pyproject.toml: `finetune doctor` knows its extras, and constraints.txt is within its ranges."""

from support.paths import ROOT


def test_extras_of_doctor_are_those_of_the_package() -> None:
    import tomllib

    from finetune.cli import doctor_report

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {*doctor_report.EXTRAS, "dev", "docs"}


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
