#!/usr/bin/env python3
"""Writes an archive with a small service, and prints the manifest of a workload that uses the archive and a secret.

    remit up --artifact-dir /tmp/greeter
    remit create secret greeter --from-literal word=sesame
    python3 examples/quickstart/greeter.py /tmp/greeter | remit apply -f - --wait

The service answers requests that contain the secret word: curl -H 'X-Word: sesame' ADDRESS. The optional second argument is the
tenant (default: `default`). The archive is reproducible, so its digest is always the same.
"""

import hashlib
import io
import pathlib
import sys
import tarfile

SERVE = """\
import hmac, http.server, os, pathlib

HERE = pathlib.Path(__file__).parent
GREETING = HERE.joinpath("greeting.txt").read_bytes()
WORD = HERE.joinpath("secret", "word").read_bytes().strip()


class Greet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = self.path == "/ready" or hmac.compare_digest(self.headers.get("X-Word", "").encode(), WORD)
        body = GREETING if allowed else b"say the word\\n"
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT_http"])), Greet).serve_forever()
"""
FILES = {"greeter/serve.py": SERVE, "greeter/greeting.txt": "hello from an artifact\n"}

MANIFEST = """\
# A service from an archive, which each node fetches and unpacks before the start. Only nodes that run a replica get the secret.
apiVersion: remit/v1
kind: Workload
metadata: {{name: greeter, tenant: {tenant}, labels: {{app: greeter}}}}
spec:
  type: service
  replicas: 2
  template:
    command: [python3, serve.py]
    workingDirectory: greeter
    artifacts:
      - source: "file:{path}"
        sha256: {digest}
        unpack: true
    secrets: [{{name: greeter, path: greeter/secret}}]
    volumes: [{{name: scratch, path: greeter/data, scratch: {{size: 16Mi}}}}]
    ports: [{{name: http}}]
    resources: {{cpu: 100m, memory: 64Mi}}
    probes:
      ready: {{http: {{port: http, path: /ready}}, period: 1s}}
"""


def archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def main() -> None:
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: greeter.py DIRECTORY [TENANT]; DIRECTORY is the one given to the agent by --artifact-dir")
    place = pathlib.Path(sys.argv[1]).resolve()
    place.mkdir(parents=True, exist_ok=True)
    made = archive()
    (place / "greeter.tar").write_bytes(made)
    tenant = sys.argv[2] if len(sys.argv) > 2 else "default"
    sys.stdout.write(MANIFEST.format(path=place / "greeter.tar", digest=hashlib.sha256(made).hexdigest(), tenant=tenant))


if __name__ == "__main__":
    main()
