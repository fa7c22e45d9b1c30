"""Who is let in, and whom does a node speak for? Rows A01 to A14 of docs/faults.md, over a real server. No test is in here."""

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
from remit.model.claims import Acquire, Actor, Apply, Delete, Move, Role, Vacate
from remit.model.kinds import Node, Taint
from remit.model.wire.agent_messages import AssignmentsRequest, NodeHeartbeat, NodeState, SecretMaterialRequest
from remit.model.wire.exec_frames import MEDIA_TYPE, ExecFrameType, ExecStart, encode_frame
from tests.integration.attacks.attack_server import LEASE, WITHIN_S, Intruder, Refusal, attack
from tests.unit.serve.in_memory_server import node, tenant

REPLICA = "/v1/tenants/acme/replicas/web-0"
STATUS = EndpointCall()


def unsigned(**said: str) -> str:
    """What other systems take for a token, signed by nobody."""
    head, body = (base64.urlsafe_b64encode(json.dumps(one).encode()).decode() for one in ({"alg": "none"}, said))
    return f"{head.rstrip('=')}.{body.rstrip('=')}."


@attack(401, "unauthenticated")
def no_token(by: Intruder) -> list[Refusal]:
    """A01: without a token, at every sort of path."""
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
def a_token_that_ran_out(by: Intruder) -> Refusal:
    """A01: a token whose time is over."""
    text = "remit_" + "o" * 40
    from remit.model.identity import token_digest

    spec = {"role": "admin", "digest": token_digest(text), "expires": "2001-01-01T00:00:00Z", "subject": "old"}
    made = {"apiVersion": "remit/v1", "kind": "Token", "metadata": {"name": by.name}, "spec": spec}
    by.stage.admin("POST", "/v1/tokens", made)
    return by.get("/v1/tenants", text)


@attack(401, "unauthenticated")
def tokens_of_nobody(by: Intruder) -> list[Refusal]:
    """A01: unsigned, signed by a foreign key, cut short, far too long, or in another scheme."""
    mine = by.stage.server.token
    texts = [
        "",
        " ",
        unsigned(role="admin", sub="admin"),
        f"remit_{'z' * 40}",
        mine[:-1],
        mine + "x",
        mine.upper(),
        "a" * 9_000,
    ]
    schemes = [f"Basic {mine}", mine, f"Bearer, {mine}", f"Bearer {mine} {mine}"]
    refused = [by.get("/v1/tenants", text) for text in texts]
    return refused + [by.get("/v1/tenants", Authorization=one) for one in schemes]


@attack(401, "unauthenticated")
def an_agents_token_at_peoples_door(by: Intruder) -> list[Refusal]:
    """A02: a token for another audience, both ways round."""
    found = []
    for role, spec in (("agent", {"nodes": ["n9"]}), ("scheduler", {}), ("controllers", {}), ("join", {"nodes": ["n9"]})):
        text = by.token(role, **spec)
        found += [by.get("/v1/workloads", text), by.ask("POST", "/v1/tenants", tenant("mine"), text), by.get("/v1/audit", text)]
    found += [by.door(by.member(), STATUS), by.door(by.stage.server.token, STATUS)]
    return [*found, by.door(by.token("agent", nodes=["n9"]), {"operations": []}, "/v1/claims")]


@attack(401, "unauthenticated", within_s=WITHIN_S)
def the_token_of_what_was_deleted(by: Intruder) -> list[Refusal]:
    """A03: of a node, and of a tenant, that are gone; and one that was revoked. Replicas have no tokens here."""
    name, hers, _ = by.agent()
    by.stage.admin("DELETE", f"/v1/nodes/{name}")
    home = f"t-{by.name}"
    by.stage.admin("POST", "/v1/tenants", tenant(home))
    his = by.member(home)
    by.stage.admin("DELETE", f"/v1/tenants/{home}")
    gone = by.token("viewer")
    patch = {"spec": {"revoked": True}}
    told = by.stage.server.ask(
        "PATCH", f"/v1/tokens/{by.tokens[-1]}", patch, **{"Content-Type": "application/merge-patch+json"}
    )
    assert told.status == 200, told
    by.stage.until(lambda: by.door(hers, STATUS).status == 401, WITHIN_S)
    by.stage.until(lambda: by.get("/v1/workloads", his).status == 401, WITHIN_S)
    by.stage.until(lambda: by.get("/v1/workloads", gone).status == 401, WITHIN_S)
    return [by.door(hers, STATUS), by.get("/v1/workloads", his), by.get("/v1/workloads", gone)]


