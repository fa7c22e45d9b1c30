"""Runs the commands of deploy/README.md word for word, on network namespaces as machines with a stub of systemd. No tests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
README = REPOSITORY / "deploy" / "README.md"
REMIT = str(Path(sys.executable).parent / "remit")
STUBS = """
set -eu -o pipefail
systemctl() { [ "$1" = enable ] || return 0; shift 2; printf '%s\\n' "$@" >> ROOT/enabled; }
chown() { :; }
scp() { to="${@: -1}"; cp "${@:1:$#-1}" "ALL/${to%%:*}/etc/"; }
"""


def blocks(section: str) -> list[str]:
    """The commands of a section, by its number."""
    found = re.search(rf"^## {section}\. .*?(?=^## )", README.read_text(), re.M | re.S)
    assert found, section
    return re.findall(r"^```sh\n(.*?)^```", found[0], re.M | re.S)


class Machine:
    """A machine of the README: `words` is the command prefix that runs on it, `root` has its /etc/remit and /var/lib/remit."""

    def __init__(self, name: str, prefix: list[str], root: Path, changes: dict[str, str]) -> None:
        self.name, self.prefix, self.root = name, prefix, root / name
        self._changes = {
            **changes,
            "/etc/remit": f"{self.root}/etc",
            "/var/lib/remit": f"{self.root}/var",
            "/etc/systemd/system": f"{self.root}/system",
            "/opt/remit/bin/remit": REMIT,
        }
        self._all = root
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for place in ("etc", "var", "system"):
            (self.root / place).mkdir(parents=True)

    def run_block(self, block: str) -> str:
        """Run the block with paths replaced, then start the units it enabled; return its output."""
        script = self._with_paths(STUBS.replace("ROOT", str(self.root)).replace("ALL", str(self._all)) + block)
        env = {**os.environ, "REMIT_CONFIG": str(self.root / "config"), "NO_COLOR": "1"}
        done = subprocess.run(
            [*self.prefix, "bash", "-c", script],
            cwd=self._place(),
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr, self.logs())
        enabled = self.root / "enabled"
        for unit in enabled.read_text().split() if enabled.exists() else ():
            self.start(unit)
        enabled.unlink(missing_ok=True)
        return done.stdout

    def start(self, unit: str) -> None:
        """Start a unit like systemd: its environment, that of its file before its own, and its command."""
        text = self._with_paths((self.root / "system" / f"{unit}.service").read_text())
        env = dict(os.environ)
        for line in re.findall(r"^Environment=(.*)$", text, re.M):
            env |= dict(one.split("=", 1) for one in line.split())
        for file in re.findall(r"^EnvironmentFile=-(.*)$", text, re.M):
            env |= dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
        command = re.findall(r"^ExecStart=(.*)$", text, re.M)[0]
        argv = [argument for part in shlex.split(command) for argument in _expanded(part, env)]
        with (self.root / f"{unit}.log").open("ab") as out:
            self.running[unit] = subprocess.Popen([*self.prefix, *argv], env=env, stdout=out, stderr=out)

    def logs(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.root.glob("*.log")))

    def end(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(20)
        if "remit-agent" in self.running:
            prefix = [*self.prefix, REMIT, "keeper", "--end", "--data", str(self.root / "var" / "agent")]
            subprocess.run(prefix, capture_output=True, check=False)

    def _with_paths(self, text: str) -> str:
        for old, new in self._changes.items():
            text = text.replace(old, new)
        return text

    def _place(self) -> Path:
        """The directory in which commands are typed: a checkout, where files may be left."""
        place = self.root / "checkout"
        if not place.exists():
            place.mkdir()
            (place / "deploy").symlink_to(REPOSITORY / "deploy")
        return place


def _expanded(argument: str, env: dict[str, str]) -> list[str]:
    """`$NAME` expands to words, `${NAME}` to one word."""
    if re.fullmatch(r"\$[A-Z_]+", argument):
        return env.get(argument[1:], "").split()
    return [re.sub(r"\$\{([A-Z_]+)\}", lambda found: env.get(found[1], ""), argument)]
