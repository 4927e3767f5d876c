"""A schedule in the form of TPU's compiler, written by hand: a loop in a loop, a branch, copies of either kind."""

import pathlib

import pytest

from specdec_jax import hlo

PROGRAM = (pathlib.Path(__file__).parent / "fixtures/tpu_schedule.hlo").read_text()


def test_a_step_is_added_up_with_its_loops_and_its_dearest_branch():
    program = hlo.parse(PROGRAM)
    body = program.outer_loop
    assert program.entry == "main.1" and body == "outer_body"
    assert program.cycles(body) == {
        hlo.MATRIX: 1000, hlo.COPY: 50, hlo.COLLECTIVE: 7, hlo.VECTOR: 100 + 6 * 100, hlo.OTHER: 0,
    }  # fmt: skip
    assert program.cycles(program.entry)[hlo.MATRIX] == 1000  # a loop of unknown length counts as one step


def test_what_the_loop_carries_is_told_by_its_sizes():
    loop = "%loop = (s32[]{:T(128)}, /*index=1*/"
    assert loop in PROGRAM
    carries = "bf16[128,64]{1,0:T(8,128)(2,1)}, f32[64,1,128]{2,1,0:T(8,128)}, f32[7]{0}, "
    assert hlo.parse(PROGRAM.replace(loop, loop + carries)).carried == {(): 1, (64, 128): 2, (7,): 4}


def test_moves_are_told_from_fetches():
    program = hlo.parse(PROGRAM)
    ((copy, times),) = program.copies(program.outer_loop, 2**14)
    assert (copy.name, times, copy.num_bytes, copy.dims) == ("turned", 1, 2 * 128 * 64, (64, 128))
    assert program.copies(program.outer_loop, 2**14 + 1) == []
    assert program.number_of(program.outer_loop, hlo.COLLECTIVE) == 1
    assert program.number_of(program.outer_loop, hlo.HOST) == 0 and program.number_of(program.entry, hlo.HOST) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no ENTRY computation"),
        (PROGRAM.replace("estimated_cycles", "cost"), "only TPU's compiler estimates them"),
    ],
)
def test_what_is_no_such_program_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        hlo.parse(text)


def test_a_program_without_its_one_loop_is_refused():
    with pytest.raises(ValueError, match="has 0 loops at its outermost level"):
        _ = hlo.parse(PROGRAM.replace(" while(%start)", " tuple(%start)")).outer_loop
