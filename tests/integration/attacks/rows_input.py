"""Attacks by input: rows A22 to A33 of docs/faults.md. Contains no tests."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from click.testing import CliRunner

from remit.cli.main import remit
from remit.world.clock import BootClock
from remit.world.interfaces import ProcessSpec
from remit.world.process.runner import ProcessRunner
from tests.integration.attacks.attack_server import Attacker, Outcome, attack
from tests.unit.serve.in_memory_server import tenant, workload

MINE: Final = "/v1/tenants/acme/workloads"
MERGE: Final = "application/merge-patch+json"
MIB: Final = 1 << 20
BAD: Final = Path(__file__).resolve().parents[2] / "bad"
ROUTES: Final = (("POST", MINE, ""), ("PUT", f"{MINE}/web", ""), ("PATCH", f"{MINE}/web", MERGE), ("POST", "/v1/apply", ""))
"""Routes that parse a member's body."""


def on_every_route(by: Attacker, body: bytes, text: str) -> list[Outcome]:
    return [by.ask(method, path, body, text, **({"Content_Type": kind} if kind else {})) for method, path, kind in ROUTES]


def job(**template: Any) -> dict[str, Any]:
    made = workload("x")
    made["spec"]["template"] |= template
    return made


def bomb() -> bytes:
    """Nine levels of nine YAML aliases each."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, after in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join(lines).encode()


@attack(415, "media_type", within_s=0.05)
def yaml_alias_bomb(by: Attacker) -> list[Outcome]:
    """A22: YAML is not parsed by the server, so its aliases are not expanded."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    return [
        by.ask("POST", MINE, bomb(), text, Content_Type=kind)
        for kind in ("application/yaml", "text/yaml", "application/x-yaml")
    ]


