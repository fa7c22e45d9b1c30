"""Sums per node, grant and tenant, incremental and from scratch.

The functions add everything up from the rows, slowly and plainly. `Sums` updates the same sums incrementally, commit by
commit. From time to time both are compared (`compare`): a difference is a bug of this module, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from remit.simulate.checkers.reference.lifecycle import HOLDING
from remit.simulate.checkers.reference.rows import (
    WHOLE,
    Counted,
    Json,
    Rows,
    Shape,
    amount,
    copy_of,
    generation_key,
    holds,
    of_kind,
    outstanding,
    phase_of,
)

Totals = dict[tuple[str, str], int]
"""Totals by ledger (or node, or tenant) and resource."""


def needs(rows: Rows, replica: Json) -> tuple[Counted, Counted]:
    """Return the full amounts of a replica: on its node (devices as @name), and as a charge on each grant."""
    key = generation_key(replica)
    shape = Shape(key, rows[key][1])
    on_node = {**shape.resources, **{f"@{name}": share for name, share in replica["status"].get("devices", {}).items()}}
    return on_node, shape.charge


def victims_left(rows: Rows, replica: Json) -> list[Json]:
    """Return the victims of a reservation that still hold their capacity, in the attempt that was preempted."""
    if phase_of(replica) != "reserved":
        return []
    left = []
    for victim, copy in replica["status"].get("victims", {}).items():
        if victim in rows and holds(rows[victim][1]) and copy_of(rows[victim][1]) == copy:
            left.append(rows[victim][1])
    return left


def lessened(rows: Rows, replica: Json) -> tuple[Counted, dict[str, Counted]]:
    """Return what a replica posts on its node and on each ledger: for a reservation, less what its victims still hold."""
    on_node, charge = needs(rows, replica)
    charges = {ledger: dict(charge) for ledger in replica["status"].get("grants", ())}
    for victim in victims_left(rows, replica):
        theirs, their_charge = needs(rows, victim)
        on_node = {name: max(0, n - theirs.get(name, 0)) for name, n in on_node.items()}
        for ledger in victim["status"].get("grants", ()):
            if ledger in charges:
                charges[ledger] = {name: max(0, n - their_charge.get(name, 0)) for name, n in charges[ledger].items()}
    return on_node, charges


def burdens(grant: Json) -> list[tuple[str, Counted]]:
    """Return what a grant issued here takes from its parent ledgers."""
    spec = grant["spec"]
    if spec.get("issuer"):
        return []
    left = outstanding(grant)
    found = [(spec["parent"], left)] if spec.get("parent") else []
    if grant.get("status", {}).get("phase") != "closed" or left:
        found += [(f"tenant/{tenant}/emergency", amount(share)) for tenant, share in spec.get("shares", {}).items()]
    return found


def sums(rows: Rows) -> tuple[Totals, Totals, Totals]:
    """Return what is taken on each node, charged to each ledger, and granted on from each ledger."""
    nodes: Totals = {}
    used: Totals = {}
    lent: Totals = {}
    for _, replica in of_kind(rows, "replica"):
        if holds(replica):
            on_node, charges = lessened(rows, replica)
            _post(nodes, replica["status"]["node"], on_node)
            for ledger, one in charges.items():
                _post(used, ledger, one)
    for _, grant in of_kind(rows, "grant"):
        for ledger, one in burdens(grant):
            _post(lent, ledger, one)
    return nodes, used, lent


def uses(rows: Rows) -> Totals:
    """Return what each tenant uses, whichever ledger it is charged to."""
    tenants: Totals = {}
    for _, replica in of_kind(rows, "replica"):
        if holds(replica):
            _, charges = lessened(rows, replica)
            _post(tenants, replica["metadata"]["tenant"], next(iter(charges.values()), {}))
    return tenants


def device_owners(rows: Rows) -> dict[tuple[str, str], dict[str, int]]:
    """Return the owners of each device. A reservation that waits for victims names their devices, but does not own them yet."""
    owners: dict[tuple[str, str], dict[str, int]] = {}
    for key, replica in of_kind(rows, "replica"):
        if holds(replica) and not victims_left(rows, replica):
            for device, share in replica["status"].get("devices", {}).items():
                owners.setdefault((replica["status"]["node"], device), {})[key] = share
    return owners


def spots(rows: Rows) -> dict[tuple[str, str], int]:
    """Return how many replicas of each generation hold capacity on each node."""
    found: dict[tuple[str, str], int] = {}
    for _, replica in of_kind(rows, "replica"):
        if holds(replica):
            where = generation_key(replica), str(replica["status"]["node"])
            found[where] = found.get(where, 0) + 1
    return found


def _post(into: Totals, ledger: str, counted: Mapping[str, int]) -> None:
    for name, n in counted.items():
        if n:
            into[ledger, name] = into.get((ledger, name), 0) + n


def capacity_of(node: Json) -> Counted:
    return {**amount(node["spec"]["capacity"]), **{f"@{d['name']}": WHOLE for d in node["spec"].get("devices", ())}}


def limits_of(key: str, content: Json) -> dict[str, Counted]:
    """Return the ledgers that a tenant's or grant's row creates, with their amounts."""
    spec = content["spec"]
    if key.startswith("tenant/"):
        return {key: amount(spec["quota"]), f"{key}/emergency": amount(spec.get("emergencyQuota"))}
    name = key.removeprefix("grant/")
    own = amount(spec["amount"]) if spec.get("issuer") else outstanding(content)
    return {name: own, **{f"{name}/{tenant}": amount(share) for tenant, share in spec.get("shares", {}).items()}}


def node_limits(rows: Rows) -> dict[str, Counted]:
    return {key.removeprefix("node/"): capacity_of(node) for key, node in of_kind(rows, "node")}


def ledger_limits(rows: Rows) -> dict[str, Counted]:
    found: dict[str, Counted] = {}
    for kind in ("tenant", "grant"):
        for key, content in of_kind(rows, kind):
            found.update(limits_of(key, content))
    return found


class Posting(NamedTuple):
    """What one replica takes."""

    node: str
    devices: Json
    grants: Json
    shape: Shape
    on_node: Counted
    charges: tuple[tuple[str, Counted], ...]
    owns: bool


class Miscounted(Exception):
    """The incremental sums differ from those of the rows: a bug of the checker."""


class Sums:
    """Sums by node, ledger and tenant; and the values before the commit of all sums that the commit touched."""

    def __init__(self, shape: Callable[[Json], Shape | None]) -> None:
        self.shape = shape
        self.nodes: Totals = {}
        self.used: Totals = {}
        self.lent: Totals = {}
        self.tenants: Totals = {}
        self.owners: dict[tuple[str, str], dict[str, int]] = {}
        self.spots: dict[str, dict[str, dict[str, int]]] = {}
        """Number of replicas that hold capacity, by tenant, generation and node."""
        self.postings: dict[str, Posting] = {}
        self.burdens: dict[str, list[tuple[str, Counted]]] = {}
        self.patrons: dict[str, set[str]] = {}
        """Reservations, by the victims they name."""
        self.begin()

    def begin(self) -> None:
        """Start a new commit: nothing is touched yet."""
        self.nodes_before: Totals = {}
        self.ledgers_before: Totals = {}
        self.tenants_before: Totals = {}
        self.devices_touched: dict[tuple[str, str], None] = {}
        self.homeless: list[str] = []
        """Replicas that hold capacity but have no generation, so that nothing can be posted for them."""

    def taken(self, ledger: str, name: str) -> int:
        """Return the charged plus the granted-on amount."""
        return self.used.get((ledger, name), 0) + self.lent.get((ledger, name), 0)

    def repost(self, rows: Rows, keys: dict[str, None]) -> None:
        """Post changed replicas again, and with them the reservations that name them as victims."""
        for key in list(keys):
            if key in self.patrons:
                keys.update(dict.fromkeys(sorted(self.patrons[key])))
        for key in keys:
            found = rows.get(key)
            replica = None if found is None else found[1]
            old = self.postings.get(key)
            if old is not None and replica is not None and self._same(old, replica):
                continue
            new = self._posting(rows, key, replica) if holds(replica) else None
            if old == new:
                continue
            if old is not None:
                self._post(key, old, -1)
                del self.postings[key]
            if new is not None:
                self._post(key, new, 1)
                self.postings[key] = new

    def reburden(self, key: str, grant: Json) -> None:
        """Post a changed grant again; None if it was removed."""
        for ledger, counted in self.burdens.pop(key, ()):
            self._lend(ledger, counted, -1)
        found = [] if grant is None else burdens(grant)
        if found:
            self.burdens[key] = found
        for ledger, counted in found:
            self._lend(ledger, counted, 1)

    def name_victims(self, key: str, old: Json, new: Json) -> None:
        """Update which reservations wait for which victims."""
        for replica, joins in ((old, False), (new, True)):
            if phase_of(replica) != "reserved":
                continue
            for victim in replica["status"].get("victims", {}):
                if joins:
                    self.patrons.setdefault(victim, set()).add(key)
                elif victim in self.patrons:
                    self.patrons[victim].discard(key)
                    if not self.patrons[victim]:
                        del self.patrons[victim]

    def _same(self, old: Posting, replica: Json) -> bool:
        """Whether the hold is unchanged, which is true for most transitions. A reservation's hold depends on its victims."""
        status = replica.get("status", {})
        phase = status.get("phase", "pending")
        return (
            phase in HOLDING
            and old.owns
            and status.get("node") == old.node
            and status.get("devices") == old.devices
            and status.get("grants") == old.grants
            and self.shape(replica) is old.shape
            and not status.get("victims")
        )

    def _posting(self, rows: Rows, key: str, replica: Json) -> Posting | None:
        shape = self.shape(replica)
        status = replica["status"]
        if shape is None:
            self.homeless.append(key)
            return None
        devices, grants, node = status.get("devices"), status.get("grants"), status.get("node", "")
        if status.get("victims"):
            left = victims_left(rows, replica)
            on_node, charges = lessened(rows, replica)
            return Posting(node, devices, grants, shape, on_node, tuple(charges.items()), not left)
        on_node = {**shape.resources, **{f"@{name}": n for name, n in devices.items()}} if devices else shape.resources
        return Posting(node, devices, grants, shape, on_node, tuple((ledger, shape.charge) for ledger in grants or ()), True)

    def _post(self, key: str, posting: Posting, sign: int) -> None:
        node, shape = posting.node, posting.shape
        for name, n in posting.on_node.items():
            _add(self.nodes, self.nodes_before, (node, name), sign * n)
        for ledger, charge in posting.charges:
            for name, n in charge.items():
                where = ledger, name
                self.ledgers_before.setdefault(where, self.taken(ledger, name))
                _add(self.used, {}, where, sign * n)
        for name, n in posting.charges[0][1].items() if posting.charges else ():
            _add(self.tenants, self.tenants_before, (shape.tenant, name), sign * n)
        if posting.owns:
            for device, share in (posting.devices or {}).items():
                self._own(key, (node, device), share if sign > 0 else 0)
        there = self.spots.setdefault(shape.tenant, {}).setdefault(shape.key, {})
        there[node] = there.get(node, 0) + sign
        if not there[node]:
            del there[node]
            if not there:
                del self.spots[shape.tenant][shape.key]

    def _own(self, key: str, device: tuple[str, str], share: int) -> None:
        self.devices_touched[device] = None
        owners = self.owners.setdefault(device, {})
        if share:
            owners[key] = share
        else:
            owners.pop(key, None)
            if not owners:
                del self.owners[device]

    def _lend(self, ledger: str, counted: Counted, sign: int) -> None:
        for name, n in counted.items():
            self.ledgers_before.setdefault((ledger, name), self.taken(ledger, name))
            _add(self.lent, {}, (ledger, name), sign * n)

    def compare(self, rows: Rows) -> None:
        """Raise `Miscounted` if an incremental sum differs from the sum over the rows."""
        nodes, used, lent = sums(rows)
        placed = {(g, node): n for gens in self.spots.values() for g, there in gens.items() for node, n in there.items()}
        both = {
            "nodes": (self.nodes, nodes),
            "used": (self.used, used),
            "lent": (self.lent, lent),
            "tenants": (self.tenants, uses(rows)),
            "owners": (self.owners, device_owners(rows)),
            "spots": (placed, spots(rows)),
        }
        for what, (kept, counted) in both.items():
            if kept != counted:
                raise Miscounted(f"{what}: incremental {kept}, from scratch {counted}")


def _add(into: Totals, before: Totals, where: tuple[str, str], n: int) -> None:
    if not n:
        return
    old = into.get(where, 0)
    before.setdefault(where, old)
    if old + n:
        into[where] = old + n
    else:
        into.pop(where, None)
