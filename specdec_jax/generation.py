"""Text in, text out: loads two models that share a vocabulary, encodes texts, decodes them, with guesses or without.

vocabulary = load_vocabulary("spiece.model")
encoded = encode(["A house."], vocabulary, settings)        # fails early, before any weight is read
pair = load_pair(models, vocabulary)
for batch in make_batches(encoded, vocabulary, settings):
    for output in read_outputs(decode(pair, batch, settings), batch, vocabulary):
        print(output.text)
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from specdec_jax import layouts, sharding, verification
from specdec_jax.checkpoints import huggingface, t5x
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters import named
from specdec_jax.drafters.base import BlockDrafter, Drafter
from specdec_jax.drafters.table import Table
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.packaged import resolve
from specdec_jax.results import DecodingResult, FinishReason
from specdec_jax.sampling import Sampling
from specdec_jax.settings import Models, Settings
from specdec_jax.sharding import Sharded
from specdec_jax.types import Inputs, Params
from specdec_jax.vocabularies import Vocabulary

_LOG = logging.getLogger(__name__)
_SHORTEST_INPUT = 32


class Pair(NamedTuple):
    """A target and what drafts for it, their weights, and the vocabulary they share; on a mesh models are Sharded."""

    target: T5 | Sharded
    target_params: Params
    drafter: Drafter | BlockDrafter
    draft_params: Params
    vocabulary: Vocabulary


def load_pair(
    models: Models,
    vocabulary: Vocabulary,
    mesh: tuple | None = None,
    *,
    warn: Callable[[str], None] = _LOG.warning,
) -> Pair:
    """Reads both models, or a model and a table; the draft first, so that a mistake shows before the target is read.

    Args:
      models: where they are.
      vocabulary: what they share.
      mesh: see `Settings`.
      warn: told where the draft cannot be split over the mesh, and is whole on every device; and where the vocabulary
        looks like another model's.

    Raises:
      ValueError: a checkpoint or table is missing, damaged or of other sizes than its config; they differ in their
        vocabulary; the vocabulary has more ids than they have rows; or the target cannot be split over the mesh.
    """
    device_mesh = None if mesh is None else sharding.make_mesh(*mesh)
    table = None if models.draft_table is None else Table.load(resolve(models.draft_table))
    draft: T5 | Sharded | None = None
    draft_params: Params = None
    if models.drafter in named.WITH_MODEL and models.draft_checkpoint is not None:
        draft, draft_params = read_model(models.draft_checkpoint, models.draft_config, models.dtype)
        check_rows(draft, vocabulary, models.draft_checkpoint, warn)
    target, target_params = read_model(models.target_checkpoint, models.target_config, models.dtype)
    check_rows(target, vocabulary, models.target_checkpoint, warn)
    for what, some in ((models.draft_checkpoint, draft), (models.draft_table, table)):
        if some is not None and some.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft {what} has a vocabulary of {some.vocab_size} rows and the target "
                f"{models.target_checkpoint} one of {target.vocab_size}; use two with the same vocabulary."
            )
    if device_mesh is not None:
        target = sharding.split_target(target, device_mesh)
        target_params = target.place(target_params)
        if draft is not None:
            draft = sharding.split_draft(draft, device_mesh, name=str(models.draft_checkpoint), warn=warn)
            draft_params = draft.place(draft_params)
    else:
        target_params = target.prepare(target_params)
        draft_params = None if draft is None else draft.prepare(draft_params)
    counts = None if table is None else table.params()
    return Pair(
        target, target_params, *named.make(models.drafter, target.vocab_size, draft, draft_params, counts), vocabulary
    )


def load_model(checkpoint: str, config: T5Config | None = None, dtype: str | None = None) -> tuple[T5, Params]:
    """Reads one model and puts its weights on the device; see `read_model`."""
    model, params = read_model(checkpoint, config, dtype)
    return model, model.prepare(params)


def default_dtype() -> str:
    """What models compute in where nothing else is asked for: XLA's bfloat16 is slow on CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def read_model(checkpoint: str, config: T5Config | None = None, dtype: str | None = None) -> tuple[T5, Params]:
    """Reads one model.

    Args:
      checkpoint: a T5X checkpoint, a directory with a Hugging Face checkpoint, or a "demo:" name.
      config: sizes that it must have; None reads them off the checkpoint.
      dtype: see `Models`.

    Returns:
      The model and its weights, numpy arrays.

    Raises:
      ValueError: the checkpoint is missing, damaged, not a T5's, or of other sizes.
    """
    path = resolve(checkpoint)
    dtype = dtype or default_dtype()
    if huggingface.is_checkpoint(path):
        config = huggingface.read_config(path, expected=config)
        return T5(dataclasses.replace(config, dtype=dtype)), huggingface.load_params(path, dtype=jnp.dtype(dtype))
    params = t5x.load_params(path, dtype=jnp.dtype(dtype), expected=_shapes_of(config))
    return T5(dataclasses.replace(config or _config_of(path, params), dtype=dtype)), params


