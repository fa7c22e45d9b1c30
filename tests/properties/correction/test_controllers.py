"""Property: controllers converge wherever they are interrupted, and write nothing at rest (virtual time)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment.outcomes import BATCH_PREFIX, decode_batch
from remit.model.claims import Accepted, Acquire, Delete
from remit.model.kinds import Rollout
from remit.model.resources import Duration
from tests.properties.authority_world import node, workload
from tests.properties.effort import SOAKING
from tests.properties.virtual_cluster import BEAT_MS, FaultyWire, VirtualCluster, in_virtual_cluster

SERVICE = workload("w", "1", 2)
SERVICE = replace(SERVICE, spec=replace(SERVICE.spec, rollout=Rollout(max_surge=1)))
NEWER = replace(SERVICE.spec, template=replace(SERVICE.spec.template, command=("new",)))


STEPS = {"before": 2, "after": 1, "lost": 4, "twice": 4}
"""One of so many claims is interrupted; in the soak each of them, in every way."""


async def start_workloads(t: VirtualCluster, wire: FaultyWire) -> None:
    """Two nodes, a service, a daemon, a finished job."""
    await t.add_nodes(node("n1"), node("n2"))
    t.group.create_task(t.run_restarted_controllers(wire))
    await t.apply(SERVICE, workload("d", "1", 1, type_="daemon"), workload("j", "1", 2, type_="job", keep=Duration(86_400_000)))
    await t.until("served", lambda: t.phases("w") == t.phases("d") == ["serving"] * 2)
    await t.until("done", lambda: t.phases("j") == ["released"] * 2)
    await t.sleep(10 * BEAT_MS)


async def run_lifecycle(t: VirtualCluster, wire: FaultyWire) -> dict[str, Any]:
    """Roll out and scale down the service, drain a node, delete the daemon."""
    await start_workloads(t, wire)
    await t.apply(replace(SERVICE, spec=replace(NEWER, replicas=1)))
    await t.until("rolled", lambda: t.phases("w") == ["serving"] and t.board.replicas_of("t1", "w")[0].obj.spec.generation == 2)
    await t.apply(node("n2", draining=True))
    await t.until("drained", lambda: all(one.obj.status.phase.value == "released" for one in t.board.replicas_on("n2")))
    await t.ask(Delete("Workload", "d", "t1"))
    await t.until("gone", lambda: "workload/t1/d" not in t.board.rows)
    await t.sleep(30 * BEAT_MS)
    return t.final_state()


def run_interrupted(strike: int = 0, how: str = "") -> tuple[dict[str, Any], list[str]]:
    """The final state, and the claims made on the way."""
    ends: list[tuple[dict[str, Any], list[str]]] = []

    async def scenario(t: VirtualCluster) -> None:
        wire = FaultyWire(t.authority, strike, how)
        end = await run_lifecycle(t, wire)
        ends.append((end, [type(operation.claim).__name__ for operation in wire.operations]))
        assert how != "before" or wire.died.is_set()

    in_virtual_cluster(scenario)
    return ends[0]


def test_lifecycle_ends_in_expected_state() -> None:
    end, claims = run_interrupted()
    assert set(end) == {"workload/t1/w", "workload/t1/j", "node/n1", "node/n2", "orphans"}
    phases, conditions = end["workload/t1/w"]
    assert phases == ["serving"]
    assert {type_: status for type_, (status, _, generation) in conditions.items() if generation == 2} == {
        "Admitted": "True", "Scheduled": "True", "Ready": "True", "Available": "True", "Progressing": "True"
    }  # fmt: skip
    assert end["workload/t1/j"][1]["Complete"] == ("True", "Done", 1)
    assert end["node/n2"] == ("ready", {"Drained": ("True", "Empty", 2)})
    assert end["orphans"] == []
    assert {"Spawn", "Move", "Mark", "SetCondition", "Forget", "Delete", "Acquire"} <= set(claims)


@pytest.mark.parametrize("how", STEPS)
def test_interrupted_lifecycle_ends_in_same_state(how: str) -> None:
    """F01 F19 F20 F37: the controllers crash before or after each claim, or its answer is lost, or it arrives twice."""
    end, claims = run_interrupted()
    assert len(claims) > 40
    for strike in range(1, len(claims) + 1, 1 if SOAKING else STEPS[how]):
        then, _ = run_interrupted(strike, how)
        assert then == end, f"claim {strike}, a {claims[strike - 1]}, {how}"


def test_idle_scope_is_not_written_to() -> None:
    """L10: in ten minutes only the authority's heartbeat, although other controllers wait for every lease."""

    async def scenario(t: VirtualCluster) -> None:
        wire, waiting = FaultyWire(t.authority), FaultyWire(t.authority)
        await start_workloads(t, wire)
        begun = t.start_controllers(waiting, "another")
        await t.sleep(30 * BEAT_MS)
        before, sent, refused = await t.store.revision(), len(wire.operations), len(waiting.operations)
        await t.sleep(600_000)
        assert len(wire.operations) == sent, [operation.claim for operation in wire.operations[sent:]]
        assert len(waiting.operations) == refused, "one attempt per lease"
        assert {type(operation.claim) for operation in waiting.operations} == {Acquire}
        written = [row for row in (await t.store.range("", limit=1_000)).rows if row.revision > before]
        assert {row.key.partition("/")[0] for row in written} <= {"head", "batch"}
        assert not any(decode_batch(row.value).entries for row in written if row.key.startswith(BATCH_PREFIX)), (
            "empty heartbeats"
        )
        assert (await t.store.revision()) - before <= 600_000 // BEAT_MS + 1
        begun.cancel()

    in_virtual_cluster(scenario)


