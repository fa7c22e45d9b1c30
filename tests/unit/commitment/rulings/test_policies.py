"""Which policy is in force, and for how long? Publication, rollback, and what comes on lease from the scope above."""

from __future__ import annotations

from msgspec.structs import replace

from remit.model.artifacts import Artifact, HostPath, PolicyPermit, Volume
from remit.model.claims import Adopt, Apply, Bind, Code, Delete, Refused, Reserve, Rollback
from remit.model.kinds import Policy, PolicyAllow, PolicyMatch, PolicyRule, PolicySpec, Template, Workload, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, USER, Scope, story
from tests.unit.commitment.authority_fixture import T1, bind, spawned

MINUTE = Duration(60_000)


def only_in(*zones: str) -> PolicySpec:
    return PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=zones)),))


def policy(name: str, *zones: str) -> Policy:
    return Policy(metadata=Metadata(name=name), spec=only_in(*zones))


def adopted(scope: Scope, number: int, *zones: str, ttl: Duration = MINUTE, asked_ms: int | None = None) -> Adopt:
    return Adopt(number, {"p": only_in(*zones)}, ttl, scope.clock.at_ms if asked_ms is None else asked_ms)


@story
async def test_a_rollback_publishes_what_was_in_force_then_as_a_new_revision(scope: Scope) -> None:
    assert await scope.must(OPERATOR, Apply(policy("p", "a"))) == [1]
    await scope.must(OPERATOR, Apply(policy("p", "b")), Apply(policy("q", "a", "b")))
    (key, other) = await spawned(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    assert await scope.must(OPERATOR, Rollback(1)) == [4]
    assert scope.books.keys("policy/") == ["policy/p"], "what was not there then is not there now"
    assert scope.row("policy/p")["spec"]["rules"][0]["allow"] == {"zones": ["a"]}
    await bind(scope, key)
    assert scope.row(key)["status"]["policy"] == 4
    assert await scope.must(OPERATOR, Rollback(3)) == [5], "and forward again"
    assert scope.books.keys("policy/") == ["policy/p", "policy/q"]
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(other, scope.at(other), "n1", T1)) is Code.POLICY
    assert await scope.refused(OPERATOR, Rollback(9)) is Code.NOT_FOUND
    assert await scope.refused(USER, Rollback(1)) is Code.ROLE


@story
async def test_a_policy_that_is_deleted_binds_nobody_any_more(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(policy("p", "b")))
    (key,) = await spawned(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    await scope.must(OPERATOR, Delete("Policy", "p"))
    await bind(scope, key)


@story
async def test_past_the_lease_on_its_policy_a_scope_places_nothing(scope: Scope) -> None:
    """What may have been withdrawn since cannot be checked against."""
    agent = scope.actors["policy"]
    await scope.must(agent, adopted(scope, 7, "a"))
    a, b, c = await spawned(scope, "w", 3)
    scheduler = scope.actors["scheduler"]
    scope.clock.at_ms += 59_999
    await bind(scope, a)
    await scope.must(scheduler, Reserve(b, scope.at(b), "n1", T1))
    scope.clock.at_ms += 1
    before = await scope.dump()
    for claim in (Bind(c, scope.at(c), "n1", T1), Reserve(c, scope.at(c), "n1", T1), Bind(b, scope.at(b), "n1", T1)):
        (verdict,) = await scope.ask(scheduler, claim)
        assert isinstance(verdict, Refused) and verdict.code is Code.POLICY_LAPSED
        assert verdict.detail == "the lease on policy revision 7 has expired here; it must be renewed from the scope above"
    assert await scope.dump() == before
    await scope.must(agent, adopted(scope, 7, "a"))
    await bind(scope, b)
    scope.clock.on = "boot-2"
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(c, scope.at(c), "n1", T1)) is Code.POLICY_LAPSED, "whose clock is not this one"


@story
async def test_a_lease_on_a_policy_counts_from_when_it_was_asked_for_and_the_longer_stands(scope: Scope) -> None:
    agent = scope.actors["policy"]
    (key,) = await spawned(scope, "w")
    assert await scope.refused(agent, adopted(scope, 7, "a", asked_ms=scope.clock.at_ms + 1)) is Code.INVALID
    asked_ms = scope.clock.at_ms
    scope.clock.at_ms += 30_000
    await scope.must(agent, adopted(scope, 7, "a"), adopted(scope, 7, "a", asked_ms=asked_ms))
    scope.clock.at_ms += 59_999
    await bind(scope, key)
    assert scope.row("policyrevision/00000007")["spec"]["deadline"]["atMs"] == asked_ms + 90_000


@story
async def test_one_number_has_one_content_and_the_higher_number_stands(scope: Scope) -> None:
    agent = scope.actors["policy"]
    assert await scope.must(agent, adopted(scope, 7, "a")) == [7]
    assert await scope.refused(agent, adopted(scope, 7, "b")) is Code.OPERATION_MISMATCH
    assert await scope.refused(agent, adopted(scope, 6, "a")) is Code.REVISION
    assert await scope.must(agent, adopted(scope, 9, "b")) == [9]


