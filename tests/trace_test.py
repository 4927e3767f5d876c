import io

import jax
import numpy as np
import pytest
from rich.console import Console

from specdec_jax import trace
from specdec_jax.settings import Settings
from specdec_jax.vocabularies import ByteVocabulary, SentencePieceVocabulary, train_sentencepiece

BYTES = ByteVocabulary()


def ids(text):
    return BYTES.encode(text)


def row(tokens, steps, *, gamma, max_length=12):
    """A row's arrays from its tokens and (guesses, accepted, emitted) per step."""
    guesses = np.zeros((max_length, gamma), np.int32)
    accepted, emitted = np.full(max_length, -1, np.int32), np.zeros(max_length, np.int32)
    for i, (some, n, new) in enumerate(steps):
        guesses[i], accepted[i], emitted[i] = some, n, new
    return np.pad(np.asarray(tokens, np.int32), (0, max_length - len(tokens))), guesses, accepted, emitted


# Three calls: "ab" accepted and "x" corrected to " "; "cde" all accepted, "f" extra; the end accepted in mid-block.
HAND = row(
    [*ids("ab cdef"), 1],
    [(ids("abx"), 2, 3), (ids("cde"), 3, 4), ([1, *ids("zz")], 1, 1)],
    gamma=3,
)


def test_steps_of_a_hand_made_row():
    assert trace.read_steps(*HAND, BYTES) == [
        trace.Step("", ["a", "b"], "x", "·"),
        trace.Step("ab ", ["c", "d", "e"], None, "f"),
        trace.Step("ab cdef", ["</s>"], None, None),
    ]


def test_first_guess_rejected_and_end_as_correction():
    arrays = row([*ids("a"), 1], [(ids("zz"), 0, 1), (ids("bb"), 0, 1)], gamma=2)
    assert trace.read_steps(*arrays, BYTES) == [
        trace.Step("", [], "z", "a"),
        trace.Step("a", [], "b", "</s>"),
    ]


def test_a_character_of_several_bytes_shows_once_complete():
    first, second = ids("é")
    assert trace.piece(BYTES, ids("a"), first) == f"<{first}>"
    assert trace.piece(BYTES, [*ids("a"), first], second) == "é"


@pytest.mark.parametrize(
    ("token", "shown"), [(0, "<pad>"), (1, "</s>"), (2, "<2>"), (300, "<300>"), (ids("\n")[0], "\\n"), (30, "\\x1b")]
)
def test_tokens_without_visible_text(token, shown):
    assert trace.piece(BYTES, ids("a"), token) == shown


def test_sentencepiece_shows_the_space_that_a_piece_begins_with(tmp_path):
    train_sentencepiece(["the house and the tree and the moon"] * 20, tmp_path / "v.model", num_pieces=273)
    vocabulary = SentencePieceVocabulary(tmp_path / "v.model")
    tokens = vocabulary.encode("the house and the moon")
    pieces = [trace.piece(vocabulary, tokens[:i], token) for i, token in enumerate(tokens)]
    assert "".join(pieces).lstrip("·") == "the·house·and·the·moon"
    assert any(piece.startswith("·") and len(piece) > 1 for piece in pieces)
    space = vocabulary.encode(" ")
    assert [trace.piece(vocabulary, [], token) for token in space] in (["·"], ["·"] * len(space))


def test_colours():
    steps = trace.read_steps(*HAND, BYTES)
    first, second, last = trace.render(steps, width=80, colour=True)
    assert [line.plain for line in (first, second, last)] == ["  1  a b x ·", "  2 ab  c d e f", "  3 ab cdef </s>"]
    styles = {first.plain[span.start : span.end]: span.style for span in first.spans}
    assert styles["a"] == styles["b"] == "green" and styles["x"] == "red strike" and styles["·"] == "blue"
    assert [span.style for span in second.spans] == ["dim", *["green"] * 3, "blue"]


def test_without_colour_brackets_tell():
    lines = trace.render(trace.read_steps(*HAND, BYTES), width=80, colour=False)
    assert [line.plain for line in lines] == ["  1 | a b [-x] [+·]", "  2 ab | c d e [+f]", "  3 ab cdef| </s>"]


@pytest.mark.parametrize("colour", [True, False])
def test_a_narrow_line_loses_its_beginning(colour):
    step = trace.Step("家が大きい and old", ["·x"], None, "y")
    for width in range(14, 36):
        (line,) = trace.render([step], width=width, colour=colour)
        assert line.cell_len <= width
        assert line.plain.endswith("·x y" if colour else "·x [+y]")
    assert "…" not in line.plain


def test_text_is_never_read_as_markup():
    (line,) = trace.render([trace.Step("[bold]", ["[red]"], None, None)], width=40, colour=True)
    console = Console(file=io.StringIO(), width=40)
    console.print(line)
    assert console.file.getvalue().rstrip() == "  1 [bold] [red]"


def test_a_guess_that_did_not_count_was_not_rejected():
    step_arrays = ([[70, -1], [0, 0]], [1, -1], [2, 0])
    arrays = [np.array(x, np.int32) for x in ([70, 71], *step_arrays)]
    (step,) = trace.read_steps(*arrays, BYTES)
    assert len(step.accepted) == 1 and step.rejected is None and step.own is not None


def test_show_of_a_real_decode():
    import mini_pair

    from specdec_jax import generation

    settings = Settings(gamma=4, batch_size=4, **mini_pair.LIMITS)
    pair = generation.load_pair(mini_pair.MODELS, BYTES)
    (batch,) = generation.make_batches(generation.encode(["west green"], BYTES, settings), BYTES, settings)
    result = jax.device_get(generation.decode(pair, batch, settings))
    console = Console(file=io.StringIO(), width=80)
    trace.show(result, 0, BYTES, console)
    *lines, figures = console.file.getvalue().splitlines()
    assert len(lines) == int(result.num_target_calls[0])
    assert lines[0].startswith("  1 |")
    assert f"tokens {int(result.lengths[0])}, target calls {len(lines)}: " in figures
    steps = trace.read_steps(
        result.tokens[0], result.step_guesses[0], result.step_accepted[0], result.step_emitted[0], BYTES
    )
    emitted = [piece for step in steps for piece in [*step.accepted, *[step.own] * (step.own is not None)]]
    assert "".join(emitted) == "WEST·WEST·GREEN</s>"
    assert [len(step.accepted) for step in steps] == result.step_accepted[0, : len(steps)].tolist()
