"""Did every commit keep the promises? Judged from rows, history and acknowledgements alone: no law and no commitment here.

A wrong law must not acquit itself, so this page reads the JSON of the rows with its own eyes: its own arithmetic of amounts,
its own copy of the lifecycle (from DESIGN section 4), its own reading of placement. After every commit it recomputes every sum
from scratch. Each invariant is a named function in `INVARIANTS`; a failure carries the whole story of the object concerned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

Json = Any
Rows = dict[str, tuple[int, Json]]
"""Every row by key: the revision of its last change, and its content."""

Sums = dict[tuple[str, str], int]
"""By ledger and resource."""

WHOLE = 1000
RUNS = ("bound", "starting", "running", "ready", "serving")
ON_NODE = (*RUNS, "draining", "stopping")
HOLDING = (*ON_NODE, "reserved", "unknown", "failed", "finished")
UNLEASED = ("user", "operator", "authority")


def _edges() -> Iterator[tuple[str | None, str | None, str]]:
    """Who may move a replica from where to where, written down from DESIGN section 4."""
    yield None, "pending", "workloads"
    yield "pending", "reserved", "scheduler"
    yield "pending", "bound", "scheduler"
    yield "reserved", "bound", "scheduler"
    yield "reserved", "pending", "scheduler"
    yield "reserved", "pending", "repair"
    yield "pending", "released", "workloads"
    yield "reserved", "released", "workloads"
    yield "bound", "starting", "agent"
    yield "starting", "running", "agent"
    yield "running", "ready", "agent"
    yield "ready", "running", "agent"
    yield "serving", "running", "agent"
    yield "ready", "serving", "endpoints"
    yield "serving", "ready", "endpoints"
    yield "running", "finished", "agent"
    yield "ready", "finished", "agent"
    for phase in ("starting", "running", "ready", "serving"):
        yield phase, "failed", "agent"
    for phase in RUNS:
        for role in ("scheduler", "node-lifecycle", "rollout", "workloads"):
            yield phase, "draining", role
    yield "bound", "draining", "repair"
    yield "starting", "draining", "repair"
    yield "draining", "stopping", "agent"
    yield "stopping", "released", "agent"
    for phase in ON_NODE:
        yield phase, "unknown", "node-lifecycle"
        yield phase, "unknown", "authority"
        yield "unknown", phase, "agent"
    yield "unknown", "failed", "node-lifecycle"
    yield "failed", "released", "repair"
    yield "finished", "released", "workloads"
    yield "released", "pending", "repair"
    yield "released", None, "workloads"


EDGES = frozenset(_edges())
RESULT_BY = frozenset({("finished", "agent"), ("failed", "agent"), ("released", "agent"), ("failed", "node-lifecycle")})
"""Where a move may end, and whose it is, that gives an attempt its result."""

_UNITS = {"m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(name: str, text: object) -> int:
    """Memory in bytes, all else in thousandths."""
    word = str(text)
    digits = word.rstrip("mkMGTKi")
    value = float(digits) * _UNITS[word[len(digits) :]]
    return round(value if name in ("memory", "storage") else value * 1000)


def amount(written: Mapping[str, Any] | None) -> dict[str, int]:
    counted = {}
    for name, value in (written or {}).items():
        if name == "devices":
            counted.update({f"devices/{kind}": quantity(kind, count) for kind, count in value.items()})
        else:
            counted[name] = quantity(name, value)
    return counted


def milliseconds(text: str) -> int:
    total, digits, unit = 0.0, "", ""
    for letter in text + " ":
        if letter.isdigit() or letter in ". ":
            if unit:
                total += float(digits) * {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}[unit]
                digits, unit = "", ""
            digits += letter
        else:
            unit += letter
    return round(total)


class Entry(NamedTuple):
    """One operation as its batch row tells it."""

    id: str
    digest: str
    did: str
    subject: str
    actor: str
    role: str
    lease: str
    epoch: int
    seen: int
    age_ms: int
    number: int
    code: str
    detail: str
    trace: str


class Step(NamedTuple):
    """One commit: what stood before, what stands after, and what the batch row says of it."""

    checker: Checker
    before: Rows
    after: Rows
    changed: dict[str, tuple[Json, Json]]
    entries: tuple[Entry, ...]
    doubting: bool
    """The first batches of a new incarnation."""

    @property
    def accepted(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.code]

    def replicas(self) -> Iterator[tuple[str, Json, Json]]:
        for key, (old, new) in self.changed.items():
            if not key.startswith("replica/"):
                continue
            if old is not None and new is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
                # Forgotten and spawned anew under the same name, in one batch: two replicas, and two moves.
                yield key, old, None
                yield key, None, new
            else:
                yield key, old, new

    def placed(self, *phases: str) -> Iterator[tuple[str, Json]]:
        """Replicas that this commit brought into one of these phases from pending or reserved."""
        for key, old, new in self.replicas():
            if new is not None and phase_of(new) in phases and (old is None or phase_of(old) in ("pending", "reserved")):
                yield key, new


class Violation(AssertionError):
    """A promise was broken."""


class Checker:
    """Fed with every applied commit, in order, and with every acknowledgement. Raises `Violation`."""

    def __init__(self, now: Callable[[], tuple[int, str]]) -> None:
        self.now = now
        self.rows: Rows = {}
        self.stories: dict[str, list[tuple[int, Json]]] = {}
        self.outcomes: dict[str, tuple[str, int, str, int]] = {}
        self.abandons: set[str] = set()
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.results: dict[tuple[str, int], str] = {}
        self.homes: dict[tuple[str, int], str] = {}
        self.taken_over_ms = 0
        self.taken_over_at = 0
        self.commits = 0
        self.edges_seen: dict[tuple[str | None, str | None, str], int] = {}
        self.codes_seen: dict[str, int] = {}

    def applied(self, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str], revision: int) -> None:
        """One commit was applied at `revision`."""
        self.commits += 1
        before = dict(self.rows)
        changed: dict[str, tuple[Json, Json]] = {}
        for key, value in puts:
            content = json.loads(value) if key != "incarnation" else value.decode()
            changed[key] = (before[key][1] if key in before else None, content)
            self.rows[key] = (revision, content)
        for key in deletes:
            changed[key] = (before[key][1] if key in before else None, None)
            self.rows.pop(key, None)
        for key, (_, content) in changed.items():
            self.stories.setdefault(key, []).append((revision, content))
        batches = [new for key, (_, new) in changed.items() if key.startswith("batch/") and new is not None]
        entries = tuple(Entry(*entry) for batch in batches for entry in batch["entries"])
        marker = before.get("incarnation")
        doubting = marker is None or marker[1] != self.rows["head"][1]["incarnation"]
        head, was = self.rows["head"][1], before.get("head")
        if was is None or head["epoch"] > was[1]["epoch"]:
            self.taken_over_ms, self.taken_over_at = self.now()[0], revision
        step = Step(self, before, self.rows, changed, entries, doubting)
        for key, old, new in step.replicas():
            edge = (phase_of(old), phase_of(new), key)
            if edge[0] != edge[1]:
                seen = (edge[0], edge[1], "")
                self.edges_seen[seen] = self.edges_seen.get(seen, 0) + 1
        self.abandons |= {entry.id for entry in entries if entry.did == "abandon"}
        for entry in entries:
            self.codes_seen[entry.code or "accepted"] = self.codes_seen.get(entry.code or "accepted", 0) + 1
        self.judge(step, INVARIANTS)

    def judge(self, step: Step, invariants: Sequence[Callable[[Step], Iterator[tuple[str, str]]]]) -> None:
        for invariant in invariants:
            for key, why in invariant(step):
                raise Violation(f"{invariant.__name__}: {why}\n{self.story(key)}\nthe batch: {step.entries}")

    def story(self, key: str) -> str:
        versions = [f"  at {revision}: {json.dumps(content)}" for revision, content in self.stories.get(key, [])]
        return f"the story of {key}:\n" + "\n".join(versions)

    def restored(self, rows: Sequence[tuple[str, bytes, int]], head: Json, revision: int) -> None:
        """The store was replaced by a backup: what was acknowledged since is lost, and listed elsewhere."""
        self.rows = {key: (at, json.loads(value) if key != "incarnation" else value.decode()) for key, value, at in rows}
        self.rows["head"] = (revision, head)
        self.outcomes = {}
        for key, (at, content) in sorted(self.rows.items()):
            self.stories.setdefault(key, []).append((revision, {"restored": content}))
            if key.startswith("batch/"):
                for entry in (Entry(*e) for e in content["entries"]):
                    if entry.code not in ("operation_expired", "operation_mismatch"):
                        self.outcomes[entry.id] = (entry.digest, entry.number, entry.code, at)
        self.acknowledged = {i: v for i, v in self.acknowledged.items() if i in self.outcomes}
        # Attempts after the backup may be made again, elsewhere and with another end: the restored scope never knew them.
        self.results = {
            (content["metadata"]["uid"], attempt_of(content)): str(content["status"]["result"])
            for key, (_, content) in self.rows.items()
            if key.startswith("replica/") and content.get("status", {}).get("result")
        }
        self.homes = {
            (content["metadata"]["uid"], attempt_of(content)): str(content["status"]["node"])
            for key, (_, content) in self.rows.items()
            if key.startswith("replica/") and phase_of(content) in (*ON_NODE, "unknown", "failed", "finished")
        }

    def heard(self, operation: str, code: str, number: int, revision: int) -> None:
        """A client was answered. Invariant 11: nothing acknowledged is lost; and 8: the same id, the same answer."""
        if code in ("operation_expired", "operation_mismatch") or (code == "invalid" and not revision):
            return
        said = self.outcomes.get(operation)
        if said is None:
            raise Violation(f"acknowledged_is_in_history: {operation} was answered {code or 'accepted'}, no batch tells of it")
        # To abandon something is answered with that thing's own outcome, which may be older.
        older = operation in self.abandons and revision < said[3]
        if (number, code) != (said[1], said[2]) or (revision != said[3] and not older):
            raise Violation(f"acknowledged_is_in_history: {operation} was answered {(number, code, revision)}, stored {said}")
        before = self.acknowledged.setdefault(operation, (code, number))
        if before != (code, number):
            raise Violation(f"one_outcome_per_operation: {operation} was answered {before}, then {(code, number)}")


# ------------------------------------------------------------------------------------------------------- reading the rows


def phase_of(replica: Json) -> str | None:
    return None if replica is None else replica.get("status", {}).get("phase", "pending")


def attempt_of(replica: Json) -> int:
    return int(replica.get("status", {}).get("attempt", 1))


def holds(replica: Json) -> bool:
    return phase_of(replica) in HOLDING


def of_kind(rows: Rows, kind: str) -> Iterator[tuple[str, Json]]:
    for key, (_, content) in rows.items():
        if key.startswith(f"{kind}/"):
            yield key, content


def generation_of(rows: Rows, replica: Json) -> Json:
    meta, spec = replica["metadata"], replica["spec"]
    key = f"generation/{meta['tenant']}/{spec['workload']}/{spec['generation']:08d}"
    return rows[key][1]["spec"] if key in rows else None


def needs(rows: Rows, replica: Json) -> tuple[dict[str, int], dict[str, int]]:
    """In full: on the node (devices as @name), and as a charge on each grant."""
    template = generation_of(rows, replica)["spec"]["template"]
    on_node = amount(template.get("resources"))
    charge = dict(on_node)
    for ask in template.get("devices", ()):
        kind = f"devices/{ask['kind']}"
        share = quantity("share", ask["share"]) if ask.get("share") else ask.get("count", 0) * WHOLE
        charge[kind] = charge.get(kind, 0) + share
    on_node.update({f"@{name}": share for name, share in replica["status"].get("devices", {}).items()})
    return on_node, charge


def victims_left(rows: Rows, replica: Json) -> list[Json]:
    """Victims of a reservation that still hold their room in the attempt that was preempted."""
    if phase_of(replica) != "reserved":
        return []
    left = []
    for victim, attempt in replica["status"].get("victims", {}).items():
        if victim in rows and holds(rows[victim][1]) and attempt_of(rows[victim][1]) == attempt:
            left.append(rows[victim][1])
    return left


def sums(rows: Rows) -> tuple[Sums, Sums, Sums]:
    """Recomputed from scratch: what is taken on each node, drawn on each ledger, and granted on from each ledger."""
    nodes: Sums = {}
    used: Sums = {}
    lent: Sums = {}
    for _, replica in of_kind(rows, "replica"):
        if not holds(replica):
            continue
        on_node, charge = needs(rows, replica)
        charges = {ledger: dict(charge) for ledger in replica["status"].get("grants", ())}
        for victim in victims_left(rows, replica):
            theirs, their_charge = needs(rows, victim)
            on_node = {name: max(0, n - theirs.get(name, 0)) for name, n in on_node.items()}
            for ledger in victim["status"].get("grants", ()):
                if ledger in charges:
                    charges[ledger] = {name: max(0, n - their_charge.get(name, 0)) for name, n in charges[ledger].items()}
        _post(nodes, replica["status"]["node"], on_node)
        for ledger, one in charges.items():
            _post(used, ledger, one)
    for _, grant in of_kind(rows, "grant"):
        spec = grant["spec"]
        if spec.get("issuer"):
            continue
        left = outstanding(grant)
        if spec.get("parent"):
            _post(lent, spec["parent"], left)
        if grant.get("status", {}).get("phase") != "closed" or left:
            for tenant, share in spec.get("shares", {}).items():
                _post(lent, f"tenant/{tenant}/emergency", amount(share))
    return nodes, used, lent


def outstanding(grant: Json) -> dict[str, int]:
    whole, back = amount(grant["spec"]["amount"]), amount(grant.get("status", {}).get("returned"))
    left = {name: whole.get(name, 0) - back.get(name, 0) for name in {*whole, *back}}
    return {name: n for name, n in left.items() if n}


def _post(into: Sums, ledger: str, counted: Mapping[str, int]) -> None:
    for name, n in counted.items():
        if n:
            into[ledger, name] = into.get((ledger, name), 0) + n


def node_limits(rows: Rows) -> dict[str, dict[str, int]]:
    found = {}
    for key, node in of_kind(rows, "node"):
        devices = {f"@{d['name']}": WHOLE for d in node["spec"].get("devices", ())}
        found[key.removeprefix("node/")] = {**amount(node["spec"]["capacity"]), **devices}
    return found


def ledger_limits(rows: Rows) -> dict[str, dict[str, int]]:
    found = {}
    for key, tenant in of_kind(rows, "tenant"):
        found[key] = amount(tenant["spec"]["quota"])
        found[f"{key}/emergency"] = amount(tenant["spec"].get("emergencyQuota"))
    for key, grant in of_kind(rows, "grant"):
        name = key.removeprefix("grant/")
        found[name] = amount(grant["spec"]["amount"]) if grant["spec"].get("issuer") else outstanding(grant)
        for tenant, share in grant["spec"].get("shares", {}).items():
            found[f"{name}/{tenant}"] = amount(share)
    return found


# ----------------------------------------------------------------------------------------------------------- placement


class Site(NamedTuple):
    """A node and what it is called."""

    name: str
    node: Json

    def domain(self, key: str) -> str:
        spec = self.node["spec"]
        if key in ("region", "zone"):
            return str(spec[key])
        if key == "pool":
            return str(spec.get("pool", "default"))
        return self.name if key == "node" else str(self.node["metadata"].get("labels", {}).get(key, ""))


def sites(rows: Rows) -> dict[str, Site]:
    return {key.removeprefix("node/"): Site(key.removeprefix("node/"), node) for key, node in of_kind(rows, "node")}


def marks(rows: Rows, replica: Json) -> dict[str, str]:
    generation = generation_of(rows, replica)
    return {**generation.get("labels", {}), "remit/workload": replica["spec"]["workload"]}


def in_force(rows: Rows) -> Json:
    revisions = [content["spec"] for _, content in of_kind(rows, "policyrevision")]
    return max(revisions, key=lambda spec: int(spec["number"]), default=None)


def _includes(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def barred(rows: Rows, replica: Json, site: Site) -> str:
    """Why a node could never take this replica, whatever is left of it; empty if it could."""
    where = generation_of(rows, replica)["spec"].get("placement", {})
    place = {name: site.domain(name) for name in ("region", "zone", "pool")}
    for name, value in place.items():
        if where.get(f"{name}s") and value not in where[f"{name}s"]:
            return f"{name} {value} is not wanted"
    policies = (in_force(rows) or {}).get("policies", {})
    labels, tenant = marks(rows, replica), replica["metadata"]["tenant"]
    for rule in (rule for policy in policies.values() for rule in policy["rules"]):
        match, allow = rule.get("match", {}), rule.get("allow", {})
        if (match.get("tenants") and tenant not in match["tenants"]) or not _includes(labels, match.get("labels", {})):
            continue
        for name, value in place.items():
            if allow.get(f"{name}s") and value not in allow[f"{name}s"]:
                return f"policy forbids {name} {value}"
    for taint in site.node["spec"].get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in where.get("tolerations", ())):
            return f"taint {taint}"
    have = site.node["metadata"].get("labels", {})
    if not _includes(have, where.get("nodeSelector", {})):
        return f"labels {have} do not match"
    return next((f"{e} on {have}" for e in where.get("expressions", ()) if not _admits(e, have.get(e["key"]))), "")


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    return bool(toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))


def _admits(expression: Json, value: str | None) -> bool:
    values = expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(values[0])
        case _:
            return value is not None and value.isdigit() and int(value) < int(values[0])


def towards_others(rows: Rows, key: str, replica: Json, *, spread: bool = True) -> str:
    """Which constraint towards other replicas is broken where this one stands; empty if none is."""
    places = sites(rows)
    here, tenant = places[replica["status"]["node"]], replica["metadata"]["tenant"]
    others = [
        (places[other["status"]["node"]], other)
        for name, other in of_kind(rows, "replica")
        if name != key and holds(other) and other["metadata"]["tenant"] == tenant
    ]
    where, own = generation_of(rows, replica)["spec"].get("placement", {}), marks(rows, replica)

    def counted(selector: Mapping[str, str], topology: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for site, other in others:
            if _includes(marks(rows, other), selector):
                counts[site.domain(topology)] = counts.get(site.domain(topology), 0) + 1
        return counts

    for term in where.get("antiAffinity", ()):
        domain = here.domain(term["topologyKey"])
        if domain and counted(term["labelSelector"], term["topologyKey"]).get(domain):
            return f"anti-affinity {term} in {domain}"
    for site, other in others:
        for term in generation_of(rows, other)["spec"].get("placement", {}).get("antiAffinity", ()):
            domain = here.domain(term["topologyKey"])
            if domain and site.domain(term["topologyKey"]) == domain and _includes(own, term["labelSelector"]):
                return f"the anti-affinity {term} of {other['metadata']['name']} in {domain}"
    for term in where.get("affinity", ()):
        counts, domain = counted(term["labelSelector"], term["topologyKey"]), here.domain(term["topologyKey"])
        first = not any(counts.values()) and _includes(own, term["labelSelector"])
        if not domain or not (counts.get(domain) or first):
            return f"affinity {term} in {domain}"
    for term in where.get("topologySpread", ()) if spread else ():
        if term.get("whenUnsatisfiable", "DoNotSchedule") != "DoNotSchedule":
            continue
        selector = term.get("labelSelector") or {"remit/workload": replica["spec"]["workload"]}
        topology = term["topologyKey"]
        counts, domain = counted(selector, topology), here.domain(topology)
        open_to = {site.domain(topology) for site in places.values() if not barred(rows, replica, site)} - {""}
        least = min((counts.get(one, 0) for one in sorted(open_to)), default=0)
        if not domain or counts.get(domain, 0) + _includes(own, selector) - least > term.get("maxSkew", 1):
            return f"spread {term} in {domain}: {counts}"
    return ""


# ---------------------------------------------------------------------------------------------------------- invariants

Found = Iterator[tuple[str, str]]
"""The key concerned, and what is wrong with it."""


def exclusive_device_has_one_owner(step: Step) -> Found:
    owners: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for key, replica in of_kind(step.after, "replica"):
        # A reservation that waits for victims names the devices that they still own.
        if holds(replica) and not victims_left(step.after, replica):
            for device, share in replica["status"].get("devices", {}).items():
                owners.setdefault((replica["status"]["node"], device), []).append((key, share))
    for device, held in owners.items():
        if len(held) > 1 and (any(share == WHOLE for _, share in held) or sum(share for _, share in held) > WHOLE):
            yield held[-1][0], f"{device} is held by {held}"


def node_sums_never_rise_above_capacity(step: Step) -> Found:
    before, after = sums(step.before)[0], sums(step.after)[0]
    limits, old = node_limits(step.after), node_limits(step.before)
    for (node, name), n in after.items():
        if node not in limits:
            yield f"node/{node}", f"there is no node {node}, and replicas hold {n} {name} on it"
        limit = max(limits.get(node, {}).get(name, 0), old.get(node, {}).get(name, 0))
        if n > limit and n > before.get((node, name), 0):
            yield f"node/{node}", f"{name} rose from {before.get((node, name), 0)} to {n}, of {limit}"


def ledgers_never_rise_above_amount(step: Step) -> Found:
    """Invariants 4 and 5. A restore counts all that was lent as used, and a voucher is believed: both may lift a sum."""
    if step.doubting or any(entry.did == "vouch" for entry in step.accepted):
        return
    (_, used_before, lent_before), (_, used, lent) = sums(step.before), sums(step.after)
    limits, old = ledger_limits(step.after), ledger_limits(step.before)
    for ledger, name in {**used, **lent}:
        n = used.get((ledger, name), 0) + lent.get((ledger, name), 0)
        was = used_before.get((ledger, name), 0) + lent_before.get((ledger, name), 0)
        key = ledger if ledger.startswith("tenant/") else f"grant/{ledger}"
        if (ledger, name) in used and ledger not in limits:
            yield key, f"{n} {name} is charged to {ledger}, which is not there"
        limit = max(limits.get(ledger, {}).get(name, 0), old.get(ledger, {}).get(name, 0))
        if n > limit and n > was and ledger in limits:
            yield key, f"{name} of {ledger} rose from {was} to {n}, of {limit}"


def quota_comes_from_quota(step: Step) -> Found:
    """Invariant 5: draws on a slice are charged to nothing else, so it must be of its tenant's own quota, all the way up."""
    for key, grant in of_kind(step.after, "grant"):
        spec = grant["spec"]
        if spec.get("purpose", "quota") != "quota" or spec.get("issuer"):
            continue
        parent, tenant = spec.get("parent", ""), spec.get("tenant", "")
        above = step.after[f"grant/{parent}"][1]["spec"] if f"grant/{parent}" in step.after else {}
        of_slice = (above.get("purpose", "quota"), above.get("tenant", "")) == ("quota", tenant) and bool(above)
        if parent != f"tenant/{tenant}" and not of_slice:
            yield key, f"a slice of {tenant}'s quota was carved out of {parent or 'nothing'}: {above}"


