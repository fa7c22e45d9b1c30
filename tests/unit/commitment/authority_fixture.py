"""Helpers for tests of the authority: common claims in short form."""

from __future__ import annotations

from typing import Any

from remit.model.claims import Accept, AcceptIncarnation, Apply, Bind, ConfirmHoldings, Credit, Mark, Move, Spawn
from remit.model.kinds import NodeHealth
from remit.model.records import GrantSpec
from remit.model.resources import Amount, Duration
from remit.simulate.checkers.reference.ledger_sums import node_limits, total_sums
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, amounts, workload

T1 = "tenant/t1"

OWNERS = {
    "unreserve": "scheduler", "preempt": "scheduler", "cancel": "workloads", "remove": "workloads", "requeue": "repair",
    "release": "repair", "reclaim": "repair", "abort": "repair", "doubt": "node-lifecycle", "lose": "node-lifecycle",
    "serve": "endpoints", "settle": "workloads",
}  # fmt: skip


async def spawn_replicas(scope: Scope, name: str, count: int = 1, **shape: Any) -> list[str]:
    """Declare a workload and spawn that many pending replicas; return their keys."""
    shape.setdefault("replicas", count)
    await scope.must(USER, Apply(workload(name, **shape)))
    await scope.must(scope.actors["workloads"], Spawn("t1", name, 1, 0, count))
    return [f"replica/t1/{name}-{i}" for i in range(count)]


async def bind(scope: Scope, key: str, node: str = "n1", grant: str = T1, devices: dict[str, int] | None = None) -> None:
    await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), node, grant, devices or {}))


async def commit_transitions(scope: Scope, key: str, *transitions: str) -> None:
    """Commit transitions of a replica, each as its owner and with its required fields."""
    for transition in transitions:
        actor, claim = transition_claim(scope, key, transition)
        await scope.must(actor, claim)


def transition_claim(scope: Scope, key: str, transition: str) -> tuple[Any, Move]:
    status = scope.row(key).get("status", {})
    result = "r" if transition in ("finish", "crash", "stopped", "lose") else ""
    lease = OWNERS.get(transition) or f"agent/{status.get('node')}"
    return scope.actors[lease], Move(key, scope.at(key), transition, status.get("attempt", 1), result)


def slice_of(cpu: str, holder: str = "scope/r2", ttl: Duration = HOUR, parent: str = T1) -> GrantSpec:
    return GrantSpec(holder=holder, amount=amounts(cpu=cpu), parent=parent, tenant="t1", ttl=ttl)


# Messages between scopes, addressed to the present incarnation. The sender is in its incarnation `one` by default.


def incarnation(scope: Scope) -> str:
    return str(scope.row("head")["incarnation"])


async def accept_peer(scope: Scope, peer: str, incarnation: str = "one", replaces: str = "") -> None:
    await scope.must(OPERATOR, AcceptIncarnation(peer, incarnation, replaces))


def offer(scope: Scope, cpu: str = "2", serial: int = 1, ttl: Duration = Duration(60_000), sender: str = "one") -> Accept:
    spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu=cpu), tenant="t1", ttl=ttl)
    return Accept("s", spec, serial, scope.clock.at_ms, sender, incarnation(scope))


def credit(scope: Scope, report: int, cpu: str = "", epoch: int = 1, sender: str = "one") -> Credit:
    """A report of what is still held of grant `s`; without `cpu` it is the final report."""
    kept = amounts(cpu=cpu) if cpu else Amount()
    return Credit("s", epoch, report, kept, sender, incarnation(scope), final=not cpu)


def confirm_holdings(scope: Scope, sender: str = "one", **grants: str) -> ConfirmHoldings:
    return ConfirmHoldings("scope/r2", 7, {name: slice_of(cpu) for name, cpu in grants.items()}, sender, incarnation(scope))


def used_on(scope: Scope, node: str, resource: str = "cpu") -> int:
    """Usage of a node, by the independent checker's sum, which the books must equal."""
    taken = total_sums(scope.checker.rows)[0].get((node, resource), 0)
    assert node_limits(scope.checker.rows)[node].get(resource, 0) - scope.books.nodes[node].free.get(resource, 0) == taken
    return taken


async def restore_backup(scope: Scope, lease: str = "") -> None:
    """Restore the present state under a new authority; all leases are vacant, all nodes awaited.

    `lease`, if given, was acquired after the backup, at epochs unknown to it.
    """
    backup = await scope.store.inner.backup()
    for _ in range(3 if lease else 0):
        await scope.acquire(lease)
    await scope.restore(backup)
    scope.reborn = False  # otherwise the harness lets every node report at once
    await scope.take_over()


async def acquire_leases(scope: Scope, *leases: str) -> None:
    for lease in leases:
        await scope.acquire(lease)


async def mark_node(scope: Scope, name: str, *healths: NodeHealth) -> None:
    for health in healths:
        await scope.must(scope.actors["node-lifecycle"], Mark(name, scope.at(f"node/{name}"), health))
