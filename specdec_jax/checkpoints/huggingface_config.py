"""Hugging Face's config.json and generation_config.json, and the T5Config that they amount to.

Whether logits are scaled, as they are where they come from the embedding, is told in three ways:

    T5 1.0                              tie_word_embeddings is true or absent
    T5 1.1, ByT5, Flan-T5               tie_word_embeddings is false
    any T5 that transformers 5 saved    scale_decoder_outputs says it; tie_word_embeddings is always true
    mT5                                 never; tie_word_embeddings is false, or true where transformers 5 saved it
"""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec_jax.checkpoints.t5x_index import CheckpointError
from specdec_jax.models.t5_config import T5Config

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

_PROJECTIONS = {("gelu", "linear"): "gated-gelu", ("relu",): "relu", ("relu", "linear"): "gated-relu"}
"""What feed_forward_proj calls each kind of feed-forward block; its "gated-gelu" is the approximate gelu, as T5X's."""

_DEFAULT_PROJECTION = {"t5": "relu", "mt5": "gated-gelu"}
_MOST_LAYERS = 1000
_SIZES = ("vocab_size", "d_model", "num_heads", "d_kv", "d_ff", "num_layers")
_FIXED = {"layer_norm_epsilon": 1e-6, "pad_token_id": 0}  # what this package's T5 does not leave open


class Description(NamedTuple):
    """What config.json says.

    Attributes:
      config: the model; its dtype is the default.
      may_tie_logits: whether logits that are not scaled may have the embedding for weights.
    """

    config: T5Config
    may_tie_logits: bool


def read(directory: str) -> Description:
    """Reads a checkpoint's config.json, and from generation_config.json, if there is one, the start token.

    Raises:
      CheckpointError: config.json is missing or damaged, or describes no T5 that this package knows.
    """
    path = os.path.join(directory, CONFIG)
    found = _read_json(path)
    kind = found.get("model_type")
    if kind not in tuple(_DEFAULT_PROJECTION):  # it may be anything
        known = " and ".join(map(repr, _DEFAULT_PROJECTION))
        raise CheckpointError(f"{path}: model_type is {kind!r}; only {known} are T5s that can be read.")
    for key, value in _FIXED.items():
        if found.get(key, value) not in (None, value):
            raise CheckpointError(f"{path}: {key} is {found[key]!r}; only {value!r} is supported.")
    sizes = {key: _integer(path, found, key) for key in _SIZES}
    is_tied = found.get("tie_word_embeddings") is not False
    is_scaled = kind != "mt5" and found.get("scale_decoder_outputs", is_tied) is not False
    try:
        config = T5Config(
            vocab_size=sizes["vocab_size"],
            emb_dim=sizes["d_model"],
            num_heads=sizes["num_heads"],
            head_dim=sizes["d_kv"],
            mlp_dim=sizes["d_ff"],
            num_encoder_layers=sizes["num_layers"],
            num_decoder_layers=_integer(path, found, "num_decoder_layers", sizes["num_layers"]),
            mlp_activations=_activations(path, found, _DEFAULT_PROJECTION[kind]),
            logits_via_embedding=is_scaled,
            relpos_num_buckets=_integer(path, found, "relative_attention_num_buckets", 32),
            relpos_max_distance=_integer(path, found, "relative_attention_max_distance", 128),
            start_id=_start_id(directory, path, found),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return Description(config, is_tied)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: this is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object.")
    return found


def _integer(path: str, found: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = found.get(key)
    if value is None:  # transformers writes null for what it leaves to the default
        value = default
    if type(value) is not int:
        raise CheckpointError(f"{path}: {key} is {value!r}; it must be an integer.")
    if key.endswith("layers") and value > _MOST_LAYERS:  # names are made of it before any weight is seen
        raise CheckpointError(f"{path}: {key} is {value}; it must be at most {_MOST_LAYERS}.")
    return value


def _activations(path: str, found: Mapping[str, Any], default: str) -> tuple[str, ...]:
    projection = found.get("feed_forward_proj", default)
    activations = next((ours for ours, theirs in _PROJECTIONS.items() if theirs == projection), None)
    if activations is None:
        known = ", ".join(map(repr, _PROJECTIONS.values()))
        raise CheckpointError(f"{path}: feed_forward_proj is {projection!r}; only {known} are supported.")
    implied = {"gelu": "gelu_new"}.get(activations[0], activations[0])
    if found.get("dense_act_fn", implied) != implied:  # where it is given, it is what counts
        raise CheckpointError(
            f"{path}: dense_act_fn is {found['dense_act_fn']!r}, where feed_forward_proj is {projection!r}; only "
            f"{implied!r} is supported with it."
        )
    return activations


def _start_id(directory: str, path: str, found: Mapping[str, Any]) -> int:
    """The decoder's start token; what generation_config.json says comes first, as in transformers."""
    key, default = "decoder_start_token_id", _integer(path, found, "decoder_start_token_id", 0)
    path = os.path.join(directory, GENERATION_CONFIG)
    return _integer(path, _read_json(path), key, default) if os.path.isfile(path) else default


def write(directory: str, config: T5Config, *, dtype: str, eos_id: int) -> None:
    """Writes config.json and generation_config.json, for transformers 4 and 5 alike.

    Args:
      directory: where to write them.
      config: the model; its own dtype is not used.
      dtype: what the weights are stored as.
      eos_id: the end-of-sequence token.

    Raises:
      CheckpointError: Hugging Face's T5 has no such feed-forward block.
    """
    ids = {"decoder_start_token_id": config.start_id, "eos_token_id": eos_id, "pad_token_id": 0}
    described = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": projection(config),
        "tie_word_embeddings": config.logits_via_embedding,
        "relative_attention_num_buckets": config.relpos_num_buckets,
        "relative_attention_max_distance": config.relpos_max_distance,
        "layer_norm_epsilon": _FIXED["layer_norm_epsilon"],
        "torch_dtype": dtype,  # transformers 5 takes it too, and 4 knows no other name
        **ids,
    }
    for name, content in ((CONFIG, described), (GENERATION_CONFIG, ids)):
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")


def projection(config: T5Config) -> str:
    """What Hugging Face calls the model's kind of feed-forward block.

    Raises:
      CheckpointError: it has no name for it.
    """
    if config.mlp_activations not in _PROJECTIONS:
        known = ", ".join(map(str, _PROJECTIONS))
        raise CheckpointError(
            f"T5Config.mlp_activations is {config.mlp_activations}; Hugging Face's T5 has only {known}."
        )
    return _PROJECTIONS[config.mlp_activations]