@attack(0, noted=())
def listening_to_everybody_in_the_clear(by: Intruder) -> None:
    """A06: beyond loopback without TLS. There is no server to write it down: the process says why, and ends."""
    argv = [sys.executable, "-m", "remit.cli", "server", "--data", str(by.stage.server.data / by.name), "--listen", "0.0.0.0:0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "--tls" in done.stderr
    assert "Traceback" not in done.stderr


@attack(403, "not_owner")
def a_node_writes_about_another(by: Intruder) -> list[Refusal]:
    """A07: the lease, the beat, the object, the orders of another node; and the roles and rows of others."""
    name, text, me = by.agent()
    as_other = replace(by.stage.actors["n2"], name=me.name)
    other = Node(metadata=_meta("n2"), spec=_spec(by, "n2"))
    claims = (Acquire("agent/n2", LEASE), Vacate("agent/n2"), Apply(other), Delete("Node", "n2"), Acquire("scheduler", LEASE))
    found = [by.claim(text, me, claim) for claim in claims]
    found += [by.claim(text, as_other, Apply(other)), by.claim(text, Actor("x", Role.SCHEDULER), Acquire("scheduler", LEASE))]
    found += [
        by.claim(text, Actor("x", Role.OPERATOR), Apply(other)),
        by.door(text, EndpointCall(beats=(NodeHeartbeat(me, NodeState("n2")),))),
    ]
    found += [
        by.door(text, EndpointCall(beats=(NodeHeartbeat(as_other, NodeState(name)),))),
        by.door(text, EndpointCall(renew=as_other)),
    ]
    found += [
        by.door(text, RangeRequest("secret/")),
        by.door(text, EndpointCall(heard=True)),
        by.door(text, EndpointCall(states=("n2",))),
    ]
    return [*found, by.door(text, AssignmentsRequest(("n2",)), "/v1/follow"), by.door(text, WatchRequest(""), "/v1/follow")]


@attack(403, "not_owner")
def a_secret_of_what_is_not_bound_here(by: Intruder) -> list[Refusal]:
    """A08: another node's replica, another attempt, a guess at the secret itself; and as somebody else."""
    _, text, me = by.agent()
    wanted = SecretMaterialRequest(me, "replica/acme/web-0", by.stage.uid, 1)
    tries = [
        wanted,
        replace(wanted, attempt=2),
        replace(wanted, key="secret/acme/db"),
        replace(wanted, key="replica/bolt/web-0"),
    ]
    tries += [replace(wanted, actor=by.stage.actors["n2"]), replace(wanted, actor=replace(me, lease="agent/n2"))]
    return [by.door(text, one) for one in tries]


@attack(403)
def a_node_marks_itself(by: Intruder) -> list[Refusal]:
    """A09: its own reserved labels, taints, owners; its labels and its place, which are people's."""
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
def a_capacity_that_cannot_be(by: Intruder) -> list[Refusal]:
    """A10: negative, and more than a node of its pool has."""
    pool = {"capacity": {"cpu": "8", "memory": "32Gi"}, "region": "eu", "zones": ["eu-a"], "max": 3}
    made = {"apiVersion": "remit/v1", "kind": "NodePool", "metadata": {"name": f"p-{by.name}"}, "spec": pool}
    by.stage.admin("POST", "/v1/nodepools", made)
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
        found.append(by.claim_as_written(text, me, {"do": "apply", "thing": lied}))
    assert by.stage.server.ask("GET", f"/v1/nodes/{name}").status == 404
    return found


@attack(409)
def a_word_about_an_attempt_that_it_never_held(by: Intruder) -> list[Refusal]:
    """A11: of its own node's replica, in another attempt; the report of the holder itself, twice over."""
    text, me, at = by.stage.tokens["host2"], by.stage.actors["n2"], by.stage.at(REPLICA)
    by.tokens.append("host2")
    moves = [Move("replica/acme/web-0", at, "start", attempt=attempt) for attempt in (2, 7)]
    moves += [
        Move("replica/acme/web-0", at, "finish", attempt=1, result="succeeded"),
        Move("replica/acme/web-0", 1, "start", attempt=1),
    ]
    return [by.claim(text, me, one) for one in moves]


@attack(403, "not_owner")
def a_word_about_what_runs_elsewhere(by: Intruder) -> Refusal:
    """A07: a word about what runs on another node, in the attempt that it is in. Whose it is comes before when."""
    _, text, me = by.agent()
    return by.claim(text, me, Move("replica/acme/web-0", by.stage.at(REPLICA), "start", attempt=1))


@attack(502, "unavailable")
def an_agent_that_sends_the_server_elsewhere(by: Intruder) -> list[Refusal]:
    """A13: its answer to logs and exec is a redirect, which is not followed."""
    with hostile(by) as (trap, mine):
        begin = encode_frame(ExecFrameType.START, ExecStart(("id",)))
        found = [by.get(f"{REPLICA}/logs", mine), by.ask("POST", f"{REPLICA}/exec", begin, mine, Content_Type=MEDIA_TYPE)]
        trap.setblocking(False)
        with suppress(BlockingIOError):
            trap.accept()
            raise AssertionError("it was followed")
    return found


@attack(409, "stale_epoch")
def a_write_at_an_old_epoch(by: Intruder) -> list[Refusal]:
    """A14: the one who held the lease before."""
    name, text, before = by.agent()
    by.stage.claim(text, before, Vacate(f"agent/{name}"))
    now = by.stage.lease(text, Role.AGENT, f"agent/{name}")
    assert now.epoch > before.epoch
    return [
        by.claim(text, before, Apply(Node(metadata=_meta(name), spec=_spec(by, name)))),
        by.claim(text, before, Vacate(f"agent/{name}")),
    ]


@contextmanager
def hostile(by: Intruder) -> Iterator[tuple[socket.socket, str]]:
    """Something at n2's port that answers each connection with a redirect to a trap; and a token of acme's member."""
    mine = by.member()
    with socket.create_server(("127.0.0.1", 0)) as trap, socket.create_server(("127.0.0.1", 0)) as answering:
        port, there = answering.getsockname()[1], trap.getsockname()[1]
        words = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{there}/\r\nContent-Length: 0\r\n\r\n".encode()

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = answering.accept()
                    with connection:
                        connection.recv(10)
                        connection.sendall(words)

        threading.Thread(target=answer, daemon=True).start()
        patch, merge = {"spec": {"port": port}}, {"Content-Type": "application/merge-patch+json"}
        assert by.stage.server.ask("PATCH", "/v1/nodes/n2", patch, **merge).status == 200
        following = by.stage.server.connect()
        try:
            told = by.stage.server.headers(Authorization=f"Bearer {by.stage.tokens['host2']}")
            said = json.dumps({"type": "orders", "nodes": ["n2"], "callback": "c" * 32})
            following.request("POST", "/v1/follow", said, told)
            following.getresponse().readline()
            _start_it(by)
            yield trap, mine
        finally:
            following.close()
            answering.shutdown(socket.SHUT_RDWR)


def _start_it(by: Intruder) -> None:
    """Its replica is one that can be asked for output."""
    phase = by.stage.admin("GET", REPLICA)["status"]["phase"]
    for step in {"bound": ("start", "run"), "starting": ("run",)}.get(phase, ()):
        move = Move("replica/acme/web-0", by.stage.at(REPLICA), step, attempt=1)
        by.stage.claim(by.stage.tokens["host2"], by.stage.actors["n2"], move)


def _read(manifest: dict[str, Any]) -> Node:
    from remit.model.manifests.reader import read

    found = read(json.dumps(manifest).encode(), "node.json")
    thing = found.objects[0]
    assert isinstance(thing, Node)
    return thing


def _meta(name: str, **more: Any) -> Any:
    import msgspec

    from remit.model.metadata import Metadata

    return msgspec.convert({"name": name, **more}, Metadata)


def _spec(by: Intruder, name: str) -> Any:
    """As it stands."""
    seen = by.stage.admin("GET", f"/v1/nodes/{name}")
    return _read({"apiVersion": "remit/v1", "kind": "Node", "metadata": {"name": name}, "spec": seen["spec"]}).spec
