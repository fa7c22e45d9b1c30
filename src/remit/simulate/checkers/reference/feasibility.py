"""Whether pending work could be placed now; overrides in force.

Used by the liveness checks. It reads rows and sums, and neither places nor ranks anything.

A component may see an override end a little early. An override therefore counts as possibly in force while its row exists
and its deadline is later than the lowest value that the clock it refers to can show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Final

from remit.simulate.checkers.capacity_checks import grant_dead_reason
from remit.simulate.checkers.reference.history import History
from remit.simulate.checkers.reference.past_states import TimedCommit
from remit.simulate.checkers.reference.placement import peer_violation, static_violation
from remit.simulate.checkers.reference.rows import (
    SCOPE_PREFIX,
    WHOLE_DEVICE,
    Amounts,
    Json,
    ReferenceNode,
    ReferenceShape,
    health_of,
    is_open,
    owner_of,
)

CLOCK_DRIFT_MAX: Final = 0.01
"""How much slower a clock may have run since it was last read."""

OverrideSpecs = Sequence[Json]


def clock_lower_bound(history: History, boot: str, revision: int, at_ms: int | None = None) -> int | None:
    """Return the lowest value that the clock of this boot can show at a revision, or at a later time; None if it was not read
    by then.
    """
    past = history.past
    last, known = _last_index(past.commits, revision), past.commits_by_boot.get(boot, ())
    read = _last_index(known, revision)
    if read < 0:
        return None
    _, read_ms, times = known[read]
    at_ms = past.commits[last][1] if at_ms is None else at_ms
    return times.applied_ms + int((at_ms - read_ms) * (1 - CLOCK_DRIFT_MAX))


def _last_index(commits: Sequence[TimedCommit], revision: int) -> int:
    """Return the index of the last commit up to this revision; usually that is the very last one."""
    if commits and commits[-1][0] <= revision:
        return len(commits) - 1
    return bisect_right(commits, revision, key=lambda item: item[0]) - 1


def active_overrides(history: History, now_ms: int) -> OverrideSpecs:
    specs = []
    for row in history.kind("override").values():
        deadline = row.get("status", {}).get("deadline")
        clock_ms = None if deadline is None else clock_lower_bound(history, deadline["boot"], history.revision, now_ms)
        if clock_ms is not None and clock_ms < deadline["atMs"]:
            specs.append(row["spec"])
    return specs


def is_paused(specs: OverrideSpecs, shape: ReferenceShape) -> bool:
    return any(spec["effect"] == "pause-expansion" and _applies_to(spec, shape) for spec in specs)


def is_excluded(specs: OverrideSpecs, shape: ReferenceShape, site: ReferenceNode) -> bool:
    """Whether this node is avoided, or such work is pinned elsewhere."""
    return any(
        (spec["effect"] == "avoid" and _override_covers(spec, site))
        or (spec["effect"] == "pin" and _applies_to(spec, shape) and not _override_covers(spec, site))
        for spec in specs
    )


def _applies_to(spec: Json, shape: ReferenceShape) -> bool:
    scope = spec["scope"]
    return shape.tenant in scope.get("tenants", ()) or f"{shape.tenant}/{shape.workload}" in scope.get("workloads", ())


def _override_covers(spec: Json, site: ReferenceNode) -> bool:
    scope = spec["scope"]
    return site.name in scope.get("nodes", ()) or any(
        value in scope.get(f"{name}s", ()) for name, value in site.locations.items()
    )


def blocked_reason(history: History, replica: Json, now_ms: int) -> str:
    """Return why such a replica may not be placed in this scope now, wherever there is capacity; empty if it may."""
    shape = history.shape(replica)
    owner = history.row(owner_of(replica))
    if shape is None or owner is None or owner["metadata"].get("deleting"):
        return "its workload is gone or being deleted"
    if is_paused(active_overrides(history, now_ms), shape):
        return "an override pauses it"
    if shape.fenced and history.unreported_nodes:
        return "nodes have not reported since a restore"
    if any(peer["spec"].get("standing") == "awaited" for peer in history.kind("peer").values()):
        return "peer scopes have not confirmed their holdings since a restore"
    boot, on_boot = authority_clock(history, now_ms)
    deadline = (history.policy or {}).get("deadline")
    if deadline and (deadline["boot"] != boot or on_boot >= deadline["atMs"]):
        return "the policy's lease has expired"
    return "" if covering_ledger(history, shape, now_ms) else "no quota or grant covers it"


def authority_clock(history: History, now_ms: int) -> tuple[str, int]:
    """Return boot and time of the leading authority's clock, extrapolated from its last commit."""
    if history.latest_commit is None:
        return "", now_ms
    at_ms, times = history.latest_commit
    return times.boot, times.applied_ms + now_ms - at_ms


def covering_ledger(history: History, shape: ReferenceShape, now_ms: int, count: int = 1) -> str:
    """Return a ledger that covers this many replicas: the tenant's own quota, or a slice of it that this scope holds; else
    empty.

    Other grants and budgets are reserved for their holders, so the check cannot demand that this replica may use them.
    """
    home = f"tenant/{shape.tenant}"
    if home in history.limits:
        return home if _covers(history, home, shape, count) else ""
    boot, on_boot = authority_clock(history, now_ms)
    for key, grant in history.kind("grant").items():
        spec, name = grant["spec"], key.removeprefix("grant/")
        if (spec.get("issuer") and spec.get("tenant") == shape.tenant and spec.get("purpose", "quota") == "quota"
                and not grant_dead_reason(history, key, grant, boot, on_boot, fresh=False)
                and _covers(history, name, shape, count)):  # fmt: skip
            return name
    return ""


