"""serve/http/path_tree.py and request_checks.read_query: what a hostile path or query can reach."""

from __future__ import annotations

import pytest

from remit.serve.http.path_tree import PathTree
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_checks import QUERY_BYTES_MAX, QUERY_FIELDS_MAX, QueryFields, read_query
from remit.serve.http.route_table import ROUTES
from remit.serve.http.routes import Parameter, Route

TREE = PathTree()
for _route in ROUTES:
    TREE.add(_route)

FIELDS = QueryFields((Parameter("limit", int, "a number", default=7), Parameter("name", str, "a name", default="")))


def found(path: str) -> tuple[str, tuple[str, ...]] | None:
    match = TREE.find(path)
    return None if match is None else (match[0].routes["GET"].path, match[1])


def test_every_route__found_by_its_own_path() -> None:
    for route in ROUTES:
        match = TREE.find(route.path)  # a variable's name in braces is a value like any other
        assert match is not None and match[0].routes[route.method] is route, route.path


@pytest.mark.parametrize(
    ("path", "variables"),
    [
        ("/v1/tenants/a%2Fb/workloads/x", ("a/b", "x")),
        ("/v1/tenants/..%2F..%2Fnodes/workloads/x", ("../../nodes", "x")),
        ("/v1/tenants/../workloads/x", ("..", "x")),
        ("/v1/tenants/%2e%2e/workloads/%00", ("..", "\0")),
        ("/v1/tenants/a%252Fb/workloads/x", ("a%2Fb", "x")),
        ("/v1/tenants/a;b=c/workloads/x", ("a;b=c", "x")),
        ("/v1/tenants/workloads/workloads/workloads", ("workloads", "workloads")),
    ],
)
def test_escapes_and_dots__stay_inside_the_part_in_which_they_were_sent(path: str, variables: tuple[str, ...]) -> None:
    assert found(path) == ("/v1/tenants/{tenant}/workloads/{name}", variables)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/tenants//workloads/x", "/v1/tenants/a/workloads/", "//v1/nodes", "/v1/nodes/", "/v1%2Fnodes", "/v1/./nodes",
        "/v1/x/../nodes", "", "*", "v1/nodes", "/V1/nodes", "/v1/nodes%20", "http://127.0.0.1/v1/nodes",
    ],
)  # fmt: skip
def test_path_that_only_resembles_a_route__not_found(path: str) -> None:
    assert found(path) is None


def test_same_method_twice_at_one_path__refused() -> None:
    tree, route = PathTree(), ROUTES[0]
    tree.add(route)
    with pytest.raises(ValueError, match="two routes"):
        tree.add(Route(route.method, route.path, "another", "another", route.handler))


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        (b"limit=1&limit=1", "given twice"),
        (b"limit=1&li%6Dit=1", "given twice"),
        (b"Limit=1", "unknown query parameter"),
        (b"limit=1;name=x", "invalid value"),
        (b"limit=1%00", "invalid value"),
        (b"limit=1.5", "invalid value"),
        (b"limit", "invalid value"),
        (b"name=%ff", "malformed"),
        (b"name=\xff", "malformed"),
        (b"&".join([b"name=x"] * (QUERY_FIELDS_MAX + 1)), "malformed"),
        (b"name=" + b"x" * QUERY_BYTES_MAX, "longer than"),
    ],
)
def test_ambiguous_unknown_or_oversized_query__refused(query: bytes, detail: str) -> None:
    with pytest.raises(ApiProblem, match=detail):
        read_query(query, FIELDS)


def test_omitted_parameters__have_their_defaults() -> None:
    assert read_query(b"", FIELDS) == {"limit": 7, "name": ""}
    assert read_query(b"name=a%2Bb+c", FIELDS) == {"limit": 7, "name": "a+b c"}