def one_binding_per_attempt(step: Step) -> Found:
    homes = step.checker.homes
    for key, _, new in step.replicas():
        if new is None or phase_of(new) not in (*ON_NODE, "unknown", "failed", "finished"):
            continue
        this, node = (new["metadata"]["uid"], attempt_of(new)), new["status"]["node"]
        if homes.setdefault(this, node) != node:
            yield key, f"attempt {this} was bound to {homes[this]}, and is on {node}"


def hard_constraints_hold_at_the_bind(step: Step) -> Found:
    """Judged on what stands after the batch: exact if nothing later in the batch could have changed it."""
    binders = [i for i, entry in enumerate(step.accepted) if entry.did in ("bind", "gang")]
    shapers = [i for i, entry in enumerate(step.accepted) if entry.did in ("apply", "delete", "mark", "adopt", "rollback")]
    if binders and shapers and max(shapers) > min(binders):
        return
    freed = any(holds(old) and not holds(new) for _, old, new in step.replicas())
    bound = dict(step.placed("bound"))
    workloads = {(new["metadata"]["tenant"], new["spec"]["workload"]) for _, new in step.placed("bound", "reserved")}
    exact = not freed and (len(step.accepted) == 1 or len(workloads) == 1)
    for key, new in bound.items():
        node = new["status"]["node"]
        site = sites(step.after).get(node)
        if site is None:
            yield key, f"there is no node {node}"
            return
        if why := barred(step.after, new, site):
            yield key, f"bound to {node}: {why}"
        spec, status = site.node["spec"], site.node.get("status", {})
        if status.get("health") != "ready" or spec.get("unschedulable") or spec.get("draining"):
            yield key, f"bound to {node}, which takes no new work: {status} {spec}"
        if not freed and (why := towards_others(step.after, key, new, spread=exact)):
            yield key, f"bound to {node}: {why}"


