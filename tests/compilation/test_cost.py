"""Counting in recorded and written HLO: loops, fusions, memory spaces, collectives."""

import numpy as np
import pytest

from refusion_jax.compilation.cost import _window_pairs, program_cost
from refusion_jax.compilation.hlo import read_module

# As the TPU compiler writes it: a product of (8, 16) and (16, 32) in a loop of six, and one behind it.
LOOP = """HloModule jit_step, is_scheduled=true

%region_condition (wide.param: (s32[], bf16[8,16], f32[16,32])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(6)
  %wide.param = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}, /*index=2*/f32[16,32]{1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%wide.param), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.1), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

%region_body (param: (s32[], bf16[8,16], f32[16,32])) -> (s32[], bf16[8,16], f32[16,32]) {
  %param = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}, /*index=2*/f32[16,32]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%param), index=0
  %left = bf16[8,16]{1,0:T(8,128)(2,1)} get-tuple-element(%param), index=1
  %right = f32[16,32]{1,0:T(8,128)} get-tuple-element(%param), index=2
  %product = f32[8,32]{1,0:T(8,128)S(1)} convolution(%left, %right), dim_labels=bf_io->bf
  ROOT %result = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}, f32[16,32]{1,0:T(8,128)}) tuple(%i, %left, %right)
}

ENTRY %main (a: bf16[8,16], b: f32[16,32]) -> f32[8,32] {
  %a = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[16,32]{1,0:T(8,128)} parameter(1)
  %zero = s32[]{:T(128)} constant(START)
  %start = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}, f32[16,32]{1,0:T(8,128)}) tuple(%zero, %a, %b)
  %loop = (s32[], bf16[8,16]{1,0}, f32[16,32]{1,0}) while(%start), condition=%region_condition, body=%region_body
  ROOT %last = f32[8,32]{1,0:T(8,128)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
PRODUCT = 2 * 8 * 16 * 32
OPERANDS = 8 * 16 * 2 + 16 * 32 * 4
COUNTING = "compare(%counter, %constant.1)"


def loop(start="0"):
    return LOOP.replace("START", start)


def test_a_module_has_its_computations_and_their_arrays():
    module = read_module(loop())
    assert set(module.computations) == {"region_condition", "region_body", "main"}
    assert module.entry == "main"
    product = module.computations["region_body"].instructions["product"]
    assert (product.opcode, product.operands) == ("convolution", ("left", "right"))
    assert (product.arrays[0].bytes, product.arrays[0].hbm_bytes) == (8 * 32 * 4, 0)
    param = module.computations["region_body"].instructions["param"]
    assert [array.shape for array in param.arrays] == [(), (8, 16), (16, 32)]


def test_a_loop_counts_as_often_as_it_runs():
    cost = program_cost(loop())
    assert cost.flops == 7 * PRODUCT
    assert cost.bytes == 7 * OPERANDS + 8 * 32 * 4  # the loop's results stay in the core


def test_a_counter_may_begin_elsewhere():
    assert program_cost(loop("2")).flops == 5 * PRODUCT


@pytest.mark.parametrize(("step", "trips"), [(1, 6), (2, 3), (4, 2)])
def test_a_counter_may_take_larger_steps(step, trips):
    text = loop().replace("tuple(%i, %left", "tuple(%next, %left")
    added = f"  %step = s32[]{{:T(128)}} constant({step})\n  %next = s32[]{{:T(128)}} add(%i, %step)\n"
    text = text.replace("  %product =", added + "  %product =")
    assert program_cost(text).flops == (trips + 1) * PRODUCT


def test_a_loop_that_data_end_runs_as_often_as_it_is_told():
    text = loop().replace(COUNTING, "compare(%counter, %counter)")
    assert program_cost(text).flops == 2 * PRODUCT
    assert program_cost(text, (10,)).flops == 11 * PRODUCT


FUSION = """HloModule jit_step

%inner (p0: f32[6,16,32], p1: s32[], p2: f32[6,16,32]) -> f32[6,16,32] {
  %p0 = f32[6,16,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[6,16,32]{2,1,0} parameter(2)
  %slice = f32[1,16,32]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,16,32}
  ROOT %update = f32[6,16,32]{2,1,0} dynamic-update-slice(%p2, %slice, %p1, %p1, %p1)
}

ENTRY %main (a: f32[6,16,32], i: s32[], b: f32[6,16,32]) -> f32[6,16,32] {
  %a = f32[6,16,32]{2,1,0} parameter(0)
  %i = s32[]{:S(2)} parameter(1)
  %b = f32[6,16,32]{2,1,0} parameter(2)
  ROOT %fusion = f32[6,16,32]{2,1,0} fusion(%a, %i, %b), kind=kLoop, calls=%inner
}
"""


def test_a_layer_that_is_taken_of_a_stack_and_put_in_place_moves_alone():
    assert program_cost(FUSION).bytes == 2 * 16 * 32 * 4


COLLECTIVES = """HloModule jit_step

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%gather_fusion.1 (p: bf16[16,32]) -> bf16[64,32] {
  %p = bf16[16,32]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,32]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

