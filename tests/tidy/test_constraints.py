"""Does constraints.txt name every version that is used, and nothing but names and versions?"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tidy.source_tree import ROOT

LINE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*")
SEEDED = {"pip", "setuptools"}
"""What an interpreter puts into a new environment by itself, at a version of its own."""


def lines() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def constraints() -> dict[str, Version]:
    return {name: Version(version) for name, version in (line.split("==") for line in lines())}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    return [Requirement(text) for text in wanted]


def test_names_and_versions_only_in_order() -> None:
    odd = [line for line in lines() if not LINE.fullmatch(line)]
    assert not odd, f"not name==version: {odd}"
    names = [line.split("==")[0] for line in lines()]
    assert names == sorted(set(names))


def test_every_installed_distribution_is_at_its_constraint() -> None:
    known = constraints()
    said = []
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in SEEDED or name == "remit":
            continue
        if name not in known:
            said.append(f"{name} {distribution.version} is installed, but no line of constraints.txt names it")
        elif Version(distribution.version) != known[name]:
            said.append(f"{name} is installed as {distribution.version}, constraints.txt says {known[name]}")
    assert not said, "\n".join(sorted(said))


def test_every_dependency_is_constrained_to_a_version_it_allows() -> None:
    known = constraints()
    said = []
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name not in known:
            said.append(f"{name} is not in constraints.txt")
        elif known[name] not in requirement.specifier:
            said.append(f"{requirement} does not allow {known[name]}")
    assert not said, "\n".join(said)
