"""The `specdec` command.

    specdec generate --gin_file=configs/demo_ende.gin "The package is not installed."
    specdec generate --gin_file=configs/demo_ende.gin --gin.GAMMA=7 --trace < lines.txt
    specdec verify --gin_file=configs/demo_ende.gin "The package is not installed."
    specdec demo
    specdec convert demo:target /tmp/target_for_huggingface
    specdec table2 --gin_file=configs/table2_demo.gin
    specdec peers --gin_file=configs/demo_ende.gin < lines.txt
    specdec tpu
    specdec drafter build --gin_file=configs/demo_ende.gin --output=table.npz < lines.txt
    specdec tune --gin_file=configs/demo_ende.gin --output=tuned.gin < lines.txt

Flags are those of T5X's programs: --gin_file, --gin.NAME=value, --gin_search_paths; configuration.py reads them.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from specdec_jax import (
    arguments,
    certificate,
    comparison,
    configuration,
    conversion,
    distributed,
    drafter_commands,
    generation,
    tpu,
    trace,
)
from specdec_jax import demo as demonstration
from specdec_jax.generation import Batch, Pair
from specdec_jax.harness import drawing, figures, grid, peers, plots, records, tables, tpu_report
from specdec_jax.harness.plan import Plan
from specdec_jax.packaged import resolve
from specdec_jax.settings import Models, Settings
from specdec_jax.sharding import fetch
from specdec_jax.timing import timed
from specdec_jax.vocabularies import load_vocabulary

COMPARE_REPEATS = 5

_NAN = "the target's logits are NaN, or the settings leave no id; the output ends before them."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      The exit status: 0, 1 where `verify` fails, 2 for a mistake of the user, which is one line on stderr.
    """
    convert = functools.partial(conversion.run, arguments.Parser)
    commands = {"generate": _generate, "verify": _verify, "demo": _demo, "convert": convert, "peers": _peers}
    commands |= {name: functools.partial(_table, name) for name in _TABLES} | {"figures": _figures, "tpu": _tpu}
    commands |= {"drafter": drafter_commands.drafter, "tune": drafter_commands.tune}
    try:
        parser = arguments.Parser(prog="specdec", description="Speculative decoding for T5.")
        parser.add_argument("command", choices=commands, help="specdec COMMAND --help says more")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        args = parser.parse_args(argv)
        return commands[args.command](args.arguments)
    except (ValueError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _decoding_parser(command: str, description: str) -> arguments.Parser:
    parser = arguments.gin_parser(command, description)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="inputs; without any, the lines of stdin")
    parser.add_argument(
        "--distributed", action="store_true", help="one of several processes, all started alike; the first prints"
    )
    return parser


def _generate(argv: Sequence[str]) -> int:
    parser = _decoding_parser("generate", "Decodes texts speculatively, one output line per input.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--trace", action="store_true", help="print what each target call accepted and corrected")
    mode.add_argument("--compare", action="store_true", help="also decode without guesses; print speed and acceptance")
    mode.add_argument("--json", action="store_true", help="print one JSON object per input")
    args, bindings = arguments.split(parser, argv)
    with distributed.together(args.distributed):
        models, settings = _configure_decoding(args, bindings)
        texts, encoded, pair = _load(args.texts, models, settings)
        batches = generation.make_batches(encoded, pair.vocabulary, settings)
        pair = generation.lay_out(pair, batches[0], settings)
        if args.compare:
            _print_comparison(pair, batches, settings)
        else:
            _print_outputs(pair, batches, settings, texts, show_trace=args.trace, as_json=args.json)
    return 0


def _verify(argv: Sequence[str]) -> int:
    parser = _decoding_parser(
        "verify", "Tests on inputs of one's own that guesses change nothing; prints a certificate."
    )
    parser.add_argument("--sequences", type=int, default=2048, help="decoded per input of the law test (2048)")
    parser.add_argument("--laws", type=int, default=2, help="inputs that the law test takes (2)")
    parser.add_argument("--json", action="store_true", help="print the certificate as one JSON object")
    args, bindings = arguments.split(parser, argv)
    if min(args.sequences, args.laws) < 1:
        raise ValueError(f"--sequences and --laws are {args.sequences} and {args.laws}; both must be 1 or more.")
    with distributed.together(args.distributed):
        return _print_certificate(args, *_configure_decoding(args, bindings))


def _print_certificate(args: argparse.Namespace, models: Models, settings: Settings) -> int:
    certificate.check(settings)
    texts, encoded, pair = _load(args.texts, models, settings)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        found = certificate.verify(
            pair,
            texts,
            encoded,
            settings,
            num_sequences=args.sequences,
            num_laws=args.laws,
            report=lambda name, share: progress.update(task, description=name, completed=share),
        )
    if args.json:
        told = {"models": dataclasses.asdict(models), **found.as_dict()}
        print(json.dumps(told, ensure_ascii=False, default=str))  # a config's dtype by its name
    else:
        print("\n".join(found.lines()))
    return 0 if found.passed else 1


