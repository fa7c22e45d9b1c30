"""Against what is an attack tried, and what must hold after each? One real server, and intruders who can be told apart.

An intruder comes from an address and with tokens of its own, so that what the audit says of it is known to be about it: the
same refusal twice is one line. After each attack the server must be alive, hardly larger, and have written down its refusal.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from remit.client.rpc import EndpointCall
from remit.model.claims import Abandon, Acquire, Actor, AnyClaim, Bind, Code, Mark, Operation, Role, operation_id
from remit.model.identity import token_digest
from remit.model.kinds import NodeHealth
from remit.model.objects import enc_hook
from remit.model.resources import Duration
from remit.serve.http.replies import REFUSAL_STATUSES
from tests.integration.serve.server_process import Reply, Server, ask_on
from tests.unit.serve.in_memory_server import node, secret, tenant, workload

CANARY: Final = "canary-in-a-secret"
GROWTH_MIB_MAX: Final = 50
WITHIN_S: Final = 60.0
LEASE: Final = Duration(600_000)
SLACK: Final = 10
"""A shared processor is a slow one, by its own clock too: what an attack costs by design would be far beyond this."""
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
PATIENT: Final = {"requestsPerSecond": 100_000, "requestsBurst": 100_000}
"""So that it is the attack that is refused, and not the hurry in which it is made."""
_encode = msgspec.json.Encoder(enc_hook=enc_hook).encode


class Stage:
    """A server with two tenants, acme and bolt, each with a workload and a secret; acme's replica is bound to node n2."""

    def __init__(self, data: Path) -> None:
        self.server = Server(data)
        self.said: list[str] = []
        self._reading = threading.Thread(target=self._listen, daemon=True)
        self._reading.start()
        self.server.until_ready()
        self._numbers, self._nonces = count(1), count(1)
        self.tokens: dict[str, str] = {}
        self.actors: dict[str, Actor] = {}
        self._prepare()

    def close(self) -> None:
        self.server.process.terminate()
        assert self.server.process.wait(30) == 0, "it does not end well after all this"
        self._reading.join(10)
        self.server.__exit__()
        told = [json.loads(line) for line in self.said if line.startswith("{")]
        wrong = [line for line in told if line["level"] not in ("info", "debug") and line.get("status") not in (502, 503, 504)]
        assert not wrong, wrong
        assert not [line for line in self.said if not line.startswith("{")], self.said

    def intruder(self, row: str) -> Intruder:
        number = next(self._numbers)
        return Intruder(self, row, f"127.0.{1 + number // 250}.{1 + number % 250}", f"{row.lower()}-{number}")

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        return self.server.must(method, path, body)

    def token(self, name: str, role: str, **spec: Any) -> str:
        """A new token's text, once the server knows it."""
        text = f"remit_{name}_{'x' * 32}"
        spec = {"role": role, "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "subject": name, **spec}
        self.admin("POST", "/v1/tokens", _thing("Token", {"name": name}, spec))
        self.tokens[name] = text
        self.until(lambda: self.server.ask("GET", "/v1/nothing", Authorization=f"Bearer {text}").status != 401)
        return text

    def until(self, holds: Callable[[], bool], within_s: float = 10.0) -> float:
        began = time.monotonic()
        while not holds():
            assert time.monotonic() < began + within_s, "it does not come to it"
            time.sleep(0.005)
        return time.monotonic() - began

    def operation(self, actor: Actor, claim: AnyClaim) -> Operation:
        stands = self.admin("GET", "/v1/status")
        return Operation(operation_id(stands["incarnation"], stands["window"], f"x{next(self._nonces)}"), actor, claim)

    def claim(self, token: str, actor: Actor, claim: AnyClaim) -> int:
        """One that must be accepted; its number."""
        body = _encode(EndpointCall((self.operation(actor, claim),)))
        told = self.server.ask("POST", "/v1/ask", body, Authorization=f"Bearer {token}").json
        verdict = told["verdicts"][0]
        assert verdict["verdict"] == "accepted", verdict
        return int(verdict.get("number", 0))

    def lease(self, token: str, role: Role, lease: str, name: str = "one") -> Actor:
        epoch = self.claim(token, Actor(name, role), Acquire(lease, LEASE))
        return Actor(name, role, lease, epoch)

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.server.process.pid}/statm").read_text().split()[1]) * 4_096 / (1 << 20)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def _listen(self) -> None:
        assert self.server.process.stderr is not None
        self.said.extend(line.decode(errors="replace") for line in self.server.process.stderr)

    def _prepare(self) -> None:
        for name in ("acme", "bolt"):
            self.admin("POST", "/v1/tenants", tenant(name, limits=PATIENT))
            sealed = secret("db", password=CANARY)
            sealed["metadata"]["tenant"] = name
            self.admin("POST", f"/v1/tenants/{name}/secrets", sealed)
            work = workload("web", name)
            work["spec"]["template"]["secrets"] = [{"name": "db", "path": "secrets"}]
            self.admin("POST", f"/v1/tenants/{name}/workloads", work)
        self.admin("POST", "/v1/nodes", node("n2", address="127.0.0.1", port=1))
        schedules, corrects = self.token("planner", "scheduler"), self.token("loops", "controllers")
        answers = self.token("host2", "agent", nodes=["n2"])
        self.actors["n2"] = self.lease(answers, Role.AGENT, "agent/n2")
        nodes = self.lease(corrects, Role.NODES, str(Role.NODES))
        places = self.lease(schedules, Role.SCHEDULER, str(Role.SCHEDULER))
        self.claim(corrects, nodes, Mark("n2", self.at("/v1/nodes/n2"), NodeHealth.READY))
        path = "/v1/tenants/acme/replicas/web-0"
        self.claim(schedules, places, Bind("replica/acme/web-0", self.at(path), "n2", "tenant/acme"))
        self.uid = str(self.admin("GET", path)["metadata"]["uid"])

    def at(self, path: str) -> int:
        return int(self.admin("GET", path)["metadata"]["revision"])


