"""Memory and time of the controller over the fleet's size, as an SVG of two panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 200, 70, 50


def plot(points: Sequence[tuple[int, float, float]], goal_mib: float) -> str:
    """The SVG's text. A point: simulated hosts, MiB, CPU seconds for a host."""
    memory = _panel("Controller's memory, MiB", [(n, mib) for n, mib, _ in points], 0, goal_mib)
    time = _panel("Controller's CPU seconds per host", [(n, cpu) for n, _, cpu in points], _WIDTH + 100, None)
    width, height = 2 * (_WIDTH + 100), _HEIGHT + 110
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f"{memory}{time}</svg>\n"
    )


def _panel(title: str, points: Sequence[tuple[int, float]], shift: int, goal: float | None) -> str:
    top = max([value for _, value in points] + [goal or 0.0]) * 1.15
    first, last = math.log10(points[0][0]), math.log10(points[-1][0])
    bottom = _TOP + _HEIGHT

    def across(hosts: int) -> float:
        return _LEFT + 15 + (_WIDTH - 30) * (math.log10(hosts) - first) / ((last - first) or 1)

    def up(value: float) -> float:
        return bottom - _HEIGHT * value / top

    found = [_text(_LEFT, _TOP - 20, title, "start", "bold")]
    found.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#444"/>')
    step = _round_step(top)
    found += [_tick(up, number * step) for number in range(int(top / step) + 1)]
    if goal is not None:
        found.append(
            f'<path d="M{_LEFT} {up(goal):.1f}h{_WIDTH}" stroke="#b33" stroke-dasharray="5 4"/>'
            + _text(_LEFT + _WIDTH, up(goal) - 5, f"goal {goal:g}", "end")
        )
    line = " ".join(f"{across(hosts):.1f},{up(value):.1f}" for hosts, value in points)
    found.append(f'<polyline points="{line}" fill="none" stroke="#269" stroke-width="2"/>')
    for hosts, value in points:
        found.append(f'<circle cx="{across(hosts):.1f}" cy="{up(value):.1f}" r="4" fill="#269"/>')
        # To the right of a falling line and of the axis; the last one has no line there.
        side = "middle" if hosts == points[-1][0] else "start"
        found.append(_text(across(hosts) + (5 if side == "start" else 0), up(value) - 9, f"{value:.3g}", side))
        found.append(_text(across(hosts), bottom + 18, f"{hosts:,}", "middle"))
    found.append(_text(_LEFT + _WIDTH / 2, bottom + 40, "simulated hosts", "middle"))
    return f'<g transform="translate({shift} 0)">{"".join(found)}</g>'


def _round_step(top: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that gives no more than five steps."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    return next(many * power for many in (1, 2, 5, 10) if many * power >= top / 5)


def _tick(up: Callable[[float], float], value: float) -> str:
    return _text(_LEFT - 8, up(value) + 4, f"{value:.3g}", "end")


def _text(x: float, y: float, words: str, anchor: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
