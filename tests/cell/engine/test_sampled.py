from __future__ import annotations

from gyre.cell.engine.sampled import SampledLedger, SampledLeg


def leg(call: str, tokens: int) -> SampledLeg:
    return SampledLeg(call=call, stay=0, tokens=tokens)


def test_a_leg_without_tokens_is_not_kept() -> None:
    ledger = SampledLedger()
    ledger.note("s", leg("a", 0))
    ledger.note("s", leg("b", 2))
    assert ledger.of("s") == (leg("b", 2),)


def test_beyond_its_limit_the_oldest_sessions_go_and_their_tokens_are_counted() -> None:
    ledger = SampledLedger(limit_legs=3)
    for session in ("first", "second"):
        for call in ("a", "b"):
            ledger.note(session, leg(f"{session} {call}", 5))
    assert (ledger.of("first"), ledger.let_go_tokens) == ((), 10)
    assert len(ledger.of("second")) == 2
    ledger.forget("second")
    for number in range(5):
        ledger.note("third", leg(str(number), 1))
    assert len(ledger.of("third")) == 5
