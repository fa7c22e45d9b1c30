"""Contexts file, and the choice of the server, token and tenant of a command.

Flags take precedence over the environment, and the environment over the file. No server is called here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted

if TYPE_CHECKING:
    from remit.world.net.tls import Trust

DEFAULT_TENANT: Final = "default"
TOKEN_BYTES_MAX: Final = 4_096
CONFIG_BYTES_MAX: Final = 1 << 20
CONTEXTS_MAX: Final = 1_000


class ContextError(click.ClickException):
    """Server or token could not be determined. The message contains the fix."""

    exit_code = 2


class Context(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """A named server. The token is stored inline or in `token_file`; `ca_file` is the CA certificate of the server."""

    name: str
    server: str
    token: str = ""
    token_file: str = ""
    tenant: str = ""
    ca_file: str = ""


class Contexts(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Content of the contexts file: named servers, and the current one."""

    contexts: tuple[Context, ...] = ()
    current: str = ""

    def get(self, name: str) -> Context | None:
        return next((ctx for ctx in self.contexts if ctx.name == name), None)

    def named(self, name: str) -> Context:
        found = self.get(name)
        if found is None:
            names = [ctx.name for ctx in self.contexts]
            fix = did_you_mean(closest_name(name, names)) or (
                f"contexts are {one_of(names)}" if names else "no context is defined yet"
            )
            raise ContextError(f"context {quoted(name)} not found; {escaped(fix)}")
        return found


class ServerFlags(NamedTuple):
    """Server flags of the command line; a flag that was not given is empty."""

    context: str = ""
    server: str = ""
    token_file: str = ""
    tenant: str = ""
    ca_file: str = ""

    def resolve(self, environ: Mapping[str, str] = os.environ) -> ServerAddress:
        return resolve_server(
            context=self.context,
            server=self.server,
            token_file=self.token_file,
            tenant=self.tenant,
            ca_file=self.ca_file,
            environ=environ,
        )


class ServerAddress(NamedTuple):
    """Server URL, token and default tenant. An empty `ca_file` means the CA certificates of the system."""

    server: str
    token: str
    tenant: str
    context: str = ""
    ca_file: str = ""

    @property
    def trust(self) -> Trust:
        from remit.world.net.tls import Trust

        return Trust(self.ca_file)


