"""Nothing of an interrupted run is left; the other scenarios' tests, run after it, say the rest."""

from __future__ import annotations

from typing import Any


def test_no_unfinished_file_is_left(host: Any) -> None:
    places = "/opt/vllm /opt/rust /srv/swap /var/lib/vllm-fleet /etc/systemd/system /etc/apt/sources.list.d"
    assert host.check_output(f"find {places} -name '*.part' -o -name '*.new' -o -name '*.rej' -o -name '*.orig'") == ""


def test_every_release_is_whole(host: Any) -> None:
    for release in host.check_output("ls -d /opt/vllm/releases/*").split():
        assert host.file(f"{release}/release.json").exists
        assert host.run(f"cd / && {release}/bin/python -c 'import vllm'").rc == 0
