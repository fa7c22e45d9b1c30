"""`doctor`, `support-bundle`.

Gathered from the server and this machine into one file, without anybody's secrets.

Nothing is taken that need not be: no manifests but what nodes are, no values, no files but a log's end. What is left is
searched for what looks like a token, a key or a digest before it is written.

Prints what world/host_checks.py found; nothing is mended here.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from remit import __version__
from remit.cli.local.daemon_options import LISTEN_PORT, default_data_directory
from remit.cli.main import examples
from remit.cli.session.server_call import CommandContext, CommandError, call_server, server_options
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.client.api import Api
    from remit.world.host_checks import HostCheck

REDACTED: Final = "[hidden]"
FILE_BYTES_MAX: Final = 4 << 20
LOG_TAIL_BYTES: Final = 256 << 10
EVENTS_MAX: Final = 1_000
OBJECTS_MAX: Final = 500
LOG_FILES: Final = ("agent.log", "agent/run/keeper.log", "agent/keeper.log", "log")
PRIVATE_FIELDS: Final = re.compile(
    r"env|data|digest|token|secret|password|passwd|authorization|cookie|credential|annotations", re.I
)
"""Fields whose values are never told, wherever they stand."""
_SECRET_PATTERNS: Final = (
    (re.compile(r"remit_[A-Za-z0-9_-]{12,}"), REDACTED),
    (re.compile(r"(?i)\bbearer\s+\S+"), REDACTED),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "[digest]"),
    (re.compile(r"-----BEGIN [^-]*-----.*?(-----END [^-]*-----|$)", re.S), REDACTED),
    (re.compile(r"(?i)\b(password|passwd|secret|token|api[-_]?key)\b(\s*[=:]\s*)[^\s,;\"']+"), rf"\1\2{REDACTED}"),
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), f"://{REDACTED}@"),
)


@click.command(
    "support-bundle",
    epilog=examples(
        "remit support-bundle                        remit-support.tar.gz, of the server that is meant and this machine",
        "remit support-bundle -o report.tar.gz --data /srv/remit    with the ends of the logs that are kept there",
    ),
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("remit-support.tar.gz"), show_default=True
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Where logs of an agent of this machine are.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@server_options()
def support_bundle(context: CommandContext, output: Path, data: Path | None, force: bool) -> None:
    """Gather what a report about a fault needs into one file.

    Status, metrics, events and decisions, nodes, where the server's tasks stand, the ends of logs, and what `remit doctor`
    finds. No secrets, tokens, values of environments or digests are in it; look through it all the same before you send it.
    """
    if output.exists() and not force:
        raise CommandError(f"{escaped(str(output))} exists already", "name another with -o, or say --force")
    clean = Redactor((context.address.token,))
    parts = {"versions.json": _versions_json(), "doctor.json": _doctor_json(data), "contexts.json": _contexts_json()}
    parts |= call_server(context, _fetch_server_files)
    parts |= _log_tails(data)
    made = _pack({name: clean(name, body) for name, body in parts.items()})
    draft = output.with_name(f".{output.name}.part")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(made)
    draft.replace(output)
    click.echo(f"{escaped(str(output))}: {len(parts)} parts, {len(made)} bytes; look through it before you send it")


class Redactor:
    """Takes out what must not leave. `known` are secrets that are known by their words."""

    def __init__(self, known: tuple[str, ...] = ()) -> None:
        self._known = tuple(word for word in known if word)

    def __call__(self, name: str, body: bytes) -> bytes:
        text = body[-FILE_BYTES_MAX:].decode("utf-8", "replace")
        if name.endswith(".json"):
            with suppress(ValueError):  # what was cut is no JSON: it is cleaned as text
                text = json.dumps(_redact_fields(json.loads(text)), indent=1)
        for word in self._known:
            text = text.replace(word, REDACTED)
        for pattern, instead in _SECRET_PATTERNS:
            text = pattern.sub(instead, text)
        return text.encode("utf-8", "backslashreplace")


def _redact_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redact_fields(REDACTED if _is_private(name, inside) else inside) for name, inside in value.items()}
    return [_redact_fields(one) for one in value] if isinstance(value, list) else value


def _is_private(name: str, inside: object) -> bool:
    """A count of secrets is none."""
    return PRIVATE_FIELDS.fullmatch(name) is not None and not isinstance(inside, bool | int | float)


def _versions_json() -> bytes:
    return _to_json({"remit": __version__, "python": sys.version, "machine": platform.platform()})


def _doctor_json(data: Path | None) -> bytes:
    from remit.cli.local.daemon_options import LISTEN_PORT, default_data_directory
    from remit.world.host_checks import run_host_checks

    return _to_json([one._asdict() for one in run_host_checks(data or default_data_directory(), LISTEN_PORT)])


def _contexts_json() -> bytes:
    """Which servers are known by which names; tokens, and the files that they are in, are nobody's business."""
    from remit.cli.session.contexts import ContextError, config_path, load_contexts

    try:
        known = load_contexts(config_path())
    except ContextError as error:
        return _to_json({"unreadable": error.message})
    return _to_json({ctx.name: {"server": ctx.server} for ctx in known.contexts})


