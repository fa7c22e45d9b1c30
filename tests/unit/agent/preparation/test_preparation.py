"""Preparation of a replica before its start: artifacts, root filesystem, volumes, cleanup."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from remit.agent.attempts import AttemptId
from remit.agent.preparation.artifacts import ArtifactCache, ArtifactRef, ArtifactStep, RootfsStep
from remit.agent.preparation.preparer import (
    NotPrepared,
    OnProgress,
    PreparationContext,
    PreparationProgress,
    PreparationStep,
    Preparer,
)
from remit.agent.preparation.volumes import VolumeStep
from remit.agent.reconciler import PrepareAction, ReportAction, StartAction
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, build_process_spec
from remit.model.artifacts import Artifact, HostPath, Rootfs, Scratch, Volume
from remit.model.kinds import Template, WorkloadSpec
from remit.model.metadata import RecordMetadata
from remit.model.records import GenerationSpec, Phase, Replica, ReplicaSpec
from remit.simulate.world.disk import ArtifactSources, SimArtifactFetcher, SimDisk
from remit.world.interfaces import BindMount, FetchPermissions, IsolationSupport, World
from tests.unit.agent import reconciler_bench as core
from tests.unit.world.virtual_world import NoRunner, run_virtually, virtual_world

ROOT = Path("/d/cache")
REACH = FetchPermissions(directories=(Path("/srv"),), hosts=("files",))
KIB = 1 << 10


class Sandboxes(NoRunner):
    def isolation_support(self) -> IsolationSupport:
        return IsolationSupport("none", (), "", sandbox=True)


class Bench:
    """An artifact cache on a simulated disk; `depot` holds what can be fetched."""

    def __init__(self, bytes_max: int = 100 * KIB) -> None:
        self.disk, self.depot = SimDisk(), ArtifactSources()
        self.mount = self.disk.mount(lambda: True)
        carrier = SimArtifactFetcher(self.disk, self.depot, lambda: True)
        self.world: World = replace(virtual_world(), disk=self.mount, artifacts=carrier)
        self.bytes_max = bytes_max
        self.logged: list[str] = []
        self.mount.make_directory(ROOT / "files")
        self.mount.make_directory(ROOT / "trees")
        self.mount.make_directory(Path("/d/work"))
        self.fetches: list[str] = []
        fetch = carrier.fetch

        async def counted(source: str, to: Path, /, **more: object) -> int:
            self.fetches.append(source)
            return await fetch(source, to, **more)  # type: ignore[arg-type]

        carrier.fetch = counted  # type: ignore[method-assign]
        self.cache = self.reopened()

    def reopened(self) -> ArtifactCache:
        return ArtifactCache(self.world, ROOT, REACH, self.bytes_max)

    def put(self, name: str, size: int = 30 * KIB, tenant: str = "t") -> ArtifactRef:
        content = (name.encode() * size)[:size]
        self.depot.files[f"http://files/{name}"] = content
        return ArtifactRef(tenant, f"http://files/{name}", hashlib.sha256(content).hexdigest())

    async def fetch(self, expected: ArtifactRef) -> bytes:
        async with self.cache.file(expected, self.logged.append) as path:
            return self.mount.read(path)

    def cached(self) -> list[str]:
        return list(self.mount.list(ROOT / "files"))


def play(scene: Callable[[Bench], Awaitable[None]], **more: int) -> None:
    async def around() -> None:
        await scene(Bench(**more))

    run_virtually(around())


# -- artifact cache ----------------------------------------------------------------------------------------------------------


def test_concurrent_uses_share_one_fetch() -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        found = await asyncio.gather(*(bench.fetch(expected) for _ in range(8)))
        assert len(set(found)) == 1
        assert bench.fetches == [expected.source]
        assert any("another replica" in line for line in bench.logged)
        assert any(line.startswith("fetching 0.0 of 0.0 MiB of http://files/a") for line in bench.logged)

    play(scene)


def test_cancelled_fetch_is_taken_over_by_next_user() -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        first = asyncio.create_task(bench.fetch(expected))
        await asyncio.sleep(0.006)
        second = asyncio.create_task(bench.fetch(expected))
        await asyncio.sleep(0.001)
        first.cancel()
        assert await second
        assert len(bench.fetches) == 2

    play(scene)


def test_cached_artifact_of_other_tenant_is_not_shared() -> None:
    async def scene(bench: Bench) -> None:
        mine = bench.put("a", tenant="t")
        await bench.fetch(mine)
        theirs = mine._replace(tenant="u", source="http://files/not-theirs")
        with pytest.raises(NotPrepared, match="was not fetched"):
            await bench.fetch(theirs)

    play(scene)


def test_least_recently_used_artifact_is_evicted_unless_in_use() -> None:
    async def scene(bench: Bench) -> None:
        a, b, c, d, e = (bench.put(name) for name in "abcde")
        for line in (a, b, c, a):
            await bench.fetch(line)
        await bench.fetch(d)  # evicts b
        assert sorted(bench.cached()) == sorted(line.name for line in (a, c, d))
        async with bench.cache.file(c, bench.logged.append):
            await bench.fetch(e)  # evicts a: c is older, but in use
            assert sorted(bench.cached()) == sorted(line.name for line in (c, d, e))

    play(scene)


def test_artifact_over_cache_size_is_refused_and_leaves_nothing() -> None:
    async def scene(bench: Bench) -> None:
        a, b = bench.put("a", 60 * KIB), bench.put("b", 60 * KIB)
        async with bench.cache.file(a, bench.logged.append):
            with pytest.raises(NotPrepared, match="do not fit in the artifact cache"):
                await bench.fetch(b)
        assert bench.cached() == [a.name]
        await bench.fetch(b)
        with pytest.raises(NotPrepared, match="has more than 0 MiB"):
            await bench.fetch(bench.put("huge", 200 * KIB))

    play(scene)


def test_cache_survives_agent_restart_and_partial_files_are_removed() -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        await bench.fetch(expected)
        bench.mount.write_atomically(ROOT / "files" / f"{expected.name}.coming", b"half")
        bench.mount.write_atomically(ROOT / "files" / "stranger", b"unknown")
        bench.cache = bench.reopened()
        await bench.fetch(expected)
        assert bench.fetches == [expected.source]
        assert bench.cached() == [expected.name]

    play(scene)


@pytest.mark.parametrize("index", [b"", b"{", b'{"files/x": 3}', b"[]"])
def test_unreadable_cache_index_costs_only_a_fetch(index: bytes) -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        await bench.fetch(expected)
        bench.mount.write_atomically(ROOT / "index", index)
        bench.cache = bench.reopened()
        await bench.fetch(expected)
        assert len(bench.fetches) == 2

    play(scene)


def test_modified_cached_file_is_fetched_again() -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        good = await bench.fetch(expected)
        bench.mount.write_atomically(ROOT / "files" / expected.name, b"evil")
        assert await bench.fetch(expected) == good
        assert len(bench.fetches) == 2

    play(scene)


def test_unreachable_source_is_retried_with_backoff_then_fails() -> None:
    async def scene(bench: Bench) -> None:
        expected = bench.put("a")
        bench.depot.unavailable = True
        began_ms = bench.world.clock.now_ms()
        with pytest.raises(NotPrepared, match="cannot be reached"):
            await bench.fetch(expected)
        assert len(bench.fetches) == 4
        assert 7_000 <= bench.world.clock.now_ms() - began_ms < 9_000
        assert any("retrying to fetch" in line for line in bench.logged)
        bench.depot.unavailable = False
        assert await bench.fetch(expected)

    play(scene)


# -- preparing ---------------------------------------------------------------------------------------------------------------


def archive(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def artifact(bench: Bench, source: str, content: bytes, **more: object) -> Artifact:
    bench.depot.files[source] = content
    return Artifact(source=source, sha256=hashlib.sha256(content).hexdigest(), **more)  # type: ignore[arg-type]


COPY = AttemptId("replica/t/w-0", "uid", 1)


async def prepared(
    bench: Bench, *, sandbox: bool = False, steps: Sequence[PreparationStep] = (), **template: object
) -> PreparationProgress:
    made = Template(command=("run",), **template)  # type: ignore[arg-type]
    generation = GenerationSpec(workload="w", generation=1, labels={}, spec=WorkloadSpec(type="service", template=made))
    replica = Replica(metadata=RecordMetadata(name="w-0", tenant="t"), spec=ReplicaSpec(workload="w", generation=1, index=0))
    place = NodeSettings("n", "s", Path("/d/logs"), Path("/d/work"), sandbox)
    permitted = (Path("/srv/permitted"),)
    own: list[PreparationStep] = [
        ArtifactStep(bench.world, bench.cache),
        RootfsStep(bench.world, bench.cache, permitted),
        VolumeStep(bench.world, permitted),
    ]
    preparer, progress = Preparer(bench.world, [*steps, *own]), PreparationProgress()
    await preparer.prepare(place, COPY, replica, generation, progress)
    if progress.inputs is not None:  # the inputs must form a valid process spec
        build_process_spec(place, COPY, replica, generation, {}, progress.inputs)
    return progress


def test_work_directory_appears_with_all_inputs_at_once() -> None:
    async def scene(bench: Bench) -> None:
        app = artifact(bench, "http://files/app.tar", archive(bin__run=b"#!", conf=b"x"), unpack=True)
        model = artifact(bench, "http://files/model.bin", b"weights", path="data/model")
        named = artifact(bench, "http://files/a%20b.txt?v=1", b"text")
        progress = await prepared(
            bench, artifacts=(app, model, named), volumes=(Volume(name="s", path="tmp", scratch=Scratch()),)
        )
        assert progress.inputs == NO_INPUTS
        directory = Path("/d/work/uid.1")
        assert bench.mount.list(directory) == ("a b.txt", "bin", "conf", "data", "tmp")
        assert bench.mount.read(directory / "data/model") == b"weights"
        assert bench.mount.list(Path("/d/work")) == ("uid.1",)

    play(scene)


def test_failed_preparation_leaves_no_directory_and_reports_cause() -> None:
    async def scene(bench: Bench) -> None:
        good = artifact(bench, "http://files/good", b"x")
        bad = artifact(bench, "http://files/bad", b"y", unpack=True)
        progress = await prepared(bench, artifacts=(good, bad))
        assert progress.inputs is None
        assert progress.failure.startswith("template.artifacts[1] cannot be placed: not a readable archive")
        assert "; create a tar" in progress.failure
        assert bench.mount.list(Path("/d/work")) == ()

    play(scene)


def test_existing_work_directory_is_not_overwritten() -> None:
    async def scene(bench: Bench) -> None:
        spec = artifact(bench, "http://files/data", b"original", path="data")
        await prepared(bench, artifacts=(spec,))
        bench.mount.write_atomically(Path("/d/work/uid.1/data"), b"changed")
        progress = await prepared(bench, artifacts=(spec,))
        assert progress.inputs == NO_INPUTS
        assert bench.mount.read(Path("/d/work/uid.1/data")) == b"changed"

    play(scene)


def test_cancelled_preparation_is_redone_from_scratch() -> None:
    async def scene(bench: Bench) -> None:
        spec = (artifact(bench, "http://files/line", b"1"), artifact(bench, "http://files/two", b"2"))
        task = asyncio.create_task(prepared(bench, artifacts=spec))
        await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.mount.list(Path("/d/work")) == ("uid.1.making",)
        assert (await prepared(bench, artifacts=spec)).inputs is not None
        assert bench.mount.list(Path("/d/work/uid.1")) == ("line", "two")

    play(scene)


def test_inputs_of_all_steps_are_merged() -> None:
    class EnvironmentStep:
        def applies_to(self, template: Template, /) -> bool:
            return True

        async def prepare(self, subject: PreparationContext, directory: Path, log: OnProgress, /) -> PreparedInputs:
            return PreparedInputs(env={"A": "1"})

        def forget(self, copy: AttemptId, /) -> None:
            pass

        def retain_only(self, known: Collection[str], /) -> None:
            pass

    async def scene(bench: Bench) -> None:
        progress = await prepared(bench, steps=[EnvironmentStep()], volumes=(Volume(name="s", path="tmp", scratch=Scratch()),))
        assert progress.inputs == PreparedInputs(env={"A": "1"})

    play(scene)


# -- root filesystems and volumes --------------------------------------------------------------------------------------------


def test_rootfs_without_bubblewrap_fails_with_cure() -> None:
    async def scene(bench: Bench) -> None:
        progress = await prepared(bench, rootfs=Rootfs(directory="/srv/permitted/root"))
        assert progress.failure.startswith(
            "template.rootfs needs bubblewrap, which this node does not have; install bubblewrap"
        )

    play(scene)


def test_rootfs_is_unpacked_once_and_pinned_while_used() -> None:
    async def scene(bench: Bench) -> None:
        bench.world = replace(bench.world, runner=Sandboxes())
        bench.cache = bench.reopened()
        content = archive(usr__bin__sh=bytes(20 * KIB))
        root = artifact(bench, "http://files/root.tar", content)
        spec = Rootfs(source=root.source, sha256=root.sha256)
        for _ in range(2):
            progress = await prepared(bench, sandbox=True, rootfs=spec)
            tree = ROOT / "trees" / f"{root.sha256}.t"
            assert progress.inputs == PreparedInputs(root=tree), progress.failure
            assert bench.mount.list(tree) == ("usr",)
        assert bench.fetches == [root.source]
        for name in "abc":
            await bench.fetch(bench.put(name))
        assert bench.mount.list(ROOT / "trees") == (f"{root.sha256}.t",), "pinned by the attempt that uses it"

    play(scene)


def test_host_path_is_mounted_only_where_permitted() -> None:
    async def scene(bench: Bench) -> None:
        bench.world = replace(bench.world, runner=Sandboxes())
        for path in ("/srv/permitted/root", "/srv/permitted/data", "/srv/other"):
            bench.mount.make_directory(Path(path))
        volumes = (
            Volume(name="a", path="/data", host=HostPath(path="/srv/permitted/data")),
            Volume(name="b", path="/tmp/b", scratch=Scratch()),
            Volume(name="c", path="c", host=HostPath(path="/srv/permitted/data", read_only=False)),
        )
        progress = await prepared(bench, sandbox=True, rootfs=Rootfs(directory="/srv/permitted/root"), volumes=volumes)
        assert progress.inputs is not None
        assert progress.inputs.root == Path("/srv/permitted/root")
        assert progress.inputs.mounts == (
            BindMount(Path("/srv/permitted/data"), Path("/data"), writable=False),
            BindMount(Path("/d/work/uid.1/.volumes/b"), Path("/tmp/b"), writable=True),
            BindMount(Path("/srv/permitted/data"), Path("/work/c"), writable=True),
        )
        for spec in (
            {"rootfs": Rootfs(directory="/srv/other")},
            {"volumes": (Volume(name="o", path="o", host=HostPath(path="/srv/other")),)},
        ):
            bench.mount.remove_tree(Path("/d/work/uid.1"))
            refused = await prepared(bench, sandbox=True, **spec)
            assert "/srv/other is not permitted on this node; start the agent with --host-path" in refused.failure

    play(scene)


def test_read_only_host_path_without_sandbox_is_refused() -> None:
    async def scene(bench: Bench) -> None:
        bench.mount.make_directory(Path("/srv/permitted"))
        progress = await prepared(bench, volumes=(Volume(name="a", path="a", host=HostPath(path="/srv/permitted")),))
        assert progress.failure.startswith(
            "host path /srv/permitted cannot be mounted read-only without a sandbox; set readOnly: false"
        )

    play(scene)


# -- order of preparation and start ------------------------------------------------------------------------------------------


def reconciler_bench(phase: Phase = Phase.STARTING, **template: object) -> core.Bench:
    spec = (Artifact(source="http://files/a", sha256="0" * 64),)
    return core.Bench(phase, kind="service", made=core.template(artifacts=spec, **template))


def progress_of(prepared: PreparedInputs | None = None, failed: str = "") -> PreparationProgress:
    progress = PreparationProgress()
    progress.inputs, progress.failure = prepared, failed
    return progress


def test_replica_with_inputs_is_prepared_before_start() -> None:
    bench = reconciler_bench()
    (action,) = bench.actions()
    assert isinstance(action, PrepareAction)
    bench.reconciler.preparations[core.COPY] = PreparationProgress()
    assert bench.actions() == [], "the preparation is running"
    bench.reconciler.preparations[core.COPY] = progress_of(NO_INPUTS)
    (action,) = bench.actions()
    assert isinstance(action, StartAction)


def test_preparation_waits_for_committed_start_and_lease() -> None:
    bench = reconciler_bench(Phase.BOUND)
    assert bench.only_report() == ("start", "")
    assert reconciler_bench().actions(holds_lease=False) == []


def test_failed_preparation_ends_attempt_with_reason() -> None:
    bench = reconciler_bench()
    bench.reconciler.preparations[core.COPY] = progress_of(failed="it was not fetched; check the source")
    assert bench.only_report() == ("crash", "not started")
    (report,) = bench.actions()
    assert isinstance(report, ReportAction)
    assert report.move.reason == "it was not fetched; check the source"


def test_restart_by_another_agent_prepares_again() -> None:
    bench = reconciler_bench(Phase.RUNNING)
    bench.ended(code=1)
    (action,) = bench.actions(core.NOW_MS + 10_000)
    assert isinstance(action, PrepareAction)
    bench.reconciler.preparations[core.COPY] = progress_of(NO_INPUTS)
    (action,) = bench.actions(core.NOW_MS + 10_000)
    assert isinstance(action, StartAction)
    assert action.restarts == 1


@pytest.mark.parametrize(
    ("phase", "expected"),
    [(Phase.STARTING, True), (Phase.RUNNING, True), (Phase.UNKNOWN, True), (Phase.DRAINING, False), (Phase.STOPPING, False)],
)
def test_preparation_stops_when_replica_drains(phase: Phase, expected: bool) -> None:
    bench = reconciler_bench(phase)
    assert bench.reconciler.should_run(bench.orders, core.COPY) is expected


def test_replica_without_inputs_starts_at_once() -> None:
    bench = core.Bench(Phase.STARTING, kind="service")
    (action,) = bench.actions()
    assert isinstance(action, StartAction)
    assert bench.reconciler.preparations == {}


def test_replica_with_full_scratch_is_not_restarted_in_same_attempt() -> None:
    bench = reconciler_bench(Phase.RUNNING)
    bench.ended(code=None, signal=15, why="scratch full")
    assert bench.only_report(core.NOW_MS + 10_000) == ("crash", "scratch full")