def policy_in_force_is_recorded_and_alive(step: Step) -> Found:
    now, boot = step.checker.now()
    for key, new in step.placed("bound", "reserved"):
        latest = [in_force(step.before), in_force(step.after)]
        numbers = [0 if one is None else one["number"] for one in latest]
        if new["status"].get("policy", 0) not in numbers:
            yield key, f"placed under policy {new['status'].get('policy', 0)}; {numbers} is in force"
        if not any(one is None or not one.get("deadline") or _ahead(one["deadline"], now, boot) for one in latest):
            yield key, f"placed under policy {numbers}, past its lease at {now} on {boot}"


def _ahead(deadline: Json, now: int, boot: str) -> bool:
    return bool(deadline["boot"] == boot and now < deadline["atMs"])


def phases_move_along_edges_by_their_owners(step: Step) -> Found:
    for key, old, new in step.replicas():
        was, now = phase_of(old), phase_of(new)
        if step.doubting:
            if (was, now, "authority") not in EDGES:
                yield key, f"a restore moved it from {was} to {now}"
            continue
        workload = (old or new)["spec"]["workload"]
        named = [
            e for e in step.accepted
            if e.subject in (key, workload) or e.did == "gang" or (e.did == "reserve" and now == "draining")
        ]  # fmt: skip
        if not any((was, now, entry.role) in EDGES for entry in named):
            yield key, f"from {was} to {now} by {[(e.did, e.role, e.subject) for e in named]}"
        if was == "unknown" and now in ON_NODE and old["status"].get("before") != now:
            yield key, f"unknown since {old['status'].get('before')}, resumed as {now}"


