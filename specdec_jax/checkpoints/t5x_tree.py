"""Parameter trees by name: scanned layers made separate, and how a checkpoint differs from what is expected.

t5x's scalable_t5 stacks the parameters of all layers on axis 1 and keeps heads apart; unstacked here:

    encoder/encoder/attention/query/kernel [E, L, H, D]  -> encoder/layers_i/attention/query/kernel [E, H*D]
    encoder/encoder/attention/out/kernel [H, L, D, E]    -> encoder/layers_i/attention/out/kernel [H*D, E]
    encoder/encoder/mlp/wo/kernel [M, L, E]              -> encoder/layers_i/mlp/wo/kernel [M, E]
    encoder/encoder/relpos_bias/rel_embedding [H, L, 32] -> encoder/layers_i/relpos_bias/rel_embedding [H, 32]

Its layers have a relative position bias each, which a stack-wide `relpos_bias` could not hold.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specdec_jax.checkpoints.t5x_index import CheckpointError
from specdec_jax.types import Params

Shape = tuple[int, ...]

_STACKED = re.compile(r"(encoder|decoder)/\1/(.+)")
_LAYER_AXIS = 1
_NUM_NAMES = 3  # parameters named in a message before "and N more"


def check_stacks(shapes: Mapping[str, Shape], path: str) -> None:
    """Checks that all stacked parameters of a stack agree on the number of layers.

    Args:
      shapes: shape of each stored parameter.
      path: the checkpoint, for the message.

    Raises:
      CheckpointError: they do not.
    """
    first: dict[str, str] = {}
    for name, shape in shapes.items():
        if match := _STACKED.fullmatch(name):
            other = first.setdefault(match[1], name)
            if len(shape) < 2 or shape[_LAYER_AXIS] != shapes[other][_LAYER_AXIS]:
                raise CheckpointError(
                    f"{path}: parameters {name} {list(shape)} and {other} {list(shapes[other])} differ in "
                    f"the number of layers, which are stacked on axis {_LAYER_AXIS}."
                )


def plain_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Names and shapes, in the plain tree, of one stored parameter: one entry, or one per layer."""
    match = _STACKED.fullmatch(name)
    if not match:
        return {name: _joined_heads(name, shape)}
    layer_shape = _joined_heads(name, shape[:_LAYER_AXIS] + shape[_LAYER_AXIS + 1 :])
    return {f"{match[1]}/layers_{i}/{match[2]}": layer_shape for i in range(shape[_LAYER_AXIS])}


def allocate(name: str, shape: Shape, dtype: np.dtype) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Memory for one stored parameter, as it is stored and as the plain tree has it.

    Args:
      name: name of the stored parameter.
      shape: shape of the stored parameter.
      dtype: wanted dtype.

    Returns:
      An array of the stored shape to write into, and the parameters of the plain tree, which share its
      memory.
    """
    if not _STACKED.fullmatch(name):
        array = np.empty(shape, dtype)
        return array, {name: array.reshape(_joined_heads(name, shape))}
    # Layers first, so that each layer is contiguous whatever order the stored array is read in.
    layers = np.empty((shape[_LAYER_AXIS], *shape[:_LAYER_AXIS], *shape[_LAYER_AXIS + 1 :]), dtype)
    plain = {
        plain_name: layer.reshape(plain_shape)
        for (plain_name, plain_shape), layer in zip(plain_shapes(name, shape).items(), layers, strict=True)
    }
    return np.moveaxis(layers, 0, _LAYER_AXIS), plain


def _joined_heads(name: str, shape: Shape) -> Shape:
    """[E, H, D] as [E, H*D], and [H, D, E] as [H*D, E]; other shapes as they are."""
    if len(shape) != 3 or not name.endswith("/kernel"):
        return shape
    if name.endswith("/out/kernel"):
        return (shape[0] * shape[1], shape[2])
    return (shape[0], shape[1] * shape[2])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict, sorted, by names such as "encoder/layers_0/mlp/wo/kernel"."""
    leaves: dict[str, Any] = {}
    for key in sorted(tree):
        if isinstance(tree[key], Mapping):
            leaves |= flatten(tree[key], f"{prefix}{key}/")
        else:
            leaves[f"{prefix}{key}"] = tree[key]
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def check_expected(found: Mapping[str, Shape], expected: Mapping[str, Shape], path: str) -> None:
    """Checks a checkpoint's plain tree against the one expected.

    Args:
      found: shape of each parameter in the checkpoint.
      expected: shape of each parameter expected.
      path: the checkpoint, for the message.

    Raises:
      CheckpointError: it is a model of another kind, parameters are missing or unexpected, or a shape
        differs.
    """
    for kind_of in (_feed_forward, _position_bias, _logits):
        if kind_of(found) != kind_of(expected):
            raise CheckpointError(f"{path}: this is {kind_of(found)}, where {kind_of(expected)} is expected.")
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or unexpected:
        parts = [f"missing {_some(missing)}"] if missing else []
        parts += [f"unexpected {_some(unexpected)}"] if unexpected else []
        raise CheckpointError(f"{path}: parameters differ from those expected: {'; '.join(parts)}.")
    for name, shape in expected.items():
        if found[name] != tuple(shape):
            raise CheckpointError(
                f"{path}: parameter {name} has shape {list(found[name])}, where {list(shape)} is expected."
            )


def _feed_forward(names: Iterable[str]) -> str:
    ends = {name.rsplit("/", 2)[-2] for name in names if "/mlp/" in name}
    if "wi_0" in ends:
        return "a T5 1.1 tree (gated feed-forward, mlp/wi_0 and mlp/wi_1)"
    return "a T5 1.0 tree (plain feed-forward, mlp/wi)" if "wi" in ends else "a tree that is no T5's"


def _position_bias(names: Iterable[str]) -> str:
    if any(re.fullmatch(r"(encoder|decoder)/layers_\d+/relpos_bias/.+", name) for name in names):
        return "a tree with a relative position bias per layer (scalable_t5; relpos_per_layer=True)"
    return "a tree with one relative position bias per stack (relpos_per_layer=False)"


def _logits(names: Iterable[str]) -> str:
    if "decoder/logits_dense/kernel" in names:
        return "a tree with decoder/logits_dense (logits_via_embedding=False)"
    return "a tree without decoder/logits_dense (logits_via_embedding=True)"


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
    return ", ".join(names[:_NUM_NAMES]) + more