async def _fetch_server_files(api: Api) -> dict[str, bytes]:
    """What one answer cannot give is told in its place: a server that is ill answers some and not others."""
    paths = {
        "status.json": "/v1/status",
        "support.json": "/v1/support",
        "metrics.txt": "/metrics",
        "account.json": f"/v1/account?limit={EVENTS_MAX}",
        "nodes.json": f"/v1/nodes?limit={OBJECTS_MAX}",
        "top.json": "/v1/top/nodes",
        "audit.json": f"/v1/audit?limit={EVENTS_MAX}",
    }
    found = {name: await _fetch_or_error(api, path) for name, path in paths.items()}
    workloads = await _fetch_or_error(api, f"/v1/workloads?limit={OBJECTS_MAX}")
    found["workloads.json"] = _workload_summaries(workloads)
    return found


async def _fetch_or_error(api: Api, path: str) -> bytes:
    from remit.client.api import ApiError, Unanswered

    try:
        return await api.read(path)
    except (ApiError, Unanswered) as error:
        return _to_json({"unanswered": str(error)})


def _workload_summaries(body: bytes) -> bytes:
    """Of workloads, who they are and how they fare; what they run may say more than it should."""
    try:
        listed = json.loads(body)
        items = [
            {"metadata": _select(item["metadata"], "name", "tenant", "generation", "revision"), "status": item.get("status", {}),
             "type": item["spec"].get("type"), "replicas": item["spec"].get("replicas")}
            for item in listed["items"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return body if body.startswith(b'{"unanswered"') else _to_json({"unreadable": True})
    return _to_json({"items": items})


def _select(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def _log_tails(data: Path | None) -> dict[str, bytes]:
    from remit.cli.local.daemon_options import default_data_directory

    found: dict[str, bytes] = {}
    for name in LOG_FILES:
        path = (data or default_data_directory()) / name
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                found[f"logs/{name.replace('/', '-')}"] = file.read(LOG_TAIL_BYTES)
        except OSError:
            continue
    return found


def _pack(parts: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, body in sorted(parts.items()):
            one = tarfile.TarInfo(f"remit-support/{name}")
            one.size, one.mode = len(body), 0o600
            tar.addfile(one, io.BytesIO(body))
    return out.getvalue()


def _to_json(value: object) -> bytes:
    return json.dumps(value, indent=1, default=str).encode()


OK, MISSING = 0, 1


@click.command(
    epilog=examples(
        "remit doctor                        before `remit up`, or before an agent is put on a machine",
        "remit doctor --data /srv/remit      look at the disk that it would use",
        "remit doctor -o json                for programs: one object for each finding",
    )
)
@click.option("--data", type=click.Path(path_type=Path), help="Where data would be kept.  [default: as `remit up`]")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=LISTEN_PORT, show_default=True, help="Where the API would listen."
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def doctor(data: Path | None, port: int, output: str) -> None:
    """Try what Remit needs of this machine, and say what is missing and the cure.

    Looked at are clock, disk, ports, cgroups, sandbox and limits. Exits with 1 if something is missing without which nothing
    runs; what only takes something away is a warning.
    """
    from remit.world.host_checks import run_host_checks

    found = run_host_checks(data or default_data_directory(), port)
    if output == "json":
        from remit.model.objects import encode

        click.echo(encode([result._asdict() for result in found]).decode())
    else:
        _print_checks(found)
    sys.exit(MISSING if any(result.state == "fail" for result in found) else OK)


def _print_checks(found: list[HostCheck]) -> None:
    from rich.table import Table
    from rich.text import Text

    from remit.cli.output.console import console, until_broken_pipe

    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
    table = Table.grid(padding=(0, 2))
    for result in found:
        mark, colour = marks[result.state]
        said = Text(result.found)
        if result.cure:
            said.append(f"\n→ {result.cure}", style="cyan")
        table.add_row(Text(mark, style=f"bold {colour}"), Text(result.name, style="bold"), said)
    missing, less = (sum(result.state == state for result in found) for state in ("fail", "warn"))
    with until_broken_pipe():
        out = console()
        out.print(table)
        if missing:
            out.print(Text(f"\nnothing runs here until {missing} of these are mended", style="bold red"))
        elif less:
            out.print(Text(f"\nfit to run, with less than all: {less} to look at", style="bold yellow"))
        else:
            out.print(Text("\nfit to run", style="bold green"))
