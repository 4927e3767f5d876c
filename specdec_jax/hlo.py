"""Reading a program that XLA compiled for TPU: what runs, how often, and what the compiler thinks that it costs.

In a scheduled TPU program every operation says how many cycles the compiler expects it to take. Added up, with loops
taken as often as they run, they are an estimate of the program's time without the device. Waiting for memory is not
among them, which is why `tpu` sets it against the bytes that have to be read.
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MATRIX = "matrix unit"
VECTOR = "products on the vector unit"
COPY = "copies and transposes"
COLLECTIVE = "collectives"
HOST = "transfers to the host"
OTHER = "everything else"

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?[\s})\]])([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "s4": 4, "u4": 4}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
_HOST_OPCODES = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


class Instruction(NamedTuple):
    """One scheduled operation.

    Attributes:
      name: as in the program.
      shape: as XLA writes it, with layout and memory space.
      opcode: such as fusion, copy, while.
      operands: names of what it reads.
      called: computations that it runs, by what they are to it: calls, body, condition, branch0, ...
      cycles: the compiler's estimate; 0 where it gives none.
      op_name: where in the Python program it comes from.
      text: the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    called: Mapping[str, str]
    cycles: int
    op_name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, without the padding of its layout."""
        return sum(_num_bytes(kind, dims) for kind, dims in _ARRAY.findall(self.shape))

    @property
    def dims(self) -> tuple[int, ...]:
        """The result's sizes above 1, in ascending order: alike for an array and its transpose."""
        found = _ARRAY.search(self.shape)
        return () if found is None else _sizes(found[2])


def _sizes(dims: str) -> tuple[int, ...]:
    return tuple(sorted(int(size) for size in dims.split(",") if size not in ("", "1")))


def _num_bytes(kind: str, dims: str) -> int:
    found = re.search(r"\d+", kind)
    bits = _BITS.get(kind) or (int(found[0]) if found else 0)
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      computations: the instructions of each computation, in order.
      entry: where it starts.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @property
    def outer_loop(self) -> str:
        """The body of decoding's loop; see `_outer`."""
        return self._outer.called["body"]

    @property
    def carried(self) -> Mapping[tuple[int, ...], int]:
        """Bytes per element of what decoding's loop carries, by `dims`; of alike ones the narrowest.

        The compiler converts weights before the loop where it multiplies in another type: float32 in bfloat16.
        """
        found: dict[tuple[int, ...], int] = {}
        for kind, text in _ARRAY.findall(self._outer.shape):
            dims, size = _sizes(text), _num_bytes(kind, "")
            found[dims] = min(size, found.get(dims, size))
        return found

    @property
    def _outer(self) -> Instruction:
        """The one loop that the entry runs until something happens; others there have so many iterations.

        Raises:
          ValueError: there is none, or more than one.
        """
        loops = [i for i in self.computations[self.entry] if _is_loop(i) and self._iterations(i) is None]
        if len(loops) != 1:
            raise ValueError(f"the program has {len(loops)} loops at its outermost level where one was expected.")
        return loops[0]

    def scheduled(self, computation: str) -> Iterator[tuple[Instruction, int]]:
        """What a run of a computation runs, and how often; of branches the dearest. A while itself is left out.

        A loop without a known number of iterations counts as one: of `entry`, then, the outer loop's one step.
        """
        for instruction in self.computations[computation]:
            if _is_loop(instruction):
                times = self._iterations(instruction) or 1
                yield from ((inner, times * n) for inner, n in self.scheduled(instruction.called["body"]))
            elif instruction.opcode == "conditional":
                branches = [list(self.scheduled(name)) for name in instruction.called.values()]
                yield from max(branches, key=_sum_cycles)
            elif instruction.opcode == "call":
                yield from self.scheduled(instruction.called["to_apply"])
            else:
                yield instruction, 1

    def cycles(self, computation: str) -> collections.Counter[str]:
        """Estimated cycles of a run of a computation, by kind of operation."""
        found: collections.Counter[str] = collections.Counter()
        for instruction, times in self.scheduled(computation):
            found[self.kind(instruction)] += times * instruction.cycles
        return found

    def kind(self, instruction: Instruction) -> str:
        """What sort of work it is."""
        opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if opcode in _COLLECTIVES:
            return COLLECTIVE
        if instruction.opcode in _HOST_OPCODES or "MoveToHost" in instruction.text:
            return HOST
        if opcode in ("copy", "transpose"):
            return COPY
        inside = {i.opcode for name in instruction.called.values() for i in self._everything_in(name)}
        if opcode == "convolution" or opcode == "dot" or inside & {"convolution", "dot"}:
            return MATRIX
        if "dot_general" in instruction.op_name:
            return VECTOR
        if inside and inside <= _MOVES:
            return COPY
        return OTHER

    def copies(self, computation: str, least_bytes: int) -> list[tuple[Instruction, int]]:
        """Copies and transposes of at least so many bytes in a run of a computation, and how often each runs.

        Fetching an array from one memory into another as it is does not count: something has to read it.
        """
        return [
            (instruction, times)
            for instruction, times in self.scheduled(computation)
            if instruction.opcode not in ("copy-start", "copy-done", "slice-start", "slice-done")
            and self.kind(instruction) == COPY
            and instruction.num_bytes >= least_bytes
        ]

    def number_of(self, computation: str, kind: str) -> int:
        """How many operations of a kind a run of a computation makes; an asynchronous one counts once."""
        return sum(
            times
            for instruction, times in self.scheduled(computation)
            if self.kind(instruction) == kind and not instruction.opcode.endswith("-done")
        )

    def _everything_in(self, computation: str) -> Iterator[Instruction]:
        for instruction in self.computations.get(computation, ()):
            yield instruction
            for name in instruction.called.values():
                yield from self._everything_in(name)

    def _iterations(self, loop: Instruction) -> int | None:
        """The constant that the loop's condition compares its counter with."""
        condition = self.computations[loop.called["condition"]]
        by_name = {instruction.name: instruction for instruction in condition}
        root = condition[-1]
        if root.opcode != "compare" or "direction=LT" not in root.text:
            return None
        bound = by_name.get(root.operands[-1])
        found = bound and bound.opcode == "constant" and re.search(r"constant\((\d+)\)", bound.text)
        return int(found[1]) if found else None


