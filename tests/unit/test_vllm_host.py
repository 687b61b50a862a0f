"""The module as a role calls it, on this machine as a builder: its record, its differences, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.host_probe import read_host

from plugins.modules import vllm_host
from tests.unit.examples import FIGURES, gpu
from tests.unit.test_model_probe import NAME, TOKEN, Server, serve


class Ended(Exception):
    """The module came to its end; `result` is what it told."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg", ""))
        self.result = result


class Host:
    """Runs the module against a folder of records."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = state
        self._monkeypatch = monkeypatch

    @property
    def record(self) -> dict[str, Any]:
        """What is kept of the host."""
        found: dict[str, Any] = json.loads((self.state / "host.json").read_text())
        return found

    def run(self, *, check_mode: bool = False, **changes: Any) -> dict[str, Any]:
        """The module's result; without changes, a builder for 7.5 that asks no hub."""
        known = {
            "host": "one", "method": "wheel", "capability": "7.5", "capabilities": ["7.5"], "cuda": "",
            "torch_prefixes": [], "model": NAME, "hub_endpoint": "", "token_file": "", "checkpoint_bytes": 0,
            "vllm_releases": [], "host_compiler": "", "rust_toolchain": "",
            "arguments": [], "swap_margin_mib": 1024, "swapfile": "", "writes": [],
            "kernel_figures": {"capabilities": {}},
            "releases": str(self.state / "releases"), "state": str(self.state),
        }  # fmt: skip

        class Module:
            """What the module asks of Ansible."""

            def __init__(self, **_: Any) -> None:
                self.params = {**known, **changes}
                self.check_mode = check_mode

            def exit_json(self, **result: Any) -> None:
                raise Ended(result)

            def fail_json(self, **result: Any) -> None:
                raise Ended(result)

        self._monkeypatch.setattr(vllm_host, "AnsibleModule", Module)
        with pytest.raises(Ended) as ended:
            vllm_host.main()
        return ended.value.result


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Host(tmp_path / "state", monkeypatch)


def test_a_record_is_kept_once_and_check_mode_keeps_none(host: Host) -> None:
    assert host.run(check_mode=True)["changed"]
    assert not host.state.exists()
    first = host.run()
    assert (first["changed"], first["recorded"]) == (True, False)
    assert (host.state / "host.json").stat().st_mode & 0o777 == 0o644
    again = host.run()
    assert (again["changed"], again["recorded"], again["differences"]) == (False, True, [])
    assert again["diff"]["before"] == again["diff"]["after"]


def test_a_host_that_is_no_longer_as_recorded_says_how_and_stays_untouched(host: Host) -> None:
    # CASES G14.
    host.run()
    record = host.record
    record["host"]["ami"], record["host"]["torch"]["version"] = "ami-older", "2.7.0+cu128"
    (host.state / "host.json").write_text(json.dumps(record))
    before = (host.state / "host.json").read_bytes()
    found = host.run(check_mode=True)
    assert found["differences"] == ["host.ami: ami-older -> nothing", "host.torch.version: 2.7.0+cu128 -> nothing"]
    assert (host.state / "host.json").read_bytes() == before
    assert "ami-older" in found["diff"]["before"]
    assert "ami-older" not in found["diff"]["after"]


def test_the_shape_is_in_the_plan_and_a_record_of_before_windows_is_read(host: Host) -> None:
    url, _, server = serve()
    told = host.run(hub_endpoint=url)
    server.shutdown()
    server.server_close()
    layers = [{"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
              {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512}]  # fmt: skip
    wanted = {"dtype": "float16", "block_size": 16, "layers": layers}
    assert told["plan"]["attention"] == host.record["plan"]["attention"] == wanted
    record = host.record
    record["model"]["attention"] = [entry[:3] for entry in record["model"]["attention"]]
    del record["plan"]["attention"]
    (host.state / "host.json").write_text(json.dumps(record))
    # With the hub silent the heads are kept, and no window is known.
    silent = host.run(hub_endpoint=url)
    assert silent["plan"]["attention"] == {**wanted, "layers": [layers[0], {**layers[1], "sliding_window": 0}]}
    assert [line.split(":")[0] for line in silent["differences"]] == ["model.attention", "plan.attention"]
    assert host.run(hub_endpoint=url)["differences"] == []


def test_a_hub_that_falls_silent_changes_no_plan(host: Host) -> None:
    # Larger than any memory here, so that swap is wanted.
    url, _, server = serve(sizes={"model.safetensors": 1 << 45, "config.json": 1, "chat_template.jinja": 1})
    told = host.run(hub_endpoint=url)
    server.shutdown()
    server.server_close()
    silent = host.run(hub_endpoint=url)
    assert silent["plan"]["swap_mib"] == told["plan"]["swap_mib"] > 0
    assert silent["changed"] is False
    assert any(d["topic"] == "hub" and d["decision"] == "silent" for d in silent["plan"]["decisions"])


def test_a_size_that_was_never_told_leaves_the_swap_as_it_is(host: Host, tmp_path: Path) -> None:
    swapfile = tmp_path / "swapfile"
    swapfile.write_bytes(bytes(64 * 1024 * 1024))
    assert host.run(swapfile=str(swapfile))["plan"]["swap_mib"] == 64


def test_a_refusal_keeps_no_record(host: Host) -> None:
    found = host.run(capability="7.4")
    assert found["refused"]
    assert found["msg"].startswith("preflight: capability 7.4 has no plan; planned are 7.5\n  where: one ")
    assert not host.state.exists()


def test_the_figures_that_it_is_given_refuse_what_cannot_fit(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FACTS: 32 query heads to a KV head 512 wide.
    config = {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(vllm_host, "read_host", lambda *given: {**read_host(*given), "gpus": [gpu()]})
    told = {"capabilities": {"7.5": {"shapes": FIGURES}}}
    assert "at least 98,304 bytes" in host.run(model=str(tmp_path), kernel_figures=told)["msg"]
    assert "98,304" not in json.dumps(host.run(model=str(tmp_path)))


def test_the_token_is_in_no_result_and_no_record(host: Host, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    url, handler, server = serve(gated=True)
    found = host.run(hub_endpoint=url, token_file=str(tmp_path / "token"))
    refused = host.run(hub_endpoint=url, token_file=str(tmp_path / "token"), model="owner/nothing")
    server.shutdown()
    server.server_close()
    assert issubclass(handler, Server)
    assert any(TOKEN in token for _, token in handler.asked)
    assert "no model owner/nothing is there" in refused["msg"]
    assert TOKEN not in json.dumps([found, refused, host.record])


def test_a_silent_index_is_refused_before_a_first_release_and_no_matter_after(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    wanted = [{"name": "a", "distribution": "vllm", "version": "0.33.0"}]
    refused = host.run(vllm_releases=wanted)
    assert refused["refused"]
    assert "the package index http://127.0.0.1:1/simple cannot be reached" in refused["msg"]
    assert not host.state.exists()
    record = host.state / "releases" / "one" / "release.json"
    record.parent.mkdir(parents=True)
    record.touch()
    assert "refused" not in host.run(vllm_releases=wanted)
