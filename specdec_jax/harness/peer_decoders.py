"""How each peer is loaded and called: this package, transformers, CTranslate2, t5x.

Peers are imported only where they are loaded. What a peer needs to have made of an input, tensors or tokens as strings,
is made before the time starts.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import generation
from specdec_jax.generation import Batch, Pair
from specdec_jax.models.t5 import T5
from specdec_jax.settings import Settings
from specdec_jax.types import Params
from specdec_jax.vocabularies import EOS_ID, PAD_ID, UNK_ID

OURS = "specdec_jax"
SPECULATIVE, PLAIN = f"{OURS} speculative", f"{OURS} plain"

MODES = {
    SPECULATIVE: (),
    PLAIN: (),
    "transformers greedy": ("torch", "transformers"),
    "transformers static cache": ("torch", "transformers"),
    "transformers assisted": ("torch", "transformers"),
    "transformers assisted by gamma": ("torch", "transformers"),
    "ctranslate2 greedy": ("ctranslate2", "torch", "transformers"),  # its converter reads the model with transformers
    "t5x temperature_sample": ("t5x", "seqio"),
}
"""Everything that is measured, the peer's name first, and the packages it needs. Of each peer the fastest one counts.

"transformers assisted" guesses as many tokens as transformers does by default, the other one gamma."""


class Prompt(NamedTuple):
    """Inputs that are decoded together, for whoever wants them padded and for whoever does not."""

    batch: Batch
    ids: list[list[int]]


class Mode(NamedTuple):
    """A way to decode.

    Attributes:
      start: makes the function that is timed, which decodes one prompt.
      read: the ids of each row in what that function returned; what is behind a row's end does not matter.
    """

    start: Callable[[Prompt], Callable[[], Any]]
    read: Callable[[Any], list[list[int]]]


class Weights(NamedTuple):
    """What peers are made from.

    Attributes:
      pair: both models as this package decodes from them.
      target: the target as its checkpoint has it.
      directory: holds target and draft in Hugging Face's format.
      cores: how many threads a peer may use.
    """

    pair: Pair
    target: tuple[T5, Params]
    directory: str
    cores: int


def _load_ours(weights: Weights, settings: Settings) -> dict[str, Mode]:
    decoders = {SPECULATIVE: generation.decode, PLAIN: generation.decode_plainly}

    def mode(decode: Callable[..., Any]) -> Mode:
        return Mode(
            lambda prompt: functools.partial(decode, weights.pair, prompt.batch, settings),
            lambda result: np.asarray(result.tokens).tolist(),
        )

    return {name: mode(decode) for name, decode in decoders.items()}


def _import_transformers() -> Any:
    """Imports it and silences it: assisted generation warns of what it does itself."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _load_transformers(weights: Weights, settings: Settings) -> dict[str, Mode]:
    torch, transformers = importlib.import_module("torch"), _import_transformers()
    torch.set_num_threads(weights.cores)

    def load(name: str) -> Any:
        model = transformers.T5ForConditionalGeneration.from_pretrained(os.path.join(weights.directory, name))
        # transformers makes the decoder's cache for num_layers layers, which are the encoder's; those are built by now.
        model.config.num_layers = model.config.num_decoder_layers
        return model.eval()

    target, draft, gamma_draft = load("target"), load("draft"), load("draft")
    gamma_draft.generation_config.num_assistant_tokens = settings.gamma
    gamma_draft.generation_config.num_assistant_tokens_schedule = "constant"
    gamma_draft.generation_config.assistant_confidence_threshold = 0.0  # or it may stop short of gamma

    def start(prompt: Prompt, **more: Any) -> Callable[[], Any]:
        longest = max(map(len, prompt.ids))
        ids = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in prompt.ids])
        given = {"input_ids": ids, "attention_mask": (ids != PAD_ID).long()}
        given |= {"num_beams": 1, "do_sample": False, "use_cache": True, "max_new_tokens": settings.max_decode_length}

        def run() -> Any:
            with torch.inference_mode():
                return target.generate(**given, **more)

        return run

    def mode(**more: Any) -> Mode:
        return Mode(functools.partial(start, **more), lambda output: output[:, 1:].tolist())  # without the start token

    return {
        "transformers greedy": mode(),
        "transformers static cache": mode(cache_implementation="static"),
        "transformers assisted": mode(assistant_model=draft),
        "transformers assisted by gamma": mode(assistant_model=gamma_draft),
    }


