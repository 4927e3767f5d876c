"""Every drafter on every task: alpha, tokens per target call, and the speedup with the best and with adaptive gamma."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_jax import packaged
from specdec_jax.drafters import named
from specdec_jax.drafters.one_shot import OneShotDrafter
from specdec_jax.drafters.table import Table as Counts
from specdec_jax.generation import Batch, Pair, decode_plainly, load_model, make_batches
from specdec_jax.harness import costs, tuning, walltime
from specdec_jax.harness.grid import Report, read_inputs
from specdec_jax.harness.paper import LENIENCES
from specdec_jax.harness.plan import Task, check
from specdec_jax.harness.records import Record
from specdec_jax.harness.rendering import Table, Value
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import GREEDY_BELOW
from specdec_jax.settings import Settings
from specdec_jax.sharding import fetch
from specdec_jax.timing import interleaved
from specdec_jax.vocabularies import load_vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterPlan:
    """What to measure, and how thoroughly.

    Attributes:
      name: of the results, results/drafters_NAME.json and so on.
      directory: where results go.
      tasks: the tasks, with their draft models.
      tables: a table for each task, by its name.
      drafters: names of drafters; one with a model in it is followed by which, as "model:small", and "copy:table" is
        copying that falls back to the table.
      temperatures: of both.
      max_gamma: the most guesses of a step.
      num_prompts: timed inputs of each cell.
      repeats: timed decodes of each, all ways in turn.
      rounds: times that the cost of each call is measured.
      num_counted: inputs of each cell that the steps of decoding are counted on.
      num_tokens: tokens of the target that alpha is measured on, at least, if the inputs give as many.
      alpha_batch_size: inputs decoded together for that.
      seed: of all draws.
    """

    name: str
    directory: str
    tasks: tuple
    tables: Mapping[str, str]
    drafters: tuple
    temperatures: tuple
    max_gamma: int
    num_prompts: int
    repeats: int
    rounds: int
    num_counted: int
    num_tokens: int
    alpha_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        check(
            self,
            ("max_gamma", "num_prompts", "repeats", "rounds", "num_counted", "num_tokens", "alpha_batch_size"),
        )
        if not self.drafters:
            raise ValueError("drafters must not be empty.")
        if any(task.simulated for task in self.tasks):
            raise ValueError(f"tasks is {self.tasks!r}; give Tasks with checkpoints, as [@ende/Task()].")
        shortest = min(task.max_decode_length for task in self.tasks)
        if shortest < 4 * (self.max_gamma + 1):
            raise ValueError(
                f"max_gamma is {self.max_gamma}; to time steps of up to {self.max_gamma + 1} tokens, max_decode_length "
                f"of every task must be {4 * (self.max_gamma + 1)} or more, and one is {shortest}."
            )
        for drafter in self.drafters:
            kind, _, model = str(drafter).partition(":")
            if kind not in named.NAMES or (model and kind not in named.WITH_MODEL and drafter != "copy:table"):
                known = ", ".join(map(repr, (*named.NAMES, "copy:table")))
                raise ValueError(
                    f"drafters has {drafter!r}; known are {known}, those with a model followed by its name."
                )
            for task in self.tasks:
                if kind in named.WITH_MODEL and model not in task.drafts:
                    raise ValueError(
                        f"drafters has {drafter!r}, and drafts of task {task.name} are {', '.join(task.drafts)}; "
                        f"name one of them, as '{kind}:{next(iter(task.drafts))}'."
                    )
                if (kind in named.WITH_TABLE or drafter == "copy:table") and task.name not in self.tables:
                    raise ValueError(f"drafters has {drafter!r}, and tables has none for task {task.name}.")

    def path(self, suffix: str) -> pathlib.Path:
        """Where the results go."""
        return pathlib.Path(self.directory) / f"drafters_{self.name}{suffix}"

    def settings(self) -> dict[str, Any]:
        """What the figures of every cell depend on, JSON-ready; which cells are measured may differ from run to run."""
        fields = dataclasses.asdict(self)
        for own in ("name", "directory", "drafters", "temperatures"):
            del fields[own]
        return fields


def run(plan: DrafterPlan, *, report: Report = lambda what, done, total: None) -> dict[str, Any]:
    """Measures what is missing of a plan, cell by cell; see `grid.run` for arguments, results and errors."""
    record = Record.open(plan.path(".json"), name=plan.name, simulated=False, settings=plan.settings())
    total, done = len(plan.tasks) * len(plan.temperatures) * len(plan.drafters), 0
    for task in plan.tasks:
        bench = _Bench(plan, task)
        for temperature in map(float, plan.temperatures):
            for drafter in plan.drafters:
                report(f"{task.name}, {drafter}, temperature {temperature:g}", done, total)
                key = {"task": task.name, "drafter": drafter, "temperature": temperature}
                if record.find("cells", **key) is None:
                    verification = record.find("calls", task=task.name) or record.add(
                        "calls", {"task": task.name, "verification": bench.verification()}
                    )
                    found = {int(size): cost for size, cost in verification["verification"].items()}
                    record.add("cells", key | bench.cell(drafter, temperature, found))
                done += 1
    report("done", total, total)
    return record.document


class _Bench:
    """A task's target and inputs, and what the target alone makes of them."""

    def __init__(self, plan: DrafterPlan, task: Task) -> None:
        self._plan, self._task = plan, task
        self._outputs: dict[float, tuple[list[Batch], list[DecodingResult]]] = {}
        self._models: dict[str, Any] = {}

    @functools.cached_property
    def _vocabulary(self) -> Any:
        assert self._task.vocabulary is not None
        return load_vocabulary(packaged.resolve(self._task.vocabulary), self._task.extra_ids)

    @functools.cached_property
    def _encoded(self) -> list[list[int]]:
        return read_inputs(self._task, self._vocabulary)

    @functools.cached_property
    def _target(self) -> Any:
        return load_model(str(self._task.target))

    def _model(self, name: str) -> Any:
        if name not in self._models:
            self._models[name] = load_model(str(self._task.drafts[name]))
        return self._models[name]

    def _pair(self, drafter: str) -> Pair:
        kind, _, name = drafter.partition(":")
        model, params = self._model(name) if kind in named.WITH_MODEL else (None, None)
        path = self._plan.tables.get(self._task.name)
        table = None
        if path is not None and (kind in named.WITH_TABLE or name == "table"):
            table = Counts.load(packaged.resolve(path)).params()
        target, target_params = self._target
        made = named.make(kind, target.vocab_size, model, params, table)
        return Pair(target, target_params, *made, self._vocabulary)

    def _settings(self, temperature: float, batch_size: int, pair: Pair | None = None) -> Settings:
        gamma = self._plan.max_gamma
        if pair is not None and isinstance(pair.drafter, OneShotDrafter):
            gamma = min(gamma, len(pair.draft_params.rest))  # as far as its table goes
        return Settings(
            gamma=gamma,
            temperature=temperature,
            seed=self._plan.seed,
            max_decode_length=self._task.max_decode_length,
            max_input_length=self._task.max_input_length,
            batch_size=batch_size,
        )

    def _batches(self, temperature: float, batch_size: int, num: int) -> list[Batch]:
        settings = self._settings(temperature, batch_size)
        length = self._task.max_input_length
        return make_batches(self._encoded[:num], self._vocabulary, settings, length=length)

    def _generated(self, pair: Pair, temperature: float) -> tuple[list[Batch], list[DecodingResult]]:
        """What the target says, until there are enough tokens."""
        if temperature not in self._outputs:
            size, tokens = self._plan.alpha_batch_size, 0
            settings, kept, outputs = self._settings(temperature, size), [], []
            for batch in self._batches(temperature, size, len(self._encoded)):
                result = fetch(decode_plainly(pair, batch, settings))
                kept.append(batch)
                outputs.append(result)
                tokens += int(result.lengths[: batch.num_rows].sum())
                if tokens >= self._plan.num_tokens:
                    break
            self._outputs[temperature] = kept, outputs
        return self._outputs[temperature]

    def _work(self, pair: Pair, temperature: float) -> costs.Workload:
        return costs.workload(*pair[:4], self._batches(temperature, 1, 1)[0], self._settings(temperature, 1, pair))

    def verification(self) -> dict[int, float]:
        """What target calls of several tokens cost."""
        return tuning.measure_verification(self._work(self._pair("random"), 0.0), rounds=self._plan.rounds)

    def cell(self, drafter: str, temperature: float, verification: Mapping[int, float]) -> dict[str, Any]:
        """One drafter at one temperature."""
        plan, pair = self._plan, self._pair(drafter)
        batches, plain = self._generated(pair, temperature)
        work = self._work(pair, temperature)
        c = tuning.measure_c(work, rounds=plan.rounds)
        base, full = tuning.measure_ends(work, rounds=plan.rounds)
        found = tuning.examine(
            pair,
            batches,
            plain,
            self._batches(temperature, 1, plan.num_counted),
            self._settings(temperature, 1, pair),
            verification=verification,
            c=c,
            base=base,
            full=full,
            leniences=LENIENCES,
            num_inputs=len(self._encoded),
        )
        timed = self._time(pair, temperature, found)
        return {**found._asdict(), "won": found.won, **timed}

    def _time(self, pair: Pair, temperature: float, found: tuning.Finding) -> dict[str, Any]:
        """Plain decoding, the best gamma and adaptive gamma, prompt by prompt in turn; all of the same lengths."""
        plan, settings = self._plan, self._settings(temperature, 1, pair)
        fixed = dataclasses.replace(settings, gamma=found.gamma)
        adaptive = dataclasses.replace(settings, adaptation=found.adaptation)
        ends, no_end = (self._vocabulary.eos_id,), (pair.target.vocab_size,)  # one shape, so one program
        rows = []
        for number, batch in enumerate(self._batches(temperature, 1, plan.num_prompts)):
            one, other = (costs.workload(*pair[:4], batch, some) for some in (fixed, adaptive))
            lengths = fetch(one.run(limit=one.max_length, eos_ids=ends)).lengths
            ways = [
                functools.partial(one.run, limit=lengths, eos_ids=no_end, gamma=0),
                functools.partial(one.run, limit=lengths, eos_ids=no_end),
                functools.partial(other.run, limit=lengths, eos_ids=no_end),
            ]
            turn = number % 3
            timed = interleaved(ways[turn:] + ways[:turn], repeats=plan.repeats)
            timed = timed[3 - turn :] + timed[: 3 - turn]
            rows.append((timed, [fetch(each.value) for each in timed]))
        calls = [[int(results[i].num_target_calls.sum()) for _, results in rows] for i in range(3)]
        tokens = sum(int(results[0].lengths.sum()) for _, results in rows)

        def ratios(before: int, after: int) -> dict[str, float | None]:
            seconds = [np.divide(timed[before].all_seconds, timed[after].all_seconds) for timed, _ in rows]
            mean = walltime.geometric_mean([float(np.median(each)) for each in seconds])
            return {"": mean.mean, "_low": mean.low, "_high": mean.high}

        greedy = temperature < GREEDY_BELOW
        equal = [all(np.array_equal(some.tokens, results[0].tokens) for some in results) for _, results in rows]
        return {
            "tokens_per_target_call": tokens / sum(calls[1]),
            "tokens_per_target_call_adaptive": tokens / sum(calls[2]),
            **{f"speedup{end}": value for end, value in ratios(0, 1).items()},
            **{f"speedup_adaptive{end}": value for end, value in ratios(0, 2).items()},
            **{f"adaptive_over_fixed{end}": value for end, value in ratios(1, 2).items()},
            "outputs": f"{sum(equal)} of {len(equal)} equal" if greedy else "law",
            "num_prompts": len(rows),
            "seconds": [[list(each.all_seconds) for each in timed] for timed, _ in rows],
        }


