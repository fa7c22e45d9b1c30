"""Do repair, endpoints, rollouts and the cascade do what is theirs, and no more? On boards laid out by hand."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.correction.controllers.desired_replicas import DesiredReplicas
from remit.correction.controllers.disruption import PendingEvictions
from remit.correction.controllers.endpoints import EndpointController
from remit.correction.controllers.garbage_collection import GarbageCollector
from remit.correction.controllers.repair import LIMIT_MARGIN_MS, RepairController, retry_backoff_ms
from remit.correction.controllers.rollout import RolloutController
from remit.correction.framework.actions import Action
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.model.claims import Accepted, Close, Code, Delete, Refused
from remit.model.kinds import (
    Config,
    DataSpec,
    Disruption,
    NodeHealth,
    Override,
    OverrideScope,
    OverrideSpec,
    OverrideStatus,
    Rollout,
    Workload,
)
from remit.model.metadata import Deadline, Metadata, Owner, RecordMetadata
from remit.model.records import Grant, GrantPhase, GrantSpec, GrantStatus, Phase, Replica
from remit.model.resources import Amount, Duration
from tests.unit.correction.controller_fixture import Table, ready, replica, short, work

KEY = "workload/t1/w"

# -- repair ------------------------------------------------------------------------------------------------------------------


class Mending:
    """Repair on a board, which it has heard of from the beginning."""

    def __init__(self, *things: Any) -> None:
        self.table = Table()
        self.repair = RepairController(DesiredReplicas(self.table.board), self.table.clock)
        self.table.board.subscribe(self)
        self.table.write(*things)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        self.repair.keys_for(key, old, new)

    def on_commit(self) -> None:
        pass

    def look(self, at: str = KEY) -> list[str]:
        return short(self.table.look(self.repair, at))

    def again_in(self, at: str = KEY) -> int | None:
        return self.table.again_in(self.repair, at)


def test_what_failed_is_released_at_once() -> None:
    assert Mending(replica("w", 0, "failed", "n1")).look("replica/t1/w-0") == ["release w-0"]


def test_a_wait_that_is_over_is_ended_by_the_transition_of_the_table__and_not_before() -> None:
    for phase, transition in (("reserved", "reclaim"), ("bound", "abort"), ("starting", "abort")):
        limit_ms = PHASE_TIMEOUTS[Phase(phase)].limit_ms + LIMIT_MARGIN_MS
        mending = Mending(replica("w", 0, phase, "n1"))
        assert mending.look("replica/t1/w-0") == []
        assert mending.again_in("replica/t1/w-0") == limit_ms
        mending.table.clock.at_ms += limit_ms
        assert mending.look("replica/t1/w-0") == [f"{transition} w-0"], phase


def test_a_wait_counts_from_when_the_phase_was_first_seen__a_new_attempt_counts_anew() -> None:
    mending = Mending(replica("w", 0, "bound", "n1"))
    mending.table.clock.at_ms += 50_000
    mending.table.write(replica("w", 0, "bound", "n1", attempt=2))
    mending.table.clock.at_ms += 50_000
    assert mending.look("replica/t1/w-0") == []


def test_what_runs_and_what_only_waits_for_a_place_is_not_touched() -> None:
    for phase in ("pending", "running", "ready", "serving", "draining", "stopping", "unknown", "finished"):
        mending = Mending(replica("w", 0, phase, "n1"))
        mending.table.clock.at_ms += 10_000_000
        assert mending.look("replica/t1/w-0") == [], phase


def test_what_was_moved_comes_back_at_once__what_crashed_after_a_pause_that_doubles() -> None:
    assert Mending(*work("w", 1), replica("w", 0, "released")).look() == ["requeue w-0"]
    mending = Mending(*work("w", 1), replica("w", 0, "released", failures=3))
    assert mending.look() == []
    assert mending.again_in() == retry_backoff_ms(3) == 4_000
    mending.table.clock.at_ms += 4_000
    assert mending.look() == ["requeue w-0"]


def test_pauses_between_attempts_are_bounded() -> None:
    assert [retry_backoff_ms(n) for n in (0, 1, 2, 3, 7, 1_000)] == [0, 1_000, 2_000, 4_000, 60_000, 60_000]


def test_what_is_not_wanted_any_more_is_not_brought_back() -> None:
    made, first = work("w", 1)
    gone = replace(made, metadata=replace(made.metadata, deleting=True))
    assert Mending(gone, first, replica("w", 0, "released")).look() == []
    assert Mending(*work("w", 0), replica("w", 0, "released")).look() == []
    done = work("w", 1, type_="job")
    assert Mending(*done, replica("w", 0, "released", result="ok")).look() == []


def hold(deadline_ms: int) -> Override:
    spec = OverrideSpec(
        effect="hold-repair", scope=OverrideScope(tenants=("t1",)), ttl=Duration(60_000), reason="looking", author="me"
    )
    status = OverrideStatus(deadline=Deadline(boot="b", at_ms=deadline_ms))
    return Override(metadata=Metadata(name="hold"), spec=spec, status=status)


def test_a_person_may_have_something_left_as_it_is__for_a_while() -> None:
    mending = Mending(*work("w", 1), hold(5_000), replica("w", 0, "failed", "n1"), replica("w", 1, "released"))
    mending.table.authority = ("b", 4_000)
    assert mending.look("replica/t1/w-0") == []
    assert mending.look() == []
    mending.table.authority = ("b", 5_001)
    assert mending.look("replica/t1/w-0") == ["release w-0"]


def grant(at_ms: int | None = 5_000, phase: GrantPhase = GrantPhase.LIVE, **spec: Any) -> Grant:
    deadline = None if at_ms is None else Deadline(boot="b", at_ms=at_ms)
    return Grant(
        metadata=RecordMetadata(name="g"),
        spec=GrantSpec(holder="scheduler", amount=Amount(), ttl=Duration(8_000), **spec),
        status=GrantStatus(phase=phase, deadline=deadline),
    )


def test_a_grant_that_has_run_out_is_closed__and_not_before() -> None:
    mending = Mending(grant())
    mending.table.authority = ("b", 4_000)
    assert mending.look("grant/g") == []
    assert mending.again_in("grant/g") == 1_000 + LIMIT_MARGIN_MS
    mending.table.authority = ("b", 5_000)
    assert mending.look("grant/g") == ["close"]


def test_a_grant_that_does_not_run_out__or_is_anothers__is_left() -> None:
    other = replace(grant(), spec=replace(grant().spec, holder="scope/eu"))
    for one in (grant(None), other, grant(issuer="scope/global")):
        mending = Mending(one)
        mending.table.authority = ("b", 9_000)
        assert mending.look("grant/g") == []


def test_a_grant_that_was_closed_and_is_still_drawn_on_is_asked_about_when_something_of_it_is_free() -> None:
    mending = Mending(grant(phase=GrantPhase.CLOSED), *work("w", 1), replica("w", 0, "serving", "n1", grants=("g",)))
    assert mending.look("grant/g") == ["close"]
    mending.repair.on_verdict("grant/g", Action(Close("g")), Accepted(3))
    assert mending.look("grant/g") == []
    was = replica("w", 0, "serving", "n1", grants=("g",))
    assert "grant/g" in mending.repair.keys_for("replica/t1/w-0", was, replica("w", 0, "released"))
    assert mending.look("grant/g") == ["close"]


def test_a_grant_that_had_not_run_out_is_not_asked_about_for_a_while() -> None:
    mending = Mending(grant())
    mending.table.authority = ("another boot", 9_000)
    assert mending.look("grant/g") == ["close"]
    mending.repair.on_verdict("grant/g", Action(Close("g")), Refused(Code.IN_USE, "not yet"))
    assert mending.look("grant/g") == []
    assert mending.again_in("grant/g") == 2_000 + LIMIT_MARGIN_MS


# -- endpoints ---------------------------------------------------------------------------------------------------------------


def published(*things: Any, at: str = "replica/t1/w-0") -> list[str]:
    table = Table(*things)
    return short(table.look(EndpointController(table.board), at))


def test_what_is_ready_on_a_node_that_is_ready_is_served() -> None:
    assert published(*work("w"), ready("n1"), replica("w", 0, "ready", "n1")) == ["serve w-0"]
    for phase in ("running", "serving", "draining"):
        assert published(*work("w"), ready("n1"), replica("w", 0, phase, "n1")) == [], phase


def test_nothing_is_published_on_a_node_that_is_not_heard_of__nor_of_a_job() -> None:
    assert published(*work("w"), ready("n1", NodeHealth.SUSPECT), replica("w", 0, "ready", "n1")) == []
    assert published(*work("w", type_="job"), ready("n1"), replica("w", 0, "ready", "n1")) == []


def test_what_is_on_a_suspected_node_is_withdrawn_if_others_serve__never_the_last_ones() -> None:
    here = (*work("w"), ready("n1", NodeHealth.SUSPECT), ready("n2"), replica("w", 0, "serving", "n1"))
    assert published(*here, replica("w", 1, "serving", "n2")) == ["unserve w-0"]
    assert published(*here) == []
    assert published(*here, replica("w", 1, "ready", "n2")) == []


def test_a_node_whose_health_changes_is_news_to_what_is_published_there() -> None:
    table = Table(*work("w"), ready("n1"), replica("w", 0, "serving", "n1"), replica("w", 1, "starting", "n1"))
    endpoints = EndpointController(table.board)
    assert endpoints.keys_for("node/n1", ready("n1"), ready("n1", NodeHealth.SUSPECT)) == ("replica/t1/w-0",)
    assert endpoints.keys_for("node/n1", ready("n1"), ready("n1", zone="b")) == ()


def test_each_cause_is_a_deed_of_its_own__the_same_cause_is_the_same_deed() -> None:
    """What somebody undoes again and again is noticed by its name; a node that comes and goes is a new cause each time."""
    table = Table(*work("w"), ready("n1"), replica("w", 0, "ready", "n1"))
    endpoints = EndpointController(table.board)

    def named() -> str:
        (deed,) = (wish for wish in endpoints.reconcile("replica/t1/w-0", table.times()) if isinstance(wish, Action))
        return deed.undo_key

    first = named()
    assert named() == first != ""
    endpoints.keys_for("node/n1", ready("n1", NodeHealth.SUSPECT), ready("n1"))
    assert named() != first


# -- rollouts ----------------------------------------------------------------------------------------------------------------


def rolling(
    ready_new: int, *old: Replica, surge: int = 1, unavailable: int = 0, least: int = 0, type_: str = "service"
) -> Table:
    made, first = work("w", 3, type_=type_)
    spec = replace(
        made.spec,
        template=replace(made.spec.template, command=("new",)),
        rollout=Rollout(max_surge=surge, max_unavailable=unavailable),
        disruption=Disruption(min_available=least),
    )
    new = replace(made, spec=spec, metadata=replace(made.metadata, generation=2))
    fresh = [replica("w", 10 + n, "serving", "n1") for n in range(ready_new)]
    fresh = [replace(one, spec=replace(one.spec, generation=2)) for one in fresh]
    return Table(new, first, ready("n1"), *fresh, *old)


def retired(table: Table) -> list[str]:
    return short(table.look(RolloutController(DesiredReplicas(table.board), PendingEvictions(table.board)), KEY))


def old(*phases: str) -> list[Replica]:
    return [replica("w", n, phase, "n1") for n, phase in enumerate(phases)]


def test_an_old_one_goes_when_a_new_one_is_ready__not_before() -> None:
    assert retired(rolling(0, *old("serving", "serving", "serving"))) == []
    assert retired(rolling(1, *old("serving", "serving", "serving"))) == ["retire w-2"]


def test_old_ones_that_do_nothing_yet_go_at_once() -> None:
    assert retired(rolling(0, *old("serving", "starting", "bound"))) == ["retire w-2", "retire w-1"]


def test_as_many_may_be_missing_as_is_said__and_never_fewer_than_the_least() -> None:
    assert retired(rolling(0, *old("serving", "serving", "serving"), unavailable=2)) == ["retire w-2", "retire w-1"]
    assert retired(rolling(0, *old("serving", "serving", "serving"), unavailable=2, least=3)) == []


def test_jobs_and_what_is_going_are_not_rolled() -> None:
    assert retired(rolling(3, *old("running"), type_="job")) == []
    table = rolling(3, *old("serving"))
    made: Workload = table.board.get(KEY)
    table.write(replace(made, metadata=replace(made.metadata, deleting=True)))
    assert retired(table) == []


def test_what_a_drain_has_asked_to_leave_is_not_spared_a_second_time() -> None:
    table = rolling(1, *old("serving", "serving", "serving"))
    leaving = PendingEvictions(table.board)
    rollouts = RolloutController(DesiredReplicas(table.board), leaving)
    leaving.add(table.board.rows["replica/t1/w-0"])
    assert short(table.look(rollouts, KEY)) == []
    leaving.on_verdict("replica/t1/w-0", None)
    assert short(table.look(rollouts, KEY)) == ["retire w-2"]


def test_changes_of_replicas_are_news_only_while_something_rolls() -> None:
    table = rolling(0, *old("serving"))
    rollouts = RolloutController(DesiredReplicas(table.board), PendingEvictions(table.board))
    (was,), (now,) = old("ready"), old("serving")
    assert rollouts.keys_for("replica/t1/w-0", was, now) == ()
    table.look(rollouts, KEY)
    assert rollouts.keys_for("replica/t1/w-0", was, now) == (KEY,)


# -- the cascade -------------------------------------------------------------------------------------------------------------


def owned(*owners: Owner, **meta: Any) -> Config:
    return Config(metadata=Metadata(name="c", tenant="t1", owners=owners, **meta), spec=DataSpec())


def orphaned(*things: Any) -> list[str]:
    table = Table()
    cascade = GarbageCollector(table.board)

    class Ear:
        def on_change(self, key: str, old: Any, new: Any) -> None:
            cascade.keys_for(key, old, new)

        def on_commit(self) -> None:
            pass

    table.board.subscribe(Ear())
    table.write(*things)
    return [name for key in cascade.all_keys() for name in short(table.look(cascade, key))]


BY_UID = Owner(kind="Workload", name="w", uid="uid-w")


def test_what_has_lost_its_last_owner_goes__an_owner_of_the_same_name_saves_nobody() -> None:
    """F30: by uid, and not by name."""
    assert orphaned(owned(BY_UID)) == ["delete Config c"]
    assert orphaned(owned(BY_UID), work("w")[0]) == []
    made = work("w")[0]
    assert orphaned(owned(BY_UID), replace(made, metadata=replace(made.metadata, uid="another"))) == ["delete Config c"]


def test_one_owner_that_is_left_is_enough() -> None:
    assert orphaned(owned(BY_UID, Owner(kind="Workload", name="v")), work("v")[0]) == []


def test_an_orphan_is_deleted_at_the_revision_at_which_it_was_seen() -> None:
    """S16."""
    table = Table(owned(BY_UID))
    (claim,) = table.look(GarbageCollector(table.board), "config/t1/c")
    assert isinstance(claim, Delete) and claim.expect == 1


def test_what_was_marked_goes_once_nothing_holds_it__workloads_are_cleared_elsewhere() -> None:
    assert orphaned(owned(deleting=True)) == ["delete Config c"]
    assert orphaned(owned(deleting=True, finalizers=("example.com/hold",))) == []
    made = work("w")[0]
    assert orphaned(replace(made, metadata=replace(made.metadata, deleting=True))) == []


def test_the_end_of_an_owner_is_news_to_whom_it_owned() -> None:
    table = Table()
    cascade = GarbageCollector(table.board)
    cascade.keys_for("config/t1/c", None, owned(BY_UID))
    made = work("w")[0]
    assert cascade.keys_for(KEY, made, None) == ("config/t1/c",)
    assert cascade.keys_for(KEY, made, made) == ()
    cascade.keys_for("config/t1/c", owned(BY_UID), None)
    assert cascade.keys_for(KEY, made, None) == ()
