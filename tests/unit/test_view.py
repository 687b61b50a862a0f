"""The view: the same data as a moving frame on a terminal and as lines on a pipe; nothing of it is read as markup."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleet import differences
from fleet.events import HostResult, HostStarted, Outcome, TaskStarted
from fleet.progress import Progress, Row, plain
from fleet.runlog import RunLog
from fleet.steps import Durations, Steps
from fleet.view import RunView, how_far

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def pipe() -> tuple[Console, io.StringIO]:
    """A console that is no terminal, and what was written to it."""
    file = io.StringIO()
    return Console(file=file, width=120, force_terminal=False), file


def terminal(height: int = 20) -> tuple[Console, io.StringIO]:
    """A console that is a terminal, and what was written to it."""
    file = io.StringIO()
    console = Console(file=file, width=100, height=height, force_terminal=True, force_interactive=True)
    return console, file


def text_of(progress: Progress, *, width: int = 120, height: int = 20) -> list[str]:
    """The frame as a person sees it."""
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(progress.frame())
    return console.export_text().splitlines()


def test_a_frame_tells_host_step_time_and_what_is_usual() -> None:
    console, _ = terminal()
    progress = Progress(console, "converge")
    row = Row("host-1", "rust: Toolchain installed", 240.0, began=time.monotonic() - 75)
    progress.begin(row)
    progress.doing("host-1", "serving building")
    first, foot = text_of(progress)
    assert "host-1 rust: Toolchain installed (serving building)" in first
    assert first.endswith("1m15s so far, usually 4m00s")
    assert foot.startswith("converge  0s so far")
    assert "━" in first
    # Where there is no room for all, the times stay.
    assert all(line.endswith("so far, usually 4m00s") for line in text_of(progress, width=80)[:1])
    progress.end("host-1")
    assert len(text_of(progress)) == 2  # an empty body and the foot


def test_a_frame_fits_its_terminal_and_says_what_it_leaves_out() -> None:
    console, _ = terminal(height=10)
    progress = Progress(console, "converge")
    for number in range(300):
        progress.begin(Row(f"host-{number}", "rust: Toolchain installed", None, began=number))
    lines = text_of(progress)
    assert len(lines) < 10
    # The oldest first: those are the ones to worry about.
    assert "host-0 " in lines[0]
    assert "293 more under way" in lines[-1]


def test_a_terminal_is_left_clean_after_an_error() -> None:
    console, file = terminal()
    with pytest.raises(KeyboardInterrupt), RunView(console, Durations(Path("/nowhere/x")), "converge") as view:
        view(HostStarted("host-1", "rust", "Toolchain installed"))
        time.sleep(0.3)
        raise KeyboardInterrupt
    written = file.getvalue()
    assert "Toolchain installed" in written
    assert written.count(HIDE) == written.count(SHOW) == 1
    assert written.rindex(SHOW) > written.rindex("Toolchain installed")


def test_a_pipe_gets_a_line_per_role_change_and_long_task(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text('{"role: rust": 61, "task: rust: Toolchain installed": 60}')
    console, file = pipe()
    view = RunView(console, Durations(tmp_path / "usual"), "converge")
    view._progress = Progress(console, "converge", beat_s=1.05)
    with view:
        view(TaskStarted("rust", "Toolchain installed"))
        view(HostStarted("host-1", "rust", "Toolchain installed"))
        while "so far" not in file.getvalue():
            time.sleep(0.05)
        view(HostResult("host-1", "rust", "Toolchain installed", Outcome.CHANGED, 1.3))
        view(TaskStarted("preflight", "What this host is"))
        view(HostResult("host-1", "preflight", "What this host is", Outcome.OK, 0.3))
        view(TaskStarted("", "What is here"))
        assert file.getvalue().splitlines()[-1].startswith("converge  preflight: done in ")
    assert re.sub(r"\d+s so|in \ds", "Ns so", file.getvalue()).splitlines() == [
        "converge  reading the inventory",
        "converge  rust (usually 1m01s)",
        "converge    … host-1: rust: Toolchain installed: Ns so far, usually 1m00s",
        "converge    changed host-1: rust: Toolchain installed Ns so",
        "converge  rust: done Ns so",
        "converge  preflight (usually 3s)",
        "converge  preflight: done Ns so",
    ]
    assert "\x1b" not in file.getvalue()


def test_nothing_moves_before_the_first_row(tmp_path: Path) -> None:
    # Ansible is forked before the first event, and a fork among threads can hang.
    for console, _ in (terminal(), pipe()):
        before = threading.active_count()
        with RunView(console, Durations(tmp_path / "usual"), "converge") as view:
            assert threading.active_count() == before
            view(HostStarted("h", "r", "t"))
            assert threading.active_count() == before + 1
            view.stopping()
            time.sleep(0.5)
            assert threading.active_count() == before


def test_only_what_did_its_work_tells_what_the_work_takes(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "usual")
    for rehearsal, outcome in ((True, Outcome.CHANGED), (False, Outcome.OK)):
        with RunView(pipe()[0], durations, "converge", rehearsal=rehearsal) as view:
            view(TaskStarted("rust", "new task"))
            view(HostResult("h", "rust", "new task", outcome, 9.0))
        assert durations.usual("task: rust: new task") is None
    with RunView(pipe()[0], durations, "converge") as view:
        view(TaskStarted("rust", "new task"))
        view(HostResult("h", "rust", "new task", Outcome.CHANGED, 9.0))
    assert Durations(tmp_path / "usual").usual("task: rust: new task") == 9.0


def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    console, file = pipe()
    with RunView(console, Durations(tmp_path / "usual"), "converge") as view:
        view(TaskStarted("[red]role[/red]", "[/]"))
        view(HostResult("[bold]h[/bold]", "r", "t [/nonsense]", Outcome.FAILED, 0.0))
    Steps(console, Durations(tmp_path / "usual"), "sandbox").note("removed [/] x")
    assert "[red]role[/red]" in file.getvalue()
    assert "[bold]h[/bold]: r: t [/nonsense]" in file.getvalue()
    assert "removed [/] x" in file.getvalue()
    progress = Progress(console, "converge")
    progress.begin(Row("[/]", "[red]task", None))
    assert "[/] [red]task" in text_of(progress)[0]


def test_texts_from_a_host_do_not_steer_the_terminal(tmp_path: Path) -> None:
    assert plain("a\x1b[2Jb\r\nc\td é") == "a\\x1b[2Jb\\x0d\nc\td é"
    console, file = pipe()
    with RunView(console, Durations(tmp_path / "usual"), "converge") as view:
        view(HostResult("h", "r", "t\x1b[2J", Outcome.FAILED, 0.0))
    assert "\x1b" not in file.getvalue()


def test_verbose_shows_what_changed_nothing(tmp_path: Path) -> None:
    for verbose in (False, True):
        console, file = pipe()
        with RunView(console, Durations(tmp_path / "usual"), "converge", verbose=verbose) as view:
            view(HostResult("h", "r", "looked", Outcome.OK, 0.0))
        assert ("ok h: r: looked" in file.getvalue()) is verbose


def test_differences_are_shown_when_asked_for(tmp_path: Path) -> None:
    diff = [{"before": "a\nb\n", "after": "a\nc\n", "before_header": "/etc/x", "after_header": "/etc/x"}]
    for wanted in (False, True):
        console, file = pipe()
        with RunView(console, Durations(tmp_path / "usual"), "converge", diff=wanted) as view:
            view(HostResult("h", "r", "wrote", Outcome.CHANGED, 0.0, "", {"diff": diff}))
        assert ("-b" in file.getvalue() and "+c" in file.getvalue()) is wanted


@pytest.mark.parametrize(
    ("diff", "expected"),
    [
        (None, []),
        ({"before": "a\n", "after": "a\n"}, []),
        ({"before": "", "after": "x\n"}, ["--- before", "+++ after", "@@ -0,0 +1 @@", "+x"]),
        ({"before": {"state": "absent"}, "after": {"state": "file"}},
         ["--- before", "+++ after", "@@ -1,3 +1,3 @@", " {", '- "state": "absent"', '+ "state": "file"', " }"]),
        ({"prepared": "+ swap 64 MiB\n"}, ["+ swap 64 MiB"]),
        ({"dst_binary": 1, "after_header": "/x"}, ["/x: not shown, no short text"]),
    ],
)  # fmt: skip
def test_a_difference_is_unified(diff: object, expected: list[str]) -> None:
    assert [line for line, _ in differences.lines(diff)] == expected


def test_a_long_difference_is_cut_and_says_so() -> None:
    diff = {"before": "", "after": "".join(f"{number}\n" for number in range(100))}
    found = [line for line, _ in differences.lines(diff)]
    assert len(found) == 61
    assert found[-1] == "… 43 more lines"


def test_a_failed_step_is_not_remembered(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "usual")
    steps = Steps(pipe()[0], durations, "sandbox")
    with pytest.raises(OSError, match="no"), steps.step("thing"):
        time.sleep(1.01)
        raise OSError("no")
    assert durations.usual("sandbox: thing") is None
    with steps.step("thing"):
        time.sleep(1.01)
    assert durations.usual("sandbox: thing") == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"stage": "build_wheel", "units": {"done": 12, "total": 60}, "eta_s": 190},
            "build 12/60 units, 3 min left",
        ),
        ({"stage": "build_wheel", "units": {"done": 59, "total": 60}, "eta_s": 40}, "build 59/60 units, 40 s left"),
        ({"stage": "build_wheel", "units": {"done": 0, "total": 60}}, "build 0/60 units"),
        # What was compiled is over.
        ({"stage": "install", "units": {"done": 60, "total": 60}, "eta_s": 0}, "install"),
        ({"stage": "build_wheel"}, "build_wheel"),
        (
            {
                "state": "waiting",
                "stage": "look_in_store",
                "builder": "b1",
                "progress": {"stage": "build_wheel", "units": {"done": 12, "total": 60}},
            },
            "waits for b1: build 12/60 units",
        ),
    ],
)
def test_how_far_a_build_is(status: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert how_far(status) == words
    console, _ = terminal()
    view = RunView(console, Durations(tmp_path / "d.json"), "converge")
    retry = HostResult(
        "h", "vllm_source_build", "Build", Outcome.RETRY, 15.0, result={"progress": [{"release": "a", **status}]}
    )
    with RunLog("converge") as log, view:
        view(HostStarted("h", "vllm_source_build", "Build"))
        for take in (view, log):
            take(retry)
        assert f"(a {words})" in " ".join(text_of(view._progress, width=160))
    (line,) = log.path.read_text().splitlines()
    told: dict[str, Any] = {name: status[name] for name in ("stage", "units", "eta_s") if name in status}
    assert json.loads(line)["progress"] == {"release": "a", **told}
