"""The benchmark's simulated hosts at a small size: the controller's own code, in a process of its own, to the end."""

from __future__ import annotations

import re

import pytest

from bench import ssm_cloud, ssm_plot, ssm_scale
from bench.patch import Figure
from fleet.errors import FleetError


def test_twenty_hosts() -> None:
    found = ssm_scale.measure(20, 2.0)
    assert found.hosts == 20
    assert found.mib > 0
    assert found.cpu_s > 0
    # One command up to fifty hosts; each of four chunks (after 0.5, 4 and 6.4 s, and at the end of 20) is read once.
    assert found.requests["ssm:SendCommand"] == 1
    assert found.requests["s3:GetObject"] == 20 * 4
    assert found.host_requests == 20 * (1 + 4)


def test_a_run_without_all_its_hosts_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ssm_scale._inventory(2)
    monkeypatch.setattr(ssm_scale, "_inventory", lambda _: {**listed, "all": {**listed["all"], "children": {}}})
    with pytest.raises(FleetError, match="not all of 2 simulated hosts"):
        ssm_scale.measure(2, 0.5)


def test_ids_are_as_ec2s() -> None:
    assert ssm_cloud.ids(2) == ["i-00000000000000001", "i-00000000000000002"]


def test_figure_without_goal() -> None:
    assert Figure("name", 0.5, "s", "", True).line() == "FIGURE name 0.5 s"
    assert Figure("name", 0.5, "s", "<=1", True).line() == "FIGURE name 0.5 s goal <=1"


def test_plot_shows_each_size_in_both_panels() -> None:
    texts = re.findall(r">([^<>]+)</text>", ssm_plot.plot([(10, 100, 0.5), (1000, 300, 0.1)], 512))
    assert texts.count("1,000") == 2
    assert "goal 512" in texts
    assert "0.1" in texts
