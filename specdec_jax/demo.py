"""The demonstration: packaged examples of three tasks, decoded with and without every packaged draft model."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specdec_jax import comparison, packaged, trace
from specdec_jax.comparison import Comparison
from specdec_jax.generation import Batch, Pair, decode, encode, load_pair, make_batches
from specdec_jax.harness import costs
from specdec_jax.settings import Models, Settings
from specdec_jax.training.text import TASK_PREFIXES
from specdec_jax.vocabularies import Vocabulary, load_vocabulary

TEMPERATURES = (0.0, 1.0)

_ROUNDS = 5  # of timing calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the demonstration can be told.

    Attributes:
      gamma: guesses per step.
      max_decode_length: tokens of an output at most.
      max_input_length: the one length that all inputs are padded to, so that little is compiled.
      seed: of the draws at temperature 1.
      num_examples: of each task.
      num_repeats: timed calls of each decode.
      rule: of verification; see `Settings`.
      dtype: see `Models`.
    """

    gamma: int
    max_decode_length: int
    max_input_length: int
    seed: int
    num_examples: int
    num_repeats: int
    rule: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("gamma", "max_decode_length", "max_input_length", "num_examples", "num_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more.")


class Costs(NamedTuple):
    """What calls cost, at batch 1, in units of a one-token target call.

    Attributes:
      c: a one-token draft call (Definition 3.7).
      v: a target call of gamma + 1 tokens; the paper takes it as 1.
    """

    c: float
    v: float


class Row(NamedTuple):
    """A line of the table: one task, draft and temperature.

    Attributes:
      task: its name.
      draft: the draft model's name.
      temperature: of both models.
      costs: of this draft and gamma.
      comparisons: one per example.
    """

    task: str
    draft: str
    temperature: float
    costs: Costs
    comparisons: list[Comparison]

    @property
    def speedup(self) -> float:
        """The median over examples."""
        return statistics.median(comparison.summarize([one]).speedup for one in self.comparisons)


def read_examples(vocabulary: Vocabulary, settings: Settings, *, per_task: int) -> dict[str, list[str]]:
    """The first packaged test inputs of each task that are not too long, with their task's prefix.

    Raises:
      ValueError: the examples are missing, or a task has none that is short enough.
    """
    path = packaged.DEMO_DIRECTORY / "examples.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); the demonstration needs its examples.") from error
    texts: dict[str, list[str]] = {task: [] for task in TASK_PREFIXES}
    for line in lines:
        example = json.loads(line)
        text = TASK_PREFIXES[example["task"]] + example["input"]
        if len(vocabulary.encode(text)) < settings.max_input_length:
            texts[example["task"]].append(text)
    for task, some in texts.items():
        if not some:
            raise ValueError(
                f"max_input_length is {settings.max_input_length}; {path} has no example of {task!r} that short."
            )
    return {task: some[:per_task] for task, some in texts.items()}


