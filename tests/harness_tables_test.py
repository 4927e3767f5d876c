import csv
import io

import pytest
from rich.console import Console

from specdec_jax import theory
from specdec_jax.harness import paper, tables
from specdec_jax.harness.rendering import Table, format_value

TABLES = [tables.table2, tables.table3, tables.table4, tables.table5]


def acceptance(task, draft, temperature, alpha, **more):
    entry = {"task": task, "draft": draft, "temperature": temperature, "alpha": alpha, "alpha_error": 0.0034}
    return {**entry, "num_tokens": 10012, "lenience": {"1.0": alpha, "0.5": alpha + 0.04}, **more}


def cell(task, draft, temperature, gamma, choice, **more):
    return {
        "task": task,
        "draft": draft,
        "temperature": temperature,
        "gamma": gamma,
        "gamma_choice": choice,
        "batch_size": 1,
        "alpha": 0.7123,
        "alpha_error": 0.0034,
        "c": 0.1234,
        "verification": 1.31,
        "loop_efficiency": 0.93,
        "predicted": 2.25,
        "predicted_from_tokens": 1.8,
        "speedup": 1.62,
        "speedup_low": 1.55,
        "speedup_high": 1.71,
        "tokens_per_call": 2.8,
        "outputs": "equal" if temperature == 0 else "law",
        "num_prompts": 32,
        **more,
    }


ENVIRONMENT = {
    "versions": {"python": "3.11", "jax": "0.10.1"},
    "commit": "abcdef",
    "device": "cpu",
    "num_devices": 1,
    "processor": "some processor",
}


def document(**more):
    """The draft `medium` is the paper's base; the paper has neither `restore` nor `tiny`."""
    names = {
        "paper_tasks": {"ende": "EnDe", "summarize": "CNNDM"},
        "paper_drafts": {"small": "small", "medium": "base"},
    }
    return {
        "name": "demo",
        "simulated": False,
        "environments": [ENVIRONMENT],
        "settings": {"rule": "token", **names},
        "acceptance": [],
        "cells": [],
        **more,
    }


def rows(table, **where):
    """The rows of a table that have these values, as dicts."""
    found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return [row for row in found if all(row[name] == value for name, value in where.items())]


