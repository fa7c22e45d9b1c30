"""Does a server stay upright whatever bodies it is sent? Thousands of spoilt ones over HTTP, at every door, by everybody.

    python -m tests.integration.attacks.fuzz_bodies --bodies 20000 --seed 7

Each must be answered within ten seconds and never with a 500; what is accepted must be JSON that means one thing. The last line
of output is JSON. No test is in here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from remit.model.wire.agent_messages import NodeHeartbeat, NodeState, RunState, SecretMaterialRequest
from remit.model.wire.exec_frames import MEDIA_TYPE, ExecFrameType, ExecStart, encode_frame
from remit.serve.http.openapi import EXAMPLE_MANIFESTS
from tests.integration.attacks.attack_server import Stage
from tests.integration.attacks.fuzz_decoders import _encode
from tests.integration.attacks.mutations import mutated
from tests.unit.serve.in_memory_server import node, secret, tenant, workload

ANSWER_S_MAX: Final = 10.0
GROWTH_MIB_MAX: Final = 200
"""Some of it is accepted and kept, and what remembers fills up: it levelled off at 135 MiB, from 25,000 bodies to 50,000."""
MERGE: Final = "application/merge-patch+json"
FOLLOW: Final = "/v1/follow"
LENIENT: Final = ("/v1/ask", FOLLOW)
"""What is said here is read once, and what was read is both judged and done: there is no second reader who could differ."""
COLLECTIONS: Final = {"Policy": "policies", "PriorityClass": "priorityclasses"}


class Door(NamedTuple):
    """Where something is sent, by whom, and what would be good there."""

    who: str
    method: str
    path: str
    good: bytes
    media: str = "application/json"


def doors(stage: Stage) -> list[Door]:
    mine = "/v1/tenants/acme"
    found = [
        Door("member", "POST", f"{mine}/workloads", _json(workload("fuzzed"))),
        Door("member", "PUT", f"{mine}/workloads/fuzzed", _json(_rich())),
        Door(
            "member", "PATCH", f"{mine}/workloads/web", _json({"spec": {"replicas": 2, "template": {"env": {"A": "b"}}}}), MERGE
        ),
        Door("member", "POST", f"{mine}/secrets", _json(secret("fuzzed", password="x"))),
        Door("member", "PATCH", f"{mine}/secrets/db", _json({"spec": {"data": {"password": "new"}}}), MERGE),
        Door("member", "POST", "/v1/apply", _json([workload("a1"), secret("s1", a="b")])),
        Door("member", "POST", "/v1/apply", b"\n".join(_json(workload(f"l{number}")) for number in range(3))),
        Door("member", "POST", "/v1/plan", _json([workload("a1", replicas=3)])),
        Door("member", "POST", "/v1/capacity", _json(_rich())),
        Door(
            "member", "POST", f"{mine}/replicas/web-0/exec", encode_frame(ExecFrameType.START, ExecStart(("id",))), MEDIA_TYPE
        ),
        Door("admin", "POST", "/v1/apply", _json([node("f1"), tenant("fuzzed")])),
        Door("join", "POST", "/v1/join", _json({"digest": "0" * 64, "nodes": ["f1"], "request": ""})),
    ]
    for kind, manifest in EXAMPLE_MANIFESTS.items():
        if "tenant" not in manifest["metadata"]:
            found.append(Door("admin", "POST", f"/v1/{COLLECTIONS.get(kind, kind.lower() + 's')}", _json(manifest)))
    return found + components(stage)


def components(stage: Stage) -> list[Door]:
    me = stage.actors["n2"]
    operation = json.loads(_encode(stage.operation(me, _move(stage))))
    call: dict[str, Any] = {"type": "call"}
    beat = NodeHeartbeat(me, NodeState("n2", runs=(RunState("replica/acme/web-0", stage.uid, 1),)))
    said: list[tuple[str, str, Any]] = [
        ("agent", "/v1/ask", {**call, "operations": [operation]}),
        ("agent", "/v1/ask", {**call, "beats": [json.loads(_encode(beat))]}),
        ("agent", "/v1/ask", {**call, "renew": json.loads(_encode(me))}),
        ("agent", "/v1/ask", json.loads(_encode(SecretMaterialRequest(me, "replica/acme/web-0", stage.uid, 1)))),
        ("agent", FOLLOW, {"type": "orders", "nodes": ["n2"], "callback": "c" * 32}),
        ("scheduler", "/v1/ask", {"type": "range", "prefix": "node/", "limit": 10, "revision": 0}),
        ("scheduler", "/v1/claims", {"operations": [operation]}),
        ("scheduler", FOLLOW, {"type": "rows", "prefix": "node/", "after": 1}),
        ("agent", "/v1/renew", {"request": ""}),
    ]
    return [Door(who, "POST", path, _json(body)) for who, path, body in said]


def _move(stage: Stage) -> Any:
    from remit.model.claims import Move

    return Move("replica/acme/web-0", 1, "start", attempt=1)


def _rich() -> dict[str, Any]:
    return {**EXAMPLE_MANIFESTS["Workload"], "metadata": {"name": "fuzzed", "tenant": "acme"}}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass
class Fuzzed:
    """What came of it."""

    bodies: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    worst_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def told(self, grown_mib: float, seed: int) -> dict[str, Any]:
        spread = {str(status): count for status, count in sorted(self.statuses.items())}
        accepted = sum(count for status, count in self.statuses.items() if status < 300)
        return {
            "bodies": self.bodies, "seed": seed, "faults": self.statuses[500], "accepted": accepted, "statuses": spread,
            "worst_ms": round(self.worst_s * 1000), "grown_mib": round(grown_mib, 1),
            "violations": len(self.wrong), "wrong": self.wrong[:5],
        }  # fmt: skip


class Fuzzer:
    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage, self._chance = stage, random.Random(seed)
        tokens = {"admin": stage.server.token, "agent": stage.tokens["host2"], "scheduler": stage.tokens["planner"]}
        self._tokens = {
            **tokens,
            "member": stage.token("fuzz-member", "member", tenant="acme"),
            "join": stage.token("fuzz-join", "join", nodes=["f1"]),
        }
        self._doors = doors(stage)
        self._good = [door.good for door in self._doors]
        self._connection: http.client.HTTPConnection | None = None
        self.found = Fuzzed()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def run(self, bodies: int) -> Fuzzed:
        for _ in range(bodies):
            door = self._chance.choice(self._doors)
            self._send(door, mutated(self._chance, door.good, self._good))
            if len(self.found.wrong) >= 5 or self._stage.server.process.poll() is not None:
                self.found.wrong.append(f"the server is {'dead' if self._stage.server.process.poll() is not None else 'alive'}")
                break
        return self.found

    def _send(self, door: Door, body: bytes) -> None:
        found, began = self.found, time.monotonic()
        found.bodies += 1
        try:
            status, told = self._asked(door, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            status, told = 0, repr(error).encode()
            if isinstance(error, TimeoutError):
                found.wrong.append(f"{door.method} {door.path}: no answer to {body[:300]!r}")
        took_s = time.monotonic() - began
        found.statuses[status] += 1
        found.worst_s = max(found.worst_s, took_s)
        if status == 500 or took_s > ANSWER_S_MAX or (status == 0 and len(body) < 1 << 16):
            found.wrong.append(f"{door.method} {door.path}: {status} after {took_s:.1f} s, {told[:300]!r}: {body[:1_000]!r}")
        elif status < 300 and door.path not in LENIENT and door.media != MEDIA_TYPE and not _means_one_thing(body):
            found.wrong.append(f"{door.method} {door.path}: {status} for {body[:1_000]!r}")

    def _asked(self, door: Door, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._stage.server.connect()
        connection = self._connection
        headers = {"Authorization": f"Bearer {self._tokens[door.who]}", "Content-Type": door.media}
        connection.request(door.method, door.path, body, headers)
        reply = connection.getresponse()
        endless = reply.status == 200 and (door.path == FOLLOW or door.media == MEDIA_TYPE)
        told = b"" if endless else reply.read()
        if endless:
            reply.close()
        if endless or reply.getheader("connection") == "close":
            self.close()
        return reply.status, told


def _means_one_thing(body: bytes) -> bool:
    """Is it JSON, one value or one a line, without a key twice?"""
    try:
        for piece in _values(body):
            json.loads(piece, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return False
    return True


def _values(body: bytes) -> Iterator[str]:
    text, at, decoder = body.decode().strip(), 0, json.JSONDecoder()
    while at < len(text):
        _, end = decoder.raw_decode(text, at)
        yield text[at:end]
        at = end + len(text[end:]) - len(text[end:].lstrip())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def fuzz(stage: Stage, bodies: int, seed: int) -> dict[str, Any]:
    before = stage.rss_mib()
    fuzzer = Fuzzer(stage, seed)
    found = fuzzer.run(bodies)
    fuzzer.close()
    grown = stage.rss_mib() - before
    if grown > GROWTH_MIB_MAX:
        found.wrong.append(f"it grew by {grown:.0f} MiB")
    if stage.server.ask("GET", "/readyz").status != 200:
        found.wrong.append("it is not ready any more")
    return found.told(grown, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send a server bodies that were spoilt.")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remit-fuzz-") as scratch:
        stage = Stage(Path(scratch) / "data")
        try:
            found = fuzz(stage, options.bodies, options.seed)
        finally:
            stage.server.process.kill()
    print(json.dumps(found))
    return int(found["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
