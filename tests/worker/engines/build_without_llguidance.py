"""A ``llama-server`` as its build without llguidance behaves: it ends at such a grammar.

It runs the server of the wheel, and passes requests on to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from inference_site.core.host import free_port
from worker.model_servers import llama_server


def main() -> None:
    """Serve at the port in the arguments until the process ends."""
    arguments = sys.argv[1:]
    at = arguments.index("--port") + 1
    port, behind = int(arguments[at]), free_port()
    arguments[at] = str(behind)
    command = [sys.executable, "-I", str(llama_server.__file__), *arguments]
    served = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass_on(self, body: bytes) -> None:
            if b"%llguidance" in body:
                served.kill()
                os.abort()
            kept = ("authorization", "content-type")
            headers = {name: self.headers[name] for name in kept if name in self.headers}
            url = f"http://127.0.0.1:{behind}{self.path}"
            try:
                answer = httpx.request(self.command, url, content=body, headers=headers, timeout=60)
            except httpx.HTTPError:  # It is not ready yet.
                self.send_error(503)
                return
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None:
            pass

    try:
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    finally:
        served.kill()


if __name__ == "__main__":
    main()
