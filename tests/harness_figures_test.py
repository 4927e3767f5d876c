import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from specdec_jax import theory
from specdec_jax.harness import figures, plots
from specdec_jax.trace import Step


def lines(axes):
    """Each labelled line's data, by its label."""
    return {line.get_label(): np.asarray(line.get_xydata()) for line in axes.get_lines()}


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def cell(gamma, alpha, speedup, **more):
    key = {"task": "ende", "draft": "small", "temperature": 0.0, "batch_size": 1, "gamma": gamma}
    interval = {"speedup_low": speedup - 0.1, "speedup_high": speedup + 0.2, "predicted": speedup + 0.3}
    return {**key, "alpha": alpha, "speedup": speedup, "tokens_per_call": speedup + 1, **interval, **more}


CELLS = [cell(7, 0.75, 2.1), cell(4, 0.8, 1.9), cell(7, 0.6, 1.5, temperature=1.0, draft="medium")]


def entry(draft, temperature, alpha):
    ranges = [(1, 1, alpha + 0.1), (2, 2, alpha), (3, 4, alpha - 0.1)]
    return {
        "task": "ende",
        "draft": draft,
        "temperature": temperature,
        "alpha": alpha,
        "by_position": [
            {"first": first, "last": last, "alpha": mean, "alpha_error": 0.02, "num_tokens": 9}
            for first, last, mean in ranges
        ],
        "histogram": [0.25, *[0.0] * 18, 0.75],
    }


def document(**more):
    names = {"paper_tasks": {"ende": "EnDe"}, "paper_drafts": {"small": "small", "medium": "base"}}
    acceptance = [entry("small", 0.0, 0.6), entry("medium", 0.0, 0.7), entry("small", 1.0, 0.5)]
    start = {"name": "demo", "simulated": False, "settings": names}
    return {**start, "acceptance": acceptance, "cells": CELLS, **more}


TIMINGS = {
    "prefill_target": 0.02,
    "prefill_draft": 0.005,
    "target_one": [0.010, 0.011, 0.012],
    "target_block": 0.015,
    "draft_one": 0.001,
    "draft_two": 0.002,
    "step": 0.020,
    "plain_step": 0.0115,
    "gamma": 3,
}
STEPS = [
    Step("", ["The"], "·B", "·comp"),
    Step("The comp", ["an", "y", "$x$"], None, "·家"),
    Step("The company " + "and others " * 20, [], "y" * 130, "</s>"),
]
WITH_DOCUMENTS = {
    "2": lambda simulated: figures.figure2(CELLS, simulated=simulated),
    "4": lambda simulated: figures.figure4(CELLS, simulated=simulated),
    "5": lambda simulated: figures.figure5(TIMINGS, [3, 3], [4, 2], simulated=simulated),
    "position": lambda simulated: plots.acceptance_by_position(document(simulated=simulated)),
    "beta": lambda simulated: plots.beta_distribution(document(simulated=simulated)),
    "table2": lambda simulated: plots.table2_plot(document(simulated=simulated)),
}


def test_figure_1_shows_all_pieces_in_their_colours():
    (axes,) = figures.figure1(STEPS).axes
    found = {}
    for text in axes.texts:
        found.setdefault(text.get_color(), []).append(text.get_text())
    assert not any(text.get_parse_math() for text in axes.texts)  # what dollars enclose is no formula
    assert found[figures.GREEN] == ["accepted", "The", "an", "y", "$x$"]
    assert found[figures.BLUE] == ["the target's own", "·comp", "·\ufffd", "</s>"]  # the font has no such character
    assert "".join(found[figures.VERMILION]) == "rejected·B" + "y" * 130
    assert " ".join(found["0.45"]).split() == "1 2 The comp 3 The company".split() + ["and", "others"] * 20


def test_figure_1_wraps_and_strikes_out():
    (axes,) = figures.figure1(STEPS).axes
    width, height = axes.get_xlim()[1], axes.get_ylim()[0]
    ends = {}
    for text in axes.texts:
        (x, y), length = text.get_position(), len(text.get_text().rstrip())
        assert x >= ends.get(y, 0) and x + length <= width and y < height
        ends[y] = x + length + 1
    rejected = [text for text in axes.texts if text.get_color() == figures.VERMILION]
    strikes = [line.get_xydata().tolist() for line in axes.get_lines()]
    places = [(*text.get_position(), len(text.get_text())) for text in rejected]
    assert strikes == [[[x, y], [x + length, y]] for x, y, length in places]


def test_figure_1_has_as_much_room_as_its_characters_take():
    figure = figures.figure1([Step("x" * 96, [], None, "a")])
    (axes,) = figure.axes
    (text,) = (text for text in axes.texts if text.get_text() == "x" * 96)
    measured = text.get_window_extent().transformed(axes.transData.inverted()).width
    assert measured == pytest.approx(96, abs=0.5)


