from __future__ import annotations

from structlog.testing import capture_logs

from gyre.cell.engine.sampled import SampledLedger, SampledLeg


def leg(call: str, tokens: int) -> SampledLeg:
    return SampledLeg(call=call, stay=0, tokens=tokens)


def test_a_leg_without_tokens_is_not_kept() -> None:
    ledger = SampledLedger()
    ledger.note("s", leg("a", 0))
    ledger.note("s", leg("b", 2))
    assert ledger.of("s") == (leg("b", 2),)


def test_beyond_its_limit_the_oldest_sessions_go_and_that_is_said() -> None:
    ledger = SampledLedger(limit_legs=3)
    with capture_logs() as logs:
        for session in ("first", "second"):
            for call in ("a", "b"):
                ledger.note(session, leg(f"{session} {call}", 5))
    assert ledger.of("first") == ()
    assert [(told["event"], told["session"], told["tokens"]) for told in logs] == [
        ("sampled_tokens_let_go", "first", 10)
    ]
    assert len(ledger.of("second")) == 2
    ledger.forget("second")
    for number in range(5):
        ledger.note("third", leg(str(number), 1))
    assert len(ledger.of("third")) == 5
