"""TLS from this machine and from another, with every client; mistakes are reported with their fix."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from remit.cli.main import remit as command_line
from remit.client.api import Api, Trust, Unanswered
from remit.client.blocking import BlockingApi
from remit.model.kinds import Tenant
from remit.world.net.certificates import CertificateAuthority
from tests.integration.serve.network_namespaces import HERE, THERE, machines, unsupported_reason
from tests.integration.serve.tls_server import REMIT, serving


class Done(NamedTuple):
    returncode: int
    stderr: str


def remit(*options: str, before: Sequence[str] = (), **env: str) -> Done:
    """Run in this process, which is faster, or with a command prefix."""
    env = {"REMIT_CONFIG": "/nonexistent/config", "NO_COLOR": "1", **env}
    if not before:
        ended = CliRunner(env=env).invoke(command_line, options)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
        return Done(ended.exit_code, ended.stderr)
    done = subprocess.run(
        [*before, REMIT, *options], env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=60
    )
    return Done(done.returncode, done.stderr)


@pytest.mark.smoke
def test_clients_use_tls_and_mistakes_are_reported_with_fix(tmp_path: Path) -> None:
    data = tmp_path / "data"
    other = tmp_path / "other.pem"
    other.write_bytes(CertificateAuthority.create("other").certificate)
    with serving(data, "--tls", "--tls-name", "remit.example") as url:
        token, ca = data / "token", str(data / "tls" / "ca.pem")
        port = url.rpartition(":")[2]
        command = ["get", "tenants", "--token-file", str(token)]
        assert remit(*command, "--server", url, "--ca-file", ca).returncode == 0
        assert remit(*command, "--server", f"https://localhost:{port}", REMIT_CA_FILE=ca).returncode == 0
        for wrong, cure in (
            (["--server", url], "--ca-file"),
            (["--server", url, "--ca-file", str(other)], "--ca-file"),
            (["--server", url, "--ca-file", str(tmp_path / "none")], "--ca-file"),
            (["--server", url, "--ca-file", str(token)], "--ca-file|ca.pem"),
            (["--server", f"http://127.0.0.1:{port}"], "https://"),
        ):
            done = remit(*command, *wrong)
            assert done.returncode in (1, 2), done
            assert re.search(cure, done.stderr), done.stderr
            assert "Traceback" not in done.stderr

        async def sdk() -> None:
            async with Api(url, token.read_text().strip(), trust=Trust(ca)) as api:
                assert (await api.list(Tenant)).items == []
            async with Api(url, token.read_text().strip(), timeout_s=1) as api:
                with pytest.raises(Unanswered, match="--ca-file"):
                    await api.list(Tenant)

        asyncio.run(sdk())
        with BlockingApi(url, token.read_text().strip(), trust=Trust(ca)) as api:
            assert not api.ready()


def test_https_url_of_plain_server_is_reported(tmp_path: Path) -> None:
    from tests.integration.serve.server_process import Server

    with Server(tmp_path / "data") as plain:
        token = str(tmp_path / "data" / "token")
        done = remit("get", "tenants", "--token-file", token, "--server", f"https://127.0.0.1:{plain.port}")
        assert done.returncode == 1 and "does not use TLS" in done.stderr and "http://" in done.stderr, done.stderr


def test_certificate_for_other_name_is_reported(tmp_path: Path) -> None:
    """The server uses a provided certificate, and is addressed by a name that it does not contain."""
    import trustme

    theirs = trustme.CA()
    theirs.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf = theirs.issue_cert("elsewhere.example")
    leaf.private_key_pem.write_to_path(str(tmp_path / "own.key"))
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "own.pem"))
    own = [f"--tls-cert={tmp_path}/own.pem", f"--tls-key={tmp_path}/own.key", f"--tls-ca={tmp_path}/ca.pem"]
    with serving(tmp_path / "data", *own) as url:
        command = ["get", "tenants", "--token-file", str(tmp_path / "data" / "token"), "--ca-file", str(tmp_path / "ca.pem")]
        done = remit(*command, "--server", url)
        assert done.returncode == 1 and "is not for 127.0.0.1" in done.stderr and "--tls-name" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--listen", "0.0.0.0:0"], "--tls"),
        (["--listen", "[::]:0"], "--tls"),
        (["--listen", "10.1.2.3:0"], "--tls"),
        (["--tls-name", "x.example"], "--tls"),
        (["--tls", "--tls-cert", __file__], "--tls-key"),
        (["--tls-ca", __file__], "--tls-cert"),
        (["--tls-cert", __file__, "--tls-key", __file__], "PEM"),
        (["--tls", "--tls-name", "größer.example"], "ASCII"),
    ],
)
def test_invalid_tls_options_prevent_start(tmp_path: Path, options: list[str], expected: str) -> None:
    """A06."""
    done = remit("server", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *options)
    assert done.returncode in (1, 2) and expected in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "-")
def test_other_machine_connects_over_tls_and_foreign_hosts_are_misdirected(tmp_path: Path) -> None:
    """A06, A40: with TLS a server listens beyond this machine and knows the names it is addressed by."""
    data = tmp_path / "data"
    with machines() as machines_, serving(data, "--tls", listen=f"{HERE}:7420", before=machines_.here) as url:
        assert url == f"https://{HERE}:7420"
        ca = str(data / "tls" / "ca.pem")
        command = ["get", "tenants", "--token-file", str(data / "token"), "--server", url, "--ca-file", ca]
        done = remit(*command, before=machines_.there)
        assert done.returncode == 0, done.stderr

        def ask(*options: str) -> str:
            curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", ca, "-m", "10"]
            token = f"Authorization: Bearer {(data / 'token').read_text().strip()}"
            done = subprocess.run([*machines_.there, *curl, "-H", token, *options], capture_output=True, text=True, check=False)
            return done.stdout

        assert ask(f"{url}/v1/tenants") == "200"
        assert ask("-H", "Host: evil.example", f"{url}/v1/tenants") == "421"
        assert ask("-H", f"Host: {THERE}", f"{url}/v1/tenants") == "421"
        body = ["-X", "POST", "-H", "Content-Type: application/json", "-d", "{}"]
        assert ask(*body, "-H", "Origin: https://evil.example", f"{url}/v1/tenants") == "403"
        assert ask(*body, "-H", f"Origin: http://{HERE}:7420", f"{url}/v1/tenants") == "403"  # the same host, another scheme
        assert ask(*body, "-H", f"Origin: {url}", f"{url}/v1/tenants") == "422"  # accepted, then found invalid