# -- contexts file -------------------------------------------------------------------------------------------------------------


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return REMIT_CONFIG, or remit/config.yaml below XDG_CONFIG_HOME or ~/.config."""
    if named := environ.get("REMIT_CONFIG"):
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "remit" / "config.yaml"


def load_contexts(path: Path) -> Contexts:
    """Read the contexts file; a missing file is empty. Errors in it are reported with their lines."""
    from remit.model.manifests.documents import read_documents
    from remit.model.manifests.type_checks import TypeChecker
    from remit.model.problems import Problems

    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ContextError(f"{escaped(str(path))} cannot be read: {escaped(error.strerror or str(error))}") from error
    if not data.strip():
        return Contexts()
    problems = Problems(str(path))
    documents = read_documents(data, str(path), problems)
    checker, value = TypeChecker(problems, None), None
    for document in documents:
        value = checker.check(document, msgspec.inspect.type_info(Contexts), ())
    found_problems = problems.sorted_problems()
    if found_problems or len(documents) != 1:
        details = (
            "\n  ".join(str(problem) for problem in found_problems) or f"{escaped(str(path))} has {len(documents)} documents"
        )
        raise ContextError(
            f"the contexts file is invalid\n  {details}\n  correct it, or move it away to start with an empty one"
        )
    return msgspec.convert(value, Contexts)


def save_contexts(path: Path, contexts: Contexts) -> None:
    """Write the file atomically, readable by its owner only because it may contain tokens."""
    from remit.cli.output.serialization import yaml_text
    from remit.world.files.disk import FileDisk
    from remit.world.interfaces import DiskError

    disk = FileDisk()
    path = path.resolve()  # a symbolic link is kept; its target is replaced
    try:
        disk.make_directory(path.parent)
        disk.write_atomically(path, yaml_text(msgspec.to_builtins(contexts)).encode())
    except DiskError as error:
        raise ContextError(f"the contexts file cannot be written: {escaped(str(error))}") from error


def with_context(contexts: Contexts, new: Context, *, use: bool) -> Contexts:
    """Add `new`, or replace the context of the same name."""
    if contexts.get(new.name) is None and len(contexts.contexts) >= CONTEXTS_MAX:
        raise ContextError(f"there are {CONTEXTS_MAX} contexts already; remove some")
    contexts_after = [new if ctx.name == new.name else ctx for ctx in contexts.contexts]
    if new not in contexts_after:
        contexts_after.append(new)
    return Contexts(tuple(contexts_after), new.name if use else contexts.current)


def save_and_use_context(
    name: str, server: str, token_file: Path | str, tenant: str = "", *, ca_file: str = "", path: Path | None = None
) -> Path:
    """Store a server as a named context and make it the current one. Returns the path of the contexts file."""
    path = path or config_path()
    new = Context(name, server, token_file=str(Path(token_file).absolute()), tenant=tenant, ca_file=ca_file)
    save_contexts(path, with_context(load_contexts(path), new, use=True))
    return path


# -- server of a command -------------------------------------------------------------------------------------------------------


def resolve_server(
    *,
    context: str = "",
    server: str = "",
    token_file: str = "",
    tenant: str = "",
    ca_file: str = "",
    environ: Mapping[str, str] = os.environ,
) -> ServerAddress:
    """Determine server, token and tenant from flags, environment and contexts file, in this order. A --context flag also
    overrides REMIT_SERVER.

    The token of a context is only ever sent to the server of that context.
    """
    env = {} if context else environ
    url = server or env.get("REMIT_SERVER", "")
    name = context or environ.get("REMIT_CONTEXT", "")
    known = load_contexts(config_path(environ))
    found = known.named(name) if name else known.get(known.current)
    if not url and found is None:
        raise _no_server_error(known)
    chosen = found or Context("", url)
    url = server_url(url or chosen.server)
    own = chosen if server_url(chosen.server) == url else Context("", url)
    token = _find_token(token_file, env, own)
    if not token:
        raise ContextError(f"no token for {escaped(url)}\n  give its file with --token-file, or set REMIT_TOKEN")
    default_tenant = tenant or environ.get("REMIT_TENANT", "") or chosen.tenant or DEFAULT_TENANT
    ca_file = ca_file or env.get("REMIT_CA_FILE", "") or own.ca_file
    return ServerAddress(url, token, default_tenant, own.name, _check_ca_file(ca_file))


def _no_server_error(known: Contexts) -> ContextError:
    if known.contexts:
        names = one_of(ctx.name for ctx in known.contexts)
        return ContextError(f"no current context\n  choose one with `remit context use NAME`: {escaped(names)}")
    return ContextError("no server is configured\n  run `remit up`, or give a server with --server URL --token-file FILE")


def _check_ca_file(name: str) -> str:
    """Check that the file can be read. Otherwise a missing file would be reported as an untrusted server certificate."""
    if not name:
        return ""
    try:
        path = Path(name).expanduser()
        path.open("rb").close()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fix = "give the CA certificate of the server with --ca-file; it is tls/ca.pem in the server's data directory"
        raise ContextError(f"CA certificate file cannot be read: {escaped(name)}: {escaped(reason)}\n  {fix}") from error
    return str(path)


def _find_token(token_file: str, environ: Mapping[str, str], context: Context) -> str:
    if token_file:
        return read_token(token_file, "--token-file")
    if token := environ.get("REMIT_TOKEN", "").strip():
        return _check_token(token, "REMIT_TOKEN")
    if named := environ.get("REMIT_TOKEN_FILE"):
        return read_token(named, "REMIT_TOKEN_FILE")
    if context.token_file:
        return read_token(context.token_file, f"context {context.name}")
    return _check_token(context.token, f"context {context.name}") if context.token else ""


def read_token(name: str, source: str) -> str:
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(TOKEN_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ContextError(f"token file of {escaped(source)} cannot be read: {escaped(name)}: {escaped(reason)}") from error
    token = data.decode("latin-1").strip()
    if not token:
        raise ContextError(f"token file of {escaped(source)} is empty: {escaped(name)}")
    return _check_token(token, source)


def _check_token(token: str, source: str) -> str:
    """Check that a token can be sent in an HTTP header."""
    if len(token) > TOKEN_BYTES_MAX or not (token.isascii() and token.isprintable()) or " " in token:
        raise ContextError(
            f"the value of {escaped(source)} is not a token; a token is one line of printable ASCII characters without spaces"
        )
    return token


def server_url(text: str) -> str:
    """Normalize a server URL; `host:port` means http. Other schemes are refused."""
    url = text.strip()
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ContextError(f"{quoted(text)} is not a server URL\n  write it like http://127.0.0.1:7420")
    if parts.username or parts.password:
        raise ContextError(f"the URL of {quoted(parts.hostname)} contains a password\n  use a token file instead: --token-file")
    return url
