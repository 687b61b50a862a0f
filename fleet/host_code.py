"""Makes the code that runs on hosts importable here under the names that Ansible gives it there."""

from __future__ import annotations

import ansible.module_utils

from fleet.paths import PROJECT

_FOLDER = str(PROJECT / "plugins" / "module_utils")
if _FOLDER not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_FOLDER)
