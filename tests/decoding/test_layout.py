"""Where a request's tokens stand: holes, slots and blocks against their definitions, and what is refused."""

import dataclasses

import numpy as np
import pytest

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding import Hole
from refusion_jax.decoding.layout import is_template, lay_out, prepare_layout

MODEL = ModelConfig(vocab_size=32, max_position_embeddings=48)


def settings(slot_size=4, blocks=1, gen_length=None):
    return DecodeConfig(gen_length=gen_length or slot_size * blocks, slot_size=slot_size, serial_num_blocks=blocks)


def lists(layout, *names):
    return [getattr(layout, name).tolist() for name in names]


def test_a_plain_prompt():
    layout = lay_out([7, 8, 9], settings(slot_size=2, blocks=2, gen_length=7))
    assert lists(layout, "tokens", "token_position_ids") == [[7, 8, 9], [0, 1, 2]]
    assert lists(layout, "position_ids") == [list(range(3, 11))]
    assert lists(layout, "slot_starts", "blocks", "holes") == [[0, 0, 2, 2, 4, 4, 6, 6], [0] * 4 + [1] * 4, [0] * 8]
    assert (layout.prompt_length, layout.response_length) == (3, 8)
    assert all(array.dtype == np.int32 for array in vars(layout).values())


def test_a_plain_prompt_is_a_template_with_one_hole():
    config = settings(slot_size=3, blocks=2, gen_length=12)
    plain, template = lay_out((5, 6), config), lay_out([[5, 6], Hole(12)], config)
    for one, other in zip(vars(plain).values(), vars(template).values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_holes_between_texts():
    """Slots do not cross holes; each hole's last slot may be short. Position IDs count through text and holes."""
    layout = lay_out([[5], Hole(5), [6, 7], Hole(2), [8], Hole(4)], settings(slot_size=4))
    assert lists(layout, "tokens", "token_position_ids") == [[5, 6, 7, 8], [0, 6, 7, 10]]
    assert lists(layout, "position_ids") == [[1, 2, 3, 4, 5, 8, 9, 11, 12, 13, 14]]
    assert lists(layout, "slot_starts") == [[0, 0, 0, 0, 4, 5, 5, 7, 7, 7, 7]]
    assert lists(layout, "holes", "blocks") == [[0] * 5 + [1] * 2 + [2] * 4, [0] * 11]
    assert [part.tolist() for part in layout.by_hole(np.array([0, 4, 6, 10]))] == [[0, 4], [6], [10]]
    assert [part.tolist() for part in layout.by_hole(np.array([5]))] == [[], [5], []]


def test_a_template_may_begin_with_a_hole():
    layout = lay_out([Hole(2), [9], Hole(1)], settings(slot_size=8))
    assert lists(layout, "tokens", "token_position_ids") == [[9], [2]]
    assert lists(layout, "position_ids", "slot_starts", "holes") == [[0, 1, 3], [0, 0, 2], [0, 0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_random_templates(seed):
    """Against the definitions, token by token."""
    rng = np.random.default_rng(seed)
    segments = []
    for _ in range(rng.integers(1, 5)):
        segments += [rng.integers(32, size=rng.integers(1, 4)).tolist(), Hole(int(rng.integers(1, 12)))]
    segments = segments[1:] if len(segments) > 2 and rng.integers(2) else segments
    slot_size, blocks = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    layout = lay_out(segments, settings(slot_size, blocks))

    text, fixed, response, slots, holes = [], [], [], [], []
    position = 0
    for index, segment in enumerate(segments):
        if isinstance(segment, Hole):
            for place in range(segment.length):
                if place % slot_size == 0:
                    slots.append([])
                slots[-1].append(len(response))
                response.append(position)
                holes.append(sum(isinstance(before, Hole) for before in segments[:index]))
                position += 1
        else:
            text += segment
            fixed += range(position, position + len(segment))
            position += len(segment)
    assert lists(layout, "tokens", "token_position_ids", "position_ids") == [text, fixed, response]
    parts = np.array_split(np.arange(len(slots)), min(blocks, len(slots)))
    block_of = {int(slot): block for block, part in enumerate(parts) for slot in part}
    for slot, offsets in enumerate(slots):
        assert set(layout.slot_starts[offsets].tolist()) == {offsets[0]}
        assert set(layout.blocks[offsets].tolist()) == {block_of[slot]}
    assert layout.holes.tolist() == holes


def test_slots_of_all_holes_are_divided_as_equally_as_can_be():
    layout = lay_out([[5], Hole(3), [6], Hole(4)], settings(slot_size=1, blocks=3))
    assert layout.blocks.tolist() == [0, 0, 0, 1, 1, 2, 2]
    fewer = lay_out([[5], Hole(3), [6], Hole(2)], settings(slot_size=4, blocks=7))
    assert fewer.blocks.tolist() == [0, 0, 0, 1, 1]


def test_fixed_text_alone_has_nothing_to_decode():
    layout = lay_out([[5, 6]], settings())
    assert (layout.prompt_length, layout.response_length) == (2, 0)
    assert layout.by_hole(np.array([], np.int32)) == []
    assert lists(layout, "slot_starts", "blocks", "holes") == [[], [], []]
    assert prepare_layout([[5, 6]], settings(), MODEL).response_length == 0


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "The prompt is empty; give at least one token."),
        ([[]], "The prompt is empty; give at least one token."),
        ([Hole(4)], "The template has no fixed text; give at least one token."),
        ([[], Hole(4), []], "The template has no fixed text; give at least one token."),
        ([[5], Hole(4), Hole(3)], "Two holes stand next to each other, of 4 and 3 tokens; make them one, or put text"),
        ([[5], Hole(4), [], Hole(3)], "Two holes stand next to each other, of 4 and 3 tokens"),
    ],
)
def test_templates_that_are_refused(prompt, sentence):
    with pytest.raises(ConfigError) as caught:
        lay_out(prompt, settings())
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("length", [0, -3, 2.0, True, "4", None])
def test_holes_that_are_refused(length):
    with pytest.raises(ConfigError) as caught:
        Hole(length)
    assert str(caught.value) == f"A hole has the size {length!r}; it must be a whole number of at least 1."


