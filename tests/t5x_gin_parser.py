"""Parses launches of t5x against its names as recorded, or against t5x itself where it is installed.

gin keeps what it has seen for good, so each launch is parsed in a process of its own: this file, run as a program,
reads launches from its standard input, forks for each, and writes what came of it.
"""

import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import gin
from gin import config_parser

ROOT = pathlib.Path(__file__).parent.parent
RECORD = json.loads((ROOT / "tests" / "fixtures" / "t5x_configurables.json").read_text())
SCRIPTS = {"infer": "t5x.infer.infer", "eval": "t5x.eval.evaluate", "train": "t5x.train.train"}


def stub(module, name, parameters):
    """A class or function of these parameters, which keeps what it is called with."""
    arguments = ", ".join(f"{parameter}=None" for parameter in parameters.split())
    body = f"class {name}:\n  def __init__(self, {arguments}): vars(self).update(locals())"
    if name[0].islower():
        body = f"def {name}({arguments}): return locals()"
    namespace = {"__name__": module}
    exec(body, namespace)
    return namespace[name]


def install_stubs():
    for qualified, parameters in RECORD["configurables"].items():
        module, name = qualified.rsplit(".", 1)
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = types.ModuleType(path)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
        setattr(sys.modules[module], name, stub(module, name, parameters))


def plain(value):
    """JSON for what gin made: an object is its class and what it was called with."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if key != "self"}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if inspect.isclass(value):
        return {"name": f"{value.__module__}.{value.__name__}", "bound": plain(value())}
    if inspect.isroutine(value):
        return {"name": value.__name__, "bound": plain(gin.get_bindings(value))}
    if hasattr(value, "__dict__"):
        return {"class": type(value).__name__, **plain(vars(value))}
    return value


def parse(launch, stubbed):
    """What a launch's files and flags come to: its macros, its modules, and with stubs all that its script is given."""
    module, function = SCRIPTS[launch["script"]].rsplit(".", 1)
    sys.modules["__main__"] = importlib.import_module(module)
    script = gin.configurable(getattr(sys.modules["__main__"], function))  # as t5x's scripts do before they parse
    for path in launch["search_paths"]:
        gin.add_config_file_search_path(path)
    gin.parse_config_files_and_bindings(launch["files"], launch["bindings"])
    macros = {}
    for line in gin.config_str(max_line_length=1000).splitlines():
        if match := re.match(r"(\w+) = (.*)", line):
            macros[match[1]] = match[2]
    given = plain(script()) if stubbed else {}
    modules = {}
    for name in ("EncoderDecoderModel.module", "SpeculativeEncoderDecoderModel.draft_module"):
        try:
            reference = gin.query_parameter(name)
        except ValueError:  # no draft
            continue
        modules[name.rsplit(".", 1)[-1]] = plain(vars(reference.scoped_configurable_fn().config))
    return {"macros": macros, "given": given, **modules}


def main():
    request = json.load(sys.stdin)
    if request["stubs"]:
        install_stubs()
    else:
        for name in [*SCRIPTS.values(), "specdec_jax.t5x_adapter.restore_draft"]:
            importlib.import_module(name.rsplit(".", 1)[0])
    results = []
    for launch in request["launches"]:
        reader, writer = os.pipe()
        if not os.fork():
            try:
                result = parse(launch, request["stubs"])
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as file:
                json.dump(result, file, default=repr)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            results.append(json.load(file))
        os.wait()
    json.dump(results, sys.stdout)


def make_launch(files, *bindings, script="infer", search_paths=()):
    paths = [*map(str, search_paths), str(ROOT)]
    return {"files": list(files), "bindings": list(bindings), "script": script, "search_paths": paths}


def read_command(words):
    """A launch from a command line, as t5x reads its flags."""
    files = [word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file=")]
    flags = [word.removeprefix("--gin.").replace("=", " = ", 1) for word in words if word.startswith("--gin.")]
    return make_launch(files, *flags, script=words[words.index("-m") + 1].removeprefix("t5x."))


def run(launches, t5x_root, stubs=True):
    launches = [{**one, "search_paths": [*one["search_paths"], str(t5x_root)]} for one in launches]
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({"launches": launches, "stubs": stubs}),
        capture_output=True,
        text=True,
        cwd=t5x_root,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def statements(text):
    """The imports, includes and bindings of a gin file, values as text."""

    class Text(str):
        __repr__ = str.__str__

    class Delegate(config_parser.ParserDelegate):
        def configurable_reference(self, scoped_configurable_name, evaluate):
            return Text(f"@{scoped_configurable_name}{'()' * evaluate}")

        def macro(self, macro_name):
            return Text(f"%{macro_name}")

    found = {"imports": [], "includes": [], "bindings": {}}
    for one in config_parser.ConfigParser(text, Delegate()):
        if isinstance(one, config_parser.ImportStatement):
            found["imports"].append(one.format())
        elif isinstance(one, config_parser.IncludeStatement):
            found["includes"].append(one.filename)
        elif isinstance(one, config_parser.BindingStatement):
            name = ".".join(filter(None, [one.selector, one.arg_name]))
            found["bindings"]["/".join(filter(None, [one.scope, name]))] = repr(one.value)
    return found


def write_stand_ins(root):
    """The gin files of t5x that ours include, from the record."""
    for name, file in RECORD["gin_files"].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        includes = [f"include '{included}'" for included in file["includes"]]
        bindings = [f"{key} = {value}" for key, value in file["bindings"].items()]
        (root / name).write_text("\n".join([*file["imports"], *includes, *bindings, ""]))
    return root


if __name__ == "__main__":
    main()
