"""A pytest plugin with which vLLM's attention host code is imported from a tree where vLLM is not installed.

Runs in an environment that has torch and Triton; `VLLM_TREE` names the tree. As for the compile check, all of vLLM but
the attention kernels and their helpers is stubbed.
"""

from __future__ import annotations

import os
from pathlib import Path

import compile_check

_TREE = Path(os.environ["VLLM_TREE"])

compile_check.load(_TREE, _TREE / compile_check.ATTENTION, (7, 5), 65536)
