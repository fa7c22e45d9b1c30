"""One real server under attack, distinguishable attackers, and the checks after each attack.

An attacker has its own address and tokens, which identify its audit entries: a repeated refusal is one line. After each attack
the server must be alive, hardly larger, and have recorded its refusal.
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
from remit.model.claims import Abandon, Acquire, Actor, AnyClaim, Bind, Code, Mark, Operation, operation_id
from remit.model.identity import token_digest
from remit.model.kinds import NodeHealth
from remit.model.objects import enc_hook
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.serve.http.replies import REFUSAL_STATUSES
from tests.integration.serve.server_process import Reply, Server, ask_on
from tests.unit.serve.in_memory_server import node, secret, tenant, workload

CANARY: Final = "canary-in-a-secret"
GROWTH_MIB_MAX: Final = 50
WITHIN_S: Final = 60.0
LEASE: Final = Duration(600_000)
SLACK: Final = 10
"""A shared processor is slow, also by CPU time: a successful attack would cost far more than this."""
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
PATIENT: Final = {"requestsPerSecond": 100_000, "requestsBurst": 100_000}
"""Limits so high that the attack itself is refused, and not its request rate."""
_encode = msgspec.json.Encoder(enc_hook=enc_hook).encode


class AttackedServer:
    """A server with two tenants, acme and bolt, each with a workload and a secret; acme's replica is bound to node n2."""

    def __init__(self, data: Path) -> None:
        self.server = Server(data)
        self.log_lines: list[str] = []
        self._reading = threading.Thread(target=self._listen, daemon=True)
        self._reading.start()
        self.server.until_ready()
        self._numbers, self._nonces = count(1), count(1)
        self.tokens: dict[str, str] = {}
        self.actors: dict[str, Actor] = {}
        self._prepare()

    def close(self) -> None:
        self.server.process.terminate()
        assert self.server.process.wait(30) == 0, "the server must exit cleanly after the attacks"
        self._reading.join(10)
        self.server.__exit__()
        answer = [json.loads(line) for line in self.log_lines if line.startswith("{")]
        wrong = [
            line for line in answer if line["level"] not in ("info", "debug") and line.get("status") not in (502, 503, 504)
        ]
        assert not wrong, wrong
        assert not [line for line in self.log_lines if not line.startswith("{")], self.log_lines

    def attacker(self, row: str) -> Attacker:
        number = next(self._numbers)
        return Attacker(self, row, f"127.0.{1 + number // 250}.{1 + number % 250}", f"{row.lower()}-{number}")

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        return self.server.must(method, path, body)

    def token(self, name: str, role: str, **spec: Any) -> str:
        """Create a token and return its text once the server knows it."""
        text = f"remit_{name}_{'x' * 32}"
        spec = {"role": role, "digest": token_digest(text), "expires": "2999-01-01T00:00:00Z", "subject": name, **spec}
        self.admin("POST", "/v1/tokens", _manifest("Token", {"name": name}, spec))
        self.tokens[name] = text
        self.until(lambda: self.server.ask("GET", "/v1/nothing", Authorization=f"Bearer {text}").status != 401)
        return text

    def until(self, holds: Callable[[], bool], within_s: float = 10.0) -> float:
        began = time.monotonic()
        while not holds():
            assert time.monotonic() < began + within_s, "the condition did not become true"
            time.sleep(0.005)
        return time.monotonic() - began

    def operation(self, actor: Actor, claim: AnyClaim) -> Operation:
        status = self.admin("GET", "/v1/status")
        return Operation(operation_id(status["incarnation"], status["window"], f"x{next(self._nonces)}"), actor, claim)

    def claim(self, token: str, actor: Actor, claim: AnyClaim) -> int:
        """Submit a claim that must be accepted; return its number."""
        body = _encode(EndpointCall((self.operation(actor, claim),)))
        answer = self.server.ask("POST", "/v1/ask", body, Authorization=f"Bearer {token}").json
        verdict = answer["verdicts"][0]
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
        self.log_lines.extend(line.decode(errors="replace") for line in self.server.process.stderr)

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
        scheduler_token, controllers_token = self.token("planner", "scheduler"), self.token("loops", "controllers")
        agent_token = self.token("host2", "agent", nodes=["n2"])
        self.actors["n2"] = self.lease(agent_token, Role.AGENT, "agent/n2")
        nodes = self.lease(controllers_token, Role.NODES, str(Role.NODES))
        scheduler = self.lease(scheduler_token, Role.SCHEDULER, str(Role.SCHEDULER))
        self.claim(controllers_token, nodes, Mark("n2", self.at("/v1/nodes/n2"), NodeHealth.READY))
        path = "/v1/tenants/acme/replicas/web-0"
        self.claim(scheduler_token, scheduler, Bind("replica/acme/web-0", self.at(path), "n2", "tenant/acme"))
        self.uid = str(self.admin("GET", path)["metadata"]["uid"])

    def at(self, path: str) -> int:
        return int(self.admin("GET", path)["metadata"]["revision"])


class Outcome(NamedTuple):
    """The outcome of one request: status and code of a problem, or those that a refused claim corresponds to."""

    status: int
    code: str
    body: bytes = b""


