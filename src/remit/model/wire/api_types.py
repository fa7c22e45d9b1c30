"""Response types of the HTTP API.

The shapes that both ends read; who fills them in is in serve/.

An answer may grow fields: whoever reads an older shape passes over what it does not know. A field that is absent means its
default.
"""

from __future__ import annotations

from typing import Any, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Raw, Struct, field

from remit.model.metadata import Natural

T = TypeVar("T")

PROBLEM_TYPE: Final = "application/problem+json"
LINES_TYPE: Final = "application/x-ndjson"
PATCH_TYPE: Final = "application/merge-patch+json"
OPERATION_HEADER: Final = "Remit-Operation-Id"

LIST_LIMIT: Final = 500
LIST_LIMIT_MAX: Final = 1_000

NOTHING: Final = Raw(b"null")


class Answer(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Anything that is answered and is no object."""


# ----------------------------------------------------------------------------------------------------------- what is wrong


class ProblemItem(Answer, frozen=True, kw_only=True):
    """One of several mistakes: where it stands, what is wrong, and what would mend it."""

    field: str = ""
    message: str
    cure: str = ""
    manifest: int | None = None
    """Of several, counted from 0: in which one."""


class ProblemAnswer(Answer, frozen=True, kw_only=True):
    """Why something was not done (RFC 9457). `code` is stable and for programs; `detail` and `cure` are for people."""

    type: str = "about:blank"
    title: str = ""
    status: int
    code: str
    detail: str = ""
    field: str = ""
    cure: str = ""
    problems: tuple[ProblemItem, ...] = ()
    revision: Natural = 0


# --------------------------------------------------------------------------------------------------------- lists and watches


class ListMeta(Answer, frozen=True, kw_only=True):
    """All pages of a list show one `revision`; `next`, if it is not empty, asks for the page after this."""

    revision: Natural
    next: str = field(default="", name="continue")


class ListOf(Answer, Generic[T], frozen=True, kw_only=True, omit_defaults=False):
    api_version: str = "remit/v1"
    kind: str
    metadata: ListMeta
    items: list[T]


class WatchLine(Answer, frozen=True, kw_only=True):
    """One line of a watch. `changed` and `deleted` tell an object; `bookmark` that all up to `revision` has been told;
    `heartbeat` that the server is there; `resync` is the last, and says why one must list again.
    """

    type: Literal["changed", "deleted", "bookmark", "heartbeat", "resync"]
    revision: Natural = 0
    object: Raw = NOTHING
    reason: str = ""
    cure: str = ""


class GoneMeta(Answer, frozen=True, kw_only=True):
    name: str
    tenant: str = ""


class GoneObject(Answer, frozen=True, kw_only=True):
    """What is left to say of an object that was deleted, or matches no more."""

    kind: str
    metadata: GoneMeta


class EndpointItem(Answer, frozen=True, kw_only=True):
    """Where one serving replica is reached: `ports` by name, on `host`."""

    tenant: str
    service: str
    replica: str
    node: str
    region: str = ""
    zone: str = ""
    host: str = ""
    ports: dict[str, int] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------ what was done


class DeleteAnswer(Answer, frozen=True, kw_only=True):
    """`deleted`: it is gone. `marked`: it goes once its finalizers and its replicas have."""

    kind: str
    name: str
    tenant: str = ""
    action: Literal["deleted", "marked"]
    revision: Natural = 0


class ApplyResult(Answer, frozen=True, kw_only=True):
    """What became of one manifest. `refused` says why in `problem`."""

    kind: str
    name: str
    tenant: str = ""
    action: Literal["created", "replaced", "unchanged", "refused"]
    revision: Natural = 0
    generation: Natural = 0
    problem: ProblemAnswer | None = None


class ApplyAnswer(Answer, frozen=True, kw_only=True):
    """One result a manifest, in their order; all of it stands as of `revision`."""

    revision: Natural
    results: tuple[ApplyResult, ...]


class Difference(Answer, frozen=True, kw_only=True):
    """One value that an apply would change; absent on a side means that it is not set there."""

    path: str
    before: Any = UNSET
    after: Any = UNSET


class PlannedPlacement(Answer, frozen=True, kw_only=True):
    """Where the replicas that a change adds would go, tried on a frozen copy: `waits` is as `explain` tells it. `ends` counts
    those that run now and would not; `stops` says what keeps a rollout from going on; `capped`, that not all were tried.
    """

    wanted: Natural
    placed: Natural
    nodes: dict[str, int] = field(default_factory=dict)
    waits: Any = None
    stops: Any = None
    ends: Natural = 0
    capped: bool = False


class PlanItem(Answer, frozen=True, kw_only=True):
    kind: str
    name: str
    tenant: str = ""
    action: Literal["create", "replace", "unchanged", "refused"]
    diff: tuple[Difference, ...] = ()
    problem: ProblemAnswer | None = None
    placement: PlannedPlacement | None = None


class PlanAnswer(Answer, frozen=True, kw_only=True):
    """What an apply would do, as of `revision`. Nothing was written."""

    revision: Natural
    items: tuple[PlanItem, ...]


class RotateAnswer(Answer, frozen=True, kw_only=True):
    """How far a rotation is: `resealed` so many by the `key` that seals, of the `keys` that open. What cannot be sealed anew is
    `left`. Ask again from `after`, until that is empty.
    """

    key: str = ""
    made: bool = False
    """Was that key made by this request?"""
    keys: tuple[str, ...] = ()
    resealed: Natural = 0
    left: tuple[str, ...] = ()
    after: str = ""


# ---------------------------------------------------------------------------------------------------------- how things stand


class IdleLease(Answer, frozen=True, kw_only=True):
    """A lease that nobody holds, so that nobody does what is done under it; `part` is the command that runs who would."""

    lease: str
    part: str
    silent_ms: Natural | None = None
    """For how long it was not renewed, at least. None: nobody has it to renew."""
    why: str = ""
    cure: str = ""


class ScopeStatus(Answer, frozen=True, kw_only=True):
    """Where a scope stands. New operation ids carry its `incarnation` and `window`; `idle` says who does not act."""

    scope: str
    incarnation: str
    epoch: Natural = 0
    window: Natural = 0
    window_ms: Natural = 0
    revision: Natural = 0
    leader: str = ""
    nodes: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    version: str = ""
    uptime_ms: Natural = 0
    board_age_ms: Natural = 0
    idle: tuple[IdleLease, ...] = ()


class Taken(Answer, frozen=True, kw_only=True):
    """An amount of what is measured while work runs."""

    cpu_milli: Natural = 0
    memory_bytes: Natural = 0


class NodeTop(Answer, frozen=True, kw_only=True):
    """What a node last said of itself, `age_ms` ago, beside what it has and what is asked of it."""

    node: str
    region: str = ""
    zone: str = ""
    health: str = ""
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    capacity: Taken = Taken()
    requests: Taken = Taken()
    replicas: Natural = 0
    restarts: Natural = 0
    age_ms: Natural | None = None
    """None: it has said nothing yet."""


class ReplicaTop(Answer, frozen=True, kw_only=True):
    """What a node last said of one replica that runs there, beside what that asked for."""

    tenant: str
    replica: str
    workload: str = ""
    node: str = ""
    phase: str = ""
    pid: Natural = 0
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    requests: Taken = Taken()
    restarts: Natural = 0
    said: str = ""
    """Why it is not ready, if it is not: what a probe of it was answered."""
    age_ms: Natural | None = None


class AccountItem(Answer, frozen=True, kw_only=True):
    """Something that happened to `regarding`, `count` times: from `first` until `at`, as wall clocks showed it."""

    at: str
    first: str = ""
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str = ""
    regarding: str = ""
    source: str = ""
    message: str = ""
    count: Natural = 1
    revision: Natural = 0


class AuditItem(Answer, frozen=True, kw_only=True):
    """What somebody did, or was refused, at `time` by the server's wall clock; `count` times since the one before like it."""

    time: str
    subject: str = ""
    token: str = ""
    role: str = ""
    tenant: str = ""
    address: str = ""
    action: str = ""
    """What a route is called, such as `createWorkload`; empty if there is no such route."""
    target: str = ""
    status: Natural = 0
    code: str = ""
    detail: str = ""
    operation: str = ""
    trace: str = ""
    count: Natural = 1
