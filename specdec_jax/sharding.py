"""The same decode on a mesh of devices: rows split over its axis "data", heads, mlp and vocabulary over "model".

    mesh = make_mesh(2, 4)
    target = split_target(T5(config), mesh)             # a Decoder, like the T5 it wraps
    draft = split_draft(T5(draft_config), mesh)         # whole on every device where it cannot be split
    params, draft_params = target.place(params), draft.place(draft_params)
    inputs, seeds = put((inputs, seeds), row_axes((inputs, seeds)), mesh)
    result = fetch(speculative_decode(target, params, ModelDrafter(draft), draft_params, inputs, seeds=seeds, ...))

A mesh may span processes (`jax.distributed`): each has the whole of what `place` and `put` are given, makes the same
calls, and holds its devices' parts. Rules are t5x's: pairs of a logical axis (models/axes.py) and the mesh axis, or
axes, that it is split over; those of t5x's partitioner fit too.
"""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax.core.spmd import logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
from flax.typing import LogicalRules
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from specdec_jax.models.axes import ARRAYS, axis_sizes, param_axes
from specdec_jax.models.t5 import T5, T5Cache, T5Config
from specdec_jax.types import Inputs, Params

_LOG = logging.getLogger(__name__)

Rules: TypeAlias = LogicalRules
"""Pairs: what each logical axis is split over, in order of precedence; None: over nothing."""

RULES: Rules = (
    ("batch", "data"),
    ("vocab", "model"),
    ("embed", None),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv", None),
    ("joined_kv", "model"),
    ("relpos_buckets", None),
    ("length", None),
)
"""T5X's standard rules: one-dimensional model parallelism and data parallelism."""


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh of all devices, of all processes, with the axes "data" and "model".

    Raises:
      ValueError: there are not data * model devices.
    """
    if data * model != jax.device_count():
        raise ValueError(
            f"mesh is {(data, model)}, which takes {data * model} devices, and there are {jax.device_count()}; "
            "the two numbers (data, model) must multiply to that."
        )
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(rules: Rules) -> Rules:
    """The rules by which weights are whole on every device; the batch is split as before."""
    return tuple((name, axes if name == "batch" else None) for name, axes in rules)


class Indivisible(NamedTuple):
    """A logical axis that a mesh cannot split evenly.

    Attributes:
      axis: its logical name.
      size: its size.
      mesh_axes: what the rules split it over, such as ("model",).
      parts: how many devices that are.
    """

    axis: str
    size: int
    mesh_axes: tuple[str, ...]
    parts: int

    def __str__(self) -> str:
        over = " x ".join(self.mesh_axes)
        return f"{self.axis} is {self.size}, not a multiple of the {self.parts} devices of mesh axis {over}"


def indivisible(config: T5Config, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> list[Indivisible]:
    """The axes of a T5's weights and caches that the mesh does not divide; none if it fits. Needs no weights."""
    sizes, found = axis_sizes(config), set()
    for names in ARRAYS:
        for name, axes in zip(names, _spec(names, rules), strict=True):
            parts = math.prod(mesh.shape[axis] for axis in _mesh_axes(axes))
            if sizes.get(name, 0) % parts:
                found.add(Indivisible(name, sizes[name], _mesh_axes(axes), parts))
    return sorted(found)


def _mesh_axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def _spec(names: Iterable[str | None], rules: Rules) -> PartitionSpec:
    return PartitionSpec(*(logical_to_mesh_axes(tuple(names), rules) or ()))


