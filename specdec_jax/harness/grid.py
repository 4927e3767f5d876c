"""Measures a plan: acceptance, costs and walltime of every task, draft, temperature and gamma, entry by entry."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from specdec_jax import layouts, packaged, theory
from specdec_jax.comparison import find_differences
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generation import (
    Batch,
    Pair,
    decode_plainly,
    default_dtype,
    load_model,
    make_batches,
    row_seed,
)
from specdec_jax.harness import acceptance, costs, simulated, walltime
from specdec_jax.harness.paper import LENIENCES
from specdec_jax.harness.plan import Plan, Task
from specdec_jax.harness.records import Record
from specdec_jax.models.t5 import T5
from specdec_jax.models.t5_config import T5Config
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import GREEDY_BELOW
from specdec_jax.settings import Settings, find_rule
from specdec_jax.sharding import fetch
from specdec_jax.types import Inputs, Params
from specdec_jax.vocabularies import Vocabulary, load_vocabulary

Report = Callable[[str, int, int], None]
"""Told what is being measured, how many entries are there, and of how many."""


def run(plan: Plan, *, with_cells: bool, report: Report = lambda what, done, total: None) -> dict[str, Any]:
    """Measures what is missing of a plan.

    Args:
      plan: what to measure.
      with_cells: costs and walltime too, not acceptance alone.
      report: told about progress.

    Returns:
      The document, which is also at plan.path("table2", ".json") after every entry: sections acceptance, calls and
      cells.

    Raises:
      ValueError: a checkpoint, vocabulary or file of inputs cannot be used, or results are there that were made with
        other settings.
    """
    path = plan.path("table2", ".json")
    record = Record.open(path, name=plan.name, simulated=plan.simulated, settings=plan.settings())
    total = len(plan.temperatures) * sum(len(task.drafts) for task in plan.tasks)
    done = 0
    for task in plan.tasks:
        models = TaskModels(plan, task)
        for draft in task.drafts:
            for temperature in map(float, plan.temperatures):
                report(f"{task.name}, {draft}, temperature {temperature:g}", done, total)
                key = {"task": task.name, "draft": draft, "temperature": temperature}
                found = record.find("acceptance", **key) or record.add(
                    "acceptance", key | models.acceptance(draft, temperature)
                )
                if with_cells:
                    _add_cells(record, plan, task, models, key, found)
                done += 1
    report("done", total, total)
    return record.document


def _add_cells(
    record: Record, plan: Plan, task: Task, models: "TaskModels", key: dict[str, Any], found: dict[str, Any]
) -> None:
    batch_size = plan.batch_size
    calls_key = {"task": task.name, "draft": key["draft"], "batch_size": batch_size}
    calls = record.find("calls", **calls_key)
    if "best" in plan.gammas and calls is None:
        calls = record.add("calls", calls_key | _measure_calls(plan, models, key))
    for gamma, choice in _gammas(plan, task, key, found["alpha"], calls).items():
        cell_key = key | {"gamma": gamma, "batch_size": batch_size}
        if record.find("cells", **cell_key) is None:
            record.add("cells", cell_key | {"gamma_choice": choice} | _cell(plan, task, models, cell_key, found))


def _measure_calls(plan: Plan, models: "TaskModels", key: dict[str, Any]) -> dict[str, Any]:
    """c, and the cost of verification at every width, of calls alone."""
    work = models.works(key["draft"], key["temperature"], plan.max_gamma)[0]
    widths = list(range(1, plan.max_gamma + 2))
    blocks, draft = costs.measure_calls(work, widths, rounds=plan.rounds)
    return {
        "c": costs.ratio(draft, blocks[0]),
        "verification": {
            str(width): costs.ratio(block, blocks[0]) for width, block in zip(widths, blocks, strict=True)
        },
        "seconds": {"target": dict(zip(map(str, widths), blocks, strict=True)), "draft": draft},
    }


def _gammas(
    plan: Plan, task: Task, key: dict[str, Any], alpha: float, calls: dict[str, Any] | None
) -> dict[int, list[str]]:
    """Each gamma to measure, with the names that stand for it."""
    gammas: dict[int, list[str]] = {}
    for choice in plan.gammas:
        if choice == "paper":
            row = plan.paper_row(task, key["draft"], key["temperature"])
            if row is not None:
                gammas.setdefault(row.gamma, []).append("paper")
        elif choice == "best":
            assert calls is not None
            gammas.setdefault(best_gamma(alpha, calls, plan.max_gamma), []).append("best")
        else:
            gammas.setdefault(choice, []).append("given")
    return gammas


def best_gamma(alpha: float, calls: dict[str, Any], max_gamma: int) -> int:
    """The gamma from 1 on with the greatest speedup by Theorem 3.8, verification at its measured cost."""

    def predicted(gamma: int) -> float:
        return theory.speedup(alpha, gamma, calls["c"], calls["verification"][str(gamma + 1)])

    return max(range(1, max_gamma + 1), key=predicted)


def _cell(plan: Plan, task: Task, models: "TaskModels", key: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    greedy = key["temperature"] < GREEDY_BELOW
    works = models.works(key["draft"], key["temperature"], key["gamma"])
    cost = costs.measure(works[0], rounds=plan.rounds)
    pairs = walltime.measure(
        works,
        eos_ids=models.eos_ids,
        repeats=plan.repeats,
        margins=models.margins if (greedy or plan.rule == "coupled") and not plan.simulated else None,
    )
    speedup = walltime.geometric_mean([pair.speedup for pair in pairs])
    calls = sum(pair.calls for pair in pairs)
    margins = [margin for pair in pairs for margin in pair.margins]
    outputs = "law" if pairs[0].equal is None else "equal"
    if margins:  # a near tie may fall either way; anything else would be a fault
        outputs = f"{len(margins)} of {len(pairs) * plan.batch_size} differ, where logits are {max(margins):.2g} apart"
    return {
        "alpha": found["alpha"],
        "alpha_error": found["alpha_error"],
        "c": cost.c,
        "verification": cost.verification,
        "loop_efficiency": cost.loop_efficiency,
        "efficiency_alone": cost.efficiency_alone,
        "interplay": cost.interplay,
        "overhead": cost.overhead,
        "plain_efficiency": cost.plain_efficiency,
        "predicted": theory.speedup(found["alpha"], key["gamma"], cost.c),
        "predicted_from_tokens": walltime.predict_from_tokens(pairs, cost),
        "speedup": speedup.mean,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "tokens_per_call": sum(pair.tokens for pair in pairs) / calls,
        "outputs": "simulated" if plan.simulated else outputs,
        "num_prompts": len(pairs) * plan.batch_size,
        "seconds": cost._asdict(),
        "prompts": [pair._asdict() for pair in pairs],
    }


def advice(document: dict[str, Any]) -> list[str]:
    """The best gamma of each task, draft and temperature; plainly, where speculation does not pay."""
    lines = []
    for cell in document.get("cells", []):
        if "best" not in cell["gamma_choice"]:
            continue
        where = f"{cell['task']}, {cell['draft']}, temperature {cell['temperature']:g}"
        predicted = cell["predicted_from_tokens"]
        told = f"{where}: best gamma {cell['gamma']}, predicted {predicted:.2f}x, measured {cell['speedup']:.2f}x."
        if min(predicted, cell["speedup"]) < 1:
            told = f"WARNING: {told} Speculation with this draft does not pay here: decode with the target alone."
        lines.append(told)
    return lines


class TaskModels:
    """A task's models and inputs, read when they are first needed; one draft at a time."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self._plan, self._task = plan, task
        self._target: Any = None
        self._draft: tuple[str, Any] | None = None
        self._outputs: dict[float, tuple[list[Batch], list[DecodingResult]]] = {}

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The task's vocabulary."""
        assert self._task.vocabulary is not None
        return load_vocabulary(packaged.resolve(self._task.vocabulary), self._task.extra_ids)

    @functools.cached_property
    def _encoded(self) -> list[list[int]]:
        return read_inputs(self._task, self.vocabulary)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What ends an output; nothing where there is no vocabulary."""
        return () if self._task.simulated else (self.vocabulary.eos_id,)

    def _load(self, model: str | T5Config, seed: int) -> Any:
        if isinstance(model, T5Config):
            dtype = self._plan.dtype or default_dtype()
            return simulated.random_model(dataclasses.replace(model, dtype=dtype), seed=seed)
        return load_model(model, dtype=self._plan.dtype)

    def pair(self, draft: str) -> tuple[T5, Params, ModelDrafter, Params]:
        """(target, its parameters, what drafts, its parameters)."""
        if self._target is None:
            self._target = self._load(self._task.target, seed=0)
        if self._draft is None or self._draft[0] != draft:
            self._draft = None  # frees the other one first
            self._draft = (draft, self._load(self._task.drafts[draft], seed=1))
        sizes = self._target[0].vocab_size, self._draft[1][0].vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"task {self._task.name}: the draft {draft} has a vocabulary of {sizes[1]} rows and the target one of "
                f"{sizes[0]}; use models with the same vocabulary."
            )
        draft_model, draft_params = self._draft[1]
        return *self._target, ModelDrafter(draft_model), draft_params

    def _settings(self, temperature: float, batch_size: int) -> Settings:
        task, plan = self._task, self._plan
        return Settings(
            gamma=1,
            temperature=temperature,
            rule=plan.rule,
            seed=plan.seed,
            max_decode_length=task.max_decode_length,
            max_input_length=task.max_input_length,
            batch_size=batch_size,
        )

    def _batches(self, encoded: Sequence[list[int]], temperature: float, batch_size: int) -> list[Batch]:
        settings = self._settings(temperature, batch_size)
        return make_batches(encoded, self.vocabulary, settings, length=self._task.max_input_length)

    def acceptance(self, draft: str, temperature: float) -> dict[str, Any]:
        """Acceptance of a draft: measured, or what the paper says where it is simulated."""
        if self._plan.simulated:
            row = self._plan.paper_row(self._task, draft, temperature)
            assert row is not None
            return {"alpha": row.alpha, "alpha_error": 0.0, "num_tokens": 0, "simulated": True}
        target, target_params, drafter, draft_params = self.pair(draft)
        pair = Pair(target, target_params, drafter, draft_params, self.vocabulary)
        batches, outputs = self._generated(pair, temperature)
        found = acceptance.measure(pair, batches, outputs, LENIENCES, num_inputs=len(self._encoded))
        return found._asdict() | {"by_position": [some._asdict() for some in found.by_position]}

    def _generated(self, pair: Pair, temperature: float) -> tuple[list[Batch], list[DecodingResult]]:
        """What the target says to the inputs, one batch after the other until there are enough tokens."""
        if temperature not in self._outputs:
            encoded, plan = self._encoded, self._plan
            if temperature >= GREEDY_BELOW:  # a row's seed goes by its place: the same input gives other samples
                encoded = encoded * -(-plan.num_tokens // len(encoded))
            encoded = encoded[: plan.num_tokens]  # each output has one at least
            batches, outputs, tokens = [], [], 0
            for batch in self._batches(encoded, temperature, plan.alpha_batch_size):
                result = fetch(decode_plainly(pair, batch, self._settings(temperature, plan.alpha_batch_size)))
                batches.append(batch)
                outputs.append(result)
                tokens += int(result.lengths[: batch.num_rows].sum())
                if tokens >= plan.num_tokens:
                    break
            self._outputs[temperature] = batches, outputs
        return self._outputs[temperature]

    def works(self, draft: str, temperature: float, gamma: int) -> list[costs.Workload]:
        """What is timed: one for each prompt, or each batch of prompts."""
        plan, task, models = self._plan, self._task, self.pair(draft)
        num, size = -(-plan.num_prompts // plan.batch_size), plan.batch_size
        settings, rule = dataclasses.replace(self._settings(temperature, size), gamma=gamma), find_rule(plan.rule, 1.0)
        if plan.simulated:
            row = plan.paper_row(task, draft, temperature)
            assert row is not None
            rule = simulated.SimulatedAcceptance(rule, row.alpha)
            vocab_size = models[0].vocab_size
            tokens = [simulated.random_inputs(size, task.max_input_length, vocab_size, seed=i) for i in range(num)]
            sampling = settings.sampling(size, vocab_size)
            seeds = [
                jnp.asarray([row_seed(plan.seed, i * size + j) for j in range(size)], jnp.int32) for i in range(num)
            ]
            batches = [Batch(Inputs(t), s, sampling, sampling, size) for t, s in zip(tokens, seeds, strict=True)]
        else:
            batches = self._batches(self._encoded[: num * size], temperature, size)
        found = [costs.workload(*models, batch, settings)._replace(rule=rule) for batch in batches]
        return self._laid_out(found, draft) if jax.default_backend() == "tpu" else found

    def _laid_out(self, works: list[costs.Workload], draft: str) -> list[costs.Workload]:
        """The same with weights as a TPU wants them for the speculative loop; see `generation.lay_out`."""
        first, (target, target_params, drafter, draft_params) = works[0], self.pair(draft)

        def run(weights: tuple[Params, Params], inputs: Inputs, seeds: Any) -> DecodingResult:
            own = first._replace(target_params=weights[0], draft_params=weights[1], inputs=inputs, seeds=seeds)
            return own.run(limit=own.max_length)

        weights = layouts.settle(run, (target_params, draft_params), first.inputs, first.seeds)
        self._target, self._draft = (target, weights[0]), (draft, (drafter.model, weights[1]))
        return [work._replace(target_params=weights[0], draft_params=weights[1]) for work in works]

    def margins(
        self, work: costs.Workload, plain: Int32[np.ndarray, "rows length"], tokens: Int32[np.ndarray, "rows length"]
    ) -> list[float]:
        """See `walltime.Margins`."""
        assert self._draft is not None  # what was timed is loaded
        pair = Pair(*self.pair(self._draft[0]), self.vocabulary)
        batch = Batch(work.inputs, work.seeds, work.sampling, work.draft_sampling, len(plain))
        return [some.margin for some in find_differences(pair, batch, plain, tokens)]


def read_inputs(task: Task, vocabulary: Vocabulary) -> list[list[int]]:
    """A task's inputs as ids, with its prefix and the end-of-sequence id; cut where too long, as SeqIO does.

    Raises:
      ValueError: there is no such file, it is not UTF-8, or holds no text.
    """
    assert task.inputs is not None
    texts = [line for line in _read_lines(task.inputs) if line.strip()]
    if not texts:
        raise ValueError(f"inputs of task {task.name} is {task.inputs!r}, which holds no text.")
    ids = [vocabulary.encode(task.task_prefix + text) for text in texts]
    return [[*some[: task.max_input_length - 1], vocabulary.eos_id] for some in ids]


def _read_lines(inputs: str) -> list[str]:
    name = inputs.removeprefix("demo:")
    if name == inputs:
        return _lines(pathlib.Path(inputs))
    examples = [json.loads(line) for line in _lines(packaged.DEMO_DIRECTORY / "examples.jsonl")]
    texts = [example["input"] for example in examples if example["task"] == name]
    more = packaged.DEMO_DIRECTORY / f"inputs_{name}.txt"  # so that the target says 10 000 tokens to them
    return texts + (_lines(more) if more.exists() else [])


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read inputs {path} ({error}); give a text file with one input per line.") from error
