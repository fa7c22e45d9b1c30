"""Table columns of each kind, and the cells of an object in them. Widths and printing are in console.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, NamedTuple

from remit.cli.output.console import BAD, FAINT, GOOD, UNSURE, Cell, Cells, Column
from remit.cli.session.workload_progress import format_limit, format_stages
from remit.law.workload_rules import PendingReason, condition_of, pending_reason
from remit.model.identity import AUDIENCES
from remit.model.kinds import (
    Allotment,
    Config,
    Node,
    NodeHealth,
    Override,
    Policy,
    Secret,
    Token,
    Workload,
)
from remit.model.kinds.definition import CellFormat, KindDefinition
from remit.model.kinds.registry import BY_KIND, BY_STRUCT, AnyObject
from remit.model.metadata import Metadata
from remit.model.objects import DECLARED
from remit.model.records import (
    Decision,
    Event,
    Phase,
    Replica,
    Summary,
    result_text,
)
from remit.model.resources import Amount
from remit.model.wire.api_types import EndpointItem, NodeTop, ReplicaTop, WorkloadProgressItem

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

    progress: Mapping[tuple[str, str], WorkloadProgressItem] = {}
    reasons: Mapping[tuple[str, str], PendingReason] = {}
    nodes: Mapping[str, NodeTop] = {}
    replicas: Mapping[tuple[str, str], ReplicaTop] = {}
    wall: str = ""


def columns_of(kind: str, *, all_tenants: bool) -> tuple[Column, ...]:
    tenant = (Column("TENANT"),) if all_tenants else ()
    return (
        *tenant,
        Column("NAME", least=14),
        *(Column(c.heading, c.wide, c.right, c.fluid, c.least) for c in BY_KIND[kind].columns),
        *((Column(AGE, right=True),) if kind in DECLARED else ()),
        Column("REVISION", wide=True, right=True),
        Column("LABELS", wide=True),
    )


def row_of(obj: AnyObject, row_context: RowContext, *, all_tenants: bool, prefixed: bool = False) -> Cells:
    definition, meta = BY_STRUCT[type(obj)], obj.metadata
    tenant = (meta.tenant,) if all_tenants else ()
    name = f"{definition.prefix}/{meta.name}" if prefixed else meta.name
    labels = ",".join(f"{key}={value}" for key, value in sorted(getattr(meta, "labels", {}).items()))
    since = (Cell(age(meta.created, row_context.wall) or NONE, FAINT),) if isinstance(meta, Metadata) else ()
    return (*tenant, name, *_cells(definition, obj, row_context), *since, str(meta.revision), labels or NONE)


def _cells(definition: KindDefinition, obj: AnyObject, row_context: RowContext) -> Iterator[str | Cell]:
    compute = COMPUTED_CELLS.get(definition.kind)
    computed = iter(compute(obj, row_context) if compute is not None else ())
    for column in definition.columns:
        yield FORMATS[column.format](attrgetter(column.path)(obj)) if column.path else next(computed)


# -- workloads and replicas ----------------------------------------------------------------------------------------------------


def _workload(workload: Workload, row_context: RowContext) -> Cells:
    progress = row_context.progress.get((workload.metadata.tenant, workload.metadata.name))
    if progress is None:
        return NONE, NONE, NONE
    limit = format_limit(progress)
    style = GOOD if progress.ready >= progress.desired and not limit else UNSURE
    never = BAD if progress.limit.never else UNSURE if limit else ""
    return Cell(f"{progress.ready}/{progress.desired}", style), format_stages(progress), Cell(limit or NONE, never)


_NOT_READY: Final = (Phase.STARTING, Phase.RUNNING)


def _replica(replica: Replica, row_context: RowContext) -> Cells:
    meta, status = replica.metadata, replica.status
    top = row_context.replicas.get((meta.tenant, meta.name))
    pending = None
    if status.phase is Phase.PENDING:
        pending = pending_reason(meta.tenant, meta.name, meta.revision, row_context.reasons)
    if pending is not None:
        reason = Cell(f"{pending.reason}{': ' if pending.detail else ''}{pending.detail}", BAD if pending.never else UNSURE)
    elif status.phase is Phase.PENDING and not status.reason:
        reason = Cell("queued", FAINT)
    else:
        report = top.said if top is not None and status.phase in _NOT_READY else ""
        reason = Cell(result_text(status.result, report or status.reason) or NONE, UNSURE if report else "")
    ports = ",".join(f"{name}:{port}" for name, port in sorted(status.ports.items()))
    return (
        Cell(status.phase.value, PHASE_STYLES.get(status.phase, "")),
        str(top.restarts) if top is not None else NONE,
        reason,
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


# -- other kinds ---------------------------------------------------------------------------------------------------------------


def _policy(obj: Policy, row_context: RowContext) -> Cells:
    return (obj.spec.description or _first_names(rule.reason for rule in obj.spec.rules if rule.reason),)


def _data(obj: Secret | Config, row_context: RowContext) -> Cells:
    sizes = obj.status.sizes if isinstance(obj, Secret) else {key: len(text.encode()) for key, text in obj.spec.data.items()}
    return (_first_names(f"{key} ({sizes.get(key, 0)} B)" for key in obj.spec.data),)


def _allotment(obj: Allotment, row_context: RowContext) -> Cells:
    return ((obj.spec.when or "yes") if obj.spec.standby else "no",)


def _override(obj: Override, row_context: RowContext) -> Cells:
    scope = obj.spec.scope
    named = [
        f"{word} {name}"
        for word in ("tenant", "workload", "region", "zone", "pool", "node")
        for name in getattr(scope, f"{word}s")
    ]
    return (_first_names(named),)


def _token(obj: Token, row_context: RowContext) -> Cells:
    spec = obj.spec
    ended = "revoked" if spec.revoked else "used" if spec.spent else "expired" if spec.expires <= row_context.wall else ""
    return AUDIENCES[spec.role], Cell(ended, BAD) if ended else spec.expires


def _decision(obj: Decision, row_context: RowContext) -> Cells:
    spec = obj.spec
    placed = sum(bool(node) for node in spec.replicas.values())
    return f"{placed}/{len(spec.replicas)}", f"{spec.fits}/{spec.nodes}"


def _event(obj: Event, row_context: RowContext) -> Cells:
    return (Cell(obj.spec.type, BAD if obj.spec.type == "Warning" else ""),)


def _summary(obj: Summary, row_context: RowContext) -> Cells:
    return (f"{obj.spec.epoch}.{obj.spec.sequence}",)


def _text(value: Any) -> str:
    return str(value) if value or isinstance(value, int) else NONE


def _first_names(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED_MAX} more" if len(listed) > LISTED_MAX else ""
    return ", ".join(listed[:LISTED_MAX]) + more or NONE


FORMATS: Final[Mapping[CellFormat, Callable[[Any], str]]] = {
    "text": _text,
    "count": lambda value: str(len(value)),
    "names": _first_names,
    "yes-no": lambda value: "yes" if value else "no",
}

COMPUTED_CELLS: Final[Mapping[str, Callable[[Any, RowContext], Cells]]] = {
    "Node": _node, "Policy": _policy, "Config": _data, "Secret": _data, "Workload": _workload, "Replica": _replica,
    "Allotment": _allotment, "Override": _override, "Token": _token, "Summary": _summary, "Decision": _decision,
    "Event": _event,
}  # fmt: skip
"""Cells of the columns without a path, in their order. The columns are in the definition of the kind (model/kinds)."""

ENDPOINT_COLUMNS: Final = tuple(Column(head) for head in ("SERVICE", "REPLICA", "ADDRESSES", "NODE", "REGION", "ZONE"))


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
