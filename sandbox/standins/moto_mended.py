"""Where moto does less than EC2 documents, and this project needs it: each mend is named for what it brings."""

from __future__ import annotations

from typing import Any

from moto.ec2.models import EC2Backend


def spot_by_template() -> None:
    """A launch template's market options hold for the instances started by it; moto reads those of the call alone."""
    run = EC2Backend.run_instances

    def run_instances(self: EC2Backend, *args: Any, **more: Any) -> Any:
        if more.get("launch_template") and not more.get("instance_market_options"):
            options = self._get_template_from_args(more["launch_template"]).data.get("InstanceMarketOptions") or {}
            more["instance_market_options"] = options.get("MarketType")
        return run(self, *args, **more)

    EC2Backend.run_instances = run_instances
