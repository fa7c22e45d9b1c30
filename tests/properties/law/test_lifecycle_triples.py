"""Every triple of phase, transition and role is accepted or refused without change, as an independent table says.

Replicas are brought into each phase by permitted transitions on a real authority; then every transition is claimed by every
role, with everything else right. The table below is written from DESIGN section 4, not read from the law.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

from remit.law import lifecycle
from remit.model.claims import Accepted, Actor, AnyClaim, Apply, Bind, Code, Forget, Move, Operation, Refused, Reserve, Spawn
from remit.model.records import Phase
from remit.model.roles import Role
from tests.properties.authority_world import OPERATOR, USER, Scope, node, populated_scope, run, tenant, workload

RUNS = ("bound", "starting", "running", "ready", "serving")
ON_NODE = (*RUNS, "draining", "stopping")


class Edge(NamedTuple):
    sources: tuple[str, ...]
    role: str


EDGES = {
    "unreserve": Edge(("reserved",), "scheduler"),
    "reclaim": Edge(("reserved",), "repair"),
    "cancel": Edge(("pending", "reserved"), "workloads"),
    "start": Edge(("bound",), "agent"),
    "run": Edge(("starting",), "agent"),
    "ready": Edge(("running",), "agent"),
    "unready": Edge(("ready", "serving"), "agent"),
    "serve": Edge(("ready",), "endpoints"),
    "unserve": Edge(("serving",), "endpoints"),
    "finish": Edge(("starting", "running", "ready"), "agent"),
    "crash": Edge(("starting", "running", "ready", "serving"), "agent"),
    "preempt": Edge(RUNS, "scheduler"),
    "evict": Edge(RUNS, "node-lifecycle"),
    "retire": Edge(RUNS, "rollout"),
    "remove": Edge(RUNS, "workloads"),
    "abort": Edge(("bound", "starting"), "repair"),
    "stop": Edge(("draining",), "agent"),
    "stopped": Edge(("stopping",), "agent"),
    "doubt": Edge(ON_NODE, "node-lifecycle"),
    "resume": Edge(("unknown",), "agent"),
    "lose": Edge(("unknown",), "node-lifecycle"),
    "release": Edge(("failed",), "repair"),
    "settle": Edge(("finished",), "workloads"),
    "requeue": Edge(("released",), "repair"),
}
TARGETS = {
    "unreserve": "pending", "reclaim": "pending", "cancel": "released", "start": "starting", "run": "running",
    "ready": "ready", "unready": "running", "serve": "serving", "unserve": "ready", "finish": "finished", "crash": "failed",
    "preempt": "draining", "evict": "draining", "retire": "draining", "remove": "draining", "abort": "draining",
    "stop": "stopping", "stopped": "released", "doubt": "unknown", "lose": "failed", "release": "released",
    "settle": "released", "requeue": "pending",
}  # fmt: skip
PLACED = {"create", "reserve", "bind", "confirm", "forget", "distrust"}
"""Transitions with claims of their own, or of the authority only: no Move may name them."""

PATHS: dict[str, tuple[str, ...]] = {
    "pending": (),
    "reserved": ("reserve",),
    "bound": ("bind",),
    "starting": ("bind", "start"),
    "running": ("bind", "start", "run"),
    "ready": ("bind", "start", "run", "ready"),
    "serving": ("bind", "start", "run", "ready", "serve"),
    "draining": ("bind", "remove"),
    "stopping": ("bind", "remove", "stop"),
    "finished": ("bind", "start", "run", "finish"),
    "unknown": ("bind", "start", "run", "doubt"),
    "failed": ("bind", "start", "crash"),
    "released": ("cancel",),
}
ROLES = [role for role in Role if role is not Role.AUTHORITY]
WAITED = {"reclaim", "abort", "lose"}
"""Transitions that are permitted only after a wait."""


def actor_of(scope: Scope, role: Role) -> Actor:
    if role in (Role.USER, Role.OPERATOR):
        return Actor("someone", role)
    return scope.actors["agent/n1" if role is Role.AGENT else str(role)]


async def stage(count: int) -> tuple[Scope, list[str]]:
    """A scope with this many pending replicas of one service, and capacity for all of them."""
    scope = await populated_scope(nodes=[node("n1", "4000")], checked=False)
    await scope.must(OPERATOR, Apply(tenant("t1", "4000")))
    await scope.must(USER, Apply(workload("w", "1m", count)))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 0, count))
    return scope, [f"replica/t1/w-{i}" for i in range(count)]


def place(scope: Scope, key: str) -> Bind:
    return Bind(key, scope.books.replicas[key][0], "n1", "tenant/t1")


def move(scope: Scope, key: str, transition: str) -> AnyClaim:
    replica, at = scope.books.replica(key)
    match transition:
        case "bind":
            return place(scope, key)
        case "reserve":
            return Reserve(key, at, "n1", "tenant/t1")
        case _:
            result = "r" if transition in ("finish", "crash", "stopped", "lose") else ""
            return Move(key, at, transition, replica.status.attempt, result)


async def bring_to_phase(scope: Scope, keys: list[str], phase: str) -> None:
    """Move all of them by permitted transitions."""
    for transition in PATHS[phase]:
        role = "scheduler" if transition in ("bind", "reserve") else EDGES[transition].role
        await scope.must(actor_of(scope, Role(role)), *(move(scope, key, transition) for key in keys))
    for key in keys:
        assert scope.books.replica(key)[0].status.phase == phase


async def sent(scope: Scope, requests: list[tuple[Actor, AnyClaim]]) -> list[Accepted | Refused]:
    operations: list[Operation] = [await scope.operation(actor, claim) for actor, claim in requests]
    verdicts = await scope.send(operations)
    assert isinstance(verdicts, list)
    return verdicts


def expected(phase: str, transition: str, role: Role, *, waited: bool) -> Code | None:
    """None means accepted. In order: may the role move at all, may a move name it, who owns it, does it start here."""
    if role in (Role.USER, Role.OPERATOR):
        return Code.ROLE
    if transition not in EDGES:
        return Code.INVALID
    if EDGES[transition].role != role:
        return Code.ROLE
    if phase not in EDGES[transition].sources:
        return Code.PHASE
    if transition in WAITED and not waited:
        return Code.FENCE if transition == "lose" else Code.WAIT
    return None


async def every_triple(waited: bool) -> Counter[str]:
    transitions = [*EDGES, *sorted(PLACED), "teleport"]
    scope, keys = await stage(len(PATHS) * len(transitions) * len(ROLES))
    counted: Counter[str] = Counter()
    spare = iter(keys)
    groups = {phase: [next(spare) for _ in range(len(transitions) * len(ROLES))] for phase in PATHS}
    for phase, group in groups.items():
        await bring_to_phase(scope, group, phase)
    if waited:
        await scope.acquire("agent/n1")
        scope.clock.at_ms += 700_000
    for phase, group in groups.items():
        triples = [(transition, role) for transition in transitions for role in ROLES]
        before = {key: scope.books.replicas[key] for key in group}
        requests = [(actor_of(scope, role), move(scope, key, t)) for key, (t, role) in zip(group, triples, strict=True)]
        # "bind" and "reserve" are claims of their own: a Move that names them is refused.
        requests = [
            (actor, Move(key, before[key][0], t, 1, "r")) if t in PLACED else (actor, claim)
            for (actor, claim), key, (t, _) in zip(requests, group, triples, strict=True)
        ]
        for (transition, role), key, verdict in zip(triples, group, await sent(scope, requests), strict=True):
            why = f"({phase}, {transition}, {role}) waited={waited}: {verdict}"
            code = expected(phase, transition, role, waited=waited)
            if code is None:
                assert isinstance(verdict, Accepted), why
                target = TARGETS.get(transition, "running")
                assert scope.books.replica(key)[0].status.phase == target, why
            else:
                assert isinstance(verdict, Refused) and verdict.code is code, f"{why}; expected {code}"
                assert scope.books.replicas[key] == before[key], f"{why} changed the replica"
            counted["accepted" if code is None else code.value] += 1
        await unchanged(scope, before, [key for key in group if scope.books.replicas[key] == before[key]])
    await scope.close()
    return counted


async def unchanged(scope: Scope, before: dict[str, tuple[int, bytes]], keys: list[str]) -> None:
    """In the store, not only in the books."""
    for key in keys:
        row = await scope.store.inner.get(key)
        assert row is not None and (row.revision, row.value) == before[key]
        await asyncio.sleep(0)


def test_every_triple_is_accepted_or_refused_without_change() -> None:
    counted = run(every_triple(waited=False))
    assert counted["accepted"] == sum(len(e.sources) for name, e in EDGES.items() if name not in WAITED)
    assert sum(counted.values()) == len(PATHS) * (len(EDGES) + len(PLACED) + 1) * len(ROLES)


def test_every_triple_after_waits_and_fences_have_passed() -> None:
    """F39: `reclaim`, `abort` and `lose` are permitted then, and nothing else changes."""
    counted = run(every_triple(waited=True))
    assert counted["accepted"] == sum(len(e.sources) for e in EDGES.values())


def test_bind_reserve_and_forget_need_their_role_and_phase() -> None:
    asyncio.run(_placing())


async def _placing() -> None:
    legal = {"bind": ({"pending", "reserved"}, "scheduler"), "reserve": ({"pending"}, "scheduler")}
    legal |= {"forget": ({"released"}, "workloads")}
    scope, keys = await stage(len(PATHS) * len(legal) * len(ROLES))
    spare = iter(keys)
    for phase in PATHS:
        group = [next(spare) for _ in range(len(legal) * len(ROLES))]
        await bring_to_phase(scope, group, phase)
        triples = [(name, role) for name in legal for role in ROLES]
        before = {key: scope.books.replicas[key] for key in group}
        requests: list[tuple[Actor, AnyClaim]] = []
        for key, (name, role) in zip(group, triples, strict=True):
            claim = Forget(key, before[key][0]) if name == "forget" else move(scope, key, name)
            requests.append((actor_of(scope, role), claim))
        for (name, role), key, verdict in zip(triples, group, await sent(scope, requests), strict=True):
            phases, owner = legal[name]
            why = f"({phase}, {name}, {role}): {verdict}"
            if role == owner and phase in phases:
                assert isinstance(verdict, Accepted), why
                continue
            assert isinstance(verdict, Refused), why
            assert verdict.code is (Code.ROLE if role != owner else Code.PHASE), why
            assert scope.books.replicas[key] == before[key], why
    await scope.close()


def test_lifecycle_table_equals_independent_copy() -> None:
    """Written twice on purpose: a change of one must be repeated in the other."""
    transitions = {(row.name, row.source, row.role) for row in lifecycle.TRANSITIONS if row.name not in PLACED}
    assert transitions == {(name, Phase(source), Role(edge.role)) for name, edge in EDGES.items() for source in edge.sources}
    for row in lifecycle.TRANSITIONS:
        if row.name in TARGETS and row.name != "resume":
            assert row.target == TARGETS[row.name]
    assert {row.name for row in lifecycle.TRANSITIONS} == {*EDGES, *PLACED}
