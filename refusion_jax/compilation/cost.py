"""What one run of a compiled program costs on one chip, counted in its HLO: loops as often as they run.

XLA's own count has the body of every loop once, whatever its trip count. Here FLOPs are those of matrix products (which
a TPU's HLO writes as convolutions), those in attention's kernels included, bytes those that instructions read from and
write to HBM, and a collective's bytes its whole payload: what an all-gather makes, what an all-reduce or reduce-scatter
takes.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from refusion_jax.compilation.hlo import Array, Computation, Instruction, Module, read_module
from refusion_jax.compilation.kernels import kernel_bytes, kernel_flops

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_WITHOUT_TRAFFIC = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency",
}  # fmt: skip
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTING = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_DIRECTION = re.compile(r"\bdirection=(\w\w)")
_INDEX = re.compile(r"\bindex=(\d+)")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What something takes on one chip.

    Attributes:
      flops: of matrix products. bytes: read from and written to HBM. collectives: bytes by kind.
    """

    flops: int = 0
    bytes: int = 0
    collectives: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.collectives + other.collectives)

    def times(self, count: int) -> "Cost":
        """The cost of so many repetitions."""
        collectives = collections.Counter({kind: count * size for kind, size in self.collectives.items()})
        return Cost(count * self.flops, count * self.bytes, collectives)


def program_cost(text: str, dynamic_trips: Sequence[int] = ()) -> Cost:
    """The cost of one run of a program.

    Args:
      text: of its compiled HLO.
      dynamic_trips: trip counts of the loops that end when data say so, from the outermost of such loops inwards; those
        nested deeper run once. Of a conditional the branch with most FLOPs counts.
    """
    module = read_module(text)
    return _Walk(module, tuple(dynamic_trips)).cost(module.entry, 0)