@attack(400, "malformed", within_s=0.05)
def yaml_declared_as_json(by: Attacker) -> list[Outcome]:
    """A22: the same, declared as JSON."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    return [by.ask(method, path, bomb(), text) for method, path in (("POST", MINE), ("POST", "/v1/apply"))]


@attack(413, "too_large")
def oversized_body(by: Attacker) -> list[Outcome]:
    """A23: with a length, without one, and with a wrong one."""
    text = by.member()
    found = [_announced(by, text, MINE, size) for size in (2 * MIB, MIB + 1, 10**15)]
    found += [_announced(by, text, "/v1/apply", 17 * MIB), by.ask("GET", MINE, b"{}", text)]
    return [*found, _chunked(by, text)]


def _announced(by: Attacker, text: str, path: str, size: int) -> Outcome:
    """Must be refused before the body is sent."""
    with by.connected() as connection:
        connection.putrequest("POST", path)
        for name, value in (
            ("Authorization", f"Bearer {text}"),
            ("Content-Length", str(size)),
            ("Content-Type", "application/json"),
        ):
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        return Outcome(reply.status, json.loads(reply.read())["code"])


def _chunked(by: Attacker, text: str) -> Outcome:
    """Send two megabytes in chunks, until the server closes."""
    with by.connected() as connection:
        connection.putrequest("POST", MINE)
        for name, value in (
            ("Authorization", f"Bearer {text}"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Type", "application/json"),
        ):
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for _ in range(32):
                connection.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:
            pass  # the server has closed the connection
        try:
            reply = connection.getresponse()
        except OSError:
            return Outcome(413, "too_large")  # its answer was lost when the connection was closed; the audit has it
        return Outcome(reply.status, json.loads(reply.read())["code"])


@attack(413, "too_large")
def compressed_body(by: Attacker) -> list[Outcome]:
    """A23: a gigabyte of zeros in a megabyte, in every encoding; nothing is decompressed."""
    text, body = by.member(), gzip.compress(bytes(64 * MIB), 9)
    found = [by.ask("POST", MINE, body, text, Content_Encoding=how) for how in ("gzip", "GZIP", " x-gzip")]
    return [*found, by.ask("POST", "/v1/apply", zlib.compress(bytes(64 * MIB), 9), text, Content_Encoding="deflate")]


@attack(400)
def deeply_nested_json(by: Attacker) -> list[Outcome]:
    """A24: lists, objects, and both alternating; also unterminated."""
    text = by.member()
    deep = [b"[" * 1_000 + b"]" * 1_000, b'{"a":' * 1_000 + b"1" + b"}" * 1_000, b'[{"a":' * 500 + b"1" + b"}]" * 500]
    deep += [b"[" * 500_000, b'{"a":' * 100_000, b"[" * 65 + b"]" * 65]
    return [one for body in deep for one in on_every_route(by, body, text)]


@attack(422, "invalid")
def unrepresentable_numbers(by: Attacker) -> list[Outcome]:
    """A25: NaN, infinities, 1e999, negative numbers, 2^63 and 5,000 digits, in every numeric field."""
    text = by.member()
    numbers = ["NaN", "Infinity", "-Infinity", "1e999", "-1", str(2**63), str(-(2**63) - 1), "9" * 5_000, "1.5", "1e400"]
    body = json.dumps(workload("x", replicas=77_777))
    found = [by.ask("POST", MINE, body.replace("77777", number).encode(), text) for number in numbers]
    amounts = ['"NaN"', '"1e999"', '"-1"', f'"{2**63}"', '"9' + "9" * 4_000 + '"', "-1", "NaN", "1e999", '"1e400Gi"']
    body = json.dumps(workload("x")).replace('"1Gi"', "77777")
    return found + [by.ask("POST", MINE, body.replace("77777", one).encode(), text) for one in amounts]


@attack(400, "malformed")
def repeated_json_key(by: Attacker) -> list[Outcome]:
    """A26: at the top, nested, and in two spellings."""
    text, good = by.member(), json.dumps(workload("x"))
    twice = [good.replace('"kind":', '"kind": "Tenant", "kind":', 1), good.replace('"name":', '"name": "a", "name":', 1)]
    twice += [good.replace('"replicas":', '"replicas": 1, "\\u0072eplicas":', 1)]
    return [
        by.ask(method, path, body.encode(), text) for body in twice for method, path in (("POST", MINE), ("POST", "/v1/apply"))
    ]


@attack(0, audited=())
def python_tag_in_manifest(by: Attacker) -> None:
    """A27: the command line reports the error with the file's name and runs nothing. No server is involved."""
    for file in ("python-tag.yaml", "binary-tag.yaml", "vault-tag.yaml", "alias-bomb.yaml", "alias-to-itself.yaml"):
        done = CliRunner().invoke(remit, ["validate", str(BAD / file)])
        assert done.exit_code == 1, (file, done.output)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert file in done.output + done.stderr


NAMES: Final = (
    "../x", "/etc/passwd", "a\0b", "a\nb", "a\rb", "a\x1b[31mb", "a\u202eb", "a\u200bb", "\u0430pple", "a" * 300, "", ".", "..",
    "a b", "a%2fb", 'a"b', "<script>", "-a", "a_b", "A",
)  # fmt: skip


@attack(422, "invalid")
def invalid_names(by: Attacker) -> list[Outcome]:
    """A28: paths, control characters, bidirectional marks, other scripts, empty names, and 300 letters."""
    text, found = by.member(), []
    for name in NAMES:
        found += [by.ask("POST", MINE, workload(name), text), by.ask("POST", "/v1/apply", [workload(name)], text)]
        found.append(by.ask("POST", "/v1/tenants", tenant(name), by.target.server.token))
    assert not any("\u202e" in one.body.decode() or "\x1b" in one.body.decode() for one in found)
    return found


@attack(404)
def path_instead_of_name(by: Attacker) -> list[Outcome]:
    """A29: a replica name is never used as a path. Planted symlinks: test_hostile_workloads.py."""
    text = by.member()
    names = (
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e%2fx",
        "..%5cx",
        "web-0%00",
        "web-0%2f..",
        "%2fetc%2fpasswd",
        "web-0%0a",
        "..",
        ".",
    )
    found = [by.get(f"/v1/tenants/acme/replicas/{name}/logs", text) for name in names]
    return found + [by.get(f"/v1/tenants/{name}/replicas/web-0/logs", text) for name in ("..%2facme", "acme%2f", "acme%00")]


