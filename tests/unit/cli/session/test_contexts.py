"""Tests of the contexts file and the choice of server and token."""

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


def save(env: dict[str, str], *contexts: Context, current: str = "") -> None:
    save_contexts(Path(env["REMIT_CONFIG"]), Contexts(contexts, current))


def run(env: dict[str, str], *args: str) -> Result:
    return CliRunner().invoke(remit, args, prog_name="remit", env=env)


def test_missing_configuration_is_an_error_with_a_fix(env: dict[str, str]) -> None:
    result = run(env, "get", "nodes")
    assert result.exit_code == 2
    assert "no server is configured" in result.output
    assert "run `remit up`, or give a server with --server" in result.output


def test_flags_override_the_environment_and_that_the_file(env: dict[str, str], tmp_path: Path) -> None:
    save(env, Context("a", HERE, token="kept", tenant="risk"), current="a")
    assert resolve_server(environ=env) == ServerAddress(HERE, "kept", "risk", "a")
    assert resolve_server(environ={**env, "REMIT_TOKEN": "said", "REMIT_TENANT": "web"}) == ServerAddress(
        HERE, "said", "web", "a"
    )
    assert ServerFlags(tenant="x").resolve({**env, "REMIT_TENANT": "web"}).tenant == "x"
    named = {**env, "REMIT_TOKEN_FILE": str(tmp_path / "token")}
    assert resolve_server(environ=named).token == "from-a-file"
    assert ServerFlags(token_file=str(tmp_path / "token")).resolve({**env, "REMIT_TOKEN": "said"}).token == "from-a-file"
    assert ServerFlags(server="127.0.0.1:7420").resolve(env) == ServerAddress(HERE, "kept", "risk", "a")


def test_context_flag_overrides_the_server_of_the_environment(env: dict[str, str]) -> None:
    save(env, Context("a", HERE, token="one"), Context("b", THERE, token="two", tenant="web"), current="a")
    environ = {**env, "REMIT_SERVER": "http://127.0.0.1:1", "REMIT_TOKEN": "three"}
    assert ServerFlags(context="b").resolve(environ) == ServerAddress(THERE, "two", "web", "b")
    assert resolve_server(environ=environ) == ServerAddress("http://127.0.0.1:1", "three", "default", "")
    assert resolve_server(environ={**env, "REMIT_CONTEXT": "b"}).server == THERE


def test_token_of_a_context_is_not_used_for_another_server(env: dict[str, str]) -> None:
    save(env, Context("a", HERE, token="one"), current="a")
    with pytest.raises(ContextError, match="no token for https://remit"):
        ServerFlags(server=THERE).resolve(env)


def test_unknown_context_gets_a_suggestion(env: dict[str, str]) -> None:
    save(env, Context("production", HERE, token="one"))
    with pytest.raises(ContextError, match="did you mean production"):
        ServerFlags(context="prodution").resolve(env)
    with pytest.raises(ContextError, match=r"no current context\n.*production"):
        resolve_server(environ=env)


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://x:0", "http://u:p@x:1", "http://x/?a=b", "http://x:port", ""])
def test_invalid_server_url_is_refused(text: str) -> None:
    with pytest.raises(ContextError):
        server_url(text)


def test_contexts_file_is_private_and_reads_back(env: dict[str, str]) -> None:
    path = Path(env["REMIT_CONFIG"])
    ctx = Context("a", HERE, token="yes", tenant="1e3")
    save(env, ctx, current="a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_contexts(path) == Contexts((ctx,), "a")


def test_error_in_the_contexts_file_names_its_line(env: dict[str, str]) -> None:
    path = Path(env["REMIT_CONFIG"])
    path.parent.mkdir()
    path.write_text("contexts:\n- name: a\n  servr: x\ncurrent: a\n")
    result = run(env, "get", "nodes")
    assert result.exit_code == 2
    assert "config.yaml:3:3: contexts[0].servr: unknown field; did you mean server?" in result.output


def test_saved_context_becomes_current(env: dict[str, str], tmp_path: Path) -> None:
    path = Path(env["REMIT_CONFIG"])
    save(env, Context("a", THERE, token="one"), current="a")
    save_and_use_context("local", HERE, tmp_path / "token", "risk", path=path)
    save_and_use_context("local", HERE, tmp_path / "token", "web", path=path)
    assert [ctx.name for ctx in load_contexts(path).contexts] == ["a", "local"]
    assert resolve_server(environ=env) == ServerAddress(HERE, "from-a-file", "web", "local")


def test_context_commands_set_list_use_and_remove(env: dict[str, str], tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    assert run(env, "context", "set", "a", "--server", HERE, "--token-file", token).output == "context a set\n"
    assert run(env, "context", "set", "b", "--server", THERE).exit_code == 0
    assert run(env, "context", "list", "-o", "name").output == "a\nb\n"
    assert "*   a      http://127.0.0.1:7420" in run(env, "context", "list").output
    assert run(env, "context", "use", "b").output == f"current context is b: {THERE}\n"
    assert run(env, "context", "set", "a", "--tenant", "risk").output == "context a changed\n"
    assert json.loads(run(env, "context", "list", "-o", "json").output) == {
        "contexts": [
            {"name": "a", "server": HERE, "tokenFile": token, "tenant": "risk"},
            {"name": "b", "server": THERE},
        ],
        "current": "b",
    }
    assert "there is no current context now" in run(env, "context", "remove", "b").output
    assert run(env, "context", "remove", "b").exit_code == 2


def test_changed_server_drops_the_token_of_the_context(env: dict[str, str], tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    run(env, "context", "set", "a", "--server", HERE, "--token-file", token)
    run(env, "context", "set", "a", "--server", THERE)
    assert load_contexts(Path(env["REMIT_CONFIG"])).contexts == (Context("a", THERE),)


def test_invalid_or_missing_token_file_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("two words\x1b")
    with pytest.raises(ContextError, match="not a token"):
        ServerFlags(server=HERE, token_file=str(tmp_path / "bad")).resolve(env)
    with pytest.raises(ContextError, match="cannot be read"):
        ServerFlags(server=HERE, token_file=str(tmp_path / "none")).resolve(env)


def test_context_set_like_copies_server_and_ca_but_not_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMIT_CONFIG", str(tmp_path / "config.yaml"))
    for name in ("root", "ann"):
        (tmp_path / name).write_text(f"a-token-of-{name}-for-this")
    run = CliRunner().invoke
    args = ["context", "set", "prod", "--server", "https://remit.example:7420", "--ca-file", str(tmp_path / "ca.pem")]
    assert run(remit, [*args, "--token-file", str(tmp_path / "root")]).exit_code == 0
    assert (
        run(
            remit, ["context", "set", "ann", "--like", "prod", "--token-file", str(tmp_path / "ann"), "--tenant", "risk"]
        ).exit_code
        == 0
    )
    ctx = load_contexts(tmp_path / "config.yaml").named("ann")
    assert (ctx.server, ctx.ca_file, ctx.tenant) == ("https://remit.example:7420", str(tmp_path / "ca.pem"), "risk")
    assert ctx.token_file == str(tmp_path / "ann")
    assert run(remit, ["context", "set", "bob", "--like", "prod"]).exit_code == 0
    assert not load_contexts(tmp_path / "config.yaml").named("bob").token_file, "a token must not be shared between contexts"
    assert "not found" in run(remit, ["context", "set", "eve", "--like", "nobody"]).output
