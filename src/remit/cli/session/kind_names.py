"""Names and aliases of kinds; `KIND/NAME` parsing; completion. Imports nothing heavy.

Names only: it loads nothing, so that a shell may ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from remit.model.problems import an, closest_name, did_you_mean, escaped, one_of, quoted


class KindName(NamedTuple):
    """How a kind is called: by one, by many, and in short. `owned`: its name is unique only within a tenant."""

    kind: str
    many: str
    short: tuple[str, ...] = ()
    owned: bool = False


KIND_NAMES: Final = (
    KindName("Region", "regions", ("rg",)),
    KindName("Node", "nodes", ("no",)),
    KindName("NodePool", "nodepools", ("np", "pools")),
    KindName("Tenant", "tenants", ("ten", "tn")),
    KindName("PriorityClass", "priorityclasses", ("pc",)),
    KindName("Policy", "policies", ("pol",)),
    KindName("Workload", "workloads", ("wl", "w"), owned=True),
    KindName("Secret", "secrets", ("sec",), owned=True),
    KindName("Config", "configs", ("cfg",), owned=True),
    KindName("Allotment", "allotments", ("al",), owned=True),
    KindName("Override", "overrides", ("ov",)),
    KindName("Token", "tokens", ("tok",)),
    KindName("Replica", "replicas", ("rp", "r"), owned=True),
    KindName("Generation", "generations", ("gen",), owned=True),
    KindName("PolicyRevision", "policyrevisions", ("pr",)),
    KindName("Grant", "grants", ("gr",)),
    KindName("Peer", "peers"),
    KindName("Lease", "leases", ("ls",)),
    KindName("Decision", "decisions", ("dec",), owned=True),
    KindName("Event", "events", ("ev",)),
    KindName("Summary", "summaries", ("sum",)),
)
ENDPOINTS: Final = "Endpoint"
"""No object of its own, but listed like one."""

NAMES_BY_KIND: Final = {word.kind: word for word in KIND_NAMES}
_KIND_BY_NAME: Final = {
    **{name: word.kind for word in KIND_NAMES for name in (word.kind.lower(), word.many, *word.short)},
    **dict.fromkeys(("endpoint", "endpoints", "ep"), ENDPOINTS),
}
_FOREIGN_NAMES: Final = {
    **dict.fromkeys(("pod", "pods", "po", "alloc", "allocs", "allocation", "allocations", "task", "tasks"), "replicas"),
    **dict.fromkeys(("deployment", "deployments", "deploy", "job", "jobs", "service", "services", "svc"), "workloads"),
    **dict.fromkeys(("daemonset", "daemonsets", "ds", "statefulset", "statefulsets", "sts", "cronjob", "cj"), "workloads"),
    **dict.fromkeys(("namespace", "namespaces", "ns", "project", "projects", "queue", "queues"), "tenants"),
    **dict.fromkeys(("configmap", "configmaps", "cm"), "configs"),
    **dict.fromkeys(("quota", "resourcequota"), "tenants"),
}
"""What others call it."""
_KINDS_WITH_SLASH: Final = ("Generation", "Decision")
"""Kinds whose names have a / in them."""


class ObjectRef(NamedTuple):
    """One object; `tenant` is empty if it was not said, or if the kind has none."""

    kind: str
    name: str
    tenant: str = ""

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


def parse_kind(word: str) -> str:
    """The kind that is called so. One, many and short names, in whatever case."""
    found = _KIND_BY_NAME.get(word.lower())
    if found is not None:
        return found
    here = _FOREIGN_NAMES.get(word.lower())
    known = [name for one in KIND_NAMES for name in (one.kind.lower(), one.many)]
    cure = f"here they are {here}" if here else did_you_mean(closest_name(word, known[:64])) or "`remit schema` lists the kinds"
    raise click.UsageError(f"there is no kind {quoted(word)}; {cure}")


def is_tenant_scoped(kind: str) -> bool:
    return kind == ENDPOINTS or NAMES_BY_KIND[kind].owned


def plural_name(kind: str) -> str:
    return "endpoints" if kind == ENDPOINTS else NAMES_BY_KIND[kind].many


def parse_object_refs(words: Sequence[str]) -> tuple[list[str], list[ObjectRef]]:
    """`KIND`, `KIND,KIND`, `KIND NAME...` or `KIND/NAME...`: the kinds of which all are meant, or the objects."""
    first, rest = words[0], words[1:]
    if "/" in first:
        return [], [parse_object_ref(word) for word in words]
    kinds = [parse_kind(word) for word in first.split(",") if word] or [parse_kind("")]
    if not rest:
        return kinds, []
    if len(kinds) > 1:
        raise click.UsageError(f"{quoted(first)} are several kinds, and so have no names in common; write KIND/NAME for each")
    mixed = next((word for word in rest if "/" in word and kinds[0] not in _KINDS_WITH_SLASH), None)
    if mixed is not None:
        raise click.UsageError(f"{quoted(mixed)} names a kind of its own; write {escaped(first)}/NAME for all, or NAME for all")
    return [], [ObjectRef(kinds[0], _check_name_given(word, kinds[0])) for word in rest]


def parse_object_ref(word: str, default: str = "") -> ObjectRef:
    """`KIND/NAME` or `KIND/TENANT/NAME`; a bare name is of the kind `default`, if there is one."""
    head, slash, rest = word.partition("/")
    if not slash:
        if default:
            return ObjectRef(default, _check_name_given(word, default))
        raise click.UsageError(f"{quoted(word)} names no kind; write KIND/NAME, such as workload/{escaped(word) or 'web'}")
    kind = parse_kind(head)
    tenant, slash, name = rest.partition("/")
    if slash and kind not in _KINDS_WITH_SLASH:
        if not is_tenant_scoped(kind):
            raise click.UsageError(f"{quoted(word)}: {an(kind.lower())} belongs to no tenant; write {kind.lower()}/NAME")
        return ObjectRef(kind, _check_name_given(name, kind), tenant)
    return ObjectRef(kind, _check_name_given(rest, kind))


def _check_name_given(word: str, kind: str) -> str:
    if not word:
        raise click.UsageError(f"a name is empty; write {kind.lower()}/NAME, such as {kind.lower()}/web")
    return word


def complete_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For the shell: the kinds that begin like this. Names would need a server, which may be slow or gone."""
    words = [*(word.many for word in KIND_NAMES), "endpoints", "all"]
    if "/" in incomplete or "," in incomplete:
        return []
    begun = incomplete.lower()
    exact = [word.kind.lower() for word in KIND_NAMES if word.kind.lower().startswith(begun)] if begun else []
    return [CompletionItem(word) for word in dict.fromkeys([*(w for w in words if w.startswith(begun)), *exact])]


def kinds_help() -> str:
    """The kinds in one sentence, for a command's help."""
    return one_of(f"{word.many} ({word.short[0]})" if word.short else word.many for word in KIND_NAMES)
