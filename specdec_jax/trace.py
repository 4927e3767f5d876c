"""The paper's Figure 1: a line per target call, with accepted, rejected and corrected tokens in colour."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from specdec_jax.results import DecodingResult
from specdec_jax.vocabularies import Vocabulary

ACCEPTED, REJECTED, CORRECTED, EARLIER = "green", "red strike", "blue", "dim"

_PLAIN_MARKS = {ACCEPTED: "{}", REJECTED: "[-{}]", CORRECTED: "[+{}]"}


class Step(NamedTuple):
    """One target call of one row.

    Attributes:
      earlier: the text before it, on one line.
      accepted: pieces of the accepted guesses.
      rejected: piece of the first guess that was rejected; None if none was.
      own: piece of the target's own token, a correction where a guess was rejected; None where the row ended before.
    """

    earlier: str
    accepted: list[str]
    rejected: str | None
    own: str | None


def steps_of(result: DecodingResult, row: int, vocabulary: Vocabulary) -> list[Step]:
    """What happened in each step of a row.

    Args:
      result: what decoding returned.
      row: which row.
      vocabulary: of its tokens.
    """
    arrays = (result.tokens, result.step_guesses, result.step_accepted, result.step_emitted)
    tokens, guesses, accepted, emitted = (np.asarray(array[row]) for array in arrays)
    return read_steps(tokens, guesses, accepted, emitted, vocabulary)


def read_steps(
    tokens: Int32[np.ndarray, " max_length"],
    step_guesses: Int32[np.ndarray, "max_length gamma"],
    step_accepted: Int32[np.ndarray, " max_length"],
    step_emitted: Int32[np.ndarray, " max_length"],
    vocabulary: Vocabulary,
) -> list[Step]:
    """What happened in each step of one row; the arguments are that row of a DecodingResult."""
    steps, position = [], 0
    for guesses, accepted, emitted in zip(step_guesses.tolist(), step_accepted, step_emitted, strict=True):
        if emitted == 0:
            break
        before = tokens[:position].tolist()
        new = tokens[position : position + emitted].tolist()
        pieces = [piece(vocabulary, before + new[:i], token) for i, token in enumerate(new)]
        has_own = emitted > accepted
        rejected = None
        if has_own and accepted < len(guesses) and guesses[accepted] >= 0:
            rejected = piece(vocabulary, before + new[:accepted], guesses[accepted])
        own = pieces[accepted] if has_own else None
        steps.append(Step(_visible(vocabulary.decode(before)), pieces[:accepted], rejected, own))
        position += int(emitted)
    return steps


def piece(vocabulary: Vocabulary, before: Sequence[int], token: int) -> str:
    """What a token adds to the text, with a visible space; a token without text of its own is named.

    Args:
      vocabulary: the vocabulary.
      before: ids of the text so far, without an end.
      token: the id.
    """
    if token == vocabulary.eos_id:
        return "</s>"
    if token == vocabulary.pad_id:
        return "<pad>"
    # A text begins without its first token's space, so a token that is only a space shows behind something else.
    for context in [list(before)] + [[vocabulary.unk_id]] * (not before):
        old, new = vocabulary.decode(context), vocabulary.decode([*context, token])
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        added = new[same:]
        if added and "\ufffd" not in added:
            return _visible(added).replace(" ", "·")
    return f"<{token}>"  # part of a character, or an id without text


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def render(steps: Sequence[Step], *, width: int, colour: bool) -> list[Text]:
    """A line per step; the earlier text gives way on the left where a line would be too wide.

    Args:
      steps: what `read_steps` returned.
      width: cells of the terminal.
      colour: False marks rejected and corrected tokens by brackets instead.
    """
    lines = []
    for number, step in enumerate(steps, start=1):
        new = Text(no_wrap=True, overflow="ellipsis")
        for style, pieces in ((ACCEPTED, step.accepted), (REJECTED, [step.rejected]), (CORRECTED, [step.own])):
            for text in pieces:
                if text is not None:
                    new.append(" ").append(text if colour else _PLAIN_MARKS[style].format(text), style=style)
        label = f"{number:>3} "
        line = Text(label, style="", no_wrap=True, overflow="ellipsis")
        line.append(_ending(step.earlier, width - len(label) - new.cell_len - (not colour)), style=EARLIER)
        lines.append(line.append("" if colour else "|").append_text(new))
    return lines


def _ending(text: str, width: int) -> str:
    """The end of a text that fits into so many cells."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return "…" + text if width > 0 else ""


def legend(console: Console) -> Text:
    """What the colours mean on this console."""
    colour = console.color_system is not None
    line = Text("    ")
    for name, style in (("accepted", ACCEPTED), ("rejected", REJECTED), ("the target's own", CORRECTED)):
        line.append(name if colour else _PLAIN_MARKS[style].format(name), style=style).append("  ")
    return line


def show(result: DecodingResult, row: int, vocabulary: Vocabulary, console: Console) -> None:
    """Prints a row's trace, and its figures below it.

    Args:
      result: what decoding returned, as numpy arrays.
      row: which row.
      vocabulary: of its tokens.
      console: where to print; without colours, brackets stand in for them.
    """
    for line in render(steps_of(result, row, vocabulary), width=console.width, colour=console.color_system is not None):
        console.print(line)
    calls, length = int(result.num_target_calls[row]), int(result.lengths[row])
    figures = f"{length / calls:.2f} tokens per target call, alpha {result.alpha[row]:.2f}"
    console.print(f"    tokens {length}, target calls {calls}: {figures}", highlight=False)
