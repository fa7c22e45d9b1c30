"""Is what work needs there whole before it starts, fetched once, kept within bounds, and gone with the work?"""

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
from tests.unit.agent import test_reconciler as core
from tests.unit.world.virtual_world import NoRunner, run_virtually, virtual_world

ROOT = Path("/d/cache")
REACH = FetchPermissions(directories=(Path("/srv"),), hosts=("files",))
KIB = 1 << 10


class Sandboxes(NoRunner):
    def isolation_support(self) -> IsolationSupport:
        return IsolationSupport("none", (), "", sandbox=True)


class Bench:
    """An agent's shelf in a world in memory; `depot` has what can be fetched."""

    def __init__(self, bytes_max: int = 100 * KIB) -> None:
        self.disk, self.depot = SimDisk(), ArtifactSources()
        self.mount = self.disk.mount(lambda: True)
        carrier = SimArtifactFetcher(self.disk, self.depot, lambda: True)
        self.world: World = replace(virtual_world(), disk=self.mount, artifacts=carrier)
        self.bytes_max = bytes_max
        self.told: list[str] = []
        self.mount.make_directory(ROOT / "files")
        self.mount.make_directory(ROOT / "trees")
        self.mount.make_directory(Path("/d/work"))
        self.fetches: list[str] = []
        fetch = carrier.fetch

        async def counted(source: str, to: Path, /, **more: object) -> int:
            self.fetches.append(source)
            return await fetch(source, to, **more)  # type: ignore[arg-type]

        carrier.fetch = counted  # type: ignore[method-assign]
        self.shelf = self.anew()

    def anew(self) -> ArtifactCache:
        return ArtifactCache(self.world, ROOT, REACH, self.bytes_max)

    def put(self, name: str, size: int = 30 * KIB, tenant: str = "t") -> ArtifactRef:
        content = (name.encode() * size)[:size]
        self.depot.files[f"http://files/{name}"] = content
        return ArtifactRef(tenant, f"http://files/{name}", hashlib.sha256(content).hexdigest())

    async def use(self, wanted: ArtifactRef) -> bytes:
        async with self.shelf.file(wanted, self.told.append) as path:
            return self.mount.read(path)

    def kept(self) -> list[str]:
        return list(self.mount.list(ROOT / "files"))


def play(scene: Callable[[Bench], Awaitable[None]], **more: int) -> None:
    async def around() -> None:
        await scene(Bench(**more))

    run_virtually(around())


# -- the shelf ---------------------------------------------------------------------------------------------------------------


def test_many_that_want_the_same_at_once_have_it_of_one_fetch() -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        found = await asyncio.gather(*(bench.use(wanted) for _ in range(8)))
        assert len(set(found)) == 1
        assert bench.fetches == [wanted.source]
        assert any("another replica" in one for one in bench.told)
        assert any(one.startswith("fetching 0.0 of 0.0 MiB of http://files/a") for one in bench.told)

    play(scene)


def test_when_the_one_that_fetches_is_cancelled_the_next_goes_on() -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        first = asyncio.create_task(bench.use(wanted))
        await asyncio.sleep(0.006)
        second = asyncio.create_task(bench.use(wanted))
        await asyncio.sleep(0.001)
        first.cancel()
        assert await second
        assert len(bench.fetches) == 2

    play(scene)


def test_a_tenant_does_not_find_what_another_fetched() -> None:
    async def scene(bench: Bench) -> None:
        mine = bench.put("a", tenant="t")
        await bench.use(mine)
        theirs = mine._replace(tenant="u", source="http://files/not-theirs")
        with pytest.raises(NotPrepared, match="was not fetched"):
            await bench.use(theirs)

    play(scene)


def test_what_was_used_longest_ago_makes_room__and_what_is_in_use_does_not() -> None:
    async def scene(bench: Bench) -> None:
        a, b, c, d, e = (bench.put(name) for name in "abcde")
        for one in (a, b, c, a):
            await bench.use(one)
        await bench.use(d)  # b goes
        assert sorted(bench.kept()) == sorted(one.name for one in (a, c, d))
        async with bench.shelf.file(c, bench.told.append):
            await bench.use(e)  # a goes: c is older, and in use
            assert sorted(bench.kept()) == sorted(one.name for one in (c, d, e))

    play(scene)


