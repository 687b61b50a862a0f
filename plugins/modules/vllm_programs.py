#!/usr/bin/python
"""Ansible module: a folder of programs on the host is exactly what the role carries."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: vllm_programs
short_description: Programs of a role on the host, in one step
description:
  - Writes what differs, each file whole, and removes what the role does not carry (any more). The action plugin of the
    same name packs the role's C(files) folder.
options:
  dest: {type: path, required: true, description: "Folder on the host, which is the role's alone."}
  archive: {type: str, description: "The files as a tar archive in base64; the action plugin gives it."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_programs: {dest: /opt/vllm-fleet/lib/build}
"""
RETURN = """
---
written: {type: list, returned: always, description: Files that differed.}
removed: {type: list, returned: always, description: Files that are not the role's.}
"""


def unpacked(archive: str) -> dict[str, bytes]:
    """Relative path to content."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member))}


def put(dest: Path, files: dict[str, bytes], *, check: bool) -> tuple[list[str], list[str]]:
    """Makes the folder hold these files and no others, byte-code aside; which were written and which removed."""
    there = {str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    removed = sorted(there - files.keys())
    written = [name for name, content in files.items() if not _is(dest / name, content)]
    if check:
        return written, removed
    for name in removed:
        (dest / name).unlink()
    for name in written:
        path = dest / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(files[name])
        part.chmod(0o644)
        part.replace(path)
    return written, removed


def _is(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_mode & 0o777 == 0o644 and path.read_bytes() == content


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        # Kept out of the host's log, where it would be one long line.
        argument_spec={
            "dest": {"type": "path", "required": True},
            "archive": {"type": "str", "required": True, "no_log": True},
        },
        supports_check_mode=True,
    )
    files = unpacked(module.params["archive"])
    written, removed = put(Path(module.params["dest"]), files, check=module.check_mode)
    module.exit_json(changed=bool(written or removed), written=written, removed=removed)


if __name__ == "__main__":
    main()
