"""Files that ship with the package: gin files, and the demonstration pair of models.

demo:target, demo:draft_small, ...    the only checkpoint in data/demo/target, data/demo/draft_small, ...
demo:vocabulary                       data/demo/vocabulary.model
demo:table_ende, ...                  data/demo/table_ende.npz, ...
"""

import pathlib

from specdec_jax.checkpoints import t5x

_PACKAGE = pathlib.Path(__file__).parent

GIN_ROOTS = (_PACKAGE, _PACKAGE.parent)
"""Where gin/ and configs/ are: inside an installed package, beside it in a source checkout."""

DEMO_DIRECTORY = _PACKAGE / "data" / "demo"

_DEMO = "demo:"


def resolve(spec: str, directory: pathlib.Path | None = None) -> str:
    """The path that a checkpoint's or vocabulary's name stands for.

    Args:
      spec: a name that starts with "demo:"; anything else is returned as it is.
      directory: what holds the demonstration pair; None for the one in the package.

    Raises:
      ValueError: the demonstration pair has no such part, or not exactly one checkpoint of it.
    """
    if not spec.startswith(_DEMO):
        return spec
    directory = DEMO_DIRECTORY if directory is None else directory
    name = spec.removeprefix(_DEMO)
    vocabulary = directory / "vocabulary.model"
    if name == "vocabulary" and vocabulary.is_file():
        return str(vocabulary)
    tables = sorted(path.stem for path in directory.glob("table_*.npz"))
    if name in tables:
        return str(directory / f"{name}.npz")
    models = model_names(directory)
    if name not in models:
        known = [_DEMO + known for known in models + ["vocabulary"] * vocabulary.is_file() + tables]
        there = f"it holds {', '.join(known)}" if known else "the demonstration pair is not there"
        raise ValueError(f"{spec!r} is not in {directory}; {there}.")
    steps = t5x.list_steps(directory / name)
    if len(steps) != 1:
        raise ValueError(
            f"{spec!r} is ambiguous: {directory / name} holds the checkpoints {steps}; name one by its path."
        )
    return str(directory / name / f"checkpoint_{steps[0]}")


def model_names(directory: pathlib.Path | None = None) -> list[str]:
    """Names of the demonstration pair's models that are there."""
    directory = DEMO_DIRECTORY if directory is None else directory
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and any(path.glob("checkpoint_*")))
