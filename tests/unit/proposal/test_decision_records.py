"""Is what is recorded of a decision what was seen, and never too much of it?"""

from __future__ import annotations

import msgspec

from remit.proposal.placement.kernel import Kernel
from remit.proposal.proposals import MEMBERS_MAX, SURVEY_AGE_MS_MAX, DecisionOutcome, DecisionRecorder, nearest_node
from remit.proposal.quota import quota_source
from tests.unit.observation.row_fixtures import Told, ready, replica, tenant, work

BYTES_MAX = 64 << 10


def scene(count: int = 1) -> tuple[Told, DecisionRecorder, Kernel]:
    made = work("a", replicas=max(count, 3))
    t = Told(ready("n1"), ready("n2", "1"), tenant("t1", "7"), *made, *(replica("a", i) for i in range(count)))
    return t, DecisionRecorder(t.view, "s-1"), Kernel(t.view.columns, t.view.peers)


def test_a_record_says_what_was_seen_and_what_was_left() -> None:
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
    said = made[0].decision
    assert (said.replicas, said.verdict, said.attempt) == ({"t1/a-0": "n1"}, "bound", 2)
    assert (said.nodes, said.fits, said.grant, said.left["cpu"]) == (2, 2, "tenant/t1", 7000)
    assert [candidate.node for candidate in said.candidates] == ["n1", "n2"]


def test_many_equal_ones_make_a_few_records_and_each_is_small() -> None:
    t, decisions, _ = scene(3 * MEMBERS_MAX + 1)
    made = decisions.records(
        "t1", [t.slot(f"a-{i}") for i in range(3 * MEMBERS_MAX + 1)], DecisionOutcome("waiting"), attempt=1
    )
    assert [len(one.decision.replicas) for one in made] == [MEMBERS_MAX, MEMBERS_MAX, MEMBERS_MAX, 1]
    assert len({one.name for one in made}) == 4
    assert max(len(msgspec.json.encode(one)) for one in made) < BYTES_MAX


def test_the_funnel_is_found_once_in_a_while_unless_it_is_wanted_anew() -> None:
    t, decisions, kernel = scene()
    one = kernel.class_for("a", t.view.shapes.requirements_of(t.shape("a")))
    first = decisions.survey(kernel, one, 0)
    t.tell(replica("a", phase="bound", on="n2"))
    assert decisions.survey(kernel, one, SURVEY_AGE_MS_MAX) is first
    assert decisions.survey(kernel, one, SURVEY_AGE_MS_MAX, refresh=True).funnel.fits == 1
    assert decisions.survey(kernel, one, 3 * SURVEY_AGE_MS_MAX).revision == t.view.revision


def test_what_was_found_out_about_a_class_goes_with_it() -> None:
    """Else the numbers of thousands of classes that the kernel has given up would be kept alive by their records."""
    t, decisions, kernel = scene()
    one = kernel.class_for("a", t.view.shapes.requirements_of(t.shape("a")))
    decisions.survey(kernel, one, 0)
    assert one.survey is not None
    assert not any(value for value in vars(decisions).values() if isinstance(value, dict))


def test_names_of_two_terms_differ() -> None:
    t, decisions, _ = scene()
    later = DecisionRecorder(t.view, "s-2")
    slots = [t.slot("a-0")]
    names = [each.records("t1", slots, DecisionOutcome("waiting"), attempt=0)[0].name for each in (decisions, decisions, later)]
    assert len(set(names)) == 3


def test_the_nearest_node_is_named_with_what_refuses_it() -> None:
    t, _, kernel = scene()
    t.tell(*work("big", "5"))
    found = nearest_node(kernel, kernel.class_for("big", t.view.shapes.requirements_of(t.shape("big"))))
    assert found is not None
    assert (found.node, found.refused, found.lacks) == ("n1", ("resources",), {"cpu": 1000})
