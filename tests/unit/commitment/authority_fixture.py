"""Short ways to say the usual things to an authority under test. No test is in here."""

from __future__ import annotations

from typing import Any

from remit.model.claims import Accept, AcceptIncarnation, Apply, Bind, ConfirmHoldings, Credit, Move, Spawn
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


async def spawned(scope: Scope, name: str, count: int = 1, **shape: Any) -> list[str]:
    """So many pending replicas of a new workload."""
    shape.setdefault("replicas", count)
    await scope.must(USER, Apply(workload(name, **shape)))
    await scope.must(scope.actors["workloads"], Spawn("t1", name, 1, 0, count))
    return [f"replica/t1/{name}-{i}" for i in range(count)]


async def bind(scope: Scope, key: str, node: str = "n1", grant: str = T1, devices: dict[str, int] | None = None) -> None:
    await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), node, grant, devices or {}))


async def move(scope: Scope, key: str, *transitions: str) -> None:
    """Each by its owner, with what it must carry."""
    for transition in transitions:
        actor, claim = moving(scope, key, transition)
        await scope.must(actor, claim)


def moving(scope: Scope, key: str, transition: str) -> tuple[Any, Move]:
    status = scope.row(key).get("status", {})
    result = "r" if transition in ("finish", "crash", "stopped", "lose") else ""
    lease = OWNERS.get(transition) or f"agent/{status.get('node')}"
    return scope.actors[lease], Move(key, scope.at(key), transition, status.get("attempt", 1), result)


def slice_of(cpu: str, holder: str = "scope/r2", ttl: Duration = HOUR, parent: str = T1) -> GrantSpec:
    return GrantSpec(holder=holder, amount=amounts(cpu=cpu), parent=parent, tenant="t1", ttl=ttl)


# Letters, addressed to a scope as it is now. The peer that wrote them is in its incarnation `one` unless told.


def incarnation(scope: Scope) -> str:
    return str(scope.row("head")["incarnation"])


async def meets(scope: Scope, peer: str, incarnation: str = "one", replaces: str = "") -> None:
    await scope.must(OPERATOR, AcceptIncarnation(peer, incarnation, replaces))


def offer(scope: Scope, cpu: str = "2", serial: int = 1, ttl: Duration = Duration(60_000), sender: str = "one") -> Accept:
    spec = GrantSpec(holder="scope/r1", issuer="scope/global", amount=amounts(cpu=cpu), tenant="t1", ttl=ttl)
    return Accept("s", spec, serial, scope.clock.at_ms, sender, incarnation(scope))


def credit(scope: Scope, report: int, cpu: str = "", epoch: int = 1, sender: str = "one") -> Credit:
    """What is still held of grant `s`; if nothing, it is the final report."""
    kept = amounts(cpu=cpu) if cpu else Amount()
    return Credit("s", epoch, report, kept, sender, incarnation(scope), final=not cpu)


def vouch(scope: Scope, sender: str = "one", **grants: str) -> ConfirmHoldings:
    return ConfirmHoldings("scope/r2", 7, {name: slice_of(cpu) for name, cpu in grants.items()}, sender, incarnation(scope))


def held(scope: Scope, node: str, resource: str = "cpu") -> int:
    """What is taken on a node, by the checker's own sum, which the books must share."""
    taken = total_sums(scope.checker.rows)[0].get((node, resource), 0)
    assert node_limits(scope.checker.rows)[node].get(resource, 0) - scope.books.nodes[node].free.get(resource, 0) == taken
    return taken
