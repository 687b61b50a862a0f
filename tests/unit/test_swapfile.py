"""The swapfile module's guards, on real files and with no swap switched on."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import mounts

from plugins.modules import vllm_swapfile
from plugins.modules.vllm_swapfile import Swapfile, swapoff_problem
from tests.conftest import PROJECT

_MIB = 1024 * 1024


class Ended(Exception):
    """The module came to its end; `result` is what it would have told."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg", ""))
        self.result = result


class Module:
    """What the swapfile asks of an Ansible module."""

    def __init__(self, path: Path, size_mib: int, *, check_mode: bool = False) -> None:
        self.params = {"path": str(path), "size_mib": size_mib}
        self.check_mode = check_mode

    def exit_json(self, **result: Any) -> None:
        raise Ended(result)

    def fail_json(self, **result: Any) -> None:
        raise Ended({**result, "failed": True})


class Host:
    """A host whose kernel takes swapfiles without swapping to them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.fstab = folder / "swapfile", folder / "fstab"
        self.on: set[str] = set()
        self.called: list[str] = []
        self.room_mib = 1024
        real_call, real_statvfs = Swapfile.call, os.statvfs

        def call(swapfile: Swapfile, *argv: str) -> None:
            self.called.append(argv[0])
            if argv[0] == "swapon":
                self.on.add(argv[1])
            elif argv[0] == "swapoff":
                self.on.discard(argv[1])
            else:
                real_call(swapfile, *argv)

        def statvfs(path: Any) -> os.statvfs_result:
            found = list(real_statvfs(path))
            found[0] = found[1] = 4096
            found[4] = self.room_mib * 256
            return os.statvfs_result(found)

        monkeypatch.setattr(vllm_swapfile, "_FSTAB", self.fstab)
        monkeypatch.setattr(Swapfile, "call", call)
        monkeypatch.setattr(Swapfile, "is_active", lambda swapfile: str(swapfile.path) in self.on)
        monkeypatch.setattr(os, "statvfs", statvfs)
        # The folder of a test may lie on an overlay, which the module rightly refuses.
        monkeypatch.setattr(vllm_swapfile, "_FILESYSTEMS", ("ext4", "xfs", "btrfs", "overlay", "tmpfs"))

    def run(self, size_mib: int, *, check_mode: bool = False) -> dict[str, Any]:
        """The module's result."""
        with pytest.raises(Ended) as ended:
            Swapfile(Module(self.path, size_mib, check_mode=check_mode)).run()
        return ended.value.result


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    if not shutil.which("mkswap"):
        pytest.fail("mkswap (util-linux) is not on the PATH")
    return Host(tmp_path, monkeypatch)


def test_made_whole_private_entered_and_then_left_alone(host: Host) -> None:
    host.fstab.write_text("/dev/vda / ext4 defaults 0 1\n")
    assert host.run(8, check_mode=True)["changed"]
    assert not host.path.exists()
    assert host.run(8)["actions"] == ["make 8 MiB", "enter in fstab", "switch on"]
    found = host.path.stat()
    # CASES C04: swapon refuses a file with holes.
    assert found.st_blocks * 512 >= found.st_size == 8 * _MIB
    assert found.st_mode & 0o777 == 0o600
    assert host.fstab.read_text() == f"/dev/vda / ext4 defaults 0 1\n{host.path} none swap sw 0 0\n"
    again = host.run(8)
    assert (again["changed"], again["diff"]["before"]) == (False, again["diff"]["after"])


def test_a_diff_says_what_was_and_what_will_be(host: Host) -> None:
    line = f"{host.fstab}: {host.path} none swap sw 0 0\n"
    assert host.run(8, check_mode=True)["diff"] == {"before": "none\n", "after": f"8 MiB, 0600, on\n{line}"}
    assert host.run(8)["diff"]["after"] == host.run(8)["diff"]["before"]
    host.path.chmod(0o644)
    assert host.run(8)["diff"]["before"] == f"8 MiB, 0644, on\n{line}"
    assert host.run(0)["diff"] == {"before": f"8 MiB, 0600, on\n{line}", "after": "none\n"}


@pytest.mark.parametrize("size_mib", [8, 0])
def test_a_file_that_is_no_swapfile_is_neither_overwritten_nor_removed(host: Host, size_mib: int) -> None:
    host.path.write_text("someone's data\n" * 1000)
    message = host.run(size_mib)["msg"]
    assert message.startswith(f"swapfile: {host.path} exists and is no swapfile")
    assert host.path.read_text() == "someone's data\n" * 1000
    assert host.called == []


def test_a_link_at_the_path_is_refused(host: Host, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("data")
    host.path.symlink_to(tmp_path / "elsewhere")
    assert "no swapfile" in host.run(0)["msg"]
    assert host.path.is_symlink()


def test_a_negative_size_is_refused_and_removes_nothing(host: Host) -> None:
    host.run(8)
    assert "-5 MiB" in host.run(-5)["msg"]
    assert host.path.exists()


def test_a_swapfile_that_others_can_read_is_taken_from_them(host: Host) -> None:
    host.run(8)
    host.path.chmod(0o644)
    assert host.run(8)["actions"] == ["take it from other users"]
    assert host.path.stat().st_mode & 0o777 == 0o600


def test_what_an_interrupted_run_left_is_removed(host: Host) -> None:
    aside = host.path.with_name("swapfile.new")
    aside.write_bytes(bytes(5_000_000))
    assert host.run(8)["actions"][0] == "remove what an interrupted run left"
    assert not aside.exists()


def test_what_another_run_is_writing_is_not_touched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_swapfile, "_WAIT_SECONDS", 0)
    aside = host.path.with_name("swapfile.new")
    with aside.open("wb") as held:
        held.write(bytes(4096))
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is being made by another run" in host.run(8)["msg"]
    assert aside.stat().st_size == 4096


