"""The paper's Tables 1 to 5 with what was measured beside what the paper has.

A document is what `grid.run` returns, or the JSON that it writes:

    name, simulated, environments          of the whole document
    settings     paper_tasks, paper_drafts: the paper's names of tasks and drafts by the names here, where it has one
    acceptance   per task, draft, temperature: alpha, alpha_error, num_tokens, lenience {l: alpha}, ...
    calls        per task, draft, batch_size: c, and verification {tokens of a target call: cost}
    cells        per task, draft, temperature, gamma, batch_size: everything else

Rows follow the paper's order, what it has not behind. What is not measured (yet) is empty beside the paper's value; the
paper decoded at batch 1, so that other batch sizes have none beside them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from specdec_jax import theory
from specdec_jax.harness import paper
from specdec_jax.harness.rendering import Table, Value
from specdec_jax.harness.rendering import csv as csv
from specdec_jax.harness.rendering import markdown as markdown
from specdec_jax.harness.rendering import show as show
from specdec_jax.harness.simulated import LABEL
from specdec_jax.settings import find_rule
from specdec_jax.verification import token

Document: TypeAlias = Mapping[str, Any]
_Row: TypeAlias = dict[str, Value]

_ALGORITHMS = {"unigram": "unigram", "bigram": "bigram"}  # the paper's names say what these are, not how large
_KEYS = ("task", "draft", "temp", "lenience")


def table1() -> Table:
    """Table 1: operations and speed by the theory where guesses cost nothing, beside the paper's."""
    rows: list[_Row] = [
        {
            "alpha": row.alpha,
            "gamma": row.gamma,
            "operations": theory.operations(row.alpha, row.gamma, 0.0),
            "paper operations": row.operations,
            "speed": theory.speedup(row.alpha, row.gamma, 0.0),
            "paper speed": row.speed,
        }
        for row in paper.TABLE1
    ]
    note = "c = c_hat = 0. Operations by Theorem 3.11, speed by Theorem 3.8."
    return _make({}, 1, "operations and speed by the theory", rows, [note])


def table2(document: Document) -> Table:
    """Table 2: measured speedups, the paper's beside."""
    rows: list[_Row] = []
    for entry, pair in _merge(document, document.get("cells", []), _keys2()):
        row = pair and paper.row2(*pair)
        rows.append(
            {
                **_names(entry, pair),
                "batch": entry.get("batch_size"),
                "gamma": entry.get("gamma"),
                "gamma is": " and ".join(entry.get("gamma_choice", [])) or None,
                "paper gamma": row and row.gamma,
                "alpha": entry.get("alpha"),
                "error": entry.get("alpha_error"),
                "paper alpha": row and row.alpha,
                "speedup": entry.get("speedup"),
                "low": entry.get("speedup_low"),
                "high": entry.get("speedup_high"),
                "paper speedup": row and row.measured,
                "outputs": entry.get("outputs"),
                "prompts": entry.get("num_prompts"),
            }
        )
    notes = [
        "speedup: walltime of plain over that of speculative decoding, geometric mean over prompts; low and high: its "
        "95 % interval.",
        "gamma is: whose it is, the paper's, the best by Theorem 3.8 with costs as measured, or given.",
        "outputs: equal to plain decoding's, or no more than their law can be.",
        "paper: T5-XXL on one TPU v4.",
    ]
    return _make(document, 2, "walltime improvement", rows, notes)


def table3(document: Document) -> Table:
    """Table 3: alpha per drafter and task; GPT-like and LaMDA are the paper's alone."""
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    others = set()
    for entry in document.get("acceptance", []):
        both = measured.setdefault((entry["task"], entry["draft"]), {"task": entry["task"], "draft": entry["draft"]})
        both[f"{float(entry['temperature']):g}"] = entry
        others |= {entry["temperature"]} - {0, 1}
    paper_rows = {(row.target, row.task, row.drafter): row for row in paper.TABLE3}
    keys = [(row.task, row.drafter, 0.0) for row in paper.TABLE3 if row.target == paper.T5_XXL]

    def only(rows: Sequence[paper.Row3]) -> list[_Row]:
        return [_row3({"task": None, "draft": None}, row) for row in rows]

    rows = []
    for entry, pair in _merge(document, list(measured.values()), keys):
        rows.append(_row3(entry, pair and paper_rows[paper.T5_XXL, pair[0], pair[1]]))
    first = [row.target for row in paper.TABLE3].index(paper.T5_XXL)
    elsewhere = [row for row in paper.TABLE3 if row.target != paper.T5_XXL]
    rows = only(elsewhere[:first]) + rows + only(elsewhere[first:])
    notes = [
        "alpha: mean of beta over tokens that the target generated (Corollary 3.6), at temperatures t = 0 and t = 1; "
        "error: its standard error. The paper's is on 10 000 tokens."
    ]
    if others:
        notes.append("Measured too, but not in this table: temperature " + ", ".join(f"{t:g}" for t in sorted(others)))
    return _make(document, 3, "acceptance", rows, notes)


