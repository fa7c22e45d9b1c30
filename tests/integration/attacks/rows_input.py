"""What can be declared that should not be, and how is it written? Rows A22 to A33 of docs/faults.md. No test is in here."""

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
from tests.integration.attacks.attack_server import Intruder, Refusal, attack
from tests.unit.serve.in_memory_server import tenant, workload

MINE: Final = "/v1/tenants/acme/workloads"
MERGE: Final = "application/merge-patch+json"
MIB: Final = 1 << 20
BAD: Final = Path(__file__).resolve().parents[2] / "bad"
DOORS: Final = (("POST", MINE, ""), ("PUT", f"{MINE}/web", ""), ("PATCH", f"{MINE}/web", MERGE), ("POST", "/v1/apply", ""))
"""Where a member's body is read."""


def everywhere(by: Intruder, body: bytes, text: str) -> list[Refusal]:
    return [by.ask(method, path, body, text, **({"Content_Type": kind} if kind else {})) for method, path, kind in DOORS]


def job(**template: Any) -> dict[str, Any]:
    made = workload("x")
    made["spec"]["template"] |= template
    return made


def bomb() -> bytes:
    """Nine levels of nine aliases each."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, after in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join(lines).encode()


@attack(415, "media_type", within_s=0.05)
def yaml_that_unfolds(by: Intruder) -> list[Refusal]:
    """A22: YAML is not read here at all, so its aliases are not."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    return [
        by.ask("POST", MINE, bomb(), text, Content_Type=kind)
        for kind in ("application/yaml", "text/yaml", "application/x-yaml")
    ]


@attack(400, "malformed", within_s=0.05)
def yaml_that_is_called_json(by: Intruder) -> list[Refusal]:
    """A22: the same, in disguise."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    return [by.ask(method, path, bomb(), text) for method, path in (("POST", MINE), ("POST", "/v1/apply"))]


@attack(413, "too_large")
def a_body_of_two_megabytes(by: Intruder) -> list[Refusal]:
    """A23: announced, unannounced, and announced as another size than it is."""
    text = by.member()
    found = [_announced(by, text, MINE, size) for size in (2 * MIB, MIB + 1, 10**15)]
    found += [_announced(by, text, "/v1/apply", 17 * MIB), by.ask("GET", MINE, b"{}", text)]
    return [*found, _chunked(by, text)]


def _announced(by: Intruder, text: str, path: str, size: int) -> Refusal:
    """It is refused before anything of it was sent."""
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
        return Refusal(reply.status, json.loads(reply.read())["code"])


def _chunked(by: Intruder, text: str) -> Refusal:
    """Two megabytes in pieces, for as long as somebody listens."""
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
            pass  # it listens no more
        try:
            reply = connection.getresponse()
        except OSError:
            return Refusal(413, "too_large")  # what was said before it was closed got lost on the way; the audit has it
        return Refusal(reply.status, json.loads(reply.read())["code"])


@attack(413, "too_large")
def a_small_body_that_inflates(by: Intruder) -> list[Refusal]:
    """A23: a gigabyte of nothing in a megabyte, by every encoding; nothing is inflated."""
    text, body = by.member(), gzip.compress(bytes(64 * MIB), 9)
    found = [by.ask("POST", MINE, body, text, Content_Encoding=how) for how in ("gzip", "GZIP", " x-gzip")]
    return [*found, by.ask("POST", "/v1/apply", zlib.compress(bytes(64 * MIB), 9), text, Content_Encoding="deflate")]


@attack(400)
def json_a_thousand_deep(by: Intruder) -> list[Refusal]:
    """A24: lists, objects, and both in turn; also without an end."""
    text = by.member()
    deep = [b"[" * 1_000 + b"]" * 1_000, b'{"a":' * 1_000 + b"1" + b"}" * 1_000, b'[{"a":' * 500 + b"1" + b"}]" * 500]
    deep += [b"[" * 500_000, b'{"a":' * 100_000, b"[" * 65 + b"]" * 65]
    return [one for body in deep for one in everywhere(by, body, text)]


@attack(422, "invalid")
def numbers_that_are_none(by: Intruder) -> list[Refusal]:
    """A25: NaN, infinities, 1e999, less than nothing, 2^63 and 5,000 digits, wherever a number stands."""
    text = by.member()
    numbers = ["NaN", "Infinity", "-Infinity", "1e999", "-1", str(2**63), str(-(2**63) - 1), "9" * 5_000, "1.5", "1e400"]
    body = json.dumps(workload("x", replicas=77_777))
    found = [by.ask("POST", MINE, body.replace("77777", number).encode(), text) for number in numbers]
    amounts = ['"NaN"', '"1e999"', '"-1"', f'"{2**63}"', '"9' + "9" * 4_000 + '"', "-1", "NaN", "1e999", '"1e400Gi"']
    body = json.dumps(workload("x")).replace('"1Gi"', "77777")
    return found + [by.ask("POST", MINE, body.replace("77777", one).encode(), text) for one in amounts]


@attack(400, "malformed")
def the_same_key_twice(by: Intruder) -> list[Refusal]:
    """A26: at the top, within, and spelt in two ways."""
    text, good = by.member(), json.dumps(workload("x"))
    twice = [good.replace('"kind":', '"kind": "Tenant", "kind":', 1), good.replace('"name":', '"name": "a", "name":', 1)]
    twice += [good.replace('"replicas":', '"replicas": 1, "\\u0072eplicas":', 1)]
    return [
        by.ask(method, path, body.encode(), text) for body in twice for method, path in (("POST", MINE), ("POST", "/v1/apply"))
    ]


@attack(0, noted=())
def a_tag_of_python_in_a_file(by: Intruder) -> None:
    """A27: the command line says what is wrong, with the file's name, and runs nothing. No server is asked."""
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
def a_name_that_is_none(by: Intruder) -> list[Refusal]:
    """A28: paths, controls, marks that turn text round, other scripts, nothing at all, and 300 letters."""
    text, found = by.member(), []
    for name in NAMES:
        found += [by.ask("POST", MINE, workload(name), text), by.ask("POST", "/v1/apply", [workload(name)], text)]
        found.append(by.ask("POST", "/v1/tenants", tenant(name), by.stage.server.token))
    assert not any("\u202e" in one.body.decode() or "\x1b" in one.body.decode() for one in found)
    return found


