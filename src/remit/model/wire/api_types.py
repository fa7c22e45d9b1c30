"""Response types of the HTTP API.

Used by the server, which fills them in, and by the clients. A response may gain fields: a client ignores fields that it does
not know. An absent field has its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, field

from remit.model.metadata import Natural

T = TypeVar("T")

PROBLEM_TYPE: Final = "application/problem+json"
LINES_TYPE: Final = "application/x-ndjson"
PATCH_TYPE: Final = "application/merge-patch+json"
OPERATION_HEADER: Final = "Remit-Operation-Id"

LIST_LIMIT: Final = 500
LIST_LIMIT_MAX: Final = 1_000

NULL: Final = Raw(b"null")


class ApiType(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of all API types that are not objects."""


# ----------------------------------------------------------------------------------------------------------------- problems


class ProblemItem(ApiType, frozen=True, kw_only=True):
    """One of several validation problems: the field, what is wrong, and how to fix it."""

    field: str = ""
    message: str
    cure: str = ""
    manifest: int | None = None
    """Index, from 0, of the manifest in a request with several."""


class ProblemAnswer(ApiType, frozen=True, kw_only=True):
    """An error response (RFC 9457). `code` is stable and for programs; `detail` and `cure` are for people. `reason`
    refines the code for programs: `token_revoked` or `token_expired` where the code is `unauthenticated`.
    """

    type: str = "about:blank"
    title: str = ""
    status: int
    code: str
    detail: str = ""
    field: str = ""
    cure: str = ""
    problems: tuple[ProblemItem, ...] = ()
    revision: Natural = 0
    reason: str = ""


# --------------------------------------------------------------------------------------------------------- lists and watches


class ListMeta(ApiType, frozen=True, kw_only=True):
    """All pages of a list are of one `revision`. A `continue` that is not empty requests the next page."""

    revision: Natural
    next: str = field(default="", name="continue")


class ListOf(ApiType, Generic[T], frozen=True, kw_only=True, omit_defaults=False):
    api_version: str = "remit/v1"
    kind: str
    metadata: ListMeta
    items: list[T]


class WatchLine(ApiType, frozen=True, kw_only=True):
    """One line of a watch. `changed` and `deleted` carry an object. `bookmark`: all changes up to `revision` have been sent.
    `heartbeat`: the connection is alive. `resync` is the last line and gives the reason why the client must list again.
    """

    type: Literal["changed", "deleted", "bookmark", "heartbeat", "resync"]
    revision: Natural = 0
    object: Raw = NULL
    reason: str = ""
    cure: str = ""


class GoneMeta(ApiType, frozen=True, kw_only=True):
    name: str
    tenant: str = ""


class GoneObject(ApiType, frozen=True, kw_only=True):
    """The identity of an object that was deleted or no longer matches the selector."""

    kind: str
    metadata: GoneMeta


class EndpointItem(ApiType, frozen=True, kw_only=True):
    """The address of one serving replica: `ports` by name, on `host`."""

    tenant: str
    service: str
    replica: str
    node: str
    region: str = ""
    zone: str = ""
    host: str = ""
    ports: dict[str, int] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------------- writes


class DeleteAnswer(ApiType, frozen=True, kw_only=True):
    """Result of a delete. `deleted`: the object is gone. `marked`: it will be removed once its finalizers and replicas are
    gone.
    """

    kind: str
    name: str
    tenant: str = ""
    action: Literal["deleted", "marked"]
    revision: Natural = 0


class ApplyResult(ApiType, frozen=True, kw_only=True):
    """Result of one manifest. For `refused`, `problem` gives the reason."""

    kind: str
    name: str
    tenant: str = ""
    action: Literal["created", "replaced", "unchanged", "refused"]
    revision: Natural = 0
    generation: Natural = 0
    problem: ProblemAnswer | None = None


class ApplyAnswer(ApiType, frozen=True, kw_only=True):
    """One result per manifest, in the order of the request, as of `revision`."""

    revision: Natural
    results: tuple[ApplyResult, ...]


class Difference(ApiType, frozen=True, kw_only=True):
    """One value that an apply would change. A side on which the value is not set is absent."""

    path: str
    before: Any = UNSET
    after: Any = UNSET


class PlannedPlacement(ApiType, frozen=True, kw_only=True):
    """Where the replicas that a change adds would be placed, tried on a snapshot. `waits` explains those that would not be, as
    `explain` does. `ends` counts running replicas that would be removed; `stops` says what blocks the rollout; `capped`
    means that not all replicas were tried.
    """

    wanted: Natural
    placed: Natural
    nodes: dict[str, int] = field(default_factory=dict)
    waits: Any = None
    stops: Any = None
    ends: Natural = 0
    capped: bool = False


