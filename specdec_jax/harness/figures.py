"""The paper's Figures 1 to 5; `plots` has those of measured documents.

Nothing of matplotlib is imported before a figure is asked for, and its global state stays as it is. Colours are those
of Okabe and Ito, or of a map of increasing lightness, so that they can be told apart without seeing all hues.
"""

import io
import pathlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specdec_jax import theory
from specdec_jax.harness.records import write
from specdec_jax.harness.simulated import LABEL
from specdec_jax.trace import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
MARKERS = "osD^vP*X"
GAMMAS = (1, 3, 5, 7, 10)
"""Curves of Figures 2 and 4, besides those that measured points are of."""

_DOTS_PER_INCH = 120
_ALPHAS = np.linspace(0.0, 1.0, 201)
_COLUMNS, _FONT_SIZE, _MONO = 100, 9.0, "DejaVu Sans Mono"
_CELL = 0.602 * _FONT_SIZE / 72, 1.45 * _FONT_SIZE / 72  # inches of a character of that font, and of a line


def new_figure(title: str, width: float, height: float, *, simulated: bool = False) -> "Figure":
    """An empty figure.

    Args:
      title: a line or more.
      width: in inches.
      height: in inches.
      simulated: whether to say that acceptance is.

    Raises:
      ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(f"{title}, {LABEL}" if simulated else title, fontsize=11)
    return figure


def check_matplotlib() -> None:
    """Says what is missing before anything is measured for a figure.

    Raises:
      ValueError: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise ValueError("figures need matplotlib: pip install 'specdec_jax[plots]'")


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def add_axes(figure: "Figure", rows: int, columns: int, index: int, *, title: str, x: str, y: str) -> "Axes":
    """Axes with faint lines behind the data; index counts from 1, row by row."""
    axes = figure.add_subplot(rows, columns, index)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save(figure: "Figure", directory: pathlib.Path, name: str) -> None:
    """Writes name.png and name.svg; each is there whole or not at all, and neither where drawing one fails.

    The same figure gives the same bytes.

    Args:
      figure: the figure.
      directory: made if need be.
      name: of the files, without an ending.
    """
    import matplotlib

    drawn = {}
    # A reader's own settings shall not change the font, nor chance the names of an SVG's parts.
    with matplotlib.rc_context({"font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": name}):
        for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            stream = io.BytesIO()
            figure.savefig(stream, format=ending, metadata=metadata)
            drawn[ending] = stream.getvalue()
    for ending, content in drawn.items():
        write(directory / f"{name}.{ending}", content)


def figure1(steps: Sequence[Step]) -> "Figure":
    """Figure 1: a line per target call, with accepted, rejected and corrected tokens in colour.

    Args:
      steps: of one row, from `trace.steps_of`.

    Raises:
      ValueError: there is no step, or matplotlib is missing.
    """
    if not steps:
        raise ValueError("steps is empty; there is nothing to draw.")
    lines = [[_Run(0, "accepted", GREEN), _Run(10, "rejected", VERMILION), _Run(20, "the target's own", BLUE)], []]
    for number, step in enumerate(steps, start=1):
        lines += _wrap(number, step)
    width, height = (_COLUMNS + 2) * _CELL[0], len(lines) * _CELL[1] + 0.5
    figure = new_figure(f"{len(steps)} target calls, a line each", width, height)
    # Axes of exactly so many characters and lines: a layout engine would make room for the texts in them.
    figure.set_layout_engine("none")
    area = _CELL[0] / width, 0.1 / height, _COLUMNS * _CELL[0] / width, len(lines) * _CELL[1] / height
    axes = figure.add_axes(area)
    axes.set_axis_off()
    axes.set_xlim(0, _COLUMNS)
    axes.set_ylim(len(lines), 0)
    known = _characters()
    for y, line in enumerate(lines):
        for run in line:
            text = "".join(c if ord(c) in known else "\ufffd" for c in run.text)
            font: dict[str, Any] = {"fontsize": _FONT_SIZE, "family": _MONO, "parse_math": False}
            axes.text(run.column, y + 0.5, text, color=run.colour, va="center", **font)
            if run.colour == VERMILION:
                axes.plot([run.column, run.column + len(text)], [y + 0.5] * 2, color=VERMILION, linewidth=1)
    return figure


class _Run(NamedTuple):
    """Characters of one colour within a line."""

    column: int
    text: str
    colour: str


