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
from remit.model.kinds import PRIORITY_LIMIT, PolicyRule, PolicySpec, Template, WorkloadSpec
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
        values = tuple([workload if key == WORKLOAD_LABEL else labels.get(key) for key in self._keys])
        terms = self._known.get((tenant, values))
        if terms is None:
            if len(self._known) >= TERMS_MAX:
                self._known.clear()
            all_labels = {**labels, WORKLOAD_LABEL: workload}
            matching = [(source, rule) for source, rule in self._rules if rule_matches(rule.match, tenant, all_labels)]
            terms = self._known[tenant, values] = _terms(matching)
        return terms


NO_POLICIES: Final = Admission()
"""Admission without any policy."""


def _terms(rules: list[tuple[RuleSource, PolicyRule]]) -> PolicyTerms:
    forced_class = next((AppliedDefault(rule.priority_class, source) for source, rule in rules if rule.priority_class), None)
    default_class = next(
        (AppliedDefault(rule.defaults.priority_class, source) for source, rule in rules if rule.defaults.priority_class), None
    )
    priority_max, capped_by = PRIORITY_LIMIT, None
    resources: dict[str, tuple[str, int, RuleSource]] = {}
    grace: tuple[int, RuleSource] | None = None
    for source, rule in rules:
        if rule.priority_max < priority_max:
            priority_max, capped_by = rule.priority_max, source
        for name, count in rule.defaults.resources.pairs:
            resources.setdefault(name, (name, count, source))
        if rule.defaults.stop_grace and grace is None:
            grace = int(rule.defaults.stop_grace), source
    places = tuple(_allowed_places(kind, rules) for kind in PLACE_KINDS)
    return PolicyTerms(forced_class, default_class, priority_max, capped_by, places, tuple(resources.values()), grace)


def _allowed_places(kind: str, rules: list[tuple[RuleSource, PolicyRule]]) -> AllowedPlaces | None:
    lists = [(source, frozenset(named)) for source, rule in rules if (named := getattr(rule.allow, kind))]
    if not lists:
        return None
    allowed = lists[0][1]
    for _, names in lists[1:]:
        allowed &= names
    return AllowedPlaces(allowed, tuple(source for source, _ in lists))


def priority_classes_in(policy: PolicySpec) -> frozenset[str]:
    """Returns the priority classes that the rules of a policy name."""
    return frozenset(name for rule in policy.rules for name in (rule.priority_class, rule.defaults.priority_class) if name)


def apply_policy_defaults(spec: WorkloadSpec, terms: PolicyTerms) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """Returns the spec as it runs, and descriptions of the values that policies have set in it."""
    if terms is UNRESTRICTED:
        return spec, ()
    applied: list[str] = []
    chosen = terms.priority_class or (terms.default_priority_class if not spec.priority_class else None)
    if chosen is not None and chosen.value != spec.priority_class:
        spec = replace(spec, priority_class=chosen.value)
        applied.append(f"priorityClass {chosen.value} by {chosen.source}")
    template = spec.template
    own_resources = dict(template.resources.pairs)
    added = {name: count for name, count, _ in terms.resources if name not in own_resources}
    if added:
        template = replace(template, resources=Amount({**own_resources, **added}))
        added_text = Amount(added).to_manifest()
        applied += [
            f"template.resources.{name} {added_text[name]} by {source}" for name, _, source in terms.resources if name in added
        ]
    if terms.stop_grace is not None and template.stop_grace == _DEFAULT_STOP_GRACE:
        length = type(template.stop_grace)(terms.stop_grace[0])
        if length != template.stop_grace:
            template = replace(template, stop_grace=length)
            applied.append(f"template.stopGrace {length} by {terms.stop_grace[1]}")
    return (spec if template is spec.template else replace(spec, template=template)), tuple(applied)


