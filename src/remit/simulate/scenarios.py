"""Scenario files (TOML): cluster, load, faults, expectations; replays.

A scenario: a cluster, a load, faults, how long, and what must hold. Read from small TOML files.

A file may `include` others: tables are merged, the includer's word standing over the included one's, and lists of faults are
joined. So a scenario is a few lines on top of a cluster that many share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from remit.commitment.operation_queue import BATCH_MAX
from remit.model.resources import parse_duration

HERE: Final = "remit.simulate"
FOLDER: Final = "files"

BEAT_MS_MIN: Final = 100
EVERY_MS_MIN: Final = 100
COVERS_MAX: Final = 45
"""The last row of the table of faults."""
SIZE_MAX: Final = 1_000_000
SCOPE_MAX: Final = 32
"""Nodes, policies and leases have the scope in their names."""

STORES: Final = ("memory", "sqlite")

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
"""What a design review asks a control plane about."""

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "swarm": (0, 100),
    "cluster.batch": (1, BATCH_MAX.operations),
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
    """The file is not a scenario. The text names the field and the cure."""


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """`scopes`: the first is the one above if there are several. Nodes are counted a scope that has any."""

    scopes: tuple[str, ...] = ("local",)
    servers: int = 2
    nodes: int = 6
    agents: int = 3
    schedulers: int = 1
    guessers: int = 0
    """Further schedulers that guess, each under a lease of its own: what they overlook, the authority refuses."""
    controllers: int = 1
    people: int = 1
    """Processes that users and an operator ask from."""
    rivals: bool = False
    """Does each scheduler, and each of those who spawn and repair, hold a lease of its own, so that all act at once?"""
    beat: str = "2s"
    store: str = STORES[0]
    """Where truth is kept: in memory, or in real files on a disk that tears when the power goes."""
    meddlers: int = 0
    gossips: int = 0
    """Those who say of nodes that they are warm for work, most of it wrong. If there are any, agents say so too, truly."""
    plugin: bool = False
    """Have schedulers a filter that others wrote? It refuses nothing, and may fail."""
    batch: int = BATCH_MAX.operations
    """How many operations an authority decides at once; if fewer than it could, it also ends a batch that changed half as many
    replicas. A scheduler tries no more at once."""

    @property
    def beat_ms(self) -> int:
        return parse_duration(self.beat)

    @property
    def placing(self) -> tuple[str, ...]:
        """The scopes that have nodes."""
        return self.scopes if len(self.scopes) == 1 else self.scopes[1:]


class Load(Struct, frozen=True, forbid_unknown_fields=True):
    """What people ask for: so many workloads a minute, of these kinds, up to so many at once."""

    per_minute: float = 4.0
    kinds: tuple[str, ...] = ("job", "service", "gang", "urgent", "device", "spread")
    standing_max: int = 20
    operations: int = 7
    """How much of what people do is an operator's: to drain nodes and to change quota, in percent."""
    overrides: int = 0
    """How much of what people do is to override the rules for a while, or to end that, in percent."""
    fence: str = "20s"
    """How long what must never run twice runs on without a renewal; for a beat of 2 s, and in proportion for others."""
    size: int = 2
    """About how many replicas a workload has."""
    quota: int = 80
    """How much of all processors a tenant may use, in percent. There are two tenants."""
    deletes: int = 25
    """How much of what users do is to delete something, in percent."""
    reads: bool = False
    """Do services read a config?"""


class FaultLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, `at` one moment or about `every` so often; it `lasts` about so long. `size` and `where` are the kind's own."""

    kind: str
    at: str = ""
    every: str = ""
    lasts: str = "0s"
    size: float = 0.0
    where: str = ""