def test_what_cannot_fit_says_so_and_leaves_nothing() -> None:
    async def scene(bench: Bench) -> None:
        a, b = bench.put("a", 60 * KIB), bench.put("b", 60 * KIB)
        async with bench.shelf.file(a, bench.told.append):
            with pytest.raises(NotPrepared, match="do not fit in the artifact cache"):
                await bench.use(b)
        assert bench.kept() == [a.name]
        await bench.use(b)
        with pytest.raises(NotPrepared, match="has more than 0 MiB"):
            await bench.use(bench.put("huge", 200 * KIB))

    play(scene)


def test_the_shelf_outlives_its_agent__and_what_was_not_whole_is_swept() -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        await bench.use(wanted)
        bench.mount.write_atomically(ROOT / "files" / f"{wanted.name}.coming", b"half")
        bench.mount.write_atomically(ROOT / "files" / "stranger", b"whose?")
        bench.shelf = bench.anew()
        await bench.use(wanted)
        assert bench.fetches == [wanted.source]
        assert bench.kept() == [wanted.name]

    play(scene)


@pytest.mark.parametrize("index", [b"", b"{", b'{"files/x": 3}', b"[]"])
def test_an_index_that_cannot_be_read_only_costs_a_fetch(index: bytes) -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        await bench.use(wanted)
        bench.mount.write_atomically(ROOT / "index", index)
        bench.shelf = bench.anew()
        await bench.use(wanted)
        assert len(bench.fetches) == 2

    play(scene)


def test_what_was_changed_on_the_shelf_is_fetched_anew() -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        good = await bench.use(wanted)
        bench.mount.write_atomically(ROOT / "files" / wanted.name, b"evil")
        assert await bench.use(wanted) == good
        assert len(bench.fetches) == 2

    play(scene)


def test_what_cannot_be_reached_is_tried_again_with_pauses_and_then_given_up() -> None:
    async def scene(bench: Bench) -> None:
        wanted = bench.put("a")
        bench.depot.unavailable = True
        began_ms = bench.world.clock.now_ms()
        with pytest.raises(NotPrepared, match="cannot be reached"):
            await bench.use(wanted)
        assert len(bench.fetches) == 4
        assert 7_000 <= bench.world.clock.now_ms() - began_ms < 9_000
        assert any("retrying to fetch" in one for one in bench.told)
        bench.depot.unavailable = False
        assert await bench.use(wanted)

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
    lent = (Path("/srv/lent"),)
    own: list[PreparationStep] = [
        ArtifactStep(bench.world, bench.shelf),
        RootfsStep(bench.world, bench.shelf, lent),
        VolumeStep(bench.world, lent),
    ]
    preparer, making = Preparer(bench.world, [*steps, *own]), PreparationProgress()
    await preparer.prepare(place, COPY, replica, generation, making)
    if making.inputs is not None:  # it must make an order that a runner takes
        build_process_spec(place, COPY, replica, generation, {}, making.inputs)
    return making


def test_a_room_is_there_whole_with_all_that_belongs_in_it() -> None:
    async def scene(bench: Bench) -> None:
        app = artifact(bench, "http://files/app.tar", archive(bin__run=b"#!", conf=b"x"), unpack=True)
        model = artifact(bench, "http://files/model.bin", b"weights", path="data/model")
        named = artifact(bench, "http://files/a%20b.txt?v=1", b"text")
        making = await prepared(
            bench, artifacts=(app, model, named), volumes=(Volume(name="s", path="tmp", scratch=Scratch()),)
        )
        assert making.inputs == NO_INPUTS
        room = Path("/d/work/uid.1")
        assert bench.mount.list(room) == ("a b.txt", "bin", "conf", "data", "tmp")
        assert bench.mount.read(room / "data/model") == b"weights"
        assert bench.mount.list(Path("/d/work")) == ("uid.1",)

    play(scene)


def test_what_fails_leaves_no_room_and_says_why() -> None:
    async def scene(bench: Bench) -> None:
        good = artifact(bench, "http://files/good", b"x")
        bad = artifact(bench, "http://files/bad", b"y", unpack=True)
        making = await prepared(bench, artifacts=(good, bad))
        assert making.inputs is None
        assert making.failure.startswith("template.artifacts[1] cannot be placed: not a readable archive")
        assert "; create a tar" in making.failure
        assert bench.mount.list(Path("/d/work")) == ()

    play(scene)


