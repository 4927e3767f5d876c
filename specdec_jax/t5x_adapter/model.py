"""t5x's EncoderDecoderModel with a draft model beside it, decoding speculatively."""

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import flax.core
import numpy as np
from jaxtyping import Array
from t5x import decoding, models  # pyright: ignore[reportMissingImports]

from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.base import Decoder
from specdec_jax.settings import find_rule
from specdec_jax.t5x_adapter import batches
from specdec_jax.t5x_adapter.network import Placement, to_t5
from specdec_jax.t5x_adapter.restore import DRAFT
from specdec_jax.t5x_adapter.settings import is_temperature, read_settings
from specdec_jax.types import Inputs, Params


class SpeculativeEncoderDecoderModel(models.EncoderDecoderModel):
    """An EncoderDecoderModel whose predictions are decoded with guesses of a draft model, from the same law.

    Loss, scores and training are those of the target alone; training leaves the draft as it is. The draft's weights
    live in flax_mutables["draft"], where t5x initializes, shards and restores them (see `restore_draft`).

    What is said of `decoding.temperature_sample` in gin holds here: temperature, topk, topp, max_decode_steps and
    rescale_log_probs are read from its bindings, and num_decodes from DecoderParams.
    """

    def __init__(
        self,
        module: Any,
        draft_module: Any,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any,
        decode_fn: Callable[..., Any] = decoding.temperature_sample,
        feature_converter_cls: Callable[..., Any] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: Any = None,
        default_decoder_params: models.DecoderParams | None = None,
        gamma: Any = 4,  # gin's values may be anything, so these are checked
        rule: Any = None,
        lenience: Any = 1.0,
        draft_temperature: Any = None,
        seed: Any = 0,
        drafter: Callable[[Decoder], Any] = ModelDrafter,
        prompt_with_targets: bool = False,
        partitioner: Any = None,
    ):
        """Checks everything that can be checked before any weight is read.

        Args:
          module: the target, t5x's network.Transformer.
          draft_module: the draft, another one.
          input_vocabulary: as t5x has it.
          output_vocabulary: likewise; its ids are those that can be drawn.
          optimizer_def: likewise.
          decode_fn: temperature_sample, whose bindings are the settings of the draws.
          feature_converter_cls: as t5x has it.
          label_smoothing: likewise.
          z_loss: likewise.
          loss_normalizing_factor: likewise.
          default_decoder_params: likewise; num_decodes and return_all_decodes.
          gamma: guesses per target call; 0 decodes with the target alone, in the same loop, which is what a speed-up
            has to be measured against.
          rule: of verification: "token", "block", "coupled", or a function like those; None for block, or for token
            where lenience is below 1.
          lenience: 1 is exact; below 1 accepts more and changes the law.
          draft_temperature: the draft's own temperature; None for the target's.
          seed: together with t5x's rng, which is the same in every launch, the source of all draws.
          drafter: makes what guesses out of the draft model.
          prompt_with_targets: outputs go on from the targets that are given; each call may say otherwise.
          partitioner: t5x's, for the mesh that both models are split over, which has to be the launch's own; None for
            one device.

        Raises:
          ValueError: the models differ in their vocabulary, or a setting is out of its range.
        """
        self.draft_module = draft_module
        self._target, self._draft = to_t5(module, "module"), to_t5(draft_module, "draft_module")
        if self._target.vocab_size != self._draft.vocab_size:
            raise ValueError(
                f"the draft's vocab_size is {self._draft.vocab_size} and the target's {self._target.vocab_size}; "
                "use two models with the same vocabulary."
            )
        for name, vocabulary in (("output", output_vocabulary), ("input", input_vocabulary)):
            if vocabulary.vocab_size > self._target.vocab_size:
                raise ValueError(
                    f"the {name} vocabulary has {vocabulary.vocab_size} ids and the models only "
                    f"{self._target.vocab_size} rows; use the vocabulary that they were trained with."
                )
        if type(gamma) is not int or not 0 <= gamma <= 1000:
            raise ValueError(f"gamma is {gamma!r}; it must be 1 to 1000, or 0 for the target alone.")
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed!r}; it must be a whole number, 0 to 2**32 - 1.")
        if isinstance(lenience, bool) or not isinstance(lenience, float | int):
            raise ValueError(f"lenience is {lenience!r}; it must be a number, above 0 and at most 1.")
        self._rule = find_rule(rule, lenience)
        if draft_temperature is not None and not is_temperature(draft_temperature):
            raise ValueError(f"draft_temperature is {draft_temperature!r}; it must be one number, 0 or more, or None.")
        self._check_num_decodes((default_decoder_params or models.DecoderParams()).num_decodes)
        settings = read_settings(decode_fn)
        settings.sampling(np.size(settings.temperature), 1, 1)  # raises what it has to say
        self._gamma, self._lenience, self._seed = gamma, lenience, seed
        self._draft_temperature, self._drafter = draft_temperature, drafter
        self._prompt_with_targets = prompt_with_targets
        self.placement = Placement(partitioner, self._draft)
        super().__init__(
            module=module,
            input_vocabulary=input_vocabulary,
            output_vocabulary=output_vocabulary,
            optimizer_def=optimizer_def,
            decode_fn=decode_fn,
            feature_converter_cls=feature_converter_cls,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_normalizing_factor=loss_normalizing_factor,
            default_decoder_params=default_decoder_params,
        )

    @staticmethod
    def _check_num_decodes(num_decodes: Any) -> None:
        if type(num_decodes) is not int or num_decodes < 1:
            raise ValueError(f"num_decodes is {num_decodes!r}; it must be a whole number, 1 or more.")

    def get_initial_variables(
        self, rng: Array, input_shapes: Mapping[str, Any], input_types: Mapping[str, Any] | None = None
    ) -> Any:
        """The target's variables as t5x has them, and the draft's as "draft" and "draft_axes"."""
        initial = super().get_initial_variables
        variables = flax.core.unfreeze(initial(rng, input_shapes, input_types))
        beside = copy.copy(self)
        beside.module = self.draft_module
        draft = models.EncoderDecoderModel.get_initial_variables(beside, rng, input_shapes, input_types)
        variables[DRAFT] = flax.core.unfreeze(draft["params"])
        variables[f"{DRAFT}_axes"] = self.placement.axes_of_draft(draft["params_axes"])
        return flax.core.freeze(variables)

    def loss_fn(
        self, params: Params, batch: Mapping[str, Array], dropout_rng: Array | None, flax_mutables: Any = None
    ) -> Any:
        """The target's loss and metrics, in the form that t5x's trainer wants for a state with flax_mutables."""
        loss, metrics = super().loss_fn(params, batch, dropout_rng)
        return loss, metrics if flax_mutables is None else (metrics, flax_mutables)

    def eval_fn(self, params: Params, batch: Mapping[str, Array], flax_mutables: Any = None) -> Any:
        """The target's loss and metrics."""
        return super().loss_fn(params, batch, None)

    def predict_batch(
        self, params: Params, batch: Mapping[str, Array], rng: Array | None = None, flax_mutables: Any = None
    ) -> Array:
        """Tokens int32 [batch, length]; see `predict_batch_with_aux`."""
        return self.predict_batch_with_aux(params, batch, rng, flax_mutables=flax_mutables)[0]

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Mapping[str, Array],
        rng: Array | None = None,
        decoder_params: MutableMapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: Any = None,
        prompt_with_targets: bool | None = None,
        flax_mutables: Any = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Decodes a batch speculatively.

        Args:
          params: the target's weights.
          batch: what t5x's feature converter makes; the output is as long as decoder_input_tokens.
          rng: t5x's key of this batch.
          decoder_params: arguments of temperature_sample for this call, eos_id, or decode_rng in place of rng.
          return_all_decodes: all of num_decodes, not only the likeliest.
          num_decodes: independent outputs of each input, sorted by their score, the best one last.
          prompt_with_targets: outputs go on from the decoder input, up to its first end or padding; t5x would also
            force what comes behind an end inside the prompt.
          flax_mutables: t5x passes the train state's; "draft" holds the draft's weights.

        Returns:
          tokens int32 [batch, length], or [batch, num_decodes, length]; and, each [batch] or [batch, num_decodes]:
          scores, the sum of the target's log-probabilities, of the law that was sampled from unless rescale_log_probs
          is False (so 0 where it is greedy); num_tokens, the prompt's not counted; num_target_calls, accepted, drafted,
          trials, alpha and finish_reason (see DecodingResult).

        Raises:
          ValueError: the draft's weights are missing, or a setting is out of its range.
        """
        if flax_mutables is None or DRAFT not in flax_mutables:
            raise ValueError(
                f"flax_mutables has no {DRAFT!r}; pass the train state's (t5x does), and restore it with "
                "utils.RestoreCheckpointConfig.state_transformation_fns = [@t5x_adapter.restore_draft]."
            )
        default = self._default_decoder_params
        num_decodes = default.num_decodes if num_decodes is None else num_decodes
        all_decodes = default.return_all_decodes if return_all_decodes is None else return_all_decodes
        given = dict(decoder_params or {})
        rng = batches.choose_rng(rng, given.pop("decode_rng", None))
        eos_id = given.pop("eos_id", self.output_vocabulary.eos_id or 1)
        if type(eos_id) is not int or not 0 <= eos_id < self._target.vocab_size:
            raise ValueError(f"eos_id is {eos_id!r}; it must be one of the models' {self._target.vocab_size} ids.")
        settings = read_settings(self.decode_fn, given)
        self._check_num_decodes(num_decodes)
        if prompt_with_targets is None:
            prompt_with_targets = self._prompt_with_targets
        num_inputs, length = batch["decoder_input_tokens"].shape
        num_ids, rows = self.output_vocabulary.vocab_size, num_inputs * num_decodes

        prompt = batches.read_prompt(batch["decoder_input_tokens"], eos_id) if prompt_with_targets else None
        inputs = Inputs(*(batches.repeat(x, num_decodes) for x in (batch["encoder_input_tokens"], prompt)))
        # The weights stay as t5x's jit hands them over. Another layout would have to be made of them in every batch: on
        # a CPU that costs more than it saves, and a TPU's compiler does it by itself, before the loop.
        decode = functools.partial(
            speculative_decode,
            drafter=self._drafter(self.placement.draft),
            draft_params=flax_mutables[DRAFT],
            gamma=self._gamma,
            draft_sampling=settings.sampling(num_inputs, num_decodes, num_ids, self._draft_temperature),
            lenience=self._lenience,
        )
        result = (decode if self._gamma else autoregressive_decode)(
            self.placement.target(self._target),
            params,
            inputs=inputs,
            max_length=length,
            limits=batches.limits(inputs.prefix, rows, length, settings.most_steps(length)),
            sampling=settings.sampling(num_inputs, num_decodes, num_ids),
            seeds=batches.seeds(rng, self._seed, rows),
            eos_ids=(eos_id,),
            rule=self._rule,
        )
        tokens, aux = batches.read_result(result, inputs.prefix, num_decodes, settings.rescale_log_probs)
        if all_decodes:
            return tokens, aux
        return tokens[:, -1], {name: value[:, -1] for name, value in aux.items()}
