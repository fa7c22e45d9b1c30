"""Attacks on authentication and identity: rows A01 to A14 of docs/faults.md, over a real server. Contains no tests."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from remit.client.remote_store import RangeRequest, WatchRequest
from remit.client.rpc import EndpointCall
from remit.model.claims import Acquire, Actor, Apply, Delete, Move, Vacate
from remit.model.kinds import Node, Taint
from remit.model.roles import Role
from remit.model.wire.agent_messages import AssignmentsRequest, NodeHeartbeat, NodeState, SecretMaterialRequest
from remit.model.wire.exec_frames import MEDIA_TYPE, ExecFrameType, ExecStart, encode_frame
from tests.integration.attacks.attack_server import LEASE, WITHIN_S, Attacker, Outcome, attack
from tests.unit.serve.in_memory_server import node, tenant

REPLICA = "/v1/tenants/acme/replicas/web-0"
STATUS = EndpointCall()


def unsigned(**log_lines: str) -> str:
    """A JWT with `alg: none`, which other systems accept."""
    head, body = (base64.urlsafe_b64encode(json.dumps(one).encode()).decode() for one in ({"alg": "none"}, log_lines))
    return f"{head.rstrip('=')}.{body.rstrip('=')}."


@attack(401, "unauthenticated")
def missing_token(by: Attacker) -> list[Outcome]:
    """A01: no token, on every kind of path."""
    paths = (
        "/v1/tenants",
        "/v1/nothing",
        "/",
        "/v1/tenants/acme/secrets/db",
        "/v1/audit",
        "/metrics",
        "/v1/support",
        "/v1/backup",
    )
    return [by.get(path) for path in paths]


@attack(401, "unauthenticated")
def expired_token(by: Attacker) -> Outcome:
    """A01: an expired token."""
    text = "remit_" + "o" * 40
    from remit.model.identity import token_digest

    spec = {"role": "admin", "digest": token_digest(text), "expires": "2001-01-01T00:00:00Z", "subject": "old"}
    made = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": by.name}, "spec": spec}
    by.target.admin("POST", "/v1/tokens", made)
    return by.get("/v1/tenants", text)


@attack(401, "unauthenticated")
def invalid_tokens(by: Attacker) -> list[Outcome]:
    """A01: unsigned, signed by a foreign key, cut short, far too long, or with another scheme."""
    token = by.target.server.token
    texts = [
        "",
        " ",
        unsigned(role="admin", sub="admin"),
        f"remit_{'z' * 40}",
        token[:-1],
        token + "x",
        token.upper(),
        "a" * 9_000,
    ]
    schemes = [f"Basic {token}", token, f"Bearer, {token}", f"Bearer {token} {token}"]
    refused = [by.get("/v1/tenants", text) for text in texts]
    return refused + [by.get("/v1/tenants", Authorization=one) for one in schemes]


@attack(401, "unauthenticated")
def token_for_other_audience(by: Attacker) -> list[Outcome]:
    """A02: component tokens on user routes, and user tokens on component routes."""
    found = []
    for role, spec in (("agent", {"nodes": ["n9"]}), ("scheduler", {}), ("controllers", {}), ("join", {"nodes": ["n9"]})):
        text = by.token(role, **spec)
        found += [by.get("/v1/workloads", text), by.ask("POST", "/v1/tenants", tenant("mine"), text), by.get("/v1/audit", text)]
    found += [by.component_request(by.member(), STATUS), by.component_request(by.target.server.token, STATUS)]
    return [*found, by.component_request(by.token("agent", nodes=["n9"]), {"operations": []}, "/v1/claims")]


@attack(401, "unauthenticated", within_s=WITHIN_S)
def token_of_deleted_owner(by: Attacker) -> list[Outcome]:
    """A03: a token of a deleted node, of a deleted tenant, and a revoked one. Replicas have no tokens."""
    name, hers, _ = by.agent()
    by.target.admin("DELETE", f"/v1/nodes/{name}")
    home = f"t-{by.name}"
    by.target.admin("POST", "/v1/tenants", tenant(home))
    his = by.member(home)
    by.target.admin("DELETE", f"/v1/tenants/{home}")
    gone = by.token("viewer")
    patch = {"spec": {"revoked": True}}
    reply = by.target.server.ask(
        "PATCH", f"/v1/tokens/{by.tokens[-1]}", patch, **{"Content-Type": "application/merge-patch+json"}
    )
    assert reply.status == 200, reply
    by.target.until(lambda: by.component_request(hers, STATUS).status == 401, WITHIN_S)
    by.target.until(lambda: by.get("/v1/workloads", his).status == 401, WITHIN_S)
    by.target.until(lambda: by.get("/v1/workloads", gone).status == 401, WITHIN_S)
    return [by.component_request(hers, STATUS), by.get("/v1/workloads", his), by.get("/v1/workloads", gone)]


@attack(0, audited=())
def listen_without_tls_beyond_loopback(by: Attacker) -> None:
    """A06: beyond loopback without TLS. There is no server that could record it: the process reports the reason and exits."""
    argv = [
        sys.executable,
        "-m",
        "remit.cli",
        "server",
        "--data",
        str(by.target.server.data / by.name),
        "--listen",
        "0.0.0.0:0",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "--tls" in done.stderr
    assert "Traceback" not in done.stderr


@attack(403, "not_owner")
def agent_writes_about_other_node(by: Attacker) -> list[Outcome]:
    """A07: lease, heartbeat, object and assignments of another node; and roles and rows of other components."""
    name, text, me = by.agent()
    as_other = replace(by.target.actors["n2"], name=me.name)
    other = Node(metadata=_meta("n2"), spec=_spec(by, "n2"))
    claims = (Acquire("agent/n2", LEASE), Vacate("agent/n2"), Apply(other), Delete("Node", "n2"), Acquire("scheduler", LEASE))
    found = [by.claim(text, me, claim) for claim in claims]
    found += [by.claim(text, as_other, Apply(other)), by.claim(text, Actor("x", Role.SCHEDULER), Acquire("scheduler", LEASE))]
    found += [
        by.claim(text, Actor("x", Role.OPERATOR), Apply(other)),
        by.component_request(text, EndpointCall(beats=(NodeHeartbeat(me, NodeState("n2")),))),
    ]
    found += [
        by.component_request(text, EndpointCall(beats=(NodeHeartbeat(as_other, NodeState(name)),))),
        by.component_request(text, EndpointCall(renew=as_other)),
    ]
    found += [
        by.component_request(text, RangeRequest("secret/")),
        by.component_request(text, EndpointCall(heard=True)),
        by.component_request(text, EndpointCall(states=("n2",))),
    ]
    return [
        *found,
        by.component_request(text, AssignmentsRequest(("n2",)), "/v1/follow"),
        by.component_request(text, WatchRequest(""), "/v1/follow"),
    ]


@attack(403, "not_owner")
def secret_of_replica_bound_elsewhere(by: Attacker) -> list[Outcome]:
    """A08: another node's replica, another attempt, a guessed secret key; and as another actor."""
    _, text, me = by.agent()
    request = SecretMaterialRequest(me, "replica/acme/web-0", by.target.uid, 1)
    tries = [
        request,
        replace(request, attempt=2),
        replace(request, key="secret/acme/db"),
        replace(request, key="replica/bolt/web-0"),
    ]
    tries += [replace(request, actor=by.target.actors["n2"]), replace(request, actor=replace(me, lease="agent/n2"))]
    return [by.component_request(text, one) for one in tries]