def accepted_entries_held_their_lease(step: Step) -> Found:
    """Fencing: at the epoch that stands in the lease's row, by its holder."""
    for entry in step.accepted:
        if entry.role in UNLEASED or entry.did in ("acquire", "abandon"):
            continue
        key = f"lease/{entry.lease}"
        rows = [rows[key][1]["spec"] for rows in (step.before, step.after) if key in rows]
        # A vacate takes the holder's name away in the same batch, and keeps the epoch.
        if not any(spec.get("epoch", 0) == entry.epoch and spec.get("holder", "") in (entry.actor, "") for spec in rows):
            yield key, f"{entry.actor} acted at epoch {entry.epoch} of {entry.lease}: {rows}"
        if entry.lease != entry.role and not entry.lease.startswith(f"{entry.role}/"):
            yield key, f"{entry.lease} is no lease of {entry.role}"


def chain_is_unbroken(step: Step) -> Found:
    """Epochs never decrease, sequences count up by one, and the digest is right."""
    head = step.after["head"][1]
    old: Json = step.before["head"][1] if "head" in step.before else {"epoch": 0, "sequence": 0, "digest": ""}
    if head["sequence"] != old["sequence"] + 1 or head["epoch"] not in (old["epoch"], old["epoch"] + 1):
        yield "head", f"{old} was followed by {head}"
    if step.entries and head["epoch"] != old["epoch"]:
        yield "head", "a takeover decided something"


