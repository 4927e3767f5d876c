"""What a run is told: which models, and how to decode with them. Checked before anything is read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec_jax import verification
from specdec_jax.adaptation import Adaptation, make_adaptation
from specdec_jax.drafters import named
from specdec_jax.models.t5 import T5Config
from specdec_jax.sampling import HOTTEST, Sampling, make_sampling

_LARGEST = 2**17  # of lengths and batches

RULES = {"token": verification.token, "block": verification.block, "coupled": verification.coupled}
"""The rules of verification by their names."""


def find_rule(rule: Any, lenience: float | int) -> verification.Rule:
    """The rule of a name, or a rule itself; None for the one that is default at this lenience.

    Raises:
      ValueError: there is no such rule, or the lenience is out of range or means nothing to it.
    """
    if not (rule is None or callable(rule) or rule in tuple(RULES)):
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(map(repr, RULES))}, or None.")
    named: Any = RULES[rule] if isinstance(rule, str) else rule
    found = verification.default_rule(lenience) if named is None else named
    verification.check_lenience(found, lenience)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
    """Where two models and their vocabulary are.

    Attributes:
      target_checkpoint: the target, a T5X checkpoint, a folder of Hugging Face's, or a "demo:" name.
      draft_checkpoint: the draft, likewise; None for a drafter without a model.
      vocabulary: a SentencePiece .model file, "bytes", or "demo:vocabulary".
      extra_ids: sentinel ids to append to the vocabulary.
      target_config: sizes that the checkpoint must have; None reads them off the checkpoint.
      draft_config: likewise.
      dtype: "float32" or "bfloat16", of weights and activations; None for float32 on CPU and bfloat16 elsewhere.
      drafter: what guesses: "model", "unigram", "bigram", "copy", "one_shot", "random", "mixture" or "hierarchical".
      draft_table: a table that `specdec drafter build` wrote, or a "demo:" name; None for drafters without one.
    """

    target_checkpoint: str
    draft_checkpoint: str | None
    vocabulary: str
    extra_ids: int = 0
    target_config: T5Config | None = None
    draft_config: T5Config | None = None
    dtype: str | None = None
    drafter: str = "model"
    draft_table: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'float32', 'bfloat16' or None (by device).")
        if self.drafter not in named.NAMES:
            raise ValueError(f"drafter is {self.drafter!r}; it must be one of {', '.join(map(repr, named.NAMES))}.")
        if self.drafter in named.WITH_MODEL and self.draft_checkpoint is None:
            raise ValueError(f"draft_checkpoint is None, and the drafter {self.drafter!r} needs a draft model.")
        if self.drafter in named.WITH_TABLE and self.draft_table is None:
            raise ValueError(
                f"draft_table is None, and the drafter {self.drafter!r} needs one; specdec drafter build makes it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are decoded.

    Attributes:
      gamma: guesses per step.
      temperature: 0 is argmax.
      top_k: how many ids to keep; 0 for all.
      top_p: probability to keep; 1 for all.
      min_p: least likelihood to keep, as a share of the likeliest id's; 0 for all.
      min_decode_length: tokens before the first that may be an output's end.
      forbidden_ids: ids never to emit.
      repetition_penalty: above 1 makes ids that came before less likely; 1 for no penalty.
      no_repeat_ngram: length of a run of tokens that may not come twice; 0 for no such rule.
      draft_temperature: the draft's own temperature, which changes the speed and not the law; None for the target's.
      rule: of verification, "token", "block" or "coupled"; None for "block", or "token" where lenience is below 1.
      lenience: 1 is exact; below 1 accepts more.
      seed: where every row's own seed comes from, together with its index among all inputs.
      max_decode_length: tokens of an output at most, its end included.
      max_input_length: tokens of an input at most, task prefix and end included.
      batch_size: inputs decoded together.
      task_prefix: what is put before each input.
      adaptation: what `specdec tune` found out, so that each row chooses in each step how many guesses it makes, gamma
        at most: the fields of `adaptation.Adaptation`, of which costs has gamma + 1 entries; None: always gamma.
      mesh: (data, model): devices that batches are split over, and devices that the models are, as in (2, 4) on eight;
        None for one device. Changes no output, up to rounding.
    """

    gamma: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_decode_length: int = 0
    forbidden_ids: tuple = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    draft_temperature: float | None = None
    rule: str | None = None
    lenience: float = 1.0
    seed: int = 0
    max_decode_length: int = 64
    max_input_length: int = 512
    batch_size: int = 1
    task_prefix: str = ""
    adaptation: Mapping | None = None
    mesh: tuple | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "max_decode_length", "max_input_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
            if getattr(self, name) > _LARGEST:
                raise ValueError(f"{name} is {getattr(self, name)}; more than {_LARGEST} is surely a mistake.")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more.")
        if self.draft_temperature is not None and not 0 <= self.draft_temperature <= HOTTEST:
            raise ValueError(f"draft_temperature is {self.draft_temperature}; it must be 0 to {HOTTEST:g}.")
        self.verification_rule()  # raises what it has to say about the rule and the lenience
        if self.min_decode_length < 0:
            raise ValueError(f"min_decode_length is {self.min_decode_length}; it must be 0 or more.")
        if self.min_decode_length > self.max_decode_length:
            raise ValueError(
                f"min_decode_length is {self.min_decode_length}; it must not be above max_decode_length, "
                f"{self.max_decode_length}."
            )
        if not all(type(i) is int and 0 <= i < 2**31 for i in self.forbidden_ids):
            raise ValueError(f"forbidden_ids is {self.forbidden_ids}; it must hold ids, as (3, 4) does.")
        if self.mesh is not None:
            if len(self.mesh) != 2 or not all(type(n) is int and n >= 1 for n in self.mesh):
                raise ValueError(f"mesh is {self.mesh}; it must be two numbers of devices, (data, model), or None.")
            if self.batch_size % self.mesh[0]:
                raise ValueError(
                    f"batch_size is {self.batch_size}; it must be a multiple of {self.mesh[0]}, the devices that "
                    f"batches are split over (mesh is {self.mesh})."
                )
        self.sampling(1)  # raises what it has to say about the settings of the draws
        self.adaptive()  # and about these

    def verification_rule(self) -> verification.Rule:
        """The rule of verification."""
        return find_rule(self.rule, self.lenience)

    def adaptive(self) -> Adaptation | None:
        """The adaptation as arrays."""
        return None if self.adaptation is None else make_adaptation(self.gamma, **self.adaptation)

    def sampling(self, batch: int, num_ids: int | None = None, *, of_draft: bool = False) -> Sampling:
        """The settings of the draws, for a batch."""
        own = self.draft_temperature if of_draft else None
        return make_sampling(
            batch,
            temperature=self.temperature if own is None else own,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            min_length=self.min_decode_length,
            forbidden_ids=self.forbidden_ids,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
            num_ids=num_ids,
        )
