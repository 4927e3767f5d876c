"""What t5x's gin files say about decoding, read from where t5x users write it: temperature_sample's own arguments."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gin
import numpy as np
from jax.core import Tracer

from specdec_jax.sampling import HOTTEST, Sampling, make_sampling

_UNSUPPORTED = ("state_callback_fn", "logit_callback_fn")
_SET_BY_T5X = ("inputs", "cache", "tokens_to_logits", "eos_id", "decode_rng", "num_decodes", "cache_offset")
"""Arguments that t5x overwrites in every call, so that binding them does nothing there either."""


class DecodeSettings(NamedTuple):
    """temperature_sample's arguments, with t5x's defaults and meaning.

    Attributes:
      temperature: one number, or one per input; up to 1e-4, that included, is argmax.
      topk: ids to keep; 1, t5x's default, is argmax; 0 keeps all.
      topp: probability to keep; 0 keeps all.
      max_decode_steps: tokens after the prompt; None for as many as fit.
      max_decode_steps_hard_limit: where both are given, the smaller one counts.
      rescale_log_probs: scores under the distribution that was sampled from, instead of the raw one.
    """

    temperature: Any = 1.0
    topk: int = 1
    topp: float = 0.0
    max_decode_steps: int | None = None
    max_decode_steps_hard_limit: int | None = None
    rescale_log_probs: bool = True

    def sampling(self, batch: int, num_decodes: int, num_ids: int, temperature: float | None = None) -> Sampling:
        """The settings of the draws, for batch * num_decodes rows; `temperature` in place of its own where given."""
        if self.topk and self.topp:
            raise ValueError(
                f"temperature_sample's topk is {self.topk} and its topp {self.topp}; bind one of the two to 0 "
                "(topk is 1 by default)."
            )
        temperatures = np.asarray(self.temperature if temperature is None else temperature, np.float32)
        if temperatures.shape not in ((), (batch,)):
            raise ValueError(
                f"temperature has shape {temperatures.shape}; give one number, or one for each of the {batch} inputs."
            )
        rows = np.repeat(np.broadcast_to(temperatures, (batch,)), num_decodes)
        greedy = (rows == np.float32(1e-4)) | (self.topk == 1)  # the best id alone: nothing to draw
        return make_sampling(
            batch * num_decodes,
            temperature=np.where(greedy, 0.0, rows),
            top_k=self.topk,
            top_p=self.topp or 1.0,
            num_ids=num_ids,
        )

    def most_steps(self, length: int) -> int:
        """Tokens after the prompt at most, in outputs of this length."""
        if self.max_decode_steps is None:
            return length
        if not 1 <= self.max_decode_steps <= length:
            raise ValueError(
                f"temperature_sample's max_decode_steps is {self.max_decode_steps}; it must be 1 to {length}, the "
                "targets' length."
            )
        return min(self.max_decode_steps, self.max_decode_steps_hard_limit or length)


def read_settings(decode_fn: Callable[..., Any], given: Mapping[str, Any] | None = None) -> DecodeSettings:
    """The settings that a decode function was bound to, by gin or functools.partial.

    Args:
      decode_fn: t5x's temperature_sample.
      given: arguments of this call (t5x's decoder_params), which go first.

    Raises:
      ValueError: another decode function, or an argument that speculative decoding cannot honour.
    """
    bound = {name: x for name, x in {**_bindings(decode_fn), **(given or {})}.items() if name not in _SET_BY_T5X}
    for name, value in bound.items():
        if name in _UNSUPPORTED and value is not None:
            raise ValueError(
                f"temperature_sample's {name} is {value!r}; speculative decoding verifies several tokens in one call "
                "and cannot honour it: unbind it, or decode without a draft."
            )
        if name not in (*DecodeSettings._fields, *_UNSUPPORTED):
            known = ", ".join(DecodeSettings._fields)
            raise ValueError(f"temperature_sample's argument {name} is not known; known are {known}.")
        if isinstance(value, Tracer):
            raise ValueError(f"temperature_sample's {name} is traced; it must be known when the program is compiled.")
        if name in _RULES:
            is_right, rule = _RULES[name]
            if not is_right(value):
                raise ValueError(f"temperature_sample's {name} is {value!r}; it must be {rule}.")
    return DecodeSettings(**{name: value for name, value in bound.items() if name not in _UNSUPPORTED})


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _is_temperature(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype.kind in "fiu" and bool(np.all((array >= 0) & (array <= HOTTEST)))


def is_temperature(value: Any) -> bool:
    """Whether it is one number that may be a temperature."""
    return np.ndim(value) == 0 and _is_temperature(value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_is_temperature, f"a number, or one for each input, each 0 to {HOTTEST:g}"),
    "topk": (_is_count, "a whole number, 0 (all ids) or more"),
    "topp": (lambda x: is_temperature(x) and float(x) <= 1, "a number, 0 (all ids) to 1"),
    "max_decode_steps": (lambda x: x is None or _is_count(x), "a whole number, or None"),
    "max_decode_steps_hard_limit": (lambda x: x is None or _is_count(x), "a whole number, or None"),
    "rescale_log_probs": (lambda x: isinstance(x, bool), "True or False"),
}


def _bindings(decode_fn: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(decode_fn, functools.partial):
        return {**_bindings(decode_fn.func), **decode_fn.keywords}
    name = getattr(inspect.unwrap(decode_fn), "__name__", repr(decode_fn))
    if name != "temperature_sample":
        raise ValueError(
            f"decode_fn is {name}; speculative decoding draws as t5x's temperature_sample does: bind decode_fn = "
            "@decoding.temperature_sample."
        )
    if not hasattr(decode_fn, "__wrapped__"):  # the function itself, which gin's bindings do not reach
        return {}
    try:
        return gin.get_bindings(decode_fn)
    except ValueError as error:
        raise ValueError(
            "decode_fn is a reference to temperature_sample in a scope, or wrapped by another function; bind decode_fn "
            "= @decoding.temperature_sample, without a scope, and its arguments likewise."
        ) from error
