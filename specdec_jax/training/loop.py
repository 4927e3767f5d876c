"""The training loop: batches in, progress lines and checkpoints out, resumable at every save."""

import collections
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specdec_jax.models.t5 import T5
from specdec_jax.training import saves
from specdec_jax.training.batches import Batch, Mixture, batches, gather, into_buckets
from specdec_jax.training.examples import Examples
from specdec_jax.training.losses import Totals
from specdec_jax.training.parametrization import initial_raw, unfold
from specdec_jax.training.step import (
    Optimization,
    Teacher,
    TrainState,
    ValidationStep,
    averaged,
    initial_state,
    learning_rate,
    make_train_step,
    make_validation_step,
)
from specdec_jax.training.text import TaskName
from specdec_jax.types import Params

# Steps the host may run ahead of the device: enough to keep it busy, few enough that a time budget is kept.
_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When training ends and what happens on the way; give exactly one of `steps` and `minutes`.

    Attributes:
      steps: total steps, earlier processes' included.
      minutes: total minutes, earlier processes' and compilation included.
      log_every: steps between progress lines.
      validate_every: steps between validations.
      validation_examples: examples of each task to validate on.
      save_minutes: minutes between saves.
    """

    steps: int | None = None
    minutes: float | None = None
    log_every: int = 50
    validate_every: int = 500
    validation_examples: int = 256
    save_minutes: float = 5.0

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.minutes) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(f"Schedule has steps={self.steps}, minutes={self.minutes}: give one of them, above 0")
        if min(self.log_every, self.validate_every, self.validation_examples) < 1:
            raise ValueError("Schedule.log_every, validate_every and validation_examples must be at least 1")

    def fraction(self, step: int, elapsed: float) -> float:
        """Share of training done after `step` steps and `elapsed` seconds; 1 or more is the end."""
        return step / self.steps if self.steps is not None else elapsed / (60 * (self.minutes or 1))


class Trained(NamedTuple):
    """What training returns.

    Attributes:
      params: plain T5 weights, the running mean.
      state: to go on from.
      validation: task name to validation means; see `validate`.
    """

    params: Params
    state: TrainState
    validation: dict[TaskName, dict[str, float]]


def train(
    model: T5,
    examples: Mapping[TaskName, Examples],
    validation: Mapping[TaskName, Examples],
    run_dir: str | os.PathLike[str],
    *,
    mixture: Mixture,
    optimization: Optimization,
    schedule: Schedule,
    teacher: Teacher | None = None,
    initial_params: Params | None = None,
) -> Trained:
    """Trains a model, going on from the newest save in `run_dir` if there is one.

    Progress goes to stderr and, as JSON lines, to `run_dir/metrics.jsonl`. Every few minutes and at the end
    the state goes to `run_dir/resume_<step>.msgpack` and the running mean's plain weights to the T5X
    checkpoint `run_dir/checkpoint_<step>`; the last two of both are kept.

    Args:
      model: sizes and activation dtype.
      examples: training examples of every task in the mixture.
      validation: validation examples; each task is validated on the first few.
      run_dir: directory to write to; made if missing.
      mixture: of the training batches.
      optimization: how a step changes the weights.
      schedule: when to stop, log, validate and save.
      teacher: frozen target model to distil from, or None to train on the text alone.
      initial_params: plain T5 weights to start from, or None for random ones drawn from the mixture's seed.

    Returns:
      Weights, state and the last validation.

    Raises:
      ValueError: the teacher's vocabulary is not the model's, the mixture names a task without examples, or
        `run_dir` holds a run with other settings.
    """
    if teacher is not None and teacher.model.vocab_size != model.vocab_size:
        sizes = f"{teacher.model.vocab_size}, the trained model's {model.vocab_size}"
        raise ValueError(f"the target model's vocabulary size is {sizes}: both must be equal")
    run_dir = pathlib.Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = f"{model.config} {mixture} {optimization} distilled={teacher is not None}"
    raw = initial_raw(model, mixture.seed) if initial_params is None else unfold(initial_params, model)
    state = initial_state(raw, optimization)
    start = saves.restore(run_dir, state, settings=settings) or saves.Saved(state, 0, 0.0)
    state = jax.tree.map(jnp.asarray, start.state)

    log = _Log(run_dir / "metrics.jsonl", time.monotonic() - start.elapsed)
    num_weights = sum(weight.size for weight in jax.tree.leaves(raw))
    log.write(event="resume" if start.step else "start", step=start.step, weights=num_weights)
    held_out = validation_batches(validation, mixture, schedule.validation_examples)
    teacher_model, teacher_params = (None, None) if teacher is None else (teacher.model, jax.device_put(teacher.params))
    train_step = make_train_step(model, optimization, teacher_model)
    validation_step = make_validation_step(model, optimization, teacher_model)

    step, last_save = start.step, log.elapsed
    recent: list[Totals] = []
    in_flight: collections.deque[Totals] = collections.deque()
    since, interval_tokens = log.elapsed, 0
    stream = batches(examples, mixture, start_step=step)
    validated: tuple[int, dict[TaskName, dict[str, float]]] = (-1, {})
    while (fraction := schedule.fraction(step, log.elapsed)) < 1:
        batch = next(stream)
        state, sums = train_step(state, batch, teacher_params, jnp.float32(fraction))
        step += 1
        recent.append(sums)
        in_flight.append(sums)
        interval_tokens += int(np.count_nonzero(batch.targets))
        if len(in_flight) > _STEPS_IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
        if step % schedule.log_every == 0:
            rate = learning_rate(jnp.int32(step), jnp.float32(fraction), optimization)
            means = _means(recent, with_matches=False, distilled=teacher is not None)
            speed = interval_tokens / (log.elapsed - since)
            log.write(event="train", step=step, **means, lr=float(rate), tokens_per_s=speed, done=fraction)
            recent, since, interval_tokens = [], log.elapsed, 0
        if step % schedule.validate_every == 0:
            validated = step, validate(validation_step, averaged(state, model), held_out, teacher_params)
            log.validation(*validated)
            since, interval_tokens = log.elapsed, 0
        if log.elapsed - last_save >= 60 * schedule.save_minutes:
            _save(run_dir, model, saves.Saved(state, step, log.elapsed), settings)
            last_save = since = log.elapsed
            interval_tokens = 0
    params = averaged(state, model)
    if validated[0] != step:
        validated = step, validate(validation_step, params, held_out, teacher_params)
        log.validation(*validated)
    _save(run_dir, model, saves.Saved(state, step, log.elapsed), settings)
    log.write(event="end", step=step)
    return Trained(params, state, validated[1])


def validation_batches(
    tasks: Mapping[TaskName, Examples], mixture: Mixture, num_examples: int
) -> dict[TaskName, list[Batch]]:
    """Fixed batches of each task's first examples, in the training shapes."""
    return {
        name: [
            gather(examples, selection)
            for selection in into_buckets(examples, np.arange(min(num_examples, examples.size)), mixture.buckets)
        ]
        for name, examples in tasks.items()
    }


