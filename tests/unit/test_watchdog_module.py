"""The watchdog is installed, kept and taken away whole; systemd is a double, its files are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.modules import vllm_watchdog
from tests.unit.doubles import Module, Systemd, ends

TIMER, SERVICE = "vllm-watchdog.timer", "vllm-watchdog.service"


class Host:
    """A host and the module's parameters for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.systemd = Systemd(folder / "systemd", monkeypatch)
        self.folder = folder / "watchdog"
        monkeypatch.setattr(vllm_watchdog, "objection", lambda _name, _text: "")

    def run(self, *, enabled: bool = True, check_mode: bool = False, **more: Any) -> dict[str, Any]:
        params = {
            "enabled": enabled, "folder": str(self.folder), "program": "print()\n", "request": {"failures": 3},
            "service_text": "[Service]\n", "timer_text": "[Timer]\n", **more,
        }  # fmt: skip
        return ends(lambda: vllm_watchdog.Watchdog(Module(params, check_mode=check_mode)).run())

    def files(self) -> list[str]:
        return sorted(path.name for folder in (self.folder, self.systemd.units) for path in folder.glob("*"))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_it_is_installed_once_and_shown_in_the_diff(host: Host) -> None:
    first = host.run()
    assert first["changed"]
    assert sorted(Path(part["before_header"]).name for part in first["diff"]) == host.files()
    assert host.files() == ["request.json", SERVICE, TIMER, "watchdog.py"]
    assert host.systemd.state(TIMER) == {
        **host.systemd.state(TIMER),
        "ActiveState": "active",
        "UnitFileState": "enabled",
    }
    calls = host.systemd.calls()
    second = host.run()
    assert (second["changed"], second["diff"]) == (False, [])
    assert host.systemd.calls() == calls


@pytest.mark.parametrize("enabled", [True, False])
def test_check_mode_touches_nothing(host: Host, enabled: bool) -> None:
    assert host.run(enabled=enabled, check_mode=True)["changed"] == enabled
    assert host.files() == []
    assert host.systemd.calls() == []
    host.run()
    files = host.files()
    assert host.run(enabled=enabled, check_mode=True)["changed"] != enabled
    assert host.files() == files


def test_switched_off_it_is_gone_and_stays_gone(host: Host) -> None:
    host.run()
    assert host.run(enabled=False)["changed"]
    assert host.files() == []
    assert not host.folder.exists()
    assert host.systemd.state(TIMER) == {
        **host.systemd.state(TIMER),
        "ActiveState": "inactive",
        "UnitFileState": "disabled",
    }
    # What the last look saw goes too.
    assert f"clean {SERVICE}" in host.systemd.calls()
    assert not host.run(enabled=False)["changed"]


@pytest.mark.parametrize(
    "drift",
    [
        lambda host: host.systemd.set(TIMER, ActiveState="inactive"),
        lambda host: host.systemd.set(TIMER, UnitFileState="disabled"),
        lambda host: (host.folder / "watchdog.py").unlink(),
        lambda host: (host.systemd.units / TIMER).write_text("[Timer]\nOnCalendar=yearly\n"),
    ],
)
def test_drift_is_mended(host: Host, drift: Any) -> None:
    host.run()
    drift(host)
    assert host.run()["changed"]
    assert not host.run()["changed"]


def test_new_limits_arrive(host: Host) -> None:
    host.run()
    changed = host.run(request={"failures": 5})
    (part,) = changed["diff"]
    assert '"failures": 5' in part["after"]
    assert '"failures": 5' in (host.folder / "request.json").read_text()


def test_a_timer_that_does_not_start_is_told(host: Host) -> None:
    (host.systemd.home / "start-fails").touch()
    failed = host.run()
    assert failed["failed"]
    assert failed["msg"].startswith("vllm_service: watchdog: the timer is not on after its start\n  where: ")
    assert "\n  mend:  systemctl status vllm-watchdog.timer" in failed["msg"]