def one_outcome_per_operation(step: Step) -> Found:
    for entry in step.entries:
        if entry.code in ("operation_expired", "operation_mismatch"):
            continue
        outcome = (entry.digest, entry.number, entry.code, step.after["head"][0])
        before = step.checker.outcomes.setdefault(entry.id, outcome)
        if before != outcome and entry.code != "invalid":
            yield "head", f"operation {entry.id} came to {before}, and then to {outcome}"


def gangs_are_bound_together(step: Step) -> Found:
    newly: dict[tuple[str, str], list[str]] = {}
    for key, new in step.placed("bound"):
        newly.setdefault((new["metadata"]["tenant"], new["spec"]["workload"]), []).append(key)
    for (tenant, workload), keys in newly.items():
        least = max((generation_of(step.after, step.after[k][1])["spec"].get("gang") or {}).get("min", 0) for k in keys)
        standing = [
            k for k, r in of_kind(step.before, "replica")
            if (r["metadata"]["tenant"], r["spec"]["workload"]) == (tenant, workload) and holds(r) and phase_of(r) != "reserved"
        ]  # fmt: skip
        if len(keys) < least and len(standing) < least:
            yield keys[0], f"{len(keys)} members were bound, {len(standing)} stood, the gang's minimum is {least}"


def reservations_are_committed_once_or_released(step: Step) -> Found:
    for key, old, new in step.replicas():
        if phase_of(old) == "reserved" and phase_of(new) == "bound":
            a, b = old["status"], new["status"]
            if any(a.get(name) != b.get(name) for name in ("node", "devices", "grants", "attempt")):
                yield key, f"reserved as {a}, bound as {b}"
            if victims_left(step.before, old) and victims_left(step.after, {**old}):
                yield key, "bound before its victims were gone"
        if new is not None and not holds(new) and any(new.get("status", {}).get(f) for f in ("devices", "grants", "victims")):
            yield key, f"holds nothing, and has {new['status']}"
        if phase_of(new) != "reserved" and new is not None and new.get("status", {}).get("victims"):
            yield key, f"has victims, but no reservation: {new['status']}"