class _Walk:
    def __init__(self, module: Module, dynamic_trips: tuple[int, ...]):
        self.computations, self.dynamic_trips = module.computations, dynamic_trips
        self.known: dict[tuple[str, int], Cost] = {}

    def cost(self, name: str, depth: int) -> Cost:
        """The cost of a computation inside so many loops of unknown length."""
        if (name, depth) not in self.known:
            computation, channels = self.computations[name], dict[str, tuple[str, int]]()
            total = Cost()
            for instruction in computation.instructions.values():
                total += self._instruction(computation, instruction, depth, channels)
            self.known[name, depth] = total + Cost(collectives=_by_kind(channels))
        return self.known[name, depth]

    def _instruction(
        self, computation: Computation, instruction: Instruction, depth: int, channels: dict[str, tuple[str, int]]
    ) -> Cost:
        opcode = instruction.opcode
        if opcode == "while":
            trips = _trips(self.computations, computation, instruction)
            dynamic = trips is None
            if trips is None:
                trips = self.dynamic_trips[depth] if depth < len(self.dynamic_trips) else 1
            return self.cost(instruction.called("body"), depth + dynamic).times(trips)
        if opcode == "conditional":
            return max((self.cost(name, depth) for name in instruction.branches), key=lambda c: (c.flops, c.bytes))
        if opcode in ("call", "async-start"):
            return self.cost(instruction.called("calls" if "calls=" in instruction.attributes else "to_apply"), depth)
        if opcode in _WITHOUT_TRAFFIC or opcode.endswith(("-done", "-update")):
            return Cost()
        if opcode == "fusion":
            inner = instruction.called("calls")
            self._collectives(self.computations[inner], channels)
            return Cost(self._fused_flops(inner), self._fusion_bytes(computation, instruction, inner))
        _note_collective(computation, instruction, "", channels)
        return Cost(_flops(computation, instruction), _traffic(computation, instruction))

    def _collectives(self, computation: Computation, channels: dict[str, tuple[str, int]]) -> None:
        """Those inside a fusion. One that runs beside others is in several, of one channel, and counts once."""
        for instruction in computation.instructions.values():
            if instruction.opcode == "fusion":
                self._collectives(self.computations[instruction.called("calls")], channels)
            else:
                _note_collective(computation, instruction, computation.name, channels)

    def _fused_flops(self, name: str) -> int:
        computation = self.computations[name]
        return sum(
            self._fused_flops(instruction.called("calls"))
            if instruction.opcode == "fusion"
            else _flops(computation, instruction)
            for instruction in computation.instructions.values()
        )

    def _fusion_bytes(self, outer: Computation, fusion: Instruction, inner: str) -> int:
        computation = self.computations[inner]
        parameters = computation.parameters()
        read = sum(
            min(sum(array.hbm_bytes for array in arrays), self._read_bytes(computation, parameters[number].name))
            for number, arrays in enumerate(outer.arrays(fusion))
        )
        return read + self._written_bytes(computation, fusion)

    def _read_bytes(self, computation: Computation, name: str) -> int:
        """What is read of a fusion's parameter: slices of it only, where nothing else is used."""
        total = 0
        for user in computation.users(name):
            first = user.operands[0] == name
            # A copy inside a fusion gives a part that is read another layout on its way to the registers.
            if user.opcode in ("bitcast", "copy"):
                total += self._read_bytes(computation, user.name)
            elif user.opcode == "fusion":
                inner = self.computations[user.called("calls")]
                if inner.instructions[inner.root].opcode == "copy":
                    total += self._read_bytes(computation, user.name)
                numbers = [number for number, operand in enumerate(user.operands) if operand == name]
                total += sum(self._read_bytes(inner, inner.parameters()[number].name) for number in numbers)
            elif user.opcode in ("dynamic-slice", "gather", "slice") and first:
                total += sum(array.bytes for array in user.arrays)
            elif not (user.opcode == "dynamic-update-slice" and first):  # which is done in place
                return sum(array.bytes for array in computation.instructions[name].arrays)
        return total

    def _written_bytes(self, computation: Computation, fusion: Instruction) -> int:
        root = computation.instructions[computation.root]
        names = root.operands if root.opcode == "tuple" else (root.name,)
        if len(names) != len(fusion.arrays):
            return sum(array.hbm_bytes for array in fusion.arrays)
        return sum(
            min(array.hbm_bytes, self._update_bytes(computation, name))
            for array, name in zip(fusion.arrays, names, strict=True)
        )

    def _update_bytes(self, computation: Computation, name: str) -> int:
        """What is written of a fusion's result: the update only, where it is one in place."""
        made = computation.instructions[name]
        while made.opcode == "bitcast":
            made = computation.instructions[made.operands[0]]
        if made.opcode == "dynamic-update-slice":
            return sum(array.bytes for array in computation.instructions[made.operands[1]].arrays)
        if made.opcode == "fusion":
            inner = self.computations[made.called("calls")]
            return self._update_bytes(inner, inner.root)
        return sum(array.bytes for array in made.arrays)


