"""`specdec convert`: a checkpoint from T5X's format to Hugging Face's, or back."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence

import jax

from specdec_jax import packaged
from specdec_jax.checkpoints import huggingface, t5x
from specdec_jax.checkpoints.t5x_index import parse_path
from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Params

FORMATS = ("huggingface", "t5x")

_TITLES = {"huggingface": "Hugging Face", "t5x": "T5X"}


def convert(
    source: str, destination: str, *, to: str | None = None, dtype: str | None = None, step: int | None = None
) -> str:
    """Reads a checkpoint in one format and writes it in the other.

    What T5X's format does not say is taken to be what it is in every published T5: which activations, relu or a gelu
    times a linear map, 0 as the start token, and 128 as the distance from which on all positions share a bucket.

    Args:
      source: a T5X checkpoint, local or gs://bucket/path, a "demo:" name, or a directory of Hugging Face's.
      destination: the directory to write for "huggingface"; the one to write checkpoint_<step> into for "t5x".
      to: "huggingface" or "t5x"; None for the one that the source is not.
      dtype: "float32" or "bfloat16"; None keeps each parameter's own.
      step: the step of a T5X checkpoint that is written; None for 0.

    Returns:
      What was written where, one line.

    Raises:
      ValueError: an argument is out of range, the source cannot be read, or the destination cannot be written; the
        destination's existence is checked before anything is read.
    """
    if to not in (None, *FORMATS):
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(map(repr, FORMATS))}, or None.")
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float32', 'bfloat16' or None.")
    path = packaged.resolve(source)
    is_huggingface = huggingface.is_checkpoint(path)
    to = to or ("t5x" if is_huggingface else "huggingface")
    if to == "huggingface" and step is not None:
        raise ValueError(f"step is {step}; only a T5X checkpoint has a step.")
    if step is not None and step < 0:
        raise ValueError(f"step is {step}; it must be 0 or more.")
    step = step or 0
    final = parse_path(os.path.join(destination, f"checkpoint_{step}") if to == "t5x" else destination)
    if final.bucket is not None:
        raise ValueError(f"{final}: a bucket cannot be written to; write to a local directory and copy it.")
    if os.path.lexists(final.path):
        raise ValueError(f"{final}: already exists; remove it or choose another destination.")

    params = (huggingface if is_huggingface else t5x).load_params(path, dtype=dtype)
    if to == "t5x" and is_huggingface:
        _check_t5x_can_say(path, params)
    if to == "t5x":
        written = t5x.save_checkpoint(destination, params, step=step)
    else:
        config = huggingface.read_config(path) if is_huggingface else T5Config.from_params(params)
        written = huggingface.save_checkpoint(destination, params, config)
    leaves = jax.tree.leaves(params)
    dtypes = " and ".join(sorted({leaf.dtype.name for leaf in leaves}))
    size = sum(leaf.size for leaf in leaves)
    return f"wrote {size:,} parameters of {source} in {dtypes} as a {_TITLES[to]} checkpoint: {written}"


def _check_t5x_can_say(path: str, params: Params) -> None:
    """A T5X checkpoint has weights alone; sizes that these do not show are the usual ones when it is read."""
    config, again = huggingface.read_config(path), T5Config.from_params(params)
    for field in dataclasses.fields(T5Config):
        here, there = getattr(config, field.name), getattr(again, field.name)
        if field.name != "dtype" and here != there:
            raise ValueError(
                f"{path}: {field.name} is {here}, which a T5X checkpoint cannot say: it would be read as {there}."
            )


def run(make_parser: Callable[..., argparse.ArgumentParser], argv: Sequence[str]) -> int:
    """The command; the parser is the caller's, so that its mistakes read as those of other commands do."""
    parser = make_parser(
        prog="specdec convert", description="Converts a checkpoint between T5X's and Hugging Face's format."
    )
    parser.add_argument("source", help="a T5X checkpoint, a demo: name, or a directory with a config.json")
    parser.add_argument("destination", help="the directory to write, which for t5x will hold checkpoint_STEP")
    parser.add_argument("--to", choices=FORMATS, help="the format to write; the one that the source is not")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="what to store; what the source stores")
    parser.add_argument("--step", type=int, help="the step of a T5X checkpoint (0)")
    print(convert(**vars(parser.parse_args(argv))))
    return 0