def test_the_old_one_stays_on_while_the_new_one_is_made(host: Host) -> None:
    host.run(8)
    host.called.clear()
    assert host.run(16)["actions"] == ["make 16 MiB", "switch the old size off", "switch on"]
    assert host.called == ["mkswap", "swapoff", "swapon"]


def test_without_room_for_both_the_old_one_goes_first(host: Host) -> None:
    host.run(16)
    host.room_mib = 70
    assert host.run(20)["actions"][:3] == [
        "switch the old size off",
        "remove the old one to make room",
        "make 20 MiB",
    ]


def test_without_room_at_all_the_old_one_stays_on(host: Host) -> None:
    host.run(8)
    host.called.clear()
    host.room_mib = 10
    assert "wants 100 MiB" in host.run(100)["msg"]
    assert (host.called, host.on) == ([], {str(host.path)})


def test_an_entry_with_other_options_is_replaced_and_absence_leaves_the_rest(host: Host) -> None:
    host.fstab.write_text(f"# kept\n{host.path} swap swap defaults 0 0\n")
    host.run(8)
    assert host.fstab.read_text() == f"# kept\n{host.path} none swap sw 0 0\n"
    assert host.run(0)["actions"] == ["switch off", "take out of fstab", "remove"]
    assert host.fstab.read_text() == "# kept\n"
    assert host.run(0)["changed"] is False


@pytest.mark.parametrize(
    ("used", "available", "stays"),
    [
        (0, 1, False),
        (4096 * _MIB, 4097 * _MIB, False),
        (4096 * _MIB, 4096 * _MIB, True),
        (512 * _MIB, 100 * _MIB, True),
    ],
)
def test_what_lies_in_swap_must_fit_into_memory(used: int, available: int, stays: bool) -> None:
    # CASES C09.
    problem = swapoff_problem(used, available)
    assert bool(problem) is stays
    if stays:
        assert problem == f"holds {used // _MIB} MiB and {available // _MIB} are available: it must stay on"


@pytest.mark.parametrize("size_mib", [16, 0])
def test_a_swapfile_whose_content_does_not_fit_stays_on(
    host: Host, size_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.run(8)
    host.called.clear()
    host.path.with_name("swapfile.new").write_bytes(b"left")
    monkeypatch.setattr(Swapfile, "used_bytes", lambda _: 1 << 50)
    result = host.run(size_mib)
    assert "it must stay on" in result["msg"]
    assert result["refused"]
    assert (host.called, host.on, host.path.stat().st_size) == ([], {str(host.path)}, 8 * _MIB)
    assert host.path.with_name("swapfile.new").exists()


def test_memory_that_fills_up_while_the_new_one_is_made_keeps_the_old_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.run(8)
    answers = iter([0, 1 << 50])
    monkeypatch.setattr(Swapfile, "used_bytes", lambda _: next(answers))
    assert "it must stay on" in host.run(16)["msg"]
    assert host.on == {str(host.path)}
    assert host.path.stat().st_size == 8 * _MIB


MOUNTINFO = """22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
31 22 0:40 / /mnt/efs rw,relatime shared:9 - nfs4 fs-1.efs.example:/ rw,vers=4.1
32 22 0:41 / /mnt/with\\040blank rw,noexec,relatime - xfs /dev/nvme1n1 rw
33 22 0:42 / /srv rw,relatime master:1 propagate_from:2 - tmpfs tmpfs rw
34 33 259:2 / /srv rw,relatime - ext4 /dev/nvme2n1 rw
"""


@pytest.mark.parametrize(
    ("path", "fstype", "device"),
    [
        ("/var/swapfile", "ext4", "/dev/root"),
        ("/mnt/efs/swap", "nfs4", "fs-1.efs.example:/"),
        ("/mnt/efsx", "ext4", "/dev/root"),
        ("/mnt/with blank/swap", "xfs", "/dev/nvme1n1"),
        # Of two mounts on one folder the later one is seen.
        ("/srv/swap", "ext4", "/dev/nvme2n1"),
    ],
)
def test_the_mount_of_a_path_is_read_as_the_kernel_lists_it(path: str, fstype: str, device: str) -> None:
    found = mounts.covering(mounts.parse(MOUNTINFO), Path(path))
    assert (found.fstype, found.device) == (fstype, device)
    assert ("noexec" in found.options) is (fstype == "xfs")


def test_a_network_file_system_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    efs = mounts.covering(mounts.parse(MOUNTINFO), Path("/mnt/efs"))
    monkeypatch.setattr(vllm_swapfile, "mount_of", lambda _: efs)
    result = host.run(8)
    assert "would lie on a network file system" in result["msg"]
    assert result["refused"]
    assert list(host.path.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting wants root")
@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        (
            "mount -t overlay overlay -o lowerdir={0}/low,upperdir={0}/up,workdir={0}/work {0}/at",
            "an overlay, which has",
        ),
        ("mount -t tmpfs tmpfs {0}/at", "a tmpfs, which is memory itself"),
    ],
)
def test_a_real_mount_that_cannot_swap_is_refused(tmp_path: Path, mount: str, expected: str) -> None:
    # An overlay wants an upper layer that is none itself; /tmp may lie on one, so it gets a tmpfs.
    script = (
        f"mount -t tmpfs tmpfs {tmp_path} && cd {tmp_path} && mkdir low up work at && "
        f"{mount.format(tmp_path)} && exec {Path(sys.executable).parent}/ansible localhost -c local --check "
        f"-m vllm_swapfile -a 'path={tmp_path}/at/swapfile size_mib=8'"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        cwd=PROJECT,
        env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"would lie on {expected}" in " ".join(done.stdout.split())
