"""Parsing of kinds and `KIND/NAME` arguments, and shell completion of kinds. The names are in the definitions of the kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from remit.model.kinds.registry import BY_KIND, DEFINITIONS
from remit.model.problems import an, closest_name, did_you_mean, escaped, quoted

ENDPOINTS: Final = "Endpoint"
"""Pseudo kind: endpoints are computed from replicas, and listed like objects."""

_KIND_BY_NAME: Final = {
    **{name: kind.kind for kind in DEFINITIONS for name in (kind.prefix, kind.plural, *kind.aliases)},
    **dict.fromkeys(("endpoint", "endpoints", "ep"), ENDPOINTS),
}
_PLURALS_BY_FOREIGN_NAME: Final = {name: kind.plural for kind in DEFINITIONS for name in kind.foreign_names}


class ObjectRef(NamedTuple):
    """Reference to one object. `tenant` is empty if it was not given, or if the kind is not tenant-scoped."""

    kind: str
    name: str
    tenant: str = ""

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


def parse_kind(name: str) -> str:
    """Resolve a singular, plural or short name, in any case, to its kind."""
    kind = _KIND_BY_NAME.get(name.lower())
    if kind is not None:
        return kind
    local_name = _PLURALS_BY_FOREIGN_NAME.get(name.lower())
    known = [name for definition in DEFINITIONS for name in (definition.prefix, definition.plural)]
    similar = f"the corresponding kind is {local_name}" if local_name else did_you_mean(closest_name(name, known[:64]))
    raise click.UsageError(f"unknown kind {quoted(name)}; {similar or '`remit schema` lists all kinds'}")


def is_tenant_scoped(kind: str) -> bool:
    return kind == ENDPOINTS or BY_KIND[kind].tenanted


def _has_composed_name(kind: str) -> bool:
    return kind != ENDPOINTS and BY_KIND[kind].composed_name


def plural_name(kind: str) -> str:
    return "endpoints" if kind == ENDPOINTS else BY_KIND[kind].plural


def parse_object_refs(args: Sequence[str]) -> tuple[list[str], list[ObjectRef]]:
    """Parse `KIND`, `KIND,KIND`, `KIND NAME...` or `KIND/NAME...` into the kinds to list, or the named objects."""
    first, rest = args[0], args[1:]
    if "/" in first:
        return [], [parse_object_ref(arg) for arg in args]
    kinds = [parse_kind(arg) for arg in first.split(",") if arg] or [parse_kind("")]
    if not rest:
        return kinds, []
    if len(kinds) > 1:
        raise click.UsageError(
            f"{quoted(first)} lists several kinds, so names would be ambiguous; write KIND/NAME for each object"
        )
    mixed = next((arg for arg in rest if "/" in arg and not _has_composed_name(kinds[0])), None)
    if mixed is not None:
        raise click.UsageError(f"{quoted(mixed)} mixes two notations; {_notation_fix(first, mixed, kinds[0])}")
    return [], [ObjectRef(kinds[0], _require_name(arg, kinds[0])) for arg in rest]


def _notation_fix(kind_name: str, arg: str, kind: str) -> str:
    tenant, _, name = arg.partition("/")
    if is_tenant_scoped(kind) and tenant.lower() not in _KIND_BY_NAME and name and "/" not in name:
        return escaped(f"write {kind_name}/{tenant}/{name}, or {kind_name} {name} -t {tenant}")
    return f"write {escaped(kind_name)}/NAME for all objects, or NAME for all"


def parse_object_ref(arg: str, default: str = "") -> ObjectRef:
    """Parse `KIND/NAME` or `KIND/TENANT/NAME`. A name without a kind has the kind `default`, if that is given."""
    head, slash, rest = arg.partition("/")
    if not slash:
        if default:
            return ObjectRef(default, _require_name(arg, default))
        raise click.UsageError(f"{quoted(arg)} has no kind; write KIND/NAME, such as workload/{escaped(arg) or 'web'}")
    kind = parse_kind(head)
    tenant, slash, name = rest.partition("/")
    if slash and not _has_composed_name(kind):
        if not is_tenant_scoped(kind):
            raise click.UsageError(f"{quoted(arg)}: {an(kind.lower())} does not belong to a tenant; write {kind.lower()}/NAME")
        return ObjectRef(kind, _require_name(name, kind), tenant)
    return ObjectRef(kind, _require_name(rest, kind))


def _require_name(name: str, kind: str) -> str:
    if not name:
        raise click.UsageError(f"the name is empty; write {kind.lower()}/NAME, such as {kind.lower()}/web")
    return name


def complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete kinds. Object names are not completed: that would need a server, which may be slow or down."""
    plurals = [*(definition.plural for definition in DEFINITIONS), "endpoints", "all"]
    if "/" in incomplete or "," in incomplete:
        return []
    prefix = incomplete.lower()
    exact = [definition.prefix for definition in DEFINITIONS if definition.prefix.startswith(prefix)] if prefix else []
    return [CompletionItem(name) for name in dict.fromkeys([*(name for name in plurals if name.startswith(prefix)), *exact])]