def _demo(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(
        "demo", "Decodes packaged examples with every packaged draft model and prints a table."
    )
    args, bindings = arguments.split(parser, argv)
    args.gin_file = args.gin_file or ["configs/demo.gin"]
    demonstration.run(arguments.configure(configuration.demo, args, bindings), Console())
    return 0


_TABLES = {
    "table1": lambda document: tables.table1(),
    "table2": tables.table2,
    "table3": tables.table3,
    "table4": tables.table4,
    "table5": tables.table5,
}


def _table(name: str, argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(name, f"Makes the paper's Table {name[-1]} beside ours; measures what is missing.")
    args, bindings = arguments.split(parser, argv)
    args.gin_file = args.gin_file or ["configs/table2_demo.gin"]
    plan = arguments.configure(configuration.plan, args, bindings)
    records.check_writable(plan.path(name, ".md"), "DIRECTORY")
    known = 0 if name == "table1" else _num_entries(records.read(plan.path("table2", ".json")))
    measured = {} if name == "table1" else _measure(plan, with_cells=name in ("table2", "table4"))
    table, console = _TABLES[name](measured), Console()
    console.print(tables.show(table, console.width))
    if name in ("table2", "table4"):
        print("\n".join(grid.advice(measured)))
    records.write(plan.path(name, ".md"), tables.markdown(table))
    records.write(plan.path(name, ".csv"), tables.csv(table))
    written = [".md", ".csv"]
    if name == "table2":
        written.append(".json")
        if figures.has_matplotlib():
            written += _save(plan, {"table2": lambda: plots.table2_plot(measured)})
        else:  # a table is worth having without its figure
            arguments.warn("no figure was drawn, which needs matplotlib: pip install 'specdec_jax[plots]'")
    print(f"written: {plan.path(name, '')} ({', '.join(written)})")
    if known:
        print(
            f"{known} measurements are from {plan.path('table2', '.json')}, {_num_entries(measured) - known} were made "
            "now; with another NAME all are made."
        )
    return 0


def _num_entries(document: Mapping[str, Any]) -> int:
    return sum(len(document.get(section, [])) for section in ("acceptance", "calls", "cells"))


def _figures(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(
        "figures", "Draws the paper's figures, with what was measured; measures what is missing."
    )
    args, bindings = arguments.split(parser, argv)
    args.gin_file = args.gin_file or ["configs/table2_demo.gin"]
    plan = arguments.configure(configuration.plan, args, bindings)
    figures.check_matplotlib()
    records.check_writable(plan.path("figure1", ".png"), "DIRECTORY")
    measured = _measure(plan, with_cells=True)
    made = drawing.draw(plan, measured)
    print(f"written: {', '.join(str(plan.path(name, '')) for name in made)} ({', '.join(_save(plan, made))})")
    return 0


def _measure(plan: Plan, *, with_cells: bool) -> dict[str, Any]:
    with arguments.progress() as report:
        return grid.run(plan, with_cells=with_cells, report=report)


def _save(plan: Plan, made: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Draws and writes figures; returns the endings of what was written."""
    for name, draw in made.items():
        figures.save(draw(), pathlib.Path(plan.directory), plan.path(name, "").name)
    return [".png", ".svg"]


def _peers(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser("peers", "Times other implementations of T5 on the same models and inputs, greedily.")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="inputs; without any, the lines of stdin")
    parser.add_argument("--rounds", type=int, default=3, help="timed decodes of each input by each peer (3)")
    parser.add_argument("--output", metavar="PATH", help="write PATH.json, PATH.md and PATH.csv")
    args, bindings = arguments.split(parser, argv)
    models, settings = arguments.configure(configuration.generate, args, bindings)
    arguments.check_output(args.output)
    with Console(stderr=True).status("starting") as status:
        found = peers.measure(
            models, settings, args.texts or arguments.lines_of_stdin(), rounds=args.rounds, report=status.update
        )
    table, console = peers.table(found), Console()
    console.print(tables.show(table, console.width))
    texts = {".json": json.dumps(found, indent=1), ".md": tables.markdown(table), ".csv": tables.csv(table)}
    arguments.write_output(args.output, texts)
    return 0


def _tpu(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(
        "tpu", "Compiles decoding for a TPU that is not there; prints memory and estimated times."
    )
    parser.add_argument("--table2", action="store_true", help="also predict Table 2, which compiles all of its drafts")
    parser.add_argument("--largest", action="store_true", help="also find the largest batch and output that fit")
    parser.add_argument("--output", metavar="PATH", help="write PATH.json and PATH.md")
    args, bindings = arguments.split(parser, argv)
    args.gin_file = args.gin_file or ["configs/tpu.gin"]
    options = arguments.configure(configuration.tpu, args, bindings)
    arguments.check_output(args.output)
    jax.config.update("jax_platforms", "cpu")  # nothing runs: a TPU that is there is left alone
    with arguments.status("starting") as status:
        cells = tpu_report.CELLS if args.table2 else ()
        report = lambda what: status.update(f"compiling: {what}")  # noqa: E731
        found = tpu.measure(options, cells, largest=args.largest, report=report)
    made, console = [tpu_report.programs(found)], Console()
    made += [tpu_report.table2(found)] if args.table2 else []
    for table in made:
        console.print(tables.show(table, console.width))
    told = {**found, "environment": records.environment()}
    texts = {".json": json.dumps(told, indent=1), ".md": "\n".join(map(tables.markdown, made))}
    arguments.write_output(args.output, texts)
    return 0


def _load(texts: list[str], models: Models, settings: Settings) -> tuple[list[str], list[list[int]], Pair]:
    """The inputs, or stdin's lines, their ids, and the models; the models last, since they take the longest."""
    texts = texts or arguments.lines_of_stdin()
    if jax.process_count() > 1:
        distributed.check_same(texts, models, settings)
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    encoded = generation.encode(texts, vocabulary, settings)
    return texts, encoded, generation.load_pair(models, vocabulary, settings.mesh, warn=arguments.warn)


def _print_outputs(
    pair: Pair, batches: Sequence[Batch], settings: Settings, texts: Sequence[str], *, show_trace: bool, as_json: bool
) -> None:
    console, first = Console(), 0
    compiled: set[tuple[int, ...]] = set()
    if show_trace:
        console.print(trace.legend(console))
    for batch in batches:
        decode = functools.partial(generation.decode, pair, batch, settings)
        shape = jax.tree.leaves(batch.inputs)[0].shape
        with arguments.status(f"decoding input {first + 1} of {len(texts)}"):
            if as_json and shape not in compiled:  # the time of this call shall not include compilation
                jax.block_until_ready(decode())
            found = timed(decode)
        compiled.add(shape)
        result, seconds = fetch(found.value), found.seconds
        for row, output in enumerate(generation.read_outputs(result, batch, pair.vocabulary)):
            text = texts[first + row]
            if output.finish_reason == "nan":
                arguments.warn(f"input {first + row + 1}: {_NAN}")
            if as_json:
                print(json.dumps({"input": text, **output._asdict(), "seconds": seconds}, ensure_ascii=False))
                continue
            if show_trace:
                console.print(text, style="bold", markup=False, highlight=False)
                trace.show(result, row, pair.vocabulary, console)
            print(_line(output.text), flush=True)
        first += batch.num_rows


def _print_comparison(pair: Pair, batches: Sequence[Batch], settings: Settings) -> None:
    comparisons, first = [], 0
    for i, batch in enumerate(batches, start=1):
        with arguments.status(f"comparing, batch {i} of {len(batches)}"):
            comparisons.append(comparison.compare(pair, batch, settings, repeats=COMPARE_REPEATS))
        for output in generation.read_outputs(comparisons[-1].speculative, batch, pair.vocabulary):
            first += 1
            if output.finish_reason == "nan":
                arguments.warn(f"input {first}: {_NAN}")
            print(_line(output.text), flush=True)
    dtype = pair.target.config.dtype.name
    Console().print(comparison.table(comparisons, dtype, temperature=settings.temperature))
    for line in comparison.explain(comparisons, dtype):
        print(line)
    if comparison.summarize(comparisons).speedup < 1:
        arguments.warn("speculation was slower than plain decoding here; a smaller GAMMA or a smaller draft may help.")


def _line(text: str) -> str:
    """A text on one line, whatever the model wrote."""
    return "\\n".join(text.splitlines())


def _configure_decoding(args: argparse.Namespace, bindings: Sequence[str]) -> tuple[Models, Settings]:
    models, settings = arguments.configure(configuration.generate, args, bindings)
    if args.distributed and settings.mesh is None:
        settings = dataclasses.replace(settings, mesh=(jax.device_count(), 1))
    return models, settings


def _one_line(error: Exception) -> str:
    """An error as one line; a setting that it begins with is named as its macro."""
    message = " ".join(str(error).split())
    name = message.split(" ", 1)[0]
    known = (configuration.generate, configuration.demo, configuration.plan, configuration.tpu, configuration.drafters)
    settings = {parameter for configurable in known for parameter in inspect.signature(configurable).parameters}
    return message.replace(name, name.upper(), 1) if name in settings and f"{name} is " in message else message


if __name__ == "__main__":
    sys.exit(main())
