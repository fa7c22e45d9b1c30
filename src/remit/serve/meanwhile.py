"""What do nodes say of replicas that are on their way? Added to what is explained of them; nobody is asked to say more.

A replica that is `starting` may be fetching what it needs: its node tells so with every beat, and a slow fetch is not
taken for a slow scheduler.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from remit.client.endpoint import Endpoint
from remit.model.beats import RunState
from remit.model.records import Phase
from remit.proposal.explained import ReplicaTold, WorkloadTold

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
