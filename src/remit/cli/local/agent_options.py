"""Node options and host permissions of an agent; `remit up` passes the permissions on to its agent.

Node specs are built from the options and the hardware inventory of this machine. No server is called here.
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
    """Node options of the command line. Empty options are replaced by the inventory of the machine."""

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

    def base_name(self, inventory: HostInventory) -> str:
        """Return the given name, or else the host name with characters replaced that node names may not contain."""
        return self.name or _INVALID_IN_NAME.sub("-", inventory.hostname.lower()).strip("-")[:50].rstrip("-") or "node"

    def names(self, inventory: HostInventory) -> list[str]:
        name = self.base_name(inventory)
        return [name] if self.nodes == 1 else [f"{name}-{n}" for n in range(1, self.nodes + 1)]


def build_nodes(declared: NodeOptions, inventory: HostInventory, port: int) -> list[Node]:
    """Build the declared nodes and validate them like manifests. Raises a click error that names the option and the fix."""
    from remit.model.manifests.validation import validate

    nodes = [_node(declared, inventory, name, index, port) for index, name in enumerate(declared.names(inventory))]
    for node in nodes:
        for problem in validate(node):
            raise click.UsageError(escaped(str(problem)))
    return nodes


def _node(declared: NodeOptions, inventory: HostInventory, name: str, index: int, port: int) -> Node:
    from remit.model.kinds import Node, NodeSpec
    from remit.model.metadata import Metadata
    from remit.model.resources import Amount

    region = declared.regions[index % len(declared.regions)]
    region_round = index // len(declared.regions)
    zone = declared.zones[region_round % len(declared.zones)] if declared.zones else f"{region}-a"
    try:
        capacity = Amount.parse(
            {
                "cpu": declared.cpu or f"{inventory.cpu_milli}m",
                "memory": declared.memory or inventory.memory_bytes,
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
        devices=_devices(declared, inventory, index),
        taints=tuple(_parse_taint(text) for text in declared.taints),
        address=declared.address,
        port=port,
    )
    return Node(metadata=Metadata(name=name, labels=labels), spec=spec)


def _devices(declared: NodeOptions, inventory: HostInventory, index: int) -> tuple[Device, ...]:
    """Return the devices of one node. Devices from the inventory exist once, so the nodes of a machine divide them."""
    from remit.model.kinds import Device

    if not declared.devices:
        own = inventory.gpus[index :: declared.nodes]
        return tuple(Device(name=gpu.name, kind="gpu", model=_model_label(gpu.model)) for gpu in own)
    devices: list[Device] = []
    for text in declared.devices:
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise click.BadParameter(
                f"{escaped(text)} is not KIND=COUNT[:MODEL]; write gpu=2, or gpu=2:A10", param_hint="--device"
            )
        kind, count, model = match[1], int(match[2]), match[3] or ""
        first = sum(one.kind == kind for one in devices)
        devices += [Device(name=f"{kind}-{n}", kind=kind, model=model) for n in range(first, first + count)]
    return tuple(devices)


def _model_label(text: str) -> str:
    """Convert a model name to a valid label value: vendors use spaces and brackets."""
    return _INVALID_IN_MODEL.sub("-", text).strip("-_.")[:MODEL_MAX].rstrip("-_.")


def _parse_label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{escaped(text)} is not a label; write KEY=VALUE", param_hint="--label")
    return key, value


def _parse_taint(text: str) -> Taint:
    from remit.model.kinds import Taint

    match = _TAINT.fullmatch(text)
    if match is None:
        fix = "write KEY:NoSchedule, or KEY=VALUE:NoExecute"
        raise click.BadParameter(f"{escaped(text)} is not a taint; {fix}", param_hint="--taint")
    return Taint(key=match[1], value=match[2] or "", effect=match[3])  # type: ignore[arg-type]  # validated with the node


def startup_line(
    nodes: Sequence[Node], isolation: IsolationSupport, *, sandbox: bool, user: str = "", servers: Sequence[str]
) -> str:
    """Format the registered nodes, and the limits and sandbox of their replicas, in one line."""
    first = nodes[0]
    label = f"node {first.metadata.name}" if len(nodes) == 1 else f"nodes {first.metadata.name} to {nodes[-1].metadata.name}"
    capacity = first.spec.capacity.to_manifest()
    amounts = ", ".join(f"{value} {name}" for name, value in capacity.items())
    devices = f", {len(first.spec.devices)} devices" if first.spec.devices else ""
    each = " each" if len(nodes) > 1 else ""
    limits = f"{_describe_limits(isolation)}; {_describe_sandbox(isolation, sandbox)}" + (
        f"; replicas run as {_describe_user(user)}" if user else ""
    )
    return f"agent: {label} ({amounts}{devices}{each}) at {', '.join(servers)}; {limits}"


def _describe_user(user: str) -> str:
    from remit.world.process.isolation import USER_PER_TENANT

    return "one user per tenant" if user == USER_PER_TENANT else user


def _describe_limits(isolation: IsolationSupport) -> str:
    limited = [name for name in ("cpu", "memory", "pids") if name in isolation.controllers]
    if not limited:
        return f"no resource limits ({isolation.reason}; run as root, or let systemd delegate cgroups)"
    missing = f" ({isolation.reason})" if isolation.reason else ""
    return f"cgroups {isolation.cgroups} limit {', '.join(limited)}{missing}"


def _describe_sandbox(isolation: IsolationSupport, sandbox: bool) -> str:
    if sandbox:
        return "sandbox: bubblewrap"
    return "no sandbox (--sandbox none)" if isolation.sandbox else "no sandbox (apt-get install bubblewrap)"


ARTIFACT_CACHE: Final = "10Gi"


class HostOptions(NamedTuple):
    """Host permissions as given on the command line."""

    artifact_dirs: tuple[Path, ...]
    artifact_allow: tuple[str, ...]
    host_paths: tuple[Path, ...]
    artifact_cache: str
    hidden: tuple[Path, ...] = ()
    user: str = ""

    def args(self) -> tuple[str, ...]:
        """Format them as arguments of `remit agent`."""
        args = [("--artifact-dir", str(value)) for value in self.artifact_dirs]
        args += [("--artifact-allow", value) for value in self.artifact_allow]
        args += [("--host-path", str(value)) for value in self.host_paths]
        args += [("--hide", str(value)) for value in self.hidden]
        args += [("--work-user", self.user)] if self.user else []
        return tuple(arg for pair in (*args, ("--artifact-cache", self.artifact_cache)) for arg in pair)

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
    """Add the host options to a command, which receives them as `permissions`."""
    existing_directory = click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True)

    new_directory = click.Path(path_type=Path, file_okay=False, resolve_path=True)

    @click.option(
        "--artifact-dir",
        "artifact_dirs",
        type=new_directory,
        multiple=True,
        help="Allow `file:` artifacts from this directory. It is created if missing. Repeatable.",
    )
    @click.option(
        "--artifact-allow",
        multiple=True,
        metavar="HOST|CIDR",
        help="Allow artifacts from this private host or network, if a policy permits it too. Repeatable.",
    )
    @click.option(
        "--host-path",
        "host_paths",
        type=existing_directory,
        multiple=True,
        help="Allow replicas to mount paths below this directory, if a policy permits it too. Repeatable.",
    )
    @click.option(
        "--artifact-cache", default=ARTIFACT_CACHE, show_default=True, metavar="SIZE", help="Size limit of the artifact cache."
    )
    @click.option(
        "--hide",
        "hidden",
        type=existing_directory,
        multiple=True,
        help="Hide this directory from sandboxed replicas. Repeatable.",
    )
    @click.option(
        "--work-user",
        "work_user",
        default="",
        metavar="USER",
        help="User for replicas whose manifest names none.  [default: one user per tenant if the agent is root]",
    )
    @functools.wraps(command)
    def wrapped(
        *, artifact_dirs: tuple[Path, ...], artifact_allow: tuple[str, ...], host_paths: tuple[Path, ...], artifact_cache: str,
        hidden: tuple[Path, ...], work_user: str, **options: Any,
    ) -> None:  # fmt: skip
        _check_artifact_options(artifact_allow, artifact_cache)
        _create_directories(artifact_dirs)
        command(
            permissions=HostOptions(artifact_dirs, artifact_allow, host_paths, artifact_cache, hidden, work_user), **options
        )

    return wrapped


def _create_directories(places: tuple[Path, ...]) -> None:
    """Create missing directories and print that, because a missing directory may be a typing error."""
    for directory in places:
        if directory.is_dir():
            continue
        try:
            directory.mkdir(0o755, parents=True)
        except OSError as error:
            message = f"{escaped(str(directory))} cannot be created ({error.strerror}); create it, or use another directory"
            raise click.BadParameter(message, param_hint="--artifact-dir") from error
        click.echo(f"remit: created artifact directory {escaped(str(directory))}", err=True)


def _check_artifact_options(allow: tuple[str, ...], cache: str) -> None:
    from remit.model.artifacts import is_host_or_network
    from remit.model.resources import parse_quantity

    for target in allow:
        if not is_host_or_network(target):
            message = f"{escaped(target)} is neither a lower-case host name nor a network such as 10.0.0.0/8"
            raise click.BadParameter(message, param_hint="--artifact-allow")
    try:
        parse_quantity("memory", cache)
    except ValueError as error:
        raise click.BadParameter(escaped(str(error)), param_hint="--artifact-cache") from error
