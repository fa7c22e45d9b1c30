"""Requests the progress of workloads, and formats it for tables and for waiting. The server computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from remit.cli.session.server_call import CommandError
from remit.client.api_caller import ApiError
from remit.law.workload_rules import DONE, QUEUED, ROLLED_OUT, condition_of
from remit.model.kinds import Workload
from remit.model.records import Phase
from remit.model.wire.api_types import WorkloadProgressItem

if TYPE_CHECKING:
    from remit.client.api import Api

P = Phase
NOT_FOUND: Final = "not_found"
NO_SUCH_PATH: Final = "no_such_path"

STAGES: Final = (
    ("placed", (P.RESERVED, P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED)),
    ("bound", (P.BOUND, P.STARTING, P.RUNNING, P.READY, P.SERVING, P.FINISHED)),
    ("started", (P.RUNNING, P.READY, P.SERVING, P.FINISHED)),
    ("ready", (P.READY, P.SERVING)),
    ("serving", (P.SERVING,)),
)  # fmt: skip
"""Stages of a replica, each with the phases that have reached it. A replica is counted in every stage that it has reached."""

RUNNING_PHASES: Final = (P.RUNNING, P.READY, P.SERVING)


async def load_progress(api: Api, name: str, tenant: str) -> WorkloadProgressItem | None:
    """Return the progress of one workload; None if it does not exist."""
    with _supported():
        try:
            return await api.workload_progress(name, tenant=tenant)
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            return None


async def list_progress(api: Api, tenant: str) -> Sequence[WorkloadProgressItem]:
    """Return the progress of all workloads of a tenant, or of all tenants."""
    with _supported():
        return (await api.list_workload_progress(tenant=tenant)).items


@contextmanager
def _supported() -> Iterator[None]:
    """Report a server that cannot compute progress."""
    try:
        yield
    except ApiError as error:
        if error.code != NO_SUCH_PATH:
            raise
        raise CommandError(
            "this server is older than this command and does not report the progress of workloads", "upgrade the server"
        ) from error


def format_stages(progress: WorkloadProgressItem) -> str:
    """Format the stages as `serving 4, queued 2`, the furthest first."""
    return ", ".join(f"{name} {count:,}" for name, count in reversed(list(progress.stages.items()))) or "none"


def format_limit(progress: WorkloadProgressItem) -> str:
    """Format the limit as `CODE: DETAIL`; empty if nothing limits the workload."""
    limit = progress.limit
    return ": ".join(part for part in (limit.code, limit.detail) if part) if limit.code else ""


def count_in(progress: WorkloadProgressItem, *phases: Phase) -> int:
    """Return how many replicas are in these phases. Completed replicas count as finished."""
    names = [QUEUED if phase is P.PENDING else phase.value for phase in phases if phase is not P.FINISHED]
    return sum(progress.stages.get(name, 0) for name in names) + (_finished(progress) if P.FINISHED in phases else 0)


def _finished(progress: WorkloadProgressItem) -> int:
    return max(progress.done, progress.stages.get(P.FINISHED.value, 0))


def funnel(progress: WorkloadProgressItem, kind: str) -> list[tuple[str, int]]:
    """Return how many replicas were created and have reached each stage. Completed replicas are included, although they may be
    released.
    """
    present = sum(count for name, count in progress.stages.items() if name not in (P.FINISHED.value, DONE))
    stages = [(name, count_in(progress, *phases)) for name, phases in STAGES]
    if kind == "job":
        stages = [*stages[:3], (DONE, progress.done)]
    return [("created", present + _finished(progress)), *stages]


def format_funnel(stages: Sequence[tuple[str, int]]) -> str:
    """Format a funnel as `created 6, started 4, serving 0`. Of stages with equal counts only the furthest is shown."""
    named = [one for one, after in zip(stages, [*stages[1:], ("", -1)], strict=True) if one[1] != after[1]]
    return ", ".join(f"{name} {count:,}" for name, count in named)


def is_rolled_out(workload: Workload) -> bool:
    """Check whether controllers report the current generation as rolled out."""
    progressing = condition_of(workload.status.conditions, "Progressing")
    return (
        progressing is not None
        and progressing.reason == ROLLED_OUT
        and progressing.observed_generation == workload.metadata.generation
    )
