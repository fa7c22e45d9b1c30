"""Every test asserts something: a test that only runs code passes whatever the code returns."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

import pytest

from tests.tidy.source_tree import TESTS, dotted, modules_below

Reference = tuple[str, str]
"""A module below tests/ and the name of a function, a class or a list of functions in it."""

RAISING = ("fail", "raises", "warns")
BUILTINS = frozenset(dir(builtins))


class Definitions:
    """Functions, classes and lists of functions in test modules, the names that each uses, and those that assert themselves."""

    def __init__(self) -> None:
        self.uses: dict[Reference, set[Reference]] = {}
        self.asserting: set[Reference] = set()

    def add(self, module: str, tree: ast.Module) -> None:
        names = {
            imported.asname or imported.name: (node.module, imported.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for imported in node.names
        }
        definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        lists = dict(lists_of_names(tree))
        names |= {name: (module, name) for name in (*(node.name for node in definitions), *lists)}
        for name, listed in lists.items():
            self.uses[module, name] = {names[item] for item in listed if item in names}
        for definition in definitions:
            uses = self.uses.setdefault((module, definition.name), set())
            for node in ast.walk(definition):
                if asserts(node):
                    self.asserting.add((module, definition.name))
                elif isinstance(node, ast.Name) and node.id in names:
                    uses.add(names[node.id])
                elif isinstance(node, ast.arg) and node.arg in names:
                    uses.add(names[node.arg])  # a fixture

    def without_assertion(self) -> Iterator[Reference]:
        """Yield tests that neither assert nor use, directly or indirectly, something below tests/ that does."""
        found, before = set(self.asserting), -1
        while len(found) != before:
            before = len(found)
            found |= {name for name, uses in self.uses.items() if uses & found}
        yield from sorted(name for name in self.uses.keys() - found if is_test_module(name[0]) and is_collected(name[1]))


def is_test_module(module: str) -> bool:
    last = module.rsplit(".", 1)[-1]
    return last.startswith("test_") or last.endswith("_test")


def is_collected(name: str) -> bool:
    """Whether pytest runs what has this name in a test module."""
    return name.startswith(("test", "Test"))


def lists_of_names(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Module-level tuples and lists of names, such as the functions of a contract, and `TestX = Machine.TestCase`."""
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(name)], value=ast.Tuple(elts) | ast.List(elts))
                | ast.AnnAssign(target=ast.Name(name), value=ast.Tuple(elts) | ast.List(elts))
            ):
                yield name, [item.id for item in elts if isinstance(item, ast.Name)]
            case ast.Assign(targets=[ast.Name(name)], value=ast.Attribute(value=ast.Name(machine), attr="TestCase")):
                yield name, [machine]


def asserts(node: ast.AST) -> bool:
    """Whether the node is an `assert`, `raise AssertionError`, or pytest's `raises`, `warns` or `fail`."""
    match node:
        case ast.Assert(test=test):
            return not is_constant(test)
        case ast.Raise(exc=ast.Call(func=ast.Name("AssertionError"))):
            return True
        case ast.Attribute(value=ast.Name("pytest"), attr=attr):
            return attr in RAISING
        case _:
            return False


def is_constant(test: ast.expr) -> bool:
    """Whether the value of an assertion is known without running any code: it consists of literals and names of builtins."""
    if isinstance(test, ast.Tuple):
        return bool(test.elts)  # a tuple with items is always true
    nodes = list(ast.walk(test))
    return not any(
        isinstance(node, ast.Call | ast.Await) or (isinstance(node, ast.Name) and node.id not in BUILTINS) for node in nodes
    )


