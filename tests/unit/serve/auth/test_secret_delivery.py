"""Who gets what a replica reads? The agent of the node that it is bound to, in that attempt, while it may run; nobody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from remit.model.claims import Acquire, Actor, Apply, Role, Spawn
from remit.model.kinds import Mount
from remit.model.metadata import Metadata
from remit.model.secrets import Config, DataSpec, Secret, SecretSpec
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest, decode_material
from remit.serve.auth.secrets import Keyring, SecretDelivery, encode_material
from remit.world.files.disk import FileDisk
from tests.properties.authority_world import HOUR, OPERATOR, USER, Scope, story, workload
from tests.unit.commitment.authority_fixture import bind, commit_transitions

DATA = {"password": "hunter2", "user": "ann"}


class Given:
    """A scope with a secret and a config, and a replica on n1 that reads both."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.keyring = Keyring(FileDisk(), scope.ids)
        self.materials = SecretDelivery(scope.lead.authority, scope.store, self.keyring)

    async def declare(self, name: str = "db", **data: str) -> None:
        thing = Secret(metadata=Metadata(name=name, tenant="t1"), spec=SecretSpec(data=data or DATA))
        await self.scope.must(USER, Apply(self.keyring.sealing_keys.seal_object(thing)))

    async def configure(self) -> None:
        await self.scope.must(USER, Apply(Config(metadata=Metadata(name="c", tenant="t1"), spec=DataSpec(data={"a": "b"}))))

    def asked(self, of: str, node: str = "n1", **other: object) -> SecretMaterialRequest:
        uid = self.scope.row(of)["metadata"]["uid"]
        return replace(SecretMaterialRequest(self.scope.actors[f"agent/{node}"], of, uid, 1), **other)

    async def of(self, asked: SecretMaterialRequest) -> SecretMaterial:
        return decode_material(encode_material(await self.materials.material_for(asked)))


async def given(scope: Scope, *secrets: Mount) -> tuple[Given, str]:
    """Bound to n1, of the generation that reads."""
    made = Given(scope)
    await made.declare()
    await made.configure()
    mounts = secrets or (Mount(name="db", path="run/db"),)
    shape = workload("w")
    template = replace(shape.spec.template, secrets=mounts, configs=(Mount(name="c"),))
    await scope.must(USER, Apply(replace(shape, spec=replace(shape.spec, template=template))))
    await scope.must(scope.actors["workloads"], Spawn("t1", "w", 1, 0, 1))
    await bind(scope, "replica/t1/w-0")
    return made, "replica/t1/w-0"


@story
async def test_the_agent_of_its_node_gets_it_whenever_it_may_be_started(scope: Scope) -> None:
    made, key = await given(scope)
    whole = SecretMaterial(secrets={"db": DATA}, configs={"c": {"a": "b"}})
    assert await made.of(made.asked(key)) == whole
    for step in ("start", "run", "ready", "serve"):
        await commit_transitions(scope, key, step)
        assert await made.of(made.asked(key)) == whole


@story
async def test_the_agent_of_another_node_is_refused_and_learns_nothing(scope: Scope) -> None:
    """A08."""
    made, key = await given(scope)
    for asked in (
        made.asked(key, "n2"),
        made.asked(key, key="replica/t1/w-9"),
        made.asked(key, uid="another"),
        made.asked(key, key="secret/t1/db"),
        made.asked(key, key="replica/t2/w-0"),
    ):
        told = await made.of(asked)
        assert told.failed == "refused" and not told.secrets and not told.configs
        assert "hunter2" not in repr(told) and not any(word in told.why for word in ("starting", "bound to n1,", "attempt"))


@story
async def test_another_attempt_and_one_that_is_over_get_nothing(scope: Scope) -> None:
    made, key = await given(scope)
    assert (await made.of(made.asked(key, attempt=2))).failed == "refused"
    assert (await made.of(made.asked(key, attempt=0))).failed == "refused"
    await commit_transitions(scope, key, "start", "run", "doubt")
    assert (await made.of(made.asked(key))).failed == "refused", "nobody knows whether it runs"
    await commit_transitions(scope, key, "resume")
    assert not (await made.of(made.asked(key))).failed
    await commit_transitions(scope, key, "crash")
    assert (await made.of(made.asked(key))).failed == "refused"


@story
async def test_one_whose_lease_was_taken_by_another_gets_nothing(scope: Scope) -> None:
    made, key = await given(scope)
    stale = made.asked(key)
    scope.clock.at_ms += int(HOUR) + 1
    await scope.must(Actor("thief", Role.AGENT), Acquire("agent/n1", HOUR))
    assert (await made.of(stale)).failed == "refused"


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.AGENT])
def test_no_other_role_gets_anything(role: Role) -> None:
    @story
    async def told(scope: Scope) -> None:
        made, key = await given(scope)
        asked = made.asked(key)
        assert (await made.of(replace(asked, actor=replace(asked.actor, role=role)))).failed == "refused"
        assert (await made.of(replace(asked, actor=OPERATOR))).failed == "refused"

    told()


@story
async def test_what_is_missing_is_named_with_its_cure_and_comes_once_it_is_there(scope: Scope) -> None:
    made, key = await given(scope, Mount(name="db"), Mount(name="later", path="run/x", keys=("token",)))
    told = await made.of(made.asked(key))
    assert (told.failed, told.why) == ("missing", "there is no secret later")
    assert told.cure == "create it: remit create secret later --from-literal KEY=VALUE" and not told.secrets
    await made.declare("later", other="x")
    assert (await made.of(made.asked(key))).why == "there is no key token of secret later"
    await made.declare("later", other="x", token="t")
    assert (await made.of(made.asked(key))).secrets == {"db": DATA, "later": {"token": "t"}}


@story
async def test_what_was_written_since_is_what_is_given(scope: Scope) -> None:
    made, key = await given(scope)
    await made.declare(password="new")
    assert (await made.of(made.asked(key))).secrets == {"db": {"password": "new"}}


@story
async def test_a_key_that_is_gone_is_told_and_no_value_is(scope: Scope) -> None:
    made, key = await given(scope)
    made.keyring.add_key()
    made.keyring.forget_old_keys()
    told = await made.of(made.asked(key))
    assert told.failed == "missing" and "sealed with key" in told.why and "restore that key" in told.cure


def test_material_never_shows_itself() -> None:
    told = SecretMaterial(secrets={"db": DATA}, configs={"c": {"a": "word"}})
    assert "hunter2" not in repr(told) and "word" not in repr(told) and "db" in repr(told)
    with pytest.raises(Exception, match="not a SecretMaterial message") as error:
        decode_material(b'{"secrets": {"db": {"password": 4711}}}')
    assert "4711" not in str(error.value)
