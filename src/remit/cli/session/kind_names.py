"""Names and aliases of kinds, parsing of `KIND/NAME` arguments, and shell completion of kinds.

It imports no model types, so that shell completion stays fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from remit.model.problems import an, closest_name, did_you_mean, escaped, one_of, quoted


class KindName(NamedTuple):
    """Singular, plural and short names of a kind. `tenant_scoped`: names of its objects are unique only within a tenant."""

    kind: str
    plural: str
    aliases: tuple[str, ...] = ()
    tenant_scoped: bool = False


KIND_NAMES: Final = (
    KindName("Region", "regions", ("rg",)),
    KindName("Node", "nodes", ("no",)),
    KindName("NodePool", "nodepools", ("np", "pools")),
    KindName("Tenant", "tenants", ("ten", "tn")),
    KindName("PriorityClass", "priorityclasses", ("pc",)),
    KindName("Policy", "policies", ("pol",)),
    KindName("Workload", "workloads", ("wl", "w"), tenant_scoped=True),
    KindName("Secret", "secrets", ("sec",), tenant_scoped=True),
    KindName("Config", "configs", ("cfg",), tenant_scoped=True),
    KindName("Allotment", "allotments", ("al",), tenant_scoped=True),
    KindName("Override", "overrides", ("ov",)),
    KindName("Token", "tokens", ("tok",)),
    KindName("Replica", "replicas", ("rp", "r"), tenant_scoped=True),
    KindName("Generation", "generations", ("gen",), tenant_scoped=True),
    KindName("PolicyRevision", "policyrevisions", ("pr",)),
    KindName("Grant", "grants", ("gr",)),
    KindName("Peer", "peers"),
    KindName("Lease", "leases", ("ls",)),
    KindName("Decision", "decisions", ("dec",), tenant_scoped=True),
    KindName("Event", "events", ("ev",)),
    KindName("Summary", "summaries", ("sum",)),
)
ENDPOINTS: Final = "Endpoint"
"""Pseudo kind: endpoints are computed from replicas, and listed like objects."""

NAMES_BY_KIND: Final = {names.kind: names for names in KIND_NAMES}
_KIND_BY_NAME: Final = {
    **{name: names.kind for names in KIND_NAMES for name in (names.kind.lower(), names.plural, *names.aliases)},
    **dict.fromkeys(("endpoint", "endpoints", "ep"), ENDPOINTS),
}
_NAMES_ELSEWHERE: Final = {
    **dict.fromkeys(("pod", "pods", "po", "alloc", "allocs", "allocation", "allocations", "task", "tasks"), "replicas"),
    **dict.fromkeys(("deployment", "deployments", "deploy", "job", "jobs", "service", "services", "svc"), "workloads"),
    **dict.fromkeys(("daemonset", "daemonsets", "ds", "statefulset", "statefulsets", "sts", "cronjob", "cj"), "workloads"),
    **dict.fromkeys(("namespace", "namespaces", "ns", "project", "projects", "queue", "queues"), "tenants"),
    **dict.fromkeys(("configmap", "configmaps", "cm"), "configs"),
    **dict.fromkeys(("quota", "resourcequota"), "tenants"),
}
"""Names of similar kinds in Kubernetes and Nomad, for suggestions."""
_KINDS_WITH_SLASH: Final = ("Generation", "Decision")
"""Kinds whose object names contain a slash."""


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
    local_name = _NAMES_ELSEWHERE.get(name.lower())
    known = [name for names in KIND_NAMES for name in (names.kind.lower(), names.plural)]
    similar = f"the corresponding kind is {local_name}" if local_name else did_you_mean(closest_name(name, known[:64]))
    raise click.UsageError(f"unknown kind {quoted(name)}; {similar or '`remit schema` lists all kinds'}")


def is_tenant_scoped(kind: str) -> bool:
    return kind == ENDPOINTS or NAMES_BY_KIND[kind].tenant_scoped


def plural_name(kind: str) -> str:
    return "endpoints" if kind == ENDPOINTS else NAMES_BY_KIND[kind].plural


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
    mixed = next((arg for arg in rest if "/" in arg and kinds[0] not in _KINDS_WITH_SLASH), None)
    if mixed is not None:
        raise click.UsageError(
            f"{quoted(mixed)} mixes two notations; write {escaped(first)}/NAME for all objects, or NAME for all"
        )
    return [], [ObjectRef(kinds[0], _require_name(arg, kinds[0])) for arg in rest]


def parse_object_ref(arg: str, default: str = "") -> ObjectRef:
    """Parse `KIND/NAME` or `KIND/TENANT/NAME`. A name without a kind has the kind `default`, if that is given."""
    head, slash, rest = arg.partition("/")
    if not slash:
        if default:
            return ObjectRef(default, _require_name(arg, default))
        raise click.UsageError(f"{quoted(arg)} has no kind; write KIND/NAME, such as workload/{escaped(arg) or 'web'}")
    kind = parse_kind(head)
    tenant, slash, name = rest.partition("/")
    if slash and kind not in _KINDS_WITH_SLASH:
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
    plurals = [*(names.plural for names in KIND_NAMES), "endpoints", "all"]
    if "/" in incomplete or "," in incomplete:
        return []
    prefix = incomplete.lower()
    exact = [names.kind.lower() for names in KIND_NAMES if names.kind.lower().startswith(prefix)] if prefix else []
    return [CompletionItem(name) for name in dict.fromkeys([*(name for name in plurals if name.startswith(prefix)), *exact])]


def kinds_help() -> str:
    """List all kinds in one sentence, for the help of a command."""
    return one_of(f"{names.plural} ({names.aliases[0]})" if names.aliases else names.plural for names in KIND_NAMES)
