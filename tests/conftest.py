"""Host-side code is imported under the names that Ansible gives it."""

from __future__ import annotations

import sys
from pathlib import Path

from fleet import host_code  # noqa: F401

PROJECT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(PROJECT / "roles" / "vllm_service" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "secrets_fetch" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "vllm_source_build" / "files"))