def _wrap(number: int, step: Step) -> list[list[_Run]]:
    """A step's lines: what was there before, accepted guesses, a rejected one, and the target's own token."""
    first = f"{number:>3} "
    parts = [(word, "0.45") for word in step.earlier.split()]
    for pieces, colour in ((step.accepted, GREEN), ([step.rejected], VERMILION), ([step.own], BLUE)):
        parts += [(piece, colour) for piece in pieces if piece is not None]
    line = [_Run(0, first, "0.45")]
    lines, column = [line], len(first)
    for text, colour in parts:
        for part in textwrap.wrap(text, _COLUMNS - len(first), break_on_hyphens=False):
            if column + len(part) > _COLUMNS:
                lines.append(line := [])
                column = len(first)
            line.append(_Run(column, part, colour))
            column += len(part) + 1
    return lines


def _characters() -> set[int]:
    """Code points that the font of Figure 1 has."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    path = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
    return set(FT2Font(str(path)).get_charmap())


def figure2(cells: Sequence[Mapping[str, Any]] = (), *, simulated: bool = False) -> "Figure":
    """Figure 2: expected tokens per target call over alpha, for several gamma (Eq. 1).

    Args:
      cells: measured ones, drawn as points; see `tables`.
      simulated: whether their acceptance is.
    """
    figure = new_figure("Tokens per target call", 7.0, 5.0, simulated=simulated)
    axes = add_axes(figure, 1, 1, 1, title="", x="alpha", y="tokens per target call")
    gammas = _gammas(cells)
    limit = _ALPHAS[:-1]
    axes.plot(limit, [theory.oracle_tokens_per_step(float(a)) for a in limit], "k:", label="any gamma: 1 / (1 - alpha)")
    for gamma, colour in zip(gammas, shades(len(gammas)), strict=True):
        expected = [theory.tokens_per_step(float(alpha), gamma) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, expected, color=colour, label=f"gamma = {gamma}")
    axes.set_ylim(0.5, max(gammas) + 1.5)
    _add_points(axes, cells, gammas, "tokens_per_call")
    axes.legend(loc="upper left", fontsize=9)
    return figure


def figure3(cs: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2)) -> "Figure":
    """Figure 3: the best gamma over alpha, for several costs c of a draft call (section 3.5)."""
    figure = new_figure("The best gamma by Theorem 3.8", 7.0, 5.0)
    axes = add_axes(figure, 1, 1, 1, title="", x="alpha", y="gamma")
    alphas = _ALPHAS[:191:2]  # to 0.95; close to 1 the best gamma leaves all bounds
    for c, colour in zip(cs, shades(len(cs)), strict=True):
        best = [theory.best_gamma(float(alpha), c) for alpha in alphas]
        axes.plot(alphas, best, color=colour, drawstyle="steps-mid", label=f"c = {c:g}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def figure4(cells: Sequence[Mapping[str, Any]] = (), *, simulated: bool = False) -> "Figure":
    """Figure 4: speedup and operations over alpha, for several gamma, where guesses cost nothing (c = c_hat = 0).

    Args:
      cells: measured ones, whose speedups are drawn as points; their guesses do cost.
      simulated: whether their acceptance is.
    """
    figure = new_figure("Speedup and operations where guesses cost nothing", 10.0, 5.0, simulated=simulated)
    gammas = _gammas(cells)
    told = "Speedup (Theorem 3.8, c = 0" + ("; points with c as it is)" if cells else ")")
    left = add_axes(figure, 1, 2, 1, title=told, x="alpha", y="times as fast")
    right = add_axes(figure, 1, 2, 2, title="Operations (Theorem 3.11, c_hat = 0)", x="alpha", y="times as many")
    for gamma, colour in zip(gammas, shades(len(gammas)), strict=True):
        alphas = [float(alpha) for alpha in _ALPHAS]
        left.plot(alphas, [theory.speedup(a, gamma, 0.0) for a in alphas], color=colour, label=f"gamma = {gamma}")
        right.plot(alphas, [theory.operations(a, gamma, 0.0) for a in alphas], color=colour, label=f"gamma = {gamma}")
    _add_points(left, cells, gammas, "speedup")
    left.legend(loc="upper left", fontsize=9)
    return figure


def shades(number: int) -> list[tuple[float, ...]]:
    """Colours of increasing lightness, dark enough for lines on white."""
    import matplotlib

    return [tuple(colour) for colour in matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, number))]


def _gammas(cells: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({*GAMMAS, *(cell["gamma"] for cell in cells)})


def _add_points(axes: "Axes", cells: Sequence[Mapping[str, Any]], gammas: Sequence[int], name: str) -> None:
    for i, (gamma, colour) in enumerate(zip(gammas, shades(len(gammas)), strict=True)):
        some = [cell for cell in cells if cell["gamma"] == gamma]
        if some:
            alphas, values = ([cell[which] for cell in some] for which in ("alpha", name))
            marker: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 7, "markeredgecolor": "black"}
            label = f"measured, gamma = {gamma}"
            axes.plot(alphas, values, color=colour, linestyle="none", label=label, zorder=3, **marker)


def figure5(
    timings: Mapping[str, Any], gammas: Sequence[int], emitted: Sequence[int], *, simulated: bool = False
) -> "Figure":
    """Figure 5: what runs when, in plain decoding and, below it, in speculative decoding of the same tokens.

    Args:
      timings: seconds of prefill_target, prefill_draft, target_one, target_block, draft_one and draft_two, each a
        number or a list whose median is taken, as in `costs.Costs`. What step and plain_step, if given, are longer than
        their calls is drawn as the rest of a step.
      gammas: guesses of each step.
      emitted: tokens of each step.
      simulated: whether acceptance is.

    Raises:
      ValueError: there is no step, or the numbers of steps differ.
    """
    if not gammas or len(gammas) != len(emitted):
        raise ValueError(f"gammas and emitted have {len(gammas)} and {len(emitted)} steps; give both of each step.")
    times = {name: 1000 * statistics.median(np.atleast_1d(value).tolist()) for name, value in timings.items()}
    widest = [("draft call", times["draft_two"])] + [("draft call", times["draft_one"])] * (max(gammas) - 1)
    verify = ("target call", times["target_block"])
    calls = sum(milliseconds for _, milliseconds in [*widest, verify])
    rest = ("rest of a step", max(0.0, times.get("step", 0.0) - calls))
    plain_step = [
        ("target call", times["target_one"]),
        ("rest of a step", max(0.0, times.get("plain_step", 0.0) - times["target_one"])),
    ]
    start = ("target encoder", times["prefill_target"])
    plain = [start] + plain_step * sum(emitted)
    speculative = [start, ("draft encoder", times["prefill_draft"])]
    for gamma in gammas:
        speculative += [*widest[:gamma], verify, rest]

    figure = new_figure(f"{sum(emitted)} tokens in {len(emitted)} steps", 12.0, 3.4, simulated=simulated)
    axes = add_axes(figure, 1, 1, 1, title="", x="ms", y="")
    axes.set_yticks([1, 0], ["plain", "speculative"])
    axes.grid(visible=False, axis="y")
    lanes = {1: _ends(plain), 0: _ends(speculative)}
    for kind, colour in _KINDS.items():
        for y, lane in lanes.items():
            boxes = [(end - width, width) for name, width, end in lane if name == kind and width > 0]
            label = kind if y == 0 else None  # every kind is in the lower lane
            axes.broken_barh(boxes, (y - 0.3, 0.6), facecolors=colour, edgecolor="black", linewidth=0.4, label=label)
    for y, lane in lanes.items():
        axes.annotate(f"{lane[-1][2]:.1f} ms", (lane[-1][2], y), (5, 0), textcoords="offset points", va="center")
    verified = [(end - width / 2) for name, width, end in lanes[0] if name == "target call"]
    for x, number in zip(verified, emitted, strict=True):
        axes.annotate(f"+{number}", (x, 0.33), ha="center", va="bottom", fontsize=8)
    axes.set_xlim(0, 1.1 * max(lane[-1][2] for lane in lanes.values()))
    axes.set_ylim(-0.5, 1.5)
    figure.legend(loc="outside lower center", ncols=len(_KINDS), fontsize=9)
    return figure


_KINDS = {
    "target encoder": YELLOW,
    "draft encoder": ORANGE,
    "draft call": SKY,
    "target call": PURPLE,
    "rest of a step": "0.85",
}


def _ends(boxes: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """(kind, width, end) of boxes in a row."""
    ends = np.cumsum([width for _, width in boxes]).tolist()
    return [(kind, width, end) for (kind, width), end in zip(boxes, ends, strict=True)]
