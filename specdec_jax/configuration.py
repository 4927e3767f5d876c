"""What gin files and flags bind, as checked settings. With cli.py the only part of the package that knows gin.

A gin file's name is looked up in the current directory, then in the search paths, then in the gin/ and configs/ that
ship with the package. Each configurable takes the fields of a settings class, so that gin files name them one by one.
"""

import contextlib
import dataclasses
import difflib
import inspect
import logging
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import gin.config

from specdec_jax import demo as demonstration
from specdec_jax.harness.drafters import DrafterPlan
from specdec_jax.harness.plan import Plan, Task
from specdec_jax.models.t5 import T5Config
from specdec_jax.packaged import GIN_ROOTS
from specdec_jax.settings import Models, Settings
from specdec_jax.tpu_compiler import Options

gin.external_configurable(T5Config)
# gin would also take a name for a Python package's resource, which fails where a folder of that name is importable.
gin.config._FILE_READERS[:] = [(open, os.path.isfile)]

_Options = TypeVar("_Options")

_MACRO_DEFINITION = re.compile(r"^(\w+) =", re.MULTILINE)
_REQUIRED_MACRO = re.compile(r"^(\w+) = %gin.REQUIRED$", re.MULTILINE)
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
    drafter: Any,
    draft_table: Any,
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
    adaptation: Any,
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


def task(
    *,
    name: Any,
    paper_name: Any,
    inputs: Any,
    task_prefix: Any,
    target: Any,
    drafts: Any,
    vocabulary: Any,
    extra_ids: Any,
    max_input_length: Any,
    max_decode_length: Any,
) -> Task:
    """What gin files bind for a task of the tables, in a scope of its own, as `ende/Task.name = 'EnDe'`."""
    return _checked(Task, dict(locals()))


gin.external_configurable(task, "Task")


@gin.configurable
def plan(
    *,
    name: Any,
    directory: Any,
    tasks: Any,
    paper_drafts: Any,
    temperatures: Any,
    gammas: Any,
    max_gamma: Any,
    rule: Any,
    batch_size: Any,
    num_prompts: Any,
    repeats: Any,
    rounds: Any,
    num_tokens: Any,
    alpha_batch_size: Any,
    seed: Any,
    dtype: Any,
) -> Plan:
    """What gin files bind for `specdec table2` to `table5` and `specdec figures`."""
    return _checked(Plan, dict(locals()))


@gin.configurable
def tpu(
    *,
    sizes: Any,
    target_size: Any,
    draft_size: Any,
    gamma: Any,
    topology: Any,
    mesh: Any,
    batch_size: Any,
    max_input_length: Any,
    max_decode_length: Any,
    temperature: Any,
    dtype: Any,
    layouts: Any,
) -> Options:
    """What gin files bind for `specdec tpu`."""
    return _checked(Options, dict(locals()))


@gin.configurable
def drafters(
    *,
    name: Any,
    directory: Any,
    tasks: Any,
    tables: Any,
    drafters: Any,
    temperatures: Any,
    max_gamma: Any,
    num_prompts: Any,
    repeats: Any,
    rounds: Any,
    num_counted: Any,
    num_tokens: Any,
    alpha_batch_size: Any,
    seed: Any,
) -> DrafterPlan:
    """What gin files bind for `specdec drafter measure`."""
    return _checked(DrafterPlan, dict(locals()))


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
        if not isinstance(kind, types.UnionType):
            kind = typing.get_origin(kind) or kind  # of a mapping its items are the class's own business
        if not isinstance(value, kind) or isinstance(value, bool):
            name = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind.__args__)
            raise ValueError(f"{field.name} is {value!r}; it must be of type {name.replace('NoneType', 'None')}.")
        chosen[field.name] = value
    return options(**chosen)


def configure(
    configurable: Callable[..., Any], files: Sequence[str], bindings: Sequence[str], search_paths: str = ""
) -> Any:
    """Calls a gin configurable as the gin files and flags bind it.

    Raises:
      ValueError: gin finds fault with a file or a flag, or a value is not what it has to be.
    """
    gin.clear_config()
    if not files:
        raise ValueError("no gin file is given; give one, such as --gin_file=configs/demo_ende.gin.")
    for place in (*filter(None, search_paths.split(",")), *GIN_ROOTS):
        gin.add_config_file_search_path(str(place))
    for file in files:
        with _gin_errors(f"--gin_file={file}: "):
            gin.parse_config_file(file)
    for binding in bindings:
        name, value = binding.split("=", 1)
        with _gin_errors(f"--gin.{binding}: ", hint=f" A string needs quotes: --gin.{name}=\"'text'\"."):
            gin.parse_config(f"{name} = {value}")
    with _gin_errors():
        _check_macros(configurable)
        gin.finalize()
        found = configurable()
    gin.clear_config()  # a finalized one is locked, and a library with configurables could not be imported any more
    return found


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
            others = [name for name in _REQUIRED_MACRO.findall(gin.config_str()) if name != required[1]]
            message = f"the macro {required[1]} is required; give --gin.{required[1]}=value."
            message += f" Not given either: {', '.join(others)}." if others else ""
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
        close = difflib.get_close_matches(name.upper(), used | arguments, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"nothing uses the macro {name}{meant}; macros are {', '.join(sorted(used | arguments))}.")
    for name in sorted(used - defined - {"gin.REQUIRED"}):
        raise ValueError(f"the macro {name} has no value; give --gin.{name}=value.")
