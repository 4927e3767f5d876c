"""The `specdec` command. The only part of the package that knows gin.

    specdec generate --gin_file=configs/demo_ende.gin "The package is not installed."
    specdec generate --gin_file=configs/demo_ende.gin --gin.GAMMA=7 --trace < lines.txt
    specdec verify --gin_file=configs/demo_ende.gin "The package is not installed."
    specdec demo
    specdec convert demo:target /tmp/target_for_huggingface

Flags are those of T5X's programs: --gin_file, --gin.NAME=value, --gin_search_paths. A gin file's name is looked up in
the current directory, then in the search paths, then in the gin/ and configs/ that ship with the package.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import gin.config
import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.status import Status

from specdec_jax import certificate, comparison, conversion, distributed, generation, trace
from specdec_jax import demo as demonstration
from specdec_jax.generation import Batch, Pair
from specdec_jax.models.t5 import T5Config
from specdec_jax.packaged import GIN_ROOTS, resolve
from specdec_jax.settings import Models, Settings
from specdec_jax.sharding import fetch
from specdec_jax.timing import timed
from specdec_jax.vocabularies import load_vocabulary

gin.external_configurable(T5Config)
# gin would also take a name for a Python package's resource, which fails where a folder of that name is importable.
gin.config._FILE_READERS[:] = [(open, os.path.isfile)]

COMPARE_REPEATS = 5

_NAN = "the target's logits are NaN, or the settings leave no id; the output ends before them."

_Options = TypeVar("_Options")

_MACRO_DEFINITION = re.compile(r"^(\w+) =", re.MULTILINE)
_MACRO_REFERENCE = re.compile(r"%([\w./]+)")
_STRING = re.compile(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""")


@gin.configurable
def generate(
    *,
    target_checkpoint: Any,
    draft_checkpoint: Any,
    vocabulary: Any,
    extra_ids: Any,
    target_config: Any,
    draft_config: Any,
    dtype: Any,
    task_prefix: Any,
    gamma: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    min_decode_length: Any,
    forbidden_ids: Any,
    repetition_penalty: Any,
    no_repeat_ngram: Any,
    draft_temperature: Any,
    rule: Any,
    lenience: Any,
    seed: Any,
    max_decode_length: Any,
    max_input_length: Any,
    batch_size: Any,
    mesh: Any,
) -> tuple[Models, Settings]:
    """What gin files bind for `specdec generate`: the fields of Models and Settings, each to a macro of its name."""
    values = dict(locals())
    return _checked(Models, values), _checked(Settings, values)


@gin.configurable
def demo(
    *,
    gamma: Any,
    max_decode_length: Any,
    max_input_length: Any,
    seed: Any,
    num_examples: Any,
    num_repeats: Any,
    rule: Any,
    dtype: Any,
) -> demonstration.Options:
    """What gin files bind for `specdec demo`."""
    return _checked(demonstration.Options, dict(locals()))


def _checked(options: type[_Options], values: Mapping[str, Any]) -> _Options:
    """Builds a dataclass from gin's values, which may be anything, once they have the types it declares."""
    chosen = {}
    for field in dataclasses.fields(options):  # pyright: ignore[reportArgumentType]
        value = values[field.name]
        if field.type in (float, float | None) and type(value) is int:
            value = float(value) if abs(value) < 2**63 else math.inf if value > 0 else -math.inf
        if field.type in (tuple, tuple | None) and isinstance(value, list):
            value = tuple(value)
        kind: Any = field.type
        if not isinstance(value, kind) or isinstance(value, bool):
            name = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind.__args__)
            raise ValueError(f"{field.name} is {value!r}; it must be of type {name.replace('NoneType', 'None')}.")
        chosen[field.name] = value
    return options(**chosen)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      The exit status: 0, 1 where `verify` fails, 2 for a mistake of the user, which is one line on stderr.
    """
    convert = functools.partial(conversion.run, _Parser)
    commands = {"generate": _generate, "verify": _verify, "demo": _demo, "convert": convert}
    try:
        parser = _Parser(prog="specdec", description="Speculative decoding for T5.")
        parser.add_argument("command", choices=commands, help="specdec COMMAND --help says more")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        args = parser.parse_args(argv)
        return commands[args.command](args.arguments)
    except (ValueError, OSError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _gin_parser(command: str, description: str) -> _Parser:
    parser = _Parser(prog=f"specdec {command}", description=description)
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="a gin file; repeatable")
    parser.add_argument("--gin_search_paths", default="", metavar="A,B", help="more places to look for gin files")
    parser.add_argument(
        "--gin.NAME", metavar="VALUE", help="--gin.NAME=VALUE is the gin line NAME = VALUE; strings need quotes in it"
    )
    return parser


def _decoding_parser(command: str, description: str) -> _Parser:
    parser = _gin_parser(command, description)
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
    args, bindings = _split(parser, argv)
    with distributed.together(args.distributed):
        models, settings = _configure_decoding(args, bindings)
        texts, encoded, pair = _load(args.texts, models, settings)
        batches = generation.make_batches(encoded, pair.vocabulary, settings)
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
    args, bindings = _split(parser, argv)
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
    parser = _gin_parser("demo", "Decodes packaged examples with every packaged draft model and prints a table.")
    args, bindings = _split(parser, argv)
    args.gin_file = args.gin_file or ["configs/demo.gin"]
    demonstration.run(_configure(demo, args, bindings), Console())
    return 0


def _load(texts: list[str], models: Models, settings: Settings) -> tuple[list[str], list[list[int]], Pair]:
    """The inputs, or stdin's lines, their ids, and the models; the models last, since they take the longest."""
    texts = texts or _lines_of_stdin()
    if jax.process_count() > 1:
        distributed.check_same(texts, models, settings)
    vocabulary = load_vocabulary(resolve(models.vocabulary), models.extra_ids)
    encoded = generation.encode(texts, vocabulary, settings)
    return texts, encoded, generation.load_pair(models, vocabulary, settings.mesh, warn=_warn)


