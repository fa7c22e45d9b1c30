"""What is an agent told of its nodes, and what is it asked? Their rows, whole, then what changes; work's output; commands."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from remit.model.claims import Short
from remit.model.fields import Natural
from remit.model.kinds import Node
from remit.model.objects import dec_hook, enc_hook
from remit.model.records import Generation, Replica
from remit.model.sessions import INPUT_BYTES, Begin, Window

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