def test_a_room_that_stands_is_left_as_the_work_made_it() -> None:
    async def scene(bench: Bench) -> None:
        asks = artifact(bench, "http://files/data", b"as it came", path="data")
        await prepared(bench, artifacts=(asks,))
        bench.mount.write_atomically(Path("/d/work/uid.1/data"), b"as the work made it")
        making = await prepared(bench, artifacts=(asks,))
        assert making.inputs == NO_INPUTS
        assert bench.mount.read(Path("/d/work/uid.1/data")) == b"as the work made it"

    play(scene)


def test_one_that_is_cancelled_is_prepared_anew_from_nothing() -> None:
    async def scene(bench: Bench) -> None:
        asks = (artifact(bench, "http://files/one", b"1"), artifact(bench, "http://files/two", b"2"))
        task = asyncio.create_task(prepared(bench, artifacts=asks))
        await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert bench.mount.list(Path("/d/work")) == ("uid.1.making",)
        assert (await prepared(bench, artifacts=asks)).inputs is not None
        assert bench.mount.list(Path("/d/work/uid.1")) == ("one", "two")

    play(scene)


def test_steps_join_what_they_say_of_the_order() -> None:
    class Says:
        def applies_to(self, template: Template, /) -> bool:
            return True

        async def prepare(self, subject: PreparationContext, room: Path, tell: OnProgress, /) -> PreparedInputs:
            return PreparedInputs(env={"A": "1"})

        def forget(self, copy: AttemptId, /) -> None:
            pass

        def retain_only(self, known: Collection[str], /) -> None:
            pass

    async def scene(bench: Bench) -> None:
        making = await prepared(bench, steps=[Says()], volumes=(Volume(name="s", path="tmp", scratch=Scratch()),))
        assert making.inputs == PreparedInputs(env={"A": "1"})

    play(scene)


# -- roots and volumes -------------------------------------------------------------------------------------------------------


def test_a_root_needs_bubblewrap_and_says_so() -> None:
    async def scene(bench: Bench) -> None:
        making = await prepared(bench, rootfs=Rootfs(directory="/srv/lent/root"))
        assert making.failure.startswith("template.rootfs needs bubblewrap, which this node does not have; install bubblewrap")

    play(scene)


def test_a_root_is_unpacked_once_and_stays_while_it_is_used() -> None:
    async def scene(bench: Bench) -> None:
        bench.world = replace(bench.world, runner=Sandboxes())
        bench.shelf = bench.anew()
        content = archive(usr__bin__sh=bytes(20 * KIB))
        root = artifact(bench, "http://files/root.tar", content)
        asks = Rootfs(source=root.source, sha256=root.sha256)
        for _ in range(2):
            making = await prepared(bench, sandbox=True, rootfs=asks)
            tree = ROOT / "trees" / f"{root.sha256}.t"
            assert making.inputs == PreparedInputs(root=tree), making.failure
            assert bench.mount.list(tree) == ("usr",)
        assert bench.fetches == [root.source]
        for name in "abc":
            await bench.use(bench.put(name))
        assert bench.mount.list(ROOT / "trees") == (f"{root.sha256}.t",), "it is pinned by the copy that has it"

    play(scene)


def test_a_directory_of_the_node_is_had_where_it_is_lent() -> None:
    async def scene(bench: Bench) -> None:
        bench.world = replace(bench.world, runner=Sandboxes())
        for path in ("/srv/lent/root", "/srv/lent/data", "/srv/other"):
            bench.mount.make_directory(Path(path))
        volumes = (
            Volume(name="a", path="/data", host=HostPath(path="/srv/lent/data")),
            Volume(name="b", path="/tmp/b", scratch=Scratch()),
            Volume(name="c", path="c", host=HostPath(path="/srv/lent/data", read_only=False)),
        )
        making = await prepared(bench, sandbox=True, rootfs=Rootfs(directory="/srv/lent/root"), volumes=volumes)
        assert making.inputs is not None
        assert making.inputs.root == Path("/srv/lent/root")
        assert making.inputs.mounts == (
            BindMount(Path("/srv/lent/data"), Path("/data"), writable=False),
            BindMount(Path("/d/work/uid.1/.volumes/b"), Path("/tmp/b"), writable=True),
            BindMount(Path("/srv/lent/data"), Path("/work/c"), writable=True),
        )
        for asks in (
            {"rootfs": Rootfs(directory="/srv/other")},
            {"volumes": (Volume(name="o", path="o", host=HostPath(path="/srv/other")),)},
        ):
            bench.mount.remove_tree(Path("/d/work/uid.1"))
            refused = await prepared(bench, sandbox=True, **asks)
            assert "/srv/other is not permitted on this node; start the agent with --host-path" in refused.failure

    play(scene)


