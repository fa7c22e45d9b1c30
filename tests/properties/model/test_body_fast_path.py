"""Property: the manifest decoder and the reader with positions give the same object or the same error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st
from msgspec import inspect

from remit.model.kinds import Workload
from remit.model.manifests import validation
from remit.model.manifests.decoder import decode_manifest, valid_specs
from remit.model.manifests.reader import read
from remit.model.manifests.validation import mark_validated, validate
from remit.model.objects import DECLARED, decode, enc_hook, encode
from remit.serve.http import bodies
from remit.serve.http.bodies import validate_manifest, validate_manifests
from remit.serve.http.replies import ApiProblem
from tests.properties.effort import tries
from tests.properties.manifest_strategies import manifests

NAMES = st.sampled_from(["a", "job-1", "Job", "", "x" * 63, "x" * 64, "a\nb", "-a", "é", "a:b", "remit"])
KEYS = st.sampled_from(["app", "shape", "remit/x", "a/b", "", "a:b", "A_b.c", "x" * 64, "é"])
VALUES = st.sampled_from(["", "web", "a:b", "x" * 64, "a b", "é", 'quote"d', "back\\slash"])
SPECS: list[Any] = [
    {"type": "job", "template": {"command": ["work"]}},
    {"type": "job", "replicas": 2, "template": {"command": ["w", "a:b"], "resources": {"cpu": "100m", "memory": "64Mi"}}},
    {"type": "service", "template": {"command": ["w"], "ports": [{"name": "http"}], "env": {"P": "$(PORT_http)"}}},
    {"type": "service", "template": {"command": ["w"], "env": {"P": "$(PORT_none)"}}},
    {"type": "job", "rollout": {"maxSurge": 1}, "template": {"command": ["work"]}},
    {"type": "jbo", "template": {"command": ["work"]}},
    {"type": "job"},
    "job",
    None,
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A manifest as clients may write it: any order and spacing, keys repeated, missing or unknown."""
    meta: list[tuple[str, Any]] = [("name", draw(NAMES)), ("tenant", draw(st.sampled_from(["t", "acme", "", "T"])))]
    if draw(st.booleans()):
        meta.append(("labels", draw(st.dictionaries(KEYS, VALUES, max_size=3))))
    if draw(st.integers(0, 4)) == 0:
        meta.append(draw(st.sampled_from([("annotations", {"a": "b"}), ("generation", 3), ("deleting", True), ("nmae", "x")])))
    members = [
        ("apiVersion", draw(st.sampled_from(["remit/v1", "remit/v1", "remit/v1", "v1"]))),
        ("kind", draw(st.sampled_from(["Workload", "Workload", "Workload", "Config", "Wrokload"]))),
        ("metadata", Pairs(draw(repeated(meta)))),
        ("spec", draw(st.sampled_from(SPECS))),
    ]
    if draw(st.integers(0, 6)) == 0:
        members.append(("status", {}))
    members = draw(repeated(draw(st.permutations(members))))
    written = _written(members, draw(st.sampled_from([(",", ":"), (", ", ": "), (",\n ", " : ")])))
    return draw(st.sampled_from(["", "", " ", "\n"])) + written + draw(st.sampled_from(["", "", "\n", " x", "{}"]))


class Pairs(list[tuple[str, Any]]):
    """An object with possibly repeated keys."""


