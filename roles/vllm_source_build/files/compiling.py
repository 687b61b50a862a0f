"""A compilation in a job: followed while it lasts, its failure told apart, what the network denied tried anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import build_failures
import sizing
from build_progress import Follower
from job import Job, JobError

# Sources that CMake fetches: tried again after these seconds. Nothing is compiled by then.
RETRY_AFTER_S = (10, 60)
_MIB = 1024 * 1024


def followed(job: Job, compile_all: Callable[[], None], tree: Path, jobs: int) -> None:
    """Compiles; a failure says which of the four kinds it is, where one of them explains it."""
    for pause in (*RETRY_AFTER_S, None):
        began, kills = job.log_path.stat().st_size, sizing.oom_kills()
        try:
            with Follower(job.log_path, job.tell):
                compile_all()
        except JobError as error:
            failure = _judged(job, began, kills, tree, jobs)
            if failure is None:
                raise
            if failure.kind != "network" or pause is None:
                where = str(tree) if failure.kind == "disk" else str(job.log_path)
                raise JobError(failure.what, where, failure.mend, kind=failure.kind) from error
            job.log.write(f"{failure.what}; once more in {pause} s\n")
            time.sleep(pause)
        else:
            return


def _judged(job: Job, began: int, kills: int, tree: Path, jobs: int) -> build_failures.Failure | None:
    with job.log_path.open(errors="replace") as log:
        log.seek(began)
        text = log.read()
    rooms = [os.statvfs(folder) for folder in (tree, job.home)]
    return build_failures.judge(
        text,
        oom_kills=sizing.oom_kills() - kills,
        free_mib=min(room.f_bavail * room.f_frsize // _MIB for room in rooms),
        # Filesystems without a fixed inode table (btrfs) report none at all.
        free_inodes=min(room.f_favail if room.f_files else 1 for room in rooms),
        jobs=jobs,
        where=str(tree),
    )