_MOVES = {"copy", "transpose", "bitcast", "reshape", "parameter", "slice", "concatenate"}


def _is_loop(instruction: Instruction) -> bool:
    return instruction.opcode == "while"


def _sum_cycles(scheduled: list[tuple[Instruction, int]]) -> int:
    return sum(instruction.cycles * times for instruction, times in scheduled)


def parse(text: str) -> Program:
    """Reads what `jax.stages.Compiled.as_text` returned.

    Raises:
      ValueError: it is no program, or one without estimates, as of another compiler than TPU's.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            head = _HEAD.match(line)
            if head:
                name, lines = head[2], []
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(lines)
            name = None
        else:
            found = _INSTRUCTION.match(line)
            if found:
                lines.append(_instruction(found, line))
    if entry is None:
        raise ValueError("the compiler gave no program to read: its text has no ENTRY computation.")
    if not _CYCLES.search(text):
        raise ValueError("the compiled program says nothing about cycles; only TPU's compiler estimates them.")
    return Program(computations, entry)


def _instruction(found: re.Match[str], line: str) -> Instruction:
    name, shape, opcode, rest = found.groups()
    called = dict(_CALLED.findall(rest))
    branches = _BRANCHES.search(rest)
    if branches:
        called |= {f"branch{i}": branch for i, branch in enumerate(_OPERAND.findall(branches[1]))}
    cycles, op_name = _CYCLES.search(rest), _OP_NAME.search(rest)
    return Instruction(
        name=name,
        shape=shape.strip(),
        opcode=opcode,
        operands=tuple(_OPERAND.findall(rest[: rest.find(")")])),
        called=called,
        cycles=int(cycles[1]) if cycles else 0,
        op_name=op_name[1] if op_name else "",
        text=line.strip(),
    )