def table(document: Mapping[str, Any]) -> Table:
    """The cells as a table."""
    rows: list[dict[str, Value]] = [
        {
            "task": cell["task"],
            "drafter": cell["drafter"],
            "temp": cell["temperature"],
            "alpha": cell["alpha"],
            "error": cell["alpha_error"],
            "proposed": cell["proposed"],
            "c": cell["c"],
            "gamma": cell["gamma"],
            "tokens/call": cell["tokens_per_target_call"],
            "speedup": cell["speedup"],
            "low": cell["speedup_low"],
            "high": cell["speedup_high"],
            "adaptive": cell["speedup_adaptive"],
            "over fixed": cell["adaptive_over_fixed"],
            "won": cell["won"],
            "outputs": cell["outputs"],
        }
        for cell in document.get("cells", [])
    ]
    return _table("drafters", "drafters, plain decoding is 1", rows, _notes(document))


def lenience_table(document: Mapping[str, Any]) -> Table:
    """The paper's Table 5 for every drafter: alpha(l)."""
    rows: list[dict[str, Value]] = [
        {"task": cell["task"], "drafter": cell["drafter"], "temp": cell["temperature"], "l = 1": cell["alpha"]}
        | {f"l = {lenience}": alpha for lenience, alpha in cell["lenience"].items() if float(lenience) < 1}
        for cell in document.get("cells", [])
    ]
    note = "alpha(l) = sum_x min(p / l, q) at each place of the target's own outputs (appendix A.5)."
    return _table("lenience", "alpha by lenience", rows, [note])


def _table(name: str, title: str, rows: list[dict[str, Value]], notes: list[str]) -> Table:
    return Table(name, title, list(rows[0]) if rows else [], [list(row.values()) for row in rows], notes)


def _notes(document: Mapping[str, Any]) -> list[str]:
    verification = {
        calls["task"]: ", ".join(f"{size}: {cost:.2f}" for size, cost in calls["verification"].items())
        for calls in document.get("calls", [])
    }
    return [
        "alpha: mean probability of acceptance over the target's own outputs, a place without a guess counted as 0; "
        "proposed: share of places with one. c: a guess, in target calls of one token.",
        "gamma: the best fixed one by the cost of steps; speedup: over plain decoding, geometric mean over prompts, "
        "with its interval of 95 %. adaptive: speedup with adaptive gamma; over fixed: that over the best fixed gamma.",
        "won: how much of the way from the best fixed gamma to an oracle for gamma (section 3.5) adaptive gamma goes, "
        "by the cost of steps.",
        *(f"cost of a target call on {task}, by tokens: {costs}." for task, costs in verification.items()),
    ]