def forbidden_field(
    spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None], *, may_raise_priority: bool = True
) -> ForbiddenField | None:
    """Returns the first field that its author may not declare, or None. `value_of` returns the priority of a class, or None if
    there is no such class. Without `may_raise_priority` a priority above the default needs a rule that permits it.
    """
    if not may_raise_priority and (violation := _unpermitted_priority(spec, terms, value_of)) is not None:
        return violation
    if terms is UNRESTRICTED:
        return None
    return _forbidden_priority(spec, terms, value_of) or _forbidden_places(spec, terms)


def _unpermitted_priority(
    spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None]
) -> ForbiddenField | None:
    """Rejects a requested priority class above the default priority if no policy rule allows it.

    The default class of a rule is allowed. If a rule sets a class or a maximum, the requested class is checked against it
    afterwards.
    """
    requested = spec.priority_class
    permitted = {default.value for default in (terms.priority_class, terms.default_priority_class) if default is not None}
    value = (
        value_of(requested)
        if requested and requested not in permitted and terms.capped_by is None and terms.priority_class is None
        else None
    )
    if value is None or value <= DEFAULT_PRIORITY:
        return None
    message = (
        f"{requested} has priority {value}, but no policy in force permits more than {DEFAULT_PRIORITY}; leave it out, or "
    )
    return ForbiddenField("spec.priorityClass", message + "ask an operator for a policy rule with priorityClass or priorityMax")


def _forbidden_priority(spec: WorkloadSpec, terms: PolicyTerms, value_of: Callable[[str], int | None]) -> ForbiddenField | None:
    requested, field = spec.priority_class, "spec.priorityClass"
    if not requested:
        return None
    if terms.priority_class is not None:
        if requested == terms.priority_class.value:
            return None
        message = (
            f"{requested} cannot be chosen: {terms.priority_class.source} sets {terms.priority_class.value}; "
            "leave priorityClass out"
        )
        return ForbiddenField(field, message)
    value = value_of(requested)
    if value is None or value <= terms.priority_max:
        return None
    message = f"{requested} has priority {value}, but {terms.capped_by} allows at most {terms.priority_max}; "
    return ForbiddenField(
        field, message + "choose a lower class, or ask an operator for a policy rule with a higher priorityMax"
    )


def _forbidden_places(spec: WorkloadSpec, terms: PolicyTerms) -> ForbiddenField | None:
    placement = spec.placement
    for kind, places in zip(PLACE_KINDS, terms.places, strict=True):
        if places is None:
            continue
        field, sources = f"spec.placement.{kind}", " and ".join(str(source) for source in places.sources)
        if not places.names:
            return ForbiddenField(
                field, f"{sources} together allow no {kind} at all; ask an operator to correct these policies"
            )
        allowed = one_of(sorted(places.names))
        requested: tuple[str, ...] = getattr(placement, kind)
        if requested and places.names.isdisjoint(requested):
            return ForbiddenField(
                field, f"{', '.join(requested)} can never be used: {sources} allows {allowed}; choose one of these"
            )
        for index, standby in enumerate(placement.standby) if kind == "regions" else ():
            if standby.region not in places.names:
                field = f"spec.placement.standby[{index}].region"
                return ForbiddenField(
                    field, f"{standby.region} can never be used: {sources} allows {allowed}; choose one of these"
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
        tuple(dict.fromkeys(host for permit in rules for host in permit.artifact_hosts)),
        tuple(dict.fromkeys(path for permit in rules for path in permit.host_paths)),
        tuple(dict.fromkeys(user for permit in rules for user in permit.users)),
        any(permit.unsandboxed for permit in rules),
    )


def permission_violation(template: Template, permit: Permissions) -> PermissionViolation | None:
    """Returns the first artifact source or host path of a template that is not permitted, or None."""
    for field, source in _sources(template):
        reason = _source_denial_reason(source, permit.hosts)
        if reason:
            cure = "use a public host, or let a policy permit it in permit.artifactHosts"
            return PermissionViolation(field, f"artifacts may not be fetched from this host: {reason}", cure)
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
    directories = [PurePosixPath(text) for text in permitted]
    return ".." not in steps.parts and any(directory == steps or directory in steps.parents for directory in directories)
