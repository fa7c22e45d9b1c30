"""Which words does bubblewrap get? What they do is tried in tests/integration/world."""

from __future__ import annotations

from pathlib import Path

from remit.world.promises import Order
from remit.world.sandbox import sandboxed

ALWAYS = (
    *("/usr/bin/bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
    *("--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"),
)


def words(order: Order) -> tuple[str, ...]:
    return sandboxed(order, "/usr/bin/bwrap")


def test_the_program_comes_last_and_its_words_are_not_bubblewraps() -> None:
    assert words(Order(("sh", "--bind", "x"))) == (*ALWAYS, "--", "sh", "--bind", "x")


def test_it_ends_with_its_parent_only_if_ordered() -> None:
    assert words(Order(("a",), with_parent=True)) == (*ALWAYS, "--die-with-parent", "--", "a")


def test_outer_places_come_before_inner_ones_which_they_would_cover() -> None:
    found = words(Order(("a",), writable=(Path("/srv/x/y"), Path("/srv/x"))))
    assert found == (*ALWAYS, "--bind", "/srv/x", "/srv/x", "--bind", "/srv/x/y", "/srv/x/y", "--", "a")


def test_a_directory_that_the_sandbox_covers_is_shown_again_to_read() -> None:
    seen = Order(("a",), directory=Path("/srv/x"))
    assert words(seen) == (*ALWAYS, "--chdir", "/srv/x", "--", "a")
    covered = Order(("a",), directory=Path("/tmp/x/y"))
    assert words(covered) == (*ALWAYS, "--ro-bind", "/tmp/x/y", "/tmp/x/y", "--chdir", "/tmp/x/y", "--", "a")
    writable = covered._replace(writable=(Path("/tmp/x"),))
    assert words(writable) == (*ALWAYS, "--bind", "/tmp/x", "/tmp/x", "--chdir", "/tmp/x/y", "--", "a")
