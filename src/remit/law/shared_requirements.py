"""Shares one `Requirements` value among generations that need the same.

Makes asks of many, and what they have in common only once. The rules are in fit.py.

Ten thousand jobs of one spec ask for the same ten thousand times. What may tell two generations of one tenant and spec apart
are their names and labels, and these only where something asks for them: a rule of a policy that matches labels, or a term
towards other replicas. So asks are alike if the same rules speak of them and the same of their own terms pick them; and, where
a term has no selector and means its own kind, if they are of one workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from remit.law.admission import NO_POLICIES, Admission
from remit.law.fit import Requirements
from remit.law.requirements import WORKLOAD_LABEL, compile_requirements, rule_matches
from remit.law.selectors import selects
from remit.model.kinds import PolicySpec, WorkloadSpec
from remit.model.metadata import Deadline
from remit.model.objects import encode
from remit.model.policies import PolicyRule

SHARED_MAX: Final = 4_096
"""How many shapes are kept; when there are more, all go and are made again as they are asked for."""

_OWN_FIELDS: Final = Requirements._fields.index("open") + 1
PeerIdentity = tuple[str, tuple[bool, ...]]
NO_PEER_TERMS: Final[PeerIdentity] = ("", ())


def peer_identity(spec: WorkloadSpec, workload: str, marked: Mapping[str, str]) -> PeerIdentity:
    """What its terms towards other replicas make of a name and labels: the name, if one of them means its own kind, and which
    of them pick it itself. `marked` are the labels with the workload's own.
    """
    where = spec.placement
    if not (where.topology_spread or where.affinity or where.anti_affinity):
        return (workload, ()) if spec.type == "daemon" else NO_PEER_TERMS
    selectors = [one.label_selector for one in where.topology_spread]
    selectors += [one.label_selector for one in (*where.affinity, *where.anti_affinity)]
    named = spec.type == "daemon" or not all(selectors)
    return workload if named else "", tuple([selects(selector, marked) for selector in selectors])


class RequirementsInterner:
    """Asks under certain policies. One from here is what `compile_requirements` makes of the same; those that are alike also share what
    they learn about nodes.
    """

    def __init__(
        self,
        policies: Sequence[PolicySpec] = (),
        in_force: tuple[int, Deadline | None] = (0, None),
        admission: Admission = NO_POLICIES,
    ) -> None:
        self._policies, self._in_force = policies, in_force
        self.admission = admission
        """What the same policies make of what is declared."""
        rules = (rule for policy in policies for rule in policy.rules)
        self._rules: list[tuple[int, PolicyRule]] = [(at, rule) for at, rule in enumerate(rules) if rule.match.labels]
        """Those that look at labels; what the others say depends on the tenant alone."""
        self._known: dict[object, tuple[Any, ...]] = {}
        """Asks without what is their own, which stands first."""

    def compile(
        self, tenant: str, workload: str, labels: Mapping[str, str], spec: WorkloadSpec, generation: int = 0, open: bool = True
    ) -> Requirements:
        """Raises ValueError for asks that cannot be met."""
        marked = {**labels, WORKLOAD_LABEL: workload}
        template, gang = spec.template, spec.gang
        rules = tuple([at for at, rule in self._rules if rule_matches(rule.match, tenant, marked)]) if self._rules else ()
        demands = tenant, encode(spec.placement), rules
        devices = encode(template.devices) if template.devices else b""
        rest = spec.type, spec.replace, gang.min if gang else 0, template.resources.pairs, devices
        key = demands, rest, peer_identity(spec, workload, marked)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= SHARED_MAX:
                self._known.clear()
            made = compile_requirements(tenant, workload, labels, spec, self._policies, in_force=self._in_force)
            found = self._known[key] = made._replace(static_key=demands)[_OWN_FIELDS:]
        return Requirements._make((tenant, (tenant, workload, generation), marked, open, *found))
