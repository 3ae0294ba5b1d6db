"""Looking into a living system: a tree of what its actors are at, and each message as it is handled.

Nothing of it is on the way of a message until somebody looks.
"""

from gyre.actors.looking.contact import CONTACT, Contact, ContactError, offered, read_contact
from gyre.actors.looking.messages import Inspect, Trace
from gyre.actors.looking.reports import (
    ActorReport,
    DeadLetterReport,
    FailureReport,
    HandlerReport,
    HandlingReport,
    NodeReport,
    NoSuchActor,
    Traced,
)

__all__ = [
    "CONTACT",
    "ActorReport",
    "Contact",
    "ContactError",
    "DeadLetterReport",
    "FailureReport",
    "HandlerReport",
    "HandlingReport",
    "Inspect",
    "NoSuchActor",
    "NodeReport",
    "Trace",
    "Traced",
    "offered",
    "read_contact",
]
