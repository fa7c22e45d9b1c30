"""Suspected defects."""

from __future__ import annotations
import pytest
from remit.client.link import LinkError
from remit.commitment import authority as module
from remit.model.claims import *
from remit.model.claims import Code
from remit.model.kinds import *
from remit.model.resources import Amount, Duration
from tests.properties.machines import *
from tests.properties.machines import story

T1 = "tenant/t1"


async def spawn(scope, name, count=1, **kw):
    await scope.must(USER, Apply(workload(name, **kw)))
    await scope.must(scope.actors["workloads"], Spawn("t1", name, 1, 0, count))
    return [f"replica/t1/{name}-{i}" for i in range(count)]


async def bind(scope, key, node="n1", grant=T1, devices=None):
    await scope.must(scope.actors["scheduler"], Bind(key, scope.at(key), node, grant, devices or {}))


async def move(scope, key, transition, lease, **kw):
    kw.setdefault("attempt", scope.row(key).get("status", {}).get("attempt", 1))
    await scope.must(scope.actors[lease], Move(key, scope.at(key), transition, **kw))


@story
async def test_window(scope):
    scope.clock.at_ms += 61_000
    await scope.must(USER, Apply(workload("w")))


@story
async def test_abandon_after(scope):
    op = await scope.operation(USER, Apply(workload("w")))
    await scope.send([op])
    v = (await scope.ask(USER, Abandon(op.id)))[0]
    assert isinstance(v, Accepted), v


@story
async def test_gang_reserve(scope):
    a, b = await spawn(scope, "g", 2, gang=2, replicas=2)
    s = scope.actors["scheduler"]
    await scope.must(s, Reserve(a, scope.at(a), "n1", T1))
    await scope.must(s, Reserve(b, scope.at(b), "n1", T1))
    assert await scope.refused(s, Bind(a, scope.at(a), "n1", T1)) is Code.GANG_SHORT


@story
async def test_minus_one(scope):
    (a,) = await spawn(scope, "w", 1)
    vs = await scope.ask(scope.actors["scheduler"], Reserve(a, scope.at(a), "n1", T1), Bind(a, -1, "n1", T1))
    assert isinstance(vs[1], Refused), vs


@story
async def test_relabel_same_batch(scope):
    anti = Placement(anti_affinity=(Affinity(label_selector={"app": "x"}, topology_key="zone"),))
    a, b = await spawn(scope, "w", 2, placement=anti, labels={"app": "x"})
    await bind(scope, a, "n1")
    ops = [
        await scope.operation(OPERATOR, Apply(node("n1", gpus=2, zone="b"))),
        await scope.operation(scope.actors["scheduler"], Bind(b, scope.at(b), "n2", T1)),
    ]
    vs = await scope.send(ops)
    assert isinstance(vs[1], Refused), vs


@story
async def test_patron(scope):
    s = scope.actors["scheduler"]
    (v,) = await spawn(scope, "v", 1, cpu="4", replicas=1)
    (z,) = await spawn(scope, "z", 1, cpu="1", replicas=1, priority="high")
    (y,) = await spawn(scope, "a", 1, cpu="3", replicas=1, priority="top")
    await bind(scope, v, "n1")
    await scope.must(s, Reserve(z, scope.at(z), "n1", T1, victims={v: scope.at(v)}))
    await move(scope, v, "stop", "agent/n1")
    await move(scope, v, "stopped", "agent/n1", result="x")
    await move(scope, v, "requeue", "repair")
    await scope.must(OPERATOR, Apply(node("n1", gpus=2, cpu="5")))
    await bind(scope, v, "n1")
    await scope.must(s, Reserve(y, scope.at(y), "n1", T1, victims={v: scope.at(v)}))
    await scope.take_over()
    await move(scope, v, "stop", "agent/n1")
    await move(scope, v, "stopped", "agent/n1", result="x")
    n, u, l = sums(scope.checker.rows)
    assert scope.books.nodes["n1"].free["cpu"] == 5000 - n["n1", "cpu"], (scope.books.nodes["n1"].free, n)


from tests.properties.checker import sums


@story
async def test_credit_growth(scope):
    b = scope.actors["budgets"]
    spec = GrantSpec(holder="scope/r2", amount=amounts(cpu="10"), parent=T1, tenant="t1", ttl=HOUR)
    await scope.must(b, Issue("g", spec))
    await scope.must(b, Credit("g", 1, 1, amounts(cpu="2")))
    await scope.must(b, Issue("h", spec))
    assert await scope.refused(b, Credit("g", 1, 2, amounts(cpu="10"))) is Code.INVALID


@story
async def test_status_forged(scope):
    n = node("n9")
    n = Node(metadata=n.metadata, spec=n.spec, status=NodeStatus(health=NodeHealth.READY))
    await scope.must(OPERATOR, Apply(n))


@story
async def test_result_early(scope):
    (a,) = await spawn(scope, "w", 1)
    await bind(scope, a)
    await move(scope, a, "start", "agent/n1", result="ok")


@story
async def test_agent_deletes_other(scope):
    assert await scope.refused(scope.actors["agent/n1"], Delete("Node", "n2")) is Code.NOT_OWNER


@story
async def test_forged_awaited(scope):
    assert await scope.refused(USER, Report("awaited/scope/x", SummarySpec(holder="x", epoch=0, sequence=0))) is Code.NOT_OWNER


@story
async def test_requeue_limit(scope):
    (a,) = await spawn(scope, "w", 1, replicas=1)
    await move(scope, a, "cancel", "workloads")
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 1, 1))
    assert await scope.refused(scope.actors["repair"], Move(a, scope.at(a), "requeue", 1)) is Code.LIMIT


@story
async def test_big(scope):
    c = Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={f"k{i}": "x" * 60_000 for i in range(200)}))
    v = (await scope.ask(USER, Apply(c)))[0]
    assert isinstance(v, Refused)


def test_audit(monkeypatch):
    monkeypatch.setattr(module, "AUDIT_BATCHES_KEPT", 10)

    @story
    async def go(scope):
        op = await scope.operation(USER, Apply(workload("w")))
        await scope.send([op])
        for i in range(20):
            await scope.must(USER, Delete("Secret", "x", "t1")) if False else await scope.ask(USER, Delete("Secret", "x", "t1"))
        await scope.take_over()
        n = len(scope.checker.rows)
        v = await scope.send([op])
        assert v[0] == scope.answers[op.id]

    go()