def split_target(model: T5, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> "Sharded":
    """The target on a mesh.

    Raises:
      ValueError: it cannot be split so; the message says what does not divide, and what would.
    """
    wrong = indivisible(model.config, mesh, rules)
    if wrong:
        first = wrong[0]
        alike = {name for name, axes in rules if _mesh_axes(axes) == first.mesh_axes}
        together = math.gcd(*(size for name, size in axis_sizes(model.config).items() if name in alike))
        fitting = [n for n in range(1, first.parts) if together % n == 0]
        raise ValueError(
            f"mesh is {tuple(mesh.shape.values())}, and the target does not fit it: {'; '.join(map(str, wrong))}. "
            f"Give {' x '.join(first.mesh_axes)} a size that divides: {', '.join(map(str, fitting))}."
        )
    return Sharded(model, mesh, rules)


def split_draft(
    model: T5,
    mesh: Mesh | AbstractMesh,
    rules: Rules = RULES,
    *,
    name: str = "draft",
    warn: Callable[[str], None] = _LOG.warning,
) -> "Sharded":
    """The draft on a mesh. One that does not divide is whole on every device, and `warn` is told so.

    Args:
      model: the draft.
      mesh: the devices.
      rules: how to split it.
      name: what to call it in the warning.
      warn: takes the warning.
    """
    wrong = indivisible(model.config, mesh, rules)
    if wrong:
        warn(f"the draft {name} is not split but whole on every device: {'; '.join(map(str, wrong))}.")
    return Sharded(model, mesh, replicated(rules) if wrong else rules)


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A T5 on a mesh, a Decoder as it is without (see models/base.py).

    It runs the T5 with the mesh and the rules set. They are fields of this static object, and so part of jit's key,
    which does not know of Flax's rules: a program compiled for one mesh is never taken for another's.

    Attributes:
      model: the T5.
      mesh: the devices.
      rules: how its axes are split over them.
    """

    model: T5
    mesh: Mesh | AbstractMesh
    rules: Rules = RULES

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))  # t5x's are a list, which has no hash

    @property
    def config(self) -> T5Config:
        """Sizes of the T5."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padded ids included."""
        return self.model.vocab_size

    def place(self, params: Params) -> Params:
        """Puts weights where they belong, in the form that decodes fastest there (`T5.prepare`)."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError("the mesh is an AbstractMesh, which has no devices to put weights on; give a Mesh.")
        return self.model.prepare(put(params, param_axes(params), self.mesh, self.rules))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh), logical_axis_rules(self.rules):
            yield

    def _rows(self, tokens: Int32[Array, "batch length"]) -> Int32[Array, "batch length"]:
        """Splits tokens by rows. They name the devices, which the mesh that the T5's constraints see does not."""
        return jax.lax.with_sharding_constraint(
            tokens, NamedSharding(self.mesh, _spec(("batch", "length"), self.rules))
        )

    def forward(
        self, params: Params, encoder_tokens: Int32[Array, "batch length"], decoder_tokens: Int32[Array, "batch k"]
    ) -> Float32[Array, "batch k vocab"]:
        """See `T5.forward`; to be called inside a jit, as all here."""
        with self._named():
            return self.model.forward(params, self._rows(encoder_tokens), self._rows(decoder_tokens))

    def prefill(
        self, params: Params, inputs: Inputs, cache_length: int
    ) -> tuple[T5Cache, Int32[Array, "batch prompt"], Int32[Array, " batch"]]:
        """See `Decoder.prefill`."""
        with self._named():
            return self.model.prefill(params, jax.tree.map(self._rows, inputs), cache_length)

    def extend(
        self, params: Params, cache: T5Cache, tokens: Int32[Array, "batch k"], positions: Int32[Array, " rows"]
    ) -> tuple[Float32[Array, "batch k vocab"], T5Cache]:
        """See `Decoder.extend`."""
        with self._named():
            return self.model.extend(params, cache, self._rows(tokens), positions)


def put(tree: Any, axes: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Places arrays on a mesh; each device gets its part only.

    Args:
      tree: arrays, numpy or jax, the same ones in every process.
      axes: the same tree with a PartitionSpec of logical names for each array, from `param_axes` or `row_axes`.
      mesh: the devices.
      rules: how the axes are split over them.
    """

    def place(x: Any, sharding: NamedSharding) -> Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        # device_put would compare the whole array between the processes first.
        return jax.make_array_from_callback(x.shape, sharding, functools.partial(np.ndarray.__getitem__, np.asarray(x)))

    return jax.tree.map(place, tree, shardings(axes, mesh, rules))


def shardings(axes: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """How arrays with these logical axes are split over a mesh; takes and returns a tree."""
    return jax.tree.map(
        lambda names: NamedSharding(mesh, _spec(names, rules)), axes, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def row_axes(tree: Any) -> Any:
    """Logical axes of inputs, seeds and settings of the draws: the batch first, and nothing where no row is meant."""

    def axes(path: tuple, x: Any) -> PartitionSpec:
        is_shared = path and getattr(path[-1], "name", "") in ("num_ids", "forbidden_ids", "eos_ids")
        return PartitionSpec() if is_shared else PartitionSpec("batch", *[None] * (np.ndim(x) - 1))

    return jax.tree_util.tree_map_with_path(axes, tree)


def fetch(tree: Any) -> Any:
    """Arrays as numpy, whole, in every process; all processes have to call it."""

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return multihost_utils.process_allgather(x, tiled=True)
        return jax.device_get(x)

    return jax.tree.map(whole, tree)
