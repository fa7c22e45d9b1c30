"""Tests marked `mounts` run as root, or again inside a user namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
INSIDE = "REMIT_TESTS_IN_NAMESPACE"
CURE = (
    f"this test mounts a small or read-only disk, for which it needs root or `{' '.join(NAMESPACE)}`, and that failed here: "
    "run the tests as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces "
    "above 0, kernel.apparmor_restrict_unprivileged_userns=0)"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mounts: mounts a disk; run again inside a namespace by whoever is not root")


def may_mount() -> bool:
    """Not only a matter of the user: root in a container often may not mount."""
    return INSIDE in os.environ or (os.geteuid() == 0 and not failure("unshare", "--mount", "true"))


def failure(*command: str, **environment: str) -> str:
    """The output of a failed command; empty if it succeeded."""
    env = {**os.environ, **environment}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return (done.stdout + done.stderr).strip() or f"exit code {done.returncode}" if done.returncode else ""


@pytest.fixture(scope="session", autouse=True)
def reachable_scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make temporary directories reachable like a data directory's parents: agents of root run work as another user."""
    base = tmp_path_factory.getbasetemp()
    for place in (base, base.parent):
        if place.stat().st_uid == os.geteuid():
            place.chmod(0o711)
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("mounts") is None or may_mount():
        return None
    scratch = pyfuncitem.funcargs["tmp_path"]
    assert isinstance(scratch, Path)
    run_in_namespace(pyfuncitem.nodeid, scratch / "again")
    return True


def run_in_namespace(test: str, scratch: Path) -> None:
    """Run the test in another pytest, as root of a namespace, with our scratch directory: /tmp/pytest-of-root is not ours."""
    if why := failure(*NAMESPACE, "true"):
        pytest.fail(f"{CURE}: {why}", pytrace=False)
    again = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={scratch}", test)
    if why := failure(*NAMESPACE, *again, **{INSIDE: "1"}):
        pytest.fail(f"inside `{' '.join(NAMESPACE)}`:\n{why}", pytrace=False)
