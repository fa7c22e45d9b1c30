"""Rules between fields of one object.

Single values are checked in type_checks.py; checks against other objects are the authority's. Rules read the document tree
and skip values of the wrong type, which have already been reported, so that one error does not hide another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import PurePosixPath

from remit.model import objects
from remit.model.constraints import ConstraintViolation, FieldConstraint, NonZeroDuration, text_of
from remit.model.kinds import INSTANT
from remit.model.manifests.documents import DocumentNode
from remit.model.manifests.suggestions import ALIASES, SET_BY_REMIT
from remit.model.problems import Path, Problems, an, closest_name, did_you_mean, one_of, quoted

_VOLUMES_DIRECTORY = ".volumes"


def software_violations(template: DocumentNode | None, path: Path) -> Iterator[ConstraintViolation]:
    if template is None or template.type != "mapping":
        return
    root = template.get("rootfs")
    if root is not None and root.type == "mapping":
        yield from _rootfs_violations(template, root, (*path, "rootfs"))
    yield from _volume_violations(template, path, rooted=root is not None and root.type != "null")
    yield from _path_conflicts(template, path)


def _rootfs_violations(template: DocumentNode, root: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
    directory, source, digest = (text_of(root.get(name)) or "" for name in ("directory", "source", "sha256"))
    if bool(directory) == bool(source):
        message = "directory and source exclude each other" if directory else "has neither directory nor source"
        yield ConstraintViolation(
            root.position, path, message, "write directory: and a path on the nodes, or source: and sha256:"
        )
    elif source and not digest:
        yield ConstraintViolation(
            root.position, (*path, "sha256"), "is missing: a fetched archive is verified by it", "add the output of sha256sum"
        )
    elif directory and digest:
        yield ConstraintViolation(root.position, (*path, "sha256"), "a directory on the node has no digest", "remove it")
    sandbox = template.get("sandbox")
    if sandbox is not None and sandbox.scalar == "none":
        yield ConstraintViolation(
            sandbox.position, (*path[:-1], "sandbox"), "a rootfs needs a sandbox", "remove sandbox: none, or rootfs"
        )


def _volume_violations(template: DocumentNode, path: Path, *, rooted: bool) -> Iterator[ConstraintViolation]:
    volumes = template.get("volumes")
    for number, volume in enumerate(volumes.items if volumes is not None else ()):
        volume_path: Path = (*path, "volumes", number)
        if volume.type != "mapping":
            continue
        types = [name for name in ("scratch", "host") if name in volume.fields and volume.fields[name].value.type != "null"]
        if len(types) != 1:
            message = "scratch and host exclude each other" if types else "has neither scratch nor host"
            yield ConstraintViolation(volume.position, volume_path, message, "write scratch: {}, or host: {path: /srv/data}")
        mount_path = text_of(volume.get("path"))
        path_node = volume.get("path")
        if mount_path is None or path_node is None:
            continue
        if mount_path.startswith("/") and not rooted:
            cure = "write a path below the replica's directory, or add a rootfs"
            yield ConstraintViolation(
                path_node.position,
                (*volume_path, "path"),
                f"without a rootfs, {quoted(mount_path)} would be a directory of the node",
                cure,
            )
        if not PurePosixPath(mount_path).parts or PurePosixPath(mount_path).parts in (("/",), (_VOLUMES_DIRECTORY,)):
            yield ConstraintViolation(
                path_node.position,
                (*volume_path, "path"),
                f"{quoted(mount_path)} is already used by Remit",
                "write a path below it, such as data",
            )


def _path_conflicts(template: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
    """Reports two artifacts or volumes at the same path. Only archives may be unpacked into a shared directory."""
    seen: dict[tuple[str, ...], str] = {}
    for name in ("artifacts", "volumes"):
        listed = template.get(name)
        for number, item in enumerate(listed.items if listed is not None else ()):
            target, unpack = text_of(item.get("path")), item.get("unpack")
            if target is None or (unpack is not None and unpack.scalar is True):
                continue
            steps = PurePosixPath(target).parts
            if steps and steps in seen:
                item_path: Path = (*path, name, number, "path")
                yield ConstraintViolation(
                    item.position,
                    item_path,
                    f"{quoted(target)} is also the path of {seen[steps]}",
                    "give each a path of its own",
                )
            seen.setdefault(steps, f"{name}[{number}]")


_JOB_ONLY = ("completions", "retries", "timeout", "deadline", "schedule", "keep")
_UNSUPPORTED_FIELDS = {"job": ("rollout",), "service": _JOB_ONLY, "daemon": (*_JOB_ONLY, "gang", "replicas")}
_UNSUPPORTED_REASONS = {
    "replicas": "a daemon runs one replica on each matching node",
    "gang": "a daemon's replicas start node by node, not together",
    "rollout": "a job's replicas end by themselves and have no rollout",
}
_COUNT_FIELDS = ("gang", "disruption", "rollout")
_SOFTWARE_FIELDS = ("rootfs", "volumes", "artifacts")
_PORT = re.compile(r"(?<!\$)\$\(PORT_([^)$]{0,63})\)")
_FENCE = NonZeroDuration(
    "a replacement waits this long for the old attempt to end: with 0s both could run at once",
    "write a longer one, or replace: eager if two at once do no harm",
)
_WORKLOAD_LISTS = ("tenants", "workloads")
_PLACE_LISTS = ("regions", "zones", "pools", "nodes")
_ALL_LISTS = (*_WORKLOAD_LISTS, *_PLACE_LISTS)
_AUTOSCALER_LISTS = ("regions", "zones", "pools")
_EFFECT_SCOPES: dict[str, tuple[tuple[str, ...], ...]] = {
    "pause-expansion": (_WORKLOAD_LISTS,),
    "avoid": (_PLACE_LISTS,),
    "pin": (_WORKLOAD_LISTS, _PLACE_LISTS),
    "boost": (_WORKLOAD_LISTS,),
    "hold-repair": (_ALL_LISTS,),
    "freeze-autoscaler": (_AUTOSCALER_LISTS,),
    "lend-budget": (_WORKLOAD_LISTS,),
}
"""For each effect: groups of scope lists, of each of which at least one list is required. Other lists are rejected. An empty
scope never means everything.
"""
_SCOPE_DESCRIPTIONS = {
    _WORKLOAD_LISTS: "tenants or workloads",
    _PLACE_LISTS: "places",
    _AUTOSCALER_LISTS: "places",
    _ALL_LISTS: "workloads or places",
}
_FIELD_FIXES = {
    "by": "add by: and how much the priority is raised",
    "budget": "add budget: and the name of the budget to lend",
}
_TEXT_MAX = 4096
"""Longer texts have been reported by the type check and are not searched."""


class FieldRules:
    """The rules of one document. `check` reports every violation."""

    def __init__(self, problems: Problems, document: DocumentNode, kind: str, *, system: bool) -> None:
        self._problems = problems
        self._document = document
        self._kind = kind
        self._system = system

    def check(self) -> None:
        self._metadata()
        rule = _RULES_BY_KIND.get(self._kind)
        if rule is not None:
            rule(self)

    # ------------------------------------------------------------------------------------------------------- every kind

    def _metadata(self) -> None:
        metadata = self._document.get("metadata")
        if metadata is None or metadata.type != "mapping":
            return
        tenant = text_of(metadata.get("tenant"))
        if self._kind in objects.TENANTED and not tenant and (tenant == "" or "tenant" not in metadata.fields):
            first = itertools.islice(metadata.fields, 64)
            misspelt = any(ALIASES.get(key) == "tenant" or closest_name(key, ("tenant",)) for key in first if key != "tenant")
            if not misspelt:
                cure = "add `tenant: NAME`"
                self._add(metadata, ("metadata", "tenant"), f"is required for {an(self._kind)}", cure)
        if self._kind not in objects.TENANTED and "tenant" in metadata.fields:
            message = f"{an(self._kind)} does not belong to a tenant"
            self._problems.add(metadata.fields["tenant"].position, ("metadata", "tenant"), message, "remove it")
        if self._system:
            return
        for path, name in SET_BY_REMIT.items():
            node = metadata if path else self._document
            if name in node.fields:
                self._problems.add(node.fields[name].position, (*path, name), "is set by Remit", "remove it")

    # ----------------------------------------------------------------------------------------------------------- places

    def _node_pool(self) -> None:
        self._taints()
        low, high = self._number("spec", "min"), self._number("spec", "max")
        if low is not None and low > (high or 0):
            self._add_at(("spec", "min"), f"min {low} is more than max {high or 0}", "raise max, or lower min")

    def _taints(self) -> None:
        seen: dict[tuple[str | None, str | None], int] = {}
        for index, taint in enumerate(self._items("spec", "taints")):
            identity = (text_of(taint.get("key")), text_of(taint.get("effect")))
            if seen.setdefault(identity, index) != index:
                self._add(taint, ("spec", "taints", index), "another taint has the same key and effect", "keep one of the two")

    # ------------------------------------------------------------------------------------------------- tenants and rules

    def _token(self) -> None:
        role, tenant = self._text("spec", "role"), self._text("spec", "tenant")
        nodes = bool(self._items("spec", "nodes"))
        if role == "member" and not tenant:
            self._add_at(("spec", "role"), "a member token needs a tenant", "add tenant: and its name")
        if tenant and role not in ("member", "viewer", None):
            self._add_at(("spec", "tenant"), f"{an(str(role))} token has no tenant", "remove it, or use member or viewer")
        if role in ("agent", "join") and not nodes:
            self._add_at(("spec", "role"), "an agent or join token needs nodes", "add nodes: and their names")
        expires = self._text("spec", "expires")
        if expires and re.search(INSTANT, expires) and not _is_valid_instant(expires):
            self._add_at(
                ("spec", "expires"), f"{quoted(expires)} is not a valid date", "write one such as 2027-01-31T12:00:00Z"
            )
        if nodes and role not in ("agent", "join", None):
            self._add_at(("spec", "nodes"), f"{an(str(role))} token has no nodes", "remove them, or use agent or join")
        if self._text("spec", "spent") and role not in ("join", None):
            self._add_at(("spec", "spent"), f"{an(str(role))} token cannot be spent", "remove it")

    def _policy(self) -> None:
        for index, rule in enumerate(self._items("spec", "rules")):
            path: Path = ("spec", "rules", index)
            parts = (rule.get("allow"), rule.get("permit"), rule.get("defaults"))
            has_effect = any(node is not None and (node.type != "mapping" or bool(node.fields)) for node in parts)
            priority_class = rule.get("priorityClass")
            exec_ = rule.get("exec")
            has_effect = has_effect or (exec_ is not None and exec_.scalar is False)
            effective = (
                has_effect or "priorityMax" in rule.fields or (priority_class is not None and priority_class.scalar != "")
            )
            if rule.type == "mapping" and not effective:
                cure = "add allow, permit, priorityClass, priorityMax, exec or defaults"
                self._add(rule, path, "the rule has no effect", cure)

    def _allotment(self) -> None:
        standby = self._document.at("spec", "standby")
        if self._text("spec", "when") and not (standby and standby.scalar is True):
            self._add_at(("spec", "when"), "only a standby allotment has a condition", "add standby: true, or remove when")

    def _override(self) -> None:
        effect = self._text("spec", "effect")
        scope = self._document.at("spec", "scope")
        if effect not in _EFFECT_SCOPES:
            return
        needs = _EFFECT_SCOPES[effect]
        for name, owner in (("by", "boost"), ("budget", "lend-budget")):
            self._field_of_effect(effect, name, owner)
        if scope is None or scope.type != "mapping":
            return
        for lists in needs:
            if not any(_items(scope.get(name)) or _has_wrong_type(scope.get(name)) for name in lists):
                self._add(scope, ("spec", "scope"), f"{effect} must name {_SCOPE_DESCRIPTIONS[lists]}", f"add {one_of(lists)}")
        used = [name for lists in needs for name in lists]
        for name in _ALL_LISTS:
            if name not in used and _items(scope.get(name)):
                message = f"{effect} does not use {name}"
                self._add_at(("spec", "scope", name), message, f"remove it: {effect} uses {', '.join(used)}")

    def _field_of_effect(self, effect: str, name: str, owner: str) -> None:
        """Reports a field that one effect requires and all others reject."""
        node = self._document.at("spec", name)
        left_out = node is None or (node.type in ("integer", "string") and not node.scalar)
        spec = self._document.get("spec")
        if effect == owner and left_out and spec is not None:
            self._add(spec, ("spec", name), f"is missing: {effect} needs it", _FIELD_FIXES[name])
        elif effect != owner and not left_out:
            self._add_at(
                ("spec", name), f"only {owner} uses {name}, and this is {effect}", f"remove it, or write effect: {owner}"
            )

    # -------------------------------------------------------------------------------------------------------------- work

    def _workload(self) -> None:
        spec = self._document.get("spec")
        if spec is None:
            return
        self._fields_of_type(spec)
        present = spec.fields.keys()
        if not present.isdisjoint(_COUNT_FIELDS):
            self._counts()
        if "placement" in present:
            self._placement()
        template = spec.get("template")
        if template is not None:
            self._template(template)
        replace = self._text("spec", "replace")
        if replace == "fenced" or (not replace and self._text("spec", "type") == "job"):
            self._check_constraint(_FENCE, ("spec", "fence"))

    def _fields_of_type(self, spec: DocumentNode) -> None:
        """Reports fields that have no effect on this type of workload: their author would expect something that does not
        happen.
        """
        type_ = text_of(spec.get("type")) or ""
        for name in _UNSUPPORTED_FIELDS.get(type_, ()):
            if name in spec.fields:
                message = _UNSUPPORTED_REASONS.get(name, f"only a job has {name}, and this is a {type_}")
                cure = "remove it" if name in _UNSUPPORTED_REASONS else "remove it, or write type: job"
                self._problems.add(spec.fields[name].position, ("spec", name), message, cure)

    def _counts(self) -> None:
        replicas = self._number("spec", "replicas", default=1)
        daemon = self._text("spec", "type") == "daemon"
        for path, label in ((("spec", "gang", "min"), "gang.min"), (("spec", "disruption", "minAvailable"), "minAvailable")):
            count = self._number(*path)
            if count is not None and replicas is not None and count > replicas and not daemon:
                self._add_at(
                    path, f"{label} {count} is more than the {replicas} replicas", f"use at most {replicas}, or raise replicas"
                )
        surge = self._number("spec", "rollout", "maxSurge", default=1)
        unavailable = self._number("spec", "rollout", "maxUnavailable", default=0)
        if surge == 0 and unavailable == 0:
            message = "with maxSurge 0 and maxUnavailable 0 no replica could ever be replaced"
            self._add_at(("spec", "rollout"), message, "set at least one of them to 1 or more")

    def _placement(self) -> None:
        placement: Path = ("spec", "placement")
        regions = [text_of(item) for item in self._items(*placement, "regions")]
        standby = self._items(*placement, "standby")
        if self._document.at("spec", "gang", "min"):
            if len(regions) > 1:
                message = "a gang is bound in one transaction, which cannot span two regions"
                self._add_at((*placement, "regions"), message, "name one region")
            if standby:
                self._add_at(
                    (*placement, "standby"), "a gang cannot have a standby in another region", "remove standby, or gang"
                )
        seen: dict[str | None, int] = {}
        for index, entry in enumerate(standby):
            region = text_of(entry.get("region"))
            path = (*placement, "standby", index, "region")
            if region is not None and region in regions:
                self._add_at(
                    path,
                    f"{quoted(region)} is also in placement.regions",
                    "choose a region that is not lost together with them",
                )
            elif region is not None and seen.setdefault(region, index) != index:
                self._add_at(path, f"{quoted(region)} is listed twice", "keep one of the two")
            self._standby_count((*placement, "standby", index, "replicas"))
        self._operators()
        keys: dict[str | None, int] = {}
        for index, spread in enumerate(self._items(*placement, "topologySpread")):
            key = text_of(spread.get("topologyKey"))
            if key is not None and keys.setdefault(key, index) != index:
                path = (*placement, "topologySpread", index, "topologyKey")
                self._add_at(path, f"{quoted(key)} is used twice", "keep one of the two")

    def _standby_count(self, path: Path) -> None:
        count, replicas = self._number(*path), self._number("spec", "replicas", default=1)
        if count is not None and replicas is not None and count > replicas and self._text("spec", "type") != "daemon":
            message = f"{count} standby replicas for {replicas} replicas"
            self._add_at(path, message, f"use at most {replicas}, or raise replicas")

    def _operators(self) -> None:
        for index, toleration in enumerate(self._items("spec", "placement", "tolerations")):
            path: Path = ("spec", "placement", "tolerations", index)
            operator = text_of(toleration.get("operator")) or "Equal"
            key = text_of(toleration.get("key")) or ""
            if operator == "Equal" and not key and toleration.type == "mapping":
                self._add(
                    toleration, path, "Equal needs a key to compare", "add key, or write operator: Exists to tolerate all"
                )
            elif operator == "Exists" and text_of(toleration.get("value")):
                self._add_at((*path, "value"), "Exists checks only the key", "remove value, or write operator: Equal")
        for index, expression in enumerate(self._items("spec", "placement", "expressions")):
            path = ("spec", "placement", "expressions", index)
            operator = text_of(expression.get("operator")) or ""
            values = _items(expression.get("values"))
            if operator in ("In", "NotIn") and not values:
                self._add(expression, (*path, "values"), f"{operator} needs values", "add values: [a, b]")
            elif operator in ("Exists", "DoesNotExist") and values:
                self._add_at((*path, "values"), f"{operator} checks only the key", "remove values")
            elif operator in ("Gt", "Lt") and not (len(values) == 1 and re.fullmatch(r"[0-9]{1,18}", text_of(values[0]) or "")):
                self._add(expression, (*path, "values"), f"{operator} compares with one whole number", 'write values: ["8"]')

    # ---------------------------------------------------------------------------------------------------------- templates

    def _template(self, template: DocumentNode) -> None:
        path: Path = ("spec", "template")
        self._ports(template, path)
        present = template.fields.keys()
        if "devices" in present:
            self._devices((*path, "devices"))
        if "probes" in present:
            for probe in ("start", "ready", "live"):
                self._probe((*path, "probes", probe))
        if not present.isdisjoint(_SOFTWARE_FIELDS):
            for violation in software_violations(template, path):
                self._problems.add(*violation)
        self._mounts(template, path)

    def _devices(self, path: Path) -> None:
        whole_kinds: set[str | None] = set()
        shared_kinds: set[str | None] = set()
        for index, request in enumerate(self._items(*path)):
            self._device_request(request, (*path, index))
            (shared_kinds if request.get("share") else whole_kinds).add(text_of(request.get("kind")))
        for kind in sorted(name for name in whole_kinds & shared_kinds if name):
            self._add_at(path, f"a share and whole devices of {quoted(kind)} in one replica", "request one or the other")

    def _mounts(self, template: DocumentNode, path: Path) -> None:
        """Reports absolute mount paths without a rootfs: files below the node's own root would be visible to all replicas."""
        root = template.get("rootfs")
        if root is not None and root.type != "null":
            return
        for mounts in ("secrets", "configs"):
            for index, mount in enumerate(_items(template.get(mounts))):
                target = text_of(mount.get("path"))
                if target is not None and target.startswith("/") and target.strip("/."):
                    cure = f"write {target.strip('/')}, which is below the replica's directory, or add a rootfs"
                    message = f"without a rootfs, {quoted(target)} would be a path of the node"
                    self._add_at((*path, mounts, index, "path"), message, cure)

    def _ports(self, template: DocumentNode, path: Path) -> None:
        numbers: dict[int, int] = {}
        names = []
        for index, port in enumerate(_items(template.get("ports"))):
            names.append(text_of(port.get("name")) or "")
            number = port.get("port")
            if (
                number
                and isinstance(number.scalar, int)
                and number.scalar
                and numbers.setdefault(number.scalar, index) != index
            ):
                self._add_at((*path, "ports", index, "port"), f"port {number.scalar} is used twice", "keep one of the two")
        known = frozenset(names)
        for text_path, node in _texts_with_variables(template, path):
            text = text_of(node) or ""
            for name in _PORT.findall(text) if "$(PORT_" in text and len(text) <= _TEXT_MAX else ():
                if name in known:
                    continue
                close = self._problems.suggest(name, names)
                cure = did_you_mean(f"$(PORT_{close})" if close else "") or f"add {{name: {name[:63]}}} to ports"
                self._add(node, text_path, f"$(PORT_{quoted(name)[1:-1]}) refers to no port of this template", cure)

    def _device_request(self, request: DocumentNode, path: Path) -> None:
        if request.type != "mapping":
            return
        count, share = request.get("count"), request.get("share")
        has_count = count is not None and count.scalar != 0
        has_share = share is not None and share.scalar != ""
        if has_count and has_share:
            self._add_at(
                (*path, "share"),
                "count and share exclude each other",
                "keep count for whole devices, or share for a part of one",
            )
        elif not has_count and not has_share:
            self._add(request, path, "requests nothing", "add count: 1 for a whole device, or share: 250m for a part of one")

    def _probe(self, path: Path) -> None:
        probe = self._document.at(*path)
        if probe is None or probe.type != "mapping":
            return
        methods = [name for name in ("http", "tcp", "exec") if name in probe.fields and probe.fields[name].value.type != "null"]
        if len(methods) != 1:
            message = f"{' and '.join(methods)} exclude each other" if methods else "has no check"
            self._add(probe, path, message, "write one of http, tcp and exec")
        names = [text_of(port.get("name")) or "" for port in self._items("spec", "template", "ports")]
        for method in ("http", "tcp"):
            port = probe.at(method, "port")
            name = text_of(port)
            if port and name and name not in names:
                close = self._problems.suggest(name, names)
                known = f"ports has {one_of(name[:63] for name in names)}" if names else f"add {{name: {name[:63]}}} to ports"
                self._add(
                    port,
                    (*path, method, "port"),
                    f"{quoted(name)} is not a port of this template",
                    did_you_mean(close) or known,
                )

    # ------------------------------------------------------------------------------------------------------------ helpers

    def _number(self, *path: str | int, default: int | None = None) -> int | None:
        node = self._document.at(*path)
        if node is None:
            return default
        return node.scalar if isinstance(node.scalar, int) and node.type == "integer" else None

    def _text(self, *path: str | int) -> str | None:
        return text_of(self._document.at(*path))

    def _items(self, *path: str | int) -> list[DocumentNode]:
        return _items(self._document.at(*path))

    def _check_constraint(self, constraint: FieldConstraint, path: Path) -> None:
        node = self._document.at(*path)
        for violation in constraint.violations(node, path) if node is not None else ():
            self._problems.add(*violation)

    def _add_at(self, path: Path, message: str, cure: str) -> None:
        node = self._document.at(*path)
        if node is not None:
            self._add(node, path, message, cure)

    def _add(self, node: DocumentNode, path: Path, message: str, cure: str) -> None:
        self._problems.add(node.position, path, message, cure)


_RULES_BY_KIND: dict[str, Callable[[FieldRules], None]] = {
    "Node": FieldRules._taints,
    "NodePool": FieldRules._node_pool,
    "Policy": FieldRules._policy,
    "Workload": FieldRules._workload,
    "Allotment": FieldRules._allotment,
    "Override": FieldRules._override,
    "Token": FieldRules._token,
}


def _is_valid_instant(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _has_wrong_type(node: DocumentNode | None) -> bool:
    """The field is present with the wrong type, which the type check has reported. So it is not missing."""
    return node is not None and node.type != "list"


def _texts_with_variables(template: DocumentNode, path: Path) -> Iterator[tuple[Path, DocumentNode]]:
    """The texts in which `$(PORT_name)` is replaced, with their paths."""
    for index, node in enumerate(_items(template.get("command"))):
        yield (*path, "command", index), node
    env = template.get("env")
    for name, entry in env.fields.items() if env is not None else ():
        yield (*path, "env", name), entry.value


def _items(node: DocumentNode | None) -> list[DocumentNode]:
    return node.items if node is not None else []
