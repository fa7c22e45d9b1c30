"""What does a node say of itself, again and again? Its whole state at a fixed rate; kept in memory, never in the store."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from remit.model.claims import Actor, Short
from remit.model.fields import Natural

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