@story
async def test_where_policies_come_on_lease_none_is_made_or_undone_here(scope: Scope) -> None:
    """A local one would share their numbers."""
    await scope.must(OPERATOR, Apply(policy("own", "a")))
    await scope.must(scope.actors["policy"], adopted(scope, 7, "a"))
    assert await scope.refused(OPERATOR, Apply(policy("own", "b"))) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Delete("Policy", "own")) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Rollback(1)) is Code.NOT_OWNER


# -- what a policy permits of the machines -----------------------------------------------------------------------------


def asking(source: str = "", path: str = "", command: str = "true") -> Workload:
    artifacts = (Artifact(source=source, sha256="0" * 64),) if source else ()
    volumes = (Volume(name="v", path="v", host=HostPath(path=path)),) if path else ()
    template = Template(command=(command,), artifacts=artifacts, volumes=volumes)
    return Workload(metadata=Metadata(name="asks", tenant="t1"), spec=WorkloadSpec(type="service", template=template))


def permitting(*tenants: str) -> Policy:
    permit = PolicyPermit(artifact_hosts=("10.0.0.0/8",), host_paths=("/srv/data",))
    rule = PolicyRule(match=PolicyMatch(tenants=tenants), permit=permit)
    return Policy(metadata=Metadata(name="lent"), spec=PolicySpec(rules=(rule,)))


@story
async def test_what_is_not_public_and_no_policy_permits_is_refused_with_its_field_and_the_cure(scope: Scope) -> None:
    """A32."""
    for source in ("http://169.254.169.254/latest/meta-data/", "http://localhost:7420/v1/nodes", "https://10.1.2.3/a"):
        (verdict,) = await scope.ask(USER, Apply(asking(source)))
        assert isinstance(verdict, Refused)
        assert verdict.code is Code.INVALID
        assert verdict.detail.startswith("spec.template.artifacts[0].source: artifacts may not be fetched from this host: ")
        assert verdict.detail.endswith("; use a public host, or let a policy permit it in permit.artifactHosts")
    (verdict,) = await scope.ask(USER, Apply(asking(path="/srv/data/a")))
    assert isinstance(verdict, Refused)
    assert verdict.detail.startswith("spec.template.volumes[0].host.path: no policy in force permits the node path /srv/data/a")
    await scope.must(USER, Apply(asking("https://example.org/a")))


@story
async def test_a_policy_permits_it_to_those_that_it_speaks_of_while_it_stands(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(permitting("t2")))
    assert await scope.refused(USER, Apply(asking("https://10.1.2.3/a"))) is Code.INVALID
    await scope.must(OPERATOR, Apply(permitting("t1")))
    await scope.must(USER, Apply(asking("https://10.1.2.3/a", "/srv/data/a")))
    await scope.must(OPERATOR, Delete("Policy", "lent"))
    await scope.must(USER, Apply(asking("https://10.1.2.3/a", "/srv/data/a")))
    assert await scope.refused(USER, Apply(asking("https://10.1.2.3/a", "/srv/data/a", "false"))) is Code.INVALID


def held(**says: str) -> Workload:
    plain = asking()
    return replace(plain, spec=replace(plain.spec, template=replace(plain.spec.template, **says)))


@story
async def test_somebody_of_a_tenant_does_not_say_how_its_work_is_held(scope: Scope) -> None:
    """An agent is root, and would make whoever may say so root as well, or anybody else of its machine."""
    member = replace(USER, tenant="t1")
    for says, field in (({"sandbox": "none"}, "sandbox"), ({"user": "root"}, "user"), ({"user": "daemon"}, "user")):
        (verdict,) = await scope.ask(member, Apply(held(**says)))
        assert isinstance(verdict, Refused) and verdict.code is Code.INVALID, says
        assert verdict.detail.startswith(f"spec.template.{field}: no policy in force permits workloads of this tenant "), says
    await scope.must(member, Apply(held(sandbox="bwrap")))
    await scope.must(OPERATOR, Apply(held(sandbox="none", user="root")))
    await scope.must(member, Apply(held(sandbox="none", user="root")))  # as it stands


@story
async def test_a_policy_permits_a_tenant_users_of_the_nodes_and_to_do_without_a_sandbox(scope: Scope) -> None:
    member = replace(USER, tenant="t1")
    rule = PolicyRule(match=PolicyMatch(tenants=("t1",)), permit=PolicyPermit(users=("daemon",), unsandboxed=True))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="held"), spec=PolicySpec(rules=(rule,)))))
    await scope.must(member, Apply(held(sandbox="none", user="daemon")))
    assert await scope.refused(member, Apply(held(user="root"))) is Code.INVALID
