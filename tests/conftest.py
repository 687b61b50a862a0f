"""Host-side code is imported under the names that Ansible gives it; a program's Ctrl-C reaches what tests start."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from fleet import host_code  # noqa: F401

PROJECT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(PROJECT / "roles" / "vllm_service" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "secrets_fetch" / "files"))
sys.path.insert(0, str(PROJECT / "roles" / "vllm_source_build" / "files"))

# Whoever starts the tests in the background of a shell without job control has Ctrl-C ignored, and a program that is
# started so ignores it on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