def test_empty_texts_are_left_out():
    layout = lay_out([[], [5], [], [6], Hole(2), []], settings())
    assert lists(layout, "tokens", "token_position_ids", "position_ids") == [[5, 6], [0, 1], [2, 3]]


def test_what_is_a_template():
    assert is_template([[5], Hole(1)]) and is_template([(5,)]) and is_template([Hole(1)])
    assert not is_template([5, 6]) and not is_template(np.array([5])) and not is_template([])


def test_what_a_model_cannot_decode_is_refused():
    def message(prompt, config, prefix_length=0):
        with pytest.raises(ConfigError) as caught:
            prepare_layout(prompt, config, MODEL, prefix_length)
        return str(caught.value)

    assert message([5, 32], settings()) == "Prompt token 32 lies outside the vocabulary of 32 tokens."
    assert message([[5], Hole(1), [-1]], settings()) == "Prompt token -1 lies outside the vocabulary of 32 tokens."
    suppressing = DecodeConfig(gen_length=4, slot_size=4, suppress_ids=(3, 99))
    assert message([5], suppressing) == "suppress_ids: token 99 lies outside the vocabulary of 32 tokens."
    assert message([5] * 45, settings()) == (
        "The prompt has 45 tokens, with 4 to fill that makes 49, beyond the maximum of 48; shorten the prompt or lower "
        "gen_length."
    )
    assert message([[5] * 10, Hole(10)], settings(), 29).startswith(
        "The prompt has 10 tokens, with 10 to fill that makes 20, beyond the maximum of 19;"
    )
    prepare_layout([5] * 44, settings(), MODEL)
    prepare_layout([[5] * 10, Hole(10)], settings(), MODEL, 28)


def test_a_layout_behind_more_text():
    config = DecodeConfig(gen_length=4, slot_size=2)
    moved, whole = lay_out([7, 8], config).behind([5, 6, 9]), lay_out([5, 6, 9, 7, 8], config)
    for field in dataclasses.fields(whole):
        ours, expected = getattr(moved, field.name), getattr(whole, field.name)
        np.testing.assert_array_equal(ours, expected)
        assert ours.dtype == expected.dtype
    assert lay_out([7], config).behind([]).position_ids.tolist() == [1, 2, 3, 4]
