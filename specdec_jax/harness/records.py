"""What was measured, kept as JSON.

The file is written whole after every entry, under a temporary name first, so that a run that is killed at any moment
goes on where it was.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = ("specdec_jax", "jax", "jaxlib", "flax", "numpy")
_VERSION = 1
_MACHINE = ("backend", "device", "num_devices", "processor", "cores")  # a line of a table is of one machine


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all; its directory is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: pathlib.Path, name: str) -> None:
    """Says that results will not go to a place before they are measured.

    Args:
      path: a file that will be written.
      name: of the setting that it comes from.

    Raises:
      ValueError: nothing can be written there.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: nothing can be written to {str(path)!r} ({error}); name another place.") from error


def environment() -> dict[str, Any]:
    """Versions, device, commit: what figures depend on besides the settings."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "commit": _commit(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "command": " ".join(["specdec", *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The source checkout's commit, with a + where what is run differs from it; None for an installed package."""
    root = pathlib.Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout
        changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", "specdec_jax", "configs", "gin"]
        changed = subprocess.run(changes, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("+" if changed.strip() else "")


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def read(path: pathlib.Path) -> dict[str, Any]:
    """What measurements are at a path; nothing where they cannot be read, which `Record.open` complains about."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


class Record:
    """A document of measurements: sections of entries, each found by the values of its key.

    Attributes:
      path: where it is kept.
      document: its content; see `open`.
    """

    def __init__(self, path: pathlib.Path, document: dict[str, Any]) -> None:
        self.path = path
        self.document = document

    @classmethod
    def open(cls, path: pathlib.Path, *, name: str, simulated: bool, settings: dict[str, Any]) -> "Record":
        """Reads the document at a path, or starts one; nothing is written yet.

        Args:
          path: a .json file.
          name: of the document.
          simulated: whether acceptance is simulated.
          settings: what the figures depend on; a document that was made with others is not continued.

        Raises:
          ValueError: the file is not such a document, or was made with other settings or on another machine.
        """
        settings = json.loads(json.dumps(settings))  # as they are read back: lists for tuples
        start = {"version": _VERSION, "name": name, "simulated": simulated, "settings": settings, "environments": []}
        if not path.exists():
            return cls(path, start)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found = {key: document[key] for key in ("version", "name", "simulated", "settings")}
            machines = [{key: there[key] for key in _MACHINE} for there in document["environments"]]
            for section in ("acceptance", "calls", "cells"):
                for entry in document.get(section, []):
                    _ = machines[entry["environment"]]
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ValueError(
                f"{path} holds no measurements of this program ({type(error).__name__}: {error}); remove it or "
                "choose another place for results."
            ) from error
        for key, old, new in _differences({**found, "environments": []}, start):
            raise ValueError(
                f"{path} was measured with {key} {old!r}, which is now {new!r}; remove the file, or choose another "
                "name for the results."
            )
        here = environment()
        for there in machines:
            for key, old in there.items():
                if old != here[key]:
                    raise ValueError(
                        f"{path} was measured with {key} {old!r}, and here it is {here[key]!r}; go on there, remove "
                        "the file, or choose another name for the results."
                    )
        return cls(path, document)

    def find(self, section: str, **key: Any) -> dict[str, Any] | None:
        """The entry of a section that has these values; None where it has not been measured."""
        entries = self.document.get(section, [])
        return next((entry for entry in entries if all(entry.get(k) == v for k, v in key.items())), None)

    def add(self, section: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Adds an entry, with the number of the environment it was measured in, and writes the document."""
        here, known = environment(), self.document["environments"]
        if here not in known:
            known.append(here)
        entry = json.loads(json.dumps({**entry, "environment": known.index(here)}))
        self.document.setdefault(section, []).append(entry)
        write(self.path, json.dumps(self.document, indent=1))
        return entry


def _differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(name, old, new) of each value that differs in two JSON trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)]
    return [] if old == new else [(name, old, new)]
