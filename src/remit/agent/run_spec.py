"""Builds the process spec (command, environment, limits, sandbox, devices) from a replica's template.

Starts nothing. The command is an argument list and is never parsed by a shell. `$(NAME)` in an argument is replaced with
that environment variable, and `$$(NAME)` is an escaped `$(NAME)`. References to unknown variables are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from remit.agent.attempts import AttemptId
from remit.model.kinds import Template
from remit.model.records import GenerationSpec, Replica
from remit.world.interfaces import BindMount, Limits, ProcessSpec
from remit.world.process.isolation import USER_PER_TENANT, tenant_user

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIDS_MAX: Final = 4_096
ROOTFS_HOME: Final = Path("/work")
"""Where a process with its own root file system finds its working directory."""
RESERVED_PREFIX: Final = "REMIT_"
"""Prefix of variables that only the agent sets."""

_NUMBERED_GPU: Final = re.compile(r"gpu-[0-9]{1,4}")
_VARIABLE: Final = re.compile(r"\$(\$?)\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class NodeSettings(NamedTuple):
    """Settings of a hosted node that process specs are built from. `logs` and `work` are directories of the agent."""

    node: str
    scope: str
    logs: Path
    work: Path
    sandbox: bool
    """A sandbox is available. Workloads with `sandbox: default` get one then."""
    path: str = PATH
    hidden_paths: tuple[Path, ...] = ()
    """Paths that a sandbox hides, apart from the attempt's own directory."""
    user: str = ""
    """Default user for workloads that name none (world/process/isolation.py); empty: the agent's user."""

    def stdout(self, attempt: AttemptId) -> Path:
        return self.logs / f"{attempt.file_name}.out"

    def stderr(self, attempt: AttemptId) -> Path:
        return self.logs / f"{attempt.file_name}.err"

    def attempt_directory(self, attempt: AttemptId) -> Path:
        return self.work / attempt.file_name


def fence_ms(generation: GenerationSpec) -> int:
    """How long the process may run without a lease renewal; 0: without limit."""
    return int(generation.spec.fence) if generation.spec.is_fenced else 0


def needs_preparation(template: Template) -> bool:
    """Return whether inputs must be prepared before the start. Templates without any skip the preparation."""
    return bool(template.artifacts or template.volumes or template.rootfs or uses_secrets_or_configs(template))


def uses_secrets_or_configs(template: Template) -> bool:
    """Return whether the template uses secrets or configs."""
    return bool(template.secrets or template.configs)


def is_sandboxed(template: Template, settings: NodeSettings) -> bool:
    requested = template.sandbox == "bwrap" or template.rootfs is not None
    return requested or (template.sandbox == "default" and settings.sandbox)


def user_of(template: Template, settings: NodeSettings, tenant: str) -> str:
    """Return the user the process runs as. Only a template with an explicit user, which admission has to permit, overrides the
    node's default.
    """
    return template.user or (tenant_user(tenant) if settings.user == USER_PER_TENANT else settings.user)


class PreparedInputs(NamedTuple):
    """Result of the preparation (preparation/), as needed by the process spec: environment, mounts, root file system.

    `secret_env` are secret variables. They are not expanded in the command, because command lines are visible in process
    listings.
    """

    env: Mapping[str, str] = {}
    mounts: tuple[BindMount, ...] = ()
    root: Path | None = None
    secret_env: Mapping[str, str] = {}

    def merged_with(self, other: PreparedInputs) -> PreparedInputs:
        secret_env = {**self.secret_env, **other.secret_env} if other.secret_env else self.secret_env
        return PreparedInputs({**self.env, **other.env}, (*self.mounts, *other.mounts), other.root or self.root, secret_env)


NO_INPUTS: Final = PreparedInputs()


def build_process_spec(
    settings: NodeSettings,
    attempt: AttemptId,
    replica: Replica,
    generation: GenerationSpec,
    ports: Mapping[str, int],
    inputs: PreparedInputs = NO_INPUTS,
) -> ProcessSpec:
    template = generation.spec.template
    directory = settings.attempt_directory(attempt)
    home = directory if inputs.root is None else ROOTFS_HOME
    env = {**inputs.env, **_environment(settings, attempt, replica, generation, ports, home)}
    return ProcessSpec(
        argv=tuple(expand_variables(argument, env) for argument in template.command),
        env={**inputs.secret_env, **env} if inputs.secret_env else env,
        directory=home / template.working_directory,
        user=user_of(template, settings, replica.metadata.tenant),
        stdout=settings.stdout(attempt),
        stderr=settings.stderr(attempt),
        limits=_limits(template),
        group=attempt.file_name,
        sandbox="bwrap" if is_sandboxed(template, settings) else "none",
        writable=(directory,),
        root=inputs.root,
        mounts=inputs.mounts if inputs.root is None else (BindMount(directory, ROOTFS_HOME, writable=True), *inputs.mounts),
        with_parent=fence_ms(generation) > 0,
        hidden=settings.hidden_paths,
    )


def expand_variables(argument: str, env: Mapping[str, str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        return env.get(match[2], match[0])

    return _VARIABLE.sub(replacement, argument)


def _environment(
    settings: NodeSettings,
    attempt: AttemptId,
    replica: Replica,
    generation: GenerationSpec,
    ports: Mapping[str, int],
    directory: Path,
) -> dict[str, str]:
    reserved = {
        "REMIT_NODE": settings.node,
        "REMIT_SCOPE": settings.scope,
        "REMIT_REPLICA": attempt.key,
        "REMIT_UID": attempt.uid,
        "REMIT_ATTEMPT": str(attempt.number),
        "REMIT_TOKEN": attempt.token,
        "REMIT_TENANT": replica.metadata.tenant,
        "REMIT_WORKLOAD": replica.spec.workload,
        "REMIT_INDEX": str(replica.spec.index),
        "REMIT_FENCE_MS": str(fence_ms(generation)),
    }
    provided = {f"PORT_{name}": str(port) for name, port in ports.items()}
    provided |= _device_variables(replica)
    user_env = {name: text for name, text in generation.spec.template.env.items() if not name.startswith(RESERVED_PREFIX)}
    return {"PATH": settings.path, "HOME": str(directory), **provided, **user_env, **reserved}


def _device_variables(replica: Replica) -> dict[str, str]:
    """Return the variables that name the replica's devices. Numbered GPUs are also listed in the variable that CUDA reads."""
    names = sorted(replica.status.devices)
    numbers = [name.removeprefix("gpu-") for name in names if _NUMBERED_GPU.fullmatch(name)]
    variables = {"REMIT_DEVICES": ",".join(names)} if names else {}
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(numbers)} if numbers else variables


def _limits(template: Template) -> Limits:
    requested = dict(template.resources.pairs)
    return Limits(memory_bytes=requested.get("memory", 0), cpu_milli=requested.get("cpu", 0), pids=PIDS_MAX)
