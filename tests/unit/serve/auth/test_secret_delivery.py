"""Secret delivery: only the agent of the node to which a replica is bound gets its secrets, for the attempt that may run."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.claims import Acquire, Actor, Apply, Spawn
from remit.model.kinds import Config, DataSpec, Mount, Secret, SecretSpec
from remit.model.metadata import Metadata
from remit.model.roles import Role
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest, decode_material
from remit.serve.auth.secrets import Keyring, SecretDelivery, encode_material
from remit.world.files.disk import FileDisk
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, scope_test, workload
from tests.unit.commitment.authority_fixture import bind, commit_transitions

DATA = {"password": "hunter2", "user": "ann"}


class SecretScope:
    """A scope with a secret and a config, and a replica on n1 that reads both."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.keyring = Keyring(FileDisk(), scope.ids)
        self.materials = SecretDelivery(scope.lead.authority, scope.store, self.keyring)

    async def declare(self, name: str = "db", **data: str) -> None:
        obj = Secret(metadata=Metadata(name=name, tenant="t1"), spec=SecretSpec(data=data or DATA))
        await self.scope.must(USER, Apply(self.keyring.sealing_keys.seal_object(obj)))

    async def configure(self) -> None:
        await self.scope.must(USER, Apply(Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"a": "b"}))))

    def request_for(self, material: str, node: str = "n1", **other: object) -> SecretMaterialRequest:
        uid = self.scope.row(material)["metadata"]["uid"]
        return replace(SecretMaterialRequest(self.scope.actors[f"agent/{node}"], material, uid, 1), **other)

    async def material(self, request_for: SecretMaterialRequest) -> SecretMaterial:
        return decode_material(encode_material(await self.materials.material_for(request_for)))


async def prepare(scope: Scope, *secrets: Mount) -> tuple[SecretScope, str]:
    """A replica that reads secrets, bound to n1."""
    made = SecretScope(scope)
    await made.declare()
    await made.configure()
    mounts = secrets or (Mount(name="db", path="run/db"),)
    shape = workload("w")
    template = replace(shape.spec.template, secrets=mounts, configs=(Mount(name="c"),))
    await scope.must(USER, Apply(replace(shape, spec=replace(shape.spec, template=template))))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 0, 1))
    await bind(scope, "replica/t1/w-0")
    return made, "replica/t1/w-0"


@scope_test
async def test_agent_of_bound_node_gets_secrets_in_every_starting_phase(scope: Scope) -> None:
    made, key = await prepare(scope)
    material = SecretMaterial(secrets={"db": DATA}, configs={"c": {"a": "b"}})
    assert await made.material(made.request_for(key)) == material
    for step in ("start", "run", "ready", "serve"):
        await commit_transitions(scope, key, step)
        assert await made.material(made.request_for(key)) == material


@scope_test
async def test_agent_of_other_node_is_refused_without_details(scope: Scope) -> None:
    """A08."""
    made, key = await prepare(scope)
    for request_for in (
        made.request_for(key, "n2"),
        made.request_for(key, key="replica/t1/w-9"),
        made.request_for(key, uid="another"),
        made.request_for(key, key="secret/t1/db"),
        made.request_for(key, key="replica/t2/w-0"),
    ):
        material_ = await made.material(request_for)
        assert material_.failed == "refused" and not material_.secrets and not material_.configs
        assert "hunter2" not in repr(material_) and not any(
            word in material_.why for word in ("starting", "bound to n1,", "attempt")
        )


@scope_test
async def test_other_attempts_and_ended_ones_get_nothing(scope: Scope) -> None:
    made, key = await prepare(scope)
    assert (await made.material(made.request_for(key, attempt=2))).failed == "refused"
    assert (await made.material(made.request_for(key, attempt=0))).failed == "refused"
    await commit_transitions(scope, key, "start", "run", "doubt")
    assert (await made.material(made.request_for(key))).failed == "refused", "it may not be running"
    await commit_transitions(scope, key, "resume")
    assert not (await made.material(made.request_for(key))).failed
    await commit_transitions(scope, key, "crash")
    assert (await made.material(made.request_for(key))).failed == "refused"


@scope_test
async def test_agent_that_lost_its_lease_gets_nothing(scope: Scope) -> None:
    made, key = await prepare(scope)
    stale = made.request_for(key)
    scope.clock.at_ms += int(HOUR) + 1
    await scope.must(Actor("thief", Role.AGENT), Acquire("agent/n1", HOUR))
    assert (await made.material(stale)).failed == "refused"


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.AGENT])
def test_other_roles_get_nothing(role: Role) -> None:
    @scope_test
    async def material_(scope: Scope) -> None:
        made, key = await prepare(scope)
        request_for = made.request_for(key)
        assert (await made.material(replace(request_for, actor=replace(request_for.actor, role=role)))).failed == "refused"
        assert (await made.material(replace(request_for, actor=OPERATOR))).failed == "refused"

    material_()


@scope_test
async def test_missing_secret_is_named_with_fix_and_delivered_once_created(scope: Scope) -> None:
    made, key = await prepare(scope, Mount(name="db"), Mount(name="later", path="run/x", keys=("token",)))
    material_ = await made.material(made.request_for(key))
    assert (material_.failed, material_.why) == ("missing", "there is no secret later")
    assert material_.cure == "create it: remit create secret later --from-literal KEY=VALUE" and not material_.secrets
    await made.declare("later", other="x")
    assert (await made.material(made.request_for(key))).why == "there is no key token of secret later"
    await made.declare("later", other="x", token="t")
    assert (await made.material(made.request_for(key))).secrets == {"db": DATA, "later": {"token": "t"}}


@scope_test
async def test_latest_written_value_is_delivered(scope: Scope) -> None:
    made, key = await prepare(scope)
    await made.declare(password="new")
    assert (await made.material(made.request_for(key))).secrets == {"db": {"password": "new"}}


@scope_test
async def test_forgotten_key_is_reported_without_value(scope: Scope) -> None:
    made, key = await prepare(scope)
    made.keyring.add_key()
    made.keyring.forget_old_keys()
    material_ = await made.material(made.request_for(key))
    assert material_.failed == "missing" and "sealed with key" in material_.why and "restore that key" in material_.cure


def test_secret_material_repr_and_errors_do_not_show_values() -> None:
    material_ = SecretMaterial(secrets={"db": DATA}, configs={"c": {"a": "word"}})
    assert "hunter2" not in repr(material_) and "word" not in repr(material_) and "db" in repr(material_)
    with pytest.raises(Exception, match="not a SecretMaterial message") as error:
        decode_material(b'{"secrets": {"db": {"password": 4711}}}')
    assert "4711" not in str(error.value)
