"""A table as Markdown, as CSV and on a terminal; how many digits are shown is decided here alone."""

import csv as csv_format
import io
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

Value: TypeAlias = str | float | int | None

_FORMATS = {"temp": "g", "lenience": "g", "c": ".3f", "paper c": "g", "error": ".3f", "tokens": ",d"}
_FORMATS |= {name: ".1f" for name in ("paper speedup", "paper Exp", "paper Emp")}  # as printed
# In every part of a table cut in parts.
_REPEATED = ("task", "draft", "paper models", "temp", "lenience", "gamma", "peer", "mode")


class Table(NamedTuple):
    """A table before it is rendered.

    Attributes:
      name: for files, such as table2.
      title: a line.
      columns: names, each once; the paper's begin with "paper" and stand behind ours.
      rows: values in full precision, in the columns' order; None where there is none.
      notes: what has to be known, a line or two each.
    """

    name: str
    title: str
    columns: list[str]
    rows: list[list[Value]]
    notes: list[str]


def format_value(column: str, value: Value) -> str:
    """A value as a table shows it; how many digits depends on the column, or on the first word of its name."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    known = next((_FORMATS[name] for name in (column, column.split(" ")[0]) if name in _FORMATS), None)
    return format(value, known or ("d" if isinstance(value, int) else ".2f"))


def markdown(table: Table) -> str:
    """The table as GitHub's Markdown, its title a heading, its notes a list; ends with a newline."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [f"### {table.title}", "", line(table.columns)]
    lines.append(line(["--:" if numbers else "---" for numbers in _are_numbers(table)]))
    lines += [line(cells) for cells in _formatted(table)]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def csv(table: Table) -> str:
    """The table as CSV: a header, full precision, an empty cell for None; no title and no notes."""
    stream = io.StringIO()
    csv_format.writer(stream, lineterminator="\n").writerows([table.columns, *table.rows])
    return stream.getvalue()


def show(table: Table, width: int | None = None) -> RichTable:
    """The table for a terminal.

    Args:
      table: the table.
      width: of the terminal; a wider table is cut into parts, one below the other, between a column of the paper's and
        the next, and between any two columns where that is not enough. None takes as much as is needed.
    """
    cells, numbers = _formatted(table), _are_numbers(table)
    words = [max(map(len, name.split())) for name in table.columns]  # names may be broken between them
    widths = [max(least, *(len(row[i]) for row in cells)) for i, least in enumerate(words)]
    whole = RichTable.grid()
    whole.title, whole.caption = Text(table.title), Text("\n".join(table.notes))
    whole.title_justify = whole.caption_justify = "left"
    for part in _parts(table.columns, widths, width):
        grid = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for i in part:
            grid.add_column(
                Text(table.columns[i]), justify="right" if numbers[i] else "left", width=widths[i], overflow="fold"
            )
        for row in cells:
            grid.add_row(*(Text(row[i]) for i in part))
        whole.add_row(grid)
    return whole


def _parts(columns: Sequence[str], widths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Columns of each part, as few parts as fit."""
    groups: list[list[int]] = [[]]
    for i, column in enumerate(columns):
        groups[-1].append(i)
        if column.startswith("paper") and i + 1 < len(columns):
            groups.append([])

    def fit(part: Sequence[int]) -> bool:
        return limit is None or sum(widths[i] + 2 for i in part) <= limit

    def alone(group: list[int]) -> list[int]:
        return [i for i, name in enumerate(columns) if name in _REPEATED and i not in group] + group

    pieces = [piece for group in groups for piece in ([group] if fit(alone(group)) else [[i] for i in group])]
    parts = [pieces[0]]
    for piece in pieces[1:]:
        if fit(parts[-1] + piece):
            parts[-1] = parts[-1] + piece
        else:
            parts.append(alone(piece))
    return parts


def _formatted(table: Table) -> list[list[str]]:
    return [[format_value(*pair) for pair in zip(table.columns, row, strict=True)] for row in table.rows]


def _are_numbers(table: Table) -> list[bool]:
    """Per column, whether it has no text."""
    return [not any(isinstance(value, str) for value in values) for values in zip(*table.rows, strict=True)]
