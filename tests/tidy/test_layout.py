"""The source layout: small folders, one subject per module, names a reader can search for, no import cycles."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tests.tidy.source_tree import TESTS, Module, dotted, modules, modules_below

FILES_MAX = 18
MODULE_LINES_MAX = 800
LENGTH_NOTE = "Length: "
"""A module past the limit says in its docstring, after this word, why it is one module."""

GERUNDS_MAX = 20
FIELD_GERUNDS = {"accounting", "binding", "fencing", "packing", "routing", "scheduling", "settings", "sharding", "timing"}

REPEATED = {
    "Standby": "replicas in another region (in the manifest), and the endpoint of a server that does not lead",
}
"""Class names with two meanings, with the reason. Any other name is defined once."""

TERMS_MIN = 58
TERMS = (
    *("admission", "affinity", "agent", "allocation", "API", "artifact", "audit log", "authorization", "backoff", "backup"),
    *("batch", "benchmark", "cgroup", "certificate", "checker", "condition", "controller", "deduplication|idempotency"),
    *("disruption", "drain", "dry run", "election|standby", "endpoint", "enrollment", "epoch", "event loop", "eviction"),
    *("exec session", "explain|explanation", "fair queu", "fencing|fence", "garbage collection", "gang", "health", "heartbeat"),
    *("informer|reflector", "invariant", "lease", "ledger", "lifecycle", "metrics", "OpenAPI", "placement", "preemption"),
    *("priority", "probe", "quota", "rate limit", "reconcil", "redact", "repair", "replica", "retry", "rollout", "sandbox"),
    *("scheduler", "secret", "selector", "snapshot", "taint", "topology", "watch cache", "work queue"),
)
"""Terms an engineer of the field searches for. Each should be found in a file name or the first line of a module."""


def planted(path: str, text: str) -> Module:
    return Module(f"src/remit/{path}", text, ast.parse(text))


def first_line(module: Module) -> str:
    return (ast.get_docstring(module.tree) or "").split("\n")[0].strip()


def stem(module: Module) -> str:
    return module.path.rsplit("/", 1)[1].removesuffix(".py")


def crowded(paths: Iterable[str]) -> dict[str, int]:
    counts = Counter(path.rsplit("/", 1)[0] for path in paths)
    return {folder: count for folder, count in counts.items() if count > FILES_MAX}


def test_no_folder_has_more_files_than_a_reader_can_scan() -> None:
    found = crowded(module.path for module in (*modules(), *modules_below(TESTS)))
    assert not found, f"split by subject: {found}"


def test_folder_with_one_file_too_many_is_crowded() -> None:
    full = [f"tests/unit/law/test_{i}.py" for i in range(FILES_MAX)]
    assert crowded([*full, "tests/unit/law/more/test_a.py"]) == {}
    assert crowded([*full, "tests/unit/law/test_more.py"]) == {"tests/unit/law": FILES_MAX + 1}


def test_long_module_says_why_it_is_one_module() -> None:
    silent = [
        f"{module.path}: {len(module.text.splitlines())} lines"
        for module in modules()
        if len(module.text.splitlines()) > MODULE_LINES_MAX and LENGTH_NOTE not in (ast.get_docstring(module.tree) or "")
    ]
    assert not silent, f"split, or explain in the docstring after {LENGTH_NOTE!r}: {silent}"


def test_first_docstring_line_is_a_statement() -> None:
    wrong = [
        f"{module.path}: {first_line(module)!r}"
        for module in modules()
        if not first_line(module).endswith(".") or "?" in first_line(module) or first_line(module)[:1].islower()
    ]
    assert not wrong, "the first line says in one sentence what the module does:\n" + "\n".join(wrong)


def test_modules_are_named_by_nouns() -> None:
    gerunds = [module.path for module in modules() if stem(module).endswith("ing") and stem(module) not in FIELD_GERUNDS]
    assert len(gerunds) <= GERUNDS_MAX, gerunds


def repeated_classes(searched: Iterable[Module]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in searched:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.path)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def test_class_names_are_defined_once() -> None:
    repeated = repeated_classes(modules())
    several = {name: found for name, found in repeated.items() if name not in REPEATED}
    assert not several, f"class names with several meanings: {several}"
    assert not REPEATED.keys() - repeated.keys(), "an exception that is no longer needed"


def test_repeated_class_name_is_found() -> None:
    found = repeated_classes([planted("a.py", "class Lease: ..."), planted("b.py", "class Lease: ...\nclass Term: ...")])
    assert found == {"Lease": ["src/remit/a.py", "src/remit/b.py"]}


def test_terms_of_the_field_find_the_code() -> None:
    text = "\n".join(f"{module.path.replace('_', ' ')} {first_line(module)}" for module in modules())
    missing = [term for term in TERMS if not re.search(term, text, re.IGNORECASE)]
    assert len(TERMS) - len(missing) >= TERMS_MIN, f"no file name and no first line has: {missing}"


def imports(module: Module, known: set[str]) -> Iterator[str]:
    """Modules and packages whose contents this one needs when it is loaded.

    Imports inside functions and for type checking are left out. `from a import b` needs the submodule `a.b` if there is one,
    otherwise the package `a` itself. The package of an imported submodule is no edge: it may be loaded halfway.
    """
    todo: list[ast.AST] = [module.tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        ):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from {full if (full := f"{node.module}.{name.name}") in known else node.module for name in node.names} & known
        elif isinstance(node, ast.Import):
            yield from {name.name for name in node.names} & known
        todo.extend(ast.iter_child_nodes(node))


def import_graph(searched: Iterable[Module]) -> dict[str, set[str]]:
    by_name = {dotted(module): module for module in searched}
    return {name: set(imports(module, set(by_name))) for name, module in by_name.items()}


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that are left when those that import none of the rest, or are imported by none, are removed again and again."""
    left = {name: set(found) - {name} for name, found in graph.items()}
    while True:
        imported = set().union(*left.values())
        kept = {name: found & left.keys() for name, found in left.items() if name in imported and found & left.keys()}
        if kept == left:
            return sorted(left)
        left = kept