def _lines_of_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("there is no input; give texts as arguments, or lines on stdin.")
    return sys.stdin.read().splitlines()


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
        with _status(f"decoding input {first + 1} of {len(texts)}"):
            if as_json and shape not in compiled:  # the time of this call shall not include compilation
                jax.block_until_ready(decode())
            result, seconds = timed(decode)
        compiled.add(shape)
        result = fetch(result)
        for row, output in enumerate(generation.read_outputs(result, batch, pair.vocabulary)):
            text = texts[first + row]
            if output.finish_reason == "nan":
                _warn(f"input {first + row + 1}: {_NAN}")
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
        with _status(f"comparing, batch {i} of {len(batches)}"):
            comparisons.append(comparison.compare(pair, batch, settings, repeats=COMPARE_REPEATS))
        for output in generation.read_outputs(comparisons[-1].speculative, batch, pair.vocabulary):
            first += 1
            if output.finish_reason == "nan":
                _warn(f"input {first}: {_NAN}")
            print(_line(output.text), flush=True)
    dtype = pair.target.config.dtype.name
    Console().print(comparison.table(comparisons, dtype, temperature=settings.temperature))
    for line in comparison.explain(comparisons, dtype):
        print(line)
    if comparison.summarize(comparisons).speedup < 1:
        _warn("speculation was slower than plain decoding here; a smaller GAMMA or a smaller draft may help.")


def _status(message: str) -> Status:
    return Console(stderr=True).status(message)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _line(text: str) -> str:
    """A text on one line, whatever the model wrote."""
    return "\\n".join(text.splitlines())


def _split(parser: _Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed arguments, and the NAME=value of every --gin.NAME=value."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    is_binding = [i < end and arg.startswith("--gin.") for i, arg in enumerate(argv)]
    bindings = [arg.removeprefix("--gin.") for arg, yes in zip(argv, is_binding, strict=True) if yes]
    args = parser.parse_intermixed_args([arg for arg, yes in zip(argv, is_binding, strict=True) if not yes])
    for binding in bindings:
        if "=" not in binding:
            raise ValueError(f"--gin.{binding} has no value; write --gin.NAME=value.")
    return args, bindings


def _configure_decoding(args: argparse.Namespace, bindings: Sequence[str]) -> tuple[Models, Settings]:
    models, settings = _configure(generate, args, bindings)
    if args.distributed and settings.mesh is None:
        settings = dataclasses.replace(settings, mesh=(jax.device_count(), 1))
    return models, settings


def _configure(configurable: Callable[..., Any], args: argparse.Namespace, bindings: Sequence[str]) -> Any:
    """Calls a gin configurable as the gin files and flags bind it.

    Raises:
      ValueError: gin finds fault with a file or a flag, or a value is not what it has to be.
    """
    gin.clear_config()
    if not args.gin_file:
        raise ValueError("no gin file is given; give one, such as --gin_file=configs/demo_ende.gin.")
    for place in (*filter(None, args.gin_search_paths.split(",")), *GIN_ROOTS):
        gin.add_config_file_search_path(str(place))
    for file in args.gin_file:
        with _gin_errors(f"--gin_file={file}: "):
            gin.parse_config_file(file)
    for binding in bindings:
        name, value = binding.split("=", 1)
        with _gin_errors(f"--gin.{binding}: ", hint=f" A string needs quotes: --gin.{name}=\"'text'\"."):
            gin.parse_config(f"{name} = {value}")
    with _gin_errors():
        _check_macros(configurable)
        gin.finalize()
        return configurable()


@contextlib.contextmanager
def _gin_errors(where: str = "", hint: str = "") -> Iterator[None]:
    """Turns every error into a ValueError that says where; gin raises whatever a file provokes, and logs besides."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        message = str(error)
        if isinstance(error, SyntaxError):
            message = f"{error.msg} (line {error.lineno}){hint}"
        required = re.match(r"(\w+)/(gin\.)?macro\.value set to `%gin.REQUIRED`", message)
        if required:
            message = f"the macro {required[1]} is required; give --gin.{required[1]}=value."
        # gin appends which function it was calling, and may quote a Python object or all of the config.
        message = re.split(r"\n  In call to configurable| in config string:", message)[0]
        message = re.sub(r"malformed node or string[^\n]*\n *", "", message)
        raise ValueError(f"{where}{message}") from error
    finally:
        logging.disable(disabled)


def _check_macros(configurable: Callable[..., Any]) -> None:
    """Refuses a macro that nothing uses, most likely misspelt, and one that has no value."""
    config = _STRING.sub("''", gin.config_str())
    arguments = {name.upper() for name in inspect.signature(configurable).parameters}
    defined, used = set(_MACRO_DEFINITION.findall(config)), set(_MACRO_REFERENCE.findall(config))
    for name in sorted(defined - used - arguments):
        raise ValueError(f"nothing uses the macro {name}; macros are {', '.join(sorted(used | arguments))}.")
    for name in sorted(used - defined - {"gin.REQUIRED"}):
        raise ValueError(f"the macro {name} has no value; give --gin.{name}=value.")


def _one_line(error: Exception) -> str:
    """An error as one line; a setting that it begins with is named as its macro."""
    message = " ".join(str(error).split())
    name = message.split(" ", 1)[0]
    settings = {*inspect.signature(generate).parameters, *inspect.signature(demo).parameters}
    return message.replace(name, name.upper(), 1) if name in settings and f"{name} is " in message else message


if __name__ == "__main__":
    sys.exit(main())
