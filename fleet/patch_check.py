"""Whether vLLM's attention kernels fit a GPU below 8.0, as they are and patched; asked of Triton's compiler, no GPU."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fleet.compilers import TRITON_OF_TORCH, python_with
from fleet.environments import site_packages
from fleet.errors import ExitCode, FleetError
from fleet.patch_trees import FIGURES, LIMITS, PATCHES, apply_all, revert_all
from fleet.paths import PROJECT, cache_dir
from fleet.steps import Steps
from fleet.vllm_sources import Tree

from ansible.module_utils.attention_shape import attention_shape, largest_group  # isort: skip
from ansible.module_utils.host_plan import Wishes  # isort: skip
from ansible.module_utils.version_rules import NO_FLOAT16  # isort: skip
from ansible.module_utils.model_probe import shape as shape_of  # isort: skip
from ansible.module_utils.patch_check import NoVerdict, compilers_of, question, run_check  # isort: skip
from ansible.module_utils.patch_files import write_whole  # isort: skip

CHECKER = PROJECT / "roles" / "triton_patch" / "files" / "compile_check.py"
FLEX_CHECKER = CHECKER.with_name("flex_check.py")
_FROM_8 = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
_TIMEOUT_S = 600.0


class Fit(StrEnum):
    """What came of the check."""

    NOT_NEEDED = "not_needed"
    FITS_PATCHED = "fits_patched"
    DOES_NOT_FIT = "does_not_fit"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be judged: the tree, for which compiler, capability, limit (bytes) and attention shape.

    `flex` says whether Flex attention is judged too, which vLLM takes only where it is told to.
    """

    tree: Tree
    triton: str
    capability: str
    limit_bytes: int
    shape: dict[str, Any]
    flex: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check, with the launches as the compiler reports them, of the files as they are and patched."""

    asked: Asked
    outcome: Fit
    reason: str
    torch: str = ""
    stock: list[dict[str, Any]] = field(default_factory=list)
    patched: list[dict[str, Any]] = field(default_factory=list)
    error: FleetError | None = None

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        asked = asdict(self.asked)
        tree = asked.pop("tree")
        told = {"vllm": tree["version"], "tree": str(tree["path"]), **asked, "torch": self.torch}
        told |= {"outcome": self.outcome, "reason": self.reason, "stock": self.stock, "patched": self.patched}
        return told | ({"error": self.error.as_dict()} if self.error else {})


def asked(
    tree: Tree, model: Path, capability: str, triton: str | None, limit_bytes: int | None, *, flex: bool = False
) -> Asked:
    """The request in full: what is not given comes from the model, the tree and the tables.

    Raises FleetError: 2 for a capability that is not known, a model that tells no attention, a torch without Triton.
    """
    known = [*LIMITS, *_FROM_8]
    if capability not in known:
        raise FleetError(
            f"capability {capability!r} is not known", where=f"--capability {capability}",
            mend=f"give one of {', '.join(known)} (nvidia-smi --query-gpu=compute_cap --format=csv)", who="patch",
        )  # fmt: skip
    shape = model_shape(model)
    if capability not in LIMITS:
        return Asked(tree, "", capability, 0, shape)
    return Asked(tree, triton or _triton_of(tree), capability, limit_bytes or LIMITS[capability], shape, flex)


def model_shape(model: Path) -> dict[str, Any]:
    """The attention of the model in a folder as a GPU below 8.0 runs it, from its config.json. Raises FleetError."""
    path = model / "config.json"
    where, mend = str(path), "give the folder of a model whose config.json tells its heads"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise FleetError(f"no config.json: {error.strerror}", where=where, mend=mend, who="patch") from error
    except ValueError as error:
        raise FleetError(f"config.json is no JSON: {error}", where=where, mend=mend, who="patch") from error
    told = shape_of(config) if isinstance(config, dict) else {"attention": []}
    if not told["attention"]:
        raise FleetError("config.json tells no attention that these kernels serve", where=where, mend=mend, who="patch")
    # There is no bfloat16 below 8.0.
    dtype = "float32" if told["model_type"] in NO_FLOAT16 else "float16"
    found: dict[str, Any] = attention_shape(told["attention"], dtype, Wishes())
    return found


def check(asked: Asked, steps: Steps) -> Verdict:
    """Compiles the files as they are and patched, side by side; what was compiled before is not compiled again.

    Raises FleetError: refused where the compiler comes to no verdict.
    """
    if asked.capability not in LIMITS:
        return Verdict(asked, Fit.NOT_NEEDED, f"capability {asked.capability} is 8.0 or above")
    contents, conflict = _versions(asked)
    try:
        reports = _reports(asked, contents, steps)
    except FleetError:
        if conflict is None:
            raise
        reports = {}
    stock = reports.get("stock", {"torch": "", "launches": [], "fits": False})
    torch, launches = stock["torch"], stock["launches"]
    if stock["fits"]:
        return Verdict(asked, Fit.NOT_NEEDED, "upstream's own kernels fit, by the compiler", torch, launches)
    if conflict:
        return Verdict(asked, Fit.CONFLICT, conflict.what, torch, launches, error=conflict)
    patched = reports["patched"]
    if patched["fits"]:
        reason = f"{_most(patched):,} bytes patched, {_most(stock):,} as upstream has it"
        return Verdict(asked, Fit.FITS_PATCHED, reason, torch, launches, patched["launches"])
    error = _does_not_fit(asked, patched)
    return Verdict(asked, Fit.DOES_NOT_FIT, error.what, torch, launches, patched["launches"], error)


def _versions(asked: Asked) -> tuple[dict[str, dict[str, bytes]], FleetError | None]:
    """The files as upstream has them (`stock`) and `patched`, as far as they can be had, and the conflict if any."""
    contents = {}
    try:
        with copy_of(asked.tree.path) as copy:
            revert_all(copy)
            contents["stock"] = _contents(copy)
            apply_all(copy, asked.capability)
            contents["patched"] = _contents(copy)
    except FleetError as conflict:
        return contents, conflict
    return contents, None


def _triton_of(tree: Tree) -> str:
    pin = tree.torch_pin()
    if pin not in TRITON_OF_TORCH:
        found = f"for torch {pin}, whose Triton is not known here" if pin else "and does not say for which torch it is"
        raise FleetError(
            f"this vLLM is {tree.version or 'of an unknown version'} {found}",
            where=str(tree.path), mend="give the release's Triton: --triton 3.7.1", who="patch",
        )  # fmt: skip
    return TRITON_OF_TORCH[pin]


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """A copy of the files that a patch may touch and of what tells of the whole; errors name the tree, not the copy."""
    targets = {tree / target for patch in PATCHES for target in patch.targets}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vllm").mkdir()
        for path in (*targets, *tree.glob("vllm*.dist-info/*"), tree / "PKG-INFO"):
            if path.is_file():
                copy = folder / path.relative_to(tree)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        try:
            yield Path(folder)
        except FleetError as error:
            error.where = error.where.replace(folder, str(tree))
            raise


def _contents(copy: Path) -> dict[str, bytes]:
    return {str(path.relative_to(copy)): path.read_bytes() for path in sorted(copy.rglob("*.py"))}


def _reports(asked: Asked, contents: Mapping[str, dict[str, bytes]], steps: Steps) -> dict[str, dict[str, Any]]:
    """The compiler's report of each version of the files, from the cache where it was asked the same before."""
    python = python_with(asked.triton, steps)
    request = {"capability": asked.capability, "limit_bytes": asked.limit_bytes, "shape": asked.shape}
    checkers = {"compile_check.py": CHECKER.read_text()}
    if asked.flex:
        checkers["flex_check.py"] = FLEX_CHECKER.read_text()
    compilers = compilers_of(site_packages(python))
    folder = cache_dir() / "patch_checks"
    folder.mkdir(exist_ok=True)
    kept = {
        name: folder / f"{question(asked.tree.path, files, compilers, {**request, 'checkers': checkers})}.json"
        for name, files in contents.items()
    }
    missing = [name for name, path in kept.items() if not path.is_file()]
    if missing:
        version = asked.tree.version or asked.tree.path.name
        label = f"compile {' and '.join(missing)} kernels of vLLM {version} with Triton {asked.triton}"
        with steps.step(label), ThreadPoolExecutor() as pool:
            runs: dict[str, Future[dict[str, Any]]] = {
                name: pool.submit(
                    run_check, str(python), checkers, asked.tree.path, contents[name], request, timeout_s=_TIMEOUT_S
                )
                for name in missing
            }
            for name, run in runs.items():
                write_whole(kept[name], json.dumps(_judged(asked, name, run), sort_keys=True).encode())
    return {name: json.loads(path.read_text()) for name, path in kept.items()}


