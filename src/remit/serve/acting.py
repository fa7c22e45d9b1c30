"""Does anybody act? Which leases of the scheduler and the controllers nobody holds, as the authority has heard; no decisions.

A scope without them stands still and breaks nothing: what is declared is kept, what runs goes on, and nothing says that nobody
makes, places or replaces anything. So whoever asks how it stands, or why work does not move on, is told here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from remit.client.endpoint import NoVerdict, Status
from remit.correction.crew import CONTROLLERS
from remit.model.answers import IdleLease
from remit.model.claims import Role
from remit.model.objects import key_of
from remit.model.quantity import format_duration
from remit.observation.board import Board
from remit.proposal.explained import WorkloadTold
from remit.proposal.scheduler import LEASE
from remit.serve.desk import Desk

SCHEDULER: Final = "scheduler"
PARTS: Final[dict[str, str]] = {
    LEASE: SCHEDULER,
    **{one.lease or one.remit.role.value: "controllers" for one in CONTROLLERS},
}
"""Which command runs who acts under a lease."""


def idle_leases(stands: Status, board: Board, usual_ms: int) -> tuple[IdleLease, ...]:
    """`usual_ms` is the term of one that was never taken. A new authority gives everybody a full term to be heard again."""
    return tuple(_idle(stands, board, usual_ms))


def _idle(stands: Status, board: Board, usual_ms: int) -> Iterator[IdleLease]:
    for lease, part in PARTS.items():
        if part == SCHEDULER and _another_schedules(stands, usual_ms):
            continue
        found = board.get(key_of("Lease", lease))
        cure = f"start `remit {part}`; if it runs, its log says what keeps it from acting"
        if found is None or not found.spec.holder:
            if stands.listened_ms > usual_ms:
                how = "was never taken" if found is None else "was given back"
                yield IdleLease(lease=lease, part=part, why=f"nobody holds the lease {lease}: it {how}", cure=cure)
            continue
        silent_ms = stands.silent.get(lease, stands.listened_ms)
        if silent_ms > found.spec.ttl:
            least = "" if lease in stands.silent else " at least"  # what was before it this authority cannot know
            why = f"nobody holds the lease {lease}: it was not renewed for {_words(silent_ms)}{least}"
            yield IdleLease(lease=lease, part=part, silent_ms=silent_ms, why=why, cure=cure)


def _another_schedules(stands: Status, term_ms: int) -> bool:
    """Of several schedulers that act at once each has a lease of its own, beside the usual one."""
    return any(lease.startswith(f"{LEASE}/") and silent_ms <= term_ms for lease, silent_ms in stands.silent.items())


def _words(ms: int) -> str:
    return format_duration(ms // 1_000 * 1_000 or ms)


async def with_who_does_not_act(told: WorkloadTold, desk: Desk) -> WorkloadTold:
    """If it waits for somebody to make or place its replicas, and nobody does that: the lease, and the cure."""
    declared = desk.board.get(f"workload/{told.tenant}/{told.name}")
    daemon = declared is not None and declared.spec.type == "daemon"  # how many it wants only who makes them knows
    if not (told.missing or told.groups or daemon):
        return told
    try:
        stands = await desk.standby.status()
    except NoVerdict:
        return told
    idle = {one.lease: one for one in idle_leases(stands, desk.board, desk.tempo.lease_ms)}
    makes, places = idle.get(Role.WORKLOADS.value), idle.get(LEASE)
    words = [
        f"{one.why}; {one.cure}" for one in (makes if told.missing or daemon else None, places if told.groups else None) if one
    ]
    limit = "missing" if makes is not None and daemon and not told.limit else told.limit
    return replace(told, unattended="; ".join(words), limit=limit)
