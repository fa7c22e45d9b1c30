"""The commands of deploy/README.md, word for word, on machines that are namespaces: systemd is played. No test is in here."""

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
PLAYED = """
set -eu -o pipefail
systemctl() { [ "$1" = enable ] || return 0; shift 2; printf '%s\\n' "$@" >> ROOT/enabled; }
chown() { :; }
scp() { to="${@: -1}"; cp "${@:1:$#-1}" "ALL/${to%%:*}/etc/"; }
"""


def blocks(section: str) -> list[str]:
    """What is to be typed in a section, by its number."""
    found = re.search(rf"^## {section}\. .*?(?=^## )", README.read_text(), re.M | re.S)
    assert found, section
    return re.findall(r"^```sh\n(.*?)^```", found[0], re.M | re.S)


class Machine:
    """One of those in the README: `words` put a command there, `root` has its /etc/remit and /var/lib/remit."""

    def __init__(self, name: str, words: list[str], root: Path, changes: dict[str, str]) -> None:
        self.name, self.words, self.root = name, words, root / name
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

    def type(self, block: str) -> str:
        """As it stands there, but for where things are; then what it has enabled is started. What it said."""
        words = self._here(PLAYED.replace("ROOT", str(self.root)).replace("ALL", str(self._all)) + block)
        env = {**os.environ, "REMIT_CONFIG": str(self.root / "config"), "NO_COLOR": "1"}
        done = subprocess.run(
            [*self.words, "bash", "-c", words],
            cwd=self._place(),
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr, self.said())
        enabled = self.root / "enabled"
        for unit in enabled.read_text().split() if enabled.exists() else ():
            self.start(unit)
        enabled.unlink(missing_ok=True)
        return done.stdout

    def start(self, unit: str) -> None:
        """As systemd would: its settings, those of its file before its own, and its one command."""
        text = self._here((self.root / "system" / f"{unit}.service").read_text())
        env = dict(os.environ)
        for line in re.findall(r"^Environment=(.*)$", text, re.M):
            env |= dict(one.split("=", 1) for one in line.split())
        for file in re.findall(r"^EnvironmentFile=-(.*)$", text, re.M):
            env |= dict(line.split("=", 1) for line in Path(file).read_text().splitlines())
        command = re.findall(r"^ExecStart=(.*)$", text, re.M)[0]
        argv = [word for part in shlex.split(command) for word in _expanded(part, env)]
        with (self.root / f"{unit}.log").open("ab") as out:
            self.running[unit] = subprocess.Popen([*self.words, *argv], env=env, stdout=out, stderr=out)

    def said(self) -> str:
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.root.glob("*.log")))

    def end(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(20)
        if "remit-agent" in self.running:
            words = [*self.words, REMIT, "keeper", "--end", "--data", str(self.root / "var" / "agent")]
            subprocess.run(words, capture_output=True, check=False)

    def _here(self, text: str) -> str:
        for was, now in self._changes.items():
            text = text.replace(was, now)
        return text

    def _place(self) -> Path:
        """Where it is typed: a checkout, in which files may be left."""
        place = self.root / "checkout"
        if not place.exists():
            place.mkdir()
            (place / "deploy").symlink_to(REPOSITORY / "deploy")
        return place


def _expanded(word: str, env: dict[str, str]) -> list[str]:
    """`$NAME` is words, `${NAME}` is one."""
    if re.fullmatch(r"\$[A-Z_]+", word):
        return env.get(word[1:], "").split()
    return [re.sub(r"\$\{([A-Z_]+)\}", lambda found: env.get(found[1], ""), word)]
