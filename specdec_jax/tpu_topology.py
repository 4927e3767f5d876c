"""The TPUs that libtpu can compile for without one, and what is known about their chips."""

import importlib.metadata
import os
from typing import Any, NamedTuple

from jax.experimental import topologies

_GIB = 2**30


class Chip(NamedTuple):
    """What a TPU of one generation is.

    Attributes:
      clock: Hz of a core.
      bandwidth: bytes of HBM per second.
      hbm: bytes of HBM.
      link: bytes per second, each way, of the link to one neighbour.
      accelerator: the accelerator type that libtpu is told.
      config: how libtpu names the chip's mode; v4's two cores work as one.
      axes: dimensions of a topology.
    """

    clock: float
    bandwidth: float
    hbm: int
    link: float
    accelerator: str
    config: str
    axes: int


CHIPS = {
    "v4": Chip(1.05e9, 1.2e12, 32 * _GIB, 50e9, "v4-8", "megacore", 3),
    "v5e": Chip(1.5e9, 0.82e12, 16 * _GIB, 50e9, "v5litepod-4", "default", 2),
    "v5p": Chip(1.75e9, 2.77e12, 95 * _GIB, 100e9, "v5p-8", "megacore", 3),
    "v6e": Chip(1.75e9, 1.64e12, 32 * _GIB, 112e9, "v6e-4", "default", 2),
}
"""Generations, with the figures that Google publishes; links are published together, six or four of them."""


def read_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """Generation and chips along each axis of such a name as "v4:2x2x1".

    Raises:
      ValueError: it is no such name, or of an unknown generation.
    """
    generation, _, bounds = name.partition(":")
    chip = CHIPS.get(generation)
    parts = bounds.split("x")
    if chip is None or len(parts) != chip.axes or not all(part.isdecimal() and int(part) for part in parts):
        known = ", ".join(f"{kind}:{'x'.join(['1'] * some.axes)}" for kind, some in CHIPS.items())
        raise ValueError(f"topology is {name!r}; give a generation and its chips, such as {known}.")
    return generation, tuple(map(int, parts))


def find_devices(topology: str) -> list[Any]:
    """The devices of a topology, for the compiler only; nothing can run on them.

    Raises:
      ValueError: libtpu is not installed, or does not know the topology.
    """
    generation, bounds = read_topology(topology)
    chip = CHIPS[generation]
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU machine to ask
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", chip.accelerator)
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError("libtpu is not installed: pip install 'specdec_jax[tpu]'.") from error
    try:
        found = topologies.get_topology_desc(
            topology_name=topology,
            platform="tpu",
            chip_config_name=chip.config,
            chips_per_host_bounds=(*bounds, *[1] * (3 - len(bounds))),
            num_slices=1,
        )
    except Exception as error:  # XLA's own kinds, by version
        if "lockfile" in str(error):
            raise ValueError(
                "another process compiles for TPU, and libtpu lets one do so at a time: wait for it, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1."
            ) from error
        raise ValueError(
            f"topology is {topology!r}, which libtpu {version()} refuses: {str(error).splitlines()[0]}"
        ) from error
    return list(found.devices)


def version() -> str:
    """Of libtpu."""
    return importlib.metadata.version("libtpu")
