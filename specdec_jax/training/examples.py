"""Tokenized examples, ragged, and their cache on disk."""

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64
from rich.console import Console

from specdec_jax.training.text import Pair, TaskName
from specdec_jax.vocabularies import EOS_ID, Vocabulary


class Ragged(NamedTuple):
    """Sequences of different lengths end to end; sequence i is `ids[starts[i]:starts[i + 1]]`."""

    ids: Int32[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " rows_plus_one"]

    @property
    def lengths(self) -> Int64[np.ndarray, " rows"]:
        """Length of each sequence."""
        return np.diff(self.starts)

    def padded(self, rows: Int64[np.ndarray, " rows"], length: int) -> Int32[np.ndarray, "rows length"]:
        """The given sequences, padded with 0 on the right; none may be longer than `length`."""
        lengths = self.lengths[rows]
        place = np.arange(length)
        inside = place < lengths[:, None]
        assert lengths.max(initial=0) <= length
        return np.where(inside, self.ids[np.where(inside, self.starts[rows][:, None] + place, 0)], 0).astype(np.int32)


class Examples(NamedTuple):
    """Tokenized examples of one task; every source and target ends with the end-of-sequence id."""

    sources: Ragged
    targets: Ragged

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.sources.starts) - 1


def ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    """Packs sequences end to end."""
    starts = np.cumsum([0] + [len(sequence) for sequence in sequences], dtype=np.int64)
    return Ragged(np.fromiter((i for s in sequences for i in s), np.int32, starts[-1]), starts)


def concatenate(parts: Sequence[Examples]) -> Examples:
    """All examples of several tasks, in order."""

    def join(pieces: Sequence[Ragged]) -> Ragged:
        lengths = np.concatenate([piece.lengths for piece in pieces])
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Ragged(np.concatenate([piece.ids for piece in pieces]), starts)

    return Examples(join([part.sources for part in parts]), join([part.targets for part in parts]))


def tokenize(pairs: Sequence[Pair], vocabulary: Vocabulary, *, max_source: int, max_target: int) -> Examples:
    """Encodes one task's examples.

    Args:
      pairs: text examples.
      vocabulary: of both sides.
      max_source: longest source in tokens, end included; a longer one loses its tail and still ends with EOS.
      max_target: longest target in tokens, end included; an example with a longer one is dropped, because a
        cut target would teach the model to stop in mid-sentence.

    Returns:
      The examples, in order.
    """
    sources = vocabulary.encode_batch([pair.source for pair in pairs])
    targets = vocabulary.encode_batch([pair.target for pair in pairs])
    kept = [i for i, target in enumerate(targets) if 0 < len(target) < max_target]
    return Examples(
        ragged([[*sources[i][: max_source - 1], EOS_ID] for i in kept]),
        ragged([targets[i] + [EOS_ID] for i in kept]),
    )


def tokenize_cached(
    tasks: Mapping[TaskName, Sequence[Pair]],
    vocabulary: Vocabulary,
    cache_dir: str | os.PathLike[str],
    *,
    max_source: int,
    max_target: int,
) -> dict[TaskName, Examples]:
    """Tokenizes every task, or reads what an earlier call with equal text, vocabulary and limits wrote.

    Args:
      tasks: task name to text examples.
      vocabulary: of both sides.
      cache_dir: existing directory of the `.npz` files.
      max_source: see `tokenize`.
      max_target: see `tokenize`.

    Returns:
      Task name to examples.

    Raises:
      ValueError: every example of a task has too long a target.
    """
    tokenized = {}
    for name, pairs in tasks.items():
        digest = hashlib.sha256(repr((_fingerprint(vocabulary), max_source, max_target)).encode())
        for pair in pairs:
            digest.update(f"{pair.source}\t{pair.target}\n".encode())
        path = pathlib.Path(cache_dir) / f"tokens_{name}_{digest.hexdigest()[:16]}.npz"
        if path.exists():
            with np.load(path) as stored:
                arrays = [stored[key] for key in ("source_ids", "source_starts", "target_ids", "target_starts")]
            examples = Examples(Ragged(arrays[0], arrays[1]), Ragged(arrays[2], arrays[3]))
        else:
            Console(stderr=True).print(f"tokenizing {len(pairs)} examples of {name}")
            examples = tokenize(pairs, vocabulary, max_source=max_source, max_target=max_target)
            unfinished = path.with_suffix(".tmp.npz")
            np.savez(
                unfinished,
                source_ids=examples.sources.ids,
                source_starts=examples.sources.starts,
                target_ids=examples.targets.ids,
                target_starts=examples.targets.starts,
            )
            unfinished.replace(path)
        if examples.size == 0:
            raise ValueError(f"task {name!r} has no target of at most max_target={max_target} tokens: raise max_target")
        tokenized[name] = examples
    return tokenized


def _fingerprint(vocabulary: Vocabulary) -> tuple[int, str]:
    path = getattr(vocabulary, "path", None)
    model = b"" if path is None else pathlib.Path(path).read_bytes()
    return vocabulary.size, hashlib.sha256(model).hexdigest()
