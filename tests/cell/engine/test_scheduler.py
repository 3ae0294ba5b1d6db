from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import GenerateRequest, SamplingParams
from gyre.cell.engine.blocks import BlockPool
from gyre.cell.engine.scheduler import Scheduler
from gyre.cell.engine.sequence import Sequence

SIZE = 4


def sequence(tokens: SequenceOf[int], new_tokens: int = 8, call: str = "c") -> Sequence:
    return Sequence(
        request=GenerateRequest(
            call=call,
            session="s",
            prompt_ids=tuple(tokens),
            prompt_tokens=len(tokens),
            sampling=SamplingParams(),
        ),
        tokens=list(tokens),
        end_tokens=len(tokens) + new_tokens,
        stop_ids=frozenset(),
        chunked_at_s=0.0,
    )


def scheduler(blocks: int = 16, max_batch: int = 4, step_tokens: int = 100) -> Scheduler:
    return Scheduler(BlockPool(blocks, SIZE), max_batch, step_tokens)


def step(s: Scheduler) -> list[tuple[str, int, int]]:
    """One pass of a model that answers 7 to everything: what it computed, as (call, start, count)."""
    spans = s.plan()
    drawing = [span.sequence for span in spans if span.samples]
    done = [(span.sequence.request.call, span.start, span.count) for span in spans]
    s.advance(spans)
    for one in drawing:
        one.append(7, 0.0, s.prefixes.version)
        if one.finish_reason is not None:
            s.remove(one)
    return done


def test_a_prompt_then_a_token_at_a_time() -> None:
    s = scheduler()
    s.add(sequence(range(6), new_tokens=3))
    assert [step(s) for _ in range(3)] == [[("c", 0, 6)], [("c", 6, 1)], [("c", 7, 1)]]
    assert not s.has_work
    assert s.pool.used == 0


def test_a_long_prompt_is_computed_in_parts_while_others_decode() -> None:
    s = scheduler(step_tokens=5)
    s.add(sequence([1, 2], call="a"))
    step(s)
    s.add(sequence(range(10, 20), call="b"))
    assert step(s) == [("a", 2, 1), ("b", 0, 4)]
    assert step(s) == [("a", 3, 1), ("b", 4, 4)]
    assert step(s) == [("a", 4, 1), ("b", 8, 2)]
    assert step(s) == [("a", 5, 1), ("b", 10, 1)]


def test_decoding_goes_on_when_prompts_have_used_the_budget() -> None:
    s = scheduler(step_tokens=4)
    s.add(sequence(range(10), call="a"))
    step(s)
    s.add(sequence([1], call="b"))
    s.running.insert(1, s.waiting.popleft())
    assert step(s) == [("a", 4, 4), ("b", 0, 1)]


def test_no_more_run_than_max_batch() -> None:
    s = scheduler(max_batch=2)
    for call in "abc":
        s.add(sequence([1], new_tokens=2, call=call))
    assert [step(s) for _ in range(3)] == [
        [("a", 0, 1), ("b", 0, 1)],
        [("a", 1, 1), ("b", 1, 1)],
        [("c", 0, 1)],
    ]


def test_a_shared_prefix_in_the_making_is_waited_for() -> None:
    s = scheduler()
    s.add(sequence([*range(8), 50], call="a"))
    s.add(sequence([*range(8), 51], call="b"))
    s.add(sequence([60, 61], call="c"))
    assert step(s) == [("a", 0, 9), ("c", 0, 2)]
    assert step(s)[2:] == [("b", 8, 1)]


def test_without_a_free_block_the_last_admitted_waits_again() -> None:
    s = scheduler(blocks=4)
    s.add(sequence(range(4), new_tokens=12, call="a"))
    s.add(sequence(range(50, 54), new_tokens=8, call="b"))
    calls = []
    while s.has_work:
        calls.append([call for call, _, _ in step(s)])
    assert s.preemptions > 0
    assert all(calls)
    # a, admitted first, never paused.
    assert all("a" in step for step in calls[:12])
    assert s.pool.used == 0


def test_new_weights_restart_what_is_live() -> None:
    s = scheduler()
    first, second = sequence(range(6), call="a"), sequence(range(6), call="b")
    s.add(first)
    step(s)
    step(s)
    s.restart(1)
    s.add(second)
    assert step(s) == [("a", 0, 8)]
    assert first.cached_tokens == 0
    assert step(s) == [("a", 8, 1), ("b", 4, 2)]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8),
    blocks=st.integers(4, 10),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 20),
    weights_at=st.sets(st.integers(0, 40), max_size=2),
)
def test_every_call_ends_whatever_the_room(
    prompts: list[list[int]], blocks: int, max_batch: int, step_tokens: int, weights_at: set[int]
) -> None:
    s = scheduler(blocks, max_batch, step_tokens)
    sequences = [sequence(p, new_tokens=16 - len(p), call=str(i)) for i, p in enumerate(prompts)]
    for one in sequences:
        s.add(one)
    passes = 0
    while s.has_work:
        if passes in weights_at:
            s.restart(s.prefixes.version + 1)
        assert step(s)
        assert len(s.running) <= max_batch
        held = {block for one in s.running for block in one.table}
        assert len(held) == s.pool.used
        passes += 1
        assert passes < 5000
    assert all(one.finish_reason == "length" and len(one.tokens) == 16 for one in sequences)
    assert s.pool.used == 0
