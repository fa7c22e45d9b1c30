"""Finds usable cgroup hierarchies.

Each mounted hierarchy is tried by creating a group and moving a child process into it. cgroups.py uses the result.
"""

from __future__ import annotations

import os
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
    places = parse_mounts(_text(_MOUNTS) if mounts is None else mounts)
    tries = [
        try_hierarchy(place, parent) for place in places if place.version == 2 or set(place.controllers) & set(CONTROLLERS)
    ]
    usable = [one.hierarchy for one in tries if one.hierarchy is not None]
    usable = [one for one in usable if one.controllers or one.supports_kill]
    if any(one.version == "v2" for one in usable):
        # cgroup v2 accounts CPU time in every group, so a separate v1 cpuacct directory for each start would add nothing.
        usable = [one for one in usable if one.version == "v2" or one.controllers != {"cpuacct"}]
    has = {name for one in usable for name in one.controllers}
    missing = [name for name in ("cpu", "memory", "pids") if name not in has]
    if not missing:
        return Cgroups(usable)
    whys = list(dict.fromkeys(one.reason for one in tries if one.reason))
    unavailable = "no mounted cgroup hierarchy controls it" if places else "no cgroups are mounted"
    told = "; ".join(whys) if whys else unavailable
    return Cgroups(usable, f"no limit on {', '.join(missing)}: {told}")


def parse_mounts(text: str) -> list[CgroupMount]:
    """Parse the cgroup mounts in the text of mountinfo."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        place = Path(fields[4].encode().decode("unicode_escape"))  # a space is written \040
        if kind[0] == "cgroup2":
            found.append(CgroupMount(2, place, ()))
        elif kind[0] == "cgroup":
            found.append(CgroupMount(1, place, tuple(name for name in CONTROLLERS if name in kind[2].split(","))))
    return found


def try_hierarchy(mount: CgroupMount, parent: str) -> HierarchyTrial:
    """Try the root of the hierarchy first, then each group on the way to our own: a service often has only a subtree."""
    whys = []
    for base in own_group_paths(mount):
        tried = _try_at(mount, base, base / parent)
        if tried.hierarchy is not None:
            return tried
        whys.append(tried.reason)
    return HierarchyTrial(None, whys[0])


def own_group_paths(mount: CgroupMount) -> list[Path]:
    """Return the cgroups this process is in, from the root of the hierarchy down."""
    found = [mount.path]
    for line in _text(_OWN).splitlines():
        _, names, path = line.split(":", 2)
        mine = names == "" if mount.version == 2 else bool(set(names.split(",")) & set(mount.controllers))
        if mine:
            for part in Path(path).parts[1:]:
                found.append(found[-1] / part)
    return [base for base in found if base.is_dir()]


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
    steps = [base, *reversed([place for place in (parent, *parent.parents) if base in place.parents])]
    for place in steps:
        for name in CONTROLLERS:
            with suppress(OSError):
                (place / "cgroup.subtree_control").write_text(f"+{name}")
    handed = (parent / "cgroup.subtree_control").read_text().split()
    return tuple(name for name in CONTROLLERS if name in handed)


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
