"""The report: a line for each comparison, JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.bench.measure import Cell, Round

COLOURS: Final = {
    "plain": "#8a8f98", "safe": "#1f7a4d", "dbos": "#3b6fb6", "procrastinate": "#b8862b", "relier": "#8c4fa3",
    "absurd": "#b5485d",
}  # fmt: skip
Found = Mapping[Cell, Mapping[str, list[Round]]]


def middle(rounds: list[Round]) -> float:
    """Jobs a second, the median of the rounds."""
    return median(one.jobs for one in rounds)


def cores(rounds: list[Round]) -> dict[str, float]:
    """Milliseconds of a core for each job, by who took them: the median of the rounds."""
    return {who: median(one.cores[who] for one in rounds) for who in rounds[0].cores}


def line(cell: Cell, systems: Mapping[str, list[Round]]) -> str:
    """One comparison as text."""
    if not systems:
        return f"{cell}: not measured"
    parts = []
    for name, rounds in systems.items():
        rates = [one.jobs for one in rounds]
        parts.append(f"{name} {middle(rounds):,.0f}/s ({min(rates):,.0f}-{max(rates):,.0f})")
    if "plain" in systems and "safe" in systems:
        parts.append(f"safe/plain {middle(systems['safe']) / middle(systems['plain']):.2f}")
    for name in ("plain", "safe"):
        if name in systems:
            shares = cores(systems[name])
            parts.append(f"{name}'s ms of a core: " + " ".join(f"{who} {shares[who]:.2f}" for who in shares))
    return f"{cell}: " + "   ".join(parts)


def write(folder: Path, found: Found, probed: Mapping[str, float], about: Mapping[str, Any]) -> None:
    """Write `bench.json` and `bench.svg`.

    Arguments:
        folder: where.
        found: the rounds.
        probed: the other figures.
        about: the machine and the run.
    """
    cells = [
        {
            **cell._asdict(),
            "systems": {
                name: {
                    "jobs_per_second": middle(rounds),
                    "spread": [min(one.jobs for one in rounds), max(one.jobs for one in rounds)],
                    "cores": cores(rounds),
                    "of_plain": middle(rounds) / middle(systems["plain"]) if "plain" in systems else None,
                    "rounds": [one._asdict() for one in rounds],
                }
                for name, rounds in systems.items()
            },
        }
        for cell, systems in found.items()
        if systems
    ]
    text = json.dumps({"about": about, "cells": cells, "probes": probed}, indent=1)
    (folder / "bench.json").write_text(text + "\n")
    (folder / "bench.svg").write_text(picture(found))


def picture(found: Found) -> str:
    """Bars for each comparison, as parts of the fastest; the label is jobs a second."""
    bars, y = [], 20
    for cell, systems in found.items():
        if not systems:
            continue
        bars.append(f'<text x="10" y="{y + 12}" font-weight="bold">{escape(str(cell).strip())}</text>')
        y += 20
        most = max(middle(rounds) for rounds in systems.values())
        for name, rounds in systems.items():
            width = 430 * middle(rounds) / most
            bars.append(
                f'<text x="120" y="{y + 11}" text-anchor="end">{name}</text>'
                f'<rect x="130" y="{y}" width="{width:.0f}" height="14" fill="{COLOURS.get(name, "#555")}"/>'
                f'<text x="{138 + width:.0f}" y="{y + 11}">{middle(rounds):,.0f}/s</text>'
            )
            y += 18
        y += 10
    style = "font-family: sans-serif; font-size: 12px; background: white"
    body = "".join(bars)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{y}" style="{style}">{body}</svg>\n'
