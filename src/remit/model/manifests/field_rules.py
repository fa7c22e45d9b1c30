"""Rules between fields of one object.

Between values only; see rules.py.

Each alone is judged in shapes.py; what the cluster holds, not here.

Rules read the written values and pass over what has the wrong shape, which has been told; so one mistake hides no other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import PurePosixPath

from remit.model import objects
from remit.model.constraints import Breach, Limit, TakesTime, text_of
from remit.model.identity import INSTANT
from remit.model.manifests.documents import Node
from remit.model.manifests.suggestions import ALIASES
from remit.model.problems import Path, Problems, an, did_you_mean, meant, one_of, shown

_OWN = ".volumes"


def software_breaches(template: Node | None, path: Path) -> Iterator[Breach]:
    if template is None or template.form != "mapping":
        return
    root = template.get("rootfs")
    if root is not None and root.form == "mapping":
        yield from _root(template, root, (*path, "rootfs"))
    yield from _volumes(template, path, rooted=root is not None and root.form != "null")
    yield from _places(template, path)


def _root(template: Node, root: Node, path: Path) -> Iterator[Breach]:
    directory, source, digest = (text_of(root.get(name)) or "" for name in ("directory", "source", "sha256"))
    if bool(directory) == bool(source):
        message = "directory and source exclude each other" if directory else "asks for nothing"
        yield Breach(root.place, path, message, "write directory: and a path of the nodes, or source: and sha256:")
    elif source and not digest:
        yield Breach(root.place, (*path, "sha256"), "is missing: what is fetched is known by it", "add the output of sha256sum")
    elif directory and digest:
        yield Breach(root.place, (*path, "sha256"), "a directory of the node has no digest", "remove it")
    sandbox = template.get("sandbox")
    if sandbox is not None and sandbox.scalar == "none":
        yield Breach(sandbox.place, (*path[:-1], "sandbox"), "a root of its own is a sandbox", "remove it, or rootfs")


def _volumes(template: Node, path: Path, *, rooted: bool) -> Iterator[Breach]:
    volumes = template.get("volumes")
    for number, volume in enumerate(volumes.items if volumes is not None else ()):
        here: Path = (*path, "volumes", number)
        if volume.form != "mapping":
            continue
        sorts = [name for name in ("scratch", "host") if name in volume.fields and volume.fields[name].value.form != "null"]
        if len(sorts) != 1:
            message = "scratch and host exclude each other" if sorts else "is neither scratch nor host"
            yield Breach(volume.place, here, message, "write scratch: {}, or host: {path: /srv/data}")
        at = text_of(volume.get("path"))
        place = volume.get("path")
        if at is None or place is None:
            continue
        if at.startswith("/") and not rooted:
            cure = "write a path below the replica's directory, or give it a rootfs"
            yield Breach(place.place, (*here, "path"), f"{shown(at)} is the machine's own without a rootfs", cure)
        if not PurePosixPath(at).parts or PurePosixPath(at).parts in (("/",), (_OWN,)):
            yield Breach(place.place, (*here, "path"), f"{shown(at)} is taken", "write a path below it, such as data")


def _places(template: Node, path: Path) -> Iterator[Breach]:
    """Two that want the same place: archives may share a directory, the rest may not."""
    seen: dict[tuple[str, ...], str] = {}
    for name in ("artifacts", "volumes"):
        listed = template.get(name)
        for number, one in enumerate(listed.items if listed is not None else ()):
            at, unpack = text_of(one.get("path")), one.get("unpack")
            if at is None or (unpack is not None and unpack.scalar is True):
                continue
            steps = PurePosixPath(at).parts
            if steps and steps in seen:
                where: Path = (*path, name, number, "path")
                yield Breach(one.place, where, f"{shown(at)} is also the place of {seen[steps]}", "give each a path of its own")
            seen.setdefault(steps, f"{name}[{number}]")


_JOB_ONLY = ("completions", "retries", "timeout", "deadline", "schedule", "keep")
_PORT = re.compile(r"(?<!\$)\$\(PORT_([^)$]{0,63})\)")
_FENCE = TakesTime(
    "a replacement waits this long for the old copy to end: 0s would let both run",
    "write a longer one, or replace: eager if two at once do no harm",
)
_WORK = ("tenants", "workloads")
_PLACES = ("regions", "zones", "pools", "nodes")
_ANYTHING = (*_WORK, *_PLACES)
_GROWING = ("regions", "zones", "pools")
_EFFECTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pause-expansion": (_WORK,),
    "avoid": (_PLACES,),
    "pin": (_WORK, _PLACES),
    "boost": (_WORK,),
    "hold-repair": (_ANYTHING,),
    "freeze-autoscaler": (_GROWING,),
    "lend-budget": (_WORK,),
}
"""Of which lists an override of each effect needs one: an empty scope never means everything. It has no other lists."""
_WHAT = {_WORK: "whose work", _PLACES: "which places", _GROWING: "where", _ANYTHING: "which work or which places"}
_ADD = {"by": "add by: and how much the priority is raised", "budget": "add budget: and the name of the budget that is lent"}
_TEXT_MAX = 4096
"""What is longer has been refused by its shape, and is not searched."""


class Rules:
    """The rules of one document; `check` tells every one that it breaks."""

    def __init__(self, problems: Problems, document: Node, kind: str, *, system: bool) -> None:
        self._problems = problems
        self._document = document
        self._kind = kind
        self._system = system

    def check(self) -> None:
        self._metadata()
        by_kind: dict[str, Callable[[], None]] = {
            "Node": self._taints,
            "NodePool": self._node_pool,
            "Policy": self._policy,
            "Workload": self._workload,
            "Allotment": self._allotment,
            "Override": self._override,
            "Token": self._token,
        }
        if self._kind in by_kind:
            by_kind[self._kind]()

    # ------------------------------------------------------------------------------------------------------- every kind

    def _metadata(self) -> None:
        metadata = self._document.get("metadata")
        if metadata is None or metadata.form != "mapping":
            return
        tenant = text_of(metadata.get("tenant"))
        if self._kind in objects.TENANTED and not tenant and (tenant == "" or "tenant" not in metadata.fields):
            first = itertools.islice(metadata.fields, 64)
            misspelt = any(ALIASES.get(key) == "tenant" or meant(key, ("tenant",)) for key in first if key != "tenant")
            if not misspelt:
                cure = "add tenant: and the name of the tenant it belongs to"
                self._tell(metadata, ("metadata", "tenant"), f"is missing: {an(self._kind)} belongs to a tenant", cure)
        if self._kind not in objects.TENANTED and "tenant" in metadata.fields:
            message = f"{an(self._kind)} belongs to no tenant"
            self._problems.add(metadata.fields["tenant"].place, ("metadata", "tenant"), message, "remove it")
        if self._system:
            return
        for name, node in (("deleting", metadata), ("status", self._document)):
            if name in node.fields:
                path: Path = ("metadata", name) if node is metadata else (name,)
                self._problems.add(node.fields[name].place, path, "is what Remit reports, and cannot be asked for", "remove it")

    # ----------------------------------------------------------------------------------------------------------- places

    def _node_pool(self) -> None:
        self._taints()
        low, high = self._number("spec", "min"), self._number("spec", "max")
        if low is not None and low > (high or 0):
            self._at(("spec", "min"), f"min {low} is more than max {high or 0}", "raise max, or lower min")

    def _taints(self) -> None:
        seen: dict[tuple[str | None, str | None], int] = {}
        for index, taint in enumerate(self._items("spec", "taints")):
            sort = (text_of(taint.get("key")), text_of(taint.get("effect")))
            if seen.setdefault(sort, index) != index:
                self._tell(taint, ("spec", "taints", index), "the same key and effect as another taint", "keep one of the two")

    # ------------------------------------------------------------------------------------------------- tenants and rules

    def _token(self) -> None:
        role, tenant = self._text("spec", "role"), self._text("spec", "tenant")
        nodes = bool(self._items("spec", "nodes"))
        if role == "member" and not tenant:
            self._at(("spec", "role"), "a member belongs to a tenant", "add tenant: and its name")
        if tenant and role not in ("member", "viewer", None):
            self._at(("spec", "tenant"), f"{an(str(role))} belongs to no tenant", "remove it, or use member or viewer")
        if role in ("agent", "join") and not nodes:
            self._at(("spec", "role"), "it speaks for no node", "add nodes: and their names")
        expires = self._text("spec", "expires")
        if expires and re.search(INSTANT, expires) and not _is_instant(expires):
            self._at(("spec", "expires"), f"{shown(expires)} is on no calendar", "write one such as 2027-01-31T12:00:00Z")
        if nodes and role not in ("agent", "join", None):
            self._at(("spec", "nodes"), f"{an(str(role))} speaks for no nodes", "remove them, or use agent or join")
        if self._text("spec", "spent") and role not in ("join", None):
            self._at(("spec", "spent"), f"{an(str(role))}'s token is not used up", "remove it")

    def _policy(self) -> None:
        for index, rule in enumerate(self._items("spec", "rules")):
            path: Path = ("spec", "rules", index)
            parts = (rule.get("allow"), rule.get("permit"), rule.get("defaults"))
            says = any(node is not None and (node.form != "mapping" or bool(node.fields)) for node in parts)
            priority_class = rule.get("priorityClass")
            closed = rule.get("exec")
            says = says or (closed is not None and closed.scalar is False)
            changes = says or "priorityMax" in rule.fields or (priority_class is not None and priority_class.scalar != "")
            if rule.form == "mapping" and not changes:
                cure = "add allow, permit, priorityClass, priorityMax, exec or defaults"
                self._tell(rule, path, "this rule changes nothing", cure)

    def _allotment(self) -> None:
        standby = self._document.at("spec", "standby")
        if self._text("spec", "when") and not (standby and standby.scalar is True):
            self._at(("spec", "when"), "only a standby allotment waits for something", "add standby: true, or remove when")

    def _override(self) -> None:
        effect = self._text("spec", "effect")
        scope = self._document.at("spec", "scope")
        if effect not in _EFFECTS:
            return
        needs = _EFFECTS[effect]
        for name, whose in (("by", "boost"), ("budget", "lend-budget")):
            self._of_effect(effect, name, whose)
        if scope is None or scope.form != "mapping":
            return
        for lists in needs:
            if not any(_items(scope.get(name)) or _misshapen(scope.get(name)) for name in lists):
                self._tell(scope, ("spec", "scope"), f"{effect} must say {_WHAT[lists]}", f"add {one_of(lists)}")
        taken = [name for lists in needs for name in lists]
        for name in _ANYTHING:
            if name not in taken and _items(scope.get(name)):
                message = f"{effect} says nothing about {name}"
                self._at(("spec", "scope", name), message, f"remove it: {effect} is about {', '.join(taken)}")

    def _of_effect(self, effect: str, name: str, whose: str) -> None:
        """A field that one effect needs, and no other has."""
        node = self._document.at("spec", name)
        left_out = node is None or (node.form in ("integer", "string") and not node.scalar)
        spec = self._document.get("spec")
        if effect == whose and left_out and spec is not None:
            self._tell(spec, ("spec", name), f"is missing: {effect} needs it", _ADD[name])
        elif effect != whose and not left_out:
            self._at(("spec", name), f"only {whose} has {name}, and this is {effect}", f"remove it, or write effect: {whose}")

    # -------------------------------------------------------------------------------------------------------------- work

    def _workload(self) -> None:
        self._by_type()
        self._counts()
        self._placement()
        self._template()
        replace = self._text("spec", "replace")
        if replace == "fenced" or (not replace and self._text("spec", "type") == "job"):
            self._limit(_FENCE, ("spec", "fence"))

    def _by_type(self) -> None:
        """Fields that say nothing for this type of workload: a writer who set one expects what will not happen."""
        type_ = self._text("spec", "type")
        spec = self._document.get("spec")
        if spec is None or type_ not in ("job", "service", "daemon"):
            return
        senseless: dict[str, tuple[str, ...]] = {
            "job": ("rollout",),
            "service": _JOB_ONLY,
            "daemon": (*_JOB_ONLY, "gang", "replicas"),
        }
        why = {
            "replicas": "a daemon runs one replica on each matching node",
            "gang": "a daemon's replicas start node by node, not together",
            "rollout": "a job's replicas end by themselves, and are not rolled over",
        }
        for name in senseless[type_]:
            if name in spec.fields:
                message = why.get(name, f"only a job has {name}, and this is a {type_}")
                cure = "remove it" if name in why else "remove it, or write type: job"
                self._problems.add(spec.fields[name].place, ("spec", name), message, cure)

    def _counts(self) -> None:
        replicas = self._number("spec", "replicas", default=1)
        daemon = self._text("spec", "type") == "daemon"
        for path, what in ((("spec", "gang", "min"), "gang.min"), (("spec", "disruption", "minAvailable"), "minAvailable")):
            count = self._number(*path)
            if count is not None and replicas is not None and count > replicas and not daemon:
                self._at(
                    path, f"{what} {count} is more than the {replicas} replicas", f"use at most {replicas}, or raise replicas"
                )
        surge = self._number("spec", "rollout", "maxSurge", default=1)
        unavailable = self._number("spec", "rollout", "maxUnavailable", default=0)
        if surge == 0 and unavailable == 0:
            message = "with maxSurge 0 and maxUnavailable 0 no replica could ever be replaced"
            self._at(("spec", "rollout"), message, "let one of them be at least 1")

    def _placement(self) -> None:
        placement: Path = ("spec", "placement")
        regions = [text_of(item) for item in self._items(*placement, "regions")]
        standby = self._items(*placement, "standby")
        if self._document.at("spec", "gang", "min"):
            if len(regions) > 1:
                message = "a gang is bound in one transaction, which no two regions share"
                self._at((*placement, "regions"), message, "name one region")
            if standby:
                self._at((*placement, "standby"), "a gang has no standby in another region", "remove standby, or gang")
        seen: dict[str | None, int] = {}
        for index, stand in enumerate(standby):
            region = text_of(stand.get("region"))
            path = (*placement, "standby", index, "region")
            if region is not None and region in regions:
                self._at(
                    path, f"{shown(region)} is also among placement.regions", "stand by in a region that is not lost with it"
                )
            elif region is not None and seen.setdefault(region, index) != index:
                self._at(path, f"{shown(region)} stands by twice", "keep one of the two")
            self._standby_count((*placement, "standby", index, "replicas"))
        self._operators()
        keys: dict[str | None, int] = {}
        for index, spread in enumerate(self._items(*placement, "topologySpread")):
            key = text_of(spread.get("topologyKey"))
            if key is not None and keys.setdefault(key, index) != index:
                path = (*placement, "topologySpread", index, "topologyKey")
                self._at(path, f"{shown(key)} is spread over twice", "keep one of the two")

    def _standby_count(self, path: Path) -> None:
        count, replicas = self._number(*path), self._number("spec", "replicas", default=1)
        if count is not None and replicas is not None and count > replicas and self._text("spec", "type") != "daemon":
            message = f"{count} would stand by for the {replicas} replicas that may be lost"
            self._at(path, message, f"use at most {replicas}, or raise replicas")

    def _operators(self) -> None:
        for index, toleration in enumerate(self._items("spec", "placement", "tolerations")):
            path: Path = ("spec", "placement", "tolerations", index)
            operator = text_of(toleration.get("operator")) or "Equal"
            key = text_of(toleration.get("key")) or ""
            if operator == "Equal" and not key and toleration.form == "mapping":
                self._tell(
                    toleration, path, "Equal needs a key to compare", "add key, or write operator: Exists to tolerate all"
                )
            elif operator == "Exists" and text_of(toleration.get("value")):
                self._at((*path, "value"), "Exists asks only for the key", "remove value, or write operator: Equal")
        for index, expression in enumerate(self._items("spec", "placement", "expressions")):
            path = ("spec", "placement", "expressions", index)
            operator = text_of(expression.get("operator")) or ""
            values = _items(expression.get("values"))
            if operator in ("In", "NotIn") and not values:
                self._tell(expression, (*path, "values"), f"{operator} needs values", "add values: [a, b]")
            elif operator in ("Exists", "DoesNotExist") and values:
                self._at((*path, "values"), f"{operator} asks only for the key", "remove values")
            elif operator in ("Gt", "Lt") and not (len(values) == 1 and re.fullmatch(r"[0-9]{1,18}", text_of(values[0]) or "")):
                self._tell(expression, (*path, "values"), f"{operator} compares with one whole number", 'write values: ["8"]')

    # ---------------------------------------------------------------------------------------------------- what is started

    def _template(self) -> None:
        template: Path = ("spec", "template")
        self._ports(template)
        whole: set[str | None] = set()
        shared: set[str | None] = set()
        for index, ask in enumerate(self._items(*template, "devices")):
            self._device_ask(ask, (*template, "devices", index))
            (shared if ask.get("share") else whole).add(text_of(ask.get("kind")))
        for kind in sorted(name for name in whole & shared if name):
            message = f"a share and whole devices of {shown(kind)} in one replica"
            self._at((*template, "devices"), message, "ask for one or the other")
        for probe in ("start", "ready", "live"):
            self._probe((*template, "probes", probe))
        for breach in software_breaches(self._document.at(*template), template):
            self._problems.add(*breach)
        self._mounts(template)

    def _mounts(self, template: Path) -> None:
        """Below the machine's root nothing can be made for one replica alone."""
        if self._document.at(*template, "rootfs") is not None:
            return
        for mounts in ("secrets", "configs"):
            for index, mount in enumerate(self._items(*template, mounts)):
                path = text_of(mount.get("path"))
                if path is not None and path.startswith("/") and path.strip("/."):
                    cure = f"write {path.strip('/')}, which is below the replica's directory, or give it a rootfs"
                    self._at((*template, mounts, index, "path"), f"{shown(path)} is below a root that is not its own", cure)

    def _ports(self, template: Path) -> None:
        numbers: dict[int, int] = {}
        names = []
        for index, port in enumerate(self._items(*template, "ports")):
            names.append(text_of(port.get("name")) or "")
            number = port.get("port")
            if (
                number
                and isinstance(number.scalar, int)
                and number.scalar
                and numbers.setdefault(number.scalar, index) != index
            ):
                self._at((*template, "ports", index, "port"), f"port {number.scalar} is asked for twice", "keep one of the two")
        known = frozenset(names)
        words: list[tuple[Path, Node]] = []
        for index, word in enumerate(self._items(*template, "command")):
            words.append(((*template, "command", index), word))
        env = self._document.at(*template, "env")
        for name, entry in env.fields.items() if env is not None else ():
            words.append(((*template, "env", name), entry.value))
        for path, word in words:
            text = text_of(word) or ""
            for name in _PORT.findall(text) if len(text) <= _TEXT_MAX else ():
                if name not in known:
                    close = self._problems.meant(name, names)
                    cure = did_you_mean(f"$(PORT_{close})" if close else "") or f"add {{name: {name[:63]}}} to ports"
                    self._tell(word, path, f"$(PORT_{shown(name)[1:-1]}) refers to no port of this template", cure)

    def _device_ask(self, ask: Node, path: Path) -> None:
        if ask.form != "mapping":
            return
        count, share = ask.get("count"), ask.get("share")
        asks_count = count is not None and count.scalar != 0
        asks_share = share is not None and share.scalar != ""
        if asks_count and asks_share:
            self._at(
                (*path, "share"),
                "count and share exclude each other",
                "keep count for whole devices, or share for a part of one",
            )
        elif not asks_count and not asks_share:
            self._tell(ask, path, "asks for nothing", "add count: 1 for a whole device, or share: 250m for a part of one")

    def _probe(self, path: Path) -> None:
        probe = self._document.at(*path)
        if probe is None or probe.form != "mapping":
            return
        ways = [name for name in ("http", "tcp", "exec") if name in probe.fields and probe.fields[name].value.form != "null"]
        if len(ways) != 1:
            message = f"{' and '.join(ways)} exclude each other" if ways else "asks for nothing"
            self._tell(probe, path, message, "write one of http, tcp and exec")
        names = [text_of(port.get("name")) or "" for port in self._items("spec", "template", "ports")]
        for way in ("http", "tcp"):
            port = probe.at(way, "port")
            name = text_of(port)
            if port and name and name not in names:
                close = self._problems.meant(name, names)
                known = f"ports has {one_of(name[:63] for name in names)}" if names else f"add {{name: {name[:63]}}} to ports"
                self._tell(
                    port, (*path, way, "port"), f"{shown(name)} is no port of this template", did_you_mean(close) or known
                )

    # ------------------------------------------------------------------------------------------------------------ reading

    def _number(self, *path: str | int, default: int | None = None) -> int | None:
        node = self._document.at(*path)
        if node is None:
            return default
        return node.scalar if isinstance(node.scalar, int) and node.form == "integer" else None

    def _text(self, *path: str | int) -> str | None:
        return text_of(self._document.at(*path))

    def _items(self, *path: str | int) -> list[Node]:
        return _items(self._document.at(*path))

    def _limit(self, limit: Limit, path: Path) -> None:
        node = self._document.at(*path)
        for breach in limit.breaches(node, path) if node is not None else ():
            self._problems.add(*breach)

    def _at(self, path: Path, message: str, cure: str) -> None:
        node = self._document.at(*path)
        if node is not None:
            self._tell(node, path, message, cure)

    def _tell(self, node: Node, path: Path, message: str, cure: str) -> None:
        self._problems.add(node.place, path, message, cure)


def _is_instant(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _misshapen(node: Node | None) -> bool:
    """Told with the shapes: whoever wrote it has not left it out."""
    return node is not None and node.form != "list"


def _items(node: Node | None) -> list[Node]:
    return node.items if node is not None else []
