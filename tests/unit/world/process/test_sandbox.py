"""Which words does bubblewrap get? What they do is tried in tests/integration/world."""

from __future__ import annotations

from pathlib import Path

from remit.world.interfaces import BindMount, ProcessSpec
from remit.world.process.isolation import bubblewrap_args

ALWAYS = (
    *("/usr/bin/bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
    *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"),
)


def words(order: ProcessSpec) -> tuple[str, ...]:
    return bubblewrap_args(order, "/usr/bin/bwrap")


def test_the_program_comes_last_and_its_words_are_not_bubblewraps() -> None:
    assert words(ProcessSpec(("sh", "--bind", "x"))) == (*ALWAYS, "--", "sh", "--bind", "x")


def test_it_ends_with_its_parent_only_if_ordered() -> None:
    assert words(ProcessSpec(("a",), with_parent=True)) == (*ALWAYS, "--die-with-parent", "--", "a")


def test_outer_places_come_before_inner_ones_which_they_would_cover() -> None:
    found = words(ProcessSpec(("a",), writable=(Path("/srv/x/y"), Path("/srv/x"))))
    assert found == (*ALWAYS, "--bind", "/srv/x", "/srv/x", "--bind", "/srv/x/y", "/srv/x/y", "--", "a")


def test_a_directory_that_the_sandbox_covers_stays_covered() -> None:
    """Work names where it begins: /dev/shm has the secrets of others, and /tmp whatever is there."""
    seen = ProcessSpec(("a",), directory=Path("/srv/x"))
    assert words(seen) == (*ALWAYS, "--chdir", "/srv/x", "--", "a")
    for place in ("/tmp/x/y", "/dev/shm/x", "/proc/1"):
        covered = ProcessSpec(("a",), directory=Path(place))
        assert words(covered) == (*ALWAYS, "--chdir", place, "--", "a")
    covered = ProcessSpec(("a",), directory=Path("/tmp/x/y"))
    writable = covered._replace(writable=(Path("/tmp/x"),))
    assert words(writable) == (*ALWAYS, "--bind", "/tmp/x", "/tmp/x", "--chdir", "/tmp/x/y", "--", "a")


def test_a_root_of_its_own_is_shown_part_by_part__and_its_places_beside_it(tmp_path: Path) -> None:
    for name in ("usr", "etc", "tmp", "proc"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "pipe").symlink_to("/etc/shadow")
    room = Path("/srv/room")
    mounts = (BindMount(Path("/srv/data"), Path("/work/data")), BindMount(room, Path("/work"), writable=True))
    order = ProcessSpec(("sh",), directory=Path("/work"), writable=(room,), root=tmp_path, mounts=mounts, sandbox="bwrap")
    found = words(order)
    assert found[1:13] == (
        *("--symlink", "usr/bin", "/bin", "--ro-bind", str(tmp_path / "etc"), "/etc"),
        *("--symlink", "/etc/shadow", "/pipe", "--ro-bind", str(tmp_path / "usr"), "/usr"),
    )
    assert found[13:19] == ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp")
    assert found[23:] == (
        *("--bind", "/srv/room", "/work", "--ro-bind", "/srv/data", "/work/data"),
        *("--remount-ro", "/", "--chdir", "/work", "--", "sh"),
    )
    assert "/" not in found[:13], "nothing of the machine is seen but what is named"


def test_a_mount_without_a_root_is_shown_where_it_was_asked_for_and_read_only_unless_said() -> None:
    room = Path("/srv/room")
    mounts = (BindMount(Path("/lent"), room / "shared"), BindMount(Path("/other"), room / "own", writable=True))
    found = words(ProcessSpec(("a",), writable=(room,), mounts=mounts, sandbox="bwrap"))
    assert found[len(ALWAYS) :] == (
        *("--bind", "/srv/room", "/srv/room", "--bind", "/other", "/srv/room/own"),
        *("--ro-bind", "/lent", "/srv/room/shared", "--", "a"),
    )


def test_of_what_is_hidden_only_its_own_is_shown(tmp_path: Path) -> None:
    room = tmp_path / "work" / "own"
    found = words(ProcessSpec(("a",), writable=(room,), hidden=(tmp_path, tmp_path / "not-there"), sandbox="bwrap"))
    assert found[len(ALWAYS) :] == (
        *("--tmpfs", str(tmp_path), "--bind", str(room), str(room)),
        *("--remount-ro", str(tmp_path), "--", "a"),
    )


def test_what_another_user_cannot_reach_is_not_covered_for_it__it_could_not_be(tmp_path: Path) -> None:
    """Else no work would start in a sandbox whose agent keeps its directory in root's home."""
    closed, open_ = tmp_path / "home" / "agent", Path("/usr/share")
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    order = ProcessSpec(("a",), hidden=(closed, open_), sandbox="bwrap", user="nobody")
    mine, theirs = bubblewrap_args(order, "/usr/bin/bwrap"), bubblewrap_args(order, "/usr/bin/bwrap", other=True)
    assert str(closed) in mine and str(open_) in mine
    assert str(closed) not in theirs and str(open_) in theirs
