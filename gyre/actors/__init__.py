"""The actor runtime: actors, refs, mailboxes, supervisors, processes, transports.

Knows nothing of ML and is useful alone: subclass Actor, declare handlers, spawn in a Node.
"""

from gyre.actors.actor import Actor, Context
from gyre.actors.background import Timer
from gyre.actors.blob import Blob
from gyre.actors.broadcasting import ask_all, broadcast
from gyre.actors.errors import (
    ActorDied,
    ActorError,
    AskTimeout,
    BadMessage,
    ExitReason,
    LinkLost,
    MailboxFull,
    Moved,
    NodeFailed,
    RemoteError,
    SpawnFailed,
    UnhandledMessage,
    WireError,
    WouldDeadlock,
    register_error,
)
from gyre.actors.handlers import handles
from gyre.actors.loop import run
from gyre.actors.messages import Ask, Down, Restarted, Stream, Tell
from gyre.actors.node import Node
from gyre.actors.ref import Ref
from gyre.actors.resuming import Resumed, resumed
from gyre.actors.specs import ChildSpec, ProcessSpec, Spec
from gyre.actors.streams import ItemStream
from gyre.actors.supervision import Supervision
from gyre.actors.supervisor import AwaitChild, Follow, Supervisor, WhereIs
from gyre.actors.token import TokenError, make_token, read_token

__all__ = [
    "Actor",
    "ActorDied",
    "ActorError",
    "Ask",
    "AskTimeout",
    "AwaitChild",
    "BadMessage",
    "Blob",
    "ChildSpec",
    "Context",
    "Down",
    "ExitReason",
    "Follow",
    "ItemStream",
    "LinkLost",
    "MailboxFull",
    "Moved",
    "Node",
    "NodeFailed",
    "ProcessSpec",
    "Ref",
    "RemoteError",
    "Restarted",
    "Resumed",
    "SpawnFailed",
    "Spec",
    "Stream",
    "Supervision",
    "Supervisor",
    "Tell",
    "Timer",
    "TokenError",
    "UnhandledMessage",
    "WhereIs",
    "WireError",
    "WouldDeadlock",
    "ask_all",
    "broadcast",
    "handles",
    "make_token",
    "read_token",
    "register_error",
    "resumed",
    "run",
]
