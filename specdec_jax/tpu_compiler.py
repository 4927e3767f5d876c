"""Compiling for a TPU that is not there, and reading what its compiler says about each program; see `tpu`."""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec, SingleDeviceSharding

from specdec_jax import hlo, layouts, sharding, verification
from specdec_jax.decoding import decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.axes import param_axes
from specdec_jax.models.t5 import T5
from specdec_jax.models.t5_config import T5Config
from specdec_jax.sampling import GREEDY_BELOW, HOTTEST, Sampling
from specdec_jax.tpu_topology import CHIPS, Chip, find_devices, read_topology
from specdec_jax.types import Inputs, Params

_LEAST_COPY = 2**15  # bytes: what is smaller than 32 KiB is no weight and no cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is compiled.

    Attributes:
      sizes: the T5s that there are, by name.
      target_size: which of them is the target.
      draft_size: which is the draft.
      gamma: guesses per step.
      topology: generation and chips, such as "v4:1x1x1" or "v4:2x2x1".
      mesh: (data, model), how the chips are used; their product is the number of chips.
      batch_size: rows decoded together, of all chips.
      max_input_length: tokens of an encoder input.
      max_decode_length: emitted tokens at most.
      temperature: 0 or above.
      dtype: of weights, activations and caches.
      layouts: "auto", the compiler chooses those of the weights, or "default".
    """

    sizes: Mapping[str, T5Config]
    target_size: str
    draft_size: str
    gamma: int = 7
    topology: str = "v4:1x1x1"
    mesh: tuple = (1, 1)
    batch_size: int = 1
    max_input_length: int = 512
    max_decode_length: int = 152
    temperature: float = 0.0
    dtype: str = "bfloat16"
    layouts: str = "auto"

    def __post_init__(self) -> None:
        for name in ("target_size", "draft_size"):
            if getattr(self, name) not in self.sizes:
                raise ValueError(f"{name} is {getattr(self, name)!r}; sizes are {', '.join(self.sizes)}.")
        if not all(isinstance(size, T5Config) for size in self.sizes.values()):
            raise ValueError(f"sizes is {dict(self.sizes)}; give T5Configs, as {{'small': @t5_1_1_small/T5Config()}}.")
        for name, most in (("gamma", 100), ("batch_size", 2**16), ("max_input_length", 2**16)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 to {most}.")
        if not 1 <= self.max_decode_length <= 2**16:
            raise ValueError(f"max_decode_length is {self.max_decode_length}; it must be 1 to {2**16}.")
        if self.layouts not in ("auto", "default"):
            raise ValueError(f"layouts is {self.layouts!r}; it must be 'auto' or 'default'.")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'bfloat16' or 'float32'.")
        if not 0 <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (argmax) to {HOTTEST:g}.")
        _, bounds = read_topology(self.topology)
        whole = all(type(n) is int and n >= 1 for n in self.mesh)
        if len(self.mesh) != 2 or not whole or math.prod(self.mesh) != math.prod(bounds):
            raise ValueError(
                f"mesh is {tuple(self.mesh)} and topology {self.topology} has {math.prod(bounds)} chips; give "
                "(data, model) whose product that is."
            )
        if self.batch_size % self.mesh[0]:
            raise ValueError(f"batch_size is {self.batch_size}; it must be a multiple of the mesh's {self.mesh[0]}.")


class Estimate(NamedTuple):
    """What the compiler says about a program.

    Attributes:
      argument_bytes: of HBM, on one chip.
      temporary_bytes: likewise.
      output_bytes: likewise.
      cycles: of one run, by kind of operation; of a decoding loop, of one step of it.
      read_bytes: what one run, or step, has to read from HBM at least, on one chip.
      chip: what it was compiled for.
      copies: weights and caches that are copied or transposed in it: name, shape, times.
      collectives: operations between chips.
      link_bytes: what each chip has to send to others in them: of an all-reduce twice its result, of others once, but
        for the share that it keeps.
      host_transfers: to and from the host.
    """

    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    cycles: Mapping[str, int]
    read_bytes: int
    chip: Chip
    copies: Sequence[tuple[str, str, int]]
    collectives: int
    link_bytes: int
    host_transfers: int

    @property
    def hbm_bytes(self) -> int:
        """What has to fit on a chip."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes

    @property
    def computing(self) -> float:
        """Seconds that the scheduled operations take."""
        return sum(self.cycles.values()) / self.chip.clock

    @property
    def floor(self) -> float:
        """Seconds that reading takes."""
        return self.read_bytes / self.chip.bandwidth

    @property
    def linking(self) -> float:
        """Seconds that sending takes in a ring, to both neighbours; the compiler's cycles have nothing of it."""
        return self.link_bytes / (2 * self.chip.link)

    @property
    def seconds(self) -> float:
        """The estimate."""
        return max(self.computing + self.linking, self.floor)


class TooLargeError(ValueError):
    """A program does not fit the chips."""


