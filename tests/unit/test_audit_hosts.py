"""The audit of hosts: decisions over what apt, systemd and ss print, and the module and the command on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.audit_host import Said, reboot, sandboxing, updates
from ansible.module_utils.audit_network import PRIVATE, network

from fleet.paths import PROJECT
from plugins.modules import vllm_audit
from tests.unit.doubles import Module, Systemd, ends, with_sshd

DAY = 86400
# 2026-12-01 01:33:13 UTC, by `date -u -d ... +%s`.
DATED, NOW = "Date: Tue, 01 Dec 2026 01:33:13 UTC\n", 1796088793 + 2 * DAY
DEBIAN = {
    "archive.example_debian_dists_bookworm_InRelease": "Date: Sat, 11 Jul 2026 10:16:00 UTC\n",
    "archive.example_debian-security_dists_bookworm-security_InRelease": f"Suite: oldstable-security\n{DATED}",
}
# As apt-get -s prints them on Debian 12 and on Ubuntu 22.04.
INSTS = """\
Inst bash [5.2.15-2+b8] (5.2.15-2+b13 Debian:12.15/oldstable [amd64])
Conf bash (5.2.15-2+b13 Debian:12.15/oldstable [amd64])
Inst perl [5.36.0-7+deb12u2] (5.36.0-7+deb12u4 Debian-Security:12/oldstable-security [amd64]) []
Inst libgcrypt20 [1.10.1-3] (1.10.1-3+deb12u1 Debian:12.15/oldstable, Debian-Security:12/oldstable-security [amd64]) []
Inst libssl3 [3.0.2-0ubuntu1.10] (3.0.2-0ubuntu1.15 Ubuntu:22.04/jammy-updates, Ubuntu:22.04/jammy-security [arm64])
Inst snapd [2.58+22.04] (2.63+22.04 Ubuntu:22.04/jammy-updates [arm64])
Inst linux-image-6.8.0-1020-aws (6.8.0-1020.22 Ubuntu:24.04/noble-updates, Ubuntu:24.04/noble-security [arm64])
Conf libssl3 (3.0.2-0ubuntu1.15 Ubuntu:22.04/jammy-updates, Ubuntu:22.04/jammy-security [arm64])
"""
SS = """\
udp UNCONN 0 0 127.0.0.53%lo:53 0.0.0.0:* users:(("systemd-resolve",pid=401,fd=13))
udp UNCONN 0 0 10.0.0.5%ens5:68 0.0.0.0:* users:(("systemd-network",pid=399,fd=22))
udp UNCONN 0 0 127.0.0.1:323 0.0.0.0:* users:(("chronyd",pid=500,fd=5))
udp UNCONN 0 0 [fe80::8ff:fe00:1]%ens5:546 [::]:* users:(("systemd-network",pid=399,fd=23))
udp UNCONN 0 0 [::1]:323 [::]:* users:(("chronyd",pid=500,fd=6))
tcp LISTEN 0 4096 127.0.0.1:8000 0.0.0.0:* users:(("python",pid=900,fd=9))
"""
SSH = """\
tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=700,fd=3),("systemd",pid=1,fd=80))
tcp LISTEN 0 128 [::]:22 [::]:* users:(("sshd",pid=700,fd=4),("systemd",pid=1,fd=81))
"""
URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("releases", "now", "found", "mends"),
    [
        ({}, NOW, "never fetched", True),
        ({"archive.example_debian_dists_bookworm_InRelease": DATED}, NOW, "none of a security archive", True),
        (DEBIAN, NOW, "2 days old", False),
        # Ubuntu pads the hour with a space.
        (
            {"x_ubuntu_dists_noble-security_InRelease": "Date: Tue, 01 Dec 2026  1:33:13 UTC\n"},
            NOW,
            "2 days old",
            False,
        ),
        (DEBIAN, NOW + 5 * DAY, "7 days old", False),
        (DEBIAN, NOW + 6 * DAY, "8 days old", True),
    ],
)
def test_lists_are_as_old_as_the_security_archive_says(
    releases: dict[str, str], now: float, found: str, mends: bool
) -> None:
    lists, *_ = updates(releases, Said(""), now)
    assert (lists["name"], lists["found"]) == ("package lists", found)
    assert ("apt-get update" in lists["mend"]) == mends


def test_security_updates_are_told_from_others() -> None:
    _, pending = updates(DEBIAN, Said(INSTS), NOW)
    assert pending["found"] == "4 pending: perl, libgcrypt20, libssl3, linux-image-6.8.0-1020-aws"
    # What the mend itself picks out of the same lines.
    program = pending["mend"].split("awk '")[1].split("'")[0]
    picked = subprocess.run(["awk", program], input=INSTS, capture_output=True, text=True, check=True)
    assert picked.stdout.split() == ["perl", "libgcrypt20", "libssl3", "linux-image-6.8.0-1020-aws"]
    _, none = updates(DEBIAN, Said(INSTS.splitlines()[0]), NOW)
    assert (none["found"], none["mend"]) == ("none pending", "")
    _, failed = updates(DEBIAN, Said("", "E: dpkg was interrupted"), NOW)
    assert failed["found"] == "not known: E: dpkg was interrupted" and failed["mend"]
    many = "".join(f"Inst p{n} [1] (2 Debian-Security:12/oldstable-security [amd64])\n" for n in range(7))
    assert updates(DEBIAN, Said(many), NOW)[1]["found"] == "7 pending: p0, p1, p2, p3, p4 and 2 more"


def test_a_reboot_that_packages_ask_for() -> None:
    assert reboot(None)["mend"] == ""
    asked = reboot("linux-image-6.8.0-1020-aws\nlibc6\n")
    assert (asked["found"], asked["mend"]) == ("asked for by linux-image-6.8.0-1020-aws, libc6", "systemctl reboot")
    assert reboot("")["mend"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd's own measure needs its own program")
@pytest.mark.parametrize(
    ("more", "word", "worst"),
    [
        ("", "OK", ""),
        ("User=root\nCapabilityBoundingSet=~\nProtectSystem=no\n", "MEDIUM", "most by PrivateNetwork= 0.5"),
    ],
    ids=["ours", "loosened"],
)
def test_a_unit_is_measured_by_systemd_itself(tmp_path: Path, more: str, word: str, worst: str) -> None:
    template = (PROJECT / "roles" / "vllm_service" / "templates" / "vllm.service.j2").read_text()
    # The part that confines it has no variable in it.
    confining = template.split("NoNewPrivileges=")[1].split("\n\n")[0]
    unit = tmp_path / "vllm.service"
    unit.write_text(f"[Service]\nExecStart=/bin/true\nUser=nobody\nNoNewPrivileges={confining}\n{more}")
    argv = ("systemd-analyze", "security", "--no-pager", "--offline=true")
    told = sandboxing(
        "vllm.service", vllm_audit.said(*argv, str(unit)), vllm_audit.said(*argv, "--json=short", str(unit))
    )
    assert told["name"] == "sandboxing of vllm.service"
    assert f" {word}" in told["found"] and worst in told["found"]
    assert told["mend"] == ("systemctl revert vllm.service, then ./runner.py converge" if worst else "")


def test_a_unit_that_systemd_does_not_measure_is_not_called_fine() -> None:
    told = sandboxing("vllm.service", Said("", "Failed to connect to bus"), Said(""))
    assert told["found"] == "not known: Failed to connect to bus" and told["mend"]
    # Before 250 there is no JSON.
    text = "-> Overall exposure level for vllm.service: 9.6 UNSAFE :-{\n"
    assert sandboxing("vllm.service", Said(text), Said("", "unrecognized option"))["found"] == "exposure 9.6 UNSAFE"


def looked(
    listed: str, url: str = URL, ours: tuple[int, ...] = (900, 901), *, ec2: bool = True
) -> list[dict[str, str]]:
    found: list[dict[str, str]] = network(Said(listed), url, ours, ec2=ec2)
    return found


def findings(checks: list[dict[str, str]]) -> list[str]:
    return [check["found"] for check in checks if check["mend"]]


def test_what_a_host_needs_is_told_and_no_finding() -> None:
    server, fine = looked(SS)
    assert (server["name"], server["found"], server["mend"]) == ("server", "127.0.0.1:8000: this host alone", "")
    assert (fine["name"], fine["mend"]) == ("listening", "")
    assert fine["found"] == "udp 10.0.0.5:68 systemd-network; udp [fe80::8ff:fe00:1]:546 systemd-network"
    # torch's store of an older vLLM, asked for 127.0.0.1, listens so.
    [_, more] = looked(SS + 'tcp LISTEN 0 4096 *:36085 *:* users:(("VLLM::EngineCor",pid=901,fd=12))\n')
    assert "tcp *:36085 VLLM::EngineCor (the server's own)" in more["found"] and not more["mend"]
    assert looked("")[1]["found"] == "nothing else beyond loopback"


@pytest.mark.parametrize("ec2", [True, False])
def test_ssh_is_a_finding_where_it_is_not_the_way_in(ec2: bool) -> None:
    told = looked(SS + SSH, ec2=ec2)
    if ec2:
        [found] = findings(told)
        assert found.startswith("tcp 0.0.0.0:22, [::]:22 sshd: whoever a security group lets in")
    else:
        assert findings(told) == [] and "tcp 0.0.0.0:22, [::]:22 sshd" in told[1]["found"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('tcp LISTEN 0 5 0.0.0.0:8888 0.0.0.0:* users:(("jupyter-lab",pid=77,fd=6))', "tcp 0.0.0.0:8888 jupyter-lab"),
        ("tcp LISTEN 0 128 0.0.0.0:2024 0.0.0.0:*", "tcp 0.0.0.0:2024 no process told"),
        ('udp UNCONN 0 0 *:5353 *:* users:(("avahi-daemon",pid=78,fd=6))', "udp *:5353 avahi-daemon"),
        ('tcp LISTEN 0 5 10.0.0.5:8000 0.0.0.0:* users:(("other",pid=79,fd=6))', "tcp 10.0.0.5:8000 other"),
        ('tcp LISTEN 0 5 [::ffff:127.0.0.1]:99 *:* users:(("java",pid=80,fd=6))', None),
    ],
)
def test_whatever_else_listens_is_a_finding(line: str, found: str | None) -> None:
    assert findings(looked(f"{SS}{line}\n")) == ([found] if found else [])


@pytest.mark.parametrize(
    ("address", "said", "mends"),
    [
        ("127.0.0.1", "127.0.0.1:8000: this host alone", False),
        (
            "10.0.0.5",
            "10.0.0.5:8000: whoever is routed to the host and let in by the instance's security groups",
            False,
        ),
        ("[fd12::5]", "[fd12::5]:8000: whoever is routed", False),
        ("0.0.0.0", "0.0.0.0:8000: whoever is routed", True),
        ("*", "*:8000: whoever is routed", True),
        ("54.1.2.3", "54.1.2.3:8000: whoever is routed", True),
    ],
)
def test_who_reaches_the_server(address: str, said: str, mends: bool) -> None:
    line = f'tcp LISTEN 0 2048 {address}:8000 0.0.0.0:* users:(("python",pid=900,fd=9))\n'
    server = looked(line)[0]
    assert server["found"].startswith(said)
    assert ("set vllm_service_host" in server["mend"]) == mends
    assert (looked(line)[1:], looked(line, "")[0]["found"]) == (looked("")[1:], "nothing serves")


def test_without_ss_nothing_is_called_fine() -> None:
    [told] = network(Said("", "ss: No such file or directory"), URL, (), ec2=True)
    assert (told["found"], told["mend"]) == ("not known: ss: No such file or directory", "apt-get install iproute2")


def test_an_address_is_private_by_the_roles_own_rule() -> None:
    variables = yaml.safe_load((PROJECT / "roles" / "vllm_service" / "vars" / "main.yml").read_text())
    assert variables["_vllm_service_private"] == PRIVATE.pattern


def test_the_module_looks_at_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(tmp_path / "systemd", monkeypatch)
    (systemd.units / "vllm.service").write_text("[Service]\n")
    lists, asked = tmp_path / "lists", tmp_path / "reboot-required"
    lists.mkdir()
    monkeypatch.setattr(vllm_audit, "_LISTS", lists)
    monkeypatch.setattr(vllm_audit, "_REBOOT", asked)
    monkeypatch.setattr(vllm_audit, "AnsibleModule", lambda **_: Module({"ec2": False, "state": str(tmp_path)}))

    def run() -> dict[str, dict[str, str]]:
        told = ends(vllm_audit.main)
        assert told["changed"] is False
        return {check["name"]: check for check in told["host_checks"]}

    first = run()
    assert list(first)[:4] == ["package lists", "reboot", "sandboxing of vllm.service", "server"]
    assert first["package lists"]["mend"] == "apt-get update"
    assert first["server"]["found"] == "nothing serves"
    (lists / "a_dists_x-security_InRelease").write_text(DATED)
    asked.touch()
    asked.with_name("reboot-required.pkgs").write_text("libc6\n")
    assert run()["reboot"]["found"] == "asked for by libc6"
    assert "security updates" in run()
    assert vllm_audit.said("no-such-program-at-all").problem.startswith("no-such-program-at-all: ")


def test_a_fleet_of_its_own_is_audited_by_the_command(tmp_path: Path) -> None:
    inventory, path = tmp_path / "hosts.yml", with_sshd(tmp_path / "bin")

    def audit(*hosts: str) -> tuple[int, dict[str, Any], str]:
        inventory.write_text(f"vllm: {{hosts: {{{', '.join(hosts)}}}}}\n")
        done = subprocess.run(
            [sys.executable, "-m", "fleet", "audit", "--json", "-i", str(inventory)], cwd=PROJECT,
            env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout), done.stderr

    here = f"here: {{ansible_connection: local, vllm_become: false, ansible_python_interpreter: {sys.executable}}}"
    code, told, said = audit(here)
    assert {check["subject"] for check in told["checks"]} == {"here"} and told["failed"] == {}, said
    assert {"reboot", "server", "listening", "package lists"} <= {check["name"] for check in told["checks"]}
    [listening] = [check for check in told["checks"] if check["name"] == "listening"]
    assert (listening["found"], listening["ok"]) == ("tcp 0.0.0.0:22 sshd", True)
    assert code == (0 if all(check["ok"] for check in told["checks"]) else 4)
    # Two that are not looked at: their reasons are told, and theirs is the exit code.
    gone = "gone: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_ssh_common_args: '-o ConnectTimeout=2'}"
    broken = "broken: {ansible_connection: local, vllm_become: false, ansible_python_interpreter: /no/python}"
    code, told, said = audit(here, broken)
    assert (code, set(told["failed"])) == (1, {"broken"}), said
    code, told, said = audit(here, gone)
    assert (code, set(told["failed"])) == (3, {"gone"}), said
    assert told["failed"]["gone"] and {check["subject"] for check in told["checks"]} == {"here"}
    assert "1 of 2 hosts left: gone" in said
