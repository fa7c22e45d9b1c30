"""Finds usable cgroup hierarchies.

Each mounted hierarchy is tried by creating a group and moving a child process into it. cgroups.py uses the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.process.cgroups import CONTROLLERS, PARENT, CgroupHierarchy, Cgroups, CgroupV1, CgroupV2

_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN: Final = Path("/proc/self/cgroup")


class CgroupMount(NamedTuple):
    """A mounted hierarchy with its v1 controllers; those of v2 are read from its files."""

    version: int
    path: Path
    controllers: tuple[str, ...]


class HierarchyTrial(NamedTuple):
    """Result of a trial: the hierarchy if it is usable, otherwise the reason."""

    hierarchy: CgroupHierarchy | None
    reason: str = ""


def find_cgroups(parent: str = PARENT, *, mounts: str | None = None) -> Cgroups:
    """Return all usable hierarchies, with our groups in the directory `parent` of each. Takes a few milliseconds: it forks."""
    mounts_found = parse_mounts(_text(_MOUNTS) if mounts is None else mounts)
    trials = [
        try_hierarchy(mount, parent)
        for mount in mounts_found
        if mount.version == 2 or set(mount.controllers) & set(CONTROLLERS)
    ]
    usable = _usable_hierarchies(trials)
    available = {name for hierarchy in usable for name in hierarchy.controllers}
    missing = [name for name in ("cpu", "memory", "pids") if name not in available]
    if not missing:
        return Cgroups(usable)
    reasons = list(dict.fromkeys(trial.reason for trial in trials if trial.reason))
    unavailable = "no mounted cgroup hierarchy controls it" if mounts_found else "no cgroups are mounted"
    reason = "; ".join(reasons) if reasons else unavailable
    return Cgroups(usable, f"no limit on {', '.join(missing)}: {reason}")


def _usable_hierarchies(trials: Sequence[HierarchyTrial]) -> list[CgroupHierarchy]:
    found = [trial.hierarchy for trial in trials if trial.hierarchy is not None]
    usable = [hierarchy for hierarchy in found if hierarchy.controllers or hierarchy.supports_kill]
    if any(hierarchy.version == "v2" for hierarchy in usable):
        # cgroup v2 accounts CPU time in every group, so a separate v1 cpuacct directory for each start would add nothing.
        usable = [hierarchy for hierarchy in usable if hierarchy.version == "v2" or hierarchy.controllers != {"cpuacct"}]
    return usable


def parse_mounts(text: str) -> list[CgroupMount]:
    """Parse the cgroup mounts in the text of mountinfo."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        path = Path(fields[4].encode().decode("unicode_escape"))  # a space is written \040
        if kind[0] == "cgroup2":
            mounts.append(CgroupMount(2, path, ()))
        elif kind[0] == "cgroup":
            mounts.append(CgroupMount(1, path, tuple(name for name in CONTROLLERS if name in kind[2].split(","))))
    return mounts


def try_hierarchy(mount: CgroupMount, parent: str) -> HierarchyTrial:
    """Try the root of the hierarchy first, then each group on the way to our own: a service often has only a subtree."""
    reasons = []
    for base in own_group_paths(mount):
        trial = _try_at(mount, base, base / parent)
        if trial.hierarchy is not None:
            return trial
        reasons.append(trial.reason)
    return HierarchyTrial(None, reasons[0])


def own_group_paths(mount: CgroupMount) -> list[Path]:
    """Return the cgroups this process is in, from the root of the hierarchy down."""
    paths = [mount.path]
    for line in _text(_OWN).splitlines():
        _, names, path = line.split(":", 2)
        is_member = names == "" if mount.version == 2 else bool(set(names.split(",")) & set(mount.controllers))
        if is_member:
            for part in Path(path).parts[1:]:
                paths.append(paths[-1] / part)
    return [base for base in paths if base.is_dir()]


def own_groups() -> list[tuple[CgroupMount, list[Path]]]:
    return [(mount, own_group_paths(mount)) for mount in parse_mounts(_text(_MOUNTS))]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _try_at(mount: CgroupMount, base: Path, parent: Path) -> HierarchyTrial:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        controllers = _enable_controllers(base, parent) if mount.version == 2 else mount.controllers
        kills = _try_join(parent / f".trial-{os.getpid()}")
    except OSError as error:
        return HierarchyTrial(None, f"{parent} cannot be used ({(error.strerror or str(error)).lower()})")
    return HierarchyTrial(
        CgroupV2(parent, controllers, supports_kill=kills) if mount.version == 2 else CgroupV1(parent, controllers)
    )


def _enable_controllers(base: Path, parent: Path) -> tuple[str, ...]:
    """Enable the controllers on the path to `parent` and return those that are available there (v2 enables them level by
    level).
    """
    directories = [base, *reversed([directory for directory in (parent, *parent.parents) if base in directory.parents])]
    for directory in directories:
        for name in CONTROLLERS:
            with suppress(OSError):
                (directory / "cgroup.subtree_control").write_text(f"+{name}")
    enabled = (parent / "cgroup.subtree_control").read_text().split()
    return tuple(name for name in CONTROLLERS if name in enabled)


def _try_join(trial: Path) -> bool:
    """Move a child process into a new group. Returns whether the group supports `cgroup.kill`."""
    trial.mkdir()
    try:
        child = os.fork()
        if not child:
            _join_and_exit(trial)
        _, status = os.waitpid(child, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise OSError(code, os.strerror(code))
        return (trial / "cgroup.kill").exists()
    finally:
        trial.rmdir()


def _join_and_exit(trial: Path) -> None:
    code = 255
    try:
        (trial / "cgroup.procs").write_text("0")
        code = 0
    except OSError as error:
        code = error.errno or code
    finally:
        os._exit(code)
