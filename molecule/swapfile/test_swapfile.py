"""The swapfile is on, whole and alone, and it comes back at boot."""

from __future__ import annotations

from typing import Any

PATH = "/srv/swap/swapfile"


def test_swap_is_on(host: Any) -> None:
    assert host.check_output("cut -d' ' -f1 /proc/swaps").count("swapfile") == 1


def test_the_file_is_whole_and_for_root_alone(host: Any) -> None:
    file = host.file(PATH)
    assert file.size == 64 * 1024**2
    assert (file.user, file.group, file.mode) == ("root", "root", 0o600)
    # Holes or compression would make the kernel refuse it or lie about its size.
    assert int(host.check_output(f"stat -c %b {PATH}")) * 512 >= file.size
    assert host.check_output(f"blkid -p -s TYPE -o value {PATH}") == "swap"


def test_it_comes_back_at_boot(host: Any) -> None:
    lines = [line.split() for line in host.file("/etc/fstab").content_string.splitlines() if PATH in line]
    assert [line[:3] for line in lines] == [[PATH, "none", "swap"]]


def test_nothing_is_left_of_the_making(host: Any) -> None:
    assert host.check_output("ls -A /srv/swap") == "swapfile"
