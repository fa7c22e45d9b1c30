"""What do the rows add up to? Every sum from the rows alone, slowly and plainly; sums.py keeps them commit by commit."""

from __future__ import annotations

from collections.abc import Mapping

from remit.simulate.checkers.rows import (
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
"""By ledger (or node, or tenant) and resource."""


def needs(rows: Rows, replica: Json) -> tuple[Counted, Counted]:
    """In full: on the node (devices as @name), and as a charge on each grant."""
    key = generation_key(replica)
    shape = Shape(key, rows[key][1])
    on_node = {**shape.resources, **{f"@{name}": share for name, share in replica["status"].get("devices", {}).items()}}
    return on_node, shape.charge


def victims_left(rows: Rows, replica: Json) -> list[Json]:
    """Victims of a reservation that still hold their room, in the copy that was preempted: not another of that name."""
    if phase_of(replica) != "reserved":
        return []
    left = []
    for victim, copy in replica["status"].get("victims", {}).items():
        if victim in rows and holds(rows[victim][1]) and copy_of(rows[victim][1]) == copy:
            left.append(rows[victim][1])
    return left


def lessened(rows: Rows, replica: Json) -> tuple[Counted, dict[str, Counted]]:
    """What a replica posts on its node and on each ledger: a reservation less what its victims still hold."""
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
    """What a grant that was issued here takes from the ledgers above it."""
    spec = grant["spec"]
    if spec.get("issuer"):
        return []
    left = outstanding(grant)
    found = [(spec["parent"], left)] if spec.get("parent") else []
    if grant.get("status", {}).get("phase") != "closed" or left:
        found += [(f"tenant/{tenant}/emergency", amount(share)) for tenant, share in spec.get("shares", {}).items()]
    return found


def sums(rows: Rows) -> tuple[Totals, Totals, Totals]:
    """What is taken on each node, drawn on each ledger, and granted on from each ledger."""
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
    """What each tenant uses, whatever it is charged to."""
    tenants: Totals = {}
    for _, replica in of_kind(rows, "replica"):
        if holds(replica):
            _, charges = lessened(rows, replica)
            _post(tenants, replica["metadata"]["tenant"], next(iter(charges.values()), {}))
    return tenants


def device_owners(rows: Rows) -> dict[tuple[str, str], dict[str, int]]:
    """A reservation that waits for victims names devices that they still own; it is no owner yet."""
    owners: dict[tuple[str, str], dict[str, int]] = {}
    for key, replica in of_kind(rows, "replica"):
        if holds(replica) and not victims_left(rows, replica):
            for device, share in replica["status"].get("devices", {}).items():
                owners.setdefault((replica["status"]["node"], device), {})[key] = share
    return owners


def spots(rows: Rows) -> dict[tuple[str, str], int]:
    """How many of each generation hold room on each node."""
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
    """The ledgers that a tenant's or a grant's row makes, and how much each has."""
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
