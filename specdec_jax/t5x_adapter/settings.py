"""What t5x's gin files say about decoding, read from where t5x users write it: temperature_sample's own arguments."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gin
import numpy as np

from specdec_jax.sampling import Sampling, make_sampling

_UNSUPPORTED = ("state_callback_fn", "logit_callback_fn", "max_decode_steps_hard_limit")
_KNOWN = ("temperature", "topk", "topp", "max_decode_steps", "rescale_log_probs", *_UNSUPPORTED)


class DecodeSettings(NamedTuple):
    """temperature_sample's arguments, with t5x's defaults and meaning.

    Attributes:
      temperature: one number, or one per input; up to 1e-4 is argmax.
      topk: ids to keep; 1, t5x's default, is argmax; 0 keeps all.
      topp: probability to keep; 0 keeps all.
      max_decode_steps: tokens after the prompt; None for as many as fit.
      rescale_log_probs: scores under the distribution that was sampled from, instead of the raw one.
    """

    temperature: Any = 1.0
    topk: int = 1
    topp: float = 0.0
    max_decode_steps: int | None = None
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
        rows = np.where(self.topk == 1, 0.0, rows).astype(np.float32)  # the best id alone: nothing to draw
        return make_sampling(
            batch * num_decodes, temperature=rows, top_k=self.topk, top_p=self.topp or 1.0, num_ids=num_ids
        )


def read_settings(decode_fn: Callable[..., Any], given: Mapping[str, Any] | None = None) -> DecodeSettings:
    """The settings that a decode function was bound to, by gin or functools.partial.

    Args:
      decode_fn: t5x's temperature_sample.
      given: arguments of this call (t5x's decoder_params), which go first.

    Raises:
      ValueError: another decode function, or an argument that speculative decoding cannot honour.
    """
    bound = {**_bindings(decode_fn), **(given or {})}
    for name, value in bound.items():
        if name not in _KNOWN:
            raise ValueError(f"temperature_sample's argument {name} is not known; known are {', '.join(_KNOWN)}.")
        if name in _UNSUPPORTED and value is not None:
            raise ValueError(
                f"temperature_sample's {name} is {value!r}; speculative decoding verifies several tokens in one call "
                "and cannot honour it: unbind it, or decode without a draft."
            )
    return DecodeSettings(**{name: value for name, value in bound.items() if name not in _UNSUPPORTED})


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
    return gin.get_bindings(decode_fn)