def run(options: Options, console: Console) -> list[Row]:
    """Shows a trace, then decodes everything and prints the table.

    Args:
      options: what to decode, and how.
      console: where the trace and the table go; progress goes to stderr.

    Returns:
      The table's rows.

    Raises:
      ValueError: the demonstration pair or its examples are not there.
    """
    settings = [
        Settings(
            gamma=options.gamma,
            temperature=temperature,
            seed=options.seed,
            max_decode_length=options.max_decode_length,
            max_input_length=options.max_input_length,
            rule=options.rule,
        )
        for temperature in TEMPERATURES
    ]
    vocabulary = load_vocabulary(packaged.resolve("demo:vocabulary"))
    texts = read_examples(vocabulary, settings[0], per_task=options.num_examples)
    drafts = [name for name in packaged.model_names() if name.startswith("draft_")]
    if not drafts:
        raise ValueError(f"{packaged.DEMO_DIRECTORY} holds no draft_* model; the demonstration needs at least one.")
    pairs = {
        name: load_pair(
            Models(
                target_checkpoint="demo:target",
                draft_checkpoint=f"demo:{name}",
                vocabulary="demo:vocabulary",
                dtype=options.dtype,
            ),
            vocabulary,
        )
        for name in drafts
    }
    drafts.sort(key=lambda name: _num_weights(pairs[name]))

    def batches(task: str, settings: Settings) -> list[Batch]:
        encoded = encode(texts[task], vocabulary, settings)
        return make_batches(encoded, vocabulary, settings, length=settings.max_input_length)

    first_task = next(iter(texts))
    first_batch = batches(first_task, settings[0])[0]
    _show_trace(pairs[drafts[0]], first_batch, settings[0], texts[first_task][0], console)

    rows = []
    with _progress() as progress:
        num_decodes = len(settings) * sum(map(len, texts.values()))
        bar = progress.add_task("", total=len(drafts) * (1 + num_decodes))
        for name in drafts:
            progress.update(bar, description=f"{name}: cost of a call")
            costs = measure_costs(pairs[name], first_batch, settings[0])
            progress.advance(bar)
            for some in settings:
                progress.update(bar, description=f"{name}, temperature {some.temperature:g}")
                for task in texts:
                    comparisons = []
                    for batch in batches(task, some):
                        comparisons.append(comparison.compare(pairs[name], batch, some, repeats=options.num_repeats))
                        progress.advance(bar)
                    rows.append(Row(task, name, some.temperature, costs, comparisons))
    console.print(table(rows, settings[0], pairs[drafts[0]].target.config.dtype.name))
    return rows


def measure_costs(pair: Pair, batch: Batch, settings: Settings) -> Costs:
    """Measures c and v with the shapes of decoding."""
    work = costs.workload(*pair[:4], batch, settings)
    (target, block), draft = costs.measure_calls(work, [1, settings.gamma + 1], rounds=_ROUNDS)
    return Costs(costs.ratio(draft, target), costs.ratio(block, target))


def table(rows: Sequence[Row], settings: Settings, dtype: str) -> Table:
    """A line per task, draft and temperature, tasks together."""
    grid = Table(
        title=f"speculative decoding, gamma {settings.gamma}, rule {settings.verification_rule().__name__}, batch 1, "
        f"{dtype} on {jax.devices()[0].device_kind}",
        caption="c: a draft call, v: a target call of gamma + 1 tokens, both in one-token target calls. Speeds are in "
        "tokens/s without compilation; speedup is the median over examples. Equal: outputs with and without guesses "
        "at temperature 0; above it only their law is equal.",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits 80 columns
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("task", "draft", "temp"):
        grid.add_column(name, no_wrap=True)
    for name in ("alpha", "c", "v", "tokens / call", "plain tok/s", "spec. tok/s", "speed up"):
        grid.add_column(name, justify="right")
    grid.add_column("equal")
    order = list(TASK_PREFIXES)
    ordered = sorted(rows, key=lambda row: order.index(row.task))
    for i, row in enumerate(ordered):
        s = comparison.summarize(row.comparisons)
        figures = [f"{x:.2f}" for x in (s.alpha, row.costs.c, row.costs.v, s.tokens_per_call)]
        grid.add_row(
            row.task,
            row.draft.removeprefix("draft_"),
            f"{row.temperature:g}",
            *figures,
            f"{s.plain_speed:.0f}",
            f"{s.speed:.0f}",
            f"{row.speedup:.2f}x",
            comparison.verdict(row.comparisons, dtype),
            end_section=i + 1 < len(ordered) and ordered[i + 1].task != row.task,
        )
    return grid


def _show_trace(pair: Pair, batch: Batch, settings: Settings, text: str, console: Console) -> None:
    with Console(stderr=True).status("compiling"):
        result = jax.device_get(decode(pair, batch, settings))
    console.print(text, style="bold", markup=False, highlight=False)
    console.print(trace.legend(console))
    trace.show(result, 0, pair.vocabulary, console)
    console.print()


def _num_weights(pair: Pair) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(pair.draft_params))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