def draws_are_on_living_grants(step: Step) -> Found:
    """Invariant 10 for grants: past its term, or closed, or void, nothing is drawn any more. What a reservation drew before
    that stays drawn, and is bound as it was made (`reservations_are_committed_once_or_released`).
    """
    for key, old, new in step.replicas():
        if new is None or phase_of(old) not in (None, "pending") or phase_of(new) not in ("bound", "reserved"):
            continue
        for ledger in new["status"].get("grants", ()):
            if not ledger.startswith("tenant/") and all(_dead(step, rows, ledger) for rows in (step.before, step.after)):
                yield key, f"drew on {ledger}: {_dead(step, step.after, ledger)}\n{step.checker.story('grant/' + ledger)}"


def _dead(step: Step, rows: Rows, ledger: str) -> str:
    now, boot = step.checker.now()
    name = ledger.split("/")[0]
    while name:
        found = rows.get(f"grant/{name}")
        if found is None:
            return f"{name} is not there"
        revision, grant = found
        status = grant.get("status", {})
        if status.get("phase", "live") != "live":
            return f"{name} is {status['phase']}"
        deadline, issued = status.get("deadline"), not grant["spec"].get("issuer")
        fresh = issued and revision < step.checker.taken_over_at
        until = step.checker.taken_over_ms + milliseconds(grant["spec"]["ttl"]) if fresh else deadline and deadline["atMs"]
        if deadline and (now >= until or (not issued and deadline["boot"] != boot)):
            return f"{name} ran out at {until} on {deadline['boot']}, now is {now} on {boot}"
        parent = grant["spec"].get("parent", "") if issued else ""
        name = "" if parent.startswith("tenant/") else parent
    return ""


