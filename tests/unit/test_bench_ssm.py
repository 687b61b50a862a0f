"""The figures of `bench ssm` from what was measured."""

from __future__ import annotations

import pytest

from bench import ssm_transports
from bench.ssm_transports import Measured


def measured(one_s: float, requests: int) -> list[Measured]:
    """Four converges; the sessions take 100 s and 300 s."""
    return [
        Measured("run-command", 1, one_s, {"ssm:SendCommand": 1, "s3:GetObject": requests - 1}),
        Measured("session", 1, 100.0, {"ssm:StartSession": 400}),
        Measured("run-command", 5, 30.0, {"s3:GetObject": 5}),
        Measured("session", 5, 300.0, {"ssm:StartSession": 2000}),
    ]


@pytest.mark.parametrize(
    ("one_s", "requests", "met"),
    [(10.0, 20, [True, True, True]), (10.5, 20, [False, True, True]), (5.0, 21, [True, True, False])],
)
def test_figures_are_the_ratios_and_the_worse_count(one_s: float, requests: int, met: list[bool]) -> None:
    found = ssm_transports.figures(measured(one_s, requests))
    assert [figure.met for figure in found] == met
    assert [figure.line() for figure in found] == [
        f"FIGURE noop_ratio_1 {round(one_s / 100, 3):g} ratio goal <=0.1",
        "FIGURE noop_ratio_5 0.1 ratio goal <=0.1",
        f"FIGURE aws_requests_per_host {requests} requests goal <=20",
    ]
