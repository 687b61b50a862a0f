"""The fetcher's unit is kept as wanted, a rotated token restarts nothing, an unwanted one goes; systemd is a double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.modules import vllm_secret
from tests.unit.doubles import Module, Systemd, ends

UNIT = "vllm-secrets.service"


class Host:
    """A host whose fetcher is installed, and whose unit writes the version that stands in `upstream`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.systemd = Systemd(folder / "systemd", monkeypatch)
        self.home, self.run_folder = folder / "home", folder / "run"
        self.home.mkdir()
        self.run_folder.mkdir()
        (self.home / "requirements.stamp").write_text("boto3\n")
        self.upstream = folder / "upstream"
        self.upstream.write_text("v1")
        fetch = (
            f"import os\nupstream = pathlib.Path({str(self.upstream)!r}).read_text()\n"
            f"folder = pathlib.Path({str(self.run_folder)!r})\n"
            "if upstream == 'denied':\n    path.write_text(json.dumps(units)); sys.exit(1)\n"
            "(folder / 'version').write_text(upstream)\n"
            "(folder / 'hf_token').unlink(missing_ok=True)\n"
            "(folder / 'hf_token').write_text('hf_' + upstream)\n(folder / 'hf_token').chmod(0o400)\n"
        )
        for verb in ("restart", "reload"):
            (self.systemd.home / f"on-{verb}.py").write_text(fetch)
        # The folder is on a disk here and in memory on a host, where it is checked.
        monkeypatch.setattr(vllm_secret.Secret, "is_right", lambda _: (self.run_folder / "hf_token").is_file())

    def run(self, *, check_mode: bool = False, **more: Any) -> dict[str, Any]:
        params = {
            "home": str(self.home), "folder": str(self.run_folder), "file": "hf_token", "requirements": "boto3\n",
            "program": "print()\n", "unit_text": "[Service]\n", "request": {"secret_id": "s"}, **more,
        }  # fmt: skip
        return ends(lambda: vllm_secret.Secret(Module(params, check_mode=check_mode)).run())

    def remove(self, *, check_mode: bool = False) -> dict[str, Any]:
        params = {"home": str(self.home), "folder": str(self.run_folder), "file": "hf_token"}
        return ends(lambda: vllm_secret.Secret(Module(params, check_mode=check_mode)).remove())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_token_is_fetched_and_a_second_run_changes_nothing(host: Host) -> None:
    first = host.run()
    assert (first["failed"], first["changed"], first["version"]) == (False, True, "v1")
    assert not host.run()["changed"]
    assert not host.run(check_mode=True)["changed"]


def test_a_rotated_token_arrives_and_restarts_nothing(host: Host) -> None:
    host.run()
    host.upstream.write_text("v2")
    calls = len(host.systemd.calls())
    rotated = host.run()
    assert (rotated["changed"], rotated["version"]) == (True, "v2")
    assert (host.run_folder / "hf_token").read_text() == "hf_v2"
    # A restart would clear the runtime directory, and stop what depends on the unit.
    assert host.systemd.calls()[calls:] == [f"reload {UNIT}"]
    assert not host.run()["changed"]


def test_check_mode_fetches_nothing(host: Host) -> None:
    assert host.run(check_mode=True)["changed"]
    assert host.systemd.calls() == []
    assert not (host.systemd.units / UNIT).exists()


def test_the_diff_shows_files_and_no_token(host: Host) -> None:
    first = host.run()
    assert sorted(Path(part["after_header"]).name for part in first["diff"]) == [
        "fetch_secret.py", "request.json", UNIT,
    ]  # fmt: skip
    assert "hf_v1" not in str(first)


def test_a_token_that_is_gone_is_fetched_again(host: Host) -> None:
    host.run()
    (host.run_folder / "hf_token").unlink()
    assert host.run(check_mode=True)["changed"]
    assert host.run()["changed"]
    assert (host.run_folder / "hf_token").is_file()


def test_a_refused_rotation_is_told_in_the_fetchers_words_and_keeps_the_token(host: Host) -> None:
    host.run()
    host.upstream.write_text("denied")
    (host.systemd.home / "journal").write_text(
        "secrets_fetch: secret s is denied\n  where: us-east-1 s\n  mend:  grant it\nunit failed\n"
    )
    failed = host.run()
    assert failed["failed"]
    assert failed["msg"] == "secrets_fetch: secret s is denied\n  where: us-east-1 s\n  mend:  grant it"
    assert (host.run_folder / "hf_token").read_text() == "hf_v1"


def test_another_secret_is_another_request(host: Host) -> None:
    host.run()
    changed = host.run(request={"secret_id": "other"})
    assert changed["changed"]
    assert '"other"' in changed["diff"][0]["after"]
    assert '"s"' in changed["diff"][0]["before"]


def test_what_is_no_longer_wanted_goes_whole_and_once(host: Host) -> None:
    host.run()
    calls = len(host.systemd.calls())
    assert host.remove(check_mode=True)["changed"]
    assert (host.home / "fetch_secret.py").is_file()
    assert host.systemd.calls()[calls:] == []
    assert host.remove()["changed"]
    assert [host.home.exists(), host.run_folder.exists(), (host.systemd.units / UNIT).exists()] == [False] * 3
    told = host.systemd.calls()[calls:]
    assert told[:2] == [f"disable {UNIT}", f"stop {UNIT}"]
    assert not host.remove()["changed"]
    assert host.systemd.calls()[calls:] == told


def test_a_token_that_the_server_takes_is_not_removed(host: Host) -> None:
    host.run()
    server = host.systemd.units / "vllm.service"
    server.write_text(f"[Service]\nLoadCredential=hf_token:{host.run_folder}/hf_token\n")
    refused = host.remove()
    assert (refused["failed"], refused["refused"]) == (True, True)
    assert "vllm.service still takes" in refused["msg"]
    assert (host.run_folder / "hf_token").is_file() and (host.systemd.units / UNIT).is_file()
    # In a check the service is not switched yet, and in the run it will be.
    assert host.remove(check_mode=True)["changed"]
    server.write_text("[Service]\n")
    assert host.remove()["changed"]


def test_a_folder_that_somebody_else_fills_is_left(host: Host) -> None:
    host.home.joinpath("requirements.stamp").unlink()
    host.home.rmdir()
    (host.run_folder / "hf_token").write_text("theirs")
    assert not host.remove()["changed"]
    assert (host.run_folder / "hf_token").read_text() == "theirs"


def test_no_name_of_a_secret_is_bad_input(host: Host) -> None:
    failed = host.run(request={"secret_id": ""})
    assert failed["failed"]
    assert failed["argument_errors"] == ["secrets_fetch_secret_id is empty, and a secret's name is wanted"]
    assert host.systemd.calls() == []
