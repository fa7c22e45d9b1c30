"""Loads and checks scenario files (TOML).

A file may `include` others. Tables are merged, values of the including file override those of included files, and lists of
faults are concatenated. So a scenario is a few lines on top of a shared cluster.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from remit.commitment.operation_queue import BATCH_LIMITS
from remit.model.resources import parse_duration
from remit.simulate.actors.users import WORKLOAD_KINDS
from remit.simulate.faults.kinds import KINDS, SHARE, FaultScope
from remit.simulate.scenario_types import STORES, FaultSpec, Injection, Scenario

PACKAGE: Final = "remit.simulate"
FOLDER: Final = "files"

BEAT_MS_MIN: Final = 100
EVERY_MS_MIN: Final = 100
FAULT_ROW_MAX: Final = 45
"""Number of the last row in the table of docs/faults.md."""
SIZE_MAX: Final = 1_000_000
SCOPE_MAX: Final = 32
"""Names of nodes, policies and leases contain the scope name, so its length is limited."""

MATRIX: Final = (
    "API write commits but client times out",
    "Scheduler cache is stale",
    "Autoscaler sees low readiness",
    "Region loses capacity",
    "Policy rollback happens mid-recovery",
    "Human override is applied",
    "Two schedulers act concurrently",
    "Repair loop runs during incident",
)
"""Rows of the failure matrix that a design review goes through."""

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "swarm": (0, 100),
    "cluster.batch": (1, BATCH_LIMITS.operations),
    "cluster.servers": (1, 100),
    "cluster.nodes": (1, 10_000),
    "cluster.agents": (1, 10_000),
    "cluster.schedulers": (0, 100),
    "cluster.guessers": (0, 100),
    "cluster.controllers": (1, 100),
    "cluster.people": (1, 100),
    "cluster.meddlers": (0, 100),
    "cluster.gossips": (0, 100),
    "load.per_minute": (0, 100_000),
    "load.standing_max": (0, 1_000_000),
    "load.size": (1, 10_000),
    "load.quota": (0, 10_000),
    "load.deletes": (0, 100),
    "load.operations": (0, 100),
    "load.overrides": (0, 100),
}


class BadScenario(Exception):
    """The file is not a valid scenario. The message names the field and the fix."""


def names() -> tuple[str, ...]:
    """All scenarios shipped with Remit. Files that begin with `_` can only be included."""
    files_found = (entry.name for entry in (files(PACKAGE) / FOLDER).iterdir())
    return tuple(
        sorted(name.removesuffix(".toml") for name in files_found if name.endswith(".toml") and not name.startswith("_"))
    )


def load(name: str) -> Scenario:
    """Load a scenario by its name, or from the path of a .toml file."""
    if name in names():
        return _scenario(name, _text(name))
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return _scenario(path.stem, _read(path))
    raise BadScenario(f"there is no scenario {name!r}; `remit simulate --list` lists all, or give the path of a .toml file")


def parse(name: str, text: str) -> Scenario:
    return _scenario(name, text)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise BadScenario(f"{path.stem}: not TOML: the file is not UTF-8 text") from None
    except OSError as error:
        raise BadScenario(f"{path.stem}: cannot be read: {error.strerror}") from None


def _text(name: str) -> str:
    return (files(PACKAGE) / FOLDER / f"{name}.toml").read_text()


def _scenario(name: str, text: str) -> Scenario:
    merged = {"name": name, **_parse_with_includes(name, text, ())}
    try:
        scenario = msgspec.convert(merged, Scenario)
    except msgspec.ValidationError as error:
        raise BadScenario(f"{name}: {error}; docs/simulation.md lists the fields") from None
    for problem in chain(problems(scenario), _late_fault_problems(scenario)):
        raise BadScenario(f"{name}: {problem}")
    return scenario


def _parse_with_includes(name: str, text: str, including: tuple[str, ...]) -> dict[str, Any]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadScenario(f"{name}: not TOML ({error})") from None
    if not isinstance(document.get("faults", []), list):
        raise BadScenario(f"{name}: faults: must be a list of tables, each under a line [[faults]]")
    parts = document.pop("include", [])
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadScenario(f'{name}: include: must be a list of names, such as ["_busy"]')
    merged: dict[str, Any] = {}
    for part in parts:
        if part in including:
            raise BadScenario(f"{name}: include: {part} includes itself")
        merged = _merge(merged, _parse_with_includes(part, _included_text(name, part), (*including, part)))
    return _merge(merged, document)


def _included_text(name: str, part: str) -> str:
    try:
        if Path(part).name == part:
            return _text(part)
    except (FileNotFoundError, ValueError):
        pass
    available = sorted(
        entry.name.removesuffix(".toml") for entry in (files(PACKAGE) / FOLDER).iterdir() if entry.name.startswith("_")
    )
    raise BadScenario(f"{name}: include: there is no {part}; available are {', '.join(available)}")


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif key == "faults":
            merged[key] = [*merged.get(key, ()), *value]
        else:
            merged[key] = value
    return merged


def problems(scenario: Scenario) -> Iterator[str]:
    """Problems of a scenario, each as `field: problem; fix`."""
    yield from _time_problems(scenario)
    yield from _number_problems(scenario)
    yield from _name_problems(scenario)
    for index, line in enumerate(scenario.faults):
        yield from _fault_line_problems(scenario, f"faults[{index}]", line)


def _time_problems(scenario: Scenario) -> Iterator[str]:
    times = {
        "duration": scenario.duration,
        "heal": scenario.heal,
        "cluster.beat": scenario.cluster.beat,
        "load.fence": scenario.load.fence,
    }
    for index, line in enumerate(scenario.faults):
        times |= {f"faults[{index}].{name}": getattr(line, name) for name in ("at", "every") if getattr(line, name)}
        times[f"faults[{index}].lasts"] = line.lasts
    for name, text in times.items():
        try:
            parse_duration(text)
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        if name == "cluster.beat" and parse_duration(text) < BEAT_MS_MIN:
            yield f"{name}: must be at least {BEAT_MS_MIN}ms"
        if name == "duration" and not parse_duration(text):
            yield f"{name}: must be more than 0; write a duration such as 5m"
        if name.endswith(".every") and parse_duration(text) < EVERY_MS_MIN:
            yield f"{name}: must be at least {EVERY_MS_MIN}ms"


def _number_problems(scenario: Scenario) -> Iterator[str]:
    for name, (low, high) in BOUNDS.items():
        value: Any = scenario
        for part in name.split("."):
            value = getattr(value, part)
        if not low <= value <= high:
            yield f"{name}: must be from {low} to {high}"
    if not scenario.cluster.schedulers and (not scenario.cluster.guessers or scenario.holds.liveness):
        yield "cluster.schedulers: must be at least 1; or set cluster.guessers, with holds.liveness = false"
    for index, row in enumerate(scenario.covers):
        if not 1 <= row <= FAULT_ROW_MAX:
            yield f"covers[{index}]: there is no fault {row}; use numbers from 1 to {FAULT_ROW_MAX}"


def _name_problems(scenario: Scenario) -> Iterator[str]:
    if scenario.matrix not in ("", *MATRIX):
        yield f"matrix: there is no such row; available are: {'; '.join(MATRIX)}"
    if scenario.cluster.store not in STORES:
        yield f"cluster.store: there is no store {scenario.cluster.store!r}; use {' or '.join(STORES)}"
    scopes, kinds = scenario.cluster.scopes, scenario.load.kinds
    if not scopes or len(set(scopes)) != len(scopes):
        yield "cluster.scopes: must have at least one name, and each only once"
    if not all(scope.isascii() and scope.isalnum() and len(scope) <= SCOPE_MAX for scope in scopes):
        yield f"cluster.scopes: names may have letters and digits only, at most {SCOPE_MAX}"
    if not kinds:
        yield f"load.kinds: must have at least one of {', '.join(WORKLOAD_KINDS)}"
    for kind in kinds:
        if kind not in WORKLOAD_KINDS:
            yield f"load.kinds: there is no kind {kind!r}; available are {', '.join(WORKLOAD_KINDS)}"


def _fault_line_problems(scenario: Scenario, name: str, line: FaultSpec) -> Iterator[str]:
    if bool(line.at) == bool(line.every):
        yield f"{name}: must have either at or every"
    yield from (f"{name}.{problem}" for problem in fault_problems(scenario, line))


def fault_problems(scenario: Scenario, fault: FaultSpec | Injection) -> Iterator[str]:
    """Problems with kind, size and scope of a line of faults or of a drawn fault."""
    if not 0 <= fault.size <= SIZE_MAX:
        yield f"size: must be from 0 (drawn at random) to {SIZE_MAX}"
    if fault.where not in ("", *scenario.cluster.scopes):
        yield f"where: there is no scope {fault.where!r}; available are {', '.join(scenario.cluster.scopes)}"
    kind = KINDS.get(fault.kind)
    if kind is None:
        yield f"kind: there is no fault {fault.kind!r}; available are {', '.join(sorted(KINDS))}"
        return
    if lacks := kind.missing_requirement(scenario):
        yield f"kind: {fault.kind} needs {lacks}"
    if fault.size and not kind.size:
        yield f"size: {fault.kind} has no size; remove it"
    if fault.size > 1 and kind.size == SHARE:
        yield f"size: must be {SHARE}, not {fault.size:g}"
    if fault.where and kind.where is FaultScope.NETWORK:
        yield f"where: {fault.kind} affects {kind.where}; remove it"
    if fault.where and kind.where is FaultScope.NODES and fault.where not in scenario.cluster.scopes_with_nodes:
        yield f"where: {fault.kind} needs {kind.where}; available are {', '.join(scenario.cluster.scopes_with_nodes)}"


def _late_fault_problems(scenario: Scenario) -> Iterator[str]:
    """Faults after the end of the run. Checked for files only: a shrunk run keeps lines of faults that it no longer reaches.
    The times were validated before.
    """
    for index, line in enumerate(scenario.faults):
        if line.at and parse_duration(line.at) >= parse_duration(scenario.duration):
            yield f"faults[{index}].at: {line.at} is after the end; use less than the duration, {scenario.duration}"
