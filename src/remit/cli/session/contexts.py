"""Contexts file; which server and token a command uses.

Flags come before the environment, and that before the file. Nothing is asked here.
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
    """Nobody could say which server is meant, or with what token; the message says what to do."""

    exit_code = 2


class Context(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """A server that is known by a name. The token stands here, or in a file of its own. `ca_file`: who has signed for it."""

    name: str
    server: str
    token: str = ""
    token_file: str = ""
    tenant: str = ""
    ca_file: str = ""


class Contexts(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is in the file: servers by name, and which of them is meant when nobody says."""

    contexts: tuple[Context, ...] = ()
    current: str = ""

    def get(self, name: str) -> Context | None:
        return next((ctx for ctx in self.contexts if ctx.name == name), None)

    def named(self, name: str) -> Context:
        found = self.get(name)
        if found is None:
            names = [ctx.name for ctx in self.contexts]
            cure = did_you_mean(closest_name(name, names)) or (f"there are {one_of(names)}" if names else "none is set yet")
            raise ContextError(f"there is no context {quoted(name)}; {escaped(cure)}")
        return found


class ServerFlags(NamedTuple):
    """What was said on the command line; empty is what was not."""

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
    """Where to ask, with which token, and whose things are meant if nobody says. `ca_file` is empty if the system knows."""

    server: str
    token: str
    tenant: str
    context: str = ""
    ca_file: str = ""

    @property
    def trust(self) -> Trust:
        from remit.world.net.tls import Trust

        return Trust(self.ca_file)


# -- the file ------------------------------------------------------------------------------------------------------------------


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file is: REMIT_CONFIG, or under the directory for configurations."""
    if named := environ.get("REMIT_CONFIG"):
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "remit" / "config.yaml"


def load_contexts(path: Path) -> Contexts:
    """What is in the file; nothing, if there is none. Mistakes in it are told with their lines."""
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
    shapes, value = TypeChecker(problems, None), None
    for document in documents:
        value = shapes.check(document, msgspec.inspect.type_info(Contexts), ())
    told = problems.sorted_problems()
    if told or len(documents) != 1:
        said = "\n  ".join(str(problem) for problem in told) or f"{escaped(str(path))} has {len(documents)} documents"
        raise ContextError(f"the file of contexts is not right\n  {said}\n  mend it, or move it away and begin anew")
    return msgspec.convert(value, Contexts)


def save_contexts(path: Path, contexts: Contexts) -> None:
    """Whole or not at all, for its owner's eyes alone: there may be tokens in it."""
    from remit.cli.output.serialization import yaml_text
    from remit.world.files.disk import FileDisk
    from remit.world.interfaces import DiskError

    disk = FileDisk()
    path = path.resolve()  # a link stays a link; what it leads to is replaced
    try:
        disk.make_directory(path.parent)
        disk.write_atomically(path, yaml_text(msgspec.to_builtins(contexts)).encode())
    except DiskError as error:
        raise ContextError(f"the contexts cannot be kept: {escaped(str(error))}") from error


def with_context(contexts: Contexts, made: Context, *, use: bool) -> Contexts:
    """With `made` in place of one of its name, or at the end."""
    if contexts.get(made.name) is None and len(contexts.contexts) >= CONTEXTS_MAX:
        raise ContextError(f"there are {CONTEXTS_MAX} contexts already; remove some")
    kept = [made if ctx.name == made.name else ctx for ctx in contexts.contexts]
    if made not in kept:
        kept.append(made)
    return Contexts(tuple(kept), made.name if use else contexts.current)


def save_and_use_context(
    name: str, server: str, token_file: Path | str, tenant: str = "", *, ca_file: str = "", path: Path | None = None
) -> Path:
    """Keep a server under a name and make it the one that is meant when nobody says. Answers which file says so now."""
    path = path or config_path()
    made = Context(name, server, token_file=str(Path(token_file).absolute()), tenant=tenant, ca_file=ca_file)
    save_contexts(path, with_context(load_contexts(path), made, use=True))
    return path


