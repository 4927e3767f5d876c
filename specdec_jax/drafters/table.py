"""How often tokens follow each other: counted once, kept sparsely on disk, read as fixed shapes for the loop.

    table = count(sequences, vocab_size=6144)        # [[41, 7, 1], [9, 41, 1], ...], ends included, starts not
    table.save("ende.npz")
    params = Table.load("ende.npz").params()         # for UnigramDrafter, BigramDrafter, OneShotDrafter

Successors are counted at distances 1 to D: at distance 1 they make a bigram, at 1 to gamma a block's guesses at once.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

_FORMAT = "specdec_jax table 1"


class TableParams(NamedTuple):
    """A table as the drafters use it; of the most frequent successors only, the rest has their probability together.

    Attributes:
      unigram: float32 [vocab], sums to 1 over the valid ids and is above 0 there, 0 elsewhere.
      successors: int32 [distances, vocab, width], ids that were seen so far behind a token.
      probabilities: float32 [distances, vocab, width], their own part of q; 0 where there are fewer.
      rest: float32 [distances, vocab], the part that is the unigram's; 1 for a token that was never seen.
      best: int32 [distances, vocab], the likeliest successor.
    """

    unigram: Float32[Array, " vocab"]
    successors: Int32[Array, "distances vocab width"]
    probabilities: Float32[Array, "distances vocab width"]
    rest: Float32[Array, "distances vocab"]
    best: Int32[Array, "distances vocab"]


class Table(NamedTuple):
    """Counts, in numpy arrays.

    Attributes:
      counts: int64 [vocab], how often each token was emitted.
      num_ids: valid ids; rows of the models beyond them are padding.
      contexts: int32 [pairs], ascending: (distance - 1) * vocab + the earlier token.
      successors: int32 [pairs], the later token; within a context the most frequent first.
      times: int64 [pairs], how often.
      distances: up to which distance pairs were counted.
      source: what was counted, in words.
    """

    counts: np.ndarray
    num_ids: int
    contexts: np.ndarray
    successors: np.ndarray
    times: np.ndarray
    distances: int
    source: str

    @property
    def vocab_size(self) -> int:
        """Rows of the models that it fits."""
        return len(self.counts)

    def unigram(self) -> np.ndarray:
        """float64 [vocab], each valid id counted once more than it was seen, so that none is impossible."""
        weight = np.where(np.arange(self.vocab_size) < self.num_ids, self.counts + 1.0, 0.0)
        return weight / weight.sum()

    def params(self, width: int = 64) -> TableParams:
        """Arrays of fixed shapes.

        A successor seen n times of N behind a token that had T different ones gets n / (N + T), and the unigram
        T / (N + T), as Witten and Bell have it; what is beyond `width` successors falls to the unigram too.

        Args:
          width: successors to keep per token.
        """
        rows, unigram = self.distances * self.vocab_size, self.unigram()
        width = max(min(width, int(np.bincount(self.contexts, minlength=1).max(initial=1))), 1)
        total = np.bincount(self.contexts, self.times, minlength=rows)
        different = np.bincount(self.contexts, minlength=rows)
        starts = np.concatenate([[0], np.cumsum(different)[:-1]])
        place = np.arange(len(self.contexts)) - starts[self.contexts]
        kept = place < width
        successors = np.zeros((rows, width), np.int32)
        probabilities = np.zeros((rows, width))
        at = (self.contexts[kept], place[kept])
        successors[at] = self.successors[kept]
        probabilities[at] = self.times[kept] / (total + different)[self.contexts[kept]]
        rest = 1 - probabilities.sum(axis=1)
        # The likeliest: one of those seen, or, where it is much too frequent to be beaten, the unigram's.
        value = probabilities + np.where(probabilities > 0, rest[:, None] * unigram[successors], 0)
        likeliest = np.argmax(value, axis=1)[:, None]
        seen = np.take_along_axis(value, likeliest, axis=1)[:, 0]
        by_unigram = rest * unigram.max() > seen
        best = np.where(by_unigram, np.argmax(unigram), np.take_along_axis(successors, likeliest, axis=1)[:, 0])
        shape = (self.distances, self.vocab_size)
        return TableParams(
            unigram=jnp.asarray(unigram, jnp.float32),
            successors=jnp.asarray(successors.reshape(*shape, width)),
            probabilities=jnp.asarray(probabilities.reshape(*shape, width), jnp.float32),
            rest=jnp.asarray(rest.reshape(shape), jnp.float32),
            best=jnp.asarray(best.reshape(shape), jnp.int32),
        )

    def after(self, token: int, distance: int = 1) -> list[tuple[int, int]]:
        """(successor, how often), the most frequent first."""
        if not (0 <= token < self.vocab_size and 1 <= distance <= self.distances):
            raise ValueError(
                f"token is {token} and distance {distance}; the table has tokens 0 to {self.vocab_size - 1} and "
                f"distances 1 to {self.distances}."
            )
        context = (distance - 1) * self.vocab_size + token
        first, last = np.searchsorted(self.contexts, [context, context + 1])
        return list(zip(self.successors[first:last].tolist(), self.times[first:last].tolist(), strict=True))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes an .npz file; whole or not at all."""
        path = pathlib.Path(path)
        temporary = path.with_name(f".{path.name}.partial")
        with temporary.open("wb") as file:
            np.savez_compressed(file, format=np.array(_FORMAT), **self._asdict())
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Table":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is missing, damaged, or no such table.
        """
        try:
            with pathlib.Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                if str(file["format"]) != _FORMAT:
                    raise ValueError(f"its format is {str(file['format'])!r}, not {_FORMAT!r}")
                arrays = {name: file[name] for name in cls._fields}
            scalars = {
                "num_ids": int(arrays["num_ids"]),
                "distances": int(arrays["distances"]),
                "source": str(arrays["source"]),
            }
            table = cls(**(arrays | scalars))
            _check(table)
        except Exception as error:  # numpy raises whatever a damaged archive provokes
            raise ValueError(
                f"cannot read the table {path} ({error}); make one with specdec drafter build --output={path}."
            ) from error
        return table


def _check(table: Table) -> None:
    pairs = (table.contexts, table.successors, table.times)
    if len({array.shape for array in pairs}) != 1 or any(array.ndim != 1 for array in (*pairs, table.counts)):
        raise ValueError("its arrays do not fit together")
    inside = table.contexts < table.distances * table.vocab_size
    if not (inside.all() and (table.contexts >= 0).all() and (np.diff(table.contexts) >= 0).all()):
        raise ValueError("its contexts are out of range or out of order")
    valid = (table.successors >= 0) & (table.successors < table.num_ids)
    if not (valid.all() and (table.times > 0).all() and (table.counts >= 0).all()):
        raise ValueError("it has ids out of range, or counts that cannot be")
    if not 1 <= table.num_ids <= table.vocab_size or table.distances < 1:
        raise ValueError("it has no ids or no distances")


def count(
    sequences: Iterable[Sequence[int]],
    *,
    vocab_size: int,
    num_ids: int | None = None,
    start_id: int = 0,
    distances: int = 1,
    least: int = 1,
    source: str = "",
) -> Table:
    """Counts tokens and pairs of tokens.

    Args:
      sequences: outputs, each with its end, without the start token.
      vocab_size: rows of the models.
      num_ids: valid ids; None for all rows.
      start_id: what the first token of every output follows on.
      distances: count pairs up to this distance.
      least: pairs that come less often are left out, which makes the table smaller.
      source: what it is, in words.

    Raises:
      ValueError: there is no token, an id is out of range, or `distances` or `least` is below 1.
    """
    num_ids = vocab_size if num_ids is None else num_ids
    if not 1 <= num_ids <= vocab_size:
        raise ValueError(f"num_ids is {num_ids} and vocab_size {vocab_size}; the model must have a row for every id.")
    if min(distances, least) < 1:
        raise ValueError(f"distances and least are {distances} and {least}; both must be 1 or more.")
    rows = [np.asarray([start_id, *sequence], np.int64) for sequence in sequences]
    tokens = np.concatenate([row[1:] for row in rows]) if rows else np.zeros((0,), np.int64)
    if not len(tokens):
        raise ValueError("there is no token to count; give text, or inputs that the target has something to say to.")
    if tokens.min() < 0 or tokens.max() >= num_ids:
        raise ValueError(
            f"ids are {tokens.min()} to {tokens.max()}, and the vocabulary has {num_ids}; use its own ids."
        )
    keys = [
        ((distance - 1) * vocab_size + row[:-distance]) * vocab_size + row[distance:]
        for row in rows
        for distance in range(1, min(distances, len(row) - 1) + 1)
    ]
    pairs, times = np.unique(np.concatenate(keys), return_counts=True)
    pairs, times = pairs[times >= least], times[times >= least]
    contexts, successors = np.divmod(pairs, vocab_size)
    order = np.lexsort((successors, -times, contexts))
    return Table(
        counts=np.bincount(tokens, minlength=vocab_size),
        num_ids=num_ids,
        contexts=contexts[order].astype(np.int32),
        successors=successors[order].astype(np.int32),
        times=times[order],
        distances=distances,
        source=source,
    )
