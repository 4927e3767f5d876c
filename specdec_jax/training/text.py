"""The three text-to-text tasks of the demonstration pair, from tab-separated files.

translate English to German: <English>     ->  <German>
summarize: <description>                   ->  <one-line summary>
restore: <lower case, no punctuation>      ->  <the English sentence as it was>
"""

import gzip
import os
import pathlib
from typing import NamedTuple

TRANSLATE_PREFIX = "translate English to German: "
SUMMARIZE_PREFIX = "summarize: "
RESTORE_PREFIX = "restore: "
TASK_PREFIXES = {"ende": TRANSLATE_PREFIX, "summarize": SUMMARIZE_PREFIX, "restore": RESTORE_PREFIX}

TaskName = str


class Pair(NamedTuple):
    """One example as text; `source` carries its task's prefix."""

    source: str
    target: str


def strip_punctuation(text: str) -> str:
    """Lower-cases a sentence and removes its punctuation, as the restore task's input.

    Apostrophes vanish, so that a contraction stays one word; every other mark becomes a space; runs of spaces
    become one.
    """
    without_apostrophes = text.lower().replace("'", "").replace("\u2019", "")
    return " ".join("".join(c if c.isalnum() else " " for c in without_apostrophes).split())


def restore_pair(sentence: str) -> Pair | None:
    """The restore example of one English sentence; None if no letter is left in its input."""
    stripped = strip_punctuation(sentence)
    return Pair(RESTORE_PREFIX + stripped, sentence) if any(c.isalpha() for c in stripped) else None


def read_rows(path: str | os.PathLike[str], *, num_columns: int) -> list[list[str]]:
    """Rows of a tab-separated file, gzipped if its name ends in `.gz`.

    Args:
      path: the file.
      num_columns: the least number of columns a row must have.

    Returns:
      One list of columns a row.

    Raises:
      ValueError: the file cannot be read, or a row has too few columns.
    """
    path = pathlib.Path(path)
    try:
        encoded = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = encoded.decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r} as a UTF-8 tab-separated file: {error}") from error
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, start=1):
        if len(row) < num_columns:
            raise ValueError(f"{path}:{number} has {len(row)} columns: at least {num_columns} are needed")
    return rows


def read_tasks(
    *,
    split: str,
    ende: str | os.PathLike[str] | None = None,
    summ: str | os.PathLike[str] | None = None,
    pairs: str | os.PathLike[str] | None = None,
) -> dict[TaskName, list[Pair]]:
    """Examples of one split of every task whose file is given.

    Args:
      split: "train", "valid" or "test".
      ende: columns English, German, split; gives the tasks "ende" and "restore".
      summ: columns description, one-line summary, split; gives the task "summarize".
      pairs: columns input with its prefix, output, and no split; gives the task "pairs". Every 50th row is
        its "valid" split and all others are "train".

    Returns:
      Task name to examples, in the files' order. Each English sentence is restored once.

    Raises:
      ValueError: a file cannot be read, or has no row of this split.
    """
    tasks: dict[TaskName, list[Pair]] = {}
    if ende is not None:
        rows = [row for row in read_rows(ende, num_columns=3) if row[2] == split]
        tasks["ende"] = [Pair(TRANSLATE_PREFIX + english, german) for english, german, *_ in rows]
        sentences = dict.fromkeys(row[0] for row in rows)
        tasks["restore"] = [pair for pair in map(restore_pair, sentences) if pair is not None]
    if summ is not None:
        rows = [row for row in read_rows(summ, num_columns=3) if row[2] == split]
        tasks["summarize"] = [Pair(SUMMARIZE_PREFIX + document, summary) for document, summary, *_ in rows]
    if pairs is not None:
        rows = read_rows(pairs, num_columns=2)
        held_out = split == "valid"
        tasks["pairs"] = [Pair(row[0], row[1]) for i, row in enumerate(rows) if (i % 50 == 49) == held_out]
    for name, examples in tasks.items():
        if not examples:
            raise ValueError(f"task {name!r} has no {split!r} examples: give a file with rows of that split")
    return tasks


def vocabulary_texts(tasks: dict[TaskName, list[Pair]]) -> list[str]:
    """Every distinct source (prefix included) and target, for building a joint vocabulary."""
    texts = (text for examples in tasks.values() for pair in examples for text in pair)
    return list(dict.fromkeys(texts))
