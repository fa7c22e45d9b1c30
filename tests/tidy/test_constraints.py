"""constraints.txt names every version in use, and only names and versions."""

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
"""Packages that an interpreter puts into a new environment at a version of its own."""


def lines() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def constraints() -> dict[str, Version]:
    return {name: Version(version) for name, version in (line.split("==") for line in lines())}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = project["build-system"]["requires"] + project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    return [Requirement(text) for text in texts]


def test_constraints_are_sorted_names_and_versions() -> None:
    invalid = [line for line in lines() if not LINE.fullmatch(line)]
    assert not invalid, f"not name==version: {invalid}"
    names = [line.split("==")[0] for line in lines()]
    assert names == sorted(set(names))


def test_installed_distributions_match_constraints() -> None:
    known = constraints()
    problems = []
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in SEEDED or name == "remit":
            continue
        if name not in known:
            problems.append(f"{name} {distribution.version} is installed, but no line of constraints.txt names it")
        elif Version(distribution.version) != known[name]:
            problems.append(f"{name} is installed as {distribution.version}, constraints.txt says {known[name]}")
    assert not problems, "\n".join(sorted(problems))


def test_every_dependency_is_constrained_to_allowed_version() -> None:
    known = constraints()
    problems = []
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name not in known:
            problems.append(f"{name} is not in constraints.txt")
        elif known[name] not in requirement.specifier:
            problems.append(f"{requirement} does not allow {known[name]}")
    assert not problems, "\n".join(problems)