def _covers(history: History, ledger: str, shape: ReferenceShape, count: int) -> bool:
    limit = history.limits[ledger]
    return all(history.sums.taken(ledger, name) + n * count <= limit.get(name, 0) for name, n in shape.charge.items())


def feasible_node(history: History, shape: ReferenceShape, nodes: Collection[str], now_ms: int) -> str:
    """Return a node among these that would accept one replica now; empty if there is none."""
    for name in sorted(nodes):
        if not _node_accepts(history, shape, name, now_ms):
            continue
        site, row = history.reference_nodes[name], history.row(f"node/{name}")
        if has_capacity(shape, row, history.free_on(name)) and not peer_violation(history, shape, site, counted=False):
            return name
    return ""


def _node_accepts(history: History, shape: ReferenceShape, node: str, now_ms: int) -> bool:
    """Whether the node is ready and open, and nothing but capacity and peers can rule it out."""
    site, row = history.reference_nodes.get(node), history.row(f"node/{node}")
    if (
        site is None
        or row is None
        or health_of(row) != "ready"
        or not is_open(row)
        or static_violation(shape, site, history.policy)
    ):
        return False
    return not is_excluded(active_overrides(history, now_ms), shape, site)


def has_capacity(shape: ReferenceShape, node: Json, free: Amounts, *, take: bool = False) -> bool:
    """Whether there is enough capacity, and devices of the requested kinds and models. With `take`, they are subtracted from
    `free`.
    """
    if any(free.get(name, 0) < n for name, n in shape.resources.items()):
        return False
    taken = dict(shape.resources)
    for request in shape.device_requests:
        devices_left, share = request.get("count", 0), shape.charge[f"devices/{request['kind']}"]
        for device in node["spec"].get("devices", ()):
            name, models = f"@{device['name']}", request.get("models")
            if device["kind"] != request["kind"] or (models and device.get("model", "") not in models):
                continue
            needed = share if request.get("share") else WHOLE_DEVICE
            if name not in taken and free.get(name, 0) >= needed and (devices_left or request.get("share")):
                taken[name] = needed
                devices_left -= 1
                if devices_left <= 0:
                    break
        else:
            if devices_left > 0 or request.get("share"):
                return False
    if take:
        for name, n in taken.items():
            free[name] = free.get(name, 0) - n
    return True


def all_fit(history: History, shapes: Sequence[ReferenceShape], nodes: Collection[str], now_ms: int) -> bool:
    """Whether all of these find capacity and quota at once, the largest first. If not, they may compete with each other."""
    counts: dict[str, tuple[ReferenceShape, int]] = {}
    for shape in shapes:
        counts[shape.key] = shape, counts.get(shape.key, (shape, 0))[1] + 1
    tenants = [shape.tenant for shape, _ in counts.values()]
    if any(
        not covering_ledger(history, shape, now_ms, count * tenants.count(shape.tenant)) for shape, count in counts.values()
    ):
        return False
    free = {name: history.free_on(name) for name in sorted(nodes) if name in history.capacity}
    largest = sorted(shapes, key=lambda shape: sorted(shape.resources.items()), reverse=True)
    specs = active_overrides(history, now_ms)

    def accepts(shape: ReferenceShape, name: str) -> bool:
        site = history.reference_nodes[name]
        return not static_violation(shape, site, history.policy) and not is_excluded(specs, shape, site)

    return all(
        any(
            accepts(shape, name) and has_capacity(shape, history.row(f"node/{name}"), node_free, take=True)
            for name, node_free in free.items()
        )
        for shape in largest
    )


def gang_fits(history: History, shape: ReferenceShape, members: int, nodes: Collection[str], now_ms: int) -> bool:
    """Whether this many members of a gang find capacity at once. Only for gangs without terms towards other replicas."""
    if not covering_ledger(history, shape, now_ms, members):
        return False
    for name in sorted(nodes):
        if not _node_accepts(history, shape, name, now_ms):
            continue
        free = history.free_on(name)
        while members and has_capacity(shape, history.row(f"node/{name}"), free, take=True):
            members -= 1
    return not members


def is_independent(history: History, shape: ReferenceShape) -> bool:
    """Whether it has no terms towards other replicas, and others have none towards it."""
    others_have_terms = any(other.anti_affinity for other in history.shapes.values() if other.tenant == shape.tenant)
    return not has_peer_terms(shape) and not others_have_terms


def has_peer_terms(shape: ReferenceShape) -> bool:
    """Whether it has affinity, anti-affinity or spread terms."""
    return bool(shape.anti_affinity or shape.placement.get("affinity") or shape.placement.get("topologySpread"))


def granted_to_other_scope(grant: Json) -> bool:
    return not grant["spec"].get("issuer") and str(grant["spec"]["holder"]).startswith(SCOPE_PREFIX)
