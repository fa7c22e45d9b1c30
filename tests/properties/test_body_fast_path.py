"""Is what is read quickly the same as what is read whole? Bodies plain and odd: the same object, or refusal, both ways."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from remit.model.kinds import Workload
from remit.model.manifests.validation import validate
from remit.model.objects import encode
from remit.serve.http import bodies
from remit.serve.http.bodies import validate_manifest, validate_manifests
from remit.serve.http.replies import ApiProblem
from tests.properties.effort import tries

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
    """A manifest as somebody may write it: in any order, with or without spaces, with keys twice or missing or unknown."""
    meta: list[tuple[str, Any]] = [("name", draw(NAMES)), ("tenant", draw(st.sampled_from(["t", "acme", "", "T"])))]
    if draw(st.booleans()):
        meta.append(("labels", draw(st.dictionaries(KEYS, VALUES, max_size=3))))
    if draw(st.integers(0, 4)) == 0:
        meta.append(draw(st.sampled_from([("annotations", {"a": "b"}), ("generation", 3), ("deleting", True), ("nmae", "x")])))
    members = [
        ("apiVersion", draw(st.sampled_from(["remit/v1", "remit/v1", "remit/v1", "v1"]))),
        ("kind", draw(st.sampled_from(["Workload", "Workload", "Workload", "Config", "Wrokload"]))),
        ("metadata", Pairs(draw(doubled(meta)))),
        ("spec", draw(st.sampled_from(SPECS))),
    ]
    if draw(st.integers(0, 6)) == 0:
        members.append(("status", {}))
    members = draw(doubled(draw(st.permutations(members))))
    written = _written(members, draw(st.sampled_from([(",", ":"), (", ", ": "), (",\n ", " : ")])))
    return draw(st.sampled_from(["", "", " ", "\n"])) + written + draw(st.sampled_from(["", "", "\n", " x", "{}"]))


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may stand twice."""


def doubled(members: list[tuple[str, Any]]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Mostly as they are; sometimes one of them twice, or one less."""
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
    """Also as bytes: an operation's digest is taken over them, and a retry may be read the other way."""
    try:
        found = read(body)
    except ApiProblem as failure:
        return msgspec.json.encode(failure.document)
    return found, [encode(thing) for thing in (found if isinstance(found, tuple) else (found,))]


@tries(400, 20_000)
@given(st.lists(texts(), min_size=1, max_size=3))
def test_a_body_is_read_quickly_as_it_is_read_whole(written: list[str]) -> None:
    for text in (*written, *written):  # the second time a spec may be known
        body = text.encode()
        assert _outcome(validate_manifest, body) == _outcome(bodies._read_with_positions, body)


@tries(200, 10_000)
@given(st.lists(texts(), min_size=0, max_size=4), st.sampled_from([",", ", "]))
def test_many_are_read_quickly_as_they_are_read_whole(written: list[str], between: str) -> None:
    body = ("[" + between.join(written) + "]").encode()
    for _ in range(2):
        assert _outcome(validate_manifests, body) == _outcome(_all_whole, body)


def _all_whole(body: bytes) -> Any:
    """As if nothing were ever plain."""
    with (
        patch.object(bodies, "decode_manifest", lambda body: None),
        patch.object(bodies, "split_array", lambda body, most: []),
    ):
        return validate_manifests(body)


@tries(200, 5_000)
@given(st.lists(texts(), min_size=1, max_size=3))
def test_what_the_judge_knows_is_what_it_would_find(written: list[str]) -> None:
    """By value: also of an object that came by another way than a manifest."""
    for text in written:
        try:
            thing = msgspec.json.decode(text, type=Workload, dec_hook=_amounts)
        except (msgspec.DecodeError, ValueError):
            continue
        first = validate(thing)
        assert validate(thing) == first
        again = msgspec.structs.replace(thing, metadata=msgspec.structs.replace(thing.metadata, name="another"))
        named = {problem.description for problem in validate(again)}
        assert {problem.description for problem in first if "metadata.name" not in problem.description} <= named


def _amounts(type_: type, value: object) -> object:
    from remit.model.objects import dec_hook

    return dec_hook(type_, value)


def test_a_flood_of_one_shape_is_read_quickly(monkeypatch: Any) -> None:
    """And not by accident read whole each time."""
    manifest = {"apiVersion": "remit/v1", "kind": "Workload", "metadata": {"name": "a", "tenant": "t"}, "spec": SPECS[0]}
    validate_manifest(msgspec.json.encode(manifest))
    monkeypatch.setattr(bodies, "read", None)
    thing = validate_manifest(
        msgspec.json.encode({**manifest, "metadata": {"name": "b", "tenant": "t", "labels": {"app": "x"}}})
    )
    assert thing.metadata.name == "b"
    assert len(validate_manifests(msgspec.json.encode([manifest, {**manifest, "metadata": {"name": "c", "tenant": "t"}}]))) == 2