class Holds(Struct, frozen=True, forbid_unknown_fields=True):
    """What must hold. Safety always must. `liveness` is judged after the faults have ended, in what `core` leaves."""

    liveness: bool = True
    core: bool = False
    """Does something outside a healthy core stay broken for good?"""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    summary: str
    covers: tuple[int, ...] = ()
    matrix: str = ""
    """The row of the failure matrix that it answers."""
    duration: str = "5m"
    heal: str = "3m"
    cluster: Cluster = Cluster()
    load: Load = Load()
    faults: tuple[FaultLine, ...] = ()
    holds: Holds = Holds()
    swarm: int = 0
    """Draw up to so many kinds of fault for each seed, beside those that are named, and its cluster and load around these."""

    @property
    def duration_s(self) -> float:
        return parse_duration(self.duration) / 1000

    @property
    def heal_s(self) -> float:
        return parse_duration(self.heal) / 1000


def names() -> tuple[str, ...]:
    """Every scenario that comes with Remit; files that begin with `_` are only included."""
    found = (entry.name for entry in (files(HERE) / FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml") and not name.startswith("_")))


def load(name: str) -> Scenario:
    """A scenario by the name of one that comes with Remit, or by the path of a file."""
    if name in names():
        return _scenario(name, _text(name))
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return _scenario(path.stem, _read(path))
    raise BadScenario(f"there is no scenario {name!r}; `remit simulate --list` shows those there are, or name a .toml file")


def parse(name: str, text: str) -> Scenario:
    return _scenario(name, text)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise BadScenario(f"{path.stem}: not TOML: it is no text in UTF-8") from None
    except OSError as error:
        raise BadScenario(f"{path.stem}: cannot be read: {error.strerror}") from None


def _text(name: str) -> str:
    return (files(HERE) / FOLDER / f"{name}.toml").read_text()


def _scenario(name: str, text: str) -> Scenario:
    merged = {"name": name, **_merged(name, text, ())}
    try:
        scenario = msgspec.convert(merged, Scenario)
    except msgspec.ValidationError as error:
        raise BadScenario(f"{name}: {error}; docs/simulation.md lists the fields") from None
    for problem in chain(problems(scenario), _late_faults(scenario)):
        raise BadScenario(f"{name}: {problem}")
    return scenario


def _merged(name: str, text: str, within: tuple[str, ...]) -> dict[str, Any]:
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadScenario(f"{name}: not TOML ({error})") from None
    if not isinstance(found.get("faults", []), list):
        raise BadScenario(f"{name}: faults: a list of tables, each under a line [[faults]]")
    parts = found.pop("include", [])
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadScenario(f'{name}: include: a list of names, such as ["_busy"]')
    whole: dict[str, Any] = {}
    for part in parts:
        if part in within:
            raise BadScenario(f"{name}: include: {part} includes itself")
        whole = _over(whole, _merged(part, _included(name, part), (*within, part)))
    return _over(whole, found)


def _included(name: str, part: str) -> str:
    try:
        if Path(part).name == part:
            return _text(part)
    except (FileNotFoundError, ValueError):
        pass
    able = sorted(entry.name.removesuffix(".toml") for entry in (files(HERE) / FOLDER).iterdir() if entry.name.startswith("_"))
    raise BadScenario(f"{name}: include: there is no {part}; there are {', '.join(able)}")


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(under)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            whole[key] = _over(whole[key], value)
        elif key == "faults":
            whole[key] = [*whole.get(key, ()), *value]
        else:
            whole[key] = value
    return whole


def problems(scenario: Scenario) -> Iterator[str]:
    """What is wrong with it, each with its field and a cure."""
    yield from _bad_times(scenario)
    yield from _bad_numbers(scenario)
    yield from _bad_names(scenario)
    for index, line in enumerate(scenario.faults):
        yield from _bad_fault(scenario, f"faults[{index}]", line)


def _bad_times(scenario: Scenario) -> Iterator[str]:
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
            yield f"{name}: at least {BEAT_MS_MIN}ms"
        if name == "duration" and not parse_duration(text):
            yield f"{name}: nothing happens in no time; write a duration such as 5m"
        if name.endswith(".every") and parse_duration(text) < EVERY_MS_MIN:
            yield f"{name}: at least {EVERY_MS_MIN}ms"


def _bad_numbers(scenario: Scenario) -> Iterator[str]:
    for name, (low, high) in BOUNDS.items():
        value: Any = scenario
        for part in name.split("."):
            value = getattr(value, part)
        if not low <= value <= high:
            yield f"{name}: at least {low}, at most {high}"
    if not scenario.cluster.schedulers and (not scenario.cluster.guessers or scenario.holds.liveness):
        yield "cluster.schedulers: at least 1; without one there must be guessers, and holds.liveness = false"
    for index, row in enumerate(scenario.covers):
        if not 1 <= row <= COVERS_MAX:
            yield f"covers[{index}]: there is no fault {row}; write numbers from 1 to {COVERS_MAX}"


def _bad_names(scenario: Scenario) -> Iterator[str]:
    from remit.simulate.actors.users import WORK  # the actors know the cluster, which knows scenarios

    if scenario.matrix not in ("", *MATRIX):
        yield f"matrix: there is no such row; there are: {'; '.join(MATRIX)}"
    if scenario.cluster.store not in STORES:
        yield f"cluster.store: there is no store {scenario.cluster.store!r}; there are {', '.join(STORES)}"
    scopes, kinds = scenario.cluster.scopes, scenario.load.kinds
    if not scopes or len(set(scopes)) != len(scopes):
        yield "cluster.scopes: at least one, each once"
    if not all(scope.isascii() and scope.isalnum() and len(scope) <= SCOPE_MAX for scope in scopes):
        yield f"cluster.scopes: names of letters and digits only, at most {SCOPE_MAX} of them"
    if not kinds:
        yield f"load.kinds: at least one of {', '.join(WORK)}"
    for kind in kinds:
        if kind not in WORK:
            yield f"load.kinds: there is no work {kind!r}; there is {', '.join(WORK)}"


def _bad_fault(scenario: Scenario, name: str, line: FaultLine) -> Iterator[str]:
    if bool(line.at) == bool(line.every):
        yield f"{name}: say either at or every"
    yield from (f"{name}.{problem}" for problem in bad_sort(scenario, line))


def bad_sort(scenario: Scenario, one: FaultLine | Injection) -> Iterator[str]:
    """Kind, size and place, asked alike of a line and of what was drawn from it."""
    from remit.simulate.faults.kinds import KINDS, SHARE, Where  # the kinds know the simulation, which knows scenarios

    if not 0 <= one.size <= SIZE_MAX:
        yield f"size: a number, 0 or more (0: drawn), at most {SIZE_MAX}"
    if one.where not in ("", *scenario.cluster.scopes):
        yield f"where: there is no scope {one.where!r}; there are {', '.join(scenario.cluster.scopes)}"
    kind = KINDS.get(one.kind)
    if kind is None:
        yield f"kind: there is no fault {one.kind!r}; there are {', '.join(sorted(KINDS))}"
        return
    if lacks := kind.lacks(scenario):
        yield f"kind: {one.kind} needs {lacks}"
    if one.size and not kind.size:
        yield f"size: {one.kind} has none; leave it out"
    if one.size > 1 and kind.size == SHARE:
        yield f"size: {SHARE}, and not {one.size:g}"
    if one.where and kind.where is Where.NETWORK:
        yield f"where: {one.kind} is in {kind.where}; leave it out"
    if one.where and kind.where is Where.NODES and one.where not in scenario.cluster.placing:
        yield f"where: {one.kind} is in {kind.where}; there are {', '.join(scenario.cluster.placing)}"


def _late_faults(scenario: Scenario) -> Iterator[str]:
    """Asked of files only: a run that was made shorter keeps the lines of faults that it has no more. Times are sound here."""
    for index, line in enumerate(scenario.faults):
        if line.at and parse_duration(line.at) >= parse_duration(scenario.duration):
            yield f"faults[{index}].at: {line.at} is after the end; write less than the duration, {scenario.duration}"


class Injection(Struct, frozen=True):
    """One fault of a run: drawn before the run begins, so that a run without it is the same run otherwise."""

    number: int
    at_s: float
    kind: str
    lasts_s: float
    size: float = 0.0
    where: str = ""


class Replay(Struct, frozen=True):
    """A run that was saved: all that it takes to have it again."""

    scenario: Scenario
    seed: int
    until_s: float
    plan: tuple[Injection, ...]
    violation: str = ""
    revision: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
