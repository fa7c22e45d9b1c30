"""Shares one `Requirements` value among generations that need the same.

Ten thousand jobs with one spec have the same requirements. Two generations of one tenant and spec differ only in name and
labels, and these matter only where something matches on them: a policy rule with labels, or a constraint on other replicas.
So requirements are shared if the same rules match and the same constraints match the replica itself; and, where a constraint
has no selector and therefore means the workload's own replicas, only within one workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from remit.law.admission import NO_POLICIES, Admission
from remit.law.fit import Requirements
from remit.law.requirements import WORKLOAD_LABEL, compile_requirements, rule_matches
from remit.law.selectors import selects
from remit.model.kinds import PolicyRule, PolicySpec, WorkloadSpec
from remit.model.metadata import Deadline
from remit.model.objects import encode

SHARED_MAX: Final = 4_096
"""Bound of the cache of shared requirements. It is emptied when it is full."""

_OWN_FIELDS: Final = Requirements._fields.index("placeable") + 1
PeerIdentity = tuple[str, tuple[bool, ...]]
NO_PEER_TERMS: Final[PeerIdentity] = ("", ())


def peer_identity(spec: WorkloadSpec, workload: str, all_labels: Mapping[str, str]) -> PeerIdentity:
    """Returns the influence of a workload's name and labels on its constraints on other replicas: the name, if a constraint
    refers to the workload itself, and which constraints match the workload's own replicas. `all_labels` include
    WORKLOAD_LABEL.
    """
    placement = spec.placement
    if not (placement.topology_spread or placement.affinity or placement.anti_affinity):
        return (workload, ()) if spec.type == "daemon" else NO_PEER_TERMS
    selectors = [constraint.label_selector for constraint in placement.topology_spread]
    selectors += [constraint.label_selector for constraint in (*placement.affinity, *placement.anti_affinity)]
    named = spec.type == "daemon" or not all(selectors)
    return workload if named else "", tuple([selects(selector, all_labels) for selector in selectors])


class RequirementsInterner:
    """Compiles requirements under given policies, and shares equal ones.

    The results equal those of `compile_requirements`; shared requirements also share their cached static results.
    """

    def __init__(
        self,
        policies: Sequence[PolicySpec] = (),
        in_force: tuple[int, Deadline | None] = (0, None),
        admission: Admission = NO_POLICIES,
    ) -> None:
        self._policies, self._in_force = policies, in_force
        self.admission = admission
        """Admission under the same policies."""
        rules = (rule for policy in policies for rule in policy.rules)
        self._rules: list[tuple[int, PolicyRule]] = [(at, rule) for at, rule in enumerate(rules) if rule.match.labels]
        """Rules that match on labels; the other rules depend on the tenant alone."""
        self._known: dict[object, tuple[Any, ...]] = {}
        """Shared fields of requirements; the fields that differ by generation come first in the tuple."""

    def compile(
        self,
        tenant: str,
        workload: str,
        labels: Mapping[str, str],
        spec: WorkloadSpec,
        generation: int = 0,
        placeable: bool = True,
    ) -> Requirements:
        """Returns what each replica of this generation requires, under the policies of this object.

        Raises ValueError for a device request that contradicts itself: an empty model name, two shares of one kind, a share
        out of range, a share together with whole devices of its kind, or too many overlapping sets of models.
        """
        all_labels = {**labels, WORKLOAD_LABEL: workload}
        template, gang = spec.template, spec.gang
        rules = (
            tuple([index for index, rule in self._rules if rule_matches(rule.match, tenant, all_labels)]) if self._rules else ()
        )
        static_key = tenant, encode(spec.placement), rules
        devices = encode(template.devices) if template.devices else b""
        other_fields = spec.type, spec.replace, gang.min if gang else 0, template.resources.pairs, devices
        key = static_key, other_fields, peer_identity(spec, workload, all_labels)
        shared = self._known.get(key)
        if shared is None:
            if len(self._known) >= SHARED_MAX:
                self._known.clear()
            requirements = compile_requirements(tenant, workload, labels, spec, self._policies, in_force=self._in_force)
            shared = self._known[key] = requirements._replace(static_key=static_key)[_OWN_FIELDS:]
        return Requirements._make((tenant, (tenant, workload, generation), all_labels, placeable, *shared))
