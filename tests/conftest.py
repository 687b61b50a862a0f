"""Host-side code is imported under the names that Ansible gives it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent

for source in sorted((PROJECT / "plugins" / "module_utils").glob("*.py")):
    name = f"ansible.module_utils.{source.stem}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
sys.path.insert(0, str(PROJECT / "roles" / "vllm_service" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "secrets_fetch" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "vllm_source_build" / "files"))
