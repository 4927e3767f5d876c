"""Other implementations of T5 beside this one: same weights, inputs and machine, one process, greedy decoding.

transformers, in PyTorch, with and without its assisted generation; CTranslate2, in C++; t5x's temperature_sample. Each
runs as its users run it, in float32 on all cores; the first two get inputs without padding. What is timed starts with
encoder tokens and ends with output tokens: nobody tokenizes in it. All three are optional, and what is not installed is
listed as such.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from specdec_jax import comparison, generation
from specdec_jax.checkpoints import huggingface
from specdec_jax.generation import Pair
from specdec_jax.harness.peer_decoders import LOADERS, MODES, PLAIN, SPECULATIVE, Mode, Prompt, Weights
from specdec_jax.harness.records import environment
from specdec_jax.harness.tables import Table
from specdec_jax.harness.walltime import geometric_mean
from specdec_jax.models.t5 import T5
from specdec_jax.packaged import resolve
from specdec_jax.settings import Models, Settings
from specdec_jax.timing import Timed, interleaved
from specdec_jax.types import Params
from specdec_jax.vocabularies import EOS_ID, PAD_ID, load_vocabulary

_FREE = ("gamma", "rule", "seed", "max_decode_length", "max_input_length", "batch_size", "task_prefix")


def measure(
    models: Models,
    settings: Settings,
    texts: Sequence[str],
    *,
    rounds: int,
    report: Callable[[str], None] | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Decodes every text with every peer, in turn.

    Args:
      models: the pair; weights are used in float32.
      settings: gamma and the limits. With batch_size above 1 a prompt is a batch, and assisted generation is left out.
      texts: what to decode.
      rounds: how often each prompt is decoded by each peer, after one time that is not counted.
      report: told what is being done.
      only: names of MODES to measure beside this package; None for all.

    Returns:
      A JSON-ready document. An entry of "peers" has `seconds`, a list per prompt with an entry per round; what is in
      the same place in two peers' lists was measured side by side. `tokens` is what was emitted, per prompt.
      `tokens_per_second`, `low` and `high` are the median and the quartiles over prompts. `ratio` is the speed of this
      package with guesses over the peer's, the geometric mean over prompts, from `ratio_low` to `ratio_high` with 95%
      confidence. `equal` counts the inputs whose output is that of this package's plain decoding; `differences` says
      where the others differ, and how far apart the target's two best logits are there. `fastest` is whether it is the
      fastest of its peer's. What was not measured has a `reason` instead of all this.

    Raises:
      ValueError: a setting is not one that all peers know, or something that is to be measured is unknown.
    """
    tell = report or (lambda message: None)
    names = _check(models, settings, rounds, only)
    models = dataclasses.replace(models, dtype="float32")
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    encoded = generation.encode(texts, vocabulary, settings)
    pair = generation.load_pair(models, vocabulary)
    batches, rest = generation.make_batches(encoded, vocabulary, settings), iter(encoded)
    prompts = [Prompt(batch, list(itertools.islice(rest, batch.num_rows))) for batch in batches]
    machine = environment()

    reasons = {name: _reason(name, settings) for name in names}
    found = [name for name in names if reasons[name] is None]
    with tempfile.TemporaryDirectory() as directory:
        weights = Weights(pair, _write(models, directory), directory, machine["cores"])
        modes: dict[str, Mode] = {}
        for peer, load in LOADERS.items():
            if any(name.startswith(f"{peer} ") for name in found):
                tell(f"loading {peer}")
                modes |= load(weights, settings)
        runs = []
        for number, prompt in enumerate(prompts):
            tell(f"decoding prompt {number + 1} of {len(prompts)}")
            runs.append(_time({name: modes[name] for name in found}, prompt, number, rounds))

    outputs, seconds, tokens = {}, {}, {}
    for name in found:
        read, most = modes[name].read, settings.max_decode_length
        outputs[name] = [_tokens(read(run[name].value), len(p.ids), most) for run, p in zip(runs, prompts, strict=True)]
        seconds[name] = [list(run[name].all_seconds) for run in runs]
        tokens[name] = [int((each != PAD_ID).sum()) for each in outputs[name]]
    entries = []
    for name in names:
        entry: dict[str, Any] = dict(zip(("peer", "mode"), name.split(maxsplit=1), strict=True))
        if name in found:
            differences = _differences(pair, prompts, outputs[PLAIN], outputs[name])
            entry |= summarize(seconds[name], tokens[name], seconds[SPECULATIVE], tokens[SPECULATIVE])
            entry |= {"equal": len(encoded) - len(differences), "num_prompts": len(encoded)}
            entry |= {"differences": differences, "tokens": tokens[name], "seconds": seconds[name]}
        else:
            entry["reason"] = reasons[name]
        entries.append(entry)
    measured = [entry for entry in entries if "reason" not in entry]
    for entry in measured:
        entry["fastest"] = entry["ratio"] == min(each["ratio"] for each in measured if each["peer"] == entry["peer"])
    told = {name: getattr(models, name) for name in ("target_checkpoint", "draft_checkpoint", "vocabulary", "dtype")}
    told |= {name: getattr(settings, name) for name in _FREE} | {"rounds": rounds}
    versions = machine["versions"] | _versions(found)
    return {"name": "peers", **machine, "versions": versions, "settings": told, "peers": entries}


