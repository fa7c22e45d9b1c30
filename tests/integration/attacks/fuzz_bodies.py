"""Fuzzes request bodies: thousands of mutated ones over HTTP, on every route, as every role.

python -m tests.integration.attacks.fuzz_bodies --bodies 20000 --seed 7

Each must be answered within ten seconds and never with a 500; an accepted one must be unambiguous JSON. The last line of output
is JSON. Contains no tests.
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
from tests.integration.attacks.attack_server import AttackedServer
from tests.integration.attacks.fuzz_decoders import _encode
from tests.integration.attacks.mutations import mutated
from tests.unit.serve.in_memory_server import node, secret, tenant, workload

ANSWER_S_MAX: Final = 10.0
GROWTH_MIB_MAX: Final = 200
"""Some bodies are accepted and stored, and caches fill: memory levelled off at 135 MiB, from 25,000 bodies to 50,000."""
MERGE: Final = "application/merge-patch+json"
FOLLOW: Final = "/v1/follow"
LENIENT: Final = ("/v1/ask", FOLLOW)
"""Bodies here are parsed once, and the same value is judged and executed: no second parser could differ."""
COLLECTIONS: Final = {"Policy": "policies", "PriorityClass": "priorityclasses"}


class Route(NamedTuple):
    """Where a body is sent, as which role, and a valid body."""

    role: str
    method: str
    path: str
    good: bytes
    media: str = "application/json"


def routes(target: AttackedServer) -> list[Route]:
    mine = "/v1/tenants/acme"
    found = [
        Route("member", "POST", f"{mine}/workloads", _json(workload("fuzzed"))),
        Route("member", "PUT", f"{mine}/workloads/fuzzed", _json(_rich())),
        Route(
            "member", "PATCH", f"{mine}/workloads/web", _json({"spec": {"replicas": 2, "template": {"env": {"A": "b"}}}}), MERGE
        ),
        Route("member", "POST", f"{mine}/secrets", _json(secret("fuzzed", password="x"))),
        Route("member", "PATCH", f"{mine}/secrets/db", _json({"spec": {"data": {"password": "new"}}}), MERGE),
        Route("member", "POST", "/v1/apply", _json([workload("a1"), secret("s1", a="b")])),
        Route("member", "POST", "/v1/apply", b"\n".join(_json(workload(f"l{number}")) for number in range(3))),
        Route("member", "POST", "/v1/plan", _json([workload("a1", replicas=3)])),
        Route("member", "POST", "/v1/capacity", _json(_rich())),
        Route(
            "member", "POST", f"{mine}/replicas/web-0/exec", encode_frame(ExecFrameType.START, ExecStart(("id",))), MEDIA_TYPE
        ),
        Route("admin", "POST", "/v1/apply", _json([node("f1"), tenant("fuzzed")])),
        Route("join", "POST", "/v1/join", _json({"digest": "0" * 64, "nodes": ["f1"], "request": ""})),
    ]
    for kind, manifest in EXAMPLE_MANIFESTS.items():
        if "tenant" not in manifest["metadata"]:
            found.append(Route("admin", "POST", f"/v1/{COLLECTIONS.get(kind, kind.lower() + 's')}", _json(manifest)))
    return found + components(target)


def components(target: AttackedServer) -> list[Route]:
    me = target.actors["n2"]
    operation = json.loads(_encode(target.operation(me, _move(target))))
    call: dict[str, Any] = {"type": "call"}
    beat = NodeHeartbeat(me, NodeState("n2", runs=(RunState("replica/acme/web-0", target.uid, 1),)))
    log_lines: list[tuple[str, str, Any]] = [
        ("agent", "/v1/ask", {**call, "operations": [operation]}),
        ("agent", "/v1/ask", {**call, "beats": [json.loads(_encode(beat))]}),
        ("agent", "/v1/ask", {**call, "renew": json.loads(_encode(me))}),
        ("agent", "/v1/ask", json.loads(_encode(SecretMaterialRequest(me, "replica/acme/web-0", target.uid, 1)))),
        ("agent", FOLLOW, {"type": "orders", "nodes": ["n2"], "callback": "c" * 32}),
        ("scheduler", "/v1/ask", {"type": "range", "prefix": "node/", "limit": 10, "revision": 0}),
        ("scheduler", "/v1/claims", {"operations": [operation]}),
        ("scheduler", FOLLOW, {"type": "rows", "prefix": "node/", "after": 1}),
        ("agent", "/v1/renew", {"request": ""}),
    ]
    return [Route(role, "POST", path, _json(body)) for role, path, body in log_lines]


def _move(target: AttackedServer) -> Any:
    from remit.model.claims import Move

    return Move("replica/acme/web-0", 1, "start", attempt=1)


def _rich() -> dict[str, Any]:
    return {**EXAMPLE_MANIFESTS["Workload"], "metadata": {"name": "fuzzed", "tenant": "acme"}}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass
class FuzzResult:
    """Counts and failures of a run."""

    bodies: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    worst_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def summary(self, grown_mib: float, seed: int) -> dict[str, Any]:
        spread = {str(status): count for status, count in sorted(self.statuses.items())}
        accepted = sum(count for status, count in self.statuses.items() if status < 300)
        return {
            "bodies": self.bodies, "seed": seed, "faults": self.statuses[500], "accepted": accepted, "statuses": spread,
            "worst_ms": round(self.worst_s * 1000), "grown_mib": round(grown_mib, 1),
            "violations": len(self.failures), "wrong": self.failures[:5],
        }  # fmt: skip


class Fuzzer:
    def __init__(self, target: AttackedServer, seed: int) -> None:
        self._target, self._rng = target, random.Random(seed)
        tokens = {"admin": target.server.token, "agent": target.tokens["host2"], "scheduler": target.tokens["planner"]}
        self._tokens = {
            **tokens,
            "member": target.token("fuzz-member", "member", tenant="acme"),
            "join": target.token("fuzz-join", "join", nodes=["f1"]),
        }
        self._routes = routes(target)
        self._good = [route.good for route in self._routes]
        self._connection: http.client.HTTPConnection | None = None
        self.found = FuzzResult()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def run(self, bodies: int) -> FuzzResult:
        for _ in range(bodies):
            route = self._rng.choice(self._routes)
            self._send(route, mutated(self._rng, route.good, self._good))
            if len(self.found.failures) >= 5 or self._target.server.process.poll() is not None:
                self.found.failures.append(
                    f"the server is {'dead' if self._target.server.process.poll() is not None else 'alive'}"
                )
                break
        return self.found

    def _send(self, route: Route, body: bytes) -> None:
        found, began = self.found, time.monotonic()
        found.bodies += 1
        try:
            status, summary = self._request(route, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            status, summary = 0, repr(error).encode()
            if isinstance(error, TimeoutError):
                found.failures.append(f"{route.method} {route.path}: no answer to {body[:300]!r}")
        took_s = time.monotonic() - began
        found.statuses[status] += 1
        found.worst_s = max(found.worst_s, took_s)
        if status == 500 or took_s > ANSWER_S_MAX or (status == 0 and len(body) < 1 << 16):
            found.failures.append(
                f"{route.method} {route.path}: {status} after {took_s:.1f} s, {summary[:300]!r}: {body[:1_000]!r}"
            )
        elif status < 300 and route.path not in LENIENT and route.media != MEDIA_TYPE and not _is_unambiguous(body):
            found.failures.append(f"{route.method} {route.path}: {status} for {body[:1_000]!r}")

    def _request(self, route: Route, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._target.server.connect()
        connection = self._connection
        headers = {"Authorization": f"Bearer {self._tokens[route.role]}", "Content-Type": route.media}
        connection.request(route.method, route.path, body, headers)
        reply = connection.getresponse()
        endless = reply.status == 200 and (route.path == FOLLOW or route.media == MEDIA_TYPE)
        summary = b"" if endless else reply.read()
        if endless:
            reply.close()
        if endless or reply.getheader("connection") == "close":
            self.close()
        return reply.status, summary


def _is_unambiguous(body: bytes) -> bool:
    """Whether it is JSON, one value or one a line, without a repeated key."""
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
        raise ValueError("a repeated key")
    return dict(pairs)


def fuzz(target: AttackedServer, bodies: int, seed: int) -> dict[str, Any]:
    before = target.rss_mib()
    fuzzer = Fuzzer(target, seed)
    found = fuzzer.run(bodies)
    fuzzer.close()
    grown = target.rss_mib() - before
    if grown > GROWTH_MIB_MAX:
        found.failures.append(f"it grew by {grown:.0f} MiB")
    if target.server.ask("GET", "/readyz").status != 200:
        found.failures.append("the server is not ready")
    return found.summary(grown, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send a server bodies that were spoilt.")
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remit-fuzz-") as scratch:
        target = AttackedServer(Path(scratch) / "data")
        try:
            found = fuzz(target, options.bodies, options.seed)
        finally:
            target.server.process.kill()
    print(json.dumps(found))
    return int(found["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
