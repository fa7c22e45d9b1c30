"""Why is it there, why does it wait, how many more fit? Asked of what a server sees now; what is found is in proposal/."""

from __future__ import annotations

from remit.model.kinds import NodePool, Workload
from remit.model.problems import shown, there_are
from remit.model.records import Replica
from remit.proposal.capacity import COUNT_MAX, Capacity, room_for
from remit.proposal.explained import ReplicaTold, WorkloadTold
from remit.proposal.telling import NoNode
from remit.serve.failures import Failure
from remit.serve.looking import Look, Looking
from remit.serve.recorded import Written, batches_of, notes_of, told_of_replica, told_of_workload

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
