"""Commands `doctor` and `support-bundle`: check this machine, and collect redacted diagnostics.

A bundle contains only what diagnosis needs: no manifests except nodes, no values, only the ends of logs. In addition, text
that looks like a token, key or digest is replaced. The checks of `doctor` are in world/host_checks.py.
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
"""JSON fields whose values are always redacted."""
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
        "remit support-bundle                        write remit-support.tar.gz for the current server and this machine",
        "remit support-bundle -o report.tar.gz --data /srv/remit    include the ends of the logs in this data directory",
    ),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("remit-support.tar.gz"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Data directory of the agent on this machine, for its logs.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@server_options()
def support_bundle(context: CommandContext, output: Path, data: Path | None, force: bool) -> None:
    """Collect diagnostics for a bug report in one archive.

    It contains status, metrics, events, decisions, nodes, the stacks of the server's tasks, the ends of logs, and the result
    of `remit doctor`. Secrets, tokens, environment values and digests are redacted; still, review it before you send it.
    """
    if output.exists() and not force:
        raise CommandError(f"{escaped(str(output))} already exists", "choose another file with -o, or use --force")
    clean = Redactor((context.address.token,))
    parts = {"versions.json": _versions_json(), "doctor.json": _doctor_json(data), "contexts.json": _contexts_json()}
    parts |= call_server(context, _fetch_server_files)
    parts |= _log_tails(data)
    archive = _pack({name: clean(name, body) for name, body in parts.items()})
    draft = output.with_name(f".{output.name}.part")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(archive)
    draft.replace(output)
    click.echo(f"{escaped(str(output))}: {len(parts)} parts, {len(archive)} bytes; review it before you send it")


class Redactor:
    """Replaces secrets in the files of a bundle. `known` are secrets to be replaced literally."""

    def __init__(self, known: tuple[str, ...] = ()) -> None:
        self._secrets = tuple(secret for secret in known if secret)

    def __call__(self, name: str, body: bytes) -> bytes:
        text = body[-FILE_BYTES_MAX:].decode("utf-8", "replace")
        if name.endswith(".json"):
            with suppress(ValueError):  # truncated JSON is redacted as text
                text = json.dumps(_redact_fields(json.loads(text)), indent=1)
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        for pattern, replacement in _SECRET_PATTERNS:
            text = pattern.sub(replacement, text)
        return text.encode("utf-8", "backslashreplace")


def _redact_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redact_fields(REDACTED if _is_private(name, field) else field) for name, field in value.items()}
    return [_redact_fields(item) for item in value] if isinstance(value, list) else value


def _is_private(name: str, field: object) -> bool:
    """Check whether a field may contain a secret. Numbers, such as a count of secrets, do not."""
    return PRIVATE_FIELDS.fullmatch(name) is not None and not isinstance(field, bool | int | float)


def _versions_json() -> bytes:
    return _to_json({"remit": __version__, "python": sys.version, "machine": platform.platform()})


def _doctor_json(data: Path | None) -> bytes:
    from remit.cli.local.daemon_options import LISTEN_PORT, default_data_directory
    from remit.world.host_checks import run_host_checks

    return _to_json([result._asdict() for result in run_host_checks(data or default_data_directory(), LISTEN_PORT)])


def _contexts_json() -> bytes:
    """Return names and servers of the contexts, without tokens and their file names."""
    from remit.cli.session.contexts import ContextError, config_path, load_contexts

    try:
        contexts = load_contexts(config_path())
    except ContextError as error:
        return _to_json({"unreadable": error.message})
    return _to_json({ctx.name: {"server": ctx.server} for ctx in contexts.contexts})


async def _fetch_server_files(api: Api) -> dict[str, bytes]:
    """Fetch the diagnostics of the server. Errors are stored in place of the file, because a faulty server may still answer
    other requests.
    """
    paths = {
        "status.json": "/v1/status",
        "support.json": "/v1/support",
        "metrics.txt": "/metrics",
        "account.json": f"/v1/account?limit={EVENTS_MAX}",
        "nodes.json": f"/v1/nodes?limit={OBJECTS_MAX}",
        "top.json": "/v1/top/nodes",
        "audit.json": f"/v1/audit?limit={EVENTS_MAX}",
    }
    files = {name: await _fetch_or_error(api, path) for name, path in paths.items()}
    workloads = await _fetch_or_error(api, f"/v1/workloads?limit={OBJECTS_MAX}")
    files["workloads.json"] = _workload_summaries(workloads)
    return files


async def _fetch_or_error(api: Api, path: str) -> bytes:
    from remit.client.api import ApiError, Unanswered

    try:
        return await api.read(path)
    except (ApiError, Unanswered) as error:
        return _to_json({"unanswered": str(error)})


def _workload_summaries(body: bytes) -> bytes:
    """Return only metadata and status of workloads, because commands and arguments may contain secrets."""
    try:
        items = [_workload_summary(item) for item in json.loads(body)["items"]]
    except (ValueError, KeyError, TypeError):
        return body if body.startswith(b'{"unanswered"') else _to_json({"unreadable": True})
    return _to_json({"items": items})


def _workload_summary(item: dict[str, Any]) -> dict[str, Any]:
    metadata = _select(item["metadata"], "name", "tenant", "generation", "revision")
    return {"metadata": metadata, "status": item.get("status", {}), **_select(item["spec"], "type", "replicas")}


def _select(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value}


def _log_tails(data: Path | None) -> dict[str, bytes]:
    from remit.cli.local.daemon_options import default_data_directory

    files: dict[str, bytes] = {}
    for name in LOG_FILES:
        path = (data or default_data_directory()) / name
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                files[f"logs/{name.replace('/', '-')}"] = file.read(LOG_TAIL_BYTES)
        except OSError:
            continue
    return files


def _pack(parts: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, body in sorted(parts.items()):
            info = tarfile.TarInfo(f"remit-support/{name}")
            info.size, info.mode = len(body), 0o600
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def _to_json(value: object) -> bytes:
    return json.dumps(value, indent=1, default=str).encode()


OK, MISSING = 0, 1


@click.command(
    epilog=examples(
        "remit doctor                        before `remit up`, or before an agent is installed",
        "remit doctor --data /srv/remit      check the disk of this directory",
        "remit doctor -o json                JSON, one object per check",
    )
)
@click.option("--data", type=click.Path(path_type=Path), help="Data directory to check.  [default: that of `remit up`]")
@click.option("--port", type=click.IntRange(1, 65535), default=LISTEN_PORT, show_default=True, help="API port to check.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format.")
def doctor(data: Path | None, port: int, output: str) -> None:
    """Check what Remit needs on this machine, and print a fix for everything that is missing.

    It checks clock, disk, ports, cgroups, sandbox and limits. Exits with 1 if a requirement is missing; limited features are
    warnings.
    """
    from remit.world.host_checks import run_host_checks

    results = run_host_checks(data or default_data_directory(), port)
    if output == "json":
        from remit.model.objects import encode

        click.echo(encode([result._asdict() for result in results]).decode())
    else:
        _print_checks(results)
    sys.exit(MISSING if any(result.state == "fail" for result in results) else OK)


def _print_checks(results: list[HostCheck]) -> None:
    from rich.table import Table
    from rich.text import Text

    from remit.cli.output.console import console, until_broken_pipe
    from remit.cli.output.explanations import many

    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
    table = Table.grid(padding=(0, 2))
    for result in results:
        mark, colour = marks[result.state]
        text = Text(result.found)
        if result.cure:
            text.append(f"\n→ {result.cure}", style="cyan")
        table.add_row(Text(mark, style=f"bold {colour}"), Text(result.name, style="bold"), text)
    failures, warnings = (sum(result.state == state for result in results) for state in ("fail", "warn"))
    with until_broken_pipe():
        out = console()
        out.print(table)
        if failures:
            failed = "1 check failed; Remit does not run here until it is fixed"
            if failures > 1:
                failed = f"{failures} checks failed; Remit does not run here until they are fixed"
            out.print(Text(f"\n{failed}", style="bold red"))
        elif warnings:
            out.print(Text(f"\nRemit runs here, with {many(warnings, 'warning')}", style="bold yellow"))
        else:
            out.print(Text("\nall checks passed", style="bold green"))
