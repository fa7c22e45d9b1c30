"""Policy admission: defaults, priority limits, allowed places, host resources and user rights.

Read off the rules with a pencil: no I/O here.

Three things follow from the rules that speak of a workload, by its tenant and labels:

- *What it is given*: the priority class that a rule sets, and defaults for what its author has left out. The author's own words
  stay as they are; what is given stands in the generation, which is what runs, and is told in a condition of the workload.
- *What its author may not say*: a class other than the one that is set, a class above the most that is allowed, or places of
  which none is allowed. That is refused with the rule's own reason, and never bent in silence. Somebody of a tenant gives work
  no more than the ordinary priority unless a rule lets them: else everybody's would be the most critical there is.
- *Where it may be bound*: that is asked again at every bind, by fit.py, under whatever policy is in force then.

Where several rules set the same thing the first stands, in the order of the policies' names and of their rules; caps and places
add up, as every rule binds.

Public hosts, and what the policies in force permit; no I/O here.

The node has its own word in it (`remit agent --artifact-allow`, `--host-path`): a policy says who may, a machine what it lends,
and both must agree. Rules that `allow` narrow each other; what is permitted adds up, since without a rule nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from msgspec.structs import replace

from remit.law.fetch_policy import why_no_host
from remit.law.requirements import WORKLOAD_LABEL, speaks_of
from remit.model.artifacts import Unreadable, read_source
from remit.model.kinds import PolicySpec, Template, WorkloadSpec
from remit.model.policies import PRIORITY_LIMIT, PolicyRule
from remit.model.problems import one_of
from remit.model.resources import Amount

TERMS_MAX: Final = 4_096
"""How many answers are kept; when there are more, all go and are found again as they are asked for."""

SORTS: Final = ("regions", "zones", "pools")
BY_POLICY: Final = "ByPolicy"
"""The condition of a workload that says what it was given."""

ORDINARY: Final = 0
"""The priority of work that names no class."""

_GRACE: Final = Template(command=("true",)).stop_grace
"""Who writes what is meant anyway has left it out: a stored object cannot tell the two apart."""


class Source(NamedTuple):
    """Which rule says so: for people, who ask whose word it is."""

    policy: str
    rule: int
    reason: str

    def __str__(self) -> str:
        return f"policy {self.policy}" + (f" ({self.reason})" if self.reason else "")


class Said(NamedTuple):
    """One value that a rule gives."""

    value: str
    by: Source


class Places(NamedTuple):
    """Of one sort, those that every rule allows."""

    names: frozenset[str]
    by: tuple[Source, ...]


class Terms(NamedTuple):
    """What the rules that speak of one workload come to."""

    rank: Said | None = None
    default_rank: Said | None = None
    priority_max: int = PRIORITY_LIMIT
    capped_by: Source | None = None
    places: tuple[Places | None, ...] = (None, None, None)
    """By `SORTS`; None: any."""
    resources: tuple[tuple[str, int, Source], ...] = ()
    stop_grace: tuple[int, Source] | None = None


FREE: Final = Terms()


class Forbidden(NamedTuple):
    """What may not be said, by the field that says it."""

    field: str
    words: str


class Admission:
    """The rules of one revision of the policies. Those that look at labels are asked of each set of labels once."""

    def __init__(self, policies: Mapping[str, PolicySpec] | None = None, number: int = 0) -> None:
        self.number = number
        named = sorted((policies or {}).items())
        self._rules = [(Source(name, at, rule.reason), rule) for name, policy in named for at, rule in enumerate(policy.rules)]
        self._known: dict[object, Terms] = {}
        keys = {key for _, rule in self._rules for key in rule.match.labels}
        self._keys = tuple(sorted(keys))
        """Labels that some rule looks at; others make no difference."""

    def terms(self, tenant: str, workload: str, labels: Mapping[str, str]) -> Terms:
        if not self._rules:
            return FREE
        looked = tuple([workload if key == WORKLOAD_LABEL else labels.get(key) for key in self._keys])
        found = self._known.get((tenant, looked))
        if found is None:
            if len(self._known) >= TERMS_MAX:
                self._known.clear()
            marked = {**labels, WORKLOAD_LABEL: workload}
            mine = [(by, rule) for by, rule in self._rules if speaks_of(rule.match, tenant, marked)]
            found = self._known[tenant, looked] = _terms(mine)
        return found


UNRULED: Final = Admission()
"""Where there is no policy."""


def _terms(rules: list[tuple[Source, PolicyRule]]) -> Terms:
    rank = next((Said(rule.priority_class, by) for by, rule in rules if rule.priority_class), None)
    default = next((Said(rule.defaults.priority_class, by) for by, rule in rules if rule.defaults.priority_class), None)
    most, capped_by = PRIORITY_LIMIT, None
    resources: dict[str, tuple[str, int, Source]] = {}
    grace: tuple[int, Source] | None = None
    for by, rule in rules:
        if rule.priority_max < most:
            most, capped_by = rule.priority_max, by
        for name, count in rule.defaults.resources.pairs:
            resources.setdefault(name, (name, count, by))
        if rule.defaults.stop_grace and grace is None:
            grace = int(rule.defaults.stop_grace), by
    places = tuple(_places(sort, rules) for sort in SORTS)
    return Terms(rank, default, most, capped_by, places, tuple(resources.values()), grace)


def _places(sort: str, rules: list[tuple[Source, PolicyRule]]) -> Places | None:
    lists = [(by, frozenset(named)) for by, rule in rules if (named := getattr(rule.allow, sort))]
    if not lists:
        return None
    allowed = lists[0][1]
    for _, names in lists[1:]:
        allowed &= names
    return Places(allowed, tuple(by for by, _ in lists))


def ranks_in(policy: PolicySpec) -> frozenset[str]:
    """The priority classes that its rules name."""
    return frozenset(rank for rule in policy.rules for rank in (rule.priority_class, rule.defaults.priority_class) if rank)


def settled(spec: WorkloadSpec, terms: Terms) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """The spec as it runs, and what of it was given by whom."""
    if terms is FREE:
        return spec, ()
    given: list[str] = []
    rank = terms.rank or (terms.default_rank if not spec.priority_class else None)
    if rank is not None and rank.value != spec.priority_class:
        spec = replace(spec, priority_class=rank.value)
        given.append(f"priorityClass {rank.value} by {rank.by}")
    template = spec.template
    has = dict(template.resources.pairs)
    more = {name: count for name, count, _ in terms.resources if name not in has}
    if more:
        template = replace(template, resources=Amount({**has, **more}))
        whole = Amount(more).written()
        given += [f"template.resources.{name} {whole[name]} by {by}" for name, _, by in terms.resources if name in more]
    if terms.stop_grace is not None and template.stop_grace == _GRACE:
        length = type(template.stop_grace)(terms.stop_grace[0])
        if length != template.stop_grace:
            template = replace(template, stop_grace=length)
            given.append(f"template.stopGrace {length} by {terms.stop_grace[1]}")
    return (spec if template is spec.template else replace(spec, template=template)), tuple(given)


def forbidden(
    spec: WorkloadSpec, terms: Terms, value_of: Callable[[str], int | None], *, granted: bool = True
) -> Forbidden | None:
    """What its author may not say. `value_of` is the priority of a class; None if there is no such class. Not `granted`: a rule
    has to say so if it is to be more than ordinary.
    """
    if not granted and (found := _unpermitted_rank(spec, terms, value_of)) is not None:
        return found
    if terms is FREE:
        return None
    return _forbidden_rank(spec, terms, value_of) or _forbidden_places(spec, terms)


def _unpermitted_rank(spec: WorkloadSpec, terms: Terms, value_of: Callable[[str], int | None]) -> Forbidden | None:
    """Rules that give a class, or say how high one may be, permit it; which of them is then asked."""
    asked = spec.priority_class
    given = {said.value for said in (terms.rank, terms.default_rank) if said is not None}
    value = value_of(asked) if asked and asked not in given and terms.capped_by is None and terms.rank is None else None
    if value is None or value <= ORDINARY:
        return None
    words = (
        f"{asked} has priority {value}, and no policy in force lets this tenant have more than {ORDINARY}; leave it out, or "
    )
    return Forbidden("spec.priorityClass", words + "ask an operator for a policy rule with priorityClass or priorityMax")


def _forbidden_rank(spec: WorkloadSpec, terms: Terms, value_of: Callable[[str], int | None]) -> Forbidden | None:
    asked, field = spec.priority_class, "spec.priorityClass"
    if not asked:
        return None
    if terms.rank is not None:
        if asked == terms.rank.value:
            return None
        words = f"{asked} is not for its author to choose: {terms.rank.by} gives it {terms.rank.value}; leave priorityClass out"
        return Forbidden(field, words)
    value = value_of(asked)
    if value is None or value <= terms.priority_max:
        return None
    words = f"{asked} has priority {value}, and {terms.capped_by} allows at most {terms.priority_max}; "
    return Forbidden(field, words + "choose a lower class, or ask an operator for a policy rule with a higher priorityMax")


def _forbidden_places(spec: WorkloadSpec, terms: Terms) -> Forbidden | None:
    where = spec.placement
    for sort, places in zip(SORTS, terms.places, strict=True):
        if places is None:
            continue
        field, whose = f"spec.placement.{sort}", " and ".join(str(by) for by in places.by)
        if not places.names:
            return Forbidden(field, f"{whose} together allow no {sort} at all; ask an operator which of them is meant")
        allowed = one_of(sorted(places.names))
        asked: tuple[str, ...] = getattr(where, sort)
        if asked and places.names.isdisjoint(asked):
            return Forbidden(field, f"{', '.join(asked)} can never be used: {whose} allows {allowed}; ask for one of these")
        for at, standby in enumerate(where.standby) if sort == "regions" else ():
            if standby.region not in places.names:
                field = f"spec.placement.standby[{at}].region"
                return Forbidden(field, f"{standby.region} can never be used: {whose} allows {allowed}; choose one of these")
    return None


class Unpermitted(NamedTuple):
    """Which field of a template asks for it, why it may not, and what to do."""

    field: str
    why: str
    cure: str


class Permitted(NamedTuple):
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    unsandboxed: bool = False


def permitted(policies: Iterable[PolicySpec], tenant: str, labels: Mapping[str, str]) -> Permitted:
    rules = [rule.permit for policy in policies for rule in policy.rules if speaks_of(rule.match, tenant, labels)]
    return Permitted(
        tuple(dict.fromkeys(host for one in rules for host in one.artifact_hosts)),
        tuple(dict.fromkeys(path for one in rules for path in one.host_paths)),
        tuple(dict.fromkeys(user for one in rules for user in one.users)),
        any(one.unsandboxed for one in rules),
    )


def unpermitted(template: Template, permit: Permitted) -> Unpermitted | None:
    """The first thing that a template asks for and may not have."""
    for field, source in _sources(template):
        why = _why_no_source(source, permit.hosts)
        if why:
            cure = "use a public host, or let a policy permit it in permit.artifactHosts"
            return Unpermitted(field, f"nothing is fetched from there: {why}", cure)
    for field, path in _host_paths(template):
        if not _is_below(path, permit.paths):
            cure = "use scratch, or let a policy permit it in permit.hostPaths"
            return Unpermitted(field, f"no policy in force permits {path} of the nodes", cure)
    return None


def loosens(template: Template) -> bool:
    """Does it say for itself as whom it runs, or that nothing holds it?"""
    return bool(template.user) or template.sandbox == "none"


def unheld(template: Template, permit: Permitted) -> Unpermitted | None:
    """What somebody of a tenant may not say of how its work is held: an agent that is root would make it root, or anybody
    else whose files are on the node.
    """
    if template.sandbox == "none" and not permit.unsandboxed:
        cure = "leave it out, or let a policy permit it in permit.unsandboxed"
        return Unpermitted("sandbox", "no policy in force permits work of this tenant without a sandbox", cure)
    if template.user and template.user not in permit.users:
        cure = "leave it out, or let a policy permit it in permit.users"
        return Unpermitted("user", f"no policy in force permits work of this tenant to run as {template.user}", cure)
    return None


def _sources(template: Template) -> Iterator[tuple[str, str]]:
    for number, artifact in enumerate(template.artifacts):
        yield f"artifacts[{number}].source", artifact.source
    if template.rootfs is not None and template.rootfs.source:
        yield "rootfs.source", template.rootfs.source


def _host_paths(template: Template) -> Iterator[tuple[str, str]]:
    for number, volume in enumerate(template.volumes):
        if volume.host is not None:
            yield f"volumes[{number}].host.path", volume.host.path
    if template.rootfs is not None and template.rootfs.directory:
        yield "rootfs.directory", template.rootfs.directory


def _why_no_source(source: str, hosts: Sequence[str]) -> str:
    try:
        address = read_source(source)
    except Unreadable as error:
        return error.cause
    return "" if address.scheme == "file" else why_no_host(address.host, hosts)


def _is_below(path: str, permitted: Sequence[str]) -> bool:
    steps = PurePosixPath(path)
    places = [PurePosixPath(one) for one in permitted]
    return ".." not in steps.parts and any(place == steps or place in steps.parents for place in places)
