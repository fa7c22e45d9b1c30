"""Decision records: what the scheduler saw, in bounded size."""

from __future__ import annotations

import msgspec

from remit.proposal.placement.kernel import Kernel
from remit.proposal.proposals import MEMBERS_MAX, SURVEY_AGE_MS_MAX, DecisionOutcome, DecisionRecorder, nearest_node
from remit.proposal.quota import quota_source
from tests.unit.observation.row_fixtures import ViewFixture, ready, replica, tenant, work

BYTES_MAX = 64 << 10


def scene(count: int = 1) -> tuple[ViewFixture, DecisionRecorder, Kernel]:
    made = work("a", replicas=max(count, 3))
    t = ViewFixture(ready("n1"), ready("n2", "1"), tenant("t1", "7"), *made, *(replica("a", i) for i in range(count)))
    return t, DecisionRecorder(t.view, "s-1"), Kernel(t.view.columns, t.view.peers)


def test_record_contains_survey_and_remaining_quota() -> None:
    t, decisions, kernel = scene()
    one = kernel.class_for("a", t.view.shapes.requirements_of(t.shape("a")))
    seen = decisions.survey(kernel, one, 0)
    made = decisions.records(
        "t1",
        {t.slot("a-0"): "n1"},
        DecisionOutcome("bound"),
        attempt=2,
        quota_source=quota_source(t.view, "t1", 0),
        survey=seen,
    )
    decision = made[0].decision
    assert (decision.replicas, decision.verdict, decision.attempt) == ({"t1/a-0": "n1"}, "bound", 2)
    assert (decision.nodes, decision.fits, decision.grant, decision.left["cpu"]) == (2, 2, "tenant/t1", 7000)
    assert [candidate.node for candidate in decision.candidates] == ["n1", "n2"]


def test_many_equal_replicas_make_few_small_records() -> None:
    t, decisions, _ = scene(3 * MEMBERS_MAX + 1)
    made = decisions.records(
        "t1", [t.slot(f"a-{i}") for i in range(3 * MEMBERS_MAX + 1)], DecisionOutcome("waiting"), attempt=1
    )
    assert [len(one.decision.replicas) for one in made] == [MEMBERS_MAX, MEMBERS_MAX, MEMBERS_MAX, 1]
    assert len({one.name for one in made}) == 4
    assert max(len(msgspec.json.encode(one)) for one in made) < BYTES_MAX


def test_survey_is_cached_unless_old_or_refreshed() -> None:
    t, decisions, kernel = scene()
    one = kernel.class_for("a", t.view.shapes.requirements_of(t.shape("a")))
    first = decisions.survey(kernel, one, 0)
    t.apply(replica("a", phase="bound", on="n2"))
    assert decisions.survey(kernel, one, SURVEY_AGE_MS_MAX) is first
    assert decisions.survey(kernel, one, SURVEY_AGE_MS_MAX, refresh=True).funnel.fits == 1
    assert decisions.survey(kernel, one, 3 * SURVEY_AGE_MS_MAX).revision == t.view.revision


def test_survey_is_stored_with_its_class() -> None:
    """Otherwise records would keep thousands of classes alive that the kernel has dropped."""
    t, decisions, kernel = scene()
    one = kernel.class_for("a", t.view.shapes.requirements_of(t.shape("a")))
    decisions.survey(kernel, one, 0)
    assert one.survey is not None
    assert not any(value for value in vars(decisions).values() if isinstance(value, dict))


def test_record_names_of_two_terms_differ() -> None:
    t, decisions, _ = scene()
    later = DecisionRecorder(t.view, "s-2")
    slots = [t.slot("a-0")]
    names = [each.records("t1", slots, DecisionOutcome("waiting"), attempt=0)[0].name for each in (decisions, decisions, later)]
    assert len(set(names)) == 3


def test_nearest_node_is_named_with_refusing_filter() -> None:
    t, _, kernel = scene()
    t.apply(*work("big", "5"))
    found = nearest_node(kernel, kernel.class_for("big", t.view.shapes.requirements_of(t.shape("big"))))
    assert found is not None
    assert (found.node, found.refused, found.lacks) == ("n1", ("resources",), {"cpu": 1000})