class Refusal(NamedTuple):
    """How one request ended: a problem's status and code, or those that a claim's refusal stands for."""

    status: int
    code: str
    body: bytes = b""


@dataclass
class Intruder:
    """One attack under way."""

    stage: Stage
    row: str
    address: str
    name: str
    tokens: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def token(self, role: str, **spec: Any) -> str:
        name = f"{self.name}-{len(self.tokens)}"
        self.tokens.append(name)
        return self.stage.token(name, role, **spec)

    def member(self, of: str = "acme") -> str:
        return self.token("member", tenant=of)

    def agent(self, declared: bool = True) -> tuple[str, str, Actor]:
        """A new node's name, its agent's token, and the agent with its lease."""
        name = f"x-{self.name}"
        text = self.token("agent", nodes=[name])
        if declared:
            self.stage.admin("POST", "/v1/nodes", node(name))
        return name, text, self.stage.lease(text, Role.AGENT, f"agent/{name}")

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None, **headers: str) -> Refusal:
        """`headers` have underscores for hyphens."""
        told = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        with self.connected() as connection:
            began, spent = time.monotonic(), self.stage.cpu_s()
            reply = ask_on(connection, method, path, body, told)
            took_s, spent_s = time.monotonic() - began, self.stage.cpu_s() - spent + TICK_S
            self.took_s = max(self.took_s, min(took_s, spent_s))  # waiting for a processor is nobody's attack
        return refusal(reply)

    def get(self, path: str, token: str | None = None, **headers: str) -> Refusal:
        return self.ask("GET", path, None, token, **headers)

    def door(self, token: str, said: Any, path: str = "/v1/ask") -> Refusal:
        return self.ask("POST", path, _encode(said), token)

    def claim(self, token: str, actor: Actor, claim: AnyClaim) -> Refusal:
        return self.door(token, EndpointCall((self.stage.operation(actor, claim),)))

    def claim_as_written(self, token: str, actor: Actor, claim: dict[str, Any]) -> Refusal:
        """What no program of ours could say."""
        operation = msgspec.to_builtins(self.stage.operation(actor, Abandon("x")), enc_hook=enc_hook)
        return self.ask("POST", "/v1/ask", {"type": "call", "operations": [{**operation, "claim": claim}]}, token)

    @contextmanager
    def connected(self) -> Iterator[http.client.HTTPConnection]:
        port = self.stage.server.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(self.address, 0))
        try:
            yield connection
        finally:
            connection.close()

    def noted(self) -> list[dict[str, Any]]:
        """What the audit has about it."""
        items = self.stage.admin("GET", "/v1/audit?limit=10000")["items"]
        return [one for one in items if one.get("address") == self.address or one.get("token") in self.tokens]


