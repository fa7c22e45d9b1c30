"""Types of scenario files: cluster, load, faults, expectations; and of replays. scenarios.py loads and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from remit.commitment.operation_queue import BATCH_LIMITS
from remit.model.resources import parse_duration

STORES: Final = ("memory", "sqlite")


class ClusterSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The cluster of a scenario. With several `scopes`, the first is the parent of the others. `nodes` is per scope that has
    nodes.
    """

    scopes: tuple[str, ...] = ("local",)
    servers: int = 2
    nodes: int = 6
    agents: int = 3
    schedulers: int = 1
    guessers: int = 0
    """Additional naive schedulers, each with its own lease. They check little, so the authority must refuse their invalid
    claims.
    """
    controllers: int = 1
    people: int = 1
    """Client processes of users and operators, per scope."""
    rivals: bool = False
    """Each scheduler, and each workload and repair controller, has its own lease, so that all of them act at the same time."""
    beat: str = "2s"
    store: str = STORES[0]
    """Where the state is stored: in memory, or in SQLite files that are torn by power cuts."""
    meddlers: int = 0
    gossips: int = 0
    """Clients that report warm-start hints about nodes, most of them wrong. If there are any, agents report true hints too."""
    plugin: bool = False
    """Schedulers have a third-party filter plug-in. It rejects no node, and the fault plugin-fails makes it raise errors."""
    batch: int = BATCH_LIMITS.operations
    """Operations per batch of the authority. A smaller value than the default also ends a batch after half as many changed
    replicas. A scheduler tries at most this many replicas at once.
    """

    @property
    def heartbeat_ms(self) -> int:
        return parse_duration(self.beat)

    @property
    def scopes_with_nodes(self) -> tuple[str, ...]:
        """The scopes that have nodes."""
        return self.scopes if len(self.scopes) == 1 else self.scopes[1:]


class LoadSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Load of the users: workloads per minute, their kinds, and how many may exist at once."""

    per_minute: float = 4.0
    kinds: tuple[str, ...] = ("job", "service", "gang", "urgent", "device", "spread")
    standing_max: int = 20
    operations: int = 7
    """Share of user actions that are operator actions (drain nodes, change quotas), in percent."""
    overrides: int = 0
    """Share of user actions that create or delete an override, in percent."""
    fence: str = "20s"
    """Fence time of workloads at a heartbeat interval of 2 s; it scales with the interval."""
    size: int = 2
    """Average number of replicas of a workload, roughly."""
    quota: int = 80
    """Quota of each of the two tenants, in percent of all CPUs."""
    deletes: int = 25
    """Share of user actions that delete a workload, in percent."""
    reads: bool = False
    """Services mount a config."""


class FaultSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of faults: once `at` a time, or `every` so often on average, each lasting about `lasts`. `size` and `where` depend
    on the kind.
    """

    kind: str
    at: str = ""
    every: str = ""
    lasts: str = "0s"
    size: float = 0.0
    where: str = ""


class Expectations(Struct, frozen=True, forbid_unknown_fields=True):
    """Expected properties. Safety is always checked; `liveness` is checked after the faults have ended."""

    liveness: bool = True
    core: bool = False
    """One server and one agent per scope stay down for good; liveness must hold without them."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    summary: str
    covers: tuple[int, ...] = ()
    matrix: str = ""
    """The row of the failure matrix that this scenario answers."""
    duration: str = "5m"
    heal: str = "3m"
    cluster: ClusterSpec = ClusterSpec()
    load: LoadSpec = LoadSpec()
    faults: tuple[FaultSpec, ...] = ()
    holds: Expectations = Expectations()
    swarm: int = 0
    """Up to this many kinds of faults are drawn for each seed, in addition to the listed ones; cluster and load sizes are drawn
    too.
    """

    @property
    def duration_s(self) -> float:
        return parse_duration(self.duration) / 1000

    @property
    def heal_s(self) -> float:
        return parse_duration(self.heal) / 1000


class Injection(Struct, frozen=True):
    """One scheduled fault. All faults are drawn before the run starts, so that removing one changes nothing else in the run."""

    number: int
    at_s: float
    kind: str
    lasts_s: float
    size: float = 0.0
    where: str = ""


class Replay(Struct, frozen=True):
    """A saved run: everything that is needed to run it again."""

    scenario: Scenario
    seed: int
    until_s: float
    plan: tuple[Injection, ...]
    violation: str = ""
    revision: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
