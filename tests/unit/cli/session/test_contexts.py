"""Which server is meant? Flags before the environment before the file, and no token to a server that it is not for."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from remit.cli.main import remit
from remit.cli.session.contexts import (
    Context,
    ContextError,
    Contexts,
    ServerAddress,
    ServerFlags,
    load_contexts,
    resolve_server,
    save_and_use_context,
    save_contexts,
    server_url,
)

HERE = "http://127.0.0.1:7420"
THERE = "https://remit.example:443"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("from-a-file\n")
    return {"REMIT_CONFIG": str(tmp_path / "conf" / "config.yaml")}


def known(env: dict[str, str], *contexts: Context, current: str = "") -> None:
    save_contexts(Path(env["REMIT_CONFIG"]), Contexts(contexts, current))


def run(env: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(remit, words, prog_name="remit", env=env)


def test_nothing_is_configured__the_cure_is_told(env: dict[str, str]) -> None:
    result = run(env, "get", "nodes")
    assert result.exit_code == 2
    assert "no server is named" in result.output
    assert "run `remit up`, or name a server with --server" in result.output


def test_the_order_is_flags_environment_file(env: dict[str, str], tmp_path: Path) -> None:
    known(env, Context("a", HERE, token="kept", tenant="risk"), current="a")
    assert resolve_server(environ=env) == ServerAddress(HERE, "kept", "risk", "a")
    assert resolve_server(environ={**env, "REMIT_TOKEN": "said", "REMIT_TENANT": "web"}) == ServerAddress(
        HERE, "said", "web", "a"
    )
    assert ServerFlags(tenant="x").resolve({**env, "REMIT_TENANT": "web"}).tenant == "x"
    named = {**env, "REMIT_TOKEN_FILE": str(tmp_path / "token")}
    assert resolve_server(environ=named).token == "from-a-file"
    assert ServerFlags(token_file=str(tmp_path / "token")).resolve({**env, "REMIT_TOKEN": "said"}).token == "from-a-file"
    assert ServerFlags(server="127.0.0.1:7420").resolve(env) == ServerAddress(HERE, "kept", "risk", "a")


def test_a_context_named_by_a_flag_comes_before_the_environment(env: dict[str, str]) -> None:
    known(env, Context("a", HERE, token="one"), Context("b", THERE, token="two", tenant="web"), current="a")
    said = {**env, "REMIT_SERVER": "http://127.0.0.1:1", "REMIT_TOKEN": "three"}
    assert ServerFlags(context="b").resolve(said) == ServerAddress(THERE, "two", "web", "b")
    assert resolve_server(environ=said) == ServerAddress("http://127.0.0.1:1", "three", "default", "")
    assert resolve_server(environ={**env, "REMIT_CONTEXT": "b"}).server == THERE


def test_a_token_is_not_sent_to_another_server(env: dict[str, str]) -> None:
    known(env, Context("a", HERE, token="one"), current="a")
    with pytest.raises(ContextError, match="no token for https://remit"):
        ServerFlags(server=THERE).resolve(env)


def test_a_context_that_is_not_there_is_guessed(env: dict[str, str]) -> None:
    known(env, Context("production", HERE, token="one"))
    with pytest.raises(ContextError, match="did you mean production"):
        ServerFlags(context="prodution").resolve(env)
    with pytest.raises(ContextError, match=r"no context is in use\n.*production"):
        resolve_server(environ=env)


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://x:0", "http://u:p@x:1", "http://x/?a=b", "http://x:port", ""])
def test_what_is_no_server_is_refused(text: str) -> None:
    with pytest.raises(ContextError):
        server_url(text)


def test_the_file_is_for_its_owner_alone_and_reads_back(env: dict[str, str]) -> None:
    path = Path(env["REMIT_CONFIG"])
    made = Context("a", HERE, token="yes", tenant="1e3")
    known(env, made, current="a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_contexts(path) == Contexts((made,), "a")


def test_a_mistake_in_the_file_is_told_with_its_line(env: dict[str, str]) -> None:
    path = Path(env["REMIT_CONFIG"])
    path.parent.mkdir()
    path.write_text("contexts:\n- name: a\n  servr: x\ncurrent: a\n")
    result = run(env, "get", "nodes")
    assert result.exit_code == 2
    assert "config.yaml:3:3: contexts[0].servr: unknown field; did you mean server?" in result.output


def test_remember_makes_it_the_one_in_use(env: dict[str, str], tmp_path: Path) -> None:
    path = Path(env["REMIT_CONFIG"])
    known(env, Context("a", THERE, token="one"), current="a")
    save_and_use_context("local", HERE, tmp_path / "token", "risk", path=path)
    save_and_use_context("local", HERE, tmp_path / "token", "web", path=path)
    assert [one.name for one in load_contexts(path).contexts] == ["a", "local"]
    assert resolve_server(environ=env) == ServerAddress(HERE, "from-a-file", "web", "local")


def test_contexts_are_set_listed_used_and_removed(env: dict[str, str], tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    assert run(env, "context", "set", "a", "--server", HERE, "--token-file", token).output == "context a set\n"
    assert run(env, "context", "set", "b", "--server", THERE).exit_code == 0
    assert run(env, "context", "list", "-o", "name").output == "a\nb\n"
    assert "*   a      http://127.0.0.1:7420" in run(env, "context", "list").output
    assert run(env, "context", "use", "b").output == f"using b: {THERE}\n"
    assert run(env, "context", "set", "a", "--tenant", "risk").output == "context a changed\n"
    assert json.loads(run(env, "context", "list", "-o", "json").output) == {
        "contexts": [
            {"name": "a", "server": HERE, "tokenFile": token, "tenant": "risk"},
            {"name": "b", "server": THERE},
        ],
        "current": "b",
    }
    assert "none is in use now" in run(env, "context", "remove", "b").output
    assert run(env, "context", "remove", "b").exit_code == 2


def test_a_context_whose_server_changes_forgets_its_token(env: dict[str, str], tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    run(env, "context", "set", "a", "--server", HERE, "--token-file", token)
    run(env, "context", "set", "a", "--server", THERE)
    assert load_contexts(Path(env["REMIT_CONFIG"])).contexts == (Context("a", THERE),)


def test_a_token_that_cannot_be_sent_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("two words\x1b")
    with pytest.raises(ContextError, match="no token"):
        ServerFlags(server=HERE, token_file=str(tmp_path / "bad")).resolve(env)
    with pytest.raises(ContextError, match="cannot be read"):
        ServerFlags(server=HERE, token_file=str(tmp_path / "none")).resolve(env)


def test_like_another__the_same_server_and_authority__and_never_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMIT_CONFIG", str(tmp_path / "config.yaml"))
    for name in ("root", "ann"):
        (tmp_path / name).write_text(f"a-token-of-{name}-for-this")
    run = CliRunner().invoke
    words = ["context", "set", "prod", "--server", "https://remit.example:7420", "--ca-file", str(tmp_path / "ca.pem")]
    assert run(remit, [*words, "--token-file", str(tmp_path / "root")]).exit_code == 0
    assert (
        run(
            remit, ["context", "set", "ann", "--like", "prod", "--token-file", str(tmp_path / "ann"), "--tenant", "risk"]
        ).exit_code
        == 0
    )
    made = load_contexts(tmp_path / "config.yaml").named("ann")
    assert (made.server, made.ca_file, made.tenant) == ("https://remit.example:7420", str(tmp_path / "ca.pem"), "risk")
    assert made.token_file == str(tmp_path / "ann")
    assert run(remit, ["context", "set", "bob", "--like", "prod"]).exit_code == 0
    assert not load_contexts(tmp_path / "config.yaml").named("bob").token_file, "a token is its holder's alone"
    assert "no context" in run(remit, ["context", "set", "eve", "--like", "nobody"]).output
