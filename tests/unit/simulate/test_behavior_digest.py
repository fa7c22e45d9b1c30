"""Behaviour digests ignore texts for people and empty fields, and nothing else."""

from __future__ import annotations

import msgspec

from remit.simulate.behavior_digest import BehaviorDigest

ROW = {"spec": {"replicas": 2}, "status": {"conditions": [{"type": "Ready", "reason": "Starting", "message": "1 of 2 ready"}]}}


def digest(key: str, value: object, at_s: float = 1.0) -> str:
    found = BehaviorDigest()
    found.commit(at_s, "local", 7, [(key, msgspec.json.encode(value))], [])
    return found.hexdigest()


def test_reworded_message_and_new_empty_field_keep_the_digest() -> None:
    reworded = {
        "spec": {"replicas": 2, "schedule": ""},
        "status": {"conditions": [{"type": "Ready", "reason": "Starting", "message": "one replica is ready", "since": None}]},
    }
    assert digest("workload/a/b", ROW) == digest("workload/a/b", reworded)


def test_changed_field_key_or_time_changes_the_digest() -> None:
    changed = {**ROW, "spec": {"replicas": 3}}
    digests = [digest("workload/a/b", ROW), digest("workload/a/b", changed), digest("workload/a/c", ROW)]
    assert len({*digests, digest("workload/a/b", ROW, at_s=1.5)}) == 4


def test_batch_row_keeps_code_and_drops_payload_digest_and_detail() -> None:
    def batch(code: str, payload: str, detail: str) -> object:
        entry = ["id", payload, "bind", "replica/a", "who", "role", "lease", 1, 2, 3, 0, code, detail, "trace"]
        return {"epoch": 1, "entries": [entry]}

    assert digest("batch/1", batch("no_room", "aa", "no room")) == digest("batch/1", batch("no_room", "bb", "not enough cpu"))
    assert digest("batch/1", batch("no_room", "aa", "")) != digest("batch/1", batch("over_quota", "aa", ""))