def validate(
    validation_step: ValidationStep,
    params: Params,
    held_out: Mapping[TaskName, list[Batch]],
    teacher_params: Params | None,
) -> dict[TaskName, dict[str, float]]:
    """Means over the target tokens of each task; with a teacher, agreement and overlap too."""
    return {
        name: _means(
            [validation_step(params, batch, teacher_params) for batch in task_batches],
            with_matches=True,
            distilled=teacher_params is not None,
        )
        for name, task_batches in held_out.items()
    }


def _means(sums: list[Totals], *, with_matches: bool, distilled: bool) -> dict[str, float]:
    total = Totals(*(np.sum(column) for column in zip(*jax.device_get(sums), strict=True)))
    names = ["loss"]
    if distilled:
        names += ["cross_entropy", "divergence"]
    if with_matches:
        names += ["correct"] + ["agreement", "overlap"] * distilled
    return {name: float(getattr(total, name)) / max(1.0, float(total.tokens)) for name in names}


def _save(run_dir: pathlib.Path, model: T5, saved: saves.Saved, settings: str) -> None:
    from specdec_jax.checkpoints.t5x import save_checkpoint  # tensorstore is slow to import

    if not (run_dir / f"checkpoint_{saved.step}").exists():
        save_checkpoint(run_dir, jax.device_get(averaged(saved.state, model)), step=saved.step)
    saves.save(run_dir, saved, settings=settings)


class _Log:
    """Progress lines on stderr and JSON lines in a file, stamped with the seconds of training so far."""

    def __init__(self, path: pathlib.Path, started: float):
        self._path, self._started = path, started
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def write(self, **fields: str | int | float) -> None:
        fields["elapsed"] = round(self.elapsed, 1)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
        shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items() if k != "event")
        self._console.print(f"{fields['event']}: {' '.join(shown)}")

    def validation(self, step: int, tasks: Mapping[TaskName, Mapping[str, float]]) -> None:
        for name, means in tasks.items():
            self.write(event="validation", step=step, task=name, **means)