def test_waiting_controllers_take_over_from_stopped_ones() -> None:
    """L8: within two terms and five seconds."""

    async def scenario(t: VirtualCluster) -> None:
        await t.add_nodes(node("n1"))
        first = t.start_controllers(FaultyWire(t.authority), "one")
        await t.sleep(2_000)
        second = t.start_controllers(FaultyWire(t.authority), "two")
        await t.apply(SERVICE)
        await t.until("served", lambda: t.phases("w") == ["serving"] * 2)
        first.cancel()
        await t.apply(replace(SERVICE, spec=replace(SERVICE.spec, replicas=3)))
        await t.until("served by another", lambda: t.phases("w") == ["serving"] * 3, within_ms=2 * 12 * BEAT_MS + 5_000)
        second.cancel()

    in_virtual_cluster(scenario)


def test_replicas_of_silent_node_move_and_node_rejoins() -> None:
    """F34: suspect, unknown, lost; then joining and ready."""

    async def scenario(t: VirtualCluster) -> None:
        await t.add_nodes(*(node(f"n{n}") for n in range(1, 5)))
        controllers = t.start_controllers(FaultyWire(t.authority))
        await t.apply(SERVICE)
        await t.until("served", lambda: t.phases("w") == ["serving"] * 2)
        lost = t.board.replicas_of("t1", "w")[0].obj.status.node
        t.silent.add(lost)

        def moved() -> bool:
            return t.phases("w") == ["serving"] * 2 and all(
                replica.obj.status.node != lost for replica in t.board.replicas_of("t1", "w")
            )

        await t.until("moved", moved)
        await t.until("lost", lambda: t.healths[lost][-1] == "lost")
        lease = t.leases[lost]
        assert not await t.authority.renew(lease), "expired: it must be acquired again"
        t.client.actor = replace(lease, lease="", epoch=0)
        (verdict,) = await t.client.submit_many([Acquire(lease.lease, Duration(12 * BEAT_MS))])
        assert isinstance(verdict, Accepted)
        t.leases[lost] = replace(lease, epoch=verdict.number)
        t.silent.clear()
        await t.until("ready again", lambda: t.healths[lost][-1] == "ready")
        assert t.healths[lost] == ["joining", "ready", "suspect", "unknown", "lost", "joining", "ready"]
        controllers.cancel()

    in_virtual_cluster(scenario)
