"""Whether pending work could be placed now; overrides in force.

Used by the liveness checks. It reads rows and sums, and neither places nor ranks anything.

A component may see an override end a little early. An override therefore counts as possibly in force while its row exists
and its deadline is later than the lowest value that the clock it refers to can show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Final

from remit.simulate.checkers.capacity_checks import grant_is_dead
from remit.simulate.checkers.reference.history import History
from remit.simulate.checkers.reference.past_states import Timed
from remit.simulate.checkers.reference.placement import Site, barred, towards_others
from remit.simulate.checkers.reference.rows import SCOPE, WHOLE, Counted, Json, Shape, health_of, is_open, owner_of

CLOCKS_DRIFT: Final = 0.01
"""How much slower a clock may have run since it was last read."""

Specs = Sequence[Json]


def shown_at(history: History, boot: str, revision: int, at_ms: int | None = None) -> int | None:
    """Return the lowest value that the clock of this boot can show at a revision, or at a later time; None if it was not read
    by then.
    """
    past = history.past
    last, known = _last(past.stands, revision), past.of_boot.get(boot, ())
    read = _last(known, revision)
    if read < 0:
        return None
    _, read_ms, stand = known[read]
    at_ms = past.stands[last][1] if at_ms is None else at_ms
    return stand.applied_ms + int((at_ms - read_ms) * (1 - CLOCKS_DRIFT))


def _last(stands: Sequence[Timed], revision: int) -> int:
    """Return the index of the last commit up to this revision; usually that is the very last one."""
    if stands and stands[-1][0] <= revision:
        return len(stands) - 1
    return bisect_right(stands, revision, key=lambda one: one[0]) - 1


def in_force(history: History, now_ms: int) -> Specs:
    found = []
    for row in history.kind("override").values():
        deadline = row.get("status", {}).get("deadline")
        shown = None if deadline is None else shown_at(history, deadline["boot"], history.revision, now_ms)
        if shown is not None and shown < deadline["atMs"]:
            found.append(row["spec"])
    return found


def paused(specs: Specs, shape: Shape) -> bool:
    return any(spec["effect"] == "pause-expansion" and _speaks_of(spec, shape) for spec in specs)


def kept_off(specs: Specs, shape: Shape, site: Site) -> bool:
    """Whether this node is avoided, or such work is pinned elsewhere."""
    return any(
        (spec["effect"] == "avoid" and _override_covers(spec, site))
        or (spec["effect"] == "pin" and _speaks_of(spec, shape) and not _override_covers(spec, site))
        for spec in specs
    )


def _speaks_of(spec: Json, shape: Shape) -> bool:
    scope = spec["scope"]
    return shape.tenant in scope.get("tenants", ()) or f"{shape.tenant}/{shape.workload}" in scope.get("workloads", ())


def _override_covers(spec: Json, site: Site) -> bool:
    scope = spec["scope"]
    return site.name in scope.get("nodes", ()) or any(value in scope.get(f"{name}s", ()) for name, value in site.places.items())


def held_back(history: History, replica: Json, now_ms: int) -> str:
    """Return why such a replica may not be placed in this scope now, wherever there is capacity; empty if it may."""
    shape = history.shape(replica)
    owner = history.row(owner_of(replica))
    if shape is None or owner is None or owner["metadata"].get("deleting"):
        return "its workload is gone or being deleted"
    if paused(in_force(history, now_ms), shape):
        return "an override pauses it"
    if shape.fenced and history.unheard:
        return "nodes have not reported since a restore"
    if any(peer["spec"].get("standing") == "awaited" for peer in history.kind("peer").values()):
        return "peer scopes have not confirmed their holdings since a restore"
    boot, on_boot = clock(history, now_ms)
    deadline = (history.policy or {}).get("deadline")
    if deadline and (deadline["boot"] != boot or on_boot >= deadline["atMs"]):
        return "the policy's lease has expired"
    return "" if purse(history, shape, now_ms) else "no quota or grant covers it"


def clock(history: History, now_ms: int) -> tuple[str, int]:
    """Return boot and time of the leading authority's clock, extrapolated from its last commit."""
    if history.latest is None:
        return "", now_ms
    at_ms, stand = history.latest
    return stand.boot, stand.applied_ms + now_ms - at_ms


def purse(history: History, shape: Shape, now_ms: int, count: int = 1) -> str:
    """Return a ledger that covers this many replicas: the tenant's own quota, or a slice of it that this scope holds; else
    empty.

    Other grants and budgets are reserved for their holders, so the check cannot demand that this replica may use them.
    """
    home = f"tenant/{shape.tenant}"
    if home in history.limits:
        return home if _covers(history, home, shape, count) else ""
    boot, on_boot = clock(history, now_ms)
    for key, grant in history.kind("grant").items():
        spec, name = grant["spec"], key.removeprefix("grant/")
        if (spec.get("issuer") and spec.get("tenant") == shape.tenant and spec.get("purpose", "quota") == "quota"
                and not grant_is_dead(history, key, grant, boot, on_boot, fresh=False)
                and _covers(history, name, shape, count)):  # fmt: skip
            return name
    return ""