def printed(table, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(tables.show(table, width))
    return console.file.getvalue()


def test_the_papers_tables_agree_with_each_other():
    assert (len(paper.TABLE2), len(paper.TABLE3), len(paper.TABLE5)) == (12, 16, 5)
    sampled = {(row.task, row.drafter): (row.greedy, row.sampled) for row in paper.TABLE3}
    for row in paper.TABLE2:
        assert sampled[row.task, row.draft][int(row.temperature)] == row.alpha
    for row in paper.TABLE5:
        assert row.alphas[0] == sampled[paper.LENIENT_TASK, row.drafter][int(row.temperature)]
        assert list(row.alphas) == sorted(row.alphas) and len(row.alphas) == len(paper.LENIENCES)


def test_look_up():
    row = paper.row2("CNNDM", "base", 1.0)
    assert row is not None and (row.gamma, row.alpha, row.measured) == (3, 0.55, 2.2)
    assert paper.row2("EnDe", "bigram", 1.0) is None and paper.row2("EnDe", "base", 0.5) is None


def test_table_1_is_the_papers_to_its_two_decimals():
    table = tables.table1()
    assert len(table.rows) == len(paper.TABLE1)
    for row in rows(table):
        for name in ("operations", "speed"):
            assert format_value(name, row[name]) == format_value(name, row[f"paper {name}"])
        assert row["speed"] == theory.speedup(row["alpha"], row["gamma"], 0.0)  # and not the paper's again


def test_table_2_has_the_papers_values_beside_ours():
    best = cell("ende", "medium", 1.0, 4, ["best"], speedup=1.9)
    table = tables.table2(document(cells=[best, cell("ende", "medium", 1.0, 5, ["paper", "best"])]))
    first, second = rows(table, task="ende", draft="medium", temp=1.0)
    assert first["speedup"] == 1.9 and first["gamma is"] == "best" and second["gamma is"] == "paper and best"
    assert (second["low"], second["high"], second["alpha"], second["error"]) == (1.55, 1.71, 0.7123, 0.0034)
    for row in (first, second):
        assert row["paper models"] == "EnDe base" and row["outputs"] == "law"
        assert (row["paper gamma"], row["paper alpha"], row["paper speedup"]) == (5, 0.68, 2.4)


@pytest.mark.parametrize("table_of", [tables.table2, tables.table4])
def test_rows_follow_the_paper_and_what_it_has_not_is_behind(table_of):
    cells = [
        cell("restore", "small", 0.0, 3, ["given"]),
        cell("summarize", "medium", 1.0, 3, ["paper"]),
        cell("ende", "tiny", 0.0, 7, ["given"]),
        cell("ende", "small", 0.5, 7, ["given"]),
        cell("ende", "small", 0.0, 7, ["paper"]),
    ]
    table = table_of(document(cells=cells))
    papers = [f"{row.task} {row.draft}" for row in paper.TABLE2]
    assert [row["paper models"] for row in rows(table) if row["paper models"]] == papers
    names = [(row["task"], row["draft"], row["temp"]) for row in rows(table)]
    assert names[:4] == [("ende", "small", 0), ("ende", "medium", 0), ("ende", None, 0), ("ende", "tiny", 0)]
    assert names[7] == ("ende", "small", 0.5) and names[-1] == ("restore", "small", 0.0) and len(names) == 15
    for name in ("tiny", "restore"):
        (row,) = (row for row in rows(table) if name in (row["task"], row["draft"]))
        assert row["alpha"] == 0.7123 and all(value is None for key, value in row.items() if key.startswith("paper"))


@pytest.mark.parametrize("table_of", TABLES)
def test_what_is_not_measured_is_the_papers_alone(table_of):
    table = table_of(document())
    names = ("task", "draft", "temp", "lenience")
    for row in rows(table):
        ours = {key: value for key, value in row.items() if key not in names and not key.startswith("paper")}
        assert set(ours.values()) == {None}
        assert any(value is not None for key, value in row.items() if key.startswith("paper"))
    text = tables.markdown(table)
    assert "None" not in text and "nan" not in text and "None" not in tables.csv(table)


def test_the_paper_has_no_value_for_another_batch_size():
    table = tables.table2(document(cells=[cell("ende", "small", 0.0, 7, ["paper"], batch_size=8)]))
    alone, batched = rows(table, task="ende", draft="small", temp=0.0)
    assert alone["paper speedup"] == 3.4 and alone["speedup"] is None
    assert batched["paper speedup"] is None and batched["speedup"] == 1.62 and batched["batch"] == 8


def test_table_3():
    measured = [
        acceptance("ende", "medium", 1.0, 0.66),
        acceptance("ende", "medium", 0.0, 0.77),
        acceptance("ende", "bigram", 0.0, 0.21),  # its name says what it is, without a mapping
        acceptance("ende", "medium", 0.3, 0.7),
    ]
    table = tables.table3(document(acceptance=measured))
    expected = [" ".join(part for part in (f"{r.target}:", r.task, r.drafter) if part) for r in paper.TABLE3]
    assert [row["paper models"] for row in rows(table)] == expected
    (row,) = rows(table, task="ende", draft="medium")
    assert (row["alpha t=0"], row["paper t=0"], row["alpha t=1"], row["paper t=1"]) == (0.77, 0.80, 0.66, 0.68)
    assert row["error t=1"] == 0.0034 and row["tokens t=1"] == 10012
    (row,) = rows(table, draft="bigram", task="ende")
    assert (row["alpha t=0"], row["paper t=0"], row["alpha t=1"], row["paper t=1"]) == (0.21, 0.20, None, 0.19)
    assert any("not in this table: temperature 0.3" in note for note in table.notes)
    for target in ("LaMDA", "GPT-like"):
        some = [row for row in rows(table) if row["paper models"].startswith(target)]
        assert len(some) == 3 and all(row["alpha t=0"] is None and row["paper t=0"] for row in some)


def test_table_4():
    table = tables.table4(document(cells=[cell("summarize", "medium", 0.0, 5, ["paper"])]))
    (row,) = rows(table, task="summarize", draft="medium", temp=0.0)
    assert (row["c"], row["paper c"], row["verification"]) == (0.1234, 0.04, 1.31)
    assert (row["predicted"], row["paper Exp"]) == (2.25, 2.6) and (row["speedup"], row["paper Emp"]) == (1.62, 3.0)
    assert row["predicted from tokens"] == 1.8 and row["measured / from tokens"] == pytest.approx(0.9)
    assert row["loop efficiency"] == 0.93


def test_table_5_predicts_with_the_measured_cost_of_calls():
    verification = {"1": 1.0, "2": 1.1, "3": 1.2, "5": 3.0}
    calls = [{"task": "ende", "draft": "small", "batch_size": 1, "c": 0.1, "verification": verification}]
    measured = [
        acceptance("ende", "small", 1.0, 0.6),
        acceptance("ende", "medium", 1.0, 0.7),
        acceptance("restore", "small", 0.0, 0.05),
    ]
    calls.append({**calls[0], "task": "restore"})
    cells = [cell("ende", "small", 1.0, 9, ["given"]), cell("ende", "medium", 1.0, 3, ["best"])]
    table = tables.table5(document(acceptance=measured, calls=calls, cells=cells))
    (row,) = rows(table, draft="small", temp=1.0, lenience=0.5)
    assert (row["alpha"], row["paper alpha"], row["paper speedup"]) == (pytest.approx(0.64), 0.71, 3.1)
    assert (row["c"], row["gamma"]) == (0.1, 2)  # of widths 2, 3 and 5; the last is too dear
    assert row["predicted"] == pytest.approx(theory.speedup(0.64, 2, 0.1, 1.2))
    (row,) = rows(table, draft="medium", temp=1.0, lenience=1.0)  # no calls of its own: what its cells cost
    assert row["gamma"] == 3 and row["predicted"] == pytest.approx(theory.speedup(0.7, 3, 0.1234, 1.31))
    (row,) = rows(table, draft="small", temp=1.0, lenience=0.3)
    assert row["alpha"] is None and row["predicted"] is None and row["paper alpha"] == 0.76
    (row,) = rows(table, task="restore", lenience=1.0)
    assert row["gamma"] == 1 and row["predicted"] == pytest.approx(1.05 / 1.2)  # a loss is told as one
    assert [row["paper alpha"] for row in rows(table, task="ende", draft="small", temp=0.0)] == [0.75, 0.75, 0.80, 0.87]
    assert rows(table)[0]["paper models"] == "EnDe unigram" and len(table.rows) == 22


@pytest.mark.parametrize("table_of", TABLES)
def test_simulated_acceptance_is_said_everywhere(table_of):
    parts = {"cells": [cell("ende", "small", 1.0, 7, ["paper"])], "acceptance": [acceptance("ende", "small", 1.0, 0.6)]}
    table = table_of(document(simulated=True, **parts))
    assert "simulated acceptance" in table.title and any("simulated acceptance" in note for note in table.notes)
    assert tables.markdown(table).count("simulated acceptance") == 2 and "simulated acceptance" in printed(table, 200)
    with_ours = [row for row in rows(table) if row["acceptance"] == "simulated"]
    assert with_ours and all((row["task"], row["draft"]) == ("ende", "small") for row in with_ours)
    assert tables.csv(table).count("simulated") == len(with_ours) < len(table.rows)
    measured = table_of(document(**parts))
    assert "simulated" not in tables.markdown(measured) + tables.csv(measured) + printed(measured, 200)


def test_where_it_was_measured_is_noted():
    notes = tables.table2(document()).notes
    assert "rule: token." in notes and "measured on 1 x cpu, some processor, jax 0.10.1, commit abcdef." in notes


def test_csv_comes_back_in_full_precision():
    alpha = 0.1 + 0.2
    text = 'a "quoted", b'
    table = tables.table2(document(cells=[cell("ende", "small", 0.0, 7, ["paper"], alpha=alpha, outputs=text)]))
    header, *lines = csv.reader(io.StringIO(tables.csv(table)))
    assert header == table.columns and len(lines) == len(table.rows)
    for line, row in zip(lines, table.rows, strict=True):
        for read, value in zip(line, row, strict=True):
            assert read == "" if value is None else type(value)(read) == value
    assert lines[0][header.index("alpha")] == "0.30000000000000004" and lines[0][header.index("outputs")] == text


def test_markdown():
    table = Table(
        "name", "A title", ["draft", "c", "tokens", "paper speedup"], [["a|b", 0.12345, 12345, 5.0]], ["Note."]
    )
    assert tables.markdown(table).splitlines() == [
        "### A title",
        "",
        "| draft | c | tokens | paper speedup |",
        "| --- | --: | --: | --: |",
        "| a\\|b | 0.123 | 12,345 | 5.0 |",
        "",
        "- Note.",
    ]


@pytest.mark.parametrize("width", [80, 100, 250])
@pytest.mark.parametrize("table_of", TABLES)
def test_a_terminal_of_any_width_shows_every_value(table_of, width):
    values = {
        "alpha": 0.4567,
        "c": 0.3141,
        "verification": 5.43,
        "loop_efficiency": 0.9876,
        "outputs": "1 of 32 differ",
    }
    cells = [cell("summarize", "medium", 1.0, 7, ["paper", "best"], **values)]
    table = table_of(document(cells=cells, acceptance=[acceptance("summarize", "medium", 1.0, 0.4567)]))
    text = printed(table, width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    shown = set(text.replace("─", "").split())
    for row in rows(table):
        for column, value in row.items():
            assert set(format_value(column, value).split()) <= shown


def test_a_table_too_wide_for_a_terminal_is_cut_between_columns():
    columns = ["peer", "mode", *(f"column{i}" for i in range(9))]
    table = Table("name", "Title", columns, [["a_peer", "temperature_sample", *map(float, range(9))]], [])
    parts = [line.split() for line in printed(table, 60).splitlines() if line.startswith(("peer", "a_peer"))]
    heads, values = parts[::2], parts[1::2]
    assert [name for head in heads for name in head if name.startswith("column")] == columns[2:]
    assert [float(value) for row in values for value in row[2:]] == list(range(9))
    assert len(heads) == 3 and all(head[:2] == ["peer", "mode"] for head in heads)


def test_text_is_not_read_as_markup():
    table = Table("name", "[bold]", ["[red]"], [["[blue]"]], ["[green]"])
    assert all(text in printed(table, 40) for text in ("[bold]", "[red]", "[blue]", "[green]"))
