"""Arguments for bubblewrap. Their effect is tested in tests/integration/world."""

from __future__ import annotations

from pathlib import Path

from remit.world.interfaces import BindMount, ProcessSpec
from remit.world.process.isolation import bubblewrap_args

ALWAYS = (
    *("/usr/bin/bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
    *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"),
)


def arguments(order: ProcessSpec) -> tuple[str, ...]:
    return bubblewrap_args(order, "/usr/bin/bwrap")


def test_program_comes_last_after_separator() -> None:
    assert arguments(ProcessSpec(("sh", "--bind", "x"))) == (*ALWAYS, "--", "sh", "--bind", "x")


def test_die_with_parent_only_if_requested() -> None:
    assert arguments(ProcessSpec(("a",), with_parent=True)) == (*ALWAYS, "--die-with-parent", "--", "a")


def test_outer_mounts_precede_inner_ones() -> None:
    found = arguments(ProcessSpec(("a",), writable=(Path("/srv/x/y"), Path("/srv/x"))))
    assert found == (*ALWAYS, "--bind", "/srv/x", "/srv/x", "--bind", "/srv/x/y", "/srv/x/y", "--", "a")


def test_working_directory_below_covered_path_stays_covered() -> None:
    """Work chooses its directory: /dev/shm has secrets of others, and /tmp whatever is there."""
    seen = ProcessSpec(("a",), directory=Path("/srv/x"))
    assert arguments(seen) == (*ALWAYS, "--chdir", "/srv/x", "--", "a")
    for place in ("/tmp/x/y", "/dev/shm/x", "/proc/1"):
        covered = ProcessSpec(("a",), directory=Path(place))
        assert arguments(covered) == (*ALWAYS, "--chdir", place, "--", "a")
    covered = ProcessSpec(("a",), directory=Path("/tmp/x/y"))
    writable = covered._replace(writable=(Path("/tmp/x"),))
    assert arguments(writable) == (*ALWAYS, "--bind", "/tmp/x", "/tmp/x", "--chdir", "/tmp/x/y", "--", "a")


def test_own_root_is_mounted_entry_by_entry_with_mounts_beside(tmp_path: Path) -> None:
    for name in ("usr", "etc", "tmp", "proc"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "pipe").symlink_to("/etc/shadow")
    work_dir = Path("/srv/room")
    mounts = (BindMount(Path("/srv/data"), Path("/work/data")), BindMount(work_dir, Path("/work"), writable=True))
    order = ProcessSpec(("sh",), directory=Path("/work"), writable=(work_dir,), root=tmp_path, mounts=mounts, sandbox="bwrap")
    found = arguments(order)
    assert found[1:13] == (
        *("--symlink", "usr/bin", "/bin", "--ro-bind", str(tmp_path / "etc"), "/etc"),
        *("--symlink", "/etc/shadow", "/pipe", "--ro-bind", str(tmp_path / "usr"), "/usr"),
    )
    assert found[13:19] == ("--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp")
    assert found[23:] == (
        *("--bind", "/srv/room", "/work", "--ro-bind", "/srv/data", "/work/data"),
        *("--remount-ro", "/", "--chdir", "/work", "--", "sh"),
    )
    assert "/" not in found[:13], "nothing else of the host is visible"


def test_mount_without_root_is_read_only_unless_writable() -> None:
    work_dir = Path("/srv/room")
    mounts = (BindMount(Path("/lent"), work_dir / "shared"), BindMount(Path("/other"), work_dir / "own", writable=True))
    found = arguments(ProcessSpec(("a",), writable=(work_dir,), mounts=mounts, sandbox="bwrap"))
    assert found[len(ALWAYS) :] == (
        *("--bind", "/srv/room", "/srv/room", "--bind", "/other", "/srv/room/own"),
        *("--ro-bind", "/lent", "/srv/room/shared", "--", "a"),
    )


def test_hidden_directory_shows_only_own_subdirectory(tmp_path: Path) -> None:
    work_dir = tmp_path / "work" / "own"
    found = arguments(ProcessSpec(("a",), writable=(work_dir,), hidden=(tmp_path, tmp_path / "not-there"), sandbox="bwrap"))
    assert found[len(ALWAYS) :] == (
        *("--tmpfs", str(tmp_path), "--bind", str(work_dir), str(work_dir)),
        *("--remount-ro", str(tmp_path), "--", "a"),
    )


def test_unreachable_hidden_directory_is_not_covered_for_other_users(tmp_path: Path) -> None:
    """Otherwise no sandboxed work would start below an agent whose directory is in root's home."""
    closed, open_ = tmp_path / "home" / "agent", Path("/usr/share")
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    order = ProcessSpec(("a",), hidden=(closed, open_), sandbox="bwrap", user="nobody")
    mine, theirs = bubblewrap_args(order, "/usr/bin/bwrap"), bubblewrap_args(order, "/usr/bin/bwrap", other=True)
    assert str(closed) in mine and str(open_) in mine
    assert str(closed) not in theirs and str(open_) in theirs