def refusal(reply: Reply) -> Refusal:
    told = reply.json if reply.body[:1] == b"{" else {}
    if reply.status == 200 and told.get("verdicts"):
        verdict = told["verdicts"][0]
        if verdict["verdict"] == "refused":
            return Refusal(REFUSAL_STATUSES.get(Code(verdict["code"]), 409), verdict["code"], reply.body)
    if told.get("failed") == "unread":
        return Refusal(422, "invalid", reply.body)  # at that door what cannot be read is an answer; it counts as this
    code = told.get("code", "") if reply.status >= 400 else ""
    if reply.status >= 400:
        assert code and told["detail"] and "cure" in told, reply
    return Refusal(reply.status, code, reply.body)


Act = Callable[[Intruder], Refusal | Sequence[Refusal] | None]


@dataclass(frozen=True)
class Attack:
    """One attack: which row it is of, and how it must be refused. `noted`: the statuses of which the audit must have one."""

    row: str
    what: str
    status: int
    code: str
    act: Act
    noted: tuple[int, ...]
    within_s: float

    def __str__(self) -> str:
        return f"{self.row}-{self.act.__name__}"


ATTACKS: Final[list[Attack]] = []


def attack(
    status: int, code: str = "", *, noted: Sequence[int] | None = None, within_s: float = WITHIN_S
) -> Callable[[Act], Act]:
    """Its docstring begins with the row's id. `noted=()`: no server hears of it, and the docstring says what stands in."""

    def add(act: Act) -> Act:
        row, _, what = (act.__doc__ or "").partition(": ")
        ATTACKS.append(Attack(row, what, status, code, act, (status,) if noted is None else tuple(noted), within_s))
        return act

    return add


def run(stage: Stage, one: Attack) -> int:
    """How many requests were tried. Raises AssertionError if anything is not as it must be."""
    intruder = stage.intruder(one.row)
    before = stage.rss_mib()
    outcome = one.act(intruder)
    outcomes = [] if outcome is None else [outcome] if isinstance(outcome, Refusal) else list(outcome)
    for each in outcomes:
        assert (each.status, each.code if one.code else "") == (one.status, one.code), (one.what, each)
        assert CANARY.encode() not in each.body
    assert intruder.took_s < SLACK * one.within_s, f"it took {intruder.took_s:.3f} s"
    assert stage.server.process.poll() is None, "the server is dead"
    assert stage.server.ask("GET", "/readyz").status == 200
    grown = stage.rss_mib() - before
    assert grown < GROWTH_MIB_MAX, f"it grew by {grown:.0f} MiB"
    if one.noted:
        found = intruder.noted()
        assert any(item.get("status") in one.noted for item in found), ("nobody wrote it down", found[:5])
        assert not any(text in str(found) for text in (CANARY, *(stage.tokens[name] for name in intruder.tokens)))
    return max(1, len(outcomes))


def _thing(kind: str, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": meta, "spec": spec}