def _row3(entry: Mapping[str, Any], row: paper.Row3 | None) -> _Row:
    values: _Row = {
        "task": entry["task"],
        "draft": entry["draft"],
        "paper models": row and " ".join(part for part in (f"{row.target}:", row.task, row.drafter) if part),
    }
    for t, alpha in (("0", row and row.greedy), ("1", row and row.sampled)):
        found = entry.get(t, {})
        values |= {
            f"alpha t={t}": found.get("alpha"),
            f"error t={t}": found.get("alpha_error"),
            f"tokens t={t}": found.get("num_tokens"),
            f"paper t={t}": alpha,
        }
    return values


def table4(document: Document) -> Table:
    """Table 4: what the theory predicts from measured costs, beside what was measured."""
    rows: list[_Row] = []
    for entry, pair in _merge(document, document.get("cells", []), _keys2()):
        row = pair and paper.row2(*pair)
        speedup, predicted = entry.get("speedup"), entry.get("predicted_from_tokens")
        rows.append(
            {
                **_names(entry, pair),
                "batch": entry.get("batch_size"),
                "gamma": entry.get("gamma"),
                "paper gamma": row and row.gamma,
                "alpha": entry.get("alpha"),
                "paper alpha": row and row.alpha,
                "c": entry.get("c"),
                "paper c": row and row.c,
                "verification": entry.get("verification"),
                "predicted": entry.get("predicted"),
                "paper Exp": row and row.expected,
                "predicted from tokens": predicted,
                "speedup": speedup,
                "paper Emp": row and row.measured,
                "measured / from tokens": speedup / predicted if speedup and predicted else None,
                "loop efficiency": entry.get("loop_efficiency"),
            }
        )
    notes = [
        "c: a draft call, verification: a target call of gamma + 1 tokens, both in one-token target calls.",
        "predicted: Theorem 3.8, which takes verification as 1. predicted from tokens: the measured steps at the "
        "measured cost of their calls and of both encoders, without the theory's assumptions.",
        "loop efficiency: the time of a step's calls over that of the step.",
    ]
    return _make(document, 4, "predicted and measured improvement", rows, notes)


def table5(document: Document) -> Table:
    """Table 5: alpha under lenience, and what it promises at the measured cost of calls."""
    keys = [(paper.LENIENT_TASK, row.drafter, row.temperature) for row in paper.TABLE5]
    paper_rows = {(row.drafter, row.temperature): row for row in paper.TABLE5}
    rows: list[_Row] = []
    for entry, pair in _merge(document, document.get("acceptance", []), keys):
        row = pair and paper_rows[pair[1:]]
        ours = {float(lenience): alpha for lenience, alpha in entry.get("lenience", {}).items()}
        printed = dict(zip(paper.LENIENCES, row.alphas, strict=True)) if row else {}
        speedups = dict(zip(paper.LENIENCES, row.speedups, strict=True)) if row and row.speedups else {}
        for lenience in sorted(ours.keys() | printed.keys(), reverse=True):
            alpha = ours.get(lenience)
            best = None if alpha is None else _best(document, entry, alpha)
            rows.append(
                {
                    **_names(entry, pair),
                    "lenience": lenience,
                    "alpha": alpha,
                    "paper alpha": printed.get(lenience),
                    "c": best and best.c,
                    "gamma": best and best.gamma,
                    "predicted": best and best.speedup,
                    "paper speedup": speedups.get(lenience),
                }
            )
    notes = [
        "Below 1 the law is not the target's (appendix A.5). alpha: mean of sum_x min(p / lenience, q).",
        "predicted: Theorem 3.8 with c and verification as measured, at the gamma among those that is best.",
        f"paper speedup: at c = {paper.LENIENT_C}; at temperature 0 and gamma {paper.LENIENT_GAMMA_GREEDY}.",
    ]
    return _make(document, 5, "acceptance under lenience", rows, notes)


class _Best(NamedTuple):
    speedup: float
    gamma: int
    c: float


def _best(document: Document, entry: Mapping[str, Any], alpha: float) -> _Best | None:
    """The best prediction with measured costs: of calls of any width, or else of the cells; None without either."""

    def of(section: str, *names: str) -> list[Mapping[str, Any]]:
        return [some for some in document.get(section, []) if all(some[name] == entry[name] for name in names)]

    costs = [
        (int(width) - 1, calls["c"], verification)
        for calls in of("calls", "task", "draft")
        for width, verification in calls["verification"].items()
        if int(width) > 1
    ]
    if not costs:
        cells = of("cells", "task", "draft", "temperature")
        costs = [(cell["gamma"], cell["c"], cell["verification"]) for cell in cells]
    found = [_Best(theory.speedup(alpha, gamma, c, verification), gamma, c) for gamma, c, verification in costs]
    return max(found, default=None)