def _judged(asked: Asked, name: str, run: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return run.result()
    except NoVerdict as error:
        raise FleetError(
            f"the {name} kernels cannot be judged for {asked.capability} with Triton {asked.triton}: {error}",
            where=str(asked.tree.path), mend="give another compiler (--triton), or report it with this message",
            code=ExitCode.STALLED if error.slow else ExitCode.REFUSED, who="patch",
        ) from error  # fmt: skip


def _most(report: Mapping[str, Any]) -> int:
    return max(int(launch["shared_bytes"]) for launch in report["launches"])


def _does_not_fit(asked: Asked, report: Mapping[str, Any]) -> FleetError:
    """Says which launch asks for most, and what would fit by the launch shapes that were compiled before."""
    worst = max(report["launches"], key=lambda launch: int(launch["shared_bytes"]))
    head, group = worst["head_size"], -(-worst["heads"] // worst["kv_heads"])
    figures = json.loads(FIGURES.read_text())["capabilities"].get(asked.capability, {"shapes": []})["shapes"]
    most = largest_group(figures, head, asked.shape["dtype"], asked.limit_bytes)
    fitting = f"at most {most} query heads per KV head where they are {head} wide" if most else "narrower heads"
    return FleetError(
        f"does not fit: {worst['phase']} of {head}-wide heads, {group} to a KV head, asks for "
        f"{worst['shared_bytes']:,} bytes of shared memory of {asked.limit_bytes:,} also when patched",
        where=f"capability {asked.capability}, vLLM {asked.tree.version or asked.tree.path}",
        mend=f"serve a model with {fitting}, or use a GPU of capability 8.0 or above",
        code=ExitCode.REFUSED, who="patch",
    )  # fmt: skip
