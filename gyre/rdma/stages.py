"""How far an operation has come, and what its failures are called there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gyre.rdma.base import PeerLost, Refused, Stage, TransferError, TransferTimeout
from gyre.rdma.frames import BadFrame, Frame, No
from gyre.rdma.lane import LaneLost

F = TypeVar("F", bound=Frame)


class Rejected(Exception):
    """The other end said no."""


class At:
    """Where an operation is."""

    def __init__(self, stage: Stage = "dial") -> None:
        self.stage: Stage = stage


@contextmanager
def told(name: str, peer: str, at: At, timeout_s: float, lost: Callable[[str], None]) -> Iterator[None]:
    """Errors as those of the contract; `lost` hears of a peer that is."""
    try:
        yield
    except TimeoutError as error:
        raise TransferTimeout(name, peer, at.stage, f"not done within {timeout_s:g} s") from error
    except Rejected as error:
        raise Refused(name, peer, at.stage, str(error)) from error
    except (LaneLost, BadFrame) as error:
        lost(peer)
        raise PeerLost(name, peer, at.stage, str(error)) from error
    except (OSError, ValueError) as error:
        raise TransferError(name, peer, at.stage, str(error)) from error


def expect(frame: Frame, kind: type[F]) -> F:
    """Raises Rejected, BadFrame."""
    if isinstance(frame, No):
        raise Rejected(frame.reason)
    if not isinstance(frame, kind):
        raise BadFrame(f"a {type(frame).__name__} where a {kind.__name__} belongs")
    return frame
