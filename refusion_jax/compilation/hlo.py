"""Reads the text of a compiled HLO module: computations, their instructions, and the arrays these make."""

import dataclasses
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction makes.

    Attributes:
      shape: its sizes. bits: of one element. space: 0 for a chip's memory (HBM), others for what is inside the core.
    """

    shape: tuple[int, ...]
    bits: int
    space: int

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * self.bits // 8

    @property
    def hbm_bytes(self) -> int:
        """`bytes` of an array in HBM, 0 of another."""
        return 0 if self.space else self.bytes


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name, opcode: as in the text. arrays: what it makes, one unless it makes a tuple.
      operands: names of instructions. argument: the text between its parentheses. attributes: the text behind them.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    argument: str
    attributes: str

    @property
    def channel(self) -> str | None:
        """Which communication of all chips a collective is."""
        found = _CHANNEL.search(self.attributes)
        return found[1] if found else None

    def called(self, role: str) -> str:
        """The computation it calls as its `calls`, `body` or `condition`."""
        return next(name for found, name in _CALLED.findall(self.attributes) if found == role)

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        found = _BRANCHES.search(self.attributes)
        return _NAME.findall(found[1]) if found else _TWO_BRANCHES.findall(self.attributes)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order of execution; the last to be read with ROOT gives the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def arrays(self, instruction: Instruction) -> Iterator[tuple[Array, ...]]:
        """What each operand of an instruction makes."""
        return (self.instructions[name].arrays for name in instruction.operands)

    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(i.argument): i for i in self.instructions.values() if i.opcode == "parameter"}

    def users(self, name: str) -> list[Instruction]:
        """The instructions that an instruction is an operand of."""
        return [i for i in self.instructions.values() if name in i.operands]


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations of a program by name, and the name of the first to run."""

    computations: dict[str, Computation]
    entry: str


def read_module(text: str) -> Module:
    """The module that `Compiled.as_text()` shows."""
    computations, entry, name, root = {}, "", "", ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions, root = header[2], {}, ""
            entry = name if header[1] else entry
        elif line == "}":
            computations[name] = Computation(name, instructions, root)
        elif found := _INSTRUCTION.match(line):
            instruction = _read_instruction(found[2], line[found.end() :])
            instructions[found[2]] = instruction
            root = found[2] if found[1] or not root else root
    return Module(computations, entry)


def _read_instruction(name: str, text: str) -> Instruction:
    kind, rest = text.split(" ", 1) if text[0] != "(" else _split_parenthesis(text)
    opcode, rest = rest.lstrip().split("(", 1)
    argument, attributes = _split_parenthesis("(" + rest)
    return Instruction(name, opcode, _read_arrays(kind), tuple(_NAME.findall(argument)), argument[1:-1], attributes)


def _split_parenthesis(text: str) -> tuple[str, str]:
    """The text through the parenthesis that closes its first, and the rest."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: index + 1], text[index + 1 :]
    raise AssertionError(f"no closing parenthesis in {text!r}")


def _read_arrays(kind: str) -> tuple[Array, ...]:
    return tuple(_read_array(*found) for found in _ARRAY.findall(kind))


def _read_array(kind: str, sizes: str, layout: str) -> Array:
    bits, space = _BITS.search(kind), _SPACE.search(layout)
    width = 8 if kind == "pred" else int(bits[0]) if bits else 0  # a token has none
    shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    return Array(shape, width, int(space[1]) if space else 0)
