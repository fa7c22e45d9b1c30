"""Policies in force: publication, rollback, leased policies, permits for node resources."""

from __future__ import annotations

from msgspec.structs import replace

from remit.model.artifacts import Artifact, HostPath, PolicyPermit, Volume
from remit.model.claims import Adopt, Apply, Bind, Code, Delete, Refused, Reserve, Rollback
from remit.model.kinds import Policy, PolicyAllow, PolicyMatch, PolicyRule, PolicySpec, Template, Workload, WorkloadSpec
from remit.model.metadata import Metadata
from remit.model.resources import Duration
from tests.properties.authority_world import OPERATOR, USER, Scope, scope_test
from tests.unit.commitment.authority_fixture import T1, bind, spawn_replicas

MINUTE = Duration(60_000)


def only_in(*zones: str) -> PolicySpec:
    return PolicySpec(rules=(PolicyRule(allow=PolicyAllow(zones=zones)),))


def policy(name: str, *zones: str) -> Policy:
    return Policy(metadata=Metadata(name=name), spec=only_in(*zones))


def adopt_claim(scope: Scope, number: int, *zones: str, ttl: Duration = MINUTE, asked_ms: int | None = None) -> Adopt:
    return Adopt(number, {"p": only_in(*zones)}, ttl, scope.clock.at_ms if asked_ms is None else asked_ms)


@scope_test
async def test_rollback_republishes_old_policies_as_new_revision(scope: Scope) -> None:
    assert await scope.must(OPERATOR, Apply(policy("p", "a"))) == [1]
    await scope.must(OPERATOR, Apply(policy("p", "b")), Apply(policy("q", "a", "b")))
    (key, other) = await spawn_replicas(scope, "w", 2)
    scheduler = scope.actors["scheduler"]
    assert await scope.refused(scheduler, Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    assert await scope.must(OPERATOR, Rollback(1)) == [4]
    assert scope.books.keys("policy/") == ["policy/p"], "policies added later are gone"
    assert scope.row("policy/p")["spec"]["rules"][0]["allow"] == {"zones": ["a"]}
    await bind(scope, key)
    assert scope.row(key)["status"]["policy"] == 4
    assert await scope.must(OPERATOR, Rollback(3)) == [5], "a rollback can be rolled back"
    assert scope.books.keys("policy/") == ["policy/p", "policy/q"]
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(other, scope.at(other), "n1", T1)) is Code.POLICY
    assert await scope.refused(OPERATOR, Rollback(9)) is Code.NOT_FOUND
    assert await scope.refused(USER, Rollback(1)) is Code.ROLE


@scope_test
async def test_deleted_policy_no_longer_restricts_placement(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(policy("p", "b")))
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(scope.actors["scheduler"], Bind(key, scope.at(key), "n1", T1)) is Code.POLICY
    await scope.must(OPERATOR, Delete("Policy", "p"))
    await bind(scope, key)


@scope_test
async def test_scope_with_expired_policy_lease_places_nothing(scope: Scope) -> None:
    """The policy may have been withdrawn since."""
    agent = scope.actors["policy"]
    await scope.must(agent, adopt_claim(scope, 7, "a"))
    a, b, c = await spawn_replicas(scope, "w", 3)
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
    await scope.must(agent, adopt_claim(scope, 7, "a"))
    await bind(scope, b)
    scope.clock.on = "boot-2"
    await scope.take_over()
    assert await scope.refused(scheduler, Bind(c, scope.at(c), "n1", T1)) is Code.POLICY_LAPSED, "another boot's clock"


@scope_test
async def test_policy_lease_counts_from_request_and_longer_one_wins(scope: Scope) -> None:
    agent = scope.actors["policy"]
    (key,) = await spawn_replicas(scope, "w")
    assert await scope.refused(agent, adopt_claim(scope, 7, "a", asked_ms=scope.clock.at_ms + 1)) is Code.INVALID
    asked_ms = scope.clock.at_ms
    scope.clock.at_ms += 30_000
    await scope.must(agent, adopt_claim(scope, 7, "a"), adopt_claim(scope, 7, "a", asked_ms=asked_ms))
    scope.clock.at_ms += 59_999
    await bind(scope, key)
    assert scope.row("policyrevision/00000007")["spec"]["deadline"]["atMs"] == asked_ms + 90_000


@scope_test
async def test_policy_revision_number_has_one_content_and_never_decreases(scope: Scope) -> None:
    agent = scope.actors["policy"]
    assert await scope.must(agent, adopt_claim(scope, 7, "a")) == [7]
    assert await scope.refused(agent, adopt_claim(scope, 7, "b")) is Code.OPERATION_MISMATCH
    assert await scope.refused(agent, adopt_claim(scope, 6, "a")) is Code.REVISION
    assert await scope.must(agent, adopt_claim(scope, 9, "b")) == [9]