class _Ids:
    """Stands in for a tokenizer where CTranslate2 converts a model: a token's name is its id."""

    pad_token, eos_token, unk_token = str(PAD_ID), str(EOS_ID), str(UNK_ID)

    def __init__(self, size: int):
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._size)}

    def convert_ids_to_tokens(self, i: int) -> str:
        return str(i)


def _load_ctranslate2(weights: Weights, settings: Settings) -> dict[str, Mode]:
    ctranslate2, converters = (importlib.import_module(name) for name in ("ctranslate2", "ctranslate2.converters"))
    _import_transformers()  # which the converter uses
    converter = converters.TransformersConverter(os.path.join(weights.directory, "target"))
    converter.load_tokenizer = lambda *args, **kwargs: _Ids(weights.target[0].vocab_size)
    converted = converter.convert(os.path.join(weights.directory, "ctranslate2"))
    threads = {"inter_threads": 1, "intra_threads": weights.cores}
    translator = ctranslate2.Translator(converted, device="cpu", compute_type="float32", **threads)

    def start(prompt: Prompt) -> Callable[[], Any]:
        return functools.partial(
            translator.translate_batch,
            [[str(i) for i in row] for row in prompt.ids],
            beam_size=1,
            max_decoding_length=settings.max_decode_length,
            min_decoding_length=0,
            max_input_length=0,  # of any length
            return_end_token=True,
        )

    return {"ctranslate2 greedy": Mode(start, lambda found: [[int(i) for i in row.hypotheses[0]] for row in found])}


def _load_t5x(weights: Weights, settings: Settings) -> dict[str, Mode]:
    decoding, models, partitioning, network, seqio = (
        importlib.import_module(name)
        for name in ("t5x.decoding", "t5x.models", "t5x.partitioning", "t5x.examples.t5.network", "seqio")
    )
    (target, params), frozen = weights.target, importlib.import_module("flax.core").freeze
    fields = {field.name for field in dataclasses.fields(network.T5Config)}
    sizes = {name: value for name, value in dataclasses.asdict(target.config).items() if name in fields}
    vocabulary = seqio.PassThroughVocabulary(target.vocab_size, eos_id=EOS_ID)
    model = models.EncoderDecoderModel(
        module=network.Transformer(network.T5Config(**sizes | {"dtype": "float32", "dropout_rate": 0.0})),
        optimizer_def=None,
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        decode_fn=functools.partial(decoding.temperature_sample, temperature=0.0, topk=0),
    )
    # As t5x.infer runs a model: one batch a call, in the partitioner's jit.
    run = partitioning.PjitPartitioner(num_partitions=1).partition(model.predict_batch_with_aux, (None,) * 3, None)
    placed, rng = frozen(jax.device_put(params)), jax.random.PRNGKey(0)

    def start(prompt: Prompt) -> Callable[[], Any]:
        inputs = prompt.batch.inputs.encoder_tokens
        assert inputs is not None
        decoder = np.zeros((len(inputs), settings.max_decode_length), np.int32)
        return functools.partial(run, placed, {"encoder_input_tokens": inputs, "decoder_input_tokens": decoder}, rng)

    return {"t5x temperature_sample": Mode(start, lambda found: np.asarray(found[0]).tolist())}


LOADERS = {
    OURS: _load_ours,
    "transformers": _load_transformers,
    "ctranslate2": _load_ctranslate2,
    "t5x": _load_t5x,
}