_ONE_BY_ONE = "transformers' assisted generation takes one input at a time"


def _check(models: Models, settings: Settings, rounds: int, only: Sequence[str] | None) -> list[str]:
    """Checks everything that can be checked before anything is read; returns what is to be measured."""
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if field.name not in _FREE and value != field.default:
            raise ValueError(
                f"{field.name} is {value}; peers are compared by greedy decoding without filters, on one device: leave "
                f"it at {field.default}."
            )
    if models.dtype not in (None, "float32"):
        raise ValueError(f"dtype is {models.dtype!r}; peers are compared in float32: leave it at None.")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be 1 or more.")
    if jax.default_backend() != "cpu":
        raise ValueError(f"the device is {jax.default_backend()}; peers are compared on CPUs: set JAX_PLATFORMS=cpu.")
    for name in only or ():
        if name not in MODES:
            raise ValueError(f"only has {name!r}; it must hold names of {', '.join(map(repr, MODES))}.")
        if settings.batch_size > 1 and "assisted" in name:
            raise ValueError(f"batch_size is {settings.batch_size}; {_ONE_BY_ONE}: set it to 1, or leave {name!r} out.")
    return [name for name in MODES if only is None or name in (SPECULATIVE, PLAIN, *only)]


def _reason(name: str, settings: Settings) -> str | None:
    """Why something cannot be measured; None if it can."""
    missing = [package for package in MODES[name] if not _is_installed(package)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return _ONE_BY_ONE if settings.batch_size > 1 and "assisted" in name else None


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, such as scripts/t5x, has no origin


def _versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of what was measured; t5x is no installed distribution, and says its own."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(package), "__version__", "unknown"))

    return {package: version(package) for package in sorted({package for name in names for package in MODES[name]})}


def _write(models: Models, directory: str) -> tuple[T5, Params]:
    """Writes both models in Hugging Face's format; returns the target."""

    def write(name: str, checkpoint: str) -> tuple[T5, Params]:
        model, params = generation.read_model(checkpoint, dtype="float32")
        huggingface.save_checkpoint(os.path.join(directory, name), params, model.config, eos_id=EOS_ID, progress=False)
        return model, params

    assert models.draft_checkpoint is not None
    write("draft", models.draft_checkpoint)
    return write("target", models.target_checkpoint)


def _time(modes: Mapping[str, Mode], prompt: Prompt, number: int, rounds: int) -> dict[str, Timed]:
    """Times all on one prompt. The first one moves on, and neighbours change sides, from prompt to prompt."""
    names = list(modes)
    turn = number % len(names)
    names = (names[turn:] + names[:turn])[:: -1 if number % 2 else 1]
    return dict(zip(names, interleaved([modes[n].start(prompt) for n in names], repeats=rounds), strict=True))


def _tokens(rows: Sequence[Sequence[int]], num_rows: int, max_length: int) -> Int32[np.ndarray, "rows length"]:
    """The first rows up to their ends, padded; behind them are copies that fill a batch."""
    tokens = np.full((num_rows, max_length), PAD_ID, np.int32)
    for place, ids in zip(tokens, rows[:num_rows], strict=True):
        end = ids.index(EOS_ID) + 1 if EOS_ID in ids else len(ids)
        place[:end] = ids[:end]
    return tokens


def _differences(
    pair: Pair, prompts: Sequence[Prompt], plain: Sequence[np.ndarray], other: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Where outputs first differ; inputs and tokens count from 1."""
    told, first = [], 1
    for prompt, expected, found in zip(prompts, plain, other, strict=True):
        for each in comparison.find_differences(pair, prompt.batch, expected, found):
            near = comparison.near_tie(each, "float32")
            place = {"input": first + each.row, "token": each.position + 1}
            told.append(place | {"margin": each.margin, "near_tie": near})
        first += len(prompt.ids)
    return told


def summarize(
    seconds: Sequence[Sequence[float]],
    tokens: Sequence[int],
    our_seconds: Sequence[Sequence[float]],
    our_tokens: Sequence[int],
) -> dict[str, float | None]:
    """Speed over prompts, and this package's in it.

    Args:
      seconds: the peer's, per prompt and round.
      tokens: what the peer emitted, per prompt.
      our_seconds: this package's, measured side by side with the peer's.
      our_tokens: what this package emitted.
    """
    times, ours = np.asarray(seconds), np.asarray(our_seconds)
    speeds = np.asarray(tokens) / np.median(times, axis=1)
    # Pairs of times within a round, so that a slow minute of the machine does not count.
    ratios = np.median(times / ours, axis=1) * np.asarray(our_tokens) / np.asarray(tokens)
    ratio = geometric_mean(ratios.tolist())
    figures = {"tokens_per_second": np.median(speeds)}
    figures |= {"low": np.quantile(speeds, 0.25), "high": np.quantile(speeds, 0.75)}
    figures |= {"ratio": ratio.mean, "ratio_low": ratio.low, "ratio_high": ratio.high}
    return {name: None if figure is None else float(figure) for name, figure in figures.items()}


def table(document: Mapping[str, Any]) -> Table:
    """A line for each mode."""
    settings, rows, notes = document["settings"], [], []
    figures = ("tokens_per_second", "low", "high", "ratio", "ratio_low", "ratio_high", "equal", "num_prompts")
    for entry in document["peers"]:
        name = f"{entry['peer']} {entry['mode']}"
        fastest = "yes" if entry.get("fastest") else None
        rows.append([entry["peer"], entry["mode"], fastest, *(entry.get(figure) for figure in figures)])
        if "reason" in entry:
            notes.append(f"{name} was not measured: {entry['reason']}.")
        for each in entry.get("differences", ()):
            notes.append(
                f"{name}: input {each['input']} differs from token {each['token']} on, where the target's two best "
                f"logits are {each['margin']:.2g} apart: {'a' if each['near_tie'] else 'NOT a'} near tie."
            )
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    columns = ["peer", "mode", "fastest", "tokens/s", "low", "high", "ours / peer"]
    columns += ["ratio low", "ratio high", "equal", "prompts"]
    return Table(
        name="peers",
        title=f"Peers: greedy decoding at batch {settings['batch_size']}, gamma {settings['gamma']}, "
        f"{settings['dtype']} on {document['cores']} cores",
        columns=columns,
        rows=rows,
        notes=[
            "tokens/s: median over prompts; low and high: quartiles; compilation left out. fastest: of a peer's modes.",
            "ours / peer: the speed of speculative decoding over the peer's, side by side on a prompt, median of "
            f"{settings['rounds']} rounds; geometric mean over prompts; ratio low and high: its 95 % interval.",
            "equal: inputs whose output is that of this package's plain decoding.",
            *notes,
            f"measured on {document['processor']}: {versions}.",
        ],
    )
