"""Does a scheduler that is refused again and again ask less and less often? Whatever else its claims set in motion."""

from __future__ import annotations

from collections import Counter

from remit.model.claims import Code, RecordDecision, Refused
from tests.unit.proposal.scheduler_fixture import Mind, binds, minds, quota, want

STEP_MS = 20
MINUTE_MS = 60_000
TRIES_MAX = 14
"""Of one line in a minute: at once again, then after 0.2 s, twice that, and so on up to 20 s; half of it if the lot says so."""


async def refuse_all(m: Mind, for_ms: int) -> Counter[str]:
    """How often each was claimed, if every bind is refused for what the view cannot see, at what it has seen."""
    asked: Counter[str] = Counter()
    await m.see()
    until_ms = m.now_ms + for_ms
    while m.now_ms < until_ms:
        made = m.propose()
        asked.update(list(binds(made)))
        verdicts = await m.ask(made) if not binds(made) else [_refusal(m) for _ in made.claims]
        m.learn(made, verdicts)
        m.hear()
        m.scope.clock.at_ms += STEP_MS
    return asked


def _refusal(m: Mind) -> Refused:
    return Refused(Code.POLICY_LAPSED, "its policy is past its lease", m.view.revision)


@minds
async def test_part_of_a_line_is_refused_while_the_rest_waits(m: Mind) -> None:
    """F32: what is refused gives back what it had assumed, which is what the rest waits for; that wakes nobody for nothing."""
    await quota(m.scope, "t1", cpu="1")
    await want(m.scope, "a", 3)
    asked = await refuse_all(m, MINUTE_MS)
    assert 3 <= asked.total() <= TRIES_MAX


@minds
async def test_lines_that_are_refused_in_turn_do_not_wake_each_other_for_ever(m: Mind) -> None:
    """F32: each takes what the other has just given back."""
    await quota(m.scope, "t1", cpu="1")
    await want(m.scope, "a", 1)
    await want(m.scope, "b", 1, "750m")
    asked = await refuse_all(m, MINUTE_MS)
    assert asked["a-0"] and asked["b-0"]
    assert asked.total() <= 2 * TRIES_MAX


@minds
async def test_whoever_was_refused_long_ago_begins_anew(m: Mind) -> None:
    await want(m.scope, "a", 1)
    await refuse_all(m, MINUTE_MS)
    line = m.cycle.backlog.queue_of(m.slot("a-0"))
    assert line is not None and line.failures > 3
    await m.settle()
    assert m.where("a-")


@minds
async def test_the_first_of_a_line_is_refused_again_and_again__those_behind_it_are_told_as_well(m: Mind) -> None:
    """F32: a batch takes the first alone, and the authority does not have it; nobody else of the line is ever tried."""
    await want(m.scope, "a", 3)
    await m.see()
    began_ms = m.now_ms
    m.limit = 1
    told = dict.fromkeys(("t1/a-0", "t1/a-1", "t1/a-2"), began_ms)
    worst_ms = dict.fromkeys(told, 0)
    while m.now_ms < began_ms + 4 * MINUTE_MS:
        made = m.propose()
        named = [name for claim in made.claims if isinstance(claim, RecordDecision) for name in claim.decision.replicas]
        told |= dict.fromkeys(named, m.now_ms)
        worst_ms = {name: max(worst_ms[name], m.now_ms - told[name]) for name in told}
        m.learn(made, await m.ask(made) if not binds(made) else [_refusal(m) for _ in made.claims])
        m.hear()
        m.scope.clock.at_ms += 10 * STEP_MS
    assert m.now_ms - told["t1/a-0"] < MINUTE_MS, "somebody is tried"
    assert max(worst_ms.values()) < MINUTE_MS, worst_ms
