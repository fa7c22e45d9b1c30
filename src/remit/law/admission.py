"""Policy admission: defaults, priority limits, allowed places, host resources and user rights.

Pure functions over the policies in force; no I/O. The rules that match a workload, by its tenant and labels, determine:

- *Defaults*: the priority class that a rule sets, and values for fields that the author left out. The declared spec stays as it
  is; the values are applied to the generation, which is what runs, and reported in a condition of the workload.
- *What the author may not declare*: a priority class other than the one that a rule sets, a class above the maximum, or only
  places that are not allowed. Such a workload is rejected with the rule's reason and never changed silently. Users of a tenant
  get no more than the default priority unless a rule permits it; otherwise every workload would claim the highest.
- *Where it may be bound*: checked again at every bind, by fit.py, under the policy that is in force then.

If several rules set the same field, the first one applies, in the order of policy names and of the rules in a policy.
Priority limits and allowed places of all matching rules apply together.

Artifact hosts, host paths, users and unsandboxed workloads need a permission, and the permissions of several rules add up.
The agent decides as well (`remit agent --artifact-allow`, `--host-path`): the policy says who may use a host resource, the
agent what its machine offers, and both must permit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from msgspec.structs import replace

from remit.law.fetch_policy import host_denial_reason
from remit.law.requirements import WORKLOAD_LABEL, rule_matches
from remit.model.artifacts import InvalidSource, parse_source
from remit.model.kinds import PolicySpec, Template, WorkloadSpec
from remit.model.policies import PRIORITY_LIMIT, PolicyRule
from remit.model.problems import one_of
from remit.model.resources import Amount

TERMS_MAX: Final = 4_096
"""Bound of the cache of policy terms. It is emptied when it is full."""

PLACE_KINDS: Final = ("regions", "zones", "pools")
BY_POLICY_CONDITION: Final = "ByPolicy"
"""Type of the workload condition that lists the values set by policies."""

DEFAULT_PRIORITY: Final = 0
"""Priority of workloads without a priority class."""

_DEFAULT_STOP_GRACE: Final = Template(command=("true",)).stop_grace
"""A stop grace equal to the default counts as left out, because a stored object does not distinguish the two."""


class RuleSource(NamedTuple):
    """The rule that a value or a rejection comes from, for messages."""

    policy: str
    rule: int
    reason: str

    def __str__(self) -> str:
        return f"policy {self.policy}" + (f" ({self.reason})" if self.reason else "")


class AppliedDefault(NamedTuple):
    """A value that a rule sets."""

    value: str
    source: RuleSource


class AllowedPlaces(NamedTuple):
    """The places of one kind that all matching rules allow."""

    names: frozenset[str]
    sources: tuple[RuleSource, ...]


class PolicyTerms(NamedTuple):
    """The combined effect of all rules that match a workload."""

    priority_class: AppliedDefault | None = None
    default_priority_class: AppliedDefault | None = None
    priority_max: int = PRIORITY_LIMIT
    capped_by: RuleSource | None = None
    places: tuple[AllowedPlaces | None, ...] = (None, None, None)
    """In the order of `PLACE_KINDS`; None means that any place is allowed."""
    resources: tuple[tuple[str, int, RuleSource], ...] = ()
    stop_grace: tuple[int, RuleSource] | None = None


UNRESTRICTED: Final = PolicyTerms()


class ForbiddenField(NamedTuple):
    """A field that its author may not declare like this, with the reason and the fix."""

    field: str
    message: str


class Admission:
    """The rules of one policy revision. The terms for each combination of relevant labels are computed once."""

    def __init__(self, policies: Mapping[str, PolicySpec] | None = None, number: int = 0) -> None:
        self.number = number
        named = sorted((policies or {}).items())
        self._rules = [
            (RuleSource(name, at, rule.reason), rule) for name, policy in named for at, rule in enumerate(policy.rules)
        ]
        self._known: dict[object, PolicyTerms] = {}
        keys = {key for _, rule in self._rules for key in rule.match.labels}
        self._keys = tuple(sorted(keys))
        """Label keys that some rule matches on; other labels have no influence."""

    def terms(self, tenant: str, workload: str, labels: Mapping[str, str]) -> PolicyTerms:
        if not self._rules:
            return UNRESTRICTED
        looked = tuple([workload if key == WORKLOAD_LABEL else labels.get(key) for key in self._keys])
        found = self._known.get((tenant, looked))
        if found is None:
            if len(self._known) >= TERMS_MAX:
                self._known.clear()
            marked = {**labels, WORKLOAD_LABEL: workload}
            mine = [(by, rule) for by, rule in self._rules if rule_matches(rule.match, tenant, marked)]
            found = self._known[tenant, looked] = _terms(mine)
        return found


NO_POLICIES: Final = Admission()
"""Admission without any policy."""


def _terms(rules: list[tuple[RuleSource, PolicyRule]]) -> PolicyTerms:
    rank = next((AppliedDefault(rule.priority_class, by) for by, rule in rules if rule.priority_class), None)
    default = next(
        (AppliedDefault(rule.defaults.priority_class, by) for by, rule in rules if rule.defaults.priority_class), None
    )
    most, capped_by = PRIORITY_LIMIT, None
    resources: dict[str, tuple[str, int, RuleSource]] = {}
    grace: tuple[int, RuleSource] | None = None
    for by, rule in rules:
        if rule.priority_max < most:
            most, capped_by = rule.priority_max, by
        for name, count in rule.defaults.resources.pairs:
            resources.setdefault(name, (name, count, by))
        if rule.defaults.stop_grace and grace is None:
            grace = int(rule.defaults.stop_grace), by
    places = tuple(_allowed_places(sort, rules) for sort in PLACE_KINDS)
    return PolicyTerms(rank, default, most, capped_by, places, tuple(resources.values()), grace)


def _allowed_places(sort: str, rules: list[tuple[RuleSource, PolicyRule]]) -> AllowedPlaces | None:
    lists = [(by, frozenset(named)) for by, rule in rules if (named := getattr(rule.allow, sort))]
    if not lists:
        return None
    allowed = lists[0][1]
    for _, names in lists[1:]:
        allowed &= names
    return AllowedPlaces(allowed, tuple(by for by, _ in lists))


def priority_classes_in(policy: PolicySpec) -> frozenset[str]:
    """Returns the priority classes that the rules of a policy name."""
    return frozenset(rank for rule in policy.rules for rank in (rule.priority_class, rule.defaults.priority_class) if rank)


def apply_policy_defaults(spec: WorkloadSpec, terms: PolicyTerms) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """Returns the spec as it runs, and descriptions of the values that policies have set in it."""
    if terms is UNRESTRICTED:
        return spec, ()
    given: list[str] = []
    rank = terms.priority_class or (terms.default_priority_class if not spec.priority_class else None)
    if rank is not None and rank.value != spec.priority_class:
        spec = replace(spec, priority_class=rank.value)
        given.append(f"priorityClass {rank.value} by {rank.source}")
    template = spec.template
    has = dict(template.resources.pairs)
    more = {name: count for name, count, _ in terms.resources if name not in has}
    if more:
        template = replace(template, resources=Amount({**has, **more}))
        whole = Amount(more).to_manifest()
        given += [f"template.resources.{name} {whole[name]} by {by}" for name, _, by in terms.resources if name in more]
    if terms.stop_grace is not None and template.stop_grace == _DEFAULT_STOP_GRACE:
        length = type(template.stop_grace)(terms.stop_grace[0])
        if length != template.stop_grace:
            template = replace(template, stop_grace=length)
            given.append(f"template.stopGrace {length} by {terms.stop_grace[1]}")
    return (spec if template is spec.template else replace(spec, template=template)), tuple(given)


def forbidden_field(
    spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None], *, may_raise_priority: bool = True
) -> ForbiddenField | None:
    """Returns the first field that its author may not declare, or None. `value_of` returns the priority of a class, or None if
    there is no such class. Without `may_raise_priority` a priority above the default needs a rule that permits it.
    """
    if not may_raise_priority and (found := _unpermitted_priority(spec, terms, value_of)) is not None:
        return found
    if terms is UNRESTRICTED:
        return None
    return _forbidden_priority(spec, terms, value_of) or _forbidden_places(spec, terms)


def _unpermitted_priority(
    spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None]
) -> ForbiddenField | None:
    """Rejects a priority above the default unless a rule sets a class or a maximum; whether the class obeys that rule is
    checked afterwards.
    """
    asked = spec.priority_class
    given = {said.value for said in (terms.priority_class, terms.default_priority_class) if said is not None}
    value = (
        value_of(asked) if asked and asked not in given and terms.capped_by is None and terms.priority_class is None else None
    )
    if value is None or value <= DEFAULT_PRIORITY:
        return None
    words = f"{asked} has priority {value}, but no policy in force permits more than {DEFAULT_PRIORITY}; leave it out, or "
    return ForbiddenField("spec.priorityClass", words + "ask an operator for a policy rule with priorityClass or priorityMax")


def _forbidden_priority(spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None]) -> ForbiddenField | None:
    asked, field = spec.priority_class, "spec.priorityClass"
    if not asked:
        return None
    if terms.priority_class is not None:
        if asked == terms.priority_class.value:
            return None
        words = (
            f"{asked} cannot be chosen: {terms.priority_class.source} sets {terms.priority_class.value}; "
            "leave priorityClass out"
        )
        return ForbiddenField(field, words)
    value = value_of(asked)
    if value is None or value <= terms.priority_max:
        return None
    words = f"{asked} has priority {value}, but {terms.capped_by} allows at most {terms.priority_max}; "
    return ForbiddenField(field, words + "choose a lower class, or ask an operator for a policy rule with a higher priorityMax")


def _forbidden_places(spec: WorkloadSpec, terms: PolicyTerms) -> ForbiddenField | None:
    where = spec.placement
    for sort, places in zip(PLACE_KINDS, terms.places, strict=True):
        if places is None:
            continue
        field, whose = f"spec.placement.{sort}", " and ".join(str(by) for by in places.sources)
        if not places.names:
            return ForbiddenField(field, f"{whose} together allow no {sort} at all; ask an operator to correct these policies")
        allowed = one_of(sorted(places.names))
        asked: tuple[str, ...] = getattr(where, sort)
        if asked and places.names.isdisjoint(asked):
            return ForbiddenField(field, f"{', '.join(asked)} can never be used: {whose} allows {allowed}; choose one of these")
        for at, standby in enumerate(where.standby) if sort == "regions" else ():
            if standby.region not in places.names:
                field = f"spec.placement.standby[{at}].region"
                return ForbiddenField(
                    field, f"{standby.region} can never be used: {whose} allows {allowed}; choose one of these"
                )
    return None


class PermissionViolation(NamedTuple):
    """A template field that uses something without permission: the field, the reason and the fix."""

    field: str
    reason: str
    cure: str


class Permissions(NamedTuple):
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    unsandboxed: bool = False


def permissions_of(policies: Iterable[PolicySpec], tenant: str, labels: Mapping[str, str]) -> Permissions:
    rules = [rule.permit for policy in policies for rule in policy.rules if rule_matches(rule.match, tenant, labels)]
    return Permissions(
        tuple(dict.fromkeys(host for one in rules for host in one.artifact_hosts)),
        tuple(dict.fromkeys(path for one in rules for path in one.host_paths)),
        tuple(dict.fromkeys(user for one in rules for user in one.users)),
        any(one.unsandboxed for one in rules),
    )


def permission_violation(template: Template, permit: Permissions) -> PermissionViolation | None:
    """Returns the first artifact source or host path of a template that is not permitted, or None."""
    for field, source in _sources(template):
        why = _source_denial_reason(source, permit.hosts)
        if why:
            cure = "use a public host, or let a policy permit it in permit.artifactHosts"
            return PermissionViolation(field, f"artifacts may not be fetched from this host: {why}", cure)
    for field, path in _host_paths(template):
        if not _is_below(path, permit.paths):
            cure = "use scratch, or let a policy permit it in permit.hostPaths"
            return PermissionViolation(field, f"no policy in force permits the node path {path}", cure)
    return None


def overrides_isolation(template: Template) -> bool:
    """Whether the template chooses its user or disables the sandbox."""
    return bool(template.user) or template.sandbox == "none"


def isolation_violation(template: Template, permit: Permissions) -> PermissionViolation | None:
    """Returns the isolation setting that a tenant's user may not choose, or None. Without this check, an agent that runs as
    root would start the workload as root, or as any other user with files on the node.
    """
    if template.sandbox == "none" and not permit.unsandboxed:
        cure = "leave it out, or let a policy permit it in permit.unsandboxed"
        return PermissionViolation("sandbox", "no policy in force permits workloads of this tenant without a sandbox", cure)
    if template.user and template.user not in permit.users:
        cure = "leave it out, or let a policy permit it in permit.users"
        return PermissionViolation(
            "user", f"no policy in force permits workloads of this tenant to run as {template.user}", cure
        )
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


def _source_denial_reason(source: str, hosts: Sequence[str]) -> str:
    try:
        address = parse_source(source)
    except InvalidSource as error:
        return error.cause
    return "" if address.scheme == "file" else host_denial_reason(address.host, hosts)


def _is_below(path: str, permitted: Sequence[str]) -> bool:
    steps = PurePosixPath(path)
    places = [PurePosixPath(one) for one in permitted]
    return ".." not in steps.parts and any(place == steps or place in steps.parents for place in places)
