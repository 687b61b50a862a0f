"""`python -m fleet`: the command line, after runner.py has set the environment up."""

from __future__ import annotations

from fleet.cli import run

raise SystemExit(run())
