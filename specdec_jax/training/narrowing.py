"""A smaller model out of a larger one's weights: a draft's start that distillation has far less to mend of than noise.

Layers are dropped first. The residual stream is then projected to its most used directions, and of attention heads and
feed-forward units the ones that write most are kept. Norms' scales are folded into the kernels that read behind them.
"""

import dataclasses
from typing import Any

import numpy as np

from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Params

_LOGITS_SHARE = 3.0  # how much more the directions that the logits read count than any one kernel's


_CUT = ("emb_dim", "num_heads", "mlp_dim", "num_encoder_layers", "num_decoder_layers")


def fit(params: Params, config: T5Config) -> Params:
    """The weights of a model as large as a config or larger, cut down to it.

    Raises:
      ValueError: the model is smaller somewhere, or differs in what cannot be cut.
    """
    found = T5Config.from_params(params, dtype=config.dtype)
    for field in dataclasses.fields(config):
        here, wanted = getattr(found, field.name), getattr(config, field.name)
        if field.name not in _CUT and here != wanted:
            raise ValueError(f"{field.name} is {wanted}, and the model to start from has {here}: only sizes can be cut")
    params = prune(params, config)
    widths = _CUT[:3]
    if all(getattr(found, name) == getattr(config, name) for name in widths):
        return params
    return narrow(params, config)


def prune(params: Params, config: T5Config) -> Params:
    """The weights of a deeper model of the same widths, without its last encoder and its first decoder layers.

    What is left stands next to the input and next to the logits: a better start for a draft than random weights.

    Raises:
      ValueError: the model is not deeper.
    """
    kept = {"encoder": slice(None, config.num_encoder_layers), "decoder": slice(-config.num_decoder_layers, None)}
    pruned = dict(params)
    for stack, places in kept.items():
        names = sorted((name for name in params[stack] if name.startswith("layers_")), key=lambda name: int(name[7:]))
        wanted = getattr(config, f"num_{stack}_layers")
        if len(names) < wanted:
            raise ValueError(f"{wanted} {stack} layers are wanted of a model that has {len(names)}: name a deeper one")
        layers = {f"layers_{i}": params[stack][name] for i, name in enumerate(names[places])}
        pruned[stack] = {name: tree for name, tree in params[stack].items() if name not in names} | layers
    return pruned


def narrow(params: Params, config: T5Config) -> Params:
    """The weights of a T5 1.1 narrowed to a config's widths; its layers have to be as many as the config's.

    Args:
      params: plain weights of a model at least as wide, of the same head_dim and vocabulary.
      config: the widths wanted.

    Raises:
      ValueError: the config is wider somewhere.
    """
    tree: Any = _float64(params)
    width = tree["token_embedder"]["embedding"].shape[1]
    if width < config.emb_dim:
        raise ValueError(f"emb_dim is {config.emb_dim}, and the model to narrow has {width}: give the wider model")
    basis = _used_directions(tree, config.emb_dim)
    gain = np.sqrt(width / config.emb_dim)  # of a norm: fewer entries of the same length have a greater mean square
    encoder, decoder = tree["encoder"], tree["decoder"]
    memory_scale = encoder["encoder_norm"]["scale"]  # of what cross-attention's keys and values read
    stacks = (
        (encoder, "attention", "pre_attention_layer_norm"),
        (decoder, "self_attention", "pre_self_attention_layer_norm"),
    )
    for stack, block, norm in stacks:
        layers = [layer for name, layer in stack.items() if name.startswith("layers_")]
        # One relative bias serves all layers, so all keep the same heads.
        kept = _strongest_heads([layer[block] for layer in layers], config)
        stack["relpos_bias"]["rel_embedding"] = stack["relpos_bias"]["rel_embedding"][kept]
        for layer in layers:
            scale = layer[norm]["scale"]
            _narrow_attention(layer[block], kept, config.head_dim, basis, scale, scale)
            if stack is decoder:
                cross, scale = layer["encoder_decoder_attention"], layer["pre_cross_attention_layer_norm"]["scale"]
                _narrow_attention(cross, _strongest_heads([cross], config), config.head_dim, basis, scale, memory_scale)
            _narrow_mlp(layer["mlp"], config.mlp_dim, basis, layer["pre_mlp_layer_norm"]["scale"])
    kernel = decoder["logits_dense"]["kernel"]
    decoder["logits_dense"]["kernel"] = basis.T @ (decoder["decoder_norm"]["scale"][:, None] * kernel)
    tree["token_embedder"]["embedding"] = tree["token_embedder"]["embedding"] @ basis
    return _with_scales(tree, np.full(config.emb_dim, gain))