@attack(403)
def node_changes_own_reserved_fields(by: Attacker) -> list[Outcome]:
    """A09: its own reserved labels, taints and owners; its labels and region, which operators set."""
    name, text, me = by.agent()
    spec, meta = _spec(by, name), _meta(name)
    owner = {"kind": "Tenant", "name": "bolt"}
    wrong = [
        Node(metadata=_meta(name, labels={"remit/system": "yes"}), spec=spec),
        Node(metadata=_meta(name, labels={"dedicated": "risk"}), spec=spec),
        Node(metadata=_meta(name, owners=[owner]), spec=spec),
        Node(metadata=_meta(name, finalizers=["remit/x"]), spec=spec),
        Node(metadata=meta, spec=replace(spec, taints=(Taint(key="a", effect="NoSchedule"),))),
        Node(metadata=meta, spec=replace(spec, region="us")),
    ]
    return [by.claim(text, me, Apply(one)) for one in wrong]


@attack(422, "invalid")
def impossible_node_capacity(by: Attacker) -> list[Outcome]:
    """A10: negative, and more than its node pool allows."""
    pool = {"capacity": {"cpu": "8", "memory": "32Gi"}, "region": "eu", "zones": ["eu-a"], "max": 3}
    made = {"apiVersion": "remit/v1", "kind": "NodePool", "metadata": {"name": f"p-{by.name}"}, "spec": pool}
    by.target.admin("POST", "/v1/nodepools", made)
    name, text, me = by.agent(declared=False)
    found = []
    for cpu, memory in (
        ("-1", "1Gi"),
        ("8", "-5"),
        ("9", "1Gi"),
        ("8", "33Gi"),
        ("8", str(2**63)),
        ("1e999", "1Gi"),
        ("NaN", "1Gi"),
    ):
        lied = node(name, pool=f"p-{by.name}", capacity={"cpu": cpu, "memory": memory})
        found.append(by.raw_claim(text, me, {"do": "apply", "thing": lied}))
    assert by.target.server.ask("GET", f"/v1/nodes/{name}").status == 404
    return found


