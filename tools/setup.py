"""Creates or updates .venv with the versions of constraints.txt; does nothing if it is up to date. Needs no packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".remit-setup"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON_MIN = (3, 11)


def environment_key() -> str:
    """A digest of all that decides what is installed; the stamp of a finished setup holds the same."""
    digest = hashlib.sha256(f"{sys.version} {VENV}".encode())
    for source in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def run(*command: str | Path, quiet: bool = False) -> bool:
    """Whether the command succeeded. A quiet one is a first try that has a second."""
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(part) for part in command], cwd=ROOT, stdout=output, stderr=output, check=False).returncode == 0


def same_python() -> bool:
    """Whether .venv exists and runs the interpreter version that runs this script."""
    ask = [str(PYTHON), "-c", "import sys; print(sys.version)"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() == sys.version
    except (OSError, subprocess.CalledProcessError):
        return False


def install() -> bool:
    """uv where it can be had, for speed; pip, which can do the same, where it cannot."""
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", CONSTRAINTS)
    if (VENV / "bin" / "uv").exists() or run(*pip, "uv", quiet=True):
        uv = (VENV / "bin" / "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", PYTHON, "-c", CONSTRAINTS)
        if run(*uv, "--build-constraints", CONSTRAINTS, "-e", ".", "--group", "dev"):
            return True
        print("setup: uv failed, trying pip", file=sys.stderr)
    # The pip that comes with an interpreter may be too old for dependency groups.
    return run(*pip, "--upgrade", "pip") and run(*pip, "-e", ".", "--group", "dev")


def guide() -> None:
    """What `make soak` lets look for ways through the decoders. Where it cannot be had, bytes are changed without a guide."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('atheris') is None)"
    if not run(PYTHON, "-c", ask):
        install = (VENV / "bin" / "uv", "pip", "install", "--quiet", "--only-binary", "atheris", "--python", PYTHON)
        if not run(*install, "-c", CONSTRAINTS, "--group", "fuzz"):
            print("setup: atheris cannot be had here; decoders are fuzzed without a guide", file=sys.stderr)


def main() -> int:
    if sys.version_info < PYTHON_MIN:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"setup: Remit needs Python 3.11 or newer, this is {found}; try make setup PYTHON=python3.11", file=sys.stderr)
        return 1
    key = environment_key()
    if STAMP.exists() and STAMP.read_text() == key and PYTHON.exists():
        return 0
    # A stamp is only ever that of a finished setup: one that is interrupted is done again.
    STAMP.unlink(missing_ok=True)
    if not same_python():
        print(f"setup: making {VENV.name}", file=sys.stderr)
        if not run(sys.executable, "-m", "venv", "--clear", VENV):
            print("setup: no virtual environment could be made; on Debian: apt-get install python3-venv", file=sys.stderr)
            return 1
    print("setup: installing what constraints.txt names", file=sys.stderr)
    # Another environment that happens to be active must not be the one that is changed.
    os.environ.pop("VIRTUAL_ENV", None)
    if not install():
        print("setup: the installation failed; see above", file=sys.stderr)
        return 1
    STAMP.write_text(key)
    return 0


if __name__ == "__main__":
    code = main()
    if code == 0 and sys.argv[1:] == ["soak"]:
        guide()
    sys.exit(code)
