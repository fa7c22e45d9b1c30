"""Ledger sums maintained per commit equal sums recomputed from the rows, over random histories, lawful or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.simulate.checkers.judge import Judge
from remit.simulate.checkers.reference.ledger_sums import SumMismatch
from remit.simulate.checkers.reference.lifecycle import lost_after_ms
from remit.simulate.checkers.reference.rows import amount, milliseconds, quantity
from tests.unit.simulate.checkers.history_builder import HistoryBuilder, generation_key, node, replica, tenant

PHASES = ("pending", "reserved", "bound", "running", "draining", "unknown", "failed", "released", "gone")
CHANGE = st.tuples(st.integers(0, 5), st.sampled_from(PHASES), st.integers(0, 2), st.integers(1, 2), st.integers(0, 5))
OTHER = st.sampled_from(("node", "tenant", "grant", "closed", "generation", "nothing"))


def row_of(index: int, phase: str, at: int, generation: int, victim: int) -> Any:
    if phase == "gone":
        return None
    if phase in ("pending", "released"):
        return replica("w", index, uid=f"u{index}", generation=generation, phase=phase)
    more: dict[str, Any] = {"devices": {f"gpu-{at}": 500}} if at else {}
    if phase == "reserved":
        more["victims"] = {f"replica/t1/w-{victim}": f"u{victim}/1"}
    grants = ["tenant/t1", "g"][: at + 1] if at < 2 else ["g"]
    return replica(
        "w", index, uid=f"u{index}", generation=generation, phase=phase, node=f"n{at % 2 + 1}", grants=grants, **more
    )


def other_row(which: str, seed: int) -> dict[str, Any]:
    match which:
        case "node":
            return {"node/n1": node("n1", capacity={"cpu": str(seed + 1)})}
        case "tenant":
            return {"tenant/t1": tenant("t1", str(seed + 1))}
        case "grant" | "closed":
            spec = {"holder": "x", "amount": {"cpu": str(seed + 2)}, "parent": "tenant/t1", "shares": {"t1": {"cpu": "1"}}}
            status = {"returned": {"cpu": str(seed + 2)}, "phase": "closed"} if which == "closed" else {}
            return {"grant/g": {"spec": {**spec, "purpose": "budget", "ttl": "1h"}, "status": status}}
        case "generation":
            spec = {"type": "service", "template": {"command": ["x"], "resources": {"cpu": f"{seed + 1}00m", "memory": "1Mi"}}}
            return {generation_key("w", 1): {"spec": {"workload": "w", "generation": 1, "labels": {}, "spec": spec}}}
        case _:
            return {}


@given(st.lists(st.tuples(st.lists(CHANGE, max_size=3), OTHER, st.integers(0, 5)), max_size=20))
def test_incremental_sums_equal_recomputed_sums(steps: list[tuple[list[Any], str, int]]) -> None:
    h = HistoryBuilder().prepare()
    h.declare("w", 2, template={"command": ["x"], "resources": {"cpu": "250m"}})
    tracked = h.world.judge.history("r1")
    for changes, which, seed in steps:
        rows = {f"replica/t1/w-{change[0]}": row_of(*change) for change in changes}
        h.commit({**{k: r for k, r in rows.items() if r or k in h.rows}, **other_row(which, seed)}, [])
        tracked.sums.compare(tracked.rows)
        active = [r for k, r in h.rows.items() if k.startswith("replica/") and r["status"]["phase"] != "released"]
        assert tracked.active.get(("t1", "w"), 0) == len(active)


def test_miscounted_sum_raises_mismatch() -> None:
    h = HistoryBuilder().prepare()
    (a,) = h.spawn(0)
    h.bind(a)
    h.world.judge.history("r1").sums.nodes["n1", "cpu"] += 1
    with pytest.raises(SumMismatch, match="nodes"):
        h.world.judge.conclude()


def test_sums_are_recomputed_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.simulate.checkers.judge.RECOUNT_EVERY", 5)
    h = HistoryBuilder().prepare()
    h.world.judge.history("r1").sums.used["tenant/t1", "cpu"] = 1
    with pytest.raises(SumMismatch, match="used"):
        for _ in range(5):
            h.commit({}, [])


def test_judge_without_events_reports_nothing_but_undecided_liveness() -> None:
    judge = Judge(lambda: 0)
    judge.conclude()
    assert judge.violations == [] and judge.undecided == ["liveness: the run ended before its faults did"]


def test_quantities_and_durations_parse_exactly() -> None:
    assert quantity("cpu", "500m") == 500 and quantity("cpu", 1.5) == 1500 and quantity("share", "1e-1") == 100
    assert quantity("memory", "8Gi") == 8 << 30 and quantity("memory", "7Ei") == 7 << 60
    assert amount({"cpu": "2", "devices": {"gpu": 1}}) == {"cpu": 2000, "devices/gpu": 1000} and amount(None) == {}
    assert [milliseconds(text) for text in ("1h30m", "250ms", "1.5s", "0s")] == [5_400_000, 250, 1_500, 0]
    assert lost_after_ms(True, 300_000) == 308_050 and lost_after_ms(False, 300_000) == 30_000