# -- what is meant -------------------------------------------------------------------------------------------------------------


def resolve_server(
    *,
    context: str = "",
    server: str = "",
    token_file: str = "",
    tenant: str = "",
    ca_file: str = "",
    environ: Mapping[str, str] = os.environ,
) -> ServerAddress:
    """Flags, then the environment, then the file. A context that is named by a flag comes before REMIT_SERVER.

    The token of a context is sent to the server of that context and to no other.
    """
    env = {} if context else environ
    url = server or env.get("REMIT_SERVER", "")
    name = context or environ.get("REMIT_CONTEXT", "")
    known = load_contexts(config_path(environ))
    found = known.named(name) if name else known.get(known.current)
    if not url and found is None:
        if known.contexts:
            named = one_of(ctx.name for ctx in known.contexts)
            raise ContextError(f"no context is in use\n  choose one with `remit context use NAME`: {escaped(named)}")
        raise ContextError("no server is named\n  run `remit up`, or name a server with --server URL --token-file FILE")
    url = server_url(url or (found.server if found else ""))
    mine = found if found is not None and server_url(found.server) == url else None
    token = _find_token(token_file, env, mine)
    if not token:
        raise ContextError(f"there is no token for {escaped(url)}\n  name its file with --token-file, or set REMIT_TOKEN")
    whose = tenant or environ.get("REMIT_TENANT", "") or (found.tenant if found else "") or DEFAULT_TENANT
    believed = ca_file or env.get("REMIT_CA_FILE", "") or (mine.ca_file if mine else "")
    return ServerAddress(url, token, whose, mine.name if mine else "", _check_ca_file(believed))


def _check_ca_file(name: str) -> str:
    """Looked for now: a file that is not there is told by its name, and not as a server that nobody can believe."""
    if not name:
        return ""
    try:
        path = Path(name).expanduser()
        path.open("rb").close()
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        cure = "give the certificate of the server's authority, tls/ca.pem of its directory, with --ca-file"
        raise ContextError(f"the file of certificates cannot be read: {escaped(name)}: {escaped(why)}\n  {cure}") from error
    return str(path)


def _find_token(token_file: str, environ: Mapping[str, str], context: Context | None) -> str:
    if token_file:
        return read_token(token_file, "--token-file")
    if token := environ.get("REMIT_TOKEN", "").strip():
        return _check_token(token, "REMIT_TOKEN")
    if named := environ.get("REMIT_TOKEN_FILE"):
        return read_token(named, "REMIT_TOKEN_FILE")
    if context is None:
        return ""
    if context.token_file:
        return read_token(context.token_file, f"context {context.name}")
    return _check_token(context.token, f"context {context.name}")


def read_token(name: str, whence: str) -> str:
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(TOKEN_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ContextError(f"the token file of {escaped(whence)} cannot be read: {escaped(name)}: {escaped(why)}") from error
    token = data.decode("latin-1").strip()
    if not token:
        raise ContextError(f"the token file of {escaped(whence)} is empty: {escaped(name)}")
    return _check_token(token, whence)


def _check_token(token: str, whence: str) -> str:
    """A token goes into a header: one line of plain letters."""
    if len(token) > TOKEN_BYTES_MAX or not (token.isascii() and token.isprintable()) or " " in token:
        raise ContextError(f"what {escaped(whence)} gives is no token; a token is one line of letters without blanks")
    return token


def server_url(text: str) -> str:
    """`host:port` means http; what cannot be asked over HTTP is refused."""
    url = text.strip()
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ContextError(f"{quoted(text)} is no server\n  write it like http://127.0.0.1:7420")
    if parts.username or parts.password:
        raise ContextError(f"{quoted(parts.hostname)} is named with a password\n  write the token into a file: --token-file")
    return url
