"""Validation of overrides: scope per effect, ttl, reason and author."""

from __future__ import annotations

from typing import get_args

import pytest

from remit.model import kinds, objects
from remit.model.manifests.field_rules import _EFFECT_SCOPES
from remit.model.manifests.reader import read
from remit.model.manifests.validation import validate
from tests.unit.model.manifests.manifest_texts import HEAD

GOOD = {
    "pause-expansion": "{tenants: [risk], workloads: [web/shop]}",
    "avoid": "{regions: [eu], zones: [eu-a], pools: [gpu], nodes: [n1]}",
    "pin": "{workloads: [risk/risk-api], pools: [gpu]}",
    "boost": "{tenants: [risk]}, by: 5",
    "hold-repair": "{nodes: [n1]}",
    "freeze-autoscaler": "{pools: [gpu]}",
    "lend-budget": "{tenants: [risk]}, budget: west",
}
TERM = "ttl: 7d, reason: dark, author: ada@example.com"


def problems_of(effect: str, scope: str, term: str = TERM) -> list[str]:
    text = (HEAD % "Override").removesuffix("\n") + f" {{effect: {effect}, scope: {scope}, {term}}}\n"
    return [f"{p.path}: {p.message}; {p.cure}" for p in read(text.encode(), "f.yaml").problems]


def test_every_effect_has_scope_rule() -> None:
    assert set(_EFFECT_SCOPES) == set(GOOD) == set(get_args(kinds.OverrideEffect))


@pytest.mark.parametrize("effect", sorted(GOOD))
def test_each_effect_is_accepted_and_round_trips(effect: str) -> None:
    assert problems_of(effect, GOOD[effect]) == []
    text = (HEAD % "Override").removesuffix("\n") + f" {{effect: {effect}, scope: {GOOD[effect]}, {TERM}}}\n"
    (obj,) = read(text.encode(), "f.yaml").objects
    assert isinstance(obj, kinds.Override)
    assert obj.spec.effect == effect and obj.spec.ttl == kinds.OVERRIDE_TTL_MS_MAX
    assert objects.decode(objects.encode(obj)) == obj
    assert objects.key(obj) == "override/thing"
    assert validate(obj) == ()


@pytest.mark.parametrize("effect", sorted(GOOD))
def test_empty_scope_is_refused(effect: str) -> None:
    more = GOOD[effect].partition("}")[2]
    problems = problems_of(effect, "{}" + more)
    assert problems and all(problem.startswith(f"spec.scope: {effect} must name ") for problem in problems)
    assert problems_of(effect, "{tenants: [], nodes: []}" + more) == problems


@pytest.mark.parametrize(
    ("effect", "scope", "message"),
    [
        ("pin", "{nodes: [n1]}", "spec.scope: pin must name tenants or workloads; add tenants or workloads"),
        ("pin", "{tenants: [t]}", "spec.scope: pin must name places; add regions, zones, pools or nodes"),
        (
            "avoid",
            "{zones: [a], tenants: [t]}",
            "spec.scope.tenants: avoid does not use tenants; remove it",
        ),
        ("boost", "{tenants: [t], nodes: [n]}, by: 5", "spec.scope.nodes: boost does not use nodes; remove it"),
        ("freeze-autoscaler", "{pools: [p], nodes: [n]}", "spec.scope.nodes: freeze-autoscaler does not use nodes"),
        ("boost", "{tenants: [t]}", "spec.by: is missing: boost needs it; add by: and how much"),
        ("boost", "{tenants: [t]}, by: 0", "spec.by: is missing: boost needs it"),
        ("boost", "{tenants: [t]}, by: -5", "spec.by: -5 is too small"),
        ("boost", "{tenants: [t]}, by: 1000000001", "spec.by: 1000000001 is too large"),
        ("avoid", "{zones: [a]}, by: 5", "spec.by: only boost uses by, and this is avoid; remove it, or write effect: boost"),
        ("lend-budget", "{tenants: [t]}", "spec.budget: is missing: lend-budget needs it"),
        ("pin", "{tenants: [t], nodes: [n]}, budget: b", "spec.budget: only lend-budget uses budget"),
        ("boost", "{workloads: [shop]}, by: 5", 'spec.scope.workloads[0]: "shop" is not TENANT/NAME'),
        ("boost", "{workloads: [a/b/c]}, by: 5", "write both, as in risk/risk-api"),
        ("avoid", "{zones: [a, a]}", 'spec.scope.zones[1]: "a" is listed twice'),
        ("avoid", "{zones: a}", "spec.scope.zones: expected a list"),
        ("shun", "{zones: [a]}", 'spec.effect: "shun" is not allowed here'),
    ],
)
def test_scope_or_field_unsuitable_for_effect_is_refused(effect: str, scope: str, message: str) -> None:
    problems = problems_of(effect, scope)
    assert len(problems) == 1, problems
    assert message in problems[0]


@pytest.mark.parametrize("field", ["regions", "zones", "pools", "nodes", "tenants", "workloads"])
def test_each_scope_list_is_bounded(field: str) -> None:
    rest = ", nodes: [n]" if field in ("tenants", "workloads") else ", tenants: [t]"
    names = [f"t/n{n}" if field == "workloads" else f"n{n}" for n in range(1025)]
    assert problems_of("pin", f"{{{field}: [{', '.join(names[1:])}]{rest}}}") == []
    (problem,) = problems_of("pin", f"{{{field}: [{', '.join(names)}]{rest}}}")
    assert problem.startswith(f"spec.scope.{field}: 1025 items are too many")


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("reason: r, author: a", "spec.ttl: is missing"),
        (
            "ttl: 0s, reason: r, author: a",
            "spec.ttl: an override with a ttl of 0 would have no effect; write how long it is in force",
        ),
        ("ttl: 7d1ms, reason: r, author: a", 'spec.ttl: "7d1ms" is longer than 7d; use at most 7d'),
        ("ttl: 169h, reason: r, author: a", 'spec.ttl: "169h" is longer than 7d'),
        ("ttl: 1h, author: a", "spec.reason: is missing"),
        ('ttl: 1h, reason: "", author: a', 'spec.reason: "" is not a reason; write why it is needed'),
        ("ttl: 1h, reason: r", "spec.author: is missing"),
        ('ttl: 1h, reason: r, author: " "', 'spec.author: " " is not an author; write the name of the responsible person'),
        ('ttl: 1h, reason: r, author: "a\\nb"', "spec.author: contains a line break"),
        ("ttl: 1h, reason: r, author: a, duration: 5m", "spec.duration: unknown field; did you mean ttl?"),
    ],
)
def test_missing_ttl_reason_or_author_is_refused(term: str, message: str) -> None:
    problems = problems_of("avoid", "{zones: [a]}", term)
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_deadline_and_tenant_cannot_be_declared() -> None:
    text = HEAD % "Override" + f"  effect: avoid\n  scope: {{zones: [a]}}\n  {TERM.replace(', ', chr(10) + '  ')}\n"
    (problem,) = read((text + "status: {deadline: {boot: b, atMs: 9}}\n").encode(), "f.yaml").problems
    assert (problem.path, problem.message) == ("status", "is set by Remit")
    tenanted = text.replace("{name: thing}", "{name: thing, tenant: t}")
    (problem,) = read(tenanted.encode(), "f.yaml").problems
    assert problem.message == "an Override does not belong to a tenant"
