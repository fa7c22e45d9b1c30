"""Which values of a manifest are at odds with each other? Shapes are judged in shapes.py; what the cluster holds, nowhere here.

Rules read the written values and pass over what has the wrong shape, which has been told; so one mistake hides no other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable

from remit.model import fields, objects, quantity
from remit.model.documents import Node
from remit.model.problems import Path, Problems, did_you_mean, meant, one_of, shown
from remit.model.spellings import ALIASES

RESERVED = "remit/"
"""Labels under this prefix are Remit's own: a tenant who set them would place work where only the system may."""

PRIORITY_MAX = 1_000_000_000
"""Above it is the system's own work, which no tenant's may push aside."""

_JOB_ONLY = ("completions", "retries", "timeout", "deadline", "schedule")
_PORT = re.compile(r"(?<!\$)\$\(PORT_([^)$]{0,63})\)")
_TEXT_MAX = 4096
"""What is longer has been refused by its shape, and is not searched."""
_CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_WORDS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
_MONTHS = dict(
    zip(("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"), range(1, 13), strict=True)
)
_WEEKDAYS = {"SUN": 0, "MON": 1, "TUE": 2, "WED": 3, "THU": 4, "FRI": 5, "SAT": 6}
_CRON_NAMES: tuple[dict[str, int], ...] = ({}, {}, {}, _MONTHS, _WEEKDAYS)
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


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
            "Region": lambda: self._unique_texts("spec", "zones"),
            "Node": self._node,
            "NodePool": self._node_pool,
            "PriorityClass": self._priority_class,
            "Policy": self._policy,
            "Workload": self._workload,
            "Allotment": self._allotment,
        }
        if self._kind in by_kind:
            by_kind[self._kind]()

    # ------------------------------------------------------------------------------------------------------- every kind

    def _metadata(self) -> None:
        metadata = self._document.get("metadata")
        if metadata is None or metadata.form != "mapping":
            return
        tenant = _text(metadata.get("tenant"))
        first = itertools.islice(metadata.fields, 64)
        misspelt = any(ALIASES.get(key) == "tenant" or meant(key, ("tenant",)) for key in first if key != "tenant")
        if self._kind in objects.TENANTED and not misspelt and not tenant and (tenant == "" or "tenant" not in metadata.fields):
            cure = "add tenant: and the name of the tenant it belongs to"
            self._tell(metadata, ("metadata", "tenant"), f"is missing: a {self._kind} belongs to a tenant", cure)
        if self._kind not in objects.TENANTED and "tenant" in metadata.fields:
            message = f"a {self._kind} belongs to no tenant"
            self._problems.add(metadata.fields["tenant"].place, ("metadata", "tenant"), message, "remove it")
        if self._system:
            return
        for where in ("labels", "annotations"):
            for key, entry in _fields(metadata.get(where)):
                self._not_reserved(key, entry, ("metadata", where, key))
        for index, finalizer in enumerate(_items(metadata.get("finalizers"))):
            self._not_reserved(_text(finalizer), finalizer.place, ("metadata", "finalizers", index))
        for name, node in (("deleting", metadata), ("status", self._document)):
            if name in node.fields:
                path: Path = ("metadata", name) if node is metadata else (name,)
                self._problems.add(node.fields[name].place, path, "is what Remit reports, and cannot be asked for", "remove it")

    def _not_reserved(self, key: str | None, place: tuple[int, int], path: Path) -> None:
        if key is not None and key.startswith(RESERVED) and not self._system:
            message = f"{shown(key)} is reserved: only Remit writes what stands under {RESERVED}"
            self._problems.add(place, path, message, "choose another prefix, or none")

    # ----------------------------------------------------------------------------------------------------------- places

    def _node(self) -> None:
        self._unique_names("spec", "devices")
        self._taints()

    def _node_pool(self) -> None:
        self._unique_names("spec", "devices")
        self._unique_texts("spec", "zones")
        self._taints()
        for key, place in _fields(self._document.at("spec", "labels")):
            self._not_reserved(key, place, ("spec", "labels", key))
        low, high = self._number("spec", "min"), self._number("spec", "max")
        if low is not None and low > (high or 0):
            self._at(("spec", "min"), f"min {low} is more than max {high or 0}", "raise max, or lower min")

    def _taints(self) -> None:
        seen: dict[tuple[str | None, str | None], int] = {}
        for index, taint in enumerate(self._items("spec", "taints")):
            sort = (_text(taint.get("key")), _text(taint.get("effect")))
            self._not_reserved(sort[0], taint.place, ("spec", "taints", index, "key"))
            if seen.setdefault(sort, index) != index:
                self._tell(taint, ("spec", "taints", index), "the same key and effect as another taint", "keep one of the two")

    # ------------------------------------------------------------------------------------------------- tenants and rules

    def _priority_class(self) -> None:
        value = self._number("spec", "value")
        if value is not None and value > PRIORITY_MAX and not self._system:
            message = f"{value} is reserved: priorities above {PRIORITY_MAX} are Remit's own"
            self._at(("spec", "value"), message, f"use at most {PRIORITY_MAX}")

    def _policy(self) -> None:
        for index, rule in enumerate(self._items("spec", "rules")):
            path: Path = ("spec", "rules", index)
            allow = rule.get("allow")
            allows = allow is not None and (allow.form != "mapping" or bool(allow.fields))
            priority_class = rule.get("priorityClass")
            changes = allows or "priorityMax" in rule.fields or (priority_class is not None and priority_class.scalar != "")
            if rule.form == "mapping" and not changes:
                self._tell(rule, path, "this rule changes nothing", "add allow, priorityClass or priorityMax")
            self._is_name((*path, "priorityClass"))
            for place in ("regions", "zones", "pools"):
                self._unique_texts(*path, "allow", place)
                listed = allow.get(place) if allow is not None else None
                if listed is not None and listed.form == "list" and not listed.items:
                    # A residency rule whose last region was deleted must not quietly open the whole world.
                    message = f"an empty list would allow all {place}"
                    self._tell(listed, (*path, "allow", place), message, f"name at least one, or leave {place} out")
            self._unique_texts(*path, "match", "tenants")

    def _allotment(self) -> None:
        standby = self._document.at("spec", "standby")
        if self._text("spec", "when") and not (standby and standby.scalar is True):
            self._at(("spec", "when"), "only a standby allotment waits for something", "add standby: true, or remove when")

    # -------------------------------------------------------------------------------------------------------------- work

    def _workload(self) -> None:
        self._by_type()
        self._counts()
        self._placement()
        self._template()
        self._is_name(("spec", "priorityClass"))
        self._schedule()
        replace = self._text("spec", "replace")
        if replace == "fenced" or (not replace and self._text("spec", "type") == "job"):
            message = "a replacement waits this long for the old copy to end: 0s would let both run"
            self._takes_time(("spec", "fence"), message, "write a longer one, or replace: eager if two at once do no harm")
        message = "a rollout would have failed before it began"
        self._takes_time(("spec", "rollout", "progressDeadline"), message, "write a longer one, or leave it out for 10m")

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
        for name in ("regions", "zones", "pools"):
            self._unique_texts("spec", "placement", name)
        placement: Path = ("spec", "placement")
        regions = [_text(item) for item in self._items(*placement, "regions")]
        standby = self._items(*placement, "standby")
        if self._document.at("spec", "gang", "min"):
            if len(regions) > 1:
                message = "a gang is bound in one transaction, which no two regions share"
                self._at((*placement, "regions"), message, "name one region")
            if standby:
                self._at((*placement, "standby"), "a gang has no standby in another region", "remove standby, or gang")
        seen: dict[str | None, int] = {}
        for index, stand in enumerate(standby):
            region = _text(stand.get("region"))
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
            key = _text(spread.get("topologyKey"))
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
            operator = _text(toleration.get("operator")) or "Equal"
            key = _text(toleration.get("key")) or ""
            if operator == "Equal" and not key and toleration.form == "mapping":
                self._tell(
                    toleration, path, "Equal needs a key to compare", "add key, or write operator: Exists to tolerate all"
                )
            elif operator == "Exists" and _text(toleration.get("value")):
                self._at((*path, "value"), "Exists asks only for the key", "remove value, or write operator: Equal")
            if key and not re.search(fields.LABEL_KEY, key):
                self._at((*path, "key"), f"{shown(key)} is not a label key", "write the key of the taint")
        for index, expression in enumerate(self._items("spec", "placement", "expressions")):
            path = ("spec", "placement", "expressions", index)
            operator = _text(expression.get("operator")) or ""
            values = _items(expression.get("values"))
            if operator in ("In", "NotIn") and not values:
                self._tell(expression, (*path, "values"), f"{operator} needs values", "add values: [a, b]")
            elif operator in ("Exists", "DoesNotExist") and values:
                self._at((*path, "values"), f"{operator} asks only for the key", "remove values")
            elif operator in ("Gt", "Lt") and not (len(values) == 1 and re.fullmatch(r"[0-9]{1,18}", _text(values[0]) or "")):
                self._tell(expression, (*path, "values"), f"{operator} compares with one whole number", 'write values: ["8"]')

    # ---------------------------------------------------------------------------------------------------- what is started

    def _template(self) -> None:
        template: Path = ("spec", "template")
        self._ports(template)
        self._begins((*template, "command"))
        self._stays_inside(self._document.at(*template, "workingDirectory"), (*template, "workingDirectory"), absolute=True)
        for index, ask in enumerate(self._items(*template, "devices")):
            self._device_ask(ask, (*template, "devices", index))
        for probe in ("start", "ready", "live"):
            self._probe((*template, "probes", probe))
        for what in ("secrets", "configs"):
            self._unique_names(*template, what)
            for index, mount in enumerate(self._items(*template, what)):
                self._stays_inside(mount.get("path"), (*template, what, index, "path"), absolute=True)
        for index, artifact in enumerate(self._items(*template, "artifacts")):
            self._stays_inside(artifact.get("path"), (*template, "artifacts", index, "path"), absolute=False)

    def _begins(self, command: Path) -> None:
        """Its first word is a program."""
        words = self._items(*command)
        if words and _text(words[0]) is not None and not (_text(words[0]) or "").strip():
            self._tell(words[0], (*command, 0), "names no program", "write the program to run as the first word")

    def _takes_time(self, path: Path, message: str, cure: str) -> None:
        text = self._text(*path)
        try:
            if text is not None and quantity.parse_duration(text) == 0:
                self._at(path, message, cure)
        except ValueError:
            pass  # told with the shapes

    def _ports(self, template: Path) -> None:
        self._unique_names(*template, "ports")
        numbers: dict[int, int] = {}
        names = []
        for index, port in enumerate(self._items(*template, "ports")):
            names.append(_text(port.get("name")) or "")
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
        for name in dict(_fields(self._document.at(*template, "env"))):
            value = self._document.at(*template, "env", name)
            words += [((*template, "env", name), value)] if value else []
        for path, word in words:
            text = _text(word) or ""
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
        if share is None or not asks_share or share.form not in ("string", "integer", "number"):
            return
        try:
            thousandths = quantity.parse_quantity("share", share.text if share.form == "number" else str(share.scalar))
        except ValueError:
            return  # told with the shapes
        if thousandths >= 1000:
            whole = max(1, thousandths // 1000)
            self._at(
                (*path, "share"), "a share is a part of one device: at most 999m", f"write count: {whole} for whole devices"
            )
        elif thousandths < 1:
            self._at((*path, "share"), "a share of nothing", "write 1m to 999m")

    def _probe(self, path: Path) -> None:
        probe = self._document.at(*path)
        if probe is None or probe.form != "mapping":
            return
        ways = [name for name in ("http", "tcp", "exec") if name in probe.fields and probe.fields[name].value.form != "null"]
        if len(ways) != 1:
            message = f"{' and '.join(ways)} exclude each other" if ways else "asks for nothing"
            self._tell(probe, path, message, "write one of http, tcp and exec")
        self._begins((*path, "exec", "command"))
        self._takes_time((*path, "period"), "it would be asked without a pause", "write a longer one, such as 10s")
        self._takes_time((*path, "timeout"), "no answer comes in no time", "write a longer one, such as 1s")
        names = [_text(port.get("name")) or "" for port in self._items("spec", "template", "ports")]
        for way in ("http", "tcp"):
            port = probe.at(way, "port")
            name = _text(port)
            if port and name and name not in names:
                close = self._problems.meant(name, names)
                known = f"ports has {one_of(name[:63] for name in names)}" if names else f"add {{name: {name[:63]}}} to ports"
                self._tell(
                    port, (*path, way, "port"), f"{shown(name)} is no port of this template", did_you_mean(close) or known
                )

    def _schedule(self) -> None:
        text = self._text("spec", "schedule")
        if not text or text in _CRON_WORDS:
            return
        fields = text.split()
        times = [_cron(field, *limits, names) for field, limits, names in zip(fields, _CRON, _CRON_NAMES, strict=False)]
        if len(fields) != 5 or not all(times):
            cure = f'write minute, hour, day, month and weekday, such as "30 2 * * *", or {one_of(_CRON_WORDS)}'
            self._at(("spec", "schedule"), f"{shown(text)} is not a schedule", cure)
        elif fields[4] == "*" and min(times[2]) > max(_DAYS[month - 1] for month in times[3]):
            message = f"{shown(text)} never comes: no such month has a day {min(times[2])}"
            self._at(("spec", "schedule"), message, "choose a day that the month has")

    def _stays_inside(self, node: Node | None, path: Path, *, absolute: bool) -> None:
        text = _text(node)
        if node is not None and text and (".." in text.split("/") or (text.startswith("/") and not absolute)):
            self._tell(node, path, f"{shown(text)} leads out of the replica's directory", "write a path below it, without ..")

    # ------------------------------------------------------------------------------------------------------------ reading

    def _number(self, *path: str | int, default: int | None = None) -> int | None:
        node = self._document.at(*path)
        if node is None:
            return default
        return node.scalar if isinstance(node.scalar, int) and node.form == "integer" else None

    def _text(self, *path: str | int) -> str | None:
        return _text(self._document.at(*path))

    def _items(self, *path: str | int) -> list[Node]:
        return _items(self._document.at(*path))

    def _unique_texts(self, *path: str | int) -> None:
        self._unique(((index, _text(item)) for index, item in enumerate(self._items(*path))), path)

    def _unique_names(self, *path: str | int) -> None:
        self._unique(((index, _text(item.get("name"))) for index, item in enumerate(self._items(*path))), path)

    def _unique(self, named: Iterable[tuple[int, str | None]], path: Path) -> None:
        seen: dict[str, int] = {}
        for index, name in named:
            if name is not None and seen.setdefault(name, index) != index:
                self._at((*path, index), f"{shown(name)} is named twice", "keep one of the two, or rename it")

    def _is_name(self, path: Path) -> None:
        name = self._text(*path)
        if name and not re.search(fields.DNS_LABEL, name) and len(name) <= 63:
            self._at(path, f"{shown(name)} is not a DNS label", "use a-z, 0-9 and -, as in the name of the PriorityClass")

    def _at(self, path: Path, message: str, cure: str) -> None:
        node = self._document.at(*path)
        if node is not None:
            self._tell(node, path, message, cure)

    def _tell(self, node: Node, path: Path, message: str, cure: str) -> None:
        self._problems.add(node.place, path, message, cure)


def _text(node: Node | None) -> str | None:
    return node.scalar if node is not None and isinstance(node.scalar, str) else None


def _items(node: Node | None) -> list[Node]:
    return node.items if node is not None else []


def _fields(node: Node | None) -> list[tuple[str, tuple[int, int]]]:
    return [(key, entry.place) for key, entry in node.fields.items()] if node is not None else []


def _cron(field: str, low: int, high: int, names: dict[str, int]) -> frozenset[int]:
    """The times that one field of a schedule names; none if it cannot be read."""
    times: set[int] = set()
    for part in field.upper().split(","):
        match = re.fullmatch(r"(?:\*|([0-9]{1,2}|[A-Z]{3})(?:-([0-9]{1,2}|[A-Z]{3}))?)(?:/([0-9]{1,2}))?", part)
        if match is None:
            return frozenset()
        begin, end, pace = match.groups()
        first = low if begin is None else _cron_number(begin, names)
        last = high if end is None and (begin is None or pace) else first if end is None else _cron_number(end, names)
        if end == "SUN" and names:
            last = 7  # FRI-SUN: a week may end with it as well as begin
        step = int(pace) if pace else 1
        if not low <= first <= last <= high or not 1 <= step <= high:
            return frozenset()
        times.update(range(first, last + 1, step))
    return frozenset(times)


def _cron_number(word: str, names: dict[str, int]) -> int:
    return int(word) if word.isdigit() else names.get(word, -1)