def _used_directions(tree: Any, width: int) -> np.ndarray:
    """Orthonormal columns [emb, width]: the directions that are written and read most."""
    used = np.zeros((tree["token_embedder"]["embedding"].shape[1],) * 2)

    def add(rows: np.ndarray, share: float = 1.0) -> None:
        nonlocal used
        square = rows.T @ rows
        used += share * square / np.trace(square)

    add(tree["token_embedder"]["embedding"])
    scale = tree["decoder"]["decoder_norm"]["scale"]
    add((scale[:, None] * tree["decoder"]["logits_dense"]["kernel"]).T, _LOGITS_SHARE)
    for stack in (tree["encoder"], tree["decoder"]):
        for name, layer in stack.items():
            if name.startswith("layers_"):
                for block in layer.values():
                    for written in ("out", "wo"):
                        if written in block:
                            add(block[written]["kernel"])
    _, vectors = np.linalg.eigh(used)
    return vectors[:, ::-1][:, :width]


def _strongest_heads(blocks: list[Any], config: T5Config) -> np.ndarray:
    """The heads that write most, their order kept."""
    strength = 0.0
    for block in blocks:
        values = block["value"]["kernel"].reshape(block["value"]["kernel"].shape[0], -1, config.head_dim)
        out = block["out"]["kernel"].reshape(-1, config.head_dim, block["out"]["kernel"].shape[1])
        strength = strength + np.linalg.norm(np.einsum("ehd,hdf->hef", values, out), axis=(1, 2))
    strength = np.asarray(strength)
    if len(strength) < config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads}, and the model to narrow has {len(strength)}")
    return np.sort(np.argsort(-strength)[: config.num_heads])


def _narrow_attention(
    block: Any, heads: np.ndarray, head_dim: int, basis: np.ndarray, query_scale: np.ndarray, key_scale: np.ndarray
) -> None:
    columns = (heads[:, None] * head_dim + np.arange(head_dim)).ravel()
    for name, scale in (("query", query_scale), ("key", key_scale), ("value", key_scale)):
        block[name]["kernel"] = basis.T @ (scale[:, None] * block[name]["kernel"][:, columns])
    block["out"]["kernel"] = block["out"]["kernel"][columns] @ basis


def _narrow_mlp(block: Any, width: int, basis: np.ndarray, scale: np.ndarray) -> None:
    strength = np.linalg.norm(block["wo"]["kernel"], axis=1)
    for name in ("wi_0", "wi_1"):
        strength = strength * np.linalg.norm(scale[:, None] * block[name]["kernel"], axis=0)
    if len(strength) < width:
        raise ValueError(f"mlp_dim is {width}, and the model to narrow has {len(strength)}")
    units = np.sort(np.argsort(-strength)[:width])
    for name in ("wi_0", "wi_1"):
        block[name]["kernel"] = basis.T @ (scale[:, None] * block[name]["kernel"][:, units])
    block["wo"]["kernel"] = block["wo"]["kernel"][units] @ basis


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(subtree) for name, subtree in tree.items()}
    return np.asarray(tree).astype(np.float64)


def _with_scales(tree: Any, scale: np.ndarray) -> Any:
    """Every norm's scale replaced, all else in float32."""
    return {
        name: scale.astype(np.float32)
        if name == "scale"
        else _with_scales(subtree, scale)
        if isinstance(subtree, dict)
        else subtree.astype(np.float32)
        for name, subtree in tree.items()
    }