def read_config(checkpoint: str, config: T5Config | None = None) -> T5Config:
    """The sizes of a model whose weights nobody needs; for arguments and errors see `read_model`."""
    path = resolve(checkpoint)
    if huggingface.is_checkpoint(path):
        return huggingface.read_config(path, expected=config)
    shapes = t5x.read_shapes(path, expected=_shapes_of(config))
    return config or _config_of(path, shapes)


def _shapes_of(config: T5Config | None) -> Params | None:
    return None if config is None else T5(config).param_shapes()


def _config_of(path: str, params: Params) -> T5Config:
    try:
        return T5Config.from_params(params)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


_MOST_UNUSED_ROWS = 512  # of published models: 28 of T5's, 125 of ByT5's with its sentinels, at most 12 of mT5's


def check_rows(model: T5 | T5Config, vocabulary: Vocabulary, checkpoint: str, warn: Callable[[str], None]) -> None:
    """Refuses a vocabulary that a model has no rows for, and warns of one that looks like another model's."""
    if vocabulary.size > model.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.size} ids and the model {checkpoint} only {model.vocab_size} rows; "
            "use the vocabulary that the model was trained with."
        )
    if model.vocab_size - vocabulary.size > _MOST_UNUSED_ROWS:
        warn(
            f"the vocabulary has {vocabulary.size} ids and the model {checkpoint} {model.vocab_size} rows; if it was "
            "trained with another vocabulary, its outputs mean nothing."
        )


def encode(texts: Sequence[str], vocabulary: Vocabulary, settings: Settings) -> list[list[int]]:
    """Token ids of each text, with the task's prefix before it and the end-of-sequence id after it.

    Raises:
      ValueError: there is no text, one is empty, too long or not text, or forbidden ids are not the vocabulary's.
    """
    if not texts:
        raise ValueError("there is no input; give at least one text.")
    settings.sampling(1, vocabulary.size)  # raises what it has to say about ids that the vocabulary lacks
    encoded = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise ValueError(f"input {number} is empty; every input must hold text, so leave out empty lines.")
        if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that could not be decoded
            raise ValueError(f"input {number} is not UTF-8; every input must be text in UTF-8.")
        ids = [*vocabulary.encode(settings.task_prefix + text), vocabulary.eos_id]
        if len(ids) > settings.max_input_length:
            raise ValueError(
                f"max_input_length is {settings.max_input_length}; input {number} has {len(ids)} tokens, its task "
                "prefix and end included: shorten it or raise the limit."
            )
        encoded.append(ids)
    return encoded


class Batch(NamedTuple):
    """Inputs that are decoded together.

    Attributes:
      inputs: encoder tokens int32 [batch, length].
      seeds: int32 [batch].
      sampling: the settings of the target's draws.
      draft_sampling: of the draft's.
      num_rows: how many rows are inputs; those behind them are copies of the last one, so that a shorter last batch
        has the shape of the others. Copies do what their original does, so they cost no further steps.
    """

    inputs: Inputs
    seeds: Int32[Array, " batch"]
    sampling: Sampling
    draft_sampling: Sampling
    num_rows: int


def make_batches(
    encoded: Sequence[Sequence[int]], vocabulary: Vocabulary, settings: Settings, *, length: int | None = None
) -> list[Batch]:
    """Groups encoded inputs, in order.

    Each batch is padded to the next of a few lengths, 32, 64, 128 and so on up to max_input_length: every length
    compiles a program of its own, so one per input would compile for ever.

    Args:
      encoded: what `encode` returned.
      vocabulary: gives the number of ids that may be drawn; rows of the embedding beyond them are padding.
      settings: the settings.
      length: one length for all batches instead.
    """
    mesh = None if settings.mesh is None else sharding.make_mesh(*settings.mesh)
    batches = []
    for start in range(0, len(encoded), settings.batch_size):
        rows = range(start, min(start + settings.batch_size, len(encoded)))
        places = [*rows, *[rows[-1]] * (settings.batch_size - len(rows))]
        width = length or padded_length(max(len(encoded[i]) for i in rows), settings.max_input_length)
        tokens = np.zeros((len(places), width), np.int32)
        for row, i in enumerate(places):
            tokens[row, : len(encoded[i])] = encoded[i]
        seeds = jnp.asarray([row_seed(settings.seed, i) for i in places], jnp.int32)
        sampling = settings.sampling(len(places), vocabulary.size)
        draft_sampling = settings.sampling(len(places), vocabulary.size, of_draft=True)
        batch = Batch(Inputs(jnp.asarray(tokens)), seeds, sampling, draft_sampling, len(rows))
        batches.append(batch if mesh is None else _placed(batch, mesh))
    return batches


