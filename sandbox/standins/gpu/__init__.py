"""A GPU that is not there: a CUDA driver library and an nvidia-smi that answer with one card's facts.

Nothing runs on it. The library goes where the loader finds it (`/usr/lib/<triplet>/libcuda.so.1`, then
`ldconfig`), the script on the PATH. There is no NVML library, so what asks NVML still sees no GPU.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError

HERE = Path(__file__).parent
T4G = HERE / "cards" / "t4g.json"
LIBRARY = "libcuda.so.1"
TOOL = "nvidia-smi"


def card_header(card: dict[str, Any]) -> str:
    """The C header for a card's facts (bytes; CUDA as the driver encodes it: 13.2 is 13020)."""
    cuda_major, cuda_minor = (int(part) for part in card["cuda"].split("."))
    major, minor = (int(part) for part in card["capability"].split("."))
    values: dict[str, int | str] = {
        "CARD_NAME": json.dumps(card["name"]),
        "CARD_CUDA": cuda_major * 1000 + cuda_minor * 10,
        "CARD_MAJOR": major,
        "CARD_MINOR": minor,
        "CARD_MEMORY_MIB": int(card["memory_mib"]),
        "CARD_SHARED": int(card["shared_memory_per_block_bytes"]),
        "CARD_SHARED_OPTIN": int(card["shared_memory_per_block_optin_bytes"]),
        "CARD_MULTIPROCESSORS": int(card["multiprocessors"]),
    }
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def build(out: Path, card: Path = T4G, compiler: str = "gcc") -> dict[str, Path]:
    """Build the stand-in for `card` into the folder `out`.

    Returns:
        The files made, by name: `libcuda.so.1` and `nvidia-smi` (executable).

    Raises:
        FleetError: no compiler, or it failed.
    """
    facts = json.loads(card.read_text())
    out.mkdir(parents=True, exist_ok=True)
    library, tool = out / LIBRARY, out / TOOL
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "card.h").write_text(card_header(facts))
        argv = [
            compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{folder}",
            f"-Wl,-soname,{LIBRARY}", "-o", str(library), str(HERE / "libcuda.c"),
        ]  # fmt: skip
        try:
            subprocess.run(argv, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise FleetError(
                f"the GPU stand-in needs a C compiler: {compiler} is not on the PATH",
                where=str(out),
                mend="apt-get install gcc libc6-dev",
                code=ExitCode.HOST_FAILED,
                who="sandbox",
            ) from error
        except subprocess.CalledProcessError as error:
            raise FleetError(
                f"the GPU stand-in did not compile: {error.stderr.strip()[-500:]}",
                where=str(HERE / "libcuda.c"),
                mend="apt-get install gcc libc6-dev",
                code=ExitCode.HOST_FAILED,
                who="sandbox",
            ) from error
    tool.write_text((HERE / "nvidia-smi.py").read_text().replace("@CARD@", json.dumps(facts)))
    tool.chmod(0o755)
    return {LIBRARY: library, TOOL: tool}
