"""An endless, mixed, bucketed stream of batches that is a pure function of (seed, step).

Each task is an endless stream of its own examples, freshly permuted every epoch. A block takes the next
examples of every task in the ratio of the mixture, sorts them into a few (source, target) shapes and shuffles
the batches:

    task streams     ende   e7 e2 e9 e4 | e1 ...      restore  r5 r3 | r8 ...        (| is the block's end)
    block 0          e7 e2 e9 e4 r5 r3
    buckets          (16, 16): e7 r5 | e2      (32, 32): e9 e4 r3
    batches          [e9 e4 r3]  [e7 r5]  [e2]

Nothing but the block's index and the seed decides what is in it, so training resumes at any step in the same
stream.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from specdec_jax.training.examples import Examples, concatenate
from specdec_jax.training.text import TaskName


class Bucket(NamedTuple):
    """One static batch shape: `rows` examples of at most `source` and `target` tokens, ends included."""

    source: int
    target: int
    rows: int


class Batch(NamedTuple):
    """Token ids, padded with 0; a row of an incomplete batch may be all padding."""

    sources: Int32[np.ndarray, "rows source"]
    targets: Int32[np.ndarray, "rows target"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """What the stream is made of.

    Attributes:
      rates: (task, rate) pairs; rates are of examples, relative to their sum.
      max_source: longest source in tokens.
      max_target: longest target in tokens.
      batch_tokens: source and target tokens a batch has room for, padding included.
      block_examples: examples that are sorted into buckets together.
      seed: of all permutations.
    """

    rates: tuple[tuple[TaskName, float], ...]
    max_source: int = 128
    max_target: int = 64
    batch_tokens: int = 4096
    block_examples: int = 32_768
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or min(rate for _, rate in self.rates) < 0 or sum(rate for _, rate in self.rates) <= 0:
            raise ValueError(f"Mixture.rates is {self.rates}: give rates of 0 or more, at least one above 0")
        if self.max_source < 16 or self.max_target < 8:
            sizes = f"max_source={self.max_source}, max_target={self.max_target}"
            raise ValueError(f"Mixture has {sizes}: give at least 16 and 8")
        if self.batch_tokens < self.max_source + self.max_target:
            needed = self.max_source + self.max_target
            raise ValueError(f"Mixture.batch_tokens is {self.batch_tokens}: one example needs {needed}")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The static shapes, smallest first: like lengths, and long sources to short targets."""
        eighths = [(1, 2), (1.5, 3), (2, 4), (4, 2), (3, 6), (4, 8), (8, 3), (8, 8)]
        shapes = [(int(self.max_source * s / 8), int(self.max_target * t / 8)) for s, t in eighths]
        return tuple(Bucket(s, t, max(1, self.batch_tokens // (s + t))) for s, t in sorted(shapes, key=sum))


class Selection(NamedTuple):
    """The examples of one batch, by place in all tasks' examples end to end, and its shape."""

    bucket: Bucket
    rows: Int64[np.ndarray, " rows"]


def batches(tasks: Mapping[TaskName, Examples], mixture: Mixture, *, start_step: int = 0) -> Iterator[Batch]:
    """The endless stream of training batches from `start_step` on.

    Args:
      tasks: examples of every task that the mixture names.
      mixture: rates, shapes and seed.
      start_step: number of batches to skip; skipping assembles no batch.

    Yields:
      Batches of at most 8 distinct shapes.

    Raises:
      ValueError: the mixture names a task that is not there.
    """
    chosen = [(name, rate) for name, rate in mixture.rates if rate > 0]
    for name, _ in chosen:
        if name not in tasks:
            raise ValueError(f"the mixture names task {name!r}, but only {sorted(tasks)} have examples: give its file")
    examples = [tasks[name] for name, _ in chosen]
    everything = concatenate(examples)
    sizes = [part.size for part in examples]
    rates = [rate for _, rate in chosen]
    to_skip = start_step
    for block in itertools.count():
        rows = _block_rows(block, sizes, rates, mixture)
        selections = into_buckets(everything, rows, mixture.buckets)
        order = np.random.default_rng((mixture.seed, 1, block)).permutation(len(selections))
        for index in order[to_skip:]:
            yield gather(everything, selections[index])
        to_skip = max(0, to_skip - len(order))


def into_buckets(examples: Examples, rows: Int64[np.ndarray, " rows"], buckets: tuple[Bucket, ...]) -> list[Selection]:
    """Sorts examples into batches, each into the smallest shape it fits.

    What is left of a bucket after its full batches joins a larger one, so that at most the last batch of all
    is not full.

    Args:
      examples: tokenized examples.
      rows: which of them, in the order in which they fill batches.
      buckets: shapes, smallest first; the last one must fit every example.

    Returns:
      Selections that hold every row exactly once.
    """
    source_lengths, target_lengths = examples.sources.lengths[rows], examples.targets.lengths[rows]
    fits = np.stack([(source_lengths <= b.source) & (target_lengths <= b.target) for b in buckets])
    assert fits[-1].all(), "an example is longer than the largest bucket"
    home = fits.argmax(axis=0)
    waiting = [rows[home == index] for index in range(len(buckets))]
    selections = []
    for index, bucket in enumerate(buckets):
        here = waiting[index]
        full = len(here) // bucket.rows * bucket.rows
        selections += [Selection(bucket, part) for part in here[:full].reshape(-1, bucket.rows)]
        if full == len(here):
            continue
        larger = (
            later
            for later in range(index + 1, len(buckets))
            if buckets[later].source >= bucket.source and buckets[later].target >= bucket.target
        )
        heir = next(larger, None)
        if heir is None:
            selections.append(Selection(bucket, here[full:]))
        else:
            waiting[heir] = np.concatenate([waiting[heir], here[full:]])
    return selections


def gather(examples: Examples, selection: Selection) -> Batch:
    """Pads a selection's examples to its bucket's shape; missing rows are all padding."""
    bucket, rows = selection
    missing = ((0, bucket.rows - len(rows)), (0, 0))
    return Batch(
        np.pad(examples.sources.padded(rows, bucket.source), missing),
        np.pad(examples.targets.padded(rows, bucket.target), missing),
    )


def _block_rows(block: int, sizes: list[int], rates: list[float], mixture: Mixture) -> Int64[np.ndarray, " rows"]:
    """The examples of one block, in random order."""
    parts = []
    first_row = 0
    for task, (size, rate) in enumerate(zip(sizes, rates, strict=True)):
        count = max(1, round(mixture.block_examples * rate / sum(rates)))
        place = np.arange(block * count, (block + 1) * count)
        epochs = range(int(place[0]) // size, int(place[-1]) // size + 1)
        streams = [np.random.default_rng((mixture.seed, 2, task, epoch)).permutation(size) for epoch in epochs]
        parts.append(first_row + np.concatenate(streams)[place - epochs[0] * size])
        first_row += size
    return np.random.default_rng((mixture.seed, 3, block)).permutation(np.concatenate(parts))
