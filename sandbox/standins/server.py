"""One process for all stand-ins that are servers: the local AWS, static files, instance metadata.

`python -m sandbox.standins.server --bind ADDRESS --files-root DIR ...`, started in the sandbox network's namespace.
"""

from __future__ import annotations

import argparse
import functools
import signal
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from sandbox.standins import aws, metadata, moto_mended
from sandbox.standins.local_aws import LocalAws
from sandbox.standins.registry import Registry


class Files(SimpleHTTPRequestHandler):
    """Static files, without a line per request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""


def main() -> None:
    """Serves until SIGTERM; the ready file appears when everything listens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", required=True)
    parser.add_argument("--aws-port", type=int, default=5000)
    parser.add_argument("--files-port", type=int, default=8080)
    parser.add_argument("--files-root", type=Path, required=True)
    parser.add_argument("--metadata-address", default="169.254.169.254")
    parser.add_argument("--metadata-port", type=int, default=80)
    parser.add_argument("--ready-file", type=Path, required=True)
    args = parser.parse_args()
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    aws.put_at_once()
    moto_mended.spot_by_template()
    local_aws = LocalAws(args.bind, args.aws_port)
    registry = Registry(local_aws)
    local_aws.start()
    files = ThreadingHTTPServer((args.bind, args.files_port), functools.partial(Files, directory=str(args.files_root)))
    imds = metadata.serve(args.metadata_address, args.metadata_port, registry.agents.at)
    for server in (files, imds):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    aws.seed(f"http://{args.bind}:{args.aws_port}")
    args.ready_file.write_text("ready\n")
    done.wait()
    for server in (files, imds):
        server.shutdown()
    local_aws.stop()


if __name__ == "__main__":
    main()
