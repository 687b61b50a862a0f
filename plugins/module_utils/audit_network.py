"""What an audit makes of a host's listening sockets: who reaches the server, and what else is reached."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import groupby
from urllib.parse import urlsplit

from ansible.module_utils.audit_host import Check, Said, check

# As the role takes an address for the server (roles/vllm_service, _vllm_service_private).
PRIVATE = re.compile(r"^(127\.|10\.|192\.168\.|172\.(1[6-9]|2[0-9]|3[01])\.|::1$|f[cd][0-9a-f]{2}:)")
_SSH = ("tcp", 22)
# What a network needs of every host: leases by DHCP, for IPv4 and IPv6. And the resolver of the system.
_LEASES = (("udp", 68), ("udp", 546))
_RESOLVER = "systemd-resolve"


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket that listens: `address` is `*`, or without brackets and zone; processes by name and id."""

    protocol: str
    address: str
    port: int
    names: tuple[str, ...]
    pids: frozenset[int]

    @property
    def who(self) -> str:
        """The process's name."""
        return self.names[0] if self.names else "no process told"

    @property
    def local(self) -> bool:
        """Whether this host alone reaches it."""
        try:
            found = ip_address(self.address)
        except ValueError:
            return False
        return (getattr(found, "ipv4_mapped", None) or found).is_loopback

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"


def sockets(listed: str) -> list[Socket]:
    """The sockets of `ss -H -l -t -u -n -p`."""
    found = []
    for line in listed.splitlines():
        words = line.split()
        address, _, port = words[4].rpartition(":")
        held = re.findall(r'"([^"]*)",pid=(\d+)', line)
        names = tuple(dict.fromkeys(name for name, _ in held))
        address = address.partition("%")[0].strip("[]")
        found.append(Socket(words[0], address, int(port), names, frozenset(int(pid) for _, pid in held)))
    return found


def network(listed: Said, url: str, ours: Collection[int], *, ec2: bool) -> list[Check]:
    """Who reaches the server, and whatever else listens beyond loopback.

    Args:
        listed: what `ss` says.
        url: where the server was when it last passed its gate; empty for never.
        ours: ids of the processes of the server's unit.
        ec2: whether Systems Manager is the way into the host, and security groups stand before it.
    """
    if listed.problem:
        return [check("listening", f"not known: {listed.problem}", "apt-get install iproute2")]
    port = urlsplit(url).port if url else None
    found = sockets(listed.out)
    served = [one for one in found if (one.protocol, one.port) == ("tcp", port) and one.pids & set(ours)]
    others = [one for one in found if one not in served and not one.local]
    return [_server(served, ec2=ec2), *_listening(others, ours, ec2=ec2)]


def _server(served: Sequence[Socket], *, ec2: bool) -> Check:
    if not served:
        return check("server", "nothing serves")
    where = ", ".join(map(str, served))
    if all(one.local for one in served):
        return check("server", f"{where}: this host alone")
    gate = "the instance's security groups (see inbound)" if ec2 else "what stands before it"
    whom = f"{where}: whoever is routed to the host and let in by {gate}"
    if all(PRIVATE.match(one.address) for one in served):
        return check("server", whom)
    mend = "set vllm_service_host to a loopback or private address, then ./runner.py converge"
    return check("server", f"{whom}, and a loopback or private address is wanted", mend)


def _listening(others: Iterable[Socket], ours: Collection[int], *, ec2: bool) -> list[Check]:
    """One check of all that is as it should be, and one of each thing that is not."""
    fine, findings = [], []
    for (protocol, port, who), group in groupby(sorted(others, key=_kind), key=_kind):
        there = list(group)
        told = f"{protocol} {', '.join(map(str, there))} {who}"
        pids = sorted(there[0].pids)
        if (protocol, port) == _SSH and ec2:
            told += ": whoever a security group lets in, and Systems Manager is the way in"
            findings.append(check("listening", told, "systemctl disable --now ssh.socket ssh.service"))
        elif (protocol, port) in (*_LEASES, _SSH) or who == _RESOLVER:
            fine.append(told)
        elif there[0].pids & set(ours):
            # torch's own, between its processes, and on which addresses is not for anybody to set.
            fine.append(f"{told} (the server's own)")
        elif pids:
            mend = f"systemctl status {pids[0]}; stop its unit, or have it listen on 127.0.0.1"
            findings.append(check("listening", told, mend))
        else:
            findings.append(check("listening", told, f"ss -l -t -u -n -p -e sport = :{port}"))
    return [check("listening", "; ".join(fine) or "nothing else beyond loopback"), *findings]


def _kind(one: Socket) -> tuple[str, int, str]:
    return one.protocol, one.port, one.who