class PlanItem(ApiType, frozen=True, kw_only=True):
    kind: str
    name: str
    tenant: str = ""
    action: Literal["create", "replace", "unchanged", "refused"]
    diff: tuple[Difference, ...] = ()
    problem: ProblemAnswer | None = None
    placement: PlannedPlacement | None = None


class PlanAnswer(ApiType, frozen=True, kw_only=True):
    """The effect that an apply would have, as of `revision`. Nothing was written."""

    revision: Natural
    items: tuple[PlanItem, ...]


class RotateAnswer(ApiType, frozen=True, kw_only=True):
    """Progress of a key rotation: `resealed` is the number of secrets sealed again with `key`; `keys` are all keys that can
    unseal; `left` are secrets that could not be sealed again. Repeat the request with `after` until `after` is empty.
    """

    key: str = ""
    made: bool = False
    """Whether this request has created the key."""
    keys: tuple[str, ...] = ()
    resealed: Natural = 0
    left: tuple[str, ...] = ()
    after: str = ""


# ------------------------------------------------------------------------------------------------------------------- status


class IdleLease(ApiType, frozen=True, kw_only=True):
    """A lease without a holder, so that the work of its role is not done. `part` is the command that runs the role."""

    lease: str
    part: str
    silent_ms: Natural | None = None
    """Lower bound of the time since the last renewal. None: the lease has no holder."""
    why: str = ""
    cure: str = ""


class ScopeStatus(ApiType, frozen=True, kw_only=True):
    """Status of a scope. New operation ids contain its `incarnation` and `window`; `idle` lists leases without a holder.

    `board_age_ms` is deprecated: use `cache_age_ms`.
    """

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
    cache_age_ms: Annotated[
        Natural, Meta(description="age of the server's watch cache: time since the store last answered it")
    ] = 0
    board_age_ms: Annotated[Natural, Meta(description="deprecated: the same as cacheAgeMs")] = 0
    idle: tuple[IdleLease, ...] = ()


class ResourceUsage(ApiType, frozen=True, kw_only=True):
    """CPU and memory."""

    cpu_milli: Natural = 0
    memory_bytes: Natural = 0


class NodeTop(ApiType, frozen=True, kw_only=True):
    """Usage of a node from its last heartbeat, `age_ms` ago, with its capacity and the requests of its replicas."""

    node: str
    region: str = ""
    zone: str = ""
    health: str = ""
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    capacity: ResourceUsage = ResourceUsage()
    requests: ResourceUsage = ResourceUsage()
    replicas: Natural = 0
    restarts: Natural = 0
    age_ms: Natural | None = None
    """None: the node has not sent a heartbeat yet."""


class ReplicaTop(ApiType, frozen=True, kw_only=True):
    """Usage of one running replica from its node's last heartbeat, with its requests."""

    tenant: str
    replica: str
    workload: str = ""
    node: str = ""
    phase: str = ""
    pid: Natural = 0
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    requests: ResourceUsage = ResourceUsage()
    restarts: Natural = 0
    said: str = ""
    """Why the replica is not ready: the result of its last probe. Empty if it is ready."""
    age_ms: Natural | None = None


class WorkloadLimit(ApiType, frozen=True, kw_only=True):
    """The obstacle between a workload and its desired state; empty if there is none. `code` is the code of a reason, or a
    phase. `never`: only a change of the spec can help.
    """

    code: str = ""
    detail: str = ""
    never: bool = False


class WorkloadProgressItem(ApiType, frozen=True, kw_only=True):
    """Progress of one workload and what limits it. `revision` is that of the workload. `stages` counts replicas by phase:
    pending ones as `queued`, completed ones of a job as `done`, released ones not at all.
    """

    tenant: str
    name: str
    revision: Natural
    desired: Natural = 0
    ready: Natural = 0
    placed: Natural = 0
    done: Natural = 0
    stages: dict[str, int] = field(default_factory=dict)
    limit: WorkloadLimit = WorkloadLimit()
    cache_revision: Natural = 0
    """Revision of the watch cache that the progress was computed from."""
    cache_age_ms: Natural = 0
    """Time since that revision was received."""


class HistoryEvent(ApiType, frozen=True, kw_only=True):
    """An event about `regarding` that happened `count` times, from `first` to `at` by wall clocks."""

    at: str
    first: str = ""
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str = ""
    regarding: str = ""
    source: str = ""
    message: str = ""
    count: Natural = 1
    revision: Natural = 0


class AuditItem(ApiType, frozen=True, kw_only=True):
    """One action of a caller, performed or refused, at `time` by the server's wall clock. `count` is the number of equal
    actions since the previous entry.
    """

    time: str
    subject: str = ""
    token: str = ""
    role: str = ""
    tenant: str = ""
    address: str = ""
    action: str = ""
    """Operation id of the route, such as `createWorkload`; empty if no route matches."""
    target: str = ""
    status: Natural = 0
    code: str = ""
    detail: str = ""
    operation: str = ""
    trace: str = ""
    count: Natural = 1
