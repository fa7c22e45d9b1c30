"""Delivery of secrets and configs to a replica. No error or log line contains a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from msgspec.structs import replace

from remit.agent.attempts import AttemptId
from remit.agent.preparation.preparer import (
    MATERIAL_WAIT_MS,
    NotPrepared,
    PreparationContext,
    SecretAndConfigStep,
    outermost_paths,
    plan_delivery,
)
from remit.agent.run_spec import NodeSettings, PreparedInputs, build_process_spec
from remit.model.claims import Actor
from remit.model.kinds import Mount, Template, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.records import GenerationSpec, Replica, ReplicaSpec
from remit.model.roles import Role
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.world.interfaces import NotSent
from tests.unit.world.virtual_world import run_virtually, virtual_world

CANARY = "canary-4711"
COPY = AttemptId("replica/t/a-0", "u1", 1)
PLAIN = Template(command=("run", "$(MODE)", "$(password)"))


def template(secrets: tuple[Mount, ...] = (), configs: tuple[Mount, ...] = (), **more: Any) -> Template:
    return replace(PLAIN, secrets=secrets, configs=configs, **more)


def at(name: str, path: str) -> Mount:
    return Mount(name=name, path=path)


def context(made: Template, *, sandbox: bool = False, fresh: bool = True, runs: bool = False) -> PreparationContext:
    generation = GenerationSpec(workload="a", generation=1, labels={}, spec=WorkloadSpec(type="service", template=made))
    replica = Replica(metadata=RecordMetadata(name="a-0", tenant="t", uid="u1"), spec=ReplicaSpec(workload="a", generation=1))
    return PreparationContext(
        NodeSettings("n1", "local", Path("/logs"), Path("/work"), sandbox), COPY, replica, generation, fresh, runs
    )


def test_mounts_become_files_and_variables_with_secret_variables_apart() -> None:
    made = template((Mount(name="s", path="a"), Mount(name="e")), (Mount(name="c", path="a/b"), Mount(name="f")))
    material = SecretMaterial({"s": {"x": "1"}, "e": {"password": CANARY}}, {"c": {"y": "2"}, "f": {"MODE": "live"}})
    delivered = plan_delivery(made, material)
    assert delivered.files == {PurePosixPath("a/x"): b"1", PurePosixPath("a/b/y"): b"2"}
    assert (delivered.env, delivered.secret_env) == ({"MODE": "live"}, {"password": CANARY})
    assert list(outermost_paths(made)) == [PurePosixPath("a")]
    assert CANARY not in repr(delivered) and CANARY not in repr(material)


@pytest.mark.parametrize(
    ("secrets", "data", "message"),
    [
        ((Mount(name="s"),), {"s": {"tls.crt": CANARY}}, "secret s: key tls.crt is not a valid variable name"),
        ((Mount(name="s"),), {"s": {"REMIT_TOKEN": CANARY}}, "secret s: key REMIT_TOKEN is not a valid variable name"),
        ((at("s", "a"), at("r", "a")), {"s": {"x": CANARY}, "r": {"x": CANARY}}, "another file is already at a/x"),
        ((at("s", "a"), at("r", "a/x")), {"s": {"x": CANARY}, "r": {"y": CANARY}}, "another file is already at"),
        ((at("r", "a/x"), at("s", "a")), {"s": {"x": CANARY}, "r": {"y": CANARY}}, "another file is already at"),
        ((Mount(name="s"),), {}, "the server did not send secret s"),
    ],
)  # fmt: skip
def test_invalid_secret_key_or_path_is_reported_without_value(
    secrets: tuple[Mount, ...], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotPrepared, match=message) as error:
        plan_delivery(template(secrets), SecretMaterial(data))
    assert CANARY not in str(error.value)


def test_secret_variable_is_not_expanded_in_command() -> None:
    subject = context(PLAIN)
    prepared = PreparedInputs(env={"MODE": "live"}, secret_env={"password": CANARY, "MODE": "not this"})
    order = build_process_spec(subject.settings, COPY, subject.replica, subject.generation, {}, prepared)
    assert order.argv == ("run", "live", "$(password)"), "arguments are visible in process lists"
    assert order.env["password"] == CANARY and order.env["MODE"] == "live"
    joined = PreparedInputs(secret_env={"a": "1"}).merged_with(prepared).merged_with(PreparedInputs(env={"x": "y"}))
    assert joined.secret_env == {"a": "1", **prepared.secret_env} and joined.env == {"MODE": "live", "x": "y"}


class DirectoryFetcher:
    """Accepts directory creation and does nothing."""

    async def make_directory(self, directory: Path, /, *, below: Path, user: str = "") -> None:
        assert directory.is_relative_to(below)


class MemoryVault:
    """Satisfies `world.vault.Vault`."""

    def __init__(self) -> None:
        self.held: dict[str, Mapping[PurePosixPath, bytes]] = {}

    def put(self, name: str, files: Mapping[PurePosixPath, bytes], user: str, /) -> Path:
        self.held[name] = dict(files)
        return self.path_of(name)

    def path_of(self, name: str, /) -> Path:
        return Path("/vault") / name

    def has(self, name: str, /) -> bool:
        return name in self.held

    def remove(self, name: str, /) -> None:
        self.held.pop(name, None)

    def names(self) -> tuple[str, ...]:
        return tuple(self.held)


class Bench:
    """A step that returns or raises `answers` in turn; the last one repeats."""

    def __init__(self, *answers: SecretMaterial | Exception) -> None:
        self.world = dataclasses.replace(virtual_world(), artifacts=DirectoryFetcher())  # type: ignore[arg-type]
        self.took_ms = 0
        self.vault, self.requests, self.logged = MemoryVault(), list[SecretMaterialRequest](), list[str]()
        self._answers = list(answers)
        self.step = SecretAndConfigStep(self.world, self._ask, self.vault)
        self.step.actor_for = lambda node: Actor("agent", Role.AGENT, f"agent/{node}", 3)

    async def _ask(self, request: SecretMaterialRequest) -> SecretMaterial:
        self.requests.append(request)
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def prepare(self, subject: PreparationContext) -> PreparedInputs:
        async def prepare() -> PreparedInputs:
            try:
                return await self.step.prepare(subject, Path("/work/room"), self.logged.append)
            finally:
                self.took_ms = self.world.clock.now_ms()

        prepared: PreparedInputs = run_virtually(prepare())
        return prepared


FILES = template((Mount(name="s", path="secrets"),))
GIVEN = SecretMaterial({"s": {"x": CANARY}})
MISSING = SecretMaterial(failed="missing", why="there is no secret s", cure="create it")


def test_missing_secret_is_waited_for_and_reported() -> None:
    bench = Bench(NotSent("nobody is there", "start it"), MISSING, SecretMaterial(failed="later", why="busy", cure=""), GIVEN)
    bench.prepare(context(FILES, sandbox=True))
    assert [subject.actor.lease for subject in bench.requests] == ["agent/n1"] * 4
    assert "nobody is there" in bench.logged[1]
    assert "there is no secret s; create it" in bench.logged[2] and " s: " in bench.logged[2]
    assert bench.vault.held == {COPY.file_name: {PurePosixPath("secrets/x"): CANARY.encode()}}
    assert CANARY not in "".join(bench.logged)


def test_wait_for_missing_secret_is_bounded() -> None:
    bench = Bench(MISSING)
    with pytest.raises(NotPrepared, match="there is no secret s"):
        bench.prepare(context(FILES))
    assert bench.took_ms >= MATERIAL_WAIT_MS and len(bench.requests) < 100


def test_no_request_is_sent_without_node_lease() -> None:
    bench = Bench(GIVEN)
    turns = iter([None, None, Actor("agent", Role.AGENT, "agent/n1", 4)])
    bench.step.actor_for = lambda _: next(turns)
    bench.prepare(context(FILES, sandbox=True))
    assert [subject.actor.epoch for subject in bench.requests] == [4]


def test_sandbox_mounts_files_and_running_attempt_keeps_them() -> None:
    bench = Bench(GIVEN, SecretMaterial({"s": {"x": "changed"}}))
    (mounted,) = bench.prepare(context(FILES, sandbox=True)).mounts
    place = Path("/vault") / COPY.file_name / "secrets"
    assert (mounted.source, mounted.at, mounted.writable) == (place, Path("/work") / COPY.file_name / "secrets", False)
    bench.prepare(context(FILES, sandbox=True, fresh=False, runs=True))
    assert bench.vault.held[COPY.file_name][PurePosixPath("secrets/x")] == CANARY.encode()
    bench.prepare(context(FILES, sandbox=True, fresh=False))
    assert bench.vault.held[COPY.file_name][PurePosixPath("secrets/x")] == b"changed", "a new start reads the current value"


def test_files_of_killed_attempts_are_removed() -> None:
    bench = Bench(GIVEN)
    bench.vault.held = {"old.1": {}, COPY.file_name: {}}
    bench.step.retain_only({COPY.file_name})
    assert list(bench.vault.held) == [COPY.file_name]
    bench.step.forget(COPY)
    assert not bench.vault.held
    bench.step.forget(COPY)