def hidden_tests(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what pytest runs in a test module, and the search above does not see.

    These are methods of test classes, definitions below a module-level `if`, `try`, `with` or loop, and tests that are assigned
    or imported. The class that Hypothesis makes of a state machine is seen: `TestX = Machine.TestCase`.
    """
    seen = {name for name, _ in lists_of_names(tree)}
    todo: list[tuple[ast.AST, bool]] = [(node, True) for node in tree.body]
    while todo:
        node, at_top = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not at_top and is_collected(node.name):
                yield node.lineno, node.name
        elif isinstance(node, ast.ClassDef):
            if is_collected(node.name) or any(ast.unparse(base).endswith("TestCase") for base in node.bases):
                yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [name.asname or name.name for name in node.names]
            yield from ((node.lineno, name) for name in names if is_collected(name))
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and is_collected(node.id) and not (at_top and node.id in seen):
                yield node.lineno, node.id
        elif not isinstance(node, ast.expr) or isinstance(node, ast.Tuple | ast.List | ast.Starred | ast.NamedExpr):
            stays = at_top and isinstance(node, ast.Assign | ast.AnnAssign)
            todo.extend((child, stays) for child in ast.iter_child_nodes(node))


def without_assertion(sources: Iterable[tuple[str, ast.Module]]) -> list[Reference]:
    definitions = Definitions()
    for module, tree in sources:
        definitions.add(module, tree)
    return list(definitions.without_assertion())


def test_every_test_asserts_something() -> None:
    found = without_assertion((dotted(module), module.tree) for module in modules_below(TESTS))
    assert not found, f"assert what the test is for: {found}"


def test_every_test_is_a_function_at_module_level() -> None:
    found = [
        f"{module.path}:{line}: {name}"
        for module in modules_below(TESTS)
        if is_test_module(dotted(module))
        for line, name in hidden_tests(module.tree)
    ]
    assert not found, "make it a function at module level, where its assertions are checked:\n" + "\n".join(found)


HELPERS = """
def compare(a, b):
    assert a == b
def show(a):
    print(a)
class Machine:
    def invariant(self):
        assert self.sound
CONTRACT = (compare, show)
"""
TESTS_PLANTED = """
from tests.a import CONTRACT, Machine, compare, show
def check(a):
    compare(a, 1)
def test_direct(a):
    assert a
def test_by_helper():
    check(1)
def test_raising():
    with pytest.raises(ValueError):
        int('x')
@pytest.mark.parametrize("promise", CONTRACT)
def test_by_list(promise):
    promise(1, 1)
TestMachine = Machine.TestCase
def test_nothing():
    show(1)
def test_constant():
    assert 1
def test_text():
    assert "it works"
def test_builtin():
    assert int
def test_constants_compared():
    assert not 0 and 1 == 1
def test_tuple(a):
    assert (a, "why")
"""


def test_search_follows_helpers_and_finds_tests_without_assertion() -> None:
    found = without_assertion([("tests.a", ast.parse(HELPERS)), ("tests.test_b", ast.parse(TESTS_PLANTED))])
    assert {name for _, name in found} == {
        *("test_nothing", "test_constant", "test_text", "test_builtin", "test_constants_compared", "test_tuple"),
    }


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class TestFit:\n    def test_fits(self): ...", ["TestFit"]),
        ("class Fit(unittest.TestCase):\n    def test_fits(self): ...", ["Fit"]),
        ("if LINUX:\n    def test_fits(): ...", ["test_fits"]),
        ("try:\n    import x\nexcept ImportError:\n    async def test_fits(): ...", ["test_fits"]),
        ("with patched():\n    class TestFit: ...", ["TestFit"]),
        ("for size in (1, 2):\n    def test_fits(): ...", ["test_fits"]),
        ("test_fits = partial(check, 1)", ["test_fits"]),
        ("test_a, test_b = make(1), make(2)", ["test_a", "test_b"]),
        ("if LINUX:\n    TestFit = Machine.TestCase", ["TestFit"]),
        ("from tests.a import check as test_fits", ["test_fits"]),
        ("TestFit = Machine.TestCase", []),
        ("def test_fits():\n    async def test(): ...\n    return test", []),
        ("class Bench:\n    def test(self): ...", []),
    ],
)
def test_test_outside_of_module_level_is_found(text: str, names: list[str]) -> None:
    assert sorted(name for _, name in hidden_tests(ast.parse(text))) == names