def _placed(batch: Batch, mesh: Mesh) -> Batch:
    arrays = batch._asdict()
    del arrays["num_rows"]
    return batch._replace(**sharding.put(arrays, sharding.row_axes(arrays), mesh))


def padded_length(length: int, max_input_length: int) -> int:
    """The least of 32, 64, 128, ... and max_input_length that an input of this length fits into."""
    padded = _SHORTEST_INPUT
    while padded < length:
        padded *= 2
    return min(padded, max_input_length)


def row_seed(seed: int, index: int) -> int:
    """A seed for one input of a run, 0 to 2**31 - 1: equal inputs differ, and the batch size does not matter."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0] >> 1)


def lay_out(pair: Pair, batch: Batch, settings: Settings) -> Pair:
    """The pair with its weights as a TPU wants them for decoding batches of this shape; elsewhere as it is."""
    if jax.default_backend() != "tpu":
        return pair

    def run(weights: tuple[Params, Params], arrays: dict[str, Any]) -> DecodingResult:
        own = pair._replace(target_params=weights[0], draft_params=weights[1])
        return decode(own, batch._replace(**arrays), settings)

    arrays = batch._asdict()
    del arrays["num_rows"]
    target_params, draft_params = layouts.settle(run, (pair.target_params, pair.draft_params), arrays)
    return pair._replace(target_params=target_params, draft_params=draft_params)


def decode(pair: Pair, batch: Batch, settings: Settings) -> DecodingResult:
    """Speculative decoding of a batch."""
    return speculative_decode(
        pair.target,
        pair.target_params,
        pair.drafter,
        pair.draft_params,
        batch.inputs,
        gamma=settings.gamma,
        max_length=settings.max_decode_length,
        sampling=batch.sampling,
        draft_sampling=batch.draft_sampling,
        seeds=batch.seeds,
        eos_ids=(pair.vocabulary.eos_id,),
        rule=settings.verification_rule(),
        lenience=settings.lenience,
        adaptation=settings.adaptive(),
    )


def decode_plainly(pair: Pair, batch: Batch, settings: Settings) -> DecodingResult:
    """Decoding of a batch with the target alone; with the coupled rule's draws if that is the rule."""
    return autoregressive_decode(
        pair.target,
        pair.target_params,
        batch.inputs,
        max_length=settings.max_decode_length,
        sampling=batch.sampling,
        seeds=batch.seeds,
        eos_ids=(pair.vocabulary.eos_id,),
        rule=verification.coupled if settings.rule == "coupled" else verification.token,
    )


class Output(NamedTuple):
    """What became of one input.

    Attributes:
      text: the output.
      tokens: its ids, the end-of-sequence id included.
      length: how many they are.
      scores: the target's raw log-probability of each.
      finish_reason: "eos", "length" or "nan".
      num_target_calls: target calls.
      accept_counts: entry n is how many calls had n accepted guesses.
      alpha: mean probability of acceptance of the guesses that were tested; 0 where none was.
      alpha_error: its standard error.
      exact: whether the lenience was 1, so that the output has the target's own law.
    """

    text: str
    tokens: list[int]
    length: int
    scores: list[float]
    finish_reason: str
    num_target_calls: int
    accept_counts: list[int]
    alpha: float
    alpha_error: float
    exact: bool


def read_outputs(result: DecodingResult, batch: Batch, vocabulary: Vocabulary) -> list[Output]:
    """The rows of a result, without the copies, as text and plain numbers."""
    result = sharding.fetch(result)
    outputs = []
    for row in range(batch.num_rows):
        length = int(result.lengths[row])
        tokens = result.tokens[row, :length].tolist()
        outputs.append(
            Output(
                text=vocabulary.decode(tokens),
                tokens=tokens,
                length=length,
                scores=result.scores[row, :length].tolist(),
                finish_reason=FinishReason(int(result.finish_reason[row])).name.lower(),
                num_target_calls=int(result.num_target_calls[row]),
                accept_counts=result.accept_counts[row].tolist(),
                alpha=float(result.alpha[row]),
                alpha_error=float(result.alpha_error[row]),
                exact=bool(result.exact[row]),
            )
        )
    return outputs
