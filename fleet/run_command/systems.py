"""Which Python a host's system has, by what its Systems Manager agent says of it."""

from __future__ import annotations

from fleet.errors import FleetError

# PlatformName and the start of PlatformVersion in DescribeInstanceInformation; the versions by the distributions' own
# release notes. ansible-core of the wheels wants Python 3.11 or newer.
_PYTHONS = {
    ("Ubuntu", "24.04"): "3.12",
    ("Ubuntu", "25.04"): "3.13",
    ("Ubuntu", "25.10"): "3.13",
    ("Debian GNU/Linux", "12"): "3.11",
    ("Debian GNU/Linux", "13"): "3.13",
    ("Red Hat Enterprise Linux", "10"): "3.12",
}
PYTHONS = ("3.11", "3.12", "3.13")


def python_of(host: str, platform: str, version: str, wanted: str = "") -> str:
    """The Python version to make the host's environment for; `wanted` is the host's own variable, if it has one.

    Raises FleetError for a system that is not known, and for a Python that has no wheels.
    """
    known = next(
        (found for (name, start), found in _PYTHONS.items() if name == platform and version.startswith(start)), ""
    )
    python = wanted or known
    if python not in PYTHONS:
        found = f"Python {wanted}" if wanted else f"{platform or 'an unknown system'} {version}".strip()
        raise FleetError(
            f"{found} is none that wheels are made for ({', '.join(PYTHONS)})",
            where=f"{host} vllm_fleet_python",
            mend="install one of them there and set vllm_fleet_python for this host, or use --transport session",
        )
    return python