def test_modules_import_each_other_without_cycles() -> None:
    found = cycles(import_graph(modules()))
    assert not found, f"import cycles among {found}"


def test_cycle_finder_finds_a_cycle() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_cycle_through_package_is_found() -> None:
    package = planted("kinds/__init__.py", "from remit.kinds.node import Node\nfrom remit.kinds.taint import Taint")
    node = planted("kinds/node.py", "class Node: ...")
    by_submodule = planted("kinds/taint.py", "from remit.kinds import node\nimport remit.kinds.node")
    by_package = planted("kinds/taint.py", "from remit.kinds import Node")
    assert cycles(import_graph([package, node, by_submodule])) == []
    assert cycles(import_graph([package, node, by_package])) == ["remit.kinds", "remit.kinds.taint"]


NOT_SMOKED = {
    "cli/test_up_tls.py": "30 s: two tenants over TLS; serve/test_tls.py is smoked",
    "demo/test_live.py": "24 s: `make demo` itself; demo/test_race.py is smoked",
    "serve/test_flood.py": "15 s of load",
    "serve/test_multi_machine_enrollment.py": "90 s: three network namespaces; agent/test_credentials.py is smoked",
}


def test_every_capability_with_real_parts_has_a_smoke_test() -> None:
    folder = TESTS / "integration"
    unmarked = [
        name
        for file in sorted(folder.rglob("test_*.py"))
        if (name := file.relative_to(folder).as_posix()) not in NOT_SMOKED and "pytest.mark.smoke" not in file.read_text()
    ]
    assert not unmarked, f"`make test` runs nothing of these; mark one test of each as smoke: {unmarked}"
