"""Property: a scenario ends the same wherever it is interrupted: by a crash, a lost answer or a late write at each store call.

A scenario runs once without interruption, then again for every store call and every fault. After a fault a new authority takes
over, and the client repeats the same operations under the same ids. The verdicts and the final rows must be equal, except for
epochs, sequences and the audit.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from remit.client.endpoint import EndpointError, OutcomeUnknown
from remit.commitment.authority import LeadershipLost
from remit.model.claims import (
    Accept,
    Accepted,
    AcceptIncarnation,
    Actor,
    AnyClaim,
    Apply,
    Bind,
    BindGang,
    Close,
    ConfirmHoldings,
    Credit,
    Delete,
    Forget,
    Issue,
    Move,
    Operation,
    Refused,
    Renew,
    Reserve,
    ReturnCapacity,
    Rollback,
    Spawn,
    operation_id,
)
from remit.model.kinds import Policy, PolicyAllow, PolicyRule, PolicySpec, Region
from remit.model.metadata import Metadata
from remit.model.records import GrantSpec
from remit.model.resources import Amount
from remit.store.protocol import StoreError
from tests.properties.authority_world import (
    HOUR,
    OPERATOR,
    USER,
    Crash,
    FakeClock,
    Scope,
    amounts,
    node,
    populated_scope,
    run,
    workload,
)

STRIKES = {"commit": ("before", "after", "lost", "landed", "late", "later", "unavailable"), "read": ("before", "unavailable")}


class PersistentClient:
    """A client that never gives up: after any failure it takes over and repeats the same operation id."""

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = scopes
        self.scope = scopes[0]
        self.answers: list[str] = []

    def on(self, scope: Scope) -> PersistentClient:
        self.scope = scope
        return self

    async def ask(self, actor: str | Actor, claim: AnyClaim) -> int:
        scope = self.scope
        who = scope.actors[actor] if isinstance(actor, str) else actor
        made = operation_id(scope.row("head")["incarnation"], 1, f"step{len(self.answers)}")
        operation = Operation(made, who, claim)
        for _ in range(12):
            if not scope.lead.alive:
                await self.lead(scope)
            answers = await scope.send([operation])
            if not isinstance(answers, EndpointError):
                verdict = answers[0]
                self.answers.append(f"{verdict.code}" if isinstance(verdict, Refused) else f"accepted {verdict.number}")
                return verdict.number if isinstance(verdict, Accepted) else -1
        raise AssertionError(f"{operation} was never answered: {answers}")

    async def lead(self, scope: Scope) -> None:
        for _ in range(12):
            try:
                await scope.take_over()
                return
            except (Crash, StoreError, OutcomeUnknown, LeadershipLost):
                continue
        raise AssertionError("nobody could take over")

    async def move(self, key: str, *transitions: str) -> None:
        owners = {"serve": "endpoints", "remove": "workloads", "settle": "workloads", "requeue": "repair"}
        for transition in transitions:
            status = self.scope.row(key)["status"]
            result = "ok" if transition in ("stopped", "finish") else ""
            move = Move(key, self.scope.at(key), transition, status.get("attempt", 1), result)
            await self.ask(owners.get(transition, f"agent/{status.get('node', '')}"), move)

    async def bind(self, key: str, name: str = "n1", grant: str = "tenant/t1") -> None:
        devices = self.scope.row(key).get("status", {}).get("devices", {})
        await self.ask("scheduler", Bind(key, self.scope.at(key), name, grant, devices))

    async def spawned(self, name: str, count: int, **shape: Any) -> list[str]:
        await self.ask(USER, Apply(workload(name, replicas=count, **shape)))
        await self.ask("workloads", Spawn("t1", name, 1, 0, count))
        return [f"replica/t1/{name}-{i}" for i in range(count)]


async def bind(t: PersistentClient) -> None:
    (key,) = await t.spawned("w", 1)
    await t.bind(key)
    await t.move(key, "start", "run", "ready", "serve")


async def preempt(t: PersistentClient) -> None:
    """F19 F24: victims stop, the reservation is confirmed, the victim is placed elsewhere."""
    (weak,) = await t.spawned("weak", 1, cpu="3")
    (strong,) = await t.spawned("strong", 1, cpu="4", priority="high")
    await t.bind(weak)
    await t.ask("scheduler", Reserve(strong, t.scope.at(strong), "n1", "tenant/t1", victims={weak: t.scope.at(weak)}))
    await t.bind(strong)
    await t.move(weak, "stop", "stopped")
    await t.bind(strong)
    await t.move(weak, "requeue")
    await t.bind(weak, "n2")


async def gang(t: PersistentClient) -> None:
    """F25"""
    members = await t.spawned("g", 3, gang=2)
    bad = tuple(Bind(key, t.scope.at(key), "n9", "tenant/t1") for key in members)
    await t.ask("scheduler", BindGang(bad))
    await t.ask("scheduler", BindGang(tuple(Bind(key, t.scope.at(key), "n1", "tenant/t1") for key in members)))


async def policy_rollback(t: PersistentClient) -> None:
    def published(zone: str) -> Policy:
        return Policy(metadata=Metadata(name="p"), spec=PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=(zone,))),)))

    (key,) = await t.spawned("w", 1)
    await t.ask("policy", Apply(published("b")))
    await t.ask("policy", Apply(published("a")))
    await t.ask("policy", Rollback(1))
    await t.bind(key)
    await t.bind(key, "n2")


async def delete_workload(t: PersistentClient) -> None:
    """F24 F30: the workload is deleted once nothing of it is left."""
    (key,) = await t.spawned("w", 1)
    await t.bind(key)
    await t.ask(USER, Delete("Workload", "w", "t1"))
    await t.move(key, "remove", "stop", "stopped")
    await t.ask("workloads", Forget(key, t.scope.at(key)))
    await t.ask(USER, Delete("Workload", "w", "t1"))


async def restore(t: PersistentClient) -> None:
    """F10: a restore in the middle of the scenario."""
    a, b = await t.spawned("w", 2)
    await t.bind(a)
    await t.ask("budgets", Issue("s", slice_of("2")))
    await t.ask("budgets", AcceptIncarnation("scope/r2", "one"))
    snapshot = await t.scope.store.inner.backup()
    await t.bind(b)
    await t.scope.restore(snapshot)
    await t.lead(t.scope)
    await t.ask("budgets", Issue("s2", slice_of("1")))
    await t.move(a, "resume", "start")
    await t.bind(b, "n2")
    await t.ask("budgets", AcceptIncarnation("scope/r2", "two", "one"))
    await t.ask("budgets", ConfirmHoldings("scope/r2", 1, {"s": slice_of("1")}, "two", incarnation(t.scope)))
    await t.ask("budgets", Issue("s2", slice_of("1")))


def slice_of(cpu: str, issuer: str = "") -> GrantSpec:
    return GrantSpec(
        holder="scope/r2", amount=amounts(cpu=cpu), parent="" if issuer else "tenant/t1", issuer=issuer, tenant="t1", ttl=HOUR
    )


def incarnation(scope: Scope) -> str:
    return str(scope.row("head")["incarnation"])


async def grant_round_trip(t: PersistentClient) -> None:
    """F43: accept, issue, draw, return, credit, renew, close, final report; the issuer is the second scope."""
    region, issuer = t.scopes
    here, there = incarnation(region), incarnation(issuer)
    await t.on(region).ask("budgets", AcceptIncarnation("scope/global", there))
    await t.on(issuer).ask("budgets", AcceptIncarnation("scope/r2", here))
    await t.on(issuer).ask("budgets", Issue("s", slice_of("4")))
    offer = slice_of("4", "scope/global")
    await t.on(region).ask("budgets", Accept("s", offer, 1, region.clock.at_ms, there, here))
    (key,) = await t.spawned("w", 1)
    await t.bind(key, grant="s")
    report = await t.ask("budgets", ReturnCapacity("s", amounts(cpu="2")))
    await t.on(issuer).ask("budgets", Credit("s", 1, report, amounts(cpu="2"), here, there))
    serial = await t.ask("budgets", Renew("s"))
    await t.on(region).ask("budgets", Accept("s", offer, serial, region.clock.at_ms, there, here))
    await t.move(key, "remove", "stop", "stopped")
    report = await t.ask("budgets", Close("s"))
    await t.on(issuer).ask("budgets", Credit("s", 1, report, Amount(), here, there, final=True))
    await t.ask("budgets", Close("s"))


SCENARIOS = [bind, preempt, gang, policy_rollback, delete_workload, restore, grant_round_trip]


async def run_interrupted(
    scenario: Callable[[PersistentClient], Awaitable[None]], strikes: dict[int, str], struck: int = 0
) -> tuple[list[str], list[Any], list[str]]:
    """The answers, the final rows of each scope, and the store calls of the interrupted one."""
    clock = FakeClock()
    scopes = [await populated_scope("r1", clock, nodes=[node("n1"), node("n2", zone="b")])]
    if scenario is grant_round_trip:
        scopes.append(await populated_scope("global", clock, nodes=[], judge=scopes[0].judged.judge))
        await scopes[1].must(OPERATOR, Apply(Region(metadata=Metadata(name="r2"))))
    store = scopes[struck].store
    store.calls, store.kinds, store.strikes = 0, [], strikes
    client = PersistentClient(*scopes)
    await scenario(client)
    ends = [comparable(await scope.dump()) for scope in scopes]
    for scope in scopes:
        await scope.close()
    return client.answers, ends, scopes[struck].store.kinds


def comparable(rows: dict[str, bytes]) -> dict[str, Any]:
    """Without the fields that name the batch or the time of a write."""

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: stripped(v) for k, v in value.items() if k not in ("uid", "atMs")}
        return [stripped(v) for v in value] if isinstance(value, list) else value

    found = {key: stripped(json.loads(value)) for key, value in rows.items()}
    for key, row in found.items():
        if key.startswith("lease/"):
            row["spec"].pop("epoch", None)  # raised past the store's own epoch by a restore
    return found


@pytest.mark.parametrize(("scenario", "struck"), [*((s, 0) for s in SCENARIOS), (grant_round_trip, 1)])
def test_scenario_interrupted_at_any_store_call_ends_the_same(
    scenario: Callable[[PersistentClient], Awaitable[None]], struck: int
) -> None:
    """F01 F15 F19 F20: at every store call in turn."""
    expected, ends, kinds = run(run_interrupted(scenario, {}, struck))
    for call, kind in enumerate(kinds, 1):
        for word in STRIKES[kind]:
            answers, rows, _ = run(run_interrupted(scenario, {call: word}, struck))
            assert answers == expected, f"{kind} {call} {word}"
            assert rows == ends, f"{kind} {call} {word}"


@pytest.mark.parametrize("scenario", [preempt, restore, delete_workload])
def test_scenario_interrupted_twice_ends_the_same(scenario: Callable[[PersistentClient], Awaitable[None]]) -> None:
    """F20: the second fault strikes the recovery from the first."""
    expected, ends, kinds = run(run_interrupted(scenario, {}))
    for call, kind in enumerate(kinds, 1):
        for next_one in (1, 2, 4):
            strikes = {call: "after" if kind == "commit" else "before", call + next_one: "before"}
            answers, rows, _ = run(run_interrupted(scenario, strikes))
            assert (answers, rows) == (expected, ends), strikes
