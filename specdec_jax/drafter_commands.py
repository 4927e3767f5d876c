"""`specdec drafter` and `specdec tune`: tables of tokens, what drafters are worth, and which suits a pair."""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from specdec_jax import arguments, configuration, generation
from specdec_jax.drafters import named
from specdec_jax.drafters.one_shot import OneShotDrafter
from specdec_jax.drafters.table import Table, count
from specdec_jax.generation import Batch, Pair
from specdec_jax.harness import costs, drafters, records, tables, tuning
from specdec_jax.harness.rendering import Table as Shown
from specdec_jax.packaged import resolve
from specdec_jax.results import DecodingResult
from specdec_jax.settings import Models, Settings
from specdec_jax.sharding import fetch
from specdec_jax.vocabularies import Vocabulary, load_vocabulary

TUNE_ROUNDS = 5


def drafter(argv: Sequence[str]) -> int:
    """`specdec drafter`: build, inspect or measure."""
    commands = {"build": _build, "inspect": _inspect, "measure": _measure}
    parser = arguments.Parser(prog="specdec drafter", description="Tables that draft, and what drafters are worth.")
    parser.add_argument("command", choices=commands, help="specdec drafter COMMAND --help says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    return commands[args.command](args.arguments)


def _build(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(
        "drafter build",
        "Counts tokens into a table for unigram, bigram, copy and one_shot: of a text file, of a SeqIO task,\n"
        "or of what the target itself says to the lines of stdin (with the settings of the gin files).",
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="the table to write, PATH.npz")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="count this text, one output per line")
    source.add_argument("--task", metavar="NAME", help="count the targets of this SeqIO task or mixture")
    parser.add_argument("--module", metavar="NAME", help="the Python module to import first, which registers the task")
    parser.add_argument("--split", default="train", help="of the task (train)")
    parser.add_argument("--distances", type=int, default=1, help="count pairs up to so far apart; one_shot: GAMMA (1)")
    parser.add_argument("--least", type=int, default=1, help="leave out pairs that come less often (1)")
    args, bindings = arguments.split(parser, argv)
    path = pathlib.Path(args.output if args.output.endswith(".npz") else args.output + ".npz")
    records.check_writable(path, "--output")
    models, settings = arguments.configure(configuration.generate, args, bindings)
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    with arguments.status("reading the target") as status:
        config = generation.read_config(models.target_checkpoint, models.target_config)
        generation.check_rows(config, vocabulary, models.target_checkpoint, arguments.warn)
        if args.text is not None:
            sequences, what = _of_text(args.text, vocabulary), f"text {pathlib.Path(args.text).name}"
        elif args.task is not None:
            sequences, what = _of_task(args.task, args.split, args.module), f"task {args.task}, split {args.split}"
        else:
            sequences = _of_target(models, vocabulary, arguments.lines_of_stdin(), settings, status.update)
            what = f"outputs of {models.target_checkpoint}, temperature {settings.temperature:g}"
        status.update("counting")
        table = count(
            sequences,
            vocab_size=config.vocab_size,
            num_ids=vocabulary.size,
            start_id=config.start_id,
            distances=args.distances,
            least=args.least,
            source=what,
        )
    table.save(path)
    print(f"written: {path}, {_describe(table)}")
    return 0


def _of_text(path: str, vocabulary: Vocabulary) -> Iterator[list[int]]:
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --text {path} ({error}); give a text file with one output per line.") from error
    return ([*vocabulary.encode(line), vocabulary.eos_id] for line in lines if line.strip())


def _of_task(name: str, split: str, module: str | None) -> Iterator[list[int]]:
    try:
        import importlib

        import seqio

        if module is not None:
            importlib.import_module(module)
        task = seqio.get_mixture_or_task(name)
        dataset = task.get_dataset(split=split, sequence_length=None, shuffle=False)
    except Exception as error:  # seqio raises whatever a task provokes
        raise ValueError(
            f"cannot read --task {name}, split {split} ({type(error).__name__}: {error}); it needs seqio "
            "(pip install 'specdec_jax[seqio]'), and --module with what registers the task."
        ) from error
    return (example["targets"].tolist() for example in dataset.as_numpy_iterator())


def _of_target(
    models: Models, vocabulary: Vocabulary, texts: Sequence[str], settings: Settings, report: Callable[[str], None]
) -> Iterator[list[int]]:
    encoded = generation.encode(texts, vocabulary, settings)
    target, params = generation.load_model(models.target_checkpoint, models.target_config, models.dtype)
    pair = Pair(target, params, *named.make("random", target.vocab_size, None, None, None), vocabulary)
    for number, batch in enumerate(generation.make_batches(encoded, vocabulary, settings)):
        report(f"decoding input {number * settings.batch_size + 1} of {len(texts)}")
        result = fetch(generation.decode_plainly(pair, batch, settings))
        for tokens, length in zip(result.tokens[: batch.num_rows], result.lengths, strict=False):
            yield tokens[:length].tolist()


def _describe(table: Table) -> str:
    pairs = [int((table.contexts // table.vocab_size == i).sum()) for i in range(table.distances)]
    return (
        f"{table.counts.sum()} tokens, {int((table.counts > 0).sum())} of {table.num_ids} ids seen, "
        f"{', '.join(map(str, pairs))} different pairs at distances 1 to {table.distances}, from {table.source}"
    )


def _inspect(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser("drafter inspect", "Shows what is frequent in a table, and what follows a token.")
    parser.add_argument("table", metavar="TABLE", help="an .npz file, or a demo: name")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="show what follows the last token of each")
    parser.add_argument("--top", type=int, default=8, help="how many successors to show (8)")
    args, bindings = arguments.split(parser, argv)
    if args.top < 1:
        raise ValueError(f"--top is {args.top}; it must be 1 or more.")
    args.gin_file = args.gin_file or ["configs/demo_ende.gin"]
    models, _ = arguments.configure(configuration.generate, args, bindings)
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    table = Table.load(resolve(args.table))
    if vocabulary.size != table.num_ids:
        raise ValueError(
            f"the table {args.table} has {table.num_ids} ids and the vocabulary {vocabulary.size}; give the gin file "
            "of the models that it was built for."
        )
    print(_describe(table))
    frequent = table.counts.argsort()[::-1][: args.top]
    print("frequent: " + _successors([(int(i), int(table.counts[i])) for i in frequent], vocabulary))
    for text in args.texts:
        ids = vocabulary.encode(text)
        if not ids:
            raise ValueError(f"{text!r} has no token; give text.")
        for distance in range(1, table.distances + 1):
            found = table.after(ids[-1], distance)[: args.top]
            print(f"{distance} behind {_piece(ids[-1], vocabulary)}: {_successors(found, vocabulary) or 'never seen'}")
    return 0


def _successors(found: Sequence[tuple[int, int]], vocabulary: Vocabulary) -> str:
    return ", ".join(f"{_piece(token, vocabulary)} {times}" for token, times in found)


def _piece(token: int, vocabulary: Vocabulary) -> str:
    return "(end)" if token == vocabulary.eos_id else repr(vocabulary.decode([token]))


def _measure(argv: Sequence[str]) -> int:
    parser = arguments.gin_parser(
        "drafter measure", "Measures every drafter of a plan, at its best gamma and with adaptive gamma."
    )
    args, bindings = arguments.split(parser, argv)
    args.gin_file = args.gin_file or ["configs/drafters_demo.gin"]
    plan = arguments.configure(configuration.drafters, args, bindings)
    records.check_writable(plan.path(".md"), "DIRECTORY")
    with arguments.progress() as report:
        document = drafters.run(plan, report=report)
    shown = [drafters.table(document), drafters.lenience_table(document)]
    console = Console()
    for table in shown:
        console.print(tables.show(table, console.width))
    records.write(plan.path(".md"), "\n".join(map(tables.markdown, shown)))
    records.write(plan.path(".csv"), tables.csv(shown[0]))
    print(f"written: {plan.path('')} (.json, .md, .csv)")
    return 0


def tune(argv: Sequence[str]) -> int:
    """`specdec tune`: which drafter, gamma and rule are the best for a pair, and a gin file that says so."""
    parser = arguments.gin_parser(
        "tune", "Finds the drafter and gamma that decode texts like these the fastest here; writes them as a gin file."
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="inputs; without any, the lines of stdin")
    parser.add_argument("--output", metavar="FILE", help="the gin file to write; give it behind the others")
    parser.add_argument("--max_gamma", type=int, default=7, help="the most guesses of a step (7)")
    args, bindings = arguments.split(parser, argv)
    if not 1 <= args.max_gamma <= 64:
        raise ValueError(f"--max_gamma is {args.max_gamma}; it must be 1 to 64.")
    if args.output is not None:
        records.check_writable(pathlib.Path(args.output), "--output")
    models, settings = arguments.configure(configuration.generate, args, bindings)
    if settings.max_decode_length < 4 * (args.max_gamma + 1):
        raise ValueError(
            f"max_decode_length is {settings.max_decode_length}; to time steps of up to {args.max_gamma + 1} tokens it "
            f"must be {4 * (args.max_gamma + 1)} or more (or give a lower --max_gamma)."
        )
    texts = args.texts or arguments.lines_of_stdin()
    settings = dataclasses.replace(settings, gamma=args.max_gamma, adaptation=None)
    with arguments.status("starting") as status:
        found = _examine_all(models, settings, texts, status.update)
    table, console = _tune_table(found, settings), Console()
    console.print(tables.show(table, console.width))
    best = max(found, key=lambda name: max(found[name].predicted[str(found[name].gamma)], found[name].adaptive))
    text = _as_gin(best, found[best], models, settings)
    if args.output is None:
        print(text, end="")
    else:
        records.write(pathlib.Path(args.output), text)
        print(f"written: {args.output}")
    if max(found[best].predicted[str(found[best].gamma)], found[best].adaptive) < 1:
        arguments.warn("no drafter pays here: plain decoding is the fastest.")
    return 0


def _examine_all(
    models: Models, settings: Settings, texts: Sequence[str], report: Callable[[str], None]
) -> dict[str, tuning.Finding]:
    """The drafter that is configured, and those that need no more than it does."""
    kinds = [models.drafter, "copy"]
    if models.draft_table is not None:
        kinds += ["bigram", *(["mixture", "hierarchical"] if models.draft_checkpoint is not None else [])]
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    encoded = generation.encode(texts, vocabulary, settings)
    batches = generation.make_batches(encoded, vocabulary, settings, length=settings.max_input_length)
    found: dict[str, tuning.Finding] = {}
    plain: list[DecodingResult] = []
    verification: dict[int, float] = {}
    for kind in dict.fromkeys(kinds):
        report(f"{kind}: reading")
        pair = generation.load_pair(dataclasses.replace(models, drafter=kind), vocabulary, settings.mesh)
        if isinstance(pair.drafter, OneShotDrafter) and len(pair.draft_params.rest) < settings.gamma:
            raise ValueError(
                f"--max_gamma is {settings.gamma} and the table {models.draft_table} has distances up to "
                f"{len(pair.draft_params.rest)}; give a lower --max_gamma or a table of --distances={settings.gamma}."
            )
        if not plain:
            report("decoding without guesses")
            plain = [fetch(generation.decode_plainly(pair, batch, settings)) for batch in batches]
        found[kind] = _examine(
            pair, batches, plain, settings, verification, lambda what, kind=kind: report(f"{kind}: {what}")
        )
    return found


def _examine(
    pair: Pair,
    batches: Sequence[Batch],
    plain: Sequence[DecodingResult],
    settings: Settings,
    verification: dict[int, float],
    report: Callable[[str], None],
) -> tuning.Finding:
    work = costs.workload(*pair[:4], batches[0], settings)
    report("timing calls")
    if not verification:
        verification |= tuning.measure_verification(work, rounds=TUNE_ROUNDS)
    c = tuning.measure_c(work, rounds=TUNE_ROUNDS)
    base, full = tuning.measure_ends(work, rounds=TUNE_ROUNDS)
    report("decoding")
    num = sum(batch.num_rows for batch in batches)
    return tuning.examine(
        pair, batches, plain, batches, settings, verification=verification, c=c, base=base, full=full, num_inputs=num
    )


def _tune_table(found: dict[str, tuning.Finding], settings: Settings) -> Shown:
    rows = [
        [name, some.alpha, some.c, some.gamma, some.predicted[str(some.gamma)], some.adaptive, some.oracle]
        for name, some in found.items()
    ]
    notes = [
        f"speedups over plain decoding by the cost of steps, prefill left out; {settings.verification_rule().__name__} "
        f"rule, temperature {settings.temperature:g}, batch {settings.batch_size}.",
        "above batch 1 a call is as wide as the neediest row, which these do not know.",
        "fixed: with the best gamma. adaptive: with adaptive gamma. oracle: if it were known what will stand.",
    ]
    return Shown("tune", "drafters", ["drafter", "alpha", "c", "gamma", "fixed", "adaptive", "oracle"], rows, notes)


def _as_gin(name: str, found: tuning.Finding, models: Models, settings: Settings) -> str:
    """The choice as macros."""
    fixed = found.predicted[str(found.gamma)]
    use_adaptive = found.adaptive > fixed
    adaptation: dict[str, Any] | None = None
    if use_adaptive:
        adaptation = {
            key: [round(x, 4) for x in value] if isinstance(value, list) else round(value, 4)
            for key, value in found.adaptation.items()
        }
    lines = [
        "# PART: what specdec tune found to be the fastest; give it behind the gin files that it was tuned with.",
        f"# {models.target_checkpoint}, temperature {settings.temperature:g}, batch {settings.batch_size}: predicted "
        f"speedup {max(found.adaptive, fixed):.2f}.",
        "",
        f"DRAFTER = {name!r}",
        f"GAMMA = {settings.gamma if use_adaptive else found.gamma}",
        f"RULE = {settings.verification_rule().__name__!r}",
        f"ADAPTATION = {adaptation}",
    ]
    return "\n".join(lines) + "\n"
