"""The report: JSON, and the soak as a picture over time."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.soak.lanes import Event
    from tests.soak.world import World

WIDTH, LEFT, LANE, CHART = 1000, 170, 22, 120
COLOURS: Final = (
    "#b5485d",
    "#b8862b",
    "#3b6fb6",
    "#8c4fa3",
    "#1f7a4d",
    "#8a8f98",
    "#d07a3a",
    "#4aa3a2",
    "#6b6b2f",
    "#333",
)
STATUSES: Final = {
    "queued": "#b8862b", "leased": "#3b6fb6", "running": "#3b6fb6", "unknown": "#b5485d",
    "failed": "#8c4fa3", "cancelled": "#8a8f98", "succeeded": "#1f7a4d",
}  # fmt: skip


def write(folder: Path, world: World, found: dict[str, dict[str, list[str]]]) -> None:
    """Write `soak.json` and `soak.svg`.

    Arguments:
        folder: where.
        world: what was run.
        found: for each site and promise what broke it.
    """
    text = json.dumps(
        {
            "about": world.about(),
            "promises": found,
            "events": [asdict(event) for event in world.events],
            "samples": world.samples,
        },
        indent=1,
    )
    (folder / "soak.json").write_text(text + "\n")
    (folder / "soak.svg").write_text(picture(world.events, world.samples, world.seconds))


def picture(events: list[Event], samples: list[dict[str, Any]], seconds: float) -> str:
    """Draw a row of bars for each lane, and below for each site how many jobs stood where.

    Arguments:
        events: what went wrong.
        samples: jobs by status, over time.
        seconds: how long it took.

    Returns:
        SVG.
    """

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * min(at / seconds, 1.0)

    parts: list[str] = []
    y = 10
    for lane in dict.fromkeys(event.lane for event in sorted(events, key=lambda event: event.lane)):
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(lane)}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y + 10}" y2="{y + 10}" stroke="#ddd"/>')
        mine = [event for event in events if event.lane == lane]
        colours = dict(zip(sorted({event.what for event in mine}), COLOURS, strict=False))
        for event in mine:
            end = event.ended if event.ended is not None else seconds
            width = max(x(end) - x(event.began), 2)
            title = f"{event.what}, {event.began:.1f} s to {end:.1f} s" + (f": {event.error}" if event.error else "")
            parts.append(
                f'<rect x="{x(event.began):.1f}" y="{y + 3}" width="{width:.1f}" height="14" rx="2"'
                f' fill="{colours.get(event.what, "#333")}"><title>{escape(title)}</title></rect>'
            )
        y += LANE
    for site in dict.fromkeys(sample["site"] for sample in samples):
        parts.append(f'<text x="{LEFT - 8}" y="{y + 20}" text-anchor="end">{escape(site)}: jobs</text>')
        mine_of = [sample for sample in samples if sample["site"] == site]
        most = max(sum(sample.get(status, 0) for status in STATUSES) for sample in mine_of) or 1
        below = [0.0] * len(mine_of)
        for status, colour in STATUSES.items():
            above = [low + sample.get(status, 0) for low, sample in zip(below, mine_of, strict=True)]
            line = [(x(s["at"]), y + CHART - CHART * n / most) for s, n in zip(mine_of, above, strict=True)]
            line += [(x(s["at"]), y + CHART - CHART * n / most) for s, n in zip(mine_of, below, strict=True)][::-1]
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in line)
            parts.append(f'<polygon points="{points}" fill="{colour}"><title>{status}</title></polygon>')
            below = above
        parts.append(f'<text x="{LEFT - 8}" y="{y + 36}" text-anchor="end">{most} at the end</text>')
        y += CHART + 14
    legend = "".join(
        f'<tspan fill="{colour}">■ {status} </tspan>' for status, colour in STATUSES.items() if status != "leased"
    )
    parts.append(f'<text x="{LEFT}" y="{y + 10}">{legend}<tspan>over {seconds:.0f} s</tspan></text>')
    style = "font-family: sans-serif; font-size: 12px; background: white"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 24}" style="{style}">'
    return f"{head}{''.join(parts)}</svg>\n"
