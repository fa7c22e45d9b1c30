"""Suggested fixes for unknown fields, incl. other systems' spellings.

Tables of names and texts. type_checks.py and reader.py report the problems.
"""

from __future__ import annotations

from typing import Final

from msgspec import inspect

from remit.model.problems import Path, Problems, did_you_mean

ALIASES = {
    "namespace": "tenant",
    "project": "tenant",
    "ownerReferences": "owners",
    "resourceVersion": "revision",
    "priorityClassName": "priorityClass",
    "priority": "priorityClass",
    "topologySpreadConstraints": "topologySpread",
    "podAntiAffinity": "antiAffinity",
    "podAffinity": "affinity",
    "nodeAffinity": "expressions",
    "constraints": "expressions",
    "args": "command",
    "cmd": "command",
    "entrypoint": "command",
    "workingDir": "workingDirectory",
    "cwd": "workingDirectory",
    "environment": "env",
    "requests": "resources",
    "gpus": "devices",
    "gpu": "devices",
    "terminationGracePeriodSeconds": "stopGrace",
    "killTimeout": "stopGrace",
    "parallelism": "replicas",
    "instances": "replicas",
    "backoffLimit": "retries",
    "activeDeadlineSeconds": "timeout",
    "cron": "schedule",
    "minCount": "min",
    "minMember": "min",
    "strategy": "rollout",
    "update": "rollout",
    "updateStrategy": "rollout",
    "progressDeadlineSeconds": "progressDeadline",
    "periodSeconds": "period",
    "interval": "period",
    "timeoutSeconds": "timeout",
    "failureThreshold": "failures",
    "httpGet": "http",
    "tcpSocket": "tcp",
    "containerPort": "port",
    "hostPort": "port",
    "nominalQuota": "quota",
    "hard": "quota",
    "limits": "quota",
    "allocatable": "capacity",
    "datacenters": "regions",
    "datacenter": "region",
    "cordoned": "unschedulable",
    "preemptionPolicy": "preempts",
    "stringData": "data",
    "minReplicas": "min",
    "maxReplicas": "max",
    "duration": "ttl",
}
"""Field names of other systems, and the corresponding field of Remit."""

EXPLANATIONS = {
    "image": "Remit starts commands, not images: write command, and artifacts for the files it needs",
    "containers": "a replica is one command: write command, env, ports and resources directly under template",
    "spec": "leave this level out: write its fields one level higher",
    "metadata": "remove it: a replica has the labels of its workload",
    "restartPolicy": "remove it: services are restarted, and jobs are retried up to retries times",
    "selector": "remove it: a workload owns the replicas it creates",
    "nodeName": "use placement.nodeSelector, and let the scheduler choose",
    "readinessProbe": "write it as probes.ready",
    "livenessProbe": "write it as probes.live",
    "startupProbe": "write it as probes.start",
    "initialDelaySeconds": "use probes.start to wait for a slow start",
    "securityContext": "write user, and sandbox if it should not be the default",
    "volumes": "write it under template, each volume with its path",
    "volumeMounts": "write path in the volume itself: one replica is one command",
    "emptyDir": "write scratch: {}",
    "hostPath": "write host: {path: /srv/data, readOnly: true}",
    "envFrom": "use secrets or configs without a path",
    "tolerationSeconds": "remove it: a toleration has no time limit here",
    "matchLabels": "write the labels directly under labelSelector",
    "matchExpressions": "write the labels directly under labelSelector",
    "namespaceSelector": "remove it: only replicas of the same tenant are matched",
    "creationTimestamp": "remove it: Remit does not read it",
}
"""Fixes for fields of other systems that have no single counterpart."""

FOREIGN_KINDS = {
    "Deployment": "write kind: Workload with spec.type: service",
    "StatefulSet": "write kind: Workload with spec.type: service and replace: fenced",
    "ReplicaSet": "write kind: Workload with spec.type: service",
    "Pod": "write kind: Workload with spec.type: job or service",
    "Service": "write kind: Workload with spec.type: service; its ports are published by name",
    "Job": "write kind: Workload with spec.type: job",
    "CronJob": "write kind: Workload with spec.type: job and a schedule",
    "DaemonSet": "write kind: Workload with spec.type: daemon",
    "PodDisruptionBudget": "write spec.disruption.minAvailable in the Workload",
    "PodGroup": "write spec.gang.min in the Workload",
    "Namespace": "write kind: Tenant",
    "ResourceQuota": "write kind: Tenant with spec.quota",
    "ClusterQueue": "write kind: Tenant with spec.quota",
    "ConfigMap": "write kind: Config",
    "List": "write each item as a document of its own, with --- between them",
}
"""Kinds of other systems, and what to write instead."""

FOREIGN_KINDS_JSON = {"List": "write each item as an object of its own, all in one array or one after another"}
"""Fixes that differ in JSON files."""


class FieldIndex:
    """All fields of one kind, by name, with the paths at which they are allowed."""

    def __init__(self, root: inspect.Type) -> None:
        self._paths: dict[str, list[str]] = {}
        queue: list[tuple[inspect.Type, str]] = [(root, "")]
        for type_, path in queue:  # the list grows while it is iterated: breadth-first
            if isinstance(type_, inspect.Metadata):
                queue.append((type_.type, path))
            elif isinstance(type_, inspect.UnionType):
                queue += [(part, path) for part in type_.types]
            elif isinstance(type_, inspect.VarTupleType):
                queue.append((type_.item_type, path + "[]"))
            elif isinstance(type_, inspect.StructType):
                for field in type_.fields:
                    below = f"{path}.{field.encode_name}" if path else field.encode_name
                    self._paths.setdefault(field.encode_name, []).append(below)
                    queue.append((field.type, below))

    def unique_path(self, name: str) -> str:
        """Returns the only path at which the field is allowed; "" if there are none or several."""
        paths = self._paths.get(name, [])
        return paths[0] if len(paths) == 1 else ""


SET_BY_REMIT: Final[dict[Path, str]] = {(): "status", ("metadata",): "deleting"}
"""By path: the field that a manifest must not have, so that it is never suggested instead of an unknown field."""


def suggest_field_fix(name: str, known: list[str], fields: FieldIndex | None, problems: Problems) -> str:
    """Returns a fix for the unknown field `name`, where only `known` fields are allowed."""
    alias = ALIASES.get(name, "")
    if alias in known:
        return did_you_mean(alias)
    if ":" in name and not problems.as_json:
        return 'put a space after ":"'
    if name in EXPLANATIONS:
        return EXPLANATIONS[name]
    if name != name.strip():
        return "replace the special whitespace around it with plain spaces"
    close = problems.suggest(name, known)
    if close:
        return did_you_mean(close)
    if fields:
        path = fields.unique_path(name) or fields.unique_path(alias)
        if path:
            return did_you_mean(path)
    return f"known fields: {', '.join(sorted(known)[:12])}{', …' if len(known) > 12 else ''}"
