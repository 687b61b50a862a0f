"""The job on a host: ansible-runner's worker with a local connection, its stream put to S3 while it runs."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ansible_runner.streaming import Worker
from instance_store import Metadata, Store

# Of plugins/module_utils; the bundle has it here.
from marked_processes import end, mark_of  # type: ignore[import-not-found]

# The first events at once, then ever fewer and larger chunks: a short run costs few requests, a long one shows well.
_FIRST_S, _NEXT_S, _LONGEST_S, _GROWTH = 0.5, 4.0, 10.0, 1.6
_LARGEST = 512 * 1024
_SPOT_S = 5.0
# A sign of life where no event comes; the controller knows it as KEEPALIVE_S.
_KEEPALIVE_S = 60
# For a package manager in the middle of its work.
_PATIENCE_S = 60


class Chunks(io.RawIOBase):
    """A stream whose lines go to S3 in numbered gzip chunks, each naming the digest of the one before."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._lines: list[bytes] = []
        self._size = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self.count = 0
        self.digest = ""
        self.trouble = ""
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        """Takes bytes of the stream."""
        with self._lock:
            self._lines.append(bytes(data))
            self._size += len(data)
            if self._size > _LARGEST:
                self._wake.set()
        return len(data)

    def at_once(self, said: dict[str, Any]) -> None:
        """A line of this program's own, which does not wait for others."""
        self.write(json.dumps(said).encode() + b"\n")
        self._wake.set()

    def end(self) -> None:
        """Sends what is left; returns when it is there."""
        self._over = True
        self._wake.set()
        self._thread.join()

    def _send_all(self) -> None:
        wait_s = _FIRST_S
        while not self._over:
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._send():
                wait_s = min(max(_NEXT_S, wait_s * _GROWTH), _LONGEST_S)
        self._send()

    def _send(self) -> bool:
        with self._lock:
            text, self._lines, self._size = b"".join(self._lines), [], 0
        if not text or self.trouble:
            return False
        head = json.dumps({"chunk": self.count + 1, "after": self.digest}).encode() + b"\n"
        content = gzip.compress(head + text, 6)
        try:
            self._store.put(f"{self._prefix}{self.count + 1:06d}.gz", content)
        except Exception as error:
            # The run goes on: half a converge helps nobody. What is not told is told as that.
            self.trouble = str(error)
            return False
        self.count += 1
        self.digest = hashlib.sha256(content).hexdigest()
        return True


class Quiet(Worker):  # type: ignore[misc]
    """ansible-runner's worker; what it knows of the environment and its files stay on the host."""

    def status_handler(self, status_data: dict[str, Any], runner_config: Any) -> None:
        """Without the environment that the starting status carries."""
        kept = {name: value for name, value in status_data.items() if name not in ("env", "command", "cwd")}
        super().status_handler(kept, runner_config)

    def artifacts_handler(self, artifact_dir: str) -> None:
        """Sends none: the events are all there is to tell."""


def main() -> int:
    """Runs the job of this instance; returns 0 where the playbook ended well, else 1."""
    home = Path(os.environ["FLEET_HOME"])
    project = Path(os.environ["FLEET_PROJECT"])
    job = json.loads((home / "job.json").read_text())
    metadata = Metadata()
    instance = (metadata.get("meta-data/instance-id") or "").strip()
    store = Store(
        metadata,
        os.environ["FLEET_BUCKET"],
        os.environ["FLEET_PREFIX"],
        os.environ["FLEET_REGION"],
        os.environ["FLEET_ENDPOINT_URL"],
    )
    if instance not in job["hosts"]:
        said = {"what": f"the job is for {', '.join(job['hosts'])}, and this is {instance or 'nobody'}"}
        print(json.dumps({"error": {**said, "where": "instance metadata", "mend": "look at the metadata service"}}))
        return 1
    cancelled = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: cancelled.set())
    signal.signal(signal.SIGINT, lambda *_: cancelled.set())
    threading.Thread(target=_watch_command, args=[cancelled], daemon=True).start()
    chunks = Chunks(store, f"runs/{os.environ['FLEET_RUN_ID']}/{instance}/")
    threading.Thread(target=_watch_spot, args=[metadata, chunks], daemon=True).start()
    private = home / "private"
    private.mkdir(mode=0o700)
    kwargs = job["kwargs"]
    kwargs["inventory"] = str(_inventory(private, instance, job["hosts"][instance], job["groups"]))
    kwargs["limit"] = instance
    kwargs["project_dir"] = str(project)
    kwargs["envvars"] = {
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_CONFIG": str(project / "ansible.cfg"),
        # Modules run by the host's own Python, which Ansible looks for here, as after a push: never by this one.
        "PATH": f"{Path(sys.executable).parent.parent / 'programs'}:{os.environ['PATH']}",
    }
    stream = b"".join(json.dumps(part).encode() + b"\n" for part in ({"kwargs": kwargs}, {"eof": True}))
    worker = Quiet(
        io.BytesIO(stream), chunks, _KEEPALIVE_S, private_data_dir=str(private), cancel_callback=cancelled.is_set
    )
    try:
        _, code = worker.run()
    finally:
        _end_workers(private)
        if cancelled.is_set():
            # Whoever cancelled may reach this host no more: what its tasks have started ends without another command.
            end(mark_of(kwargs["extravars"]["vllm_fleet_run"]), _PATIENCE_S)
        chunks.end()
        shutil.rmtree(private, ignore_errors=True)
    last = {"run": os.environ["FLEET_RUN_ID"], "chunks": chunks.count, "digest": chunks.digest, "rc": code}
    line = json.dumps({**last, **({"trouble": chunks.trouble} if chunks.trouble else {})})
    # Should the command be delivered twice, the second delivery says it too; a full disk keeps it from no first one.
    with contextlib.suppress(OSError):
        (home / "said.json").write_text(line)
    with contextlib.suppress(BrokenPipeError):  # of a command that was cancelled
        print(line, flush=True)
    # A failed play is a failed command to AWS too: it counts against the command's MaxErrors.
    return int(code != 0)


def _watch_command(cancelled: threading.Event) -> None:
    """The command is over when its end of the pipe is, whatever became of it."""
    while os.read(0, 1):
        continue
    cancelled.set()


def _inventory(private: Path, instance: str, host: dict[str, Any], members: dict[str, list[str]]) -> Path:
    """This host with the variables that the controller resolved, in groups that tell of the others by name."""
    groups = {name: {"hosts": dict.fromkeys(hosts)} for name, hosts in members.items()}
    path = private / "inventory.json"
    variables = {**host["variables"], "ansible_connection": "local", "ansible_host": instance}
    path.write_text(json.dumps({"all": {"hosts": {instance: variables}, "children": groups}}))
    return path


def _end_workers(private: Path) -> None:
    """Ends what a cancelled Ansible leaves: workers in sessions of their own, which go on where they are."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(private).encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def _watch_spot(metadata: Metadata, chunks: Chunks) -> None:
    """Tells of a spot notice as soon as there is one: AWS gives two minutes."""
    while True:
        try:
            found = metadata.get("meta-data/spot/instance-action")
        except OSError:
            found = None
        if found:
            chunks.at_once({"event": "keepalive", "spot_notice": json.loads(found)})
            return
        time.sleep(_SPOT_S)


if __name__ == "__main__":
    raise SystemExit(main())
