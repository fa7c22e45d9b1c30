"""Agent options: declared nodes, artifact and host-path permissions.

From what was said on the command line, and what was found; nothing is asked here.

The options of an agent for that, and the same words passed on by `remit up`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.agent.setup import HostPermissions
    from remit.model.kinds import Device, Node, Taint
    from remit.world.interfaces import HostInventory, IsolationSupport

_INVALID_IN_NAME: Final = re.compile(r"[^a-z0-9]+")
_INVALID_IN_MODEL: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_DEVICE: Final = re.compile(r"([^=:]+)=([0-9]{1,4})(?::(.*))?")
_TAINT: Final = re.compile(r"([^=:]+)(?:=([^:]*))?:([A-Za-z]+)")
MODEL_MAX: Final = 63


class NodeOptions(NamedTuple):
    """What was said of the nodes; what is empty is as found."""

    name: str = ""
    nodes: int = 1
    regions: tuple[str, ...] = ("local",)
    zones: tuple[str, ...] = ()
    pool: str = "default"
    labels: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    cpu: str = ""
    memory: str = ""
    devices: tuple[str, ...] = ()
    address: str = "127.0.0.1"

    def called(self, found: HostInventory) -> str:
        """A machine's name may have letters that no node's has; one that was given is taken as it is."""
        return self.name or _INVALID_IN_NAME.sub("-", found.hostname.lower()).strip("-")[:50].rstrip("-") or "node"

    def names(self, found: HostInventory) -> list[str]:
        name = self.called(found)
        return [name] if self.nodes == 1 else [f"{name}-{n}" for n in range(1, self.nodes + 1)]


def build_nodes(declared: NodeOptions, found: HostInventory, port: int) -> list[Node]:
    """All of them, judged as manifests are. Raises what click shows: the option, what is wrong with it, and the cure."""
    from remit.model.manifests.validation import validate

    nodes = [_node(declared, found, name, index, port) for index, name in enumerate(declared.names(found))]
    for node in nodes:
        for problem in validate(node):
            raise click.UsageError(escaped(str(problem)))
    return nodes


def _node(declared: NodeOptions, found: HostInventory, name: str, index: int, port: int) -> Node:
    from remit.model.kinds import Node, NodeSpec
    from remit.model.metadata import Metadata
    from remit.model.resources import Amount

    region = declared.regions[index % len(declared.regions)]
    turn = index // len(declared.regions)
    zone = declared.zones[turn % len(declared.zones)] if declared.zones else f"{region}-a"
    try:
        capacity = Amount.parse(
            {
                "cpu": declared.cpu or f"{found.cpu_milli}m",
                "memory": declared.memory or found.memory_bytes,
            }
        )
    except ValueError as error:
        raise click.UsageError(f"--cpu, --memory: {escaped(str(error))}") from error
    labels = dict(_parse_label(text) for text in declared.labels)
    spec = NodeSpec(
        region=region,
        zone=zone,
        capacity=capacity,
        pool=declared.pool,
        devices=_devices(declared, found, index),
        taints=tuple(_parse_taint(text) for text in declared.taints),
        address=declared.address,
        port=port,
    )
    return Node(metadata=Metadata(name=name, labels=labels), spec=spec)


def _devices(declared: NodeOptions, found: HostInventory, index: int) -> tuple[Device, ...]:
    """As said, for each node. Those that were found are there once, so nodes that share a machine share them out."""
    from remit.model.kinds import Device

    if not declared.devices:
        own = found.gpus[index :: declared.nodes]
        return tuple(Device(name=gpu.name, kind="gpu", model=_model_label(gpu.model)) for gpu in own)
    made: list[Device] = []
    for text in declared.devices:
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{escaped(text)} says no devices; write gpu=2, or gpu=2:A10", param_hint="--device")
        kind, count, model = match[1], int(match[2]), match[3] or ""
        first = sum(one.kind == kind for one in made)
        made += [Device(name=f"{kind}-{n}", kind=kind, model=model) for n in range(first, first + count)]
    return tuple(made)


def _model_label(text: str) -> str:
    """As a label value: a maker's name has blanks and brackets."""
    return _INVALID_IN_MODEL.sub("-", text).strip("-_.")[:MODEL_MAX].rstrip("-_.")


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{escaped(text)} is no label; write KEY=VALUE", param_hint="--label")
    return key, value


def _parse_taint(text: str) -> Taint:
    from remit.model.kinds import Taint

    match = _TAINT.fullmatch(text)
    if match is None:
        cure = "write KEY:NoSchedule, or KEY=VALUE:NoExecute"
        raise click.BadParameter(f"{escaped(text)} is no taint; {cure}", param_hint="--taint")
    return Taint(key=match[1], value=match[2] or "", effect=match[3])  # type: ignore[arg-type]  # judged with the node


def startup_line(
    nodes: Sequence[Node], confinement: IsolationSupport, *, sandbox: bool, user: str = "", servers: Sequence[str]
) -> str:
    """One line: what is registered, and how far its work is held back."""
    first = nodes[0]
    many = f"node {first.metadata.name}" if len(nodes) == 1 else f"nodes {first.metadata.name} to {nodes[-1].metadata.name}"
    has = first.spec.capacity.to_manifest()
    amounts = ", ".join(f"{value} {name}" for name, value in has.items())
    devices = f", {len(first.spec.devices)} devices" if first.spec.devices else ""
    each = " each" if len(nodes) > 1 else ""
    held = f"{_describe_limits(confinement)}; {_describe_sandbox(confinement, sandbox)}" + (
        f"; work runs as {_describe_user(user)}" if user else ""
    )
    return f"agent: {many} ({amounts}{devices}{each}) at {', '.join(servers)}; {held}"


