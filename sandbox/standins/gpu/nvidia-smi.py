#!/usr/bin/python3
"""Stand-in for nvidia-smi: answers queries about the card with its facts."""

from __future__ import annotations

import json
import sys

CARD = json.loads("""@CARD@""")
ANSWERS = {
    "index": "0",
    "count": "1",
    "name": CARD["name"],
    "gpu_name": CARD["name"],
    "driver_version": CARD["driver"],
    "compute_cap": CARD["capability"],
    "memory.total": f"{CARD['memory_mib']} MiB",
    "memory.used": "0 MiB",
    "memory.free": f"{CARD['memory_mib']} MiB",
}


def main(arguments: list[str]) -> int:
    """Answer one query, the list (-L) or the table; refuse what the real one would."""
    query = next((a.partition("=")[2] for a in arguments if a.startswith("--query-gpu=")), "")
    style = next((a.partition("=")[2] for a in arguments if a.startswith("--format=")), "").split(",")
    if query:
        fields = [f.strip() for f in query.split(",")]
        unknown = [f for f in fields if f not in ANSWERS]
        if unknown:
            print(f'Field "{unknown[0]}" is not a valid field to query.')
            return 2
        if "csv" not in style:
            print('"--format=" is missing or is not csv')
            return 2
        values = [ANSWERS[f] for f in fields]
        if "nounits" in style:
            values = [v.removesuffix(" MiB") for v in values]
        if "noheader" not in style:
            print(", ".join(fields))
        print(", ".join(values))
        return 0
    if arguments == ["-L"]:
        print(f"GPU 0: {CARD['name']} (UUID: GPU-00000000-0000-0000-0000-000000000000)")
        return 0
    if arguments:
        print(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help: {arguments}")
        return 2
    print(f"NVIDIA-SMI {CARD['driver']}  Driver Version: {CARD['driver']}  CUDA Version: {CARD['cuda']}")
    print(f"|   0  {CARD['name']}  0MiB / {CARD['memory_mib']}MiB |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
