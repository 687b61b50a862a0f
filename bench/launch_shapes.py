"""Searches launch shapes on the GPU at hand and writes them to the role's file: `launch_shapes.py --tree DIR`.

DIR holds `vllm/` of one version, stock. Needs torch, Triton and an NVIDIA GPU, nothing of this project's environment.
The code that is timed is lowered for the capability asked for and assembled for the GPU at hand, unless that is of this
capability itself. The search is `roles/triton_patch/files/shape_search.py`; the choice among what it found is made by
`plugins/module_utils/launch_shapes.py` whenever the patch is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parents[1]
_FILES = _PROJECT / "roles" / "triton_patch" / "files"
_LIMIT_BYTES = {"7.5": 65536}


def main() -> int:
    """Runs the search and writes its figures."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--tree", type=Path, required=True, help="folder that holds vllm/, stock")
    words.add_argument("--version", required=True, help="its version, for the record")
    words.add_argument("--capability", choices=list(_LIMIT_BYTES), default="7.5")
    words.add_argument("--heads", type=int, nargs="+", default=[512, 256], help="head sizes")
    words.add_argument("--out", type=Path, default=_FILES / "launch_shapes.json")
    given = words.parse_args()
    import torch

    here = "{}.{}".format(*torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request: dict[str, Any] = {
            "capability": given.capability, "limit_bytes": _LIMIT_BYTES[given.capability],
            "site_packages": str(given.tree.resolve()), "source": str(patched(given.tree, folder)),
            "head_sizes": given.heads, "dtype": "float16", "heads": 8, "kv_heads": 1, "block_size": 16,
            "vllm": given.version, "time": True, "lowered": here != given.capability,
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        argv = [sys.executable, str(_FILES / "shape_search.py"), str(folder / "request.json")]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    report = {"limit_bytes": request["limit_bytes"], **json.loads(done.stdout.splitlines()[-1])}
    known = json.loads(given.out.read_text())["capabilities"] if given.out.exists() else {}
    given.out.write_text(written({**known, given.capability: report}))
    print(f"{len(report['shapes'])} shapes for {given.capability} in {given.out}")
    return 0


def patched(tree: Path, folder: Path) -> Path:
    """A copy of the attention file with the patch in it, whose table of shapes the search fills."""
    # What Ansible gives host code its names by is not here.
    package = types.ModuleType("ansible.module_utils")
    package.__path__ = [str(_PROJECT / "plugins" / "module_utils")]
    sys.modules |= {"ansible": types.ModuleType("ansible"), "ansible.module_utils": package}
    from ansible.module_utils.patch_engine import apply
    from ansible.module_utils.patch_registry import ATTENTION, patches

    [patch] = patches([])
    copy = folder / Path(ATTENTION).name
    shutil.copy(tree / ATTENTION, copy)
    copy.write_text(apply(copy.read_text(), patch, ATTENTION))
    return copy


def written(reports: dict[str, Any]) -> str:
    """The reports as JSON, a shape a line."""
    marks: dict[str, str] = {}
    for capability, report in reports.items():
        marks[f'"@{capability}"'] = ",\n    ".join(json.dumps(shape) for shape in report["shapes"])
    bare = {capability: {**report, "shapes": [f"@{capability}"]} for capability, report in reports.items()}
    text = json.dumps({"capabilities": bare}, indent=1)
    for mark, lines in marks.items():
        text = text.replace(mark, lines)
    return text + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