def test_figure_2():
    (axes,) = figures.figure2(CELLS).axes
    drawn = lines(axes)
    for gamma in (1, 4, 7, 10):  # 4 is that of a cell
        for alpha, tokens in drawn[f"gamma = {gamma}"][::40]:
            assert tokens == pytest.approx(theory.tokens_per_step(alpha, gamma))
    assert drawn["gamma = 7"][-1].tolist() == [1.0, 8.0]
    assert drawn["any gamma: 1 / (1 - alpha)"][100] == pytest.approx([0.5, 2.0])
    assert drawn["measured, gamma = 7"].tolist() == [[0.75, 3.1], [0.6, 2.5]]
    assert drawn["measured, gamma = 4"].tolist() == [[0.8, 2.9]]
    assert not any("measured" in label for label in lines(figures.figure2().axes[0]))


def test_figure_3():
    (axes,) = figures.figure3([0.01, 0.2]).axes
    drawn = lines(axes)
    for c in (0.01, 0.2):
        alphas, gammas = drawn[f"c = {c:g}"].T
        assert (np.diff(gammas) >= 0).all() and gammas.max() < 100  # the largest that is tried
        for alpha, gamma in zip(alphas[5::30], gammas[5::30], strict=True):
            assert gamma == theory.best_gamma(float(alpha), c)


def test_figure_4():
    speed, operations = figures.figure4(CELLS).axes
    assert lines(speed)["gamma = 7"][150] == pytest.approx([0.75, theory.speedup(0.75, 7, 0.0)])
    assert lines(operations)["gamma = 7"][150] == pytest.approx([0.75, theory.operations(0.75, 7, 0.0)])
    assert lines(speed)["measured, gamma = 4"].tolist() == [[0.8, 1.9]]
    assert "points with c as it is" in speed.get_title() and "points" not in figures.figure4().axes[0].get_title()


def boxes(axes):
    """(start, end) in ms of the boxes of each colour, of both lanes."""
    found = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            x, y = path.vertices.T
            lane = "plain" if y.mean() > 0.5 else "speculative"
            colour = to_hex(collection.get_facecolor()[0])
            found.setdefault((lane, colour), []).append((x.min(), x.max()))
    return found


def test_figure_5_draws_the_timings():
    figure = figures.figure5(TIMINGS, [3, 2], [4, 2])
    (axes,) = figure.axes
    drawn = boxes(axes)
    encoder, draft_encoder, draft, target, rest = (to_hex(colour) for colour in figures._KINDS.values())
    np.testing.assert_allclose(drawn["plain", encoder], [(0, 20)])
    np.testing.assert_allclose(drawn["plain", target], [(20 + 11.5 * i, 31 + 11.5 * i) for i in range(6)])
    np.testing.assert_allclose(drawn["plain", rest], [(31 + 11.5 * i, 31.5 + 11.5 * i) for i in range(6)])
    np.testing.assert_allclose(drawn["speculative", draft_encoder], [(20, 25)])
    # A step of 3 guesses takes 2 + 1 + 1 + 15 ms in calls, and 1 ms besides.
    np.testing.assert_allclose(drawn["speculative", draft], [(25, 27), (27, 28), (28, 29), (45, 47), (47, 48)])
    np.testing.assert_allclose(drawn["speculative", target], [(29, 44), (48, 63)])
    np.testing.assert_allclose(drawn["speculative", rest], [(44, 45), (63, 64)])
    assert ("plain", draft) not in drawn and ("plain", draft_encoder) not in drawn
    assert {"89.0 ms", "64.0 ms", "+4", "+2", "6 tokens in 2 steps", "draft call"} <= set(texts(figure))


def test_figure_5_has_no_rest_where_calls_alone_take_longer():
    (axes,) = figures.figure5({**TIMINGS, "step": 0.01, "plain_step": 0.01}, [3], [4]).axes
    rest = to_hex(figures._KINDS["rest of a step"])
    assert not any(colour == rest for _, colour in boxes(axes))


