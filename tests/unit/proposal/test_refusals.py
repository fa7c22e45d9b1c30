"""Repeated refusals: the scheduler backs off, even if its own claims cause wake-ups."""

from __future__ import annotations

from collections import Counter

from remit.model.claims import Code, RecordDecision, Refused
from tests.unit.proposal.scheduler_fixture import CycleFixture, binds, create_pending, cycle_test, quota

STEP_MS = 20
MINUTE_MS = 60_000
TRIES_MAX = 14
"""Attempts of one queue in a minute: at once, again, then after 0.2 s, doubling up to 20 s; jitter may halve each."""


async def refuse_all(m: CycleFixture, for_ms: int) -> Counter[str]:
    """Count the claims by replica when every bind is refused for a reason that the view cannot see."""
    claimed: Counter[str] = Counter()
    await m.sync()
    until_ms = m.now_ms + for_ms
    while m.now_ms < until_ms:
        made = m.propose()
        claimed.update(list(binds(made)))
        verdicts = await m.ask(made) if not binds(made) else [_refusal(m) for _ in made.claims]
        m.deliver(made, verdicts)
        m.notify()
        m.scope.clock.at_ms += STEP_MS
    return claimed


def _refusal(m: CycleFixture) -> Refused:
    return Refused(Code.POLICY_LAPSED, "its policy is past its lease", m.view.revision)


@cycle_test
async def test_partly_refused_queue_backs_off_while_rest_waits(m: CycleFixture) -> None:
    """F32: a refused bind returns what it had assumed, which the rest waits for; that must not cause useless wake-ups."""
    await quota(m.scope, "t1", cpu="1")
    await create_pending(m.scope, "a", 3)
    claimed = await refuse_all(m, MINUTE_MS)
    assert 3 <= claimed.total() <= TRIES_MAX


@cycle_test
async def test_queues_refused_alternately_do_not_wake_each_other_forever(m: CycleFixture) -> None:
    """F32: each takes the capacity that the other has just returned."""
    await quota(m.scope, "t1", cpu="1")
    await create_pending(m.scope, "a", 1)
    await create_pending(m.scope, "b", 1, "750m")
    claimed = await refuse_all(m, MINUTE_MS)
    assert claimed["a-0"] and claimed["b-0"]
    assert claimed.total() <= 2 * TRIES_MAX


@cycle_test
async def test_queue_refused_long_ago_starts_without_backoff(m: CycleFixture) -> None:
    await create_pending(m.scope, "a", 1)
    await refuse_all(m, MINUTE_MS)
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None and line.failures > 3
    await m.settle()
    assert m.where("a-")


@cycle_test
async def test_reasons_of_queue_are_recorded_while_its_head_is_refused(m: CycleFixture) -> None:
    """F32: a batch takes only the head, which the authority refuses; the others of the queue are never tried."""
    await create_pending(m.scope, "a", 3)
    await m.sync()
    began_ms = m.now_ms
    m.limit = 1
    recorded_ms = dict.fromkeys(("t1/a-0", "t1/a-1", "t1/a-2"), began_ms)
    worst_ms = dict.fromkeys(recorded_ms, 0)
    while m.now_ms < began_ms + 4 * MINUTE_MS:
        made = m.propose()
        named = [name for claim in made.claims if isinstance(claim, RecordDecision) for name in claim.decision.replicas]
        recorded_ms |= dict.fromkeys(named, m.now_ms)
        worst_ms = {name: max(worst_ms[name], m.now_ms - recorded_ms[name]) for name in recorded_ms}
        m.deliver(made, await m.ask(made) if not binds(made) else [_refusal(m) for _ in made.claims])
        m.notify()
        m.scope.clock.at_ms += 10 * STEP_MS
    assert m.now_ms - recorded_ms["t1/a-0"] < MINUTE_MS, "the head is tried"
    assert max(worst_ms.values()) < MINUTE_MS, worst_ms
