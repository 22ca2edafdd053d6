"""What hand-written kernels compute and move, which their compiled calls do not say: by name and operands."""

import math
import re

from refusion_jax.compilation.hlo import Array, Computation, Instruction

# Matrix products over each pair of a query and a key: scores, and with them values or gradients.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_SPLASH = re.compile(r"^splash_mqa_(fwd|dq|dkv)")
_QUERY, _KEYS = 2, 6  # operands; from the latter on they are buffers of all layers: keys, values, perhaps scales


def attention_kernel(text: str) -> str:
    """What computes attention in a program, by its compiled HLO: "splash", "pallas" or "xla", see `model.attention`."""
    calls = re.findall(r"%(splash_mqa_fwd|buffer_attention)[\w.]* = ", text)
    return {"splash_mqa_fwd": "splash", "buffer_attention": "pallas"}[calls[0]] if calls else "xla"


def kernel_flops(computation: Computation, instruction: Instruction) -> int:
    """FLOPs of the matrix products in a kernel of `modeling`; 0 for any other instruction.

    Of causal rows only blocks of keys that are not behind the queries are computed; a buffer counts as full.
    """
    splash = _SPLASH.match(instruction.name)
    if not _is_kernel(instruction) or not (splash or _reads_buffers(instruction)):
        return 0
    shapes = [arrays[0].shape for arrays in computation.arrays(instruction)]
    query = shapes[_QUERY]
    if splash:
        blocks = shapes[0][-2]  # what the kernel is told of each block of queries
        pairs = query[-2] ** 2 * (blocks + 1) / (2 * blocks)
        return int(_SPLASH_PRODUCTS[splash[1]] * 2 * math.prod(query[:-2]) * pairs * query[-1])
    keys = shapes[_QUERY + 1][-2] + shapes[_KEYS][-2]
    return 4 * math.prod(query) * keys


def kernel_bytes(computation: Computation, instruction: Instruction) -> int | None:
    """Bytes that a kernel on one layer of a buffer moves; None for any other instruction."""
    if not (_is_kernel(instruction) and _reads_buffers(instruction)):
        return None
    operands = [arrays[0] for arrays in computation.arrays(instruction)]
    of_layer = sum(buffer.hbm_bytes // buffer.shape[0] for buffer in operands[_KEYS:])
    others: list[Array] = operands[:_KEYS]
    return of_layer + sum(each.hbm_bytes for each in (*others, *instruction.arrays))


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and '"tpu_custom_call"' in instruction.attributes


def _reads_buffers(instruction: Instruction) -> bool:
    return instruction.name.startswith("buffer_attention")
