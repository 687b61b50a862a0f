"""A role's programs on the host in one step: `copy` takes several for each file."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase


def packed(folder: Path) -> str:
    """All files of a folder as a tar archive in base64, byte-code left out, the same for the same content."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                member = tarfile.TarInfo(str(path.relative_to(folder)))
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return base64.b64encode(archive.getvalue()).decode()


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Hands the role's `files` folder to the module of the same name."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Packs the folder on the controller and runs the module."""
        super().run(tmp, task_vars)
        folder = Path(self._find_needle("files", "."))
        words = {**self._task.args, "archive": packed(folder)}
        found: dict[str, Any] = self._execute_module(
            module_name="vllm_programs", module_args=words, task_vars=task_vars
        )
        return found
