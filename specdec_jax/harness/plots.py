"""What a document of measurements holds, as plots; `tables` says what a document is."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_jax.harness import paper
from specdec_jax.harness.figures import BLUE, GREEN, MARKERS, ORANGE, PURPLE, SKY, VERMILION, add_axes, new_figure
from specdec_jax.harness.tables import Document, paper_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)


def acceptance_by_position(document: Document) -> "Figure":
    """Acceptance by position in the output, per draft: where betas had one law, each would stay on its dotted line.

    Raises:
      ValueError: no entry has it.
    """
    title = f"Acceptance by position in the output ({document['name']})"
    figure, panels = _panels(document, "by_position", title, x="position", y="alpha")
    for axes, entries in panels:
        for draft, colour, marker in _drafts(document):
            for entry in (some for some in entries if some["draft"] == draft):
                ranges = entry["by_position"]
                middles = [math.sqrt(some["first"] * some["last"]) for some in ranges]
                alphas = [some["alpha"] for some in ranges]
                errors = [some["alpha_error"] or 0.0 for some in ranges]  # None: of a single input, no bar
                style = {"color": colour, "marker": marker, "capsize": 2, "markersize": 5}
                axes.errorbar(middles, alphas, yerr=errors, label=draft, **style)
                axes.axhline(entry["alpha"], color=colour, linestyle=":", linewidth=1)
        longest = max((entry["by_position"] for entry in entries), key=len)
        names = [f"{r['first']}" if r["first"] == r["last"] else f"{r['first']}-{r['last']}" for r in longest]
        axes.set_xscale("log", base=2)
        axes.set_xticks([math.sqrt(r["first"] * r["last"]) for r in longest], names, fontsize=8, rotation=30)
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1.02)
    _add_legend(figure, panels)
    return figure


def beta_distribution(document: Document) -> "Figure":
    """Histograms of beta per draft, of which the theory takes the mean alone, dotted here (Corollary 3.6).

    Raises:
      ValueError: no entry has one.
    """
    title = f"Distribution of beta ({document['name']})"
    figure, panels = _panels(document, "histogram", title, x="beta", y="share of tokens")
    for axes, entries in panels:
        for draft, colour, _ in _drafts(document):
            for entry in (some for some in entries if some["draft"] == draft):
                edges = np.linspace(0.0, 1.0, len(entry["histogram"]) + 1)
                axes.stairs(entry["histogram"], edges, color=colour, linewidth=1.8, label=draft)
                axes.axvline(entry["alpha"], color=colour, linestyle=":", linewidth=1.2)
        axes.set_xlim(0, 1)
    _add_legend(figure, panels)
    return figure


def _panels(
    document: Document, name: str, title: str, *, x: str, y: str
) -> tuple["Figure", list[tuple["Axes", list[Mapping[str, Any]]]]]:
    """A row of axes per task, one per temperature, with the acceptance entries that have something of this name."""
    found = [entry for entry in document.get("acceptance", []) if entry.get(name)]
    if not found:
        raise ValueError(f"{document['name']} has no acceptance with {name}; there is nothing to draw.")
    tasks = list(dict.fromkeys(entry["task"] for entry in found))
    temperatures = sorted({entry["temperature"] for entry in found})
    size = 4.6 * len(temperatures) + 0.4, 2.9 * len(tasks) + 0.8
    figure = new_figure(title, *size, simulated=document["simulated"])
    panels = []
    for i, task in enumerate(tasks):
        for j, temperature in enumerate(temperatures):
            entries = [some for some in found if (some["task"], some["temperature"]) == (task, temperature)]
            if entries:
                place = len(tasks), len(temperatures), i * len(temperatures) + j + 1
                axes = add_axes(figure, *place, title=f"{task}, temperature {temperature:g}", x=x, y=y)
                panels.append((axes, entries))
    return figure, panels


def _drafts(document: Document) -> list[tuple[str, str, str]]:
    """(draft, colour, marker), the same in every plot of a document."""
    sections = (document.get("acceptance", []), document.get("cells", []))
    names = dict.fromkeys(entry["draft"] for section in sections for entry in section)
    return [(name, _COLOURS[i % len(_COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]


def _add_legend(figure: "Figure", panels: Sequence[tuple["Axes", Any]]) -> None:
    """One for all panels."""
    handles = {}
    for axes, _ in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    ncols = min(len(handles), int(figure.get_figwidth() / 1.9))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=ncols, fontsize=9)


def table2_plot(document: Document) -> "Figure":
    """Table 2 as bars: measured speedups with their intervals, predicted ones, and the paper's.

    A row of bars per task, temperatures apart, two gammas of a draft side by side.

    Raises:
      ValueError: there is no cell.
    """
    cells = document.get("cells", [])
    if not cells:
        raise ValueError(f"{document['name']} has no cells; there is nothing to draw.")
    tasks = {
        task: _in_order(document, [c for c in cells if c["task"] == task])
        for task in dict.fromkeys(c["task"] for c in cells)
    }
    widest = max(len(some) for some in tasks.values())
    size = max(7.0, 0.62 * widest + 1.2), 2.9 * len(tasks) + 0.8
    figure = new_figure(f"Walltime improvement ({document['name']})", *size, simulated=document["simulated"])
    panels = []
    for i, (task, some) in enumerate(tasks.items(), start=1):
        axes = add_axes(figure, len(tasks), 1, i, title=task, x="draft and gamma", y="times as fast")
        _add_bars(document, axes, some)
        axes.set_xlim(-0.75, widest + 0.75)  # bars of one width in all rows
        panels.append((axes, some))
    _add_legend(figure, panels)
    return figure


def _in_order(document: Document, cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    drafts = [name for name, _, _ in _drafts(document)]
    return sorted(cells, key=lambda c: (c["temperature"], drafts.index(c["draft"]), c["batch_size"], c["gamma"]))


def _add_bars(document: Document, axes: "Axes", cells: Sequence[Mapping[str, Any]]) -> None:
    """One bar per cell, a wider gap where the temperature changes."""
    temperatures = sorted({cell["temperature"] for cell in cells})
    xs = [i + temperatures.index(cell["temperature"]) for i, cell in enumerate(cells)]
    colours = {draft: colour for draft, colour, _ in _drafts(document)}
    for draft, colour in colours.items():
        bars = [(x, cell) for x, cell in zip(xs, cells, strict=True) if cell["draft"] == draft]
        if bars:
            heights = [cell["speedup"] for _, cell in bars]
            below = [cell["speedup"] - (cell["speedup_low"] or cell["speedup"]) for _, cell in bars]
            above = [(cell["speedup_high"] or cell["speedup"]) - cell["speedup"] for _, cell in bars]
            style = {"color": colour, "edgecolor": "black", "linewidth": 0.6, "capsize": 3}
            axes.bar([x for x, _ in bars], heights, 0.75, yerr=[below, above], label=f"{draft}, measured", **style)
    marks: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "black", "markersize": 7, "zorder": 4}
    predicted = [cell["predicted"] for cell in cells]
    axes.plot(xs, predicted, marker="D", color="white", label="predicted (Theorem 3.8)", **marks)
    printed = [(x, row.measured) for x, cell in zip(xs, cells, strict=True) if (row := _paper_row(document, cell))]
    if printed:
        marks |= {"marker": "*", "markersize": 11, "color": "black", "markeredgecolor": "white"}
        axes.plot([x for x, _ in printed], [speedup for _, speedup in printed], label="the paper's", **marks)
    axes.axhline(1, color="black", linewidth=0.8)
    names = [f"{cell['draft']}\n{cell['gamma']}" for cell in cells]
    if len({cell["batch_size"] for cell in cells}) > 1:
        names = [f"{name}\nbatch {cell['batch_size']}" for name, cell in zip(names, cells, strict=True)]
    axes.set_xticks(xs, names, fontsize=8)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    for temperature in temperatures:
        inside = [x for x, cell in zip(xs, cells, strict=True) if cell["temperature"] == temperature]
        middle = (inside[0] + inside[-1]) / 2
        text = f"temperature {temperature:g}"
        axes.text(middle, 0.98, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9)


def _paper_row(document: Document, cell: Mapping[str, Any]) -> paper.Row2 | None:
    """The paper's row of a cell, which it has at batch 1 alone."""
    task, draft = paper_key(document, cell)
    if task is None or draft is None or cell["batch_size"] != 1:
        return None
    return paper.row2(task, draft, float(cell["temperature"]))