_Key: TypeAlias = tuple[str, str, float]  # task, draft, temperature, by the paper's names


def _keys2() -> list[_Key]:
    return [(row.task, row.draft, row.temperature) for row in paper.TABLE2]


def paper_key(document: Document, entry: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The paper's names of an entry's task and draft; None where it has none."""
    settings = document.get("settings", {})
    drafts = _ALGORITHMS | settings.get("paper_drafts", {})
    return settings.get("paper_tasks", {}).get(entry["task"]), drafts.get(entry["draft"])


def _merge(
    document: Document, entries: Sequence[Mapping[str, Any]], keys: Sequence[_Key]
) -> list[tuple[Mapping[str, Any], _Key | None]]:
    """Measured entries with the paper's row of each, and the paper's rows that no entry is of, in the paper's order.

    Args:
      document: for the names.
      entries: of one of its sections. Without a temperature, an entry has the paper's only one.
      keys: of the paper's rows.

    Returns:
      (entry, key) pairs; the key is None where the paper has no such row, and an entry that is not measured has
      its names alone.
    """
    found = []
    for entry in entries:
        task, draft = paper_key(document, entry)
        key = (task, draft, float(entry.get("temperature", keys[0][2])))
        found.append((entry, next((k for k in keys if k == key and entry.get("batch_size", 1) == 1), None)))
    seen = {key for _, key in found}
    settings = document.get("settings", {})
    tasks = {name: own for own, name in reversed(settings.get("paper_tasks", {}).items())}
    drafts = _ALGORITHMS | {name: own for own, name in reversed(settings.get("paper_drafts", {}).items())}
    for key in keys:
        if key not in seen:
            found.append(({"task": tasks.get(key[0]), "draft": drafts.get(key[1]), "temperature": key[2]}, key))

    def place(item: tuple[Mapping[str, Any], _Key | None]) -> tuple[str, str, float]:
        entry, key = item
        if key is not None:
            return key
        task, draft = paper_key(document, entry)
        return task or entry["task"], draft or entry["draft"], float(entry.get("temperature", keys[0][2]))

    places = [*keys, *(place(item) for item in found)]
    tasks_order, drafts_order, temperatures = (list(dict.fromkeys(part)) for part in zip(*places, strict=True))

    def order(item: tuple[Mapping[str, Any], _Key | None]) -> tuple[int, ...]:
        task, draft, temperature = place(item)
        ranks = tasks_order.index(task), temperatures.index(temperature), drafts_order.index(draft)
        return *ranks, item[0].get("batch_size", 0), item[0].get("gamma", 0)

    return sorted(found, key=order)


def _names(entry: Mapping[str, Any], key: _Key | None) -> _Row:
    names: _Row = {"task": entry["task"], "draft": entry["draft"], "paper models": key and f"{key[0]} {key[1]}"}
    return names | {"temp": entry["temperature"]}


def _make(document: Document, number: int, title: str, rows: list[_Row], notes: list[str]) -> Table:
    """A table of rows that have the same columns, labelled with where it comes from."""
    title = f"Table {number}: {title}"
    if document:
        title += f" ({document['name']})"
        notes = notes + _origin(document)
    if document.get("simulated"):
        title += f", {LABEL}"
        label = f"{LABEL}: weights are random and guesses pass with the paper's alpha; only times are measured."
        notes = [label, *notes]
        for row in rows:  # CSV has neither title nor notes
            ours = (value for name, value in row.items() if name not in _KEYS and not name.startswith("paper"))
            row["acceptance"] = "simulated" if any(value is not None for value in ours) else None
    return Table(f"table{number}", title, list(rows[0]), [list(row.values()) for row in rows], notes)


def _origin(document: Document) -> list[str]:
    """A note for what decoded, and one for each machine and commit."""
    settings = document.get("settings", {})
    notes = []
    if "rule" in settings:
        rule = find_rule(settings["rule"], 1.0)
        other = "" if rule is token else "; the theory and the paper are about the token rule"
        notes.append(f"rule: {rule.__name__}{other}.")
    for environment in document.get("environments", []):
        machine = f"{environment['num_devices']} x {environment['device']}, {environment['processor']}"
        commit = f", commit {environment['commit']}" if environment["commit"] else ""
        notes.append(f"measured on {machine}, jax {environment['versions']['jax']}{commit}.")
    return list(dict.fromkeys(notes))
