"""The sandbox's models: a tiny Gemma 4 trained here, and its scrambled twin; kept by digest of what made them."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from fleet.paths import PROJECT, cache_dir
from sandbox.containers import Podman
from sandbox.image import WHEELS, HostImage

_RECIPE = PROJECT / "sandbox" / "model"
_TRANSFORMERS = "transformers==5.19.0"


def ensure(podman: Podman, host_image: HostImage) -> Path:
    """Returns the folder that holds `tiny` and `scrambled`, training them where the recipe is new."""
    digest = hashlib.sha256(_TRANSFORMERS.encode())
    for source in sorted(_RECIPE.glob("*.py")):
        digest.update(source.read_bytes())
    home = cache_dir() / "models" / digest.hexdigest()[:16]
    if home.exists():
        return home
    part = home.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    name = "vllm-fleet-model-builder"
    podman("rm", "-f", "--ignore", "-t", "1", name)
    volumes = [arg for mount in (*host_image.mounts, f"{_RECIPE}:/recipe:ro", f"{part}:/out") for arg in ("-v", mount)]
    podman(
        "run", "-d", "--name", name, "--net", "host", "--ulimit", "host", *volumes, "--entrypoint", "sleep",
        host_image.name, "infinity",
    )  # fmt: skip
    try:
        podman.shell(
            name,
            f"/opt/pytorch/bin/pip install -q --find-links {WHEELS} {_TRANSFORMERS} jinja2 safetensors\n"
            "cd /tmp\n"
            "/opt/pytorch/bin/python /recipe/build.py --out /out/tiny\n"
            "/opt/pytorch/bin/python /recipe/build.py --scramble /out/tiny --out /out/scrambled\n"
            "chmod -R a+rX /out\n",
        )
    finally:
        podman("rm", "-f", "-t", "1", name)
    part.rename(home)
    return home
