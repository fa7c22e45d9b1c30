"""Sums per node, grant and tenant, incremental and from scratch.

The functions add everything up from the rows, slowly and plainly. `LedgerSums` updates the same sums incrementally, commit by
commit. From time to time both are compared (`compare`): a difference is a bug of this module, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from remit.simulate.checkers.reference.lifecycle import HOLDING
from remit.simulate.checkers.reference.rows import (
    WHOLE_DEVICE,
    Amounts,
    Json,
    ReferenceShape,
    Rows,
    amount,
    attempt_id,
    generation_key,
    holds_capacity,
    of_kind,
    outstanding,
    phase_of,
)

Totals = dict[tuple[str, str], int]
"""Totals by ledger (or node, or tenant) and resource."""


def full_amounts(rows: Rows, replica: Json) -> tuple[Amounts, Amounts]:
    """Return the full amounts of a replica: on its node (devices as @name), and as a charge on each grant."""
    key = generation_key(replica)
    shape = ReferenceShape(key, rows[key][1])
    on_node = {**shape.resources, **{f"@{name}": share for name, share in replica["status"].get("devices", {}).items()}}
    return on_node, shape.charge


def remaining_victims(rows: Rows, replica: Json) -> list[Json]:
    """Return the victims of a reservation that still hold their capacity, in the attempt that was preempted."""
    if phase_of(replica) != "reserved":
        return []
    remaining = []
    for victim, attempt in replica["status"].get("victims", {}).items():
        if victim in rows and holds_capacity(rows[victim][1]) and attempt_id(rows[victim][1]) == attempt:
            remaining.append(rows[victim][1])
    return remaining


def posted_amounts(rows: Rows, replica: Json) -> tuple[Amounts, dict[str, Amounts]]:
    """Return what a replica posts on its node and on each ledger: for a reservation, less what its victims still hold."""
    on_node, charge = full_amounts(rows, replica)
    charges = {ledger: dict(charge) for ledger in replica["status"].get("grants", ())}
    for victim in remaining_victims(rows, replica):
        victim_amounts, victim_charge = full_amounts(rows, victim)
        on_node = {name: max(0, n - victim_amounts.get(name, 0)) for name, n in on_node.items()}
        for ledger in victim["status"].get("grants", ()):
            if ledger in charges:
                charges[ledger] = {name: max(0, n - victim_charge.get(name, 0)) for name, n in charges[ledger].items()}
    return on_node, charges


def parent_charges(grant: Json) -> list[tuple[str, Amounts]]:
    """Return what a grant issued here takes from its parent ledgers."""
    spec = grant["spec"]
    if spec.get("issuer"):
        return []
    amounts = outstanding(grant)
    charges = [(spec["parent"], amounts)] if spec.get("parent") else []
    if grant.get("status", {}).get("phase") != "closed" or amounts:
        charges += [(f"tenant/{tenant}/emergency", amount(share)) for tenant, share in spec.get("shares", {}).items()]
    return charges


def total_sums(rows: Rows) -> tuple[Totals, Totals, Totals]:
    """Return what is taken on each node, charged to each ledger, and granted on from each ledger."""
    nodes: Totals = {}
    used: Totals = {}
    granted_on: Totals = {}
    for _, replica in of_kind(rows, "replica"):
        if holds_capacity(replica):
            on_node, charges = posted_amounts(rows, replica)
            _post(nodes, replica["status"]["node"], on_node)
            for ledger, amounts in charges.items():
                _post(used, ledger, amounts)
    for _, grant in of_kind(rows, "grant"):
        for ledger, amounts in parent_charges(grant):
            _post(granted_on, ledger, amounts)
    return nodes, used, granted_on


def tenant_usage(rows: Rows) -> Totals:
    """Return what each tenant uses, whichever ledger it is charged to."""
    tenants: Totals = {}
    for _, replica in of_kind(rows, "replica"):
        if holds_capacity(replica):
            _, charges = posted_amounts(rows, replica)
            _post(tenants, replica["metadata"]["tenant"], next(iter(charges.values()), {}))
    return tenants


def device_owners(rows: Rows) -> dict[tuple[str, str], dict[str, int]]:
    """Return the owners of each device. A reservation that waits for victims names their devices, but does not own them yet."""
    owners: dict[tuple[str, str], dict[str, int]] = {}
    for key, replica in of_kind(rows, "replica"):
        if holds_capacity(replica) and not remaining_victims(rows, replica):
            for device, share in replica["status"].get("devices", {}).items():
                owners.setdefault((replica["status"]["node"], device), {})[key] = share
    return owners


def count_positions(rows: Rows) -> dict[tuple[str, str], int]:
    """Return how many replicas of each generation hold capacity on each node."""
    counts: dict[tuple[str, str], int] = {}
    for _, replica in of_kind(rows, "replica"):
        if holds_capacity(replica):
            position = generation_key(replica), str(replica["status"]["node"])
            counts[position] = counts.get(position, 0) + 1
    return counts


def _post(totals: Totals, ledger: str, amounts: Mapping[str, int]) -> None:
    for name, n in amounts.items():
        if n:
            totals[ledger, name] = totals.get((ledger, name), 0) + n


def capacity_of(node: Json) -> Amounts:
    return {**amount(node["spec"]["capacity"]), **{f"@{d['name']}": WHOLE_DEVICE for d in node["spec"].get("devices", ())}}


def limits_of(key: str, content: Json) -> dict[str, Amounts]:
    """Return the ledgers that a tenant's or grant's row creates, with their amounts."""
    spec = content["spec"]
    if key.startswith("tenant/"):
        return {key: amount(spec["quota"]), f"{key}/emergency": amount(spec.get("emergencyQuota"))}
    name = key.removeprefix("grant/")
    own = amount(spec["amount"]) if spec.get("issuer") else outstanding(content)
    return {name: own, **{f"{name}/{tenant}": amount(share) for tenant, share in spec.get("shares", {}).items()}}


def node_limits(rows: Rows) -> dict[str, Amounts]:
    return {key.removeprefix("node/"): capacity_of(node) for key, node in of_kind(rows, "node")}


def ledger_limits(rows: Rows) -> dict[str, Amounts]:
    limits: dict[str, Amounts] = {}
    for kind in ("tenant", "grant"):
        for key, content in of_kind(rows, kind):
            limits.update(limits_of(key, content))
    return limits


class ReplicaPosting(NamedTuple):
    """The amounts that one replica takes."""

    node: str
    devices: Json
    grants: Json
    shape: ReferenceShape
    on_node: Amounts
    charges: tuple[tuple[str, Amounts], ...]
    owns: bool


class SumMismatch(Exception):
    """The incremental sums differ from those of the rows: a bug of the checker."""


class LedgerSums:
    """Sums by node, ledger and tenant; and the values before the commit of all sums that the commit touched."""

    def __init__(self, shape: Callable[[Json], ReferenceShape | None]) -> None:
        self.shape = shape
        self.nodes: Totals = {}
        self.used: Totals = {}
        self.granted_on: Totals = {}
        self.tenants: Totals = {}
        self.owners: dict[tuple[str, str], dict[str, int]] = {}
        self.positions: dict[str, dict[str, dict[str, int]]] = {}
        """Number of replicas that hold capacity, by tenant, generation and node."""
        self.postings: dict[str, ReplicaPosting] = {}
        self.parent_charges: dict[str, list[tuple[str, Amounts]]] = {}
        self.reservations_by_victim: dict[str, set[str]] = {}
        """Reservations, by the victims they name."""
        self.begin_commit()

    def begin_commit(self) -> None:
        """Start a new commit: nothing is touched yet."""
        self.nodes_before: Totals = {}
        self.ledgers_before: Totals = {}
        self.tenants_before: Totals = {}
        self.devices_touched: dict[tuple[str, str], None] = {}
        self.without_generation: list[str] = []
        """Replicas that hold capacity but have no generation, so that nothing can be posted for them."""

    def taken(self, ledger: str, name: str) -> int:
        """Return the charged plus the granted-on amount."""
        return self.used.get((ledger, name), 0) + self.granted_on.get((ledger, name), 0)

    def repost(self, rows: Rows, keys: dict[str, None]) -> None:
        """Post changed replicas again, and with them the reservations that name them as victims."""
        for key in list(keys):
            if key in self.reservations_by_victim:
                keys.update(dict.fromkeys(sorted(self.reservations_by_victim[key])))
        for key in keys:
            entry = rows.get(key)
            replica = None if entry is None else entry[1]
            old = self.postings.get(key)
            if old is not None and replica is not None and self._is_same_hold(old, replica):
                continue
            new = self._posting(rows, key, replica) if holds_capacity(replica) else None
            if old == new:
                continue
            if old is not None:
                self._post(key, old, -1)
                del self.postings[key]
            if new is not None:
                self._post(key, new, 1)
                self.postings[key] = new

    def repost_grant(self, key: str, grant: Json) -> None:
        """Post a changed grant again; None if it was removed."""
        for ledger, counted in self.parent_charges.pop(key, ()):
            self._post_grant(ledger, counted, -1)
        charges = [] if grant is None else parent_charges(grant)
        if charges:
            self.parent_charges[key] = charges
        for ledger, counted in charges:
            self._post_grant(ledger, counted, 1)

    def index_victims(self, key: str, old: Json, new: Json) -> None:
        """Update which reservations wait for which victims."""
        for replica, joins in ((old, False), (new, True)):
            if phase_of(replica) != "reserved":
                continue
            for victim in replica["status"].get("victims", {}):
                if joins:
                    self.reservations_by_victim.setdefault(victim, set()).add(key)
                elif victim in self.reservations_by_victim:
                    self.reservations_by_victim[victim].discard(key)
                    if not self.reservations_by_victim[victim]:
                        del self.reservations_by_victim[victim]

    def _is_same_hold(self, old: ReplicaPosting, replica: Json) -> bool:
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

    def _posting(self, rows: Rows, key: str, replica: Json) -> ReplicaPosting | None:
        shape = self.shape(replica)
        status = replica["status"]
        if shape is None:
            self.without_generation.append(key)
            return None
        devices, grants, node = status.get("devices"), status.get("grants"), status.get("node", "")
        if status.get("victims"):
            remaining = remaining_victims(rows, replica)
            on_node, charges = posted_amounts(rows, replica)
            return ReplicaPosting(node, devices, grants, shape, on_node, tuple(charges.items()), not remaining)
        on_node = {**shape.resources, **{f"@{name}": n for name, n in devices.items()}} if devices else shape.resources
        return ReplicaPosting(
            node, devices, grants, shape, on_node, tuple((ledger, shape.charge) for ledger in grants or ()), True
        )

    def _post(self, key: str, posting: ReplicaPosting, sign: int) -> None:
        node, shape = posting.node, posting.shape
        for name, n in posting.on_node.items():
            _add(self.nodes, self.nodes_before, (node, name), sign * n)
        for ledger, charge in posting.charges:
            for name, n in charge.items():
                position = ledger, name
                self.ledgers_before.setdefault(position, self.taken(ledger, name))
                _add(self.used, {}, position, sign * n)
        for name, n in posting.charges[0][1].items() if posting.charges else ():
            _add(self.tenants, self.tenants_before, (shape.tenant, name), sign * n)
        if posting.owns:
            for device, share in (posting.devices or {}).items():
                self._set_owner(key, (node, device), share if sign > 0 else 0)
        counts = self.positions.setdefault(shape.tenant, {}).setdefault(shape.key, {})
        counts[node] = counts.get(node, 0) + sign
        if not counts[node]:
            del counts[node]
            if not counts:
                del self.positions[shape.tenant][shape.key]

    def _set_owner(self, key: str, device: tuple[str, str], share: int) -> None:
        self.devices_touched[device] = None
        owners = self.owners.setdefault(device, {})
        if share:
            owners[key] = share
        else:
            owners.pop(key, None)
            if not owners:
                del self.owners[device]

    def _post_grant(self, ledger: str, counted: Amounts, sign: int) -> None:
        for name, n in counted.items():
            self.ledgers_before.setdefault((ledger, name), self.taken(ledger, name))
            _add(self.granted_on, {}, (ledger, name), sign * n)

    def compare(self, rows: Rows) -> None:
        """Raise `SumMismatch` if an incremental sum differs from the sum over the rows."""
        nodes, used, granted_on = total_sums(rows)
        placed = {(g, node): n for gens in self.positions.values() for g, counts in gens.items() for node, n in counts.items()}
        pairs = {
            "nodes": (self.nodes, nodes),
            "used": (self.used, used),
            "lent": (self.granted_on, granted_on),
            "tenants": (self.tenants, tenant_usage(rows)),
            "owners": (self.owners, device_owners(rows)),
            "spots": (placed, count_positions(rows)),
        }
        for name, (incremental, expected) in pairs.items():
            if incremental != expected:
                raise SumMismatch(f"{name}: incremental {incremental}, from scratch {expected}")


def _add(totals: Totals, before: Totals, key: tuple[str, str], n: int) -> None:
    if not n:
        return
    old = totals.get(key, 0)
    before.setdefault(key, old)
    if old + n:
        totals[key] = old + n
    else:
        totals.pop(key, None)