@attack(0, audited=())
def shell_metacharacters_in_command(by: Attacker) -> None:
    """A30: arguments stay literal. Nothing is refused; with a real agent: test_hostile_workloads.py."""
    words = (";$(id)", "`id`", "a|b", "&&", "$HOME", "*", "\n", "-x", "$(PORT)")
    exit_code = asyncio.run(
        _run(ProcessSpec(("printf", "<%s>", *words), {"PATH": os.defpath}, stdout=by.target.server.data / "said"))
    )
    assert exit_code == 0
    assert (by.target.server.data / "said").read_text() == "".join(f"<{word}>" for word in words)


@attack(0, audited=())
def loader_variables_in_environment(by: Attacker) -> None:
    """A31: loader variables reach only the work. Nothing is refused; with a real agent: test_hostile_workloads.py."""
    order = ProcessSpec(
        ("sh", "-c", "echo $LD_PRELOAD"), {"PATH": os.defpath, "LD_PRELOAD": "/x/e.so"}, stdout=by.target.server.data / "heard"
    )
    assert asyncio.run(_run(order)) == 0
    assert (by.target.server.data / "heard").read_text().splitlines()[-1] == "/x/e.so"
    assert "e.so" not in os.environ.get("LD_PRELOAD", "")


async def _run(order: ProcessSpec) -> int | None:
    runner = ProcessRunner(BootClock())
    running = await runner.start(order)
    async with asyncio.timeout(20):
        return (await runner.wait(running)).code


SOURCES: Final = (
    "http://169.254.169.254/latest/meta-data/", "http://localhost:7420/v1/nodes", "https://127.0.0.1/a", "http://[::1]/a",
    "http://[::ffff:169.254.169.254]/a", "http://2852039166/a", "http://0x7f000001/a", "http://0177.0.0.1/a", "http://127.1/a",
    "http://10.1.2.3/a", "http://192.168.0.1/a", "http://metadata.google.internal/a", "http://printer.local/a", "http://0.0.0.0/a",
    "http://[fe80::1]/a", "http://100.64.0.1/a", "ftp://example.org/a", "gopher://example.org/", "file:../../etc/passwd",
    "https://user:pass@example.org/a", "http://localhost./a", "http://LOCALHOST/a", "http://[64:ff9b::a9fe:a9fe]/a",
)  # fmt: skip


@attack(422, "invalid")
def artifact_source_in_private_network(by: Attacker) -> list[Outcome]:
    """A32: metadata services, loopback and private hosts in every spelling. Names that resolve to them: test_http_fetch.py."""
    text, digest = by.member(), "0" * 64
    found = [by.ask("POST", MINE, job(artifacts=[{"source": one, "sha256": digest}]), text) for one in SOURCES]
    return found + [by.ask("POST", MINE, job(rootfs={"source": one, "sha256": digest}), text) for one in SOURCES]


@attack(422, "invalid", within_s=0.1)
def expensive_patterns(by: Attacker) -> list[Outcome]:
    """A33: selectors of ten thousand terms in queries and bodies, and texts for which a naive pattern takes forever."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    terms, many = ",".join(["a"] * 10_000), {f"k{at}": "v" for at in range(10_000)}
    hostile = ("a" * 40_000 + "!", "a-" * 15_000, "a." * 15_000 + "/", "-" * 40_000, "(" * 10_000, "a in (" + "a," * 15_000)
    found = [by.get(f"{MINE}?labelSelector={quote(one, safe=',')}", text) for one in (terms, *hostile)]
    found.append(by.get(f"{MINE}?fieldSelector={','.join(['spec.type=job'] * 3_000)}", text))
    bodies = [workload("w", placement={"nodeSelector": many}), workload("w", labels=many)]
    bodies += [workload("w", labels={one: "v"}) for one in hostile] + [workload(one) for one in hostile]
    return found + [by.ask("POST", MINE, body, text) for body in bodies]
