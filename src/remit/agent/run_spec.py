"""Builds the process order (command, environment, limits, sandbox, devices) from a replica's template.

From its workload's template to an order; nothing is started here.

The command is an argument list and stays one. `$(NAME)` in it stands for a variable of the environment, `$$(NAME)` for those
letters themselves; what no variable is named after stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from remit.agent.attempts import Copy
from remit.model.kinds import Template
from remit.model.records import GenerationSpec, Replica
from remit.world.interfaces import Limits, Mounted, Order
from remit.world.process.isolation import EACH, user_of_tenant

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIDS_MAX: Final = 4_096
HOME: Final = Path("/work")
"""Where work with a root of its own finds its directory."""
RESERVED: Final = "REMIT_"
"""Variables of these names are the agent's to set."""

_GPU: Final = re.compile(r"gpu-[0-9]{1,4}")
_NAMED: Final = re.compile(r"\$(\$?)\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class Place(NamedTuple):
    """Where an agent keeps what belongs to work: `logs` and `work` are directories of its own."""

    node: str
    scope: str
    logs: Path
    work: Path
    sandbox: bool
    """Is a sandbox to be had? What says `default` gets one then."""
    path: str = PATH
    hidden: tuple[Path, ...] = ()
    """Of which a sandbox shows nothing but the copy's own."""
    user: str = ""
    """As whom work runs that names nobody (world/process/isolation.py); empty: as the agent does."""

    def stdout(self, copy: Copy) -> Path:
        return self.logs / f"{copy.file_name}.out"

    def stderr(self, copy: Copy) -> Path:
        return self.logs / f"{copy.file_name}.err"

    def directory(self, copy: Copy) -> Path:
        return self.work / copy.file_name


def fence_ms(generation: GenerationSpec) -> int:
    """How long it may run without a renewal; 0: for ever."""
    return int(generation.spec.fence) if generation.spec.never_twice else 0


def needs_preparing(template: Template) -> bool:
    """Must anything be there before it starts? What asks for nothing pays nothing."""
    return bool(template.artifacts or template.volumes or template.rootfs or reads(template))


def reads(template: Template) -> bool:
    """Has it secrets or configs?"""
    return bool(template.secrets or template.configs)


def is_sandboxed(template: Template, place: Place) -> bool:
    wants = template.sandbox == "bwrap" or template.rootfs is not None
    return wants or (template.sandbox == "default" and place.sandbox)


def user_of(template: Template, place: Place, tenant: str) -> str:
    """As whom it runs. Only what says so itself, which admission permits, runs as somebody else than the node's own choice."""
    return template.user or (user_of_tenant(tenant) if place.user == EACH else place.user)


class Prepared(NamedTuple):
    """What an order has to say of what was prepared for it (preparing.py): variables, what is mounted where, and its root.
    `hidden`: variables that are secret: no word of the command stands for them, since whoever lists processes would see it.
    """

    env: Mapping[str, str] = {}
    mounts: tuple[Mounted, ...] = ()
    root: Path | None = None
    hidden: Mapping[str, str] = {}

    def joined(self, other: Prepared) -> Prepared:
        hidden = {**self.hidden, **other.hidden} if other.hidden else self.hidden
        return Prepared({**self.env, **other.env}, (*self.mounts, *other.mounts), other.root or self.root, hidden)


NOTHING: Final = Prepared()


def order_for(
    place: Place,
    copy: Copy,
    replica: Replica,
    generation: GenerationSpec,
    ports: Mapping[str, int],
    prepared: Prepared = NOTHING,
) -> Order:
    template = generation.spec.template
    directory = place.directory(copy)
    home = directory if prepared.root is None else HOME
    env = {**prepared.env, **_environment(place, copy, replica, generation, ports, home)}
    return Order(
        argv=tuple(expanded(word, env) for word in template.command),
        env={**prepared.hidden, **env} if prepared.hidden else env,
        directory=home / template.working_directory,
        user=user_of(template, place, replica.metadata.tenant),
        stdout=place.stdout(copy),
        stderr=place.stderr(copy),
        limits=_limits(template),
        group=copy.file_name,
        sandbox="bwrap" if is_sandboxed(template, place) else "none",
        writable=(directory,),
        root=prepared.root,
        mounts=prepared.mounts if prepared.root is None else (Mounted(directory, HOME, writable=True), *prepared.mounts),
        with_parent=fence_ms(generation) > 0,
        hidden=place.hidden,
    )


def expanded(word: str, env: Mapping[str, str]) -> str:
    def stands_for(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        return env.get(match[2], match[0])

    return _NAMED.sub(stands_for, word)


def _environment(
    place: Place, copy: Copy, replica: Replica, generation: GenerationSpec, ports: Mapping[str, int], directory: Path
) -> dict[str, str]:
    own = {
        "REMIT_NODE": place.node,
        "REMIT_SCOPE": place.scope,
        "REMIT_REPLICA": copy.key,
        "REMIT_UID": copy.uid,
        "REMIT_ATTEMPT": str(copy.attempt),
        "REMIT_TOKEN": copy.token,
        "REMIT_TENANT": replica.metadata.tenant,
        "REMIT_WORKLOAD": replica.spec.workload,
        "REMIT_INDEX": str(replica.spec.index),
        "REMIT_FENCE_MS": str(fence_ms(generation)),
    }
    announced = {f"PORT_{name}": str(port) for name, port in ports.items()}
    announced |= _devices(replica)
    asked = {name: text for name, text in generation.spec.template.env.items() if not name.startswith(RESERVED)}
    return {"PATH": place.path, "HOME": str(directory), **announced, **asked, **own}


def _devices(replica: Replica) -> dict[str, str]:
    """Which devices of its node are its own; and those of them that have a number, in the word that GPU libraries read."""
    names = sorted(replica.status.devices)
    numbers = [name.removeprefix("gpu-") for name in names if _GPU.fullmatch(name)]
    told = {"REMIT_DEVICES": ",".join(names)} if names else {}
    return {**told, "CUDA_VISIBLE_DEVICES": ",".join(numbers)} if numbers else told


def _limits(template: Template) -> Limits:
    wanted = dict(template.resources.pairs)
    return Limits(memory_bytes=wanted.get("memory", 0), cpu_milli=wanted.get("cpu", 0), pids=PIDS_MAX)