def _describe_user(user: str) -> str:
    from remit.world.process.isolation import USER_PER_TENANT

    return "a user for each tenant" if user == USER_PER_TENANT else user


def _describe_limits(confinement: IsolationSupport) -> str:
    limited = [name for name in ("cpu", "memory", "pids") if name in confinement.controllers]
    if not limited:
        return f"no limits ({confinement.reason}; run it as root, or let systemd delegate cgroups)"
    missing = f" ({confinement.reason})" if confinement.reason else ""
    return f"cgroups {confinement.cgroups} limit {', '.join(limited)}{missing}"


def _describe_sandbox(confinement: IsolationSupport, sandbox: bool) -> str:
    if sandbox:
        return "work is sandboxed (bubblewrap)"
    return "no sandbox (as said)" if confinement.sandbox else "no sandbox (apt-get install bubblewrap)"


ARTIFACT_CACHE: Final = "10Gi"


class HostOptions(NamedTuple):
    """As it was said."""

    artifact_dirs: tuple[Path, ...]
    artifact_allow: tuple[str, ...]
    host_paths: tuple[Path, ...]
    artifact_cache: str
    hidden: tuple[Path, ...] = ()
    user: str = ""

    def words(self) -> tuple[str, ...]:
        """For `remit agent`."""
        said = [("--artifact-dir", str(one)) for one in self.artifact_dirs]
        said += [("--artifact-allow", one) for one in self.artifact_allow]
        said += [("--host-path", str(one)) for one in self.host_paths]
        said += [("--hide", str(one)) for one in self.hidden]
        said += [("--work-user", self.user)] if self.user else []
        return tuple(word for pair in (*said, ("--artifact-cache", self.artifact_cache)) for word in pair)

    def host_options(self) -> HostPermissions:
        from remit.agent.setup import HostPermissions
        from remit.model.resources import parse_quantity
        from remit.world.interfaces import NotStarted
        from remit.world.process.isolation import default_user

        try:
            user = default_user(self.user)
        except NotStarted as error:
            raise click.BadParameter(escaped(str(error)), param_hint="--work-user") from error
        cache = parse_quantity("memory", self.artifact_cache)
        return HostPermissions(self.artifact_dirs, self.artifact_allow, self.host_paths, cache, self.hidden, user)


def host_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds them to a command, which gets them together as `lending`."""
    place = click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True)

    made = click.Path(path_type=Path, file_okay=False, resolve_path=True)

    @click.option(
        "--artifact-dir",
        "artifact_dirs",
        type=made,
        multiple=True,
        help="Below it `file:` artifacts may be read. Made if it is not there.",
    )
    @click.option(
        "--artifact-allow",
        multiple=True,
        metavar="HOST|CIDR",
        help="Artifacts may be fetched from there, though it is not public; a policy has to permit it too.",
    )
    @click.option(
        "--host-path",
        "host_paths",
        type=place,
        multiple=True,
        help="Work may mount what is below it, where a policy permits it.",
    )
    @click.option(
        "--artifact-cache", default=ARTIFACT_CACHE, show_default=True, metavar="SIZE", help="How much is kept of artifacts."
    )
    @click.option("--hide", "hidden", type=place, multiple=True, help="Sandboxed work sees nothing of what is below it.")
    @click.option(
        "--work-user",
        "work_user",
        default="",
        metavar="USER",
        help="As whom work runs that names no user.  [default: a user of each tenant, if the agent is root]",
    )
    @functools.wraps(command)
    def taking(
        *, artifact_dirs: tuple[Path, ...], artifact_allow: tuple[str, ...], host_paths: tuple[Path, ...], artifact_cache: str,
        hidden: tuple[Path, ...], work_user: str, **others: Any,
    ) -> None:  # fmt: skip
        _check_artifact_options(artifact_allow, artifact_cache)
        _create_directories(artifact_dirs)
        command(permissions=HostOptions(artifact_dirs, artifact_allow, host_paths, artifact_cache, hidden, work_user), **others)

    return taking


def _create_directories(places: tuple[Path, ...]) -> None:
    """It is empty then, and that is said: it may have been meant to be another."""
    for place in places:
        if place.is_dir():
            continue
        try:
            place.mkdir(0o755, parents=True)
        except OSError as error:
            wrong = f"{escaped(str(place))} is not there, and could not be made ({error.strerror}); make it, or name another"
            raise click.BadParameter(wrong, param_hint="--artifact-dir") from error
        click.echo(f"remit: made {escaped(str(place))}, for artifacts", err=True)


def _check_artifact_options(allow: tuple[str, ...], cache: str) -> None:
    from remit.model.artifacts import is_host_or_network
    from remit.model.resources import parse_quantity

    for one in allow:
        if not is_host_or_network(one):
            wrong = f"{escaped(one)} is neither a host nor a network; write a name in lower case, or 10.0.0.0/8"
            raise click.BadParameter(wrong, param_hint="--artifact-allow")
    try:
        parse_quantity("memory", cache)
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--artifact-cache") from error
