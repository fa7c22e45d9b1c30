"""Agent messages: heartbeats, assignments, log and exec requests, secret material.

An agent watches the replicas that are assigned to its nodes (first all rows, then changes), reports the complete state of
each node with every heartbeat, and serves log and exec requests. Heartbeats are kept in memory and never stored. Types only:
law/ decides who may send and receive them.

`SecretMaterial` contains unsealed secrets; it must never be stored, logged or shown.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from remit.model.claims import Actor, ShortText
from remit.model.kinds import Node
from remit.model.metadata import Natural
from remit.model.objects import dec_hook
from remit.model.records import Generation, Replica
from remit.model.wire.exec_frames import INPUT_BYTES_MAX, ExecStart, TerminalSize

NODES_MAX = 10_000
"""Maximum number of nodes of one agent."""


class AssignmentsRequest(Struct, frozen=True, omit_defaults=True, tag="orders"):
    """Request of an agent to watch the assignments of these nodes. `callback` is the credential that the server presents when
    it calls the agent; no other component receives it.
    """

    nodes: Annotated[tuple[ShortText, ...], Meta(min_length=1, max_length=NODES_MAX)]
    callback: ShortText = ""


class AssignmentRow(Struct, frozen=True, gc=False):
    """A replica that is bound to one of the nodes, as of a store revision."""

    key: str
    revision: int
    replica: Replica


class AssignmentsUpdate(Struct, frozen=True, omit_defaults=True):
    """Changed assignments, as of `revision`, which the server observed `age_ms` ago. If `whole` is set, this is the complete
    list, and everything that it does not contain is gone.

    A generation is sent before, or together with, its first replica. An update without changes reports the current age.
    """

    incarnation: str
    revision: Natural
    age_ms: Natural = 0
    whole: bool = False
    replicas: tuple[AssignmentRow, ...] = ()
    gone: tuple[str, ...] = ()
    generations: tuple[Generation, ...] = ()
    nodes: dict[str, tuple[Node, int]] = {}
    nodes_gone: tuple[str, ...] = ()


class LogsRequest(Struct, frozen=True, tag="logs"):
    """Request for the output of one attempt of a replica: its last `tail` lines, or all of it; with `follow`, also new
    output.
    """

    token: str
    key: str
    uid: str
    attempt: int
    stream: Literal["stdout", "stderr", "both"] = "both"
    tail: int | None = None
    follow: bool = False


class ExecRequest(Struct, frozen=True, tag="exec"):
    """Request to run a command beside one attempt of a replica and to send its output back (exec_frames.py). `session` is the
    caller's id of the session.
    """

    token: str
    session: Annotated[str, Meta(pattern="^[a-z0-9]{8,64}$")]
    key: str
    uid: str
    attempt: int
    begin: ExecStart


class ExecInputRequest(Struct, frozen=True, tag="feed"):
    """Input for the command of a `session`. The reply is sent when the input was accepted, which keeps the order of inputs."""

    token: str
    session: str
    data: Annotated[bytes, Meta(max_length=INPUT_BYTES_MAX)] = b""
    over: bool = False
    window: TerminalSize | None = None


_assignments_decoder: msgspec.json.Decoder[AssignmentsUpdate] = msgspec.json.Decoder(AssignmentsUpdate, dec_hook=dec_hook)


def decode_assignments(line: bytes) -> AssignmentsUpdate:
    """Raises msgspec.ValidationError, which names the field."""
    return _assignments_decoder.decode(line)


RUNS_MAX = 10_000
"""Maximum number of processes in the state of one node."""


class RunState(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attempt of a replica as it runs on its node: its usage, how often it was restarted, and why it is not ready
    (`said`).
    """

    replica: ShortText
    uid: ShortText
    attempt: Natural
    pid: Natural = 0
    restarts: Natural = 0
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    said: ShortText = ""


class NodeState(Struct, frozen=True, omit_defaults=True, gc=False):
    """Everything that runs on a node. `settled` is the incarnation of the scope that the node has reconciled with: no process
    that is unknown to this incarnation still runs there.
    """

    node: ShortText
    settled: ShortText = ""
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    runs: Annotated[tuple[RunState, ...], Meta(max_length=RUNS_MAX)] = ()


class NodeHeartbeat(Struct, frozen=True, omit_defaults=True, gc=False):
    """A node's state, and the lease that it renews."""

    actor: Actor
    state: NodeState


class NodeHeartbeatAge(Struct, frozen=True, omit_defaults=True, gc=False):
    """The time since a node's last heartbeat, and the value of `settled` in it."""

    silent_ms: Natural
    settled: ShortText = ""


class HeartbeatReport(Struct, frozen=True, omit_defaults=True, gc=False):
    """The time since the last heartbeat of each node that has a lease. The authority has received heartbeats for `listened_ms`;
    a node that is not in `nodes` has sent none for at least that long.
    """

    incarnation: str
    listened_ms: Natural
    nodes: dict[str, NodeHeartbeatAge]


class SecretMaterialRequest(Struct, frozen=True, tag="material"):
    """Request for the secrets and configs of one attempt of a replica that is bound to the node of `actor`."""

    actor: Actor
    key: ShortText
    uid: ShortText
    attempt: Natural


class SecretMaterial(Struct, frozen=True, omit_defaults=True):
    """Values by key of each secret and config that the replica's template names. Without them, `failed` gives the cause: the
    caller has no right to them (`refused`), an object does not exist yet (`missing`), or the values are not available now
    (`later`).
    """

    secrets: dict[str, dict[str, str]] = {}
    configs: dict[str, dict[str, str]] = {}
    failed: Literal["", "refused", "missing", "later"] = ""
    why: str = ""
    cure: str = ""

    def __repr__(self) -> str:
        """Names only: the repr may end up in a log or an error message."""
        names = {"secrets": list(self.secrets), "configs": list(self.configs)}
        return f"SecretMaterial({names}, failed={self.failed!r})"


_material_decoder: msgspec.json.Decoder[SecretMaterial] = msgspec.json.Decoder(SecretMaterial)


def decode_material(body: bytes) -> SecretMaterial:
    """Raises msgspec.DecodeError without any part of the input, which contains secrets."""
    try:
        return _material_decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise msgspec.DecodeError(f"not a SecretMaterial message ({type(error).__name__})") from None
