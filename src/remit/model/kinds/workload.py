"""Kind Workload: a job, service or daemon, with the template of its replicas and where they may run.

Rules between fields are in manifests/field_rules.py.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from remit.model.artifacts import Artifact, Rootfs, Volume
from remit.model.constraints import (
    ContainedPath,
    CronSchedule,
    DeviceShare,
    DistinctItems,
    MatchesPattern,
    MountPoint,
    NamesProgram,
    NonZeroDuration,
    constrained,
)
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.kinds.region import PlaceNames
from remit.model.metadata import (
    LINE,
    OPTIONAL_KEY,
    URL_PATH,
    ClassName,
    Condition,
    Count,
    EnvName,
    FileName,
    LabelKey,
    Labels,
    LabelValue,
    Line,
    Metadata,
    Name,
    Object,
    Port,
    Record,
    Resources,
    Text,
    share_default,
)
from remit.model.resources import Amount, Duration
from remit.model.roles import PEOPLE, Role

Command = Annotated[tuple[Text, ...], constrained(NamesProgram(), min_length=1, max_length=1024)]


class DeviceRequest(Record, frozen=True):
    """A request for `count` whole devices of a kind or for a `share` of one device, of any model or of one of `models`."""

    kind: Name
    count: Annotated[int, Meta(ge=0, le=1024)] = 0
    share: Annotated[str | int | float, Meta(extra={"quantity": "share", "limits": (DeviceShare(),)})] = ""
    models: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class PortRequest(Record, frozen=True):
    name: Name
    port: Annotated[int, Meta(ge=0, le=65535, description="0: chosen by the agent and reported in the replica's status")] = 0


ROOT_PATH: Final = "/"


class HttpProbe(Record, frozen=True):
    port: Name | Port
    path: Annotated[str, Meta(pattern=URL_PATH, max_length=2048)] = ROOT_PATH

    def __post_init__(self) -> None:
        share_default(self, "path", ROOT_PATH)


class TcpProbe(Record, frozen=True):
    port: Name | Port


class ExecProbe(Record, frozen=True):
    command: Command


class Probe(Record, frozen=True):
    """A health check by exactly one of `http`, `tcp` or `exec`."""

    http: HttpProbe | None = None
    tcp: TcpProbe | None = None
    exec: ExecProbe | None = None
    period: Annotated[
        Duration, constrained(NonZeroDuration("a period of 0 would probe without a pause", "write a longer one, such as 10s"))
    ] = Duration(10_000)
    timeout: Annotated[
        Duration, constrained(NonZeroDuration("a timeout of 0 leaves no time to answer", "write a longer one, such as 1s"))
    ] = Duration(1_000)
    failures: Annotated[int, Meta(ge=1, le=1000)] = 3


class Probes(Record, frozen=True):
    start: Probe | None = None
    ready: Probe | None = None
    live: Probe | None = None


class Mount(Record, frozen=True):
    """A Secret or Config mounted as files under `path`, or set as environment variables if `path` is empty: all of its keys, or
    only `keys`.
    """

    name: Name
    path: Annotated[str, constrained(ContainedPath(absolute=True), MountPoint(), pattern=LINE, max_length=1024)] = ""
    keys: Annotated[tuple[FileName, ...], constrained(DistinctItems(), max_length=256)] = ()


class Restart(Record, frozen=True):
    """When a process that exits is restarted within its attempt. The default is `always` for services and `never` for jobs: a
    failed job starts a new attempt instead, up to `retries` times. A `limit` of 0 allows any number of restarts.
    """

    when: Literal["always", "failure", "never", ""] = ""
    backoff: Annotated[
        Duration, constrained(NonZeroDuration("a backoff of 0 would restart without a pause", "write a longer one, such as 1s"))
    ] = Duration(1_000)
    backoff_max: Duration = Duration(60_000)
    limit: Count = 0


class Template(Record, frozen=True):
    """The command of one replica, and the resources it needs."""

    command: Command
    env: Annotated[dict[EnvName, Text], Meta(max_length=1024)] = field(default_factory=dict)
    ports: Annotated[tuple[PortRequest, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    resources: Resources = Amount()
    devices: Annotated[tuple[DeviceRequest, ...], Meta(max_length=64)] = ()
    probes: Probes = Probes()
    stop_grace: Duration = Duration(30_000)
    restart: Restart = Restart()
    working_directory: Annotated[Line, constrained(ContainedPath(absolute=True))] = ""
    user: Annotated[str, Meta(pattern=LINE, max_length=63)] = ""
    sandbox: Literal["none", "bwrap", "default"] = "default"
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=64)] = ()
    rootfs: Rootfs | None = None
    volumes: Annotated[tuple[Volume, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    secrets: Annotated[tuple[Mount, ...], constrained(DistinctItems("name"), max_length=64)] = ()
    configs: Annotated[tuple[Mount, ...], constrained(DistinctItems("name"), max_length=64)] = ()


class Standby(Record, frozen=True):
    """Replicas that another region starts when the condition `when` holds, charged to a budget that was issued in advance."""

    region: Name
    replicas: Annotated[int, Meta(ge=1, le=1_000_000)]
    budget: Name
    when: Literal["region-lost"] = "region-lost"


class Toleration(Record, frozen=True):
    key: Annotated[
        str, constrained(MatchesPattern(OPTIONAL_KEY, 317, "a label key", "write the key of the taint"), max_length=317)
    ] = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = ""


class NodeExpression(Record, frozen=True):
    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class Spread(Record, frozen=True):
    topology_key: LabelKey
    max_skew: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "DoNotSchedule"
    label_selector: Labels = field(default_factory=dict)


class Affinity(Record, frozen=True):
    """Places a replica in the same topology domain as matching replicas of its tenant or, as anti-affinity, in a domain without
    any.
    """

    label_selector: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=64)]
    topology_key: LabelKey


class Placement(Record, frozen=True):
    regions: PlaceNames = ()
    zones: PlaceNames = ()
    pools: PlaceNames = ()
    standby: Annotated[tuple[Standby, ...], Meta(max_length=16)] = ()
    node_selector: Labels = field(default_factory=dict)
    expressions: Annotated[tuple[NodeExpression, ...], Meta(max_length=64)] = ()
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=64)] = ()
    topology_spread: Annotated[tuple[Spread, ...], Meta(max_length=8)] = ()
    affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()
    anti_affinity: Annotated[tuple[Affinity, ...], Meta(max_length=8)] = ()


class Gang(Record, frozen=True):
    """Gang scheduling: at least `min` replicas are bound in one transaction, or none."""

    min: Annotated[int, Meta(ge=1, le=10_000)]


class Disruption(Record, frozen=True):
    min_available: Count = 0


class Rollout(Record, frozen=True):
    max_surge: Count = 1
    max_unavailable: Count = 0
    progress_deadline: Annotated[
        Duration,
        constrained(
            NonZeroDuration("a rollout with a deadline of 0 would fail at once", "write a longer one, or leave it out for 10m")
        ),
    ] = Duration(600_000)
    auto_rollback: bool = False


class WorkloadSpec(Record, frozen=True):
    type: Literal["job", "service", "daemon"]
    template: Template
    replicas: Count = 1
    priority_class: ClassName = ""
    replace: Literal["fenced", "eager", ""] = ""
    fence: Duration = Duration(300_000)
    mode: Literal["serialized", "autonomous"] = "serialized"
    placement: Placement = Placement()
    gang: Gang | None = None
    disruption: Disruption = Disruption()
    rollout: Rollout = Rollout()
    completions: Count = 0
    retries: Annotated[int, Meta(ge=0, le=10_000)] = 3
    timeout: Duration = Duration(0)
    deadline: Duration = Duration(0)
    schedule: Annotated[str, constrained(CronSchedule(), max_length=256)] = ""
    keep: Annotated[Duration, Meta(description="how long a finished job is kept before it is deleted")] = Duration(3_600_000)

    @property
    def is_fenced(self) -> bool:
        """Whether a replacement must wait until the old attempt has certainly ended. The default is true for jobs and false for
        services and daemons; `replace` overrides it.
        """
        return self.replace == "fenced" or (not self.replace and self.type == "job")


class WorkloadStatus(Record, frozen=True):
    conditions: tuple[Condition, ...] = ()


class Workload(Object, tag="Workload", frozen=True, kw_only=True):
    metadata: Metadata
    spec: WorkloadSpec
    status: WorkloadStatus = WorkloadStatus()


WORKLOAD: Final = KindDefinition(
    struct=Workload,
    summary="a job, service or daemon: what to run, how many replicas, and where",
    plural="workloads",
    aliases=("wl", "w"),
    foreign_names=(
        *("deployment", "deployments", "deploy", "job", "jobs", "service", "services", "svc", "daemonset", "daemonsets", "ds"),
        *("statefulset", "statefulsets", "sts", "cronjob", "cj"),
    ),
    declared_by=PEOPLE | {Role.ROLLOUT},
    deleted_by=frozenset({Role.WORKLOADS}),
    tenanted=True,
    tenant_limit="workloads",
    scheduler_view=True,
    sample=sample(
        "risk-api",
        {
            "type": "service",
            "replicas": 4,
            "template": {
                "command": ["python3", "-m", "http.server", "$(PORT_http)"],
                "ports": [{"name": "http"}],
                "resources": {"cpu": "500m", "memory": "256Mi"},
                "probes": {"ready": {"http": {"port": "http", "path": "/"}, "period": "2s"}},
            },
        },
        "risk",
    ),
    columns=(
        ListColumn("TYPE", "spec.type", least=7),
        ListColumn("READY/DONE", right=True),
        ListColumn("STAGES", fluid=True, least=24),
        ListColumn("LIMITED BY", fluid=True, least=30),
        ListColumn("PRIORITY", "spec.priority_class", wide=True),
        ListColumn("GENERATION", "metadata.generation", wide=True, right=True),
    ),
)
