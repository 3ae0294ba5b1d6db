"""Blobs between nodes: what waits to leave, what waits to arrive, and the two ways between.

On one host they go through shared memory (`shared`), else over the bulk connection of a link (`pieces`). A
message names its blobs; the receiver asks for them when it has room, and hands the message over when they are
there. `Freight` is what a link has to do with it, `FREIGHT` the frames that are its own.
"""

from gyre.actors.bulk.freight import FREIGHT, Freight

__all__ = ["FREIGHT", "Freight"]
