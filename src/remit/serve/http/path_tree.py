"""Finds the route of a path. A tree of path parts, so a lookup costs the same however many routes there are.

A path is matched as it was sent and each part is decoded by itself: a name may contain a slash, written as %2F. `..` and empty
parts have no special meaning (docs/decisions/0006-own-routing.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from remit.serve.http.routes import Route


class PathTree:
    """A node of the tree: routes by method, children by literal path part, and at most one child for a path variable."""

    __slots__ = ("children", "routes", "variable")

    def __init__(self) -> None:
        self.children: dict[str, PathTree] = {}
        self.variable: PathTree | None = None
        self.routes: dict[str, Route] = {}

    def add(self, route: Route) -> None:
        node = self
        for part in route.path.split("/")[1:]:
            if part.startswith("{"):
                node.variable = node.variable or PathTree()
                node = node.variable
            else:
                node = node.children.setdefault(part, PathTree())
        if node.routes.setdefault(route.method, route) is not route:
            raise ValueError(f"two routes for {route.method} {route.path}")

    def find(self, path: str) -> tuple[PathTree, tuple[str, ...]] | None:
        """Return the node of a path as it was sent, and the values of its variables; None if no route has this path."""
        parts = path.split("/")[1:]
        return self._find([unquote(part) for part in parts] if "%" in path else parts, ())

    def _find(self, parts: Sequence[str], values: tuple[str, ...]) -> tuple[PathTree, tuple[str, ...]] | None:
        """A literal part wins over a variable; if it leads to no route, the variable is tried. A variable is never empty."""
        node = self
        for index, part in enumerate(parts):
            literal, variable = node.children.get(part), node.variable
            if variable is None or not part:
                if literal is None:
                    return None
                node = literal
            elif literal is None:
                node, values = variable, (*values, part)
            else:
                return literal._find(parts[index + 1 :], values) or variable._find(parts[index + 1 :], (*values, part))
        return (node, values) if node.routes else None
