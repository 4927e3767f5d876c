"""What a killed run resumes from: one msgpack file a save, the last two kept."""

import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import flax.serialization
import jax

_NAME = re.compile(r"resume_(\d+)\.msgpack")
_KEPT = 2


class Saved(NamedTuple):
    """One save.

    Attributes:
      state: the train state, as a tree like the one it is restored into.
      step: batches trained on.
      elapsed: seconds of training so far, all earlier processes included.
    """

    state: Any
    step: int
    elapsed: float


def save(run_dir: str | os.PathLike[str], saved: Saved, *, settings: str) -> None:
    """Writes a save and removes all but the last two, with their T5X checkpoints.

    Args:
      run_dir: existing directory.
      saved: what to write.
      settings: text that a resuming run must give equally.
    """
    run_dir = pathlib.Path(run_dir)
    content = {
        "state": flax.serialization.to_state_dict(jax.device_get(saved.state)),
        "step": saved.step,
        "elapsed": saved.elapsed,
        "settings": settings,
    }
    unfinished = run_dir / "resume.tmp"
    unfinished.write_bytes(flax.serialization.msgpack_serialize(content))
    unfinished.replace(run_dir / f"resume_{saved.step}.msgpack")
    for step in _steps(run_dir)[:-_KEPT]:
        (run_dir / f"resume_{step}.msgpack").unlink()
        shutil.rmtree(run_dir / f"checkpoint_{step}", ignore_errors=True)


def restore(run_dir: str | os.PathLike[str], like: Any, *, settings: str) -> Saved | None:
    """Reads the newest save.

    Args:
      run_dir: directory of an earlier run, or an empty one.
      like: a train state of the same structure.
      settings: see `save`.

    Returns:
      The save, or None if there is none.

    Raises:
      ValueError: the save cannot be read, or belongs to a run with other settings.
    """
    steps = _steps(pathlib.Path(run_dir))
    if not steps:
        return None
    path = pathlib.Path(run_dir) / f"resume_{steps[-1]}.msgpack"
    try:
        content: Any = flax.serialization.msgpack_restore(path.read_bytes())
    except Exception as error:  # msgpack raises many kinds
        raise ValueError(f"cannot read {str(path)!r} ({error}): delete it to resume from the save before") from error
    if content["settings"] != settings:
        raise ValueError(
            f"{str(path)!r} belongs to a run with {content['settings']}, not {settings}: give another run_dir"
        )
    return Saved(flax.serialization.from_state_dict(like, content["state"]), content["step"], content["elapsed"])


def _steps(run_dir: pathlib.Path) -> list[int]:
    names = (_NAME.fullmatch(path.name) for path in run_dir.glob("resume_*.msgpack"))
    return sorted(int(match.group(1)) for match in names if match)
