"""Agent messages: heartbeats, orders, log and exec requests, secret material.

Their rows, whole, then what changes; work's output; commands.

Its whole state at a fixed rate; kept in memory, never in the store.

Words only; who may have it: law/.

What stands here in the open was sealed until now, so neither of these is ever written down, logged or shown.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from remit.model.claims import Actor, Short
from remit.model.kinds import Node
from remit.model.metadata import Natural
from remit.model.objects import dec_hook, enc_hook
from remit.model.records import Generation, Replica
from remit.model.wire.exec_frames import INPUT_BYTES, Begin, Window

NODES_MAX = 10_000
"""How many nodes one agent may host."""


class OrdersOf(Struct, frozen=True, omit_defaults=True, tag="orders"):
    """Tell me of these nodes, from now on. Whoever asks me for something shows `callback`: it is told to nobody else."""

    nodes: Annotated[tuple[Short, ...], Meta(min_length=1, max_length=NODES_MAX)]
    callback: Short = ""


class OrderRow(Struct, frozen=True, gc=False):
    """A replica that is bound to one of the nodes, as it stands at a revision."""

    key: str
    revision: int
    replica: Replica


class Orders(Struct, frozen=True, omit_defaults=True):
    """What changed, as of `revision`, which the teller had seen `age_ms` ago. If it is `whole`, what it does not name is gone.

    A generation is told before, or with, the first replica of it. One without news says how old it all is.
    """

    incarnation: str
    revision: Natural
    age_ms: Natural = 0
    whole: bool = False
    replicas: tuple[OrderRow, ...] = ()
    gone: tuple[str, ...] = ()
    generations: tuple[Generation, ...] = ()
    nodes: dict[str, tuple[Node, int]] = {}
    nodes_gone: tuple[str, ...] = ()


class LogsOf(Struct, frozen=True, tag="logs"):
    """Send me what one copy of a replica has written: its last `tail` lines, or all of it; and if I `follow`, what comes."""

    token: str
    key: str
    uid: str
    attempt: int
    stream: Literal["stdout", "stderr", "both"] = "both"
    tail: int | None = None
    follow: bool = False


class ExecOf(Struct, frozen=True, tag="exec"):
    """Run a command beside one copy of a replica, and send me what it writes (sessions.py). `session` is my name for it."""

    token: str
    session: Annotated[str, Meta(pattern="^[a-z0-9]{8,64}$")]
    key: str
    uid: str
    attempt: int
    begin: Begin


class FeedOf(Struct, frozen=True, tag="feed"):
    """Give this to the command of a `session`. It is answered when it was taken, so that the next comes after it."""

    token: str
    session: str
    data: Annotated[bytes, Meta(max_length=INPUT_BYTES)] = b""
    over: bool = False
    window: Window | None = None


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_orders: msgspec.json.Decoder[Orders] = msgspec.json.Decoder(Orders, dec_hook=dec_hook)


def encode_orders(orders: Orders) -> bytes:
    return _encoder.encode(orders)


def decode_orders(line: bytes) -> Orders:
    """Raises msgspec.ValidationError, which names the field."""
    return _orders.decode(line)


RUNS_MAX = 10_000
"""How many processes one node may tell of."""


class RunState(Struct, frozen=True, omit_defaults=True, gc=False):
    """One copy of a replica, as it runs on its node: what it uses, how often it was started again, why it is not ready."""

    replica: Short
    uid: Short
    attempt: Natural
    pid: Natural = 0
    restarts: Natural = 0
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    said: Short = ""


class NodeState(Struct, frozen=True, omit_defaults=True, gc=False):
    """Everything that runs on a node. `settled` names the incarnation of the scope that it has come to terms with: nothing runs
    there any more that this one knows nothing of.
    """

    node: Short
    settled: Short = ""
    cpu_milli: Natural = 0
    memory_bytes: Natural = 0
    runs: Annotated[tuple[RunState, ...], Meta(max_length=RUNS_MAX)] = ()


class Beat(Struct, frozen=True, omit_defaults=True, gc=False):
    """A node's state, and the lease that this renews."""

    actor: Actor
    state: NodeState


class NodeHeard(Struct, frozen=True, omit_defaults=True, gc=False):
    """For how long nothing was heard of a node, and what it had come to terms with when it was last heard."""

    silent_ms: Natural
    settled: Short = ""


class Heard(Struct, frozen=True, omit_defaults=True, gc=False):
    """When the authority has last heard of each node that has a lease. It has listened for `listened_ms`: of a node that is not
    among `nodes` nothing was heard for at least so long.
    """

    incarnation: str
    listened_ms: Natural
    nodes: dict[str, NodeHeard]


class MaterialOf(Struct, frozen=True, tag="material"):
    """Give me what one copy of a replica reads: I run its node, as `actor` says, and it is bound there in this attempt."""

    actor: Actor
    key: Short
    uid: Short
    attempt: Natural


class Material(Struct, frozen=True, omit_defaults=True):
    """Texts by name, of each secret and config that its template names. Without them, why not: nobody is told of what is not
    his (`refused`), what it names is not there yet (`missing`), or cannot be had just now (`later`).
    """

    secrets: dict[str, dict[str, str]] = {}
    configs: dict[str, dict[str, str]] = {}
    failed: Literal["", "refused", "missing", "later"] = ""
    why: str = ""
    cure: str = ""

    def __repr__(self) -> str:
        """Names only: an object may end up in a message that nobody thought of."""
        names = {"secrets": list(self.secrets), "configs": list(self.configs)}
        return f"Material({names}, failed={self.failed!r})"


_materials: msgspec.json.Decoder[Material] = msgspec.json.Decoder(Material)


def decode_material(body: bytes) -> Material:
    """Raises msgspec.DecodeError, without a word of what was read."""
    try:
        return _materials.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise msgspec.DecodeError(f"no material ({type(error).__name__})") from None
