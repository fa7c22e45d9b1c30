"""Table columns of each kind.

Cells only: how they are laid out is in columns.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from remit.cli.output.console import BAD, FAINT, GOOD, UNSURE, Cell, Cells, Column
from remit.cli.session.workload_progress import ProgressSummary, format_stages
from remit.law.workload_rules import PendingReason, condition_of, pending_reason
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
"""How long ago it was made: it grows by itself."""
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


_DRAINS: Final = {"Empty": "it is empty", "Draining": "it is being emptied", "DeadlinePassed": "its drain is overdue"}


class Around(NamedTuple):
    """What is known besides the object itself; each may be missing, and is then shown as not known."""

    progress: Mapping[tuple[str, str], ProgressSummary] = {}
    reasons: Mapping[tuple[str, str], PendingReason] = {}
    nodes: Mapping[str, NodeTop] = {}
    replicas: Mapping[tuple[str, str], ReplicaTop] = {}
    wall: str = ""


class Layout(NamedTuple):
    """The columns of a kind besides tenant and name, and what an object has in them."""

    columns: tuple[Column, ...]
    cells: Callable[[Any, Around], Cells]


def columns_of(kind: str, *, everyone: bool) -> tuple[Column, ...]:
    tenant = (Column("TENANT"),) if everyone else ()
    return (
        *tenant,
        Column("NAME", least=14),
        *LAYOUTS[kind].columns,
        *((Column(AGE, right=True),) if kind in DECLARED else ()),
        Column("REVISION", wide=True, right=True),
        Column("LABELS", wide=True),
    )


def row_of(thing: AnyObject, around: Around, *, everyone: bool, prefixed: bool = False) -> Cells:
    kind, meta = type(thing).__name__, thing.metadata
    tenant = (meta.tenant,) if everyone else ()
    name = f"{kind.lower()}/{meta.name}" if prefixed else meta.name
    labels = ",".join(f"{key}={value}" for key, value in sorted(getattr(meta, "labels", {}).items()))
    since = (Cell(age(meta.created, around.wall) or NONE, FAINT),) if isinstance(meta, Metadata) else ()
    return (*tenant, name, *LAYOUTS[kind].cells(thing, around), *since, str(meta.revision), labels or NONE)


# -- work ----------------------------------------------------------------------------------------------------------------------


def _workload(thing: Workload, around: Around) -> Cells:
    meta, spec = thing.metadata, thing.spec
    found = around.progress.get((meta.tenant, meta.name))
    tail = (spec.priority_class or NONE, str(meta.generation))
    if found is None:
        return spec.type, NONE, NONE, NONE, *tail
    style = GOOD if found.arrived >= found.wanted and not found.limit else UNSURE
    limit = f"{found.limit}{': ' if found.detail else ''}{found.detail}" if found.limit else NONE
    never = BAD if found.never else UNSURE if found.limit else ""
    return spec.type, Cell(f"{found.arrived}/{found.wanted}", style), format_stages(found), Cell(limit, never), *tail


_NOT_READY: Final = (Phase.STARTING, Phase.RUNNING)


def _replica(thing: Replica, around: Around) -> Cells:
    meta, spec, status = thing.metadata, thing.spec, thing.status
    top = around.replicas.get((meta.tenant, meta.name))
    why = pending_reason(thing, around.reasons) if status.phase is Phase.PENDING else None
    if why is not None:
        reason = Cell(f"{why.reason}{': ' if why.detail else ''}{why.detail}", BAD if why.never else UNSURE)
    elif status.phase is Phase.PENDING and not status.reason:
        reason = Cell("queued", FAINT)
    else:
        said = top.said if top is not None and status.phase in _NOT_READY else ""
        reason = Cell(" ".join(part for part in (status.result, said or status.reason) if part) or NONE, UNSURE if said else "")
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


# -- places --------------------------------------------------------------------------------------------------------------------


def _node(thing: Node, around: Around) -> Cells:
    spec, status = thing.spec, thing.status
    top = around.nodes.get(thing.metadata.name)
    marks = [status.health.value, *(["draining"] if spec.draining else ["cordoned"] if spec.unschedulable else [])]
    style = HEALTH_STYLES[status.health] if len(marks) == 1 else UNSURE
    devices = Amount(_devices(spec.devices))
    return (
        Cell(",".join(marks), style),
        spec.region,
        spec.zone,
        spec.pool,
        _of(top.requests.cpu_milli if top else None, spec.capacity.get("cpu"), cpu_words),
        _of(top.requests.memory_bytes if top else None, spec.capacity.get("memory"), bytes_words),
        str(top.replicas) if top else NONE,
        node_reason(thing) or NONE,
        str(devices) if devices else NONE,
        f"{spec.address}:{spec.port}" if spec.port else spec.address or NONE,
        ",".join(f"{one.key}={one.value}:{one.effect}" for one in spec.taints) or NONE,
    )


def node_reason(thing: Node) -> str:
    """Why it is as it is: what was said of its health, if that is not good, and how its drain stands."""
    said = [thing.status.reason] if thing.status.health is not NodeHealth.READY and thing.status.reason else []
    drained = condition_of(thing.status.conditions, "Drained")
    if thing.spec.draining and drained is not None:
        said.append(f"{_DRAINS.get(drained.reason, drained.reason)}{': ' if drained.message else ''}{drained.message}")
    return "; ".join(said)


def _devices(devices: Sequence[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in devices:
        found[f"devices/{one.kind}"] = found.get(f"devices/{one.kind}", 0) + 1_000
    return found


def _of(used: int | None, whole: int, words: Callable[[int], str]) -> str:
    return f"{words(used) if used is not None else NONE}/{words(whole)}"


def _pool(thing: NodePool, around: Around) -> Cells:
    spec = thing.spec
    return spec.region, _few(spec.zones), str(spec.capacity), str(spec.min), str(spec.max)


def _region(thing: Region, around: Around) -> Cells:
    return _few(thing.spec.zones), thing.spec.description or NONE


# -- rules and the rest --------------------------------------------------------------------------------------------------------


def _tenant(thing: Tenant, around: Around) -> Cells:
    spec = thing.spec
    return str(spec.quota), str(spec.emergency_quota) if spec.emergency_quota else NONE, str(spec.weight)


def _class(thing: PriorityClass, around: Around) -> Cells:
    return str(thing.spec.value), "yes" if thing.spec.preempts else "no", thing.spec.description or NONE


def _policy(thing: Policy, around: Around) -> Cells:
    return str(len(thing.spec.rules)), thing.spec.description or _few(rule.reason for rule in thing.spec.rules if rule.reason)


def _data(thing: Secret | Config, around: Around) -> Cells:
    sizes = (
        thing.status.sizes if isinstance(thing, Secret) else {key: len(text.encode()) for key, text in thing.spec.data.items()}
    )
    return str(len(thing.spec.data)), _few(f"{key} ({sizes.get(key, 0)} B)" for key in thing.spec.data)


def _allotment(thing: Allotment, around: Around) -> Cells:
    spec = thing.spec
    return spec.workload, spec.region, str(spec.replicas), (spec.when or "yes") if spec.standby else "no", spec.grant or NONE


def _override(thing: Override, around: Around) -> Cells:
    spec, scope = thing.spec, thing.spec.scope
    named = [
        f"{word} {name}"
        for word in ("tenant", "workload", "region", "zone", "pool", "node")
        for name in getattr(scope, f"{word}s")
    ]
    return spec.effect, _few(named), str(spec.ttl), spec.author, spec.reason


def _token(thing: Token, around: Around) -> Cells:
    spec = thing.spec
    over = "revoked" if spec.revoked else "used" if spec.spent else "ran out" if spec.expires <= around.wall else ""
    ends = Cell(over, BAD) if over else spec.expires
    return spec.role, spec.subject or NONE, spec.tenant or NONE, _few(list(spec.nodes)), AUDIENCES[spec.role], ends


def _generation(thing: Generation, around: Around) -> Cells:
    return thing.spec.workload, str(thing.spec.generation), thing.spec.spec.type, str(thing.spec.spec.replicas)


def _policies(thing: PolicyRevision, around: Around) -> Cells:
    return str(thing.spec.number), _few(thing.spec.policies)


def _grant(thing: Grant, around: Around) -> Cells:
    spec = thing.spec
    return spec.holder, spec.purpose, spec.tenant or NONE, str(spec.amount), thing.status.phase.value, spec.parent or NONE


def _peer(thing: Peer, around: Around) -> Cells:
    return thing.spec.standing.value, thing.spec.incarnation or NONE


def _lease(thing: Lease, around: Around) -> Cells:
    return thing.spec.holder or NONE, str(thing.spec.epoch), str(thing.spec.ttl)


def _decision(thing: Decision, around: Around) -> Cells:
    spec = thing.spec
    placed = sum(bool(node) for node in spec.replicas.values())
    return spec.verdict, spec.reason or NONE, f"{placed}/{len(spec.replicas)}", f"{spec.fits}/{spec.nodes}", spec.detail or NONE


def _event(thing: Event, around: Around) -> Cells:
    spec = thing.spec
    style = BAD if spec.type == "Warning" else ""
    return Cell(spec.type, style), spec.reason or NONE, spec.regarding, spec.source or NONE, str(spec.count), spec.message


def _summary(thing: Summary, around: Around) -> Cells:
    return thing.spec.holder, f"{thing.spec.epoch}.{thing.spec.sequence}", str(thing.spec.used)


def _few(names: Any) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED_MAX} more" if len(listed) > LISTED_MAX else ""
    return ", ".join(listed[:LISTED_MAX]) + more or NONE


C = Column
LAYOUTS: Final[Mapping[str, Layout]] = {
    "Token": Layout(
        (C("ROLE"), C("SUBJECT", fluid=True), C("TENANT"), C("NODES"), C("AUDIENCE", wide=True), C("ENDS")),
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


def endpoint_columns(*, everyone: bool) -> tuple[Column, ...]:
    return (*((Column("TENANT"),) if everyone else ()), *ENDPOINT_COLUMNS)


def endpoint_row(item: EndpointItem, *, everyone: bool) -> Cells:
    where = ", ".join(f"{name}={item.host or '?'}:{port}" for name, port in sorted(item.ports.items()))
    tenant = (item.tenant,) if everyone else ()
    return (*tenant, item.service, item.replica, where or NONE, item.node, item.region or NONE, item.zone or NONE)


# -- figures -------------------------------------------------------------------------------------------------------------------


def cpu_words(milli: int) -> str:
    """Cores: `32`, `1.5`, `250m`."""
    if milli % 1_000 == 0:
        return str(milli // 1_000)
    return f"{milli / 1_000:.1f}" if milli >= 1_000 else f"{milli}m"


def bytes_words(count: int) -> str:
    """To two or three digits, as people read them: `128Gi`, `1.5Gi`, `300Mi`."""
    size: float = count
    for suffix in ("", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if size < 1_024 or suffix == "Pi":
            return f"{size:.0f}{suffix}" if size >= 10 or size == int(size) else f"{size:.1f}{suffix}"
        size /= 1_024
    return str(count)


def age(at: str, wall: str) -> str:
    """How long ago, short: `12s`, `5m`, `3h`, `2d4h`. By two wall clocks, so for people only; nothing if it is not known."""
    if not at or not wall:
        return ""
    try:
        seconds = int((datetime.fromisoformat(wall) - datetime.fromisoformat(at)).total_seconds())
    except (ValueError, TypeError):
        return ""
    return span(max(0, seconds))


def span(seconds: int) -> str:
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