def test_acceptance_by_position():
    figure = plots.acceptance_by_position(document())
    greedy, sampled = figure.axes
    assert (greedy.get_title(), sampled.get_title()) == ("ende, temperature 0", "ende, temperature 1")
    small, medium = greedy.containers
    assert (small.get_label(), medium.get_label()) == ("small", "medium")
    line, _, (bars,) = medium.lines
    np.testing.assert_allclose(line.get_ydata(orig=False), [0.8, 0.7, 0.6])
    np.testing.assert_allclose(line.get_xdata(orig=False), [1, 2, 12**0.5])
    np.testing.assert_allclose(bars.get_segments()[0][:, 1], [0.78, 0.82])
    means = [line.get_ydata()[0] for line in greedy.get_lines() if line.get_linestyle() == ":"]
    assert means == [0.6, 0.7] and [text.get_text() for text in greedy.get_xticklabels()] == ["1", "2", "3-4"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["small", "medium"]


def test_beta_distribution():
    greedy, sampled = plots.beta_distribution(document()).axes
    values, edges, _ = greedy.patches[0].get_data()
    assert values.tolist() == [0.25, *[0.0] * 18, 0.75]
    np.testing.assert_allclose(edges, np.arange(21) / 20)
    assert [patch.get_label() for patch in greedy.patches] == ["small", "medium"] and len(sampled.patches) == 1
    assert [line.get_xdata()[0] for line in greedy.get_lines()] == [0.6, 0.7]


def test_table_2_as_bars():
    cells = [*CELLS, cell(3, 0.5, 1.2, task="restore"), cell(2, 0.5, 1.1, batch_size=8)]
    figure = plots.table2_plot(document(cells=cells))
    ende, restore = figure.axes
    heights = {patch.get_x() + patch.get_width() / 2: patch.get_height() for patch in ende.patches}
    assert heights == pytest.approx({0: 1.9, 1: 2.1, 2: 1.1, 4: 1.5})  # by temperature, draft, batch size and gamma
    drawn = lines(ende)
    np.testing.assert_allclose(drawn["predicted (Theorem 3.8)"], [[0, 2.2], [1, 2.4], [2, 1.4], [4, 1.8]])
    assert drawn["the paper's"].tolist() == [[0, 3.4], [1, 3.4], [4, 2.4]]  # none at batch 8
    (bars,) = ende.containers[0].lines[2]
    np.testing.assert_allclose([segment[:, 1] for segment in bars.get_segments()][1], [2.0, 2.3])
    labels = [label.get_text() for label in ende.get_xticklabels()]
    assert labels == ["small\n4\nbatch 1", "small\n7\nbatch 1", "small\n2\nbatch 8", "medium\n7\nbatch 1"]
    assert "the paper's" not in lines(restore) and restore.get_title() == "restore"
    assert "small, measured" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label.get_text() for label in restore.get_xticklabels()] == ["small\n3"]


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_simulated_acceptance_is_said_on_every_figure(name):
    said = [["simulated acceptance" in text for text in texts(WITH_DOCUMENTS[name](which))] for which in (True, False)]
    assert any(said[0]) and not any(said[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.figure1([]), "steps is empty"),
        (lambda: figures.figure5(TIMINGS, [3, 3], [4]), "gammas and emitted have 2 and 1 steps"),
        (lambda: figures.figure5(TIMINGS, [], []), "gammas and emitted have 0 and 0 steps"),
        (lambda: plots.acceptance_by_position(document(acceptance=[])), "demo has no acceptance with by_position"),
        (lambda: plots.beta_distribution(document(acceptance=[])), "demo has no acceptance with histogram"),
        (lambda: plots.table2_plot(document(cells=[])), "demo has no cells"),
    ],
)
def test_nothing_to_draw(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_matplotlib_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'specdec_jax\[plots\]'"):
        figures.figure3()


def test_save(tmp_path):
    settings = dict(matplotlib.rcParams)
    for directory in (tmp_path / "one", tmp_path / "two"):
        figures.save(figures.figure5(TIMINGS, [3, 2], [4, 2], simulated=True), directory, "figure5")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["figure5.png", "figure5.svg"]
    svg = (tmp_path / "one" / "figure5.svg").read_text()
    for label in (
        "6 tokens in 2 steps, simulated acceptance",
        "plain",
        "speculative",
        "target encoder",
        "89.0 ms",
        "+4",
    ):
        assert f"<!-- {label} -->" in svg
    assert (tmp_path / "one" / "figure5.png").read_bytes().startswith(b"\x89PNG")
    for ending in ("png", "svg"):
        one, two = ((tmp_path / which / f"figure5.{ending}").read_bytes() for which in ("one", "two"))
        assert one == two
    assert dict(matplotlib.rcParams) == settings


def test_save_of_text_that_the_font_has_not(tmp_path):
    figures.save(figures.figure1(STEPS), tmp_path, "figure1")  # a missing character would be a warning, and so an error
    assert (tmp_path / "figure1.png").exists()


def test_a_reader_with_another_font_gets_the_same_figure(tmp_path):
    figures.save(figures.figure2(), tmp_path / "one", "figure2")
    with matplotlib.rc_context({"font.sans-serif": ["DejaVu Serif"], "svg.hashsalt": "mine"}):
        figures.save(figures.figure2(), tmp_path / "two", "figure2")
    one, two = ((tmp_path / which / "figure2.svg").read_bytes() for which in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("failing", ["png", "svg"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing):
    figure = figures.figure2()
    draw = figure.savefig

    def fails(stream, *, format, **more):
        if format == failing:
            stream.write(b"half")
            raise OSError("no space left on device")
        draw(stream, format=format, **more)

    monkeypatch.setattr(figure, "savefig", fails)
    with pytest.raises(OSError):
        figures.save(figure, tmp_path / "new", "figure2")
    assert not (tmp_path / "new").exists()
    (tmp_path / "figure2.png").write_bytes(b"old")
    with pytest.raises(OSError):
        figures.save(figure, tmp_path, "figure2")
    assert [path.name for path in tmp_path.iterdir()] == ["figure2.png"]
    assert (tmp_path / "figure2.png").read_bytes() == b"old"


def test_a_save_that_cannot_replace_leaves_nothing_of_its_own(tmp_path):
    (tmp_path / "figure2.png").mkdir()
    with pytest.raises(OSError):
        figures.save(figures.figure2(), tmp_path, "figure2")
    assert [path.name for path in tmp_path.iterdir()] == ["figure2.png"]