@attack(409)
def transition_of_attempt_never_held(by: Attacker) -> list[Outcome]:
    """A11: of its own node's replica, in another attempt; a repeated report of the holder itself."""
    text, me, at = by.target.tokens["host2"], by.target.actors["n2"], by.target.at(REPLICA)
    by.tokens.append("host2")
    moves = [Move("replica/acme/web-0", at, "start", attempt=attempt) for attempt in (2, 7)]
    moves += [
        Move("replica/acme/web-0", at, "finish", attempt=1, result="succeeded"),
        Move("replica/acme/web-0", 1, "start", attempt=1),
    ]
    return [by.claim(text, me, one) for one in moves]


@attack(403, "not_owner")
def transition_of_replica_on_other_node(by: Attacker) -> Outcome:
    """A07: a transition of a replica on another node, in its current attempt. Ownership is checked before freshness."""
    _, text, me = by.agent()
    return by.claim(text, me, Move("replica/acme/web-0", by.target.at(REPLICA), "start", attempt=1))


@attack(502, "unavailable")
def agent_redirects_server(by: Attacker) -> list[Outcome]:
    """A13: its answer to logs and exec is a redirect, which must not be followed."""
    with hostile_agent(by) as (trap, token):
        begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
        found = [by.get(f"{REPLICA}/logs", token), by.ask("POST", f"{REPLICA}/exec", begin, token, Content_Type=MEDIA_TYPE)]
        trap.setblocking(False)
        with suppress(BlockingIOError):
            trap.accept()
            raise AssertionError("the redirect was followed")
    return found


@attack(409, "stale_epoch")
def write_at_old_epoch(by: Attacker) -> list[Outcome]:
    """A14: a write by the previous holder of the lease."""
    name, text, before = by.agent()
    by.target.claim(text, before, Vacate(f"agent/{name}"))
    now = by.target.lease(text, Role.AGENT, f"agent/{name}")
    assert now.epoch > before.epoch
    return [
        by.claim(text, before, Apply(Node(metadata=_meta(name), spec=_spec(by, name)))),
        by.claim(text, before, Vacate(f"agent/{name}")),
    ]


@contextmanager
def hostile_agent(by: Attacker) -> Iterator[tuple[socket.socket, str]]:
    """A listener at n2's port that answers each connection with a redirect to a trap; and a token of acme's member."""
    token = by.member()
    with socket.create_server(("127.0.0.1", 0)) as trap, socket.create_server(("127.0.0.1", 0)) as answering:
        port, there = answering.getsockname()[1], trap.getsockname()[1]
        response = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{there}/\r\nContent-Length: 0\r\n\r\n".encode()

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = answering.accept()
                    with connection:
                        connection.recv(10)
                        connection.sendall(response)

        threading.Thread(target=answer, daemon=True).start()
        patch, merge = {"spec": {"port": port}}, {"Content-Type": "application/merge-patch+json"}
        assert by.target.server.ask("PATCH", "/v1/nodes/n2", patch, **merge).status == 200
        following = by.target.server.connect()
        try:
            reply = by.target.server.headers(Authorization=f"Bearer {by.target.tokens['host2']}")
            log_lines = json.dumps({"type": "orders", "nodes": ["n2"], "callback": "c" * 32})
            following.request("POST", "/v1/follow", log_lines, reply)
            following.getresponse().readline()
            _start_replica(by)
            yield trap, token
        finally:
            following.close()
            answering.shutdown(socket.SHUT_RDWR)


def _start_replica(by: Attacker) -> None:
    """Make the replica one whose output can be requested."""
    phase = by.target.admin("GET", REPLICA)["status"]["phase"]
    for step in {"bound": ("start", "run"), "starting": ("run",)}.get(phase, ()):
        move = Move("replica/acme/web-0", by.target.at(REPLICA), step, attempt=1)
        by.target.claim(by.target.tokens["host2"], by.target.actors["n2"], move)


def _read(manifest: dict[str, Any]) -> Node:
    from remit.model.manifests.reader import read

    found = read(json.dumps(manifest).encode(), "node.json")
    obj = found.objects[0]
    assert isinstance(obj, Node)
    return obj


def _meta(name: str, **more: Any) -> Any:
    import msgspec

    from remit.model.metadata import Metadata

    return msgspec.convert({"name": name, **more}, Metadata)


def _spec(by: Attacker, name: str) -> Any:
    """The node's spec as stored."""
    seen = by.target.admin("GET", f"/v1/nodes/{name}")
    return _read({"apiVersion": "remit/v1", "kind": "Node", "metadata": {"name": name}, "spec": seen["spec"]}).spec