def attempts_have_one_result(step: Step) -> Found:
    for key, old, new in step.replicas():
        if old is not None and new is not None:
            rise = attempt_of(new) - attempt_of(old)
            if rise != (phase_of(old) == "released" and phase_of(new) == "pending"):
                yield key, f"attempt {attempt_of(old)} became {attempt_of(new)}"
        result = (new or {}).get("status", {}).get("result", "")
        if new is not None and result:
            this = (new["metadata"]["uid"], attempt_of(new))
            if this not in step.checker.results:
                roles = [e.role for e in step.accepted if e.subject == key]
                if not any((phase_of(new), role) in RESULT_BY for role in roles):
                    yield key, f"{phase_of(new)} by {roles} is no end, and gave it the result {result}"
            if step.checker.results.setdefault(this, result) != result:
                yield key, f"attempt {this} came to {step.checker.results[this]}, and then to {result}"


def refusals_change_nothing(step: Step) -> Found:
    if not step.accepted and not step.doubting:
        for key in step.changed:
            if key != "head" and not key.startswith("batch/"):
                yield key, "changed by a batch that accepted nothing"


def node_health_moves_by_its_owner(step: Step) -> Found:
    lawful = {
        ("joining", "ready"), ("joining", "lost"), ("ready", "suspect"), ("suspect", "ready"), ("suspect", "unknown"),
        ("unknown", "lost"), ("unknown", "joining"), ("lost", "joining"),
    }  # fmt: skip
    for key, (old, new) in step.changed.items():
        if not key.startswith("node/") or new is None:
            continue
        was = "joining" if old is None else old.get("status", {}).get("health", "joining")
        now = new.get("status", {}).get("health", "joining")
        marked = [e for e in step.accepted if e.did == "mark" and e.subject == key.removeprefix("node/")]
        if step.doubting and now == "unknown":
            continue  # restored: nothing is known of any node
        if was != now and ((was, now) not in lawful or not any(e.role == "node-lifecycle" for e in marked)):
            yield key, f"its health went from {was} to {now} by {[(e.did, e.role) for e in step.accepted]}"


