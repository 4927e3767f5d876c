"""A narrower model out of a wider one's weights: a draft's start that distillation has far less to mend of than noise.

The residual stream is projected to its most used directions, and of attention heads and feed-forward units the ones
that write most are kept. Norms' scales are folded into the kernels that read behind them.
"""

from typing import Any

import numpy as np

from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Params

_LOGITS_SHARE = 3.0  # how much more the directions that the logits read count than any one kernel's


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
    heads = {}
    for stack, block in ((encoder, "attention"), (decoder, "self_attention")):
        layers = [layer for name, layer in stack.items() if name.startswith("layers_")]
        # One relative bias serves all layers, so all keep the same heads.
        kept = _strongest_heads([layer[block] for layer in layers], config)
        heads[id(stack)] = kept
        bias = stack["relpos_bias"]["rel_embedding"]
        stack["relpos_bias"]["rel_embedding"] = bias[kept]
    for stack, block in ((encoder, "attention"), (decoder, "self_attention")):
        norm = "pre_attention_layer_norm" if stack is encoder else "pre_self_attention_layer_norm"
        for name, layer in stack.items():
            if not name.startswith("layers_"):
                continue
            scale = layer[norm]["scale"]
            _narrow_attention(layer[block], heads[id(stack)], config.head_dim, basis, scale, scale)
            if stack is decoder:
                cross = layer["encoder_decoder_attention"]
                kept = _strongest_heads([cross], config)
                scale = layer["pre_cross_attention_layer_norm"]["scale"]
                _narrow_attention(cross, kept, config.head_dim, basis, scale, encoder["encoder_norm"]["scale"])
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
