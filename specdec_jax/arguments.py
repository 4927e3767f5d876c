"""What the commands share: flags, inputs, outputs, and a sign that something is going on."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.status import Status

from specdec_jax import configuration
from specdec_jax.harness import records


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are ValueErrors and whose flags are never abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print."""
        raise ValueError(f"{message} (see {self.prog} --help)")


def gin_parser(command: str, description: str) -> Parser:
    """A command that gin configures."""
    parser = Parser(prog=f"specdec {command}", description=description)
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="a gin file; repeatable")
    parser.add_argument("--gin_search_paths", default="", metavar="A,B", help="more places to look for gin files")
    parser.add_argument(
        "--gin.NAME", metavar="VALUE", help="--gin.NAME=VALUE is the gin line NAME = VALUE; strings need quotes in it"
    )
    return parser


def split(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed arguments, and the NAME=value of every --gin.NAME=value."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    is_binding = [i < end and arg.startswith("--gin.") for i, arg in enumerate(argv)]
    bindings = [arg.removeprefix("--gin.") for arg, yes in zip(argv, is_binding, strict=True) if yes]
    args = parser.parse_intermixed_args([arg for arg, yes in zip(argv, is_binding, strict=True) if not yes])
    for binding in bindings:
        if "=" not in binding:
            raise ValueError(f"--gin.{binding} has no value; write --gin.NAME=value.")
    return args, bindings


def lines_of_stdin() -> list[str]:
    """Inputs, where none are arguments."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("there is no input; give texts as arguments, or lines on stdin.")
    return sys.stdin.read().splitlines()


def check_output(output: str | None) -> None:
    """Refuses an --output that cannot be written, before anything is measured."""
    if output is not None:
        if not pathlib.Path(output).name:
            raise ValueError(f"--output is {output!r}; give a path to which .json and .md can be added.")
        records.check_writable(pathlib.Path(output + ".json"), "--output")


def write_output(output: str | None, texts: Mapping[str, str]) -> None:
    """Writes a text for each ending, whole or not at all."""
    if output is not None:
        path = pathlib.Path(output)
        for suffix, text in texts.items():
            records.write(path.with_name(path.name + suffix), text)


def status(message: str) -> Status:
    """Something that moves while something takes its time."""
    return Console(stderr=True).status(message)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; yields what is told (what is being done, how much is done, of how much)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def warn(message: str) -> None:
    """A line on stderr."""
    print(f"warning: {message}", file=sys.stderr)


def configure(configurable: Callable[..., Any], args: argparse.Namespace, bindings: Sequence[str]) -> Any:
    """What gin makes of the files and flags of a command; see `configuration.configure`."""
    return configuration.configure(configurable, args.gin_file, bindings, args.gin_search_paths)