INVARIANTS: tuple[Callable[[Step], Found], ...] = (
    chain_is_unbroken,
    refusals_change_nothing,
    exclusive_device_has_one_owner,
    node_sums_never_rise_above_capacity,
    one_binding_per_attempt,
    ledgers_never_rise_above_amount,
    quota_comes_from_quota,
    hard_constraints_hold_at_the_bind,
    policy_in_force_is_recorded_and_alive,
    phases_move_along_edges_by_their_owners,
    accepted_entries_held_their_lease,
    one_outcome_per_operation,
    gangs_are_bound_together,
    reservations_are_committed_once_or_released,
    draws_are_on_living_grants,
    attempts_have_one_result,
    node_health_moves_by_its_owner,
)


def chain_digest(old: Json, head: Json, puts: Sequence[tuple[str, bytes]], deletes: Sequence[str]) -> str:
    """What the head's digest must be, recomputed from the bytes."""
    taken = head["epoch"] != old["epoch"]
    before = f"{old['digest']} {head['epoch']} {head['holder']}" if taken else old["digest"]
    rows = [(key, value) for key, value in puts if key != "head"]
    table = [before, [[key, len(value)] for key, value in rows], list(deletes)]
    hashed = sha256(json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode())
    for _, value in rows:
        hashed.update(value)
    return hashed.hexdigest()[:32]


def across(issuer: Rows, holder: Rows, scope: str) -> Found:
    """Between two scopes: what the holder believes to have is never more than what its issuer has written off."""
    for key, grant in of_kind(holder, "grant"):
        if not grant["spec"].get("issuer") or grant.get("status", {}).get("phase") == "void":
            continue
        source = issuer.get(key)
        left = {} if source is None else outstanding(source[1])
        for name, n in amount(grant["spec"]["amount"]).items():
            if n > left.get(name, 0):
                yield key, f"{scope} holds {n} {name} of {key}, its issuer has debited {left.get(name, 0)}"
