"""Progress of a workload: counts per stage, and the stage that limits it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remit.law.workload_rules import STAGE_REASONS, progress
from remit.model.records import Phase

PHASES = st.lists(st.sampled_from(list(Phase)), max_size=12)


@given(PHASES, st.integers(0, 12))
def test_every_replica_counts_at_exactly_one_stage(phases: list[Phase], desired: int) -> None:
    found = progress("service", desired, phases)
    counts = {stage: count for stage, count in found._asdict().items() if stage not in ("admitted", "limit")}
    assert sum(counts.values()) == len(phases)
    assert found.admitted == max(0, desired - sum(phase is not Phase.RELEASED for phase in phases))


def test_limit_is_earliest_stage_with_replicas() -> None:
    steps = [
        ([], "Creating"),
        (["pending", "serving"], "Queued"),
        (["reserved", "serving"], "WaitsForRoom"),
        (["bound", "serving"], "NotStarted"),
        (["starting", "bound"], "NotStarted"),
        (["running", "unknown"], "NodeSilent"),
        (["running", "serving"], "NotReady"),
        (["ready", "serving"], "NotServed"),
        (["serving", "serving"], ""),
    ]
    for phases, limit in steps:
        assert progress("service", 2, [Phase(phase) for phase in phases]).limit == limit, phases


def test_running_job_has_no_limit_and_finished_replicas_count() -> None:
    found = progress("job", 3, [Phase.RUNNING, Phase.RELEASED, Phase.FINISHED])
    assert (found.admitted, found.running, found.released, found.finished, found.limit) == (0, 1, 1, 1, "")


def test_stage_reasons_are_unique_camel_case_words() -> None:
    assert all(word.isalnum() and word[0].isupper() for word in STAGE_REASONS.values())
    assert len(set(STAGE_REASONS.values())) == len(STAGE_REASONS)
