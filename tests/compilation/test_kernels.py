"""Kernels in compiled HLO: what they compute and move follows from their operands."""

import pytest

from refusion_jax.compilation.cost import program_cost
from refusion_jax.compilation.kernels import attention_kernel

# As the TPU compiler writes them: two heads of keys, four query heads each, 1,024 tokens in two blocks, heads of 128.
SPLASH = """HloModule jit_loss, is_scheduled=true

ENTRY %main (a: s8[1,2,2], q: bf16[2,4,1024,128], k: bf16[2,1024,128], s: s32[8,1024]) -> bf16[2,4,1024,128] {
  %a = s8[1,2,2]{2,1,0:T(4,128)(4,1)} parameter(0)
  %q = bf16[2,4,1024,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %k = bf16[2,1024,128]{2,1,0:T(8,128)(2,1)} parameter(2)
  %s = s32[8,1024]{1,0:T(8,128)} parameter(3)
  ROOT %splash_mqa_KIND.1 = bf16[2,4,1024,128] custom-call(%a, %a, %q, %k, /*index=4*/%k, %s), TARGET, x={y={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(loss)/splash_mqa"}
}
""".replace("TARGET", 'custom_call_target="tpu_custom_call"')
PRODUCT = 2 * 2 * 4 * 1024**2 * 128 * 3 / 4  # of four pairs of blocks one lies behind the queries

# Three layers of a buffer of 2,048 entries, two rows; a query of 16 tokens of four heads for each of the eight of keys.
BUFFER = """HloModule jit_decode, is_scheduled=true

ENTRY %main (l: s32[1], n: s32[2], q: bf16[2,8,64,128], k: bf16[2,8,16,128]) -> bf16[2,8,64,128] {
  %l = s32[1]{0} parameter(0)
  %n = s32[2]{0} parameter(1)
  %q = bf16[2,8,64,128]{3,2,1,0} parameter(2)
  %k = bf16[2,8,16,128]{3,2,1,0} parameter(3)
  %b = f32[2,64,16]{2,1,0} parameter(4)
  %c = bf16[3,2,8,2048,128]{4,3,2,1,0} parameter(5)
  ROOT %buffer_attention.4 = bf16[2,8,64,128]{3,2,1,0} custom-call(%l, %n, %q, %k, %k, /*index=5*/%b, %c, %c), TARGET
}
""".replace("TARGET", 'custom_call_target="tpu_custom_call"')


def test_what_computes_attention_is_told():
    programs = SPLASH.replace("KIND", "fwd"), BUFFER, "ENTRY %main (a: f32[2]) -> f32[2] {\n}"
    assert [attention_kernel(program) for program in programs] == ["splash", "pallas", "xla"]


@pytest.mark.parametrize(("kind", "products"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_causal_rows(kind, products):
    assert program_cost(SPLASH.replace("KIND", kind)).flops == products * PRODUCT


def test_a_buffer_counts_one_layer_of_it():
    cost = program_cost(BUFFER)
    assert cost.flops == 4 * 2 * 8 * 64 * 128 * (2048 + 16)
    query, own, buffer = (2 * 2 * 8 * length * 128 for length in (64, 16, 2048))
    assert cost.bytes == 2 * query + 2 * own + 2 * buffer + 4 * (2 * 64 * 16 + 1 + 2)


def test_a_buffer_in_int8_counts_its_scales():
    scales = "  %d = f32[3,2,8,1,2048]{4,3,2,1,0} parameter(6)\n  ROOT"
    text = BUFFER.replace("bf16[3,2,8", "s8[3,2,8").replace("  ROOT", scales).replace("%c, %c)", "%c, %c, %d, %d)")
    cost = program_cost(text)
    assert cost.flops == program_cost(BUFFER).flops
    assert program_cost(BUFFER).bytes - cost.bytes == 2 * 2 * 8 * 2048 * (2 * 128 - (128 + 4))


def test_other_calls_have_no_flops():
    assert program_cost(SPLASH.replace("splash_mqa_KIND", "something")).flops == 0
    assert program_cost(BUFFER.replace('"tpu_custom_call"', '"Sharding"')).flops == 0