def _by_kind(channels: dict[str, tuple[str, int]]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for kind, size in channels.values():
        total[kind] += size
    return total


def _note_collective(
    computation: Computation, instruction: Instruction, fused_in: str, channels: dict[str, tuple[str, int]]
) -> None:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return
    taken = sum(array.bytes for arrays in computation.arrays(instruction) for array in arrays)
    made = sum(array.bytes for array in instruction.arrays)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":  # it makes a tuple of what it takes and makes
        made = max((array.bytes for array in instruction.arrays), default=0)
    if kind == "all-reduce" and fused_in.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    size = made if kind == "all-gather" else taken
    # Of one channel, too, are those that a program names itself, as inside `shard_map`.
    name = f"{instruction.channel} {kind} {size}" if fused_in and instruction.channel else instruction.name
    channels[name] = kind, size


def _trips(computations: dict[str, Computation], outer: Computation, loop: Instruction) -> int | None:
    """How often a loop runs that counts to a constant; None for another."""
    condition = computations[loop.called("condition")]
    root = condition.instructions[condition.root]
    compared = root
    if root.opcode == "fusion":
        fused = computations[root.called("calls")]
        compared = fused.instructions[fused.root]
    direction = _DIRECTION.search(compared.attributes)
    operands = [condition.instructions[name] for name in root.operands]
    ends = [int(i.argument) for i in operands if i.opcode == "constant" and i.argument.lstrip("-").isdigit()]
    counters = [i for i in operands if i.opcode == "get-tuple-element"]
    if compared.opcode != "compare" or direction is None or len(ends) != 1 or len(counters) != 1:
        return None
    index = _INDEX.search(counters[0].attributes)
    assert index is not None
    counter = int(index[1])
    distance = ends[0] - _start(outer, loop, counter) + (direction[1] in ("LE", "GE"))
    return max(0, -(-distance // _step(computations[loop.called("body")], counter)))


def _step(body: Computation, index: int) -> int:
    """What a loop adds to its counter: 1, unless its body says otherwise, as where the compiler takes two at a time."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return 1
    counter = body.instructions[root.operands[index]]
    while counter.opcode in ("copy", "bitcast"):
        counter = body.instructions[counter.operands[0]]
    operands = [body.instructions[name] for name in counter.operands] if counter.opcode == "add" else []
    steps = [int(each.argument) for each in operands if each.opcode == "constant" and each.argument.isdigit()]
    return steps[0] if steps else 1


def _start(outer: Computation, loop: Instruction, index: int) -> int:
    """What a loop's counter begins with: 0, unless a constant stands there."""
    carried = outer.instructions[loop.operands[0]]
    if carried.opcode != "tuple":
        return 0
    first = outer.instructions[carried.operands[index]]
    while first.opcode in ("copy", "bitcast"):
        first = outer.instructions[first.operands[0]]
    return int(first.argument) if first.opcode == "constant" and first.argument.isdigit() else 0


def _traffic(computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction outside a fusion moves from and to HBM."""
    if (moved := kernel_bytes(computation, instruction)) is not None:
        return moved
    made, opcode = instruction.arrays, instruction.opcode
    operands = list(computation.arrays(instruction))
    if opcode in ("copy-start", "slice-start"):  # a tuple of two arrays, of which the smaller is what moves
        moved = min((array.bytes for array in made if array.shape), default=0)
        return moved * sum(array.space == 0 for array in made if array.shape)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return _hbm(made) + sum(min(array.hbm_bytes, made[0].bytes) for array in operands[0])
    if opcode == "dynamic-update-slice":
        return _hbm(operands[1]) + min(made[0].hbm_bytes, operands[1][0].bytes)
    return _hbm(made) + sum(map(_hbm, operands))


def _hbm(arrays: tuple[Array, ...]) -> int:
    return sum(array.hbm_bytes for array in arrays)


def _flops(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "dot":
        found, (taken, *_) = _CONTRACTING.search(instruction.attributes), next(computation.arrays(instruction))
        dims = [int(dim) for dim in found[1].split(",") if dim] if found else []
        return 2 * math.prod(instruction.arrays[0].shape) * math.prod(taken.shape[dim] for dim in dims)
    if instruction.opcode != "convolution":
        return kernel_flops(computation, instruction)
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None
    of_left, of_right, of_result = labels.groups()
    left, right = (arrays[0].shape for arrays in computation.arrays(instruction))
    result = instruction.arrays[0].shape
    pairs = 1
    for axis, window in enumerate(_window(instruction, sum(label.isdigit() for label in of_left))):
        sizes = left[of_left.index(str(axis))], result[of_result.index(str(axis))]
        pairs *= _window_pairs(*sizes, **window)
    return 2 * pairs * result[of_result.index("b")] * result[of_result.index("f")] * right[of_right.index("i")]


def _window(instruction: Instruction, axes: int) -> list[dict[str, int]]:
    """Of each spatial axis of a convolution: the window's size, stride, padding before it, and dilations."""
    found = _WINDOW.search(instruction.attributes)
    fields = dict(part.split("=") for part in found[1].split()) if found else {}
    values = {name: fields[name].split("x") if name in fields else None for name in
              ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")}  # fmt: skip
    return [
        {name: int(value[axis].split("_")[0]) if value else int(name != "pad") for name, value in values.items()}
        for axis in range(axes)
    ]


def _window_pairs(given: int, made: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """How many pairs of a result and a window position meet an element, and not padding or a gap."""
    places = np.arange(made)[:, None] * stride + np.arange(size) * rhs_dilate - pad
    inside = (places >= 0) & (places <= (given - 1) * lhs_dilate) & (places % lhs_dilate == 0)
    return int(inside.sum())