class Compiler:
    """Compiles the package's functions for a topology; weights are shapes only.

    Raises:
      ValueError: libtpu is not there or does not know the topology; TooLargeError: a program does not fit.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chip = CHIPS[read_topology(options.topology)[0]]
        self._devices = find_devices(options.topology)
        self._mesh: Mesh | None = None
        if len(self._devices) > 1:
            axes = (AxisType.Auto, AxisType.Auto)
            self._mesh = Mesh(np.asarray(self._devices).reshape(options.mesh), ("data", "model"), axis_types=axes)
        self._chosen: dict[Any, Any] = {}

    def resized(self, **sizes: int) -> "Compiler":
        """The same with another batch_size or length, and the layouts that are chosen by now."""
        other = copy.copy(self)
        other.options = dataclasses.replace(self.options, **sizes)
        return other

    def model(self, size: str, *, target: bool) -> Any:
        """A T5 of a size, on the mesh where there is one."""
        model = T5(dataclasses.replace(self.options.sizes[size], dtype=self.options.dtype))
        if self._mesh is None:
            return model
        split = sharding.split_target if target else sharding.split_draft
        return split(model, self._mesh)

    def params(self, model: Any) -> Params:
        """A model's weights, as shapes."""
        plain = model if isinstance(model, T5) else model.model
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.options.dtype), plain.param_shapes())

    def _shardings(self, model: Any, params: Params) -> Params:
        if self._mesh is None:
            return jax.tree.map(lambda x: self._whole(), params)
        return sharding.shardings(param_axes(params), self._mesh, model.rules)

    def _whole(self) -> Any:
        if self._mesh is None:
            return SingleDeviceSharding(self._devices[0])
        return sharding.shardings(PartitionSpec(), self._mesh)

    def _rows(self, rank: int) -> Any:
        if self._mesh is None:
            return self._whole()
        return sharding.shardings(PartitionSpec("batch", *[None] * (rank - 1)), self._mesh)

    def _formats(self, model: Any, params: Params) -> Any:
        shardings = self._shardings(model, params)
        if model in self._chosen:
            return self._chosen[model]
        if self.options.layouts == "default":
            return shardings
        return layouts.automatic(shardings)

    def decoding(self, target: Any, draft: Any, gamma: int) -> Estimate:
        """The whole of decoding, of which a step is estimated; with gamma 0 plain decoding.

        Where the weights' layouts are the compiler's to choose, it chooses a model's for the first speculative loop
        that it is in; everything after that gets them as they are then.
        """
        options = self.options
        temperature: Any = self._one(jnp.float32)
        sampling = Sampling() if options.temperature < GREEDY_BELOW else Sampling(temperature=temperature)

        def run(target_params: Params, draft_params: Params, tokens: Any, seeds: Any, sampling: Sampling) -> Any:
            return decode(
                target,
                target_params,
                ModelDrafter(draft) if gamma else None,
                draft_params if gamma else None,
                Inputs(tokens),
                gamma=gamma,
                max_length=options.max_decode_length,
                sampling=sampling,
                draft_sampling=sampling,
                seeds=seeds,
                eos_ids=jnp.asarray([1], jnp.int32),
                rule=verification.block if gamma else verification.token,
                lenience=1.0,
            )

        models = (target, draft)
        weights = tuple(self.params(model) if gamma or model is target else {} for model in models)
        formats = [self._formats(model, some) if some else {} for model, some in zip(models, weights, strict=True)]
        rows = jax.tree.map(lambda x: self._rows(len(x.shape)), sampling)
        jitted = jax.jit(run, in_shardings=(*formats, self._rows(2), self._rows(1), rows))
        compiled = self._compile(jitted.lower(*weights, self._tokens(), self._one(jnp.int32), sampling))
        if gamma:
            for model, chosen in zip(models, compiled.input_formats[0], strict=False):
                self._chosen.setdefault(model, chosen)
        read = self._read(target) + gamma * self._read(draft) if gamma else self._read(target)
        return self._estimate(compiled, read, models if gamma else (target,), loop=True)

    def call(self, model: Any, block: int) -> Estimate:
        """A call of so many tokens, in a loop of such calls, as decoding makes them."""

        def run(params: Params, tokens: Any, count: Any) -> Any:
            cache, prompt, positions = model.prefill(params, Inputs(tokens), self._capacity)

            def body(i: Any, carry: tuple) -> tuple:
                cache, tokens, positions = carry
                logits, cache = model.extend(params, cache, tokens, positions)
                return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32), positions + 1

            first = jnp.broadcast_to(prompt[:, :1], (self.options.batch_size, block))
            return jax.lax.fori_loop(0, count, body, (cache, first, positions))[1]

        params = self.params(model)
        jitted = jax.jit(run, in_shardings=(self._formats(model, params), self._rows(2), self._whole()))
        compiled = self._compile(jitted.lower(params, self._tokens(), jax.ShapeDtypeStruct((), jnp.int32)))
        self._chosen.setdefault(model, compiled.input_formats[0][0])
        return self._estimate(compiled, self._read(model), (model,), loop=True)

    def prefill(self, model: Any) -> Estimate:
        """The encoder, and the keys and values that every later call attends to."""
        params = self.params(model)
        encoder = {"encoder": params["encoder"], "decoder": _of_prefill(params["decoder"])}
        run = functools.partial(model.prefill, cache_length=self._capacity)
        jitted = jax.jit(
            lambda params, tokens: run(params, Inputs(tokens)),
            in_shardings=(self._formats(model, params), self._rows(2)),
        )
        compiled = self._compile(jitted.lower(params, self._tokens()))
        return self._estimate(compiled, self._shard_shapes(model, encoder), (model,), loop=False)

    def _compile(self, lowered: Any) -> Any:
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            options = self.options
            raise TooLargeError(
                f"batch_size {options.batch_size}, max_input_length {options.max_input_length} and max_decode_length "
                f"{options.max_decode_length} in {options.dtype} do not fit the {self.chip.hbm / 2**30:g} GiB of a "
                f"chip of {options.topology}: make them smaller, or split weights over more chips (mesh)."
            ) from error

    def _read(self, model: Any) -> list[tuple[int, ...]]:
        """What a decoding call has to read on each chip, as shapes: the decoder's weights, and the caches."""
        params = self.params(model)
        decoder = {"decoder": _of_calls(params["decoder"])}
        if "logits_dense" not in params["decoder"]:
            decoder["token_embedder"] = params["token_embedder"]
        return self._shard_shapes(model, decoder) + self._caches(model)

    @property
    def _capacity(self) -> int:
        return self.options.max_decode_length + self.options.gamma + 1

    def _tokens(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.options.batch_size, self.options.max_input_length), jnp.int32)

    def _one(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.options.batch_size,), dtype)

    def _caches(self, model: Any) -> list[tuple[int, ...]]:
        """The shape of each cache on one chip."""
        config, options = model.config, self.options
        rows, heads = options.batch_size // options.mesh[0], config.num_heads
        if self._mesh is not None and not sharding.indivisible(config, self._mesh, model.rules):
            heads //= options.mesh[1] if ("heads", "model") in model.rules else 1
        slots = [self._capacity] * 2 + [options.max_input_length] * 2
        return [(rows, heads, length, config.head_dim) for length in slots * config.num_decoder_layers]

    def _shard_shapes(self, model: Any, params: Params) -> list[tuple[int, ...]]:
        """The shape of each weight on one chip."""
        places = jax.tree.leaves(self._shardings(model, params))
        return [place.shard_shape(x.shape) for place, x in zip(places, jax.tree.leaves(params), strict=True)]

    def _estimate(
        self, compiled: Any, read: Sequence[tuple[int, ...]], models: Sequence[Any], *, loop: bool
    ) -> Estimate:
        program, memory = hlo.parse(compiled.as_text()), compiled.memory_analysis()
        carried = program.carried if loop else {}
        own = jnp.dtype(self.options.dtype).itemsize
        what = program.outer_loop if loop else program.entry
        known = {
            _dims(shape)
            for model in models
            for shape in (*self._caches(model), *self._shard_shapes(model, self.params(model)))
        }
        copies = [
            (instruction.name, instruction.shape, times)
            for instruction, times in program.copies(what, _LEAST_COPY)
            if instruction.dims in known
        ]
        sent = sum(
            instruction.num_bytes * times * (2 if instruction.opcode.startswith("all-reduce") else 1)
            for instruction, times in program.scheduled(what)
            if program.kind(instruction) == hlo.COLLECTIVE and not instruction.opcode.endswith("-start")
        )
        return Estimate(
            argument_bytes=memory.argument_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            cycles=program.cycles(what),
            read_bytes=sum(math.prod(shape) * min(own, carried.get(_dims(shape), own)) for shape in read),
            chip=self.chip,
            copies=copies,
            collectives=program.number_of(what, hlo.COLLECTIVE),
            link_bytes=sent * (len(self._devices) - 1) // len(self._devices),
            host_transfers=program.number_of(what, hlo.HOST),
        )


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _of_prefill(decoder: Params) -> Params:
    """The decoder's weights that only prefill needs: keys and values of the encoder's output."""
    return {
        name: {"encoder_decoder_attention": {k: layer["encoder_decoder_attention"][k] for k in ("key", "value")}}
        for name, layer in decoder.items()
        if "encoder_decoder_attention" in layer
    }


def _of_calls(decoder: Params) -> Params:
    """The decoder's weights that every call needs."""

    def rest(layer: Params) -> Params:
        attention = layer["encoder_decoder_attention"]
        return {**layer, "encoder_decoder_attention": {k: attention[k] for k in ("query", "out")}}

    return {name: rest(layer) if "encoder_decoder_attention" in layer else layer for name, layer in decoder.items()}
