"""The command's first steps on a host: claims the run, checks what it is given by digest, and hands over to the job.

Travels in the document behind instance_store.py, for any Python from 3.8 on. Its settings come by the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable

from instance_store import Metadata, Refused, Store

_STATE = os.environ.get("FLEET_STATE", "/var/lib/vllm-fleet/run-command")
# Claims older than this are nobody's: Systems Manager delivers no command for so long.
_KEEP_S = 7 * 86400
_DUPLICATE = 75


def main() -> None:
    """Prepares and starts the job; every end before that is one line of JSON."""
    run_id = os.environ["FLEET_RUN_ID"]
    runs = os.path.join(_STATE, "runs")
    os.makedirs(runs, mode=0o700, exist_ok=True)
    sweep(runs)
    home = os.path.join(runs, run_id)
    held = claim(home)
    if held is None:
        sys.exit(answer_of_first(home))
    store = Store(
        Metadata(),
        os.environ["FLEET_BUCKET"],
        os.environ["FLEET_PREFIX"],
        os.environ["FLEET_REGION"],
        os.environ["FLEET_ENDPOINT_URL"],
    )
    try:
        python = environment(store, os.environ["FLEET_WHEELS"], os.environ["FLEET_PYTHON"])
        project = unpacked(store, os.environ["FLEET_BUNDLE"])
        job = verified(store, f"jobs/{os.environ['FLEET_JOB']}.json.gz", os.environ["FLEET_JOB"])
    except Wrong as wrong:
        sys.exit(failed(home, str(wrong), wrong.where, wrong.mend))
    except (Refused, OSError) as error:
        mend = "compare its role with docs/policies"
        sys.exit(failed(home, f"S3 gives this host nothing: {error}", os.environ["FLEET_BUCKET"], mend))
    with open(os.path.join(home, "job.json"), "wb") as file:
        file.write(gzip.decompress(job))
    keep = {name: os.environ[name] for name in os.environ if name.startswith(("FLEET_", "AWS_EC2_METADATA"))}
    # Nothing else of the agent's environment reaches Ansible, whose events tell of it.
    keep.update({"PATH": os.environ.get("PATH", os.defpath), "HOME": "/root", "LANG": "C.UTF-8", "FLEET_HOME": home})
    program = os.path.join(project, "on_host", "host_job.py")
    # The agent kills a cancelled command's whole process group outright. The job is in another, and hears of it: the
    # pipe that only this process holds open ends.
    job_process = subprocess.Popen(
        [python, program], env={**keep, "FLEET_PROJECT": project}, stdin=subprocess.PIPE, start_new_session=True
    )
    sys.exit(job_process.wait())


class Wrong(Exception):
    """What is wrong, where, and the mend."""

    def __init__(self, what: str, where: str, mend: str) -> None:
        super().__init__(what)
        self.where = where
        self.mend = mend


def failed(home: str, what: str, where: str, mend: str) -> int:
    """Says it as JSON, to a second delivery too; returns the exit code."""
    line = json.dumps({"error": {"what": what, "where": where, "mend": mend}})
    print(line, flush=True)
    # The disk may be what is wrong.
    with contextlib.suppress(OSError), open(os.path.join(home, "said.json"), "w") as file:
        file.write(line)
    return 1


def boot_id() -> str:
    """The kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def claim(home: str) -> int | None:
    """Makes the run's folder, as one process alone can; None where it was made before.

    The descriptor is of a file with this boot's id, locked until this process ends.
    """
    own = f"{home}.{os.getpid()}"
    # One may be left of a process of the same number that was killed here.
    os.makedirs(own, 0o700, exist_ok=True)
    held = os.open(os.path.join(own, "boot_id"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(held, boot_id().encode())
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        os.rename(own, home)
    except OSError:
        shutil.rmtree(own)
        return None
    return held


def answer_of_first(home: str) -> int:
    """A run that was here before is not begun again: says so, waits for its end and gives its answer, its exit code.

    Of a run that another boot began nothing is to be waited for.
    """
    with open(os.path.join(home, "boot_id")) as file:
        rebooted = file.read() != boot_id()
        print(json.dumps({"duplicate": os.path.basename(home), "rebooted": rebooted}), flush=True)
        if rebooted:
            return _DUPLICATE
        fcntl.flock(file, fcntl.LOCK_SH)
    with contextlib.suppress(OSError), open(os.path.join(home, "said.json")) as said:
        line = said.read()
        print(line, flush=True)
        return int(json.loads(line).get("rc") != 0)
    return _DUPLICATE


def sweep(runs: str) -> None:
    """Removes old claims."""
    for name in os.listdir(runs):
        path = os.path.join(runs, name)
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _KEEP_S:
                shutil.rmtree(path)


def verified(store: Store, key: str, digest: str) -> bytes:
    """The object, if it is the one that the command names."""
    content = store.get(key)
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise Wrong(
            f"{key} has the digest {found}, and the command names {digest}: it is not run",
            f"{os.environ['FLEET_BUCKET']} {key}",
            f"find out who changed it; then aws s3 rm s3://{os.environ['FLEET_BUCKET']}/{os.environ['FLEET_PREFIX']}{key}",
        )
    return content


def unpacked(store: Store, digest: str) -> str:
    """The folder with the project's files of this digest."""

    def unpack(folder: str) -> None:
        content = verified(store, f"bundles/{digest}.tar.gz", digest)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder)

    return once(f"project-{digest}", unpack)


def environment(store: Store, digest: str, version: str) -> str:
    """The interpreter of the environment made of the wheels of this digest."""
    base = shutil.which(f"python{version}")
    if base is None:
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise Wrong(
            f"no python{version} on this host, which has {here}, and the wheels are for {version}",
            "vllm_fleet_python",
            f"set vllm_fleet_python: '{here}' for this host, if fleet/run_command/systems.py knows wheels for it",
        )

    def make(folder: str) -> None:
        content = verified(store, f"wheels/{digest}.tar", digest)
        subprocess.run([base, "-m", "venv", "--without-pip", "--copies", folder], check=True, stdout=subprocess.DEVNULL)
        site = os.path.join(folder, "lib", f"python{version}", "site-packages")
        # Wheels are archives of what they install; a bare host may have no pip to say so.
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    zipfile.ZipFile(io.BytesIO(file.read())).extractall(site)
        # In a folder of its own: what else bin has is no Python for modules to be run by.
        os.mkdir(os.path.join(folder, "programs"))
        play = os.path.join(folder, "programs", "ansible-playbook")
        with open(play, "w") as script:
            # The folder's final name: it is renamed when it is whole.
            final = os.path.join(_STATE, f"ansible-{digest}", "bin", "python3")
            script.write(f"#!{final} -I\nfrom ansible.cli.playbook import main\nmain()\n")
        os.chmod(play, 0o755)

    return os.path.join(once(f"ansible-{digest}", make), "bin", "python3")


def once(name: str, make: Callable[[str], None]) -> str:
    """A folder made whole or not at all; older ones of its kind go."""
    path = os.path.join(_STATE, name)
    if not os.path.isdir(path):
        kind = name.split("-")[0]
        part = f"{path}.part-{os.getpid()}"
        make(part)
        os.chmod(part, 0o700)
        with contextlib.suppress(OSError):
            os.rename(part, path)
        for other in os.listdir(_STATE):
            old = os.path.join(_STATE, other)
            with contextlib.suppress(OSError):
                if other.startswith(f"{kind}-") and other != name and time.time() - os.stat(old).st_mtime > _KEEP_S:
                    shutil.rmtree(old)
    return path


if __name__ == "__main__":
    main()
