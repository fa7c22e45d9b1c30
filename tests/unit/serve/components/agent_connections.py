"""A node whose agent listens on a port of this machine, and the server's connections to it."""

from __future__ import annotations

import socket

import msgspec
from msgspec.structs import replace

from remit.model.kinds import Node
from remit.model.wire.exec_frames import ExecFrameType, ExecStarted
from remit.serve.components.replica_logs import AgentConnections
from tests.unit.observation.row_fixtures import ready
from tests.unit.serve.in_memory_server import Api
from tests.unit.serve.watch_cache_fixtures import CacheFixture

SECRET = "what the agent told the server"
STARTED_FRAME = bytes((ExecFrameType.STARTED,)) + msgspec.json.encode(ExecStarted("web-0", 1, "n1"))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def at(port: int) -> Node:
    node = ready("n1")
    return replace(node, spec=replace(node.spec, address="127.0.0.1", port=port))


def agents(cluster: CacheFixture, client: Api) -> AgentConnections:
    return AgentConnections(cluster.board, client.server.clock, {"n1": SECRET})