@scope_test
async def test_scope_with_leased_policies_refuses_local_ones(scope: Scope) -> None:
    """A local policy would share their revision numbers."""
    await scope.must(OPERATOR, Apply(policy("own", "a")))
    await scope.must(scope.actors["policy"], adopt_claim(scope, 7, "a"))
    assert await scope.refused(OPERATOR, Apply(policy("own", "b"))) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Delete("Policy", "own")) is Code.NOT_OWNER
    assert await scope.refused(OPERATOR, Rollback(1)) is Code.NOT_OWNER


# -- permits for node resources ----------------------------------------------------------------------------------------


def workload_using(source: str = "", path: str = "", command: str = "true") -> Workload:
    artifacts = (Artifact(source=source, sha256="0" * 64),) if source else ()
    volumes = (Volume(name="v", path="v", host=HostPath(path=path)),) if path else ()
    template = Template(command=(command,), artifacts=artifacts, volumes=volumes)
    return Workload(metadata=Metadata(name="asks", tenant="t1"), spec=WorkloadSpec(type="service", template=template))


def permit_policy(*tenants: str) -> Policy:
    permit = PolicyPermit(artifact_hosts=("10.0.0.0/8",), host_paths=("/srv/data",))
    rule = PolicyRule(match=PolicyMatch(tenants=tenants), permit=permit)
    return Policy(metadata=Metadata(name="lent"), spec=PolicySpec(rules=(rule,)))


@scope_test
async def test_private_source_or_host_path_without_permit_is_refused_with_cure(scope: Scope) -> None:
    """A32."""
    for source in ("http://169.254.169.254/latest/meta-data/", "http://localhost:7420/v1/nodes", "https://10.1.2.3/a"):
        (verdict,) = await scope.ask(USER, Apply(workload_using(source)))
        assert isinstance(verdict, Refused)
        assert verdict.code is Code.INVALID
        assert verdict.detail.startswith("spec.template.artifacts[0].source: artifacts may not be fetched from this host: ")
        assert verdict.detail.endswith("; use a public host, or let a policy permit it in permit.artifactHosts")
    (verdict,) = await scope.ask(USER, Apply(workload_using(path="/srv/data/a")))
    assert isinstance(verdict, Refused)
    assert verdict.detail.startswith("spec.template.volumes[0].host.path: no policy in force permits the node path /srv/data/a")
    await scope.must(USER, Apply(workload_using("https://example.org/a")))


@scope_test
async def test_permit_applies_to_matching_tenants_while_policy_exists(scope: Scope) -> None:
    await scope.must(OPERATOR, Apply(permit_policy("t2")))
    assert await scope.refused(USER, Apply(workload_using("https://10.1.2.3/a"))) is Code.INVALID
    await scope.must(OPERATOR, Apply(permit_policy("t1")))
    await scope.must(USER, Apply(workload_using("https://10.1.2.3/a", "/srv/data/a")))
    await scope.must(OPERATOR, Delete("Policy", "lent"))
    await scope.must(USER, Apply(workload_using("https://10.1.2.3/a", "/srv/data/a")))
    assert await scope.refused(USER, Apply(workload_using("https://10.1.2.3/a", "/srv/data/a", "false"))) is Code.INVALID


def isolated(**settings: str) -> Workload:
    plain = workload_using()
    return replace(plain, spec=replace(plain.spec, template=replace(plain.spec.template, **settings)))


@scope_test
async def test_member_may_not_weaken_sandbox_or_choose_user(scope: Scope) -> None:
    """Agents run as root, so a member could become root or any other user of the node."""
    member = replace(USER, tenant="t1")
    for settings, field in (({"sandbox": "none"}, "sandbox"), ({"user": "root"}, "user"), ({"user": "daemon"}, "user")):
        (verdict,) = await scope.ask(member, Apply(isolated(**settings)))
        assert isinstance(verdict, Refused) and verdict.code is Code.INVALID, settings
        assert verdict.detail.startswith(f"spec.template.{field}: no policy in force permits workloads of this tenant "), (
            settings
        )
    await scope.must(member, Apply(isolated(sandbox="bwrap")))
    await scope.must(OPERATOR, Apply(isolated(sandbox="none", user="root")))
    await scope.must(member, Apply(isolated(sandbox="none", user="root")))  # unchanged


@scope_test
async def test_policy_may_permit_users_and_no_sandbox_to_tenant(scope: Scope) -> None:
    member = replace(USER, tenant="t1")
    rule = PolicyRule(match=PolicyMatch(tenants=("t1",)), permit=PolicyPermit(users=("daemon",), unsandboxed=True))
    await scope.must(OPERATOR, Apply(Policy(metadata=Metadata(name="isolated"), spec=PolicySpec(rules=(rule,)))))
    await scope.must(member, Apply(isolated(sandbox="none", user="daemon")))
    assert await scope.refused(member, Apply(isolated(user="root"))) is Code.INVALID
