"""What `tpu.measure` found, as tables: every program, and Table 2's speedups that follow, the paper's beside."""

from collections.abc import Mapping
from typing import Any

from specdec_jax import hlo, tpu
from specdec_jax.harness import paper
from specdec_jax.harness.rendering import Table, Value

CELLS = [tpu.Cell(row.draft, row.gamma, row.alpha) for row in paper.TABLE2]
"""What to predict for `table2`."""

_GIB = 2**30
_SHARES = {"matrix": hlo.MATRIX, "vector": hlo.VECTOR, "copies": hlo.COPY}


def programs(document: Mapping[str, Any]) -> Table:
    """Memory and estimated time of every program."""
    rows: list[dict[str, Value]] = []
    for name, found in document["programs"].items():
        cycles, total = found["cycles"], max(sum(found["cycles"].values()), 1)
        rows.append(
            {
                "program": name,
                "GiB": found["hbm_bytes"] / _GIB,
                "ms": 1e3 * found["seconds"],
                "compute": 1e3 * found["computing"],
                "read": 1e3 * found["floor"],
                "ratio": found["seconds"] / found["floor"],
                **{name: round(100 * cycles.get(kind, 0) / total) for name, kind in _SHARES.items()},
                "moved": sum(times for *_, times in found["copies"]),
                "links": found["collectives"],
                "link MB": found["link_bytes"] / 1e6,
                "link ms": 1e3 * found["linking"],
                "host": found["host_transfers"],
            }
        )
    nothing = [name for name in rows[0] if all(row[name] == 0 for row in rows)]
    columns = [name for name in rows[0] if name not in nothing]
    options = document["options"]
    chips = f"{options['topology']}, mesh {tuple(options['mesh'])}"
    title = f"{options['target_size']} with {options['draft_size']}, gamma {options['gamma']}, on {chips}"
    largest = [f"{name} {document[name]}" for name in tpu.LARGEST if name in document]
    notes = [
        f"Estimates of the compiler, libtpu {document['libtpu']}; nothing ran on a TPU.",
        "GiB: of HBM on a chip, weights included. ms: the greater of compute (scheduled cycles over the clock) and "
        "read (weights and caches over the bandwidth of HBM); ratio is ms over read.",
        "matrix, vector, copies: percent of the cycles in products on either unit, and in copies and transposes.",
        "moved: copies of whole weights or caches. links: operations between chips, what a chip sends in them, and the "
        "time of that, which comes to compute. host: transfers to the host.",
        *([f"All zero, and left out: {', '.join(nothing)}."] if nothing else []),
        f"{options['dtype']}, batch {options['batch_size']}, inputs of {options['max_input_length']} tokens, outputs "
        f"of up to {options['max_decode_length']}, temperature {options['temperature']:g}, "
        f"layouts {options['layouts']}.",
        f"c {document['c']:.3f}, verification {document['verification']:.2f}; a step is "
        f"{document['step_over_calls']:.2f} of its calls; plain decoding makes "
        f"{document['plain_tokens_per_second']:.0f} tokens/s.",
        *([f"Compiled too, and fits: {', '.join(largest)}."] if largest else []),
    ]
    return Table(
        "tpu",
        f"estimated by the compiler: {title}",
        columns,
        [[row[name] for name in columns] for row in rows],
        notes,
    )


def table2(document: Mapping[str, Any]) -> Table:
    """Tables 2 and 4 as the estimates predict them at the paper's alphas; for what `CELLS` asked about."""
    rows: list[dict[str, Value]] = [
        {
            "task": row.task,
            "draft": row.draft,
            "temp": row.temperature,
            "gamma": row.gamma,
            "paper alpha": row.alpha,
            "c": cell["c"],
            "predicted": cell["predicted"],
            "over t5x": cell["predicted_over_t5x"],
            "paper c": row.c,
            "paper Exp": row.expected,
            "paper Emp": row.measured,
        }
        for row, cell in zip(paper.TABLE2, document["cells"], strict=True)
    ]
    notes = [
        f"Estimates of the compiler, libtpu {document['libtpu']}; nothing ran on a TPU.",
        "predicted: Equation 1's tokens at the paper's alpha, over a step's calls in plain decoding's steps.",
        "over t5x: the same over t5x's own decoding step by the same estimate, so that it has in it what this program "
        "gains without any guess; where there is no such estimate it is empty.",
    ]
    return Table("table2", "Table 2, predicted for TPU", list(rows[0]), [list(row.values()) for row in rows], notes)
