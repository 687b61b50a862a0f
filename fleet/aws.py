"""Clients of AWS with the patience that this project wants: reads are tried again, what acts is not."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config

_CONNECT_S, _READ_S = 10, 30
# Standard mode: exponential waits with jitter, throttling told apart from faults, a quota of retries for the client.
_READ_ATTEMPTS = 8


def client(service: str, region: str, *, once: bool = False) -> Any:
    """A client of one service in one region.

    Args:
        service: the service by botocore's name.
        region: the region; an instance's is in its inventory variables.
        once: for calls that act and carry no token of their own (SendCommand, RebootInstances): a request whose
            answer was lost may have been carried out, so it is never sent a second time.
    """
    attempts = 1 if once else _READ_ATTEMPTS
    return boto3.session.Session().client(
        service,
        region_name=region,
        config=Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            max_pool_connections=50,
            user_agent_extra="vllm-fleet",
        ),
    )