%gather_fusion.2 (p: bf16[16,32]) -> bf16[64,32] {
  %p = bf16[16,32]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[64,32]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

%all-reduce-scatter.3 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0} parameter(0)
  %all-reduce.3 = f32[64,32]{1,0} all-reduce(%input), channel_id=9, replica_groups=[1,4]<=[4], to_apply=%sum
  %place = s32[] constant(0)
  ROOT %share = f32[16,32]{1,0} dynamic-slice(%all-reduce.3, %place, %place), dynamic_slice_sizes={16,32}
}

ENTRY %main (a: bf16[16,32], b: f32[64,32]) -> f32[64,32] {
  %a = bf16[16,32]{1,0} parameter(0)
  %b = f32[64,32]{1,0} parameter(1)
  %begun = bf16[64,32]{1,0} fusion(%a), kind=kCustom, calls=%gather_fusion.1
  %ended = bf16[64,32]{1,0} fusion(%a), kind=kCustom, calls=%gather_fusion.2
  %scattered = f32[16,32]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3
  %permute = (f32[64,32]{1,0}, f32[64,32]{1,0}) collective-permute-start(%b), source_target_pairs={{0,1}}
  %permuted = f32[64,32]{1,0} collective-permute-done(%permute)
  %again = f32[16,32]{1,0} reduce-scatter(%b), channel_id=11, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%sum
  ROOT %all-reduce.4 = f32[64,32]{1,0} all-reduce(%b), channel_id=11, replica_groups=[1,4]<=[4], to_apply=%sum
}
"""


def test_collectives_count_their_payload_once_by_kind():
    whole = 64 * 32 * 4
    assert dict(program_cost(COLLECTIVES).collectives) == {
        "all-gather": 64 * 32 * 2,
        "reduce-scatter": 2 * whole,
        "collective-permute": whole,
        "all-reduce": whole,
    }


CONDITIONAL = """HloModule jit_step

%small (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %copy = f32[8,8]{1,0} copy(%p)
}

%large (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %product = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (which: s32[], a: f32[8,8]) -> f32[8,8] {
  %which = s32[] parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  ROOT %result = f32[8,8]{1,0} conditional(%which, %a, %a), branch_computations={%small, %large}
}
"""


def test_of_a_conditional_the_largest_branch_counts():
    assert program_cost(CONDITIONAL).flops == 2 * 8**3


# As the TPU compiler writes a product with one layer of int8 kernels: in other tiles on the way, but not in memory.
LAYER_OF_INT8 = """HloModule jit_f, is_scheduled=true

%copy_fusion (input: s8[6,64,128]) -> s8[6,64,128] {
  %input = s8[6,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[6,64,128]{2,1,0:T(8,128)(4,1)} copy(%input)
}

%layer (stack: s8[6,64,128], at: s32[]) -> s8[1,64,128] {
  %stack = s8[6,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %tiled = s8[6,64,128]{2,1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, calls=%copy_fusion
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = s8[1,64,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%tiled, %at, %zero, %zero), x={1,64,128}
}

ENTRY %main (kernels: s8[6,64,128], number: s32[]) -> s8[1,64,128] {
  %kernels = s8[6,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %number = s32[] parameter(1)
  ROOT %result = s8[1,64,128]{2,1,0:T(8,128)(4,1)} fusion(%kernels, %number), kind=kLoop, calls=%layer
}
"""


def test_other_tiles_inside_a_fusion_read_only_what_is_used():
    assert program_cost(LAYER_OF_INT8).bytes == 2 * 64 * 128 + 4


@pytest.mark.parametrize(
    ("window", "pairs"),
    [
        ((4, 4, 4, 3, 0, 4, 1), 4),  # a batch of products as the TPU compiler writes it
        ((4, 4, 4, 4, 3, 3, 1), 4),
        ((1, 4, 4, 1, 3, 1, 1), 4),  # one element, met by a window that is moved over it
        ((8, 8, 1, 1, 0, 1, 1), 8),
        ((8, 8, 3, 1, 1, 1, 1), 22),  # a window of three; at both ends one place is padding
    ],
)
def test_only_elements_count_in_a_window(window, pairs):
    given, made, size, stride, pad, lhs_dilate, rhs_dilate = window
    row = np.zeros((given - 1) * lhs_dilate + 1)
    row[::lhs_dilate] = 1
    padded = np.pad(row, (pad, made * stride + size * rhs_dilate))
    expected = sum(padded[o * stride + w * rhs_dilate] for o in range(made) for w in range(size))
    assert _window_pairs(*window) == expected == pairs