@dataclass
class Attacker:
    """One attack in progress."""

    target: AttackedServer
    row: str
    address: str
    name: str
    tokens: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def token(self, role: str, **spec: Any) -> str:
        name = f"{self.name}-{len(self.tokens)}"
        self.tokens.append(name)
        return self.target.token(name, role, **spec)

    def member(self, of: str = "acme") -> str:
        return self.token("member", tenant=of)

    def agent(self, declared: bool = True) -> tuple[str, str, Actor]:
        """Name of a new node, the token of its agent, and the agent with its lease."""
        name = f"x-{self.name}"
        text = self.token("agent", nodes=[name])
        if declared:
            self.target.admin("POST", "/v1/nodes", node(name))
        return name, text, self.target.lease(text, Role.AGENT, f"agent/{name}")

    def ask(self, method: str, path: str, body: Any = None, token: str | None = None, **headers: str) -> Outcome:
        """Header names are given with underscores for hyphens."""
        answer = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        answer |= {name.replace("_", "-"): value for name, value in headers.items()}
        with self.connected() as connection:
            began, spent = time.monotonic(), self.target.cpu_s()
            reply = ask_on(connection, method, path, body, answer)
            took_s, spent_s = time.monotonic() - began, self.target.cpu_s() - spent + TICK_S
            self.took_s = max(self.took_s, min(took_s, spent_s))  # waiting for a processor is not caused by the attack
        return outcome_of(reply)

    def get(self, path: str, token: str | None = None, **headers: str) -> Outcome:
        return self.ask("GET", path, None, token, **headers)

    def component_request(self, token: str, log_lines: Any, path: str = "/v1/ask") -> Outcome:
        return self.ask("POST", path, _encode(log_lines), token)

    def claim(self, token: str, actor: Actor, claim: AnyClaim) -> Outcome:
        return self.component_request(token, EndpointCall((self.target.operation(actor, claim),)))

    def raw_claim(self, token: str, actor: Actor, claim: dict[str, Any]) -> Outcome:
        """Submit a claim that no client of Remit could build."""
        operation = msgspec.to_builtins(self.target.operation(actor, Abandon("x")), enc_hook=enc_hook)
        return self.ask("POST", "/v1/ask", {"type": "call", "operations": [{**operation, "claim": claim}]}, token)

    @contextmanager
    def connected(self) -> Iterator[http.client.HTTPConnection]:
        port = self.target.server.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=(self.address, 0))
        try:
            yield connection
        finally:
            connection.close()

    def audited(self) -> list[dict[str, Any]]:
        """Audit entries about this attacker."""
        items = self.target.admin("GET", "/v1/audit?limit=10000")["items"]
        return [one for one in items if one.get("address") == self.address or one.get("token") in self.tokens]


def outcome_of(reply: Reply) -> Outcome:
    answer = reply.json if reply.body[:1] == b"{" else {}
    if reply.status == 200 and answer.get("verdicts"):
        verdict = answer["verdicts"][0]
        if verdict["verdict"] == "refused":
            return Outcome(REFUSAL_STATUSES.get(Code(verdict["code"]), 409), verdict["code"], reply.body)
    if answer.get("failed") == "unread":
        return Outcome(422, "invalid", reply.body)  # component routes answer unreadable requests with 200; counted as 422
    code = answer.get("code", "") if reply.status >= 400 else ""
    if reply.status >= 400:
        assert code and answer["detail"] and "cure" in answer, reply
    return Outcome(reply.status, code, reply.body)


Act = Callable[[Attacker], Outcome | Sequence[Outcome] | None]


@dataclass(frozen=True)
class Attack:
    """One attack: its row and the required refusal. `audited`: statuses of which the audit must have one."""

    row: str
    description: str
    status: int
    code: str
    act: Act
    audited: tuple[int, ...]
    within_s: float

    def __str__(self) -> str:
        return f"{self.row}-{self.act.__name__}"


ATTACKS: Final[list[Attack]] = []


def attack(
    status: int, code: str = "", *, audited: Sequence[int] | None = None, within_s: float = WITHIN_S
) -> Callable[[Act], Act]:
    """The docstring begins with the row's id. `audited=()`: no server is involved; the docstring names the check."""

    def add(act: Act) -> Act:
        row, _, description = (act.__doc__ or "").partition(": ")
        ATTACKS.append(Attack(row, description, status, code, act, (status,) if audited is None else tuple(audited), within_s))
        return act

    return add


def run(target: AttackedServer, one: Attack) -> int:
    """Run one attack; return the number of requests. Raises AssertionError if a check fails."""
    attacker = target.attacker(one.row)
    before = target.rss_mib()
    outcome = one.act(attacker)
    outcomes = [] if outcome is None else [outcome] if isinstance(outcome, Outcome) else list(outcome)
    for each in outcomes:
        assert (each.status, each.code if one.code else "") == (one.status, one.code), (one.description, each)
        assert CANARY.encode() not in each.body
    assert attacker.took_s < SLACK * one.within_s, f"it took {attacker.took_s:.3f} s"
    assert target.server.process.poll() is None, "the server must be running"
    assert target.server.ask("GET", "/readyz").status == 200
    grown = target.rss_mib() - before
    assert grown < GROWTH_MIB_MAX, f"it grew by {grown:.0f} MiB"
    if one.audited:
        found = attacker.audited()
        assert any(item.get("status") in one.audited for item in found), ("no audit entry", found[:5])
        assert not any(text in str(found) for text in (CANARY, *(target.tokens[name] for name in attacker.tokens)))
    return max(1, len(outcomes))


def _manifest(kind: str, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": meta, "spec": spec}
