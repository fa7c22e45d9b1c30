#!/usr/bin/env python3
"""Makes a small service as an archive, and prints the manifest that deploys it from there, with a secret.

    remit up --artifact-dir /tmp/greeter
    remit create secret greeter --from-literal word=sesame
    python3 examples/quickstart/greeter.py /tmp/greeter | remit apply -f - --wait

It greets whoever sends the word: curl -H 'X-Word: sesame' ADDRESS. A second argument names another tenant than `default`. The
archive is the same each time that it is made, so its digest is too.
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
        knows = self.path == "/ready" or hmac.compare_digest(self.headers.get("X-Word", "").encode(), WORD)
        told = GREETING if knows else b"say the word\\n"
        self.send_response(200 if knows else 403)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)


http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT_http"])), Greet).serve_forever()
"""
FILES = {"greeter/serve.py": SERVE, "greeter/greeting.txt": "hello from an artifact\n"}

MANIFEST = """\
# A service from an archive: fetched and unpacked on each node that runs it, before it starts. The secret comes from the server,
# to the nodes that run it alone.
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
        sys.exit("name the directory that the agent lends by --artifact-dir; and a tenant, if it is not default")
    place = pathlib.Path(sys.argv[1]).resolve()
    place.mkdir(parents=True, exist_ok=True)
    made = archive()
    (place / "greeter.tar").write_bytes(made)
    tenant = sys.argv[2] if len(sys.argv) > 2 else "default"
    sys.stdout.write(MANIFEST.format(path=place / "greeter.tar", digest=hashlib.sha256(made).hexdigest(), tenant=tenant))


if __name__ == "__main__":
    main()
