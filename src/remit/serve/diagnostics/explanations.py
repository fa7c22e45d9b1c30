"""Explain and capacity on a frozen view, with start-up progress reported by nodes.

Asked of what a server sees now; what is found is in proposal/.

Added to what is explained of them; nobody is asked to say more.

A replica that is `starting` may be fetching what it needs: its node tells so with every beat, and a slow fetch is not
taken for a slow scheduler.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.client.endpoint import Endpoint
from remit.model.kinds import NodePool, Workload
from remit.model.problems import shown, there_are
from remit.model.records import Phase, Replica
from remit.model.wire.agent_messages import RunState
from remit.proposal.explain.capacity import COUNT_MAX, Capacity, room_for
from remit.proposal.explain.result_types import ReplicaTold, WorkloadTold
from remit.proposal.explain.subjects import NoNode
from remit.serve.diagnostics.history import Written, batches_of, notes_of, told_of_replica, told_of_workload
from remit.serve.diagnostics.view_snapshots import Look, Looking
from remit.serve.http.replies import Failure

_UNFIT = "mend what it names, or declare what it names first"


async def explain_workload(looking: Looking, tenant: str, name: str, node: str = "") -> WorkloadTold:
    written = await _written(looking, tenant)

    def told(look: Look) -> WorkloadTold:
        declared: Workload | None = look.seen.get(f"workload/{tenant}/{name}")
        if declared is None and not _is_left(look, tenant, name):
            raise no_such(look, "workload", tenant, name)
        try:
            return told_of_workload(look.view, declared, tenant, name, written, look.rules, node)
        except NoNode:
            raise no_node(look, node) from None

    return await looking.ask(told)


async def explain_replica(looking: Looking, tenant: str, name: str, node: str = "") -> ReplicaTold:
    written = await _written(looking, tenant)

    def told(look: Look) -> ReplicaTold:
        kept = look.seen.rows.get(f"replica/{tenant}/{name}")
        if kept is None:
            raise no_such(look, "replica", tenant, name)
        replica: Replica = kept.thing
        try:
            return told_of_replica(look.view, replica, kept.revision, written, look.rules, node)
        except NoNode:
            raise no_node(look, node) from None

    return await looking.ask(told)


async def capacity_for(looking: Looking, workload: Workload, count: int | None = None) -> Capacity:
    """Raises `Failure`, also if such a workload could not be declared here."""

    def found(look: Look) -> Capacity:
        pools = [thing for kept in look.seen.kind("nodepool/") if isinstance(thing := kept.thing, NodePool)]
        try:
            return room_for(look.view, workload, look.rules, most=min(count or COUNT_MAX, COUNT_MAX), pools=pools)
        except ValueError as error:
            field, _, why = str(error).partition(": ")
            raise Failure(422, "invalid", str(error), field=field if why else "", cure=_UNFIT) from error

    return await looking.ask(found)


def no_such(look: Look, kind: str, tenant: str, name: str) -> Failure:
    prefix = f"{kind}/{tenant}/"
    names = [kept.key.removeprefix(prefix) for kept in look.seen.kind(prefix)]
    why = f"there is no {kind} {shown(name)} of tenant {shown(tenant)}"
    return Failure(404, "not_found", why, field="name", cure=there_are(name, names, f"{kind}s"))


def no_node(look: Look, node: str) -> Failure:
    cure = there_are(node, sorted(look.view.columns.rows), "nodes")
    return Failure(404, "not_found", f"there is no node {shown(node)}", field="node", cure=cure)


def _is_left(look: Look, tenant: str, name: str) -> bool:
    """Is anything of it still there? A workload that was deleted leaves its replicas for a while."""
    workloads = look.view.shapes.workloads
    owner = workloads.ids.get(f"{tenant}/{name}")
    return owner is not None and bool(workloads.at.users[owner])


async def _written(looking: Looking, tenant: str) -> Written:
    await looking.caught_up()
    at, last = await looking.store.revision(), looking.sequence
    decisions = await notes_of(looking.store, f"decision/{tenant}/", at)
    return Written(decisions, await batches_of(looking.store, last, at))


_ON_THE_WAY: Final = (Phase.STARTING, Phase.RUNNING)


async def with_words_of_its_node(told: ReplicaTold, endpoint: Endpoint) -> ReplicaTold:
    if not told.node or told.phase not in _ON_THE_WAY:
        return told
    key = f"replica/{told.tenant}/{told.name}"
    runs = [run for state in await endpoint.states((told.node,)) for run in state.runs]
    said = next((run.said for run in runs if (run.replica, run.attempt) == (key, told.attempt)), "")
    return replace(told, said=said) if said else told


async def with_words_of_its_nodes(told: WorkloadTold, endpoint: Endpoint) -> WorkloadTold:
    """If it is held up by what starts: what one of those waits for, and how many wait so."""
    if told.limit != Phase.STARTING or told.detail:
        return told
    prefix = f"replica/{told.tenant}/{told.name}-"
    runs = [run for state in await endpoint.states(()) for run in state.runs if _is_of(run, prefix)]
    if not runs:
        return told
    first = min(runs, key=lambda run: run.replica)
    more = f" (and {len(runs) - 1} more)" if len(runs) > 1 else ""
    return replace(told, detail=f"{first.replica.rpartition('/')[2]} is {first.said}{more}")


def _is_of(run: RunState, prefix: str) -> bool:
    return bool(run.said) and not run.pid and run.replica.startswith(prefix) and run.replica[len(prefix) :].isdigit()