def _covers(history: History, ledger: str, shape: Shape, count: int) -> bool:
    limit = history.limits[ledger]
    return all(history.sums.taken(ledger, name) + n * count <= limit.get(name, 0) for name, n in shape.charge.items())


def fits_on(history: History, shape: Shape, nodes: Collection[str], now_ms: int) -> str:
    """Return a node among these that would accept one replica now; empty if there is none."""
    for name in sorted(nodes):
        if not _takes(history, shape, name, now_ms):
            continue
        site, row = history.sites[name], history.row(f"node/{name}")
        if room_for(shape, row, history.left(name)) and not towards_others(history, shape, site, counted=False):
            return name
    return ""


def _takes(history: History, shape: Shape, node: str, now_ms: int) -> bool:
    """Whether the node is ready and open, and nothing but capacity and peers can rule it out."""
    site, row = history.sites.get(node), history.row(f"node/{node}")
    if site is None or row is None or health_of(row) != "ready" or not is_open(row) or barred(shape, site, history.policy):
        return False
    return not kept_off(in_force(history, now_ms), shape, site)


def room_for(shape: Shape, node: Json, free: Counted, *, take: bool = False) -> bool:
    """Whether there is enough capacity, and devices of the requested kinds and models. With `take`, they are subtracted from
    `free`.
    """
    if any(free.get(name, 0) < n for name, n in shape.resources.items()):
        return False
    taken = dict(shape.resources)
    for ask in shape.asks:
        whole, share = ask.get("count", 0), shape.charge[f"devices/{ask['kind']}"]
        for device in node["spec"].get("devices", ()):
            name, models = f"@{device['name']}", ask.get("models")
            if device["kind"] != ask["kind"] or (models and device.get("model", "") not in models):
                continue
            want = share if ask.get("share") else WHOLE
            if name not in taken and free.get(name, 0) >= want and (whole or ask.get("share")):
                taken[name] = want
                whole -= 1
                if whole <= 0:
                    break
        else:
            if whole > 0 or ask.get("share"):
                return False
    if take:
        for name, n in taken.items():
            free[name] = free.get(name, 0) - n
    return True


def all_fit(history: History, shapes: Sequence[Shape], nodes: Collection[str], now_ms: int) -> bool:
    """Whether all of these find capacity and quota at once, the largest first. If not, they may compete with each other."""
    counts: dict[str, tuple[Shape, int]] = {}
    for shape in shapes:
        counts[shape.key] = shape, counts.get(shape.key, (shape, 0))[1] + 1
    tenants = [shape.tenant for shape, _ in counts.values()]
    if any(not purse(history, shape, now_ms, count * tenants.count(shape.tenant)) for shape, count in counts.values()):
        return False
    free = {name: history.left(name) for name in sorted(nodes) if name in history.capacity}
    largest = sorted(shapes, key=lambda shape: sorted(shape.resources.items()), reverse=True)
    specs = in_force(history, now_ms)

    def takes(shape: Shape, name: str) -> bool:
        site = history.sites[name]
        return not barred(shape, site, history.policy) and not kept_off(specs, shape, site)

    return all(
        any(
            takes(shape, name) and room_for(shape, history.row(f"node/{name}"), there, take=True)
            for name, there in free.items()
        )
        for shape in largest
    )


def gang_fits(history: History, shape: Shape, members: int, nodes: Collection[str], now_ms: int) -> bool:
    """Whether this many members of a gang find capacity at once. Only for gangs without terms towards other replicas."""
    if not purse(history, shape, now_ms, members):
        return False
    for name in sorted(nodes):
        if not _takes(history, shape, name, now_ms):
            continue
        free = history.left(name)
        while members and room_for(shape, history.row(f"node/{name}"), free, take=True):
            members -= 1
    return not members


def keeps_to_itself(history: History, shape: Shape) -> bool:
    """Whether it has no terms towards other replicas, and others have none towards it."""
    shy = any(other.anti for other in history.shapes.values() if other.tenant == shape.tenant)
    return not has_terms(shape) and not shy


def has_terms(shape: Shape) -> bool:
    """Whether it has affinity, anti-affinity or spread terms."""
    return bool(shape.anti or shape.where.get("affinity") or shape.where.get("topologySpread"))


def lent_abroad(grant: Json) -> bool:
    return not grant["spec"].get("issuer") and str(grant["spec"]["holder"]).startswith(SCOPE)