def repeated(members: list[tuple[str, Any]]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Usually unchanged; sometimes with one member repeated or removed."""
    again = st.sampled_from(members).map(lambda one: [*members, one])
    fewer = st.sampled_from(members).map(lambda one: [other for other in members if other is not one])
    return st.one_of(st.just(members), st.just(members), st.just(members), again, fewer)


def _written(members: list[tuple[str, Any]], separators: tuple[str, str]) -> str:
    def value(one: Any) -> str:
        return (
            _written(one, separators) if isinstance(one, Pairs) else json.dumps(one, separators=separators, ensure_ascii=False)
        )

    return "{" + separators[0].join(f"{json.dumps(key)}{separators[1]}{value(one)}" for key, one in members) + "}"


def _outcome(read: Any, body: bytes) -> Any:
    """As bytes too: an operation's digest covers them, and a retry may take the other path."""
    try:
        found = read(body)
    except ApiProblem as failure:
        return msgspec.json.encode(failure.document)
    return found, [encode(obj) for obj in (found if isinstance(found, tuple) else (found,))]


@tries(400, 20_000)
@given(st.lists(texts(), min_size=1, max_size=3))
def test_body_parses_equally_in_decoder_and_reader(written: list[str]) -> None:
    for text in (*written, *written):  # the second time, the spec may be cached
        body = text.encode()
        assert _outcome(validate_manifest, body) == _outcome(bodies._read_with_positions, body)


@tries(200, 10_000)
@given(st.lists(texts(), min_size=0, max_size=4), st.sampled_from([",", ", "]))
def test_array_body_parses_equally_in_decoder_and_reader(written: list[str], between: str) -> None:
    body = ("[" + between.join(written) + "]").encode()
    for _ in range(2):
        assert _outcome(validate_manifests, body) == _outcome(_validate_in_full, body)


def _validate_in_full(body: bytes) -> Any:
    """With the decoder disabled."""
    with (
        patch.object(bodies, "decode_manifest", lambda body: None),
        patch.object(bodies, "split_array", lambda body, most: []),
    ):
        return validate_manifests(body)


@tries(200, 5_000)
@given(st.lists(texts(), min_size=1, max_size=3))
def test_cached_validation_equals_first_validation(written: list[str]) -> None:
    """Compared by value, also for objects that were not read from a manifest."""
    for text in written:
        try:
            obj = msgspec.json.decode(text, type=Workload, dec_hook=_amounts)
        except (msgspec.DecodeError, ValueError):
            continue
        first = validate(obj)
        assert validate(obj) == first
        again = msgspec.structs.replace(obj, metadata=msgspec.structs.replace(obj.metadata, name="another"))
        named = {problem.description for problem in validate(again)}
        assert {problem.description for problem in first if "metadata.name" not in problem.description} <= named


def _amounts(type_: type, value: object) -> object:
    from remit.model.objects import dec_hook

    return dec_hook(type_, value)


NUMBERS = (0, 1, 2.0, 0.5, -0.0, 1e300, 10**31, 10**33, -1, True, None, "1", "0.5", "1e3")
TEXTS = ("a:b", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", "ä", '"', "\\u0000", "\0", "remit/x", "$(PORT_x)")


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A manifest of any kind as JSON, sometimes with a replaced value, a duplicate key or an escape."""
    document = draw(manifests((*DECLARED, "Policy", "Workload", "Workload", "Workload")))
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        _mutate(draw, document)
    text = json.dumps(document, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from((None, None, 1))))
    if draw(st.integers(0, 5)) == 0:  # one member twice
        metadata = document.get("metadata")
        name = draw(st.sampled_from([*document, *(metadata if isinstance(metadata, dict) else ()), "spec"]))
        text = text.replace(f'"{name}":', f'"{name}":{draw(st.sampled_from(("1", "null", "{}")))},"{name}":', 1)
    if draw(st.integers(0, 5)) == 0:  # a letter, or a colon, as an escape
        letter = draw(st.sampled_from("ae:/"))
        text = text.replace(letter, f"\\u{ord(letter):04x}", 1) if letter != ":" else text.replace("a", "\\u003a", 1)
    return text


def _mutate(draw: st.DrawFn, document: Any) -> None:
    """Replace one value somewhere below, or add an unknown field."""
    value: Any = document
    while True:
        steps = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not steps:
            return
        step = draw(st.sampled_from(steps))
        if isinstance(value[step], dict | list) and value[step] and draw(st.integers(0, 3)):
            value = value[step]
            continue
        if isinstance(value, dict) and draw(st.integers(0, 3)) == 0:
            value[draw(st.sampled_from(("labels", "status", "deleting", "generation", "nmae", "a:b")))] = draw(
                st.sampled_from((*NUMBERS, {}))
            )
        else:
            value[step] = draw(st.sampled_from((*NUMBERS, *TEXTS, [], {}, [[]], {"a": {}})))
        return


def _is_left_to_reader(body: bytes) -> bool:
    """Whether the decoder may leave a valid manifest to the reader: fractions, quantities as numbers, some escapes, no spec."""
    plain = json.loads(body)
    quantity = any(isinstance(value, dict) and {"share", "size"} & value.keys() for value in _values(plain))
    return b"\\u" in body or "spec" not in plain or quantity or any(isinstance(value, float) for value in _values(plain))


def _values(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(below for part in parts for below in _values(part))]


@tries(400, 5_000, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(mutated())
def test_decoder_accepts_only_what_reader_and_authority_accept(text: str) -> None:
    body = text.encode(errors="replace")
    result = read(body, "body.json")
    for _ in range(2):  # the second time the spec may be known
        obj = decode_manifest(body)
        if obj is not None:
            assert not result.problems and result.objects == (obj,) and type(obj) is type(result.objects[0])
            assert encode(obj) == encode(result.objects[0])
            if isinstance(obj, Workload):  # the kind that is marked as validated
                assert _problems_without_cache(obj) == (), "the authority accepts it as well"
        else:
            assert result.problems or _is_left_to_reader(body), text
    event("accepted" if obj is not None else "refused" if result.problems else "left to the reader")
    assert _outcome(validate_manifest, body) == _outcome(bodies._read_with_positions, body)


def _problems_without_cache(obj: Any) -> Any:
    """The problems that the authority finds in an object without a mark and with an unknown spec."""
    with patch.object(validation, "is_known_valid_spec", lambda spec: False):
        return validate(decode(encode(obj)))


RICH_WORKLOAD: dict[str, Any] = {
    "apiVersion": "remit/v1",
    "kind": "Workload",
    "metadata": {"name": "w", "tenant": "t"},
    "spec": {
        "type": "service",
        "replicas": 3,
        "template": {
            "command": ["run"],
            "ports": [{"name": "http"}],
            "devices": [{"kind": "gpu", "count": 1}],
            "probes": {
                "ready": {"http": {"port": "http"}},
                "live": {"exec": {"command": ["x"]}},
                "start": {"tcp": {"port": 80}},
            },
            "artifacts": [{"source": "https://h/a", "sha256": "0" * 64, "path": "a"}],
            "volumes": [{"name": "v", "path": "data", "scratch": {}}],
            "secrets": [{"name": "s", "path": "s"}],
            "configs": [{"name": "c", "path": "c"}],
        },
        "placement": {
            "regions": ["r"],
            "standby": [{"region": "q", "replicas": 1, "budget": "b"}],
            "expressions": [{"key": "k", "operator": "In", "values": ["v"]}],
            "tolerations": [{"key": "k"}],
            "topologySpread": [{"topologyKey": "zone"}],
            "affinity": [{"topologyKey": "zone", "labelSelector": {"a": "b"}}],
        },
        "disruption": {"minAvailable": 1},
        "rollout": {"maxSurge": 2},
    },
}


def _variants(value: Any, type_: inspect.Type) -> Iterator[tuple[str, Any]]:
    """The value with one optional field written as its default, as null, as empty, or left out; everywhere below as well."""
    match type_:
        case inspect.Metadata(type=inner):
            yield from _variants(value, inner)
        case inspect.UnionType(types=parts):
            for part in parts:
                yield from _variants(value, part)
        case inspect.VarTupleType(item_type=item_type) if isinstance(value, list):
            for index, item in enumerate(value):
                for name, variant in _variants(item, item_type):
                    yield f"[{index}]{name}", [*value[:index], variant, *value[index + 1 :]]
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            for field in fields:
                name = field.encode_name
                for part in (None, 0, "", [], {}, *_defaults(field)):
                    yield f".{name}={part}", {**value, name: part}
                yield f".{name} left out", {key: part for key, part in value.items() if key != name}
                for below, variant in _variants(value[name], field.type) if name in value else ():
                    yield f".{name}{below}", {**value, name: variant}


def _defaults(field: inspect.Field) -> list[Any]:
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    return [] if default is msgspec.NODEFAULT else [msgspec.to_builtins(default, enc_hook=enc_hook)]


def test_authority_accepts_every_workload_that_the_reader_accepts__also_with_defaults_written_out() -> None:
    """The mark of a validated workload relies on this: the authority sees an object, which does not keep written defaults."""
    accepted = 0
    mounts = [{"name": "s", "path": "/run/s"}]
    for rooted, other in (
        ({}, {}),
        ({"rootfs": {"directory": "/srv/root"}, "secrets": mounts}, {"placement": {"regions": ["r"]}, "gang": {"min": 2}}),
        ({}, {"type": "job", "rollout": None, "schedule": "@daily", "retries": 1}),
    ):
        spec = {**RICH_WORKLOAD["spec"], **other, "template": {**RICH_WORKLOAD["spec"]["template"], **rooted}}
        spec = {name: part for name, part in spec.items() if part is not None}
        for name, variant in _variants({**RICH_WORKLOAD, "spec": spec}, validation.struct_type_of("Workload")):
            body = msgspec.json.encode(variant)
            result = read(body, "body.json")
            obj = decode_manifest(body)
            assert obj is None or (result.objects, encode(result.objects[0])) == ((obj,), encode(obj)), name
            if not result.problems:
                accepted += 1
                assert _problems_without_cache(result.objects[0]) == (), name
    assert accepted > 150


HEAD = '"apiVersion":"remit/v1","kind":"Workload"'
META = '"metadata":{"name":"w","tenant":"t"}'
SPEC = '"spec":{"type":"job","template":{"command":["run"]}}'


@pytest.mark.parametrize(
    "text",
    [
        f"{{{HEAD},{META},{SPEC},{SPEC}}}",
        f"{{{HEAD},{META},{META},{SPEC}}}",
        f'{{{HEAD},"kind":"Workload",{META},{SPEC}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","type":"job","template":{{"command":["run"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["run"],"env":{{"A":"x","A":"\\u003a"}}}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["a\\u0000b"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["a\x7fb"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["\\ud800"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","replicas":1.0,"template":{{"command":["run"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","replicas":NaN,"template":{{"command":["run"]}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["run"],"resources":{{"cpu":{"1" * 33}}}}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["run"],"resources":{{"gpu":1}}}}}}}}',
        f'{{{HEAD},{META},"spec":{{"type":"job","template":{{"command":["run"],"resources":{{"cpu":"1Gi"}}}}}}}}',
        f'{{{HEAD},{META},"spec":{"[" * 100}{"]" * 100}}}',
        f'{{{HEAD},{META},"spec":{"{" * 5000}}}',
        f'{{{HEAD},{META},{SPEC},"status":{{}}}}',
        f'{{{HEAD},"metadata":{{"name":"w","tenant":"t","deleting":true}},{SPEC}}}',
        f'{{{HEAD},"metadata":{{"name":"w","tenant":"t","labels":{{"remit/x":"y"}}}},{SPEC}}}',
        f'{{{HEAD},"metadata":{{"name":"w"}},{SPEC}}}',
        f'{{"apiVersion":"remit/v1","kind":"Replica",{META},"spec":{{}}}}',
        f"\ufeff{{{HEAD},{META},{SPEC}}}",
        f"{{{HEAD},{META},{SPEC}}} {{}}",
    ],
)  # fmt: skip
def test_decoder_rejects_what_a_json_decoder_would_accept(text: str) -> None:
    body = text.encode(errors="surrogatepass")
    assert decode_manifest(body) is None
    assert _outcome(validate_manifest, body) == _outcome(bodies._read_with_positions, body)
    assert decode_manifest(f"{{{HEAD},{META},{SPEC}}}".encode()) is not None, "the unchanged form is valid"


@pytest.mark.parametrize("sign", ["\x7f", "\x85", "\u2028", "\ufeff"])
def test_control_character_is_refused_although_a_spec_with_its_escape_is_known(sign: str) -> None:
    escaped = msgspec.json.encode(_job(["run"])).replace(b"run", f"r\\u{ord(sign):04x}n".encode())
    for _ in range(2):
        workload = validate_manifest(escaped)
        assert isinstance(workload, Workload) and workload.spec.template.command == (f"r{sign}n",)
        with pytest.raises(ApiProblem):
            validate_manifest(msgspec.json.encode(_job([f"r{sign}n"])))


def _job(command: list[str]) -> dict[str, Any]:
    meta, spec = {"name": "a", "tenant": "t"}, {"type": "job", "template": {"command": command}}
    return {"apiVersion": "remit/v1", "kind": "Workload", "metadata": meta, "spec": spec}


def test_validated_mark_counts_for_one_object_and_one_validation() -> None:
    obj = decode(msgspec.json.encode(_job(["run"])))
    bad = msgspec.structs.replace(obj, metadata=msgspec.structs.replace(obj.metadata, name="Not A Name"))
    assert validate(bad)
    mark_validated(bad)
    assert validate(msgspec.structs.replace(bad)), "an equal object is not marked"
    assert validate(bad) == ()
    assert validate(bad), "a mark is used up"


def test_marks_and_known_specs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "VALIDATED_MAX", 8)
    for _ in range(50):
        validate_manifest(msgspec.json.encode(_job(["run"])))
        assert 1 <= len(validation._validated) <= 8
    long = _job(["x" * 4_000] * 3)
    assert decode_manifest(msgspec.json.encode(long)) is not None
    assert valid_specs.get(msgspec.json.encode(long["spec"])) is None
    validation._validated.clear()
    assert validate_manifest(msgspec.json.encode(_job(["x" * 4_000] * 5))).metadata.name == "a"
    assert not validation._validated, "objects of long bodies are not retained"


def test_valid_body_is_decoded_once(monkeypatch: Any) -> None:
    """The reader with positions and the strict parser are replaced by None, so that any use of them fails."""
    manifest = {"apiVersion": "remit/v1", "kind": "Workload", "metadata": {"name": "a", "tenant": "t"}, "spec": SPECS[0]}
    monkeypatch.setattr(bodies, "read", None)
    monkeypatch.setattr(bodies, "parse_strict_json", None)
    validate_manifest(msgspec.json.encode(manifest))
    obj = validate_manifest(msgspec.json.encode({**manifest, "metadata": {"name": "b", "tenant": "t", "labels": {"app": "x"}}}))
    assert obj.metadata.name == "b"
    assert len(validate_manifests(msgspec.json.encode([manifest, {**manifest, "metadata": {"name": "c", "tenant": "t"}}]))) == 2
