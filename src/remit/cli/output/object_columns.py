"""Table columns of each kind, and the cells of an object in them. Widths and printing are in console.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from remit.cli.output.console import BAD, FAINT, GOOD, UNSURE, Cell, Cells, Column
from remit.cli.session.workload_progress import PendingReason, ProgressSummary, condition_of, format_stages, pending_reason
from remit.model.identity import AUDIENCES, Token
from remit.model.kinds import Allotment, Node, NodeHealth, NodePool, Override, Policy, PriorityClass, Region, Tenant, Workload
from remit.model.metadata import Metadata
from remit.model.objects import DECLARED, AnyObject
from remit.model.records import (
    Decision,
    Event,
    Generation,
    Grant,
    Lease,
    Peer,
    Phase,
    PolicyRevision,
    Replica,
    Summary,
)
from remit.model.resources import Amount
from remit.model.secrets import Config, Secret
from remit.model.wire.api_types import EndpointItem, NodeTop, ReplicaTop

NONE: Final = "-"
AGE: Final = "AGE"
"""Heading of the age column. `get --watch` ignores this column when it compares rows, because age changes by itself."""
LISTED_MAX: Final = 3
PHASE_STYLES: Final = {
    **dict.fromkeys((Phase.SERVING, Phase.READY, Phase.RUNNING, Phase.FINISHED), GOOD),
    **dict.fromkeys((Phase.UNKNOWN, Phase.DRAINING, Phase.STOPPING, Phase.PENDING, Phase.RESERVED), UNSURE),
    Phase.FAILED: BAD,
    Phase.RELEASED: FAINT,
}
HEALTH_STYLES: Final = {
    NodeHealth.READY: GOOD,
    **dict.fromkeys((NodeHealth.JOINING, NodeHealth.SUSPECT), UNSURE),
    **dict.fromkeys((NodeHealth.UNKNOWN, NodeHealth.LOST), BAD),
}


_DRAIN_STATES: Final = {"Empty": "drained", "Draining": "draining", "DeadlinePassed": "the drain deadline has passed"}


class RowContext(NamedTuple):
    """Data that rows need besides the object itself. Missing data is shown as `-`."""

    progress: Mapping[tuple[str, str], ProgressSummary] = {}
    reasons: Mapping[tuple[str, str], PendingReason] = {}
    nodes: Mapping[str, NodeTop] = {}
    replicas: Mapping[tuple[str, str], ReplicaTop] = {}
    wall: str = ""


class Layout(NamedTuple):
    """Columns of a kind between name and age, and the function that computes their cells for an object."""

    columns: tuple[Column, ...]
    cells: Callable[[Any, RowContext], Cells]


def columns_of(kind: str, *, all_tenants: bool) -> tuple[Column, ...]:
    tenant = (Column("TENANT"),) if all_tenants else ()
    return (
        *tenant,
        Column("NAME", least=14),
        *LAYOUTS[kind].columns,
        *((Column(AGE, right=True),) if kind in DECLARED else ()),
        Column("REVISION", wide=True, right=True),
        Column("LABELS", wide=True),
    )


def row_of(obj: AnyObject, row_context: RowContext, *, all_tenants: bool, prefixed: bool = False) -> Cells:
    kind, meta = type(obj).__name__, obj.metadata
    tenant = (meta.tenant,) if all_tenants else ()
    name = f"{kind.lower()}/{meta.name}" if prefixed else meta.name
    labels = ",".join(f"{key}={value}" for key, value in sorted(getattr(meta, "labels", {}).items()))
    since = (Cell(age(meta.created, row_context.wall) or NONE, FAINT),) if isinstance(meta, Metadata) else ()
    return (*tenant, name, *LAYOUTS[kind].cells(obj, row_context), *since, str(meta.revision), labels or NONE)


# -- workloads and replicas ----------------------------------------------------------------------------------------------------


def _workload(workload: Workload, row_context: RowContext) -> Cells:
    meta, spec = workload.metadata, workload.spec
    progress = row_context.progress.get((meta.tenant, meta.name))
    tail = (spec.priority_class or NONE, str(meta.generation))
    if progress is None:
        return spec.type, NONE, NONE, NONE, *tail
    style = GOOD if progress.ready >= progress.desired and not progress.limit else UNSURE
    limit = f"{progress.limit}{': ' if progress.detail else ''}{progress.detail}" if progress.limit else NONE
    never = BAD if progress.never else UNSURE if progress.limit else ""
    return spec.type, Cell(f"{progress.ready}/{progress.desired}", style), format_stages(progress), Cell(limit, never), *tail


_NOT_READY: Final = (Phase.STARTING, Phase.RUNNING)


def _replica(replica: Replica, row_context: RowContext) -> Cells:
    meta, spec, status = replica.metadata, replica.spec, replica.status
    top = row_context.replicas.get((meta.tenant, meta.name))
    pending = pending_reason(replica, row_context.reasons) if status.phase is Phase.PENDING else None
    if pending is not None:
        reason = Cell(f"{pending.reason}{': ' if pending.detail else ''}{pending.detail}", BAD if pending.never else UNSURE)
    elif status.phase is Phase.PENDING and not status.reason:
        reason = Cell("queued", FAINT)
    else:
        report = top.said if top is not None and status.phase in _NOT_READY else ""
        reason = Cell(
            " ".join(part for part in (status.result, report or status.reason) if part) or NONE, UNSURE if report else ""
        )
    ports = ",".join(f"{name}:{port}" for name, port in sorted(status.ports.items()))
    return (
        Cell(status.phase.value, PHASE_STYLES.get(status.phase, "")),
        status.node or NONE,
        str(status.attempt),
        str(top.restarts) if top is not None else NONE,
        reason,
        spec.workload,
        str(spec.generation),
        str(spec.priority),
        ports or NONE,
        ",".join(sorted(status.devices)) or NONE,
    )


# -- nodes, pools and regions --------------------------------------------------------------------------------------------------


def _node(node: Node, row_context: RowContext) -> Cells:
    spec, status = node.spec, node.status
    top = row_context.nodes.get(node.metadata.name)
    marks = [status.health.value, *(["draining"] if spec.draining else ["cordoned"] if spec.unschedulable else [])]
    style = HEALTH_STYLES[status.health] if len(marks) == 1 else UNSURE
    devices = Amount(_devices(spec.devices))
    return (
        Cell(",".join(marks), style),
        spec.region,
        spec.zone,
        spec.pool,
        _ratio(top.requests.cpu_milli if top else None, spec.capacity.get("cpu"), format_cpu),
        _ratio(top.requests.memory_bytes if top else None, spec.capacity.get("memory"), format_bytes),
        str(top.replicas) if top else NONE,
        node_reason(node) or NONE,
        str(devices) if devices else NONE,
        f"{spec.address}:{spec.port}" if spec.port else spec.address or NONE,
        ",".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in spec.taints) or NONE,
    )


def node_reason(node: Node) -> str:
    """Explain the state of a node: the reason of its health unless it is ready, and the state of its drain."""
    parts = [node.status.reason] if node.status.health is not NodeHealth.READY and node.status.reason else []
    if node.status.health is NodeHealth.JOINING and not parts:
        parts.append("no agent has reported for this node yet")
    drained = condition_of(node.status.conditions, "Drained")
    if node.spec.draining and drained is not None:
        parts.append(f"{_DRAIN_STATES.get(drained.reason, drained.reason)}{': ' if drained.message else ''}{drained.message}")
    return "; ".join(parts)


def _devices(devices: Sequence[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in devices:
        counts[f"devices/{device.kind}"] = counts.get(f"devices/{device.kind}", 0) + 1_000
    return counts


def _ratio(used: int | None, capacity: int, format_value: Callable[[int], str]) -> str:
    return f"{format_value(used) if used is not None else NONE}/{format_value(capacity)}"


def _pool(obj: NodePool, row_context: RowContext) -> Cells:
    spec = obj.spec
    return spec.region, _first_names(spec.zones), str(spec.capacity), str(spec.min), str(spec.max)


def _region(obj: Region, row_context: RowContext) -> Cells:
    return _first_names(obj.spec.zones), obj.spec.description or NONE


# -- other kinds ---------------------------------------------------------------------------------------------------------------


def _tenant(obj: Tenant, row_context: RowContext) -> Cells:
    spec = obj.spec
    return str(spec.quota), str(spec.emergency_quota) if spec.emergency_quota else NONE, str(spec.weight)


def _class(obj: PriorityClass, row_context: RowContext) -> Cells:
    return str(obj.spec.value), "yes" if obj.spec.preempts else "no", obj.spec.description or NONE


def _policy(obj: Policy, row_context: RowContext) -> Cells:
    return str(len(obj.spec.rules)), obj.spec.description or _first_names(rule.reason for rule in obj.spec.rules if rule.reason)


def _data(obj: Secret | Config, row_context: RowContext) -> Cells:
    sizes = obj.status.sizes if isinstance(obj, Secret) else {key: len(text.encode()) for key, text in obj.spec.data.items()}
    return str(len(obj.spec.data)), _first_names(f"{key} ({sizes.get(key, 0)} B)" for key in obj.spec.data)


def _allotment(obj: Allotment, row_context: RowContext) -> Cells:
    spec = obj.spec
    return spec.workload, spec.region, str(spec.replicas), (spec.when or "yes") if spec.standby else "no", spec.grant or NONE


def _override(obj: Override, row_context: RowContext) -> Cells:
    spec, scope = obj.spec, obj.spec.scope
    named = [
        f"{word} {name}"
        for word in ("tenant", "workload", "region", "zone", "pool", "node")
        for name in getattr(scope, f"{word}s")
    ]
    return spec.effect, _first_names(named), str(spec.ttl), spec.author, spec.reason


def _token(obj: Token, row_context: RowContext) -> Cells:
    spec = obj.spec
    ended = "revoked" if spec.revoked else "used" if spec.spent else "expired" if spec.expires <= row_context.wall else ""
    expiry = Cell(ended, BAD) if ended else spec.expires
    return spec.role, spec.subject or NONE, spec.tenant or NONE, _first_names(list(spec.nodes)), AUDIENCES[spec.role], expiry


def _generation(obj: Generation, row_context: RowContext) -> Cells:
    return obj.spec.workload, str(obj.spec.generation), obj.spec.spec.type, str(obj.spec.spec.replicas)


def _policies(obj: PolicyRevision, row_context: RowContext) -> Cells:
    return str(obj.spec.number), _first_names(obj.spec.policies)


def _grant(obj: Grant, row_context: RowContext) -> Cells:
    spec = obj.spec
    return spec.holder, spec.purpose, spec.tenant or NONE, str(spec.amount), obj.status.phase.value, spec.parent or NONE


def _peer(obj: Peer, row_context: RowContext) -> Cells:
    return obj.spec.standing.value, obj.spec.incarnation or NONE


def _lease(obj: Lease, row_context: RowContext) -> Cells:
    return obj.spec.holder or NONE, str(obj.spec.epoch), str(obj.spec.ttl)


def _decision(obj: Decision, row_context: RowContext) -> Cells:
    spec = obj.spec
    placed = sum(bool(node) for node in spec.replicas.values())
    return spec.verdict, spec.reason or NONE, f"{placed}/{len(spec.replicas)}", f"{spec.fits}/{spec.nodes}", spec.detail or NONE


def _event(obj: Event, row_context: RowContext) -> Cells:
    spec = obj.spec
    style = BAD if spec.type == "Warning" else ""
    return Cell(spec.type, style), spec.reason or NONE, spec.regarding, spec.source or NONE, str(spec.count), spec.message


def _summary(obj: Summary, row_context: RowContext) -> Cells:
    return obj.spec.holder, f"{obj.spec.epoch}.{obj.spec.sequence}", str(obj.spec.used)


def _first_names(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED_MAX} more" if len(listed) > LISTED_MAX else ""
    return ", ".join(listed[:LISTED_MAX]) + more or NONE


C = Column
LAYOUTS: Final[Mapping[str, Layout]] = {
    "Token": Layout(
        (C("ROLE"), C("SUBJECT", fluid=True), C("TENANT"), C("NODES"), C("AUDIENCE", wide=True), C("EXPIRES")),
        _token,
    ),
    "Workload": Layout(
        (C("TYPE", least=7), C("READY", right=True), C("STAGES", fluid=True, least=24), C("LIMITED BY", fluid=True, least=30),
         C("PRIORITY", wide=True), C("GENERATION", wide=True, right=True)),
        _workload,
    ),
    "Replica": Layout(
        (C("PHASE", least=8), C("NODE", least=8), C("ATTEMPT", right=True), C("RESTARTS", right=True), C("REASON", fluid=True),
         C("WORKLOAD", wide=True), C("GENERATION", wide=True, right=True), C("PRIORITY", wide=True, right=True),
         C("PORTS", wide=True), C("DEVICES", wide=True)),
        _replica,
    ),
    "Node": Layout(
        (C("HEALTH", least=14), C("REGION"), C("ZONE"), C("POOL"), C("CPU", right=True), C("MEMORY", right=True),
         C("REPLICAS", right=True), C("REASON", fluid=True), C("DEVICES", wide=True), C("ADDRESS", wide=True),
         C("TAINTS", wide=True)),
        _node,
    ),
    "NodePool": Layout((C("REGION"), C("ZONES"), C("CAPACITY"), C("MIN", right=True), C("MAX", right=True)), _pool),
    "Region": Layout((C("ZONES"), C("DESCRIPTION", fluid=True)), _region),
    "Tenant": Layout((C("QUOTA", fluid=True), C("EMERGENCY", fluid=True), C("WEIGHT", right=True)), _tenant),
    "PriorityClass": Layout((C("VALUE", right=True), C("PREEMPTS"), C("DESCRIPTION", fluid=True)), _class),
    "Policy": Layout((C("RULES", right=True), C("DESCRIPTION", fluid=True)), _policy),
    "Secret": Layout((C("DATA", right=True), C("KEYS", fluid=True)), _data),
    "Config": Layout((C("DATA", right=True), C("KEYS", fluid=True)), _data),
    "Allotment": Layout((C("WORKLOAD"), C("REGION"), C("REPLICAS", right=True), C("STANDBY"), C("GRANT")), _allotment),
    "Override": Layout(
        (C("EFFECT"), C("SCOPE", fluid=True), C("TTL", right=True), C("AUTHOR"), C("REASON", fluid=True)), _override
    ),
    "Generation": Layout((C("WORKLOAD"), C("GENERATION", right=True), C("TYPE"), C("REPLICAS", right=True)), _generation),
    "PolicyRevision": Layout((C("NUMBER", right=True), C("POLICIES", fluid=True)), _policies),
    "Grant": Layout((C("HOLDER"), C("PURPOSE"), C("FOR"), C("AMOUNT", fluid=True), C("PHASE"), C("PARENT")), _grant),
    "Peer": Layout((C("STANDING"), C("INCARNATION")), _peer),
    "Lease": Layout((C("HOLDER"), C("EPOCH", right=True), C("TTL", right=True)), _lease),
    "Decision": Layout(
        (C("VERDICT"), C("REASON"), C("PLACED", right=True), C("FIT", right=True), C("DETAIL", fluid=True)), _decision
    ),
    "Event": Layout(
        (C("TYPE"), C("REASON"), C("REGARDING"), C("FROM"), C("COUNT", right=True), C("MESSAGE", fluid=True)), _event
    ),
    "Summary": Layout((C("HOLDER"), C("EPOCH", right=True), C("USED", fluid=True)), _summary),
}  # fmt: skip

ENDPOINT_COLUMNS: Final = (C("SERVICE"), C("REPLICA"), C("ADDRESSES"), C("NODE"), C("REGION"), C("ZONE"))


def endpoint_columns(*, all_tenants: bool) -> tuple[Column, ...]:
    return (*((Column("TENANT"),) if all_tenants else ()), *ENDPOINT_COLUMNS)


def endpoint_row(item: EndpointItem, *, all_tenants: bool) -> Cells:
    where = ", ".join(f"{name}={item.host or '?'}:{port}" for name, port in sorted(item.ports.items()))
    tenant = (item.tenant,) if all_tenants else ()
    return (*tenant, item.service, item.replica, where or NONE, item.node, item.region or NONE, item.zone or NONE)


# -- quantities and ages -------------------------------------------------------------------------------------------------------


def format_cpu(milli: int) -> str:
    """Format CPU millicores in cores: `32`, `1.5`, `250m`."""
    if milli % 1_000 == 0:
        return str(milli // 1_000)
    return f"{milli / 1_000:.1f}" if milli >= 1_000 else f"{milli}m"


def format_bytes(count: int) -> str:
    """Format a number of bytes with two or three digits: `128Gi`, `1.5Gi`, `300Mi`."""
    size: float = count
    for suffix in ("", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if size < 1_024 or suffix == "Pi":
            return f"{size:.0f}{suffix}" if size >= 10 or size == int(size) else f"{size:.1f}{suffix}"
        size /= 1_024
    return str(count)


def age(at: str, now: str) -> str:
    """Format the time since `at` as `12s`, `5m`, `3h` or `2d`; empty if it is unknown. It compares the wall clocks of
    two machines, so it is for display only.
    """
    if not at or not now:
        return ""
    try:
        seconds = int((datetime.fromisoformat(now) - datetime.fromisoformat(at)).total_seconds())
    except (ValueError, TypeError):
        return ""
    return format_span(max(0, seconds))


def format_span(seconds: int) -> str:
    minutes, hours, days = seconds // 60, seconds // 3_600, seconds // 86_400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if days < 2:
        return f"{hours}h"
    return f"{days}d"