def test_without_a_sandbox_nothing_holds_work_to_reading() -> None:
    async def scene(bench: Bench) -> None:
        bench.mount.make_directory(Path("/srv/lent"))
        making = await prepared(bench, volumes=(Volume(name="a", path="a", host=HostPath(path="/srv/lent")),))
        assert making.failure.startswith(
            "host path /srv/lent cannot be mounted read-only without a sandbox; set readOnly: false"
        )

    play(scene)


# -- when it is begun --------------------------------------------------------------------------------------------------------


def mind(phase: Phase = Phase.STARTING, **template: object) -> core.Bench:
    asks = (Artifact(source="http://files/a", sha256="0" * 64),)
    return core.Bench(phase, kind="service", made=core.template(artifacts=asks, **template))


def done(prepared: PreparedInputs | None = None, failed: str = "") -> PreparationProgress:
    making = PreparationProgress()
    making.inputs, making.failure = prepared, failed
    return making


def test_what_needs_something_is_prepared_first_and_started_only_then() -> None:
    bench = mind()
    (deed,) = bench.look()
    assert isinstance(deed, PrepareAction)
    bench.mind.preparations[core.COPY] = PreparationProgress()
    assert bench.look() == [], "it is under way"
    bench.mind.preparations[core.COPY] = done(NO_INPUTS)
    (deed,) = bench.look()
    assert isinstance(deed, StartAction)


def test_nothing_is_prepared_before_its_start_is_committed_nor_without_the_lease() -> None:
    bench = mind(Phase.BOUND)
    assert bench.says() == ("start", "")
    assert mind().look(may_act=False) == []


def test_what_cannot_be_prepared_ends_the_attempt_with_the_reason() -> None:
    bench = mind()
    bench.mind.preparations[core.COPY] = done(failed="it was not fetched; see whether it is there")
    assert bench.says() == ("crash", "not started")
    (said,) = bench.look()
    assert isinstance(said, ReportAction)
    assert said.move.reason == "it was not fetched; see whether it is there"


def test_what_is_started_again_by_another_agent_is_prepared_again() -> None:
    bench = mind(Phase.RUNNING)
    bench.ended(code=1)
    (deed,) = bench.look(core.NOW_MS + 10_000)
    assert isinstance(deed, PrepareAction)
    bench.mind.preparations[core.COPY] = done(NO_INPUTS)
    (deed,) = bench.look(core.NOW_MS + 10_000)
    assert isinstance(deed, StartAction)
    assert deed.restarts == 1


@pytest.mark.parametrize(
    ("phase", "wanted"),
    [(Phase.STARTING, True), (Phase.RUNNING, True), (Phase.UNKNOWN, True), (Phase.DRAINING, False), (Phase.STOPPING, False)],
)
def test_what_leaves_is_not_prepared_any_further(phase: Phase, wanted: bool) -> None:
    bench = mind(phase)
    assert bench.mind.should_run(bench.orders, core.COPY) is wanted


def test_work_that_asks_for_nothing_is_started_at_once() -> None:
    bench = core.Bench(Phase.STARTING, kind="service")
    (deed,) = bench.look()
    assert isinstance(deed, StartAction)
    assert bench.mind.preparations == {}


def test_what_filled_its_scratch_is_not_started_again_within_its_attempt() -> None:
    bench = mind(Phase.RUNNING)
    bench.ended(code=None, signal=15, why="scratch full")
    assert bench.says(core.NOW_MS + 10_000) == ("crash", "scratch full")
