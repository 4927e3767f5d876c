"""Several processes that decode together: each runs the same program, on one mesh of the devices of all.

On a TPU pod, and where JAX knows the cluster (Slurm, Open MPI), the processes find each other. Elsewhere each is told:

    JAX_COORDINATOR_ADDRESS=10.0.0.1:1234    where process 0 is, and a free port there
    JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=0                         1 in the other

Every process gets the same inputs, on stdin too, and the same settings, which is checked. Process 0 prints.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@contextlib.contextmanager
def together(wanted: bool) -> Iterator[None]:
    """Joins the other processes, and is silent in all but the first; does nothing unless wanted.

    Raises:
      ValueError: how to find the others is not known, or they are not found.
    """
    if not wanted:
        yield
        return
    initialize()
    with open(os.devnull, "w") as nowhere, _stdout_apart(nowhere) as stdout:
        first = jax.process_index() == 0
        with contextlib.redirect_stdout(stdout if first else nowhere):
            with contextlib.nullcontext() if first else contextlib.redirect_stderr(nowhere):
                yield


@contextlib.contextmanager
def _stdout_apart(nowhere: TextIO) -> Iterator[TextIO]:
    """Another stream to where stdout goes; what is written to stdout's descriptor is lost: Gloo reports there."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(nowhere.fileno(), 1)
    try:
        with open(os.dup(descriptor), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as stream:
            yield stream
    finally:
        os.dup2(descriptor, 1)
        os.close(descriptor)


def initialize(environ: Mapping[str, str] = os.environ) -> None:
    """`jax.distributed.initialize` with what the environment says; it reads the address by itself, but no more.

    Raises:
      ValueError: the environment lacks something or is wrong, the others are not found, or it is too late.
    """
    told: dict[str, int | None] = {COUNT: None, NUMBER: None}
    for name in told:
        value = environ.get(name)
        if value is not None and not value.isdecimal():
            raise ValueError(f"{name} is {value!r} in the environment; it must be a whole number.")
        told[name] = None if value is None else int(value)
    count, number = told[COUNT], told[NUMBER]
    if count is not None and not (count > 0 and (number is None or number < count)):
        raise ValueError(f"{NUMBER} is {number} and {COUNT} is {count}; the number must be below the count, from 0 on.")
    address = environ.get(ADDRESS)
    host, _, port = (address or "").rpartition(":")
    if address is not None and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{ADDRESS} is {address!r} in the environment; it must be host:port.")
    try:
        jax.distributed.initialize(address, told[COUNT], told[NUMBER])
    except (ValueError, RuntimeError) as error:  # JAX's own messages name its arguments
        missing = [name for name in (ADDRESS, COUNT, NUMBER) if name not in environ]
        hint = f" JAX knows no cluster here; set {', '.join(missing)} in the environment." if missing else ""
        raise ValueError(f"--distributed cannot start with {ADDRESS} {address}: {error}{hint}") from error


def check_same(*values: object) -> None:
    """Makes sure that every process was given the same; all have to call it.

    Raises:
      ValueError: they were not. Going on, they would run different programs, and wait for each other for ever.
    """
    digest = np.frombuffer(hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    different = np.flatnonzero((digests != digests[:1]).any(axis=1))
    if different.size:
        raise ValueError(
            f"process {different[0]} has other inputs or settings than process 0; give every process the same, and "
            "the same file on stdin."
        )