@attack(404)
def a_path_in_the_place_of_a_name(by: Intruder) -> list[Refusal]:
    """A29: whose output is read is a name, and never a path. A planted link: test_hostile_workloads.py."""
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


@attack(0, noted=())
def what_a_shell_would_read(by: Intruder) -> None:
    """A30: words of a command are words. Nothing is refused; with a whole agent: test_hostile_workloads.py."""
    words = (";$(id)", "`id`", "a|b", "&&", "$HOME", "*", "\n", "-x", "$(PORT)")
    told = asyncio.run(
        _ran(ProcessSpec(("printf", "<%s>", *words), {"PATH": os.defpath}, stdout=by.stage.server.data / "said"))
    )
    assert told == 0
    assert (by.stage.server.data / "said").read_text() == "".join(f"<{word}>" for word in words)


@attack(0, noted=())
def a_library_for_the_agent(by: Intruder) -> None:
    """A31: what steers a loader reaches the work alone. Nothing is refused; with an agent: test_hostile_workloads.py."""
    order = ProcessSpec(
        ("sh", "-c", "echo $LD_PRELOAD"), {"PATH": os.defpath, "LD_PRELOAD": "/x/e.so"}, stdout=by.stage.server.data / "heard"
    )
    assert asyncio.run(_ran(order)) == 0
    assert (by.stage.server.data / "heard").read_text().splitlines()[-1] == "/x/e.so"
    assert "e.so" not in os.environ.get("LD_PRELOAD", "")


async def _ran(order: ProcessSpec) -> int | None:
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
def a_url_into_the_house(by: Intruder) -> list[Refusal]:
    """A32: metadata services, loopback and private hosts in every spelling. Names that lead there: test_fetching.py."""
    text, digest = by.member(), "0" * 64
    found = [by.ask("POST", MINE, job(artifacts=[{"source": one, "sha256": digest}]), text) for one in SOURCES]
    return found + [by.ask("POST", MINE, job(rootfs={"source": one, "sha256": digest}), text) for one in SOURCES]


@attack(422, "invalid", within_s=0.1)
def patterns_that_stumble(by: Intruder) -> list[Refusal]:
    """A33: selectors of ten thousand terms, in the query and in the body, and texts at which a careless pattern never ends."""
    text = by.member()
    by.ask("GET", MINE, None, text)
    by.took_s = 0.0
    terms, many = ",".join(["a"] * 10_000), {f"k{at}": "v" for at in range(10_000)}
    stumbling = ("a" * 40_000 + "!", "a-" * 15_000, "a." * 15_000 + "/", "-" * 40_000, "(" * 10_000, "a in (" + "a," * 15_000)
    found = [by.get(f"{MINE}?labelSelector={quote(one, safe=',')}", text) for one in (terms, *stumbling)]
    found.append(by.get(f"{MINE}?fieldSelector={','.join(['spec.type=job'] * 3_000)}", text))
    bodies = [workload("w", placement={"nodeSelector": many}), workload("w", labels=many)]
    bodies += [workload("w", labels={one: "v"}) for one in stumbling] + [workload(one) for one in stumbling]
    return found + [by.ask("POST", MINE, body, text) for body in bodies]
