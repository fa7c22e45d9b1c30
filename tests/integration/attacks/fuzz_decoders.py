"""Fuzzes every decoder of outside input; only documented refusals may be raised.

python -m tests.integration.attacks.fuzz_decoders --seconds 60 --seed 7

With atheris (installed by `make soak`) inputs are guided by coverage, otherwise mutated at random. The last line of output is
JSON. Contains no tests.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from remit.agent.keeper import journal, protocol
from remit.client import remote_store, rpc
from remit.model.claims import Acquire, Actor, Operation, OperationID, decode_operation
from remit.model.identity import JoinRequest
from remit.model.manifests.reader import read
from remit.model.objects import decode, enc_hook
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire import agent_messages, exec_frames
from remit.model.wire.agent_messages import AssignmentsRequest, decode_assignments
from remit.serve.components import component_rpc
from remit.serve.http import bodies
from remit.serve.http.openapi import EXAMPLE_MANIFESTS
from remit.serve.http.replies import ApiProblem
from remit.world.net.frames import FrameError, read_frame
from tests.integration.attacks.mutations import mutated

REFUSALS: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""Exceptions that a decoder of messages may raise; callers expect these."""
BYTES_MAX: Final = 1 << 16
PER_DECODER_S: Final = 2.0

Decodes = Callable[[bytes], object]


def _decode_session(data: bytes) -> object:
    """Frames of a session, in pieces of any size."""
    reader, at = exec_frames.ExecFrameReader(), 0
    while at < len(data):
        step = 1 + data[at] % 64
        for part in reader.feed(data[at : at + step]):
            if part.type == exec_frames.ExecFrameType.START:
                exec_frames.decode_start(part.body)
        at += step
    return reader


def _decode_frames(data: bytes) -> object:
    async def frames() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while True:
            await read_frame(reader)

    try:
        asyncio.run(frames())
    except (FrameError, asyncio.IncompleteReadError) as error:
        return error
    return None


def _validate_body(data: bytes) -> object:
    """Validate as a request body: every error must be reported to the client."""
    try:
        return bodies.validate_manifests(data)
    except ApiProblem as failure:
        assert 400 <= failure.document.status < 500
        return failure


def _decode_journal(data: bytes) -> object:
    """A damaged journal: unreadable lines were not relied on, and nothing is raised."""
    return [journal._decode_line(line) for line in data.split(b"\n")]


def _returning_refusals(decoder: Decodes) -> Decodes:
    def decoded(data: bytes) -> object:
        try:
            return decoder(data)
        except REFUSALS as error:
            return error

    return decoded


DECODERS: Final[dict[str, Decodes]] = {
    "manifest, YAML": lambda data: read(data, "a.yaml"),
    "manifest, JSON": lambda data: read(data, "a.json"),
    "body": _validate_body,
    "call": _returning_refusals(component_rpc._call_decoder.decode),
    "stream": _returning_refusals(component_rpc._stream_decoder.decode),
    "reply": _returning_refusals(rpc._reply_decoder.decode),
    "operation": _returning_refusals(decode_operation),
    "object": _returning_refusals(decode),
    "orders": _returning_refusals(decode_assignments),
    "material": _returning_refusals(agent_messages.decode_material),
    "page of rows": _returning_refusals(remote_store._page_decoder.decode),
    "event of rows": _returning_refusals(remote_store._event_decoder.decode),
    "message to keeper": _returning_refusals(protocol._message_decoder.decode),
    "reply of keeper": _returning_refusals(protocol._reply_decoder.decode),
    "process table of keeper": _returning_refusals(protocol._table_decoder.decode),
    "journal": _decode_journal,
    "session": _returning_refusals(_decode_session),
    "frames": _decode_frames,
}
_ACTOR: Final = Actor("m", Role.AGENT, "agent/n1", 3)
_encode = msgspec.json.Encoder(enc_hook=enc_hook).encode
_OPERATION: Final = Operation(OperationID("i.1.n"), _ACTOR, Acquire("agent/n1", Duration(60_000)))


def seeds() -> list[bytes]:
    """Valid inputs of every kind."""
    good = [json.dumps(one).encode() for one in EXAMPLE_MANIFESTS.values()]
    good += [
        b"apiVersion: remit/v1\nkind: Tenant\nmetadata: {name: a}\nspec: {weight: 2}\n---\n- &a [x, *a]\n",
        json.dumps([*EXAMPLE_MANIFESTS.values()]).encode(),
    ]
    good += [
        _encode(rpc.EndpointCall((_OPERATION,))),
        _encode(rpc.EndpointCall(renew=_ACTOR)),
        _encode(_OPERATION),
        _encode(AssignmentsRequest(("n1",))),
    ]
    good += [
        _encode(remote_store.RangeRequest("a/")),
        _encode(remote_store.WatchRequest("")),
        _encode(JoinRequest("a" * 64, ("n1",))),
    ]
    good += [
        _encode(agent_messages.SecretMaterialRequest(_ACTOR, "replica/a/b", "u", 1)),
        b'{"verdicts":[{"verdict":"accepted","revision":3}]}',
    ]
    good += [
        _encode(agent_messages.SecretMaterial({"a": {"b": "c"}})),
        b'{"incarnation":"i","revision":3,"whole":true,"gone":["a"]}',
    ]
    good += [protocol.encode(protocol.ProcessTable(whole=True)), b'{"copy":["a","b",1],"number":3,"began_ms":1}\n{"copy"']
    good += [
        exec_frames.encode_frame(exec_frames.ExecFrameType.START, exec_frames.ExecStart(("id",)))
        + exec_frames.encode_frame(exec_frames.ExecFrameType.INPUT, b"x")
    ]
    return [*good, struct.pack(">IBQ", 3, 1, 7) + b"abc"]


def failure_of(data: bytes) -> str:
    """The failing decoder and its error; empty if none failed."""
    for name, decodes in DECODERS.items():
        began = time.process_time()
        try:
            decodes(data)
        except Exception as error:  # noqa: BLE001 - any other exception is a finding
            return f"{name}: {error!r}"
        if (took_s := time.process_time() - began) > PER_DECODER_S:
            return f"{name}: took {took_s:.1f} s"
    return ""


def unguided(seconds: float, seed: int) -> dict[str, Any]:
    rng, valid, inputs, until = random.Random(seed), seeds(), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        data = mutated(rng, rng.choice(valid), valid)[:BYTES_MAX]
        inputs += 1
        if wrong := failure_of(data):
            return {"inputs": inputs, "violations": 1, "wrong": wrong, "data": repr(data[:2_000])}
    return {"inputs": inputs, "violations": 0}


def guided(seconds: float, seed: int) -> dict[str, Any]:
    """In a separate process, because atheris ends the one in which it runs."""
    with tempfile.TemporaryDirectory(prefix="remit-fuzz-") as scratch:
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        for number, one in enumerate(seeds()):
            (corpus / str(number)).write_bytes(one)
        options = [
            f"-max_total_time={int(seconds)}",
            f"-seed={1 + seed % 2**31}",
            f"-max_len={BYTES_MAX}",
            "-timeout=20",
            "-rss_limit_mb=2048",
        ]
        argv = [
            sys.executable,
            "-m",
            __spec__.name,
            "--inside",
            *options,
            "-print_final_stats=1",
            f"-artifact_prefix={scratch}/",
            str(corpus),
        ]
        done = subprocess.run(argv, capture_output=True, check=False, env=os.environ)
        output = done.stderr.decode(errors="replace")
        counted = next((int(line.split()[-1]) for line in output.splitlines() if "stat::number_of_executed_units" in line), 0)
        found: dict[str, Any] = {
            "inputs": counted,
            "violations": int(done.returncode != 0),
            "corpus": len(list(corpus.iterdir())),
        }
        if done.returncode:
            kept = [file.read_bytes()[:2_000] for file in sorted(Path(scratch).iterdir()) if file.is_file()]
            found |= {"wrong": output[-3_000:], "data": repr(kept[:1])}
        return found


def inside(argv: list[str]) -> None:
    atheris = importlib.import_module("atheris")
    for name in [name for name in sys.modules if name.startswith("remit.")]:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            if getattr(value, "__module__", "") == name and callable(value) and hasattr(value, "__code__"):
                setattr(module, key, atheris.instrument_func(value))

    def one(data: bytes) -> None:
        if wrong := failure_of(data):
            raise RuntimeError(wrong)

    atheris.Setup([sys.argv[0], *argv], one)
    atheris.Fuzz()


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description="Give every decoder bad bytes.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unguided", action="store_true", help="without atheris, also where it is installed")
    options = parser.parse_args()
    guide = "none" if options.unguided or importlib.util.find_spec("atheris") is None else "coverage"
    found = (unguided if guide == "none" else guided)(options.seconds, options.seed)
    print(json.dumps({"guide": guide, "seed": options.seed, "decoders": len(DECODERS), **found}))
    return int(found["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
