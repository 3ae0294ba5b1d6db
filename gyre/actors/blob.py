"""Bytes of a message that travel beside it."""

from __future__ import annotations

from typing import Any, final


@final
class Blob:
    """A field of messages, answers and stream items that holds a buffer: bytes, bytearray, memoryview, a
    numpy array, `tensor.numpy()`; C-contiguous. Other nodes get its bytes out of band, never through msgpack:
    on one host through shared memory, else over a connection of their own. In this node it is passed as
    it is.

    Do not change the buffer once it was sent: whoever gets it may read it later. `buffer` is read-only for
    the same reason. Memory that came from elsewhere is given back when neither the Blob nor anything made of
    its `buffer` is left; a `close` says so early.
    """

    __slots__ = ("__weakref__", "_view")

    def __init__(self, buffer: Any) -> None:
        """TypeError, ValueError where it is no such buffer."""
        try:
            view = memoryview(buffer)
        except TypeError:
            raise TypeError(
                f"a {type(buffer).__qualname__} is no buffer: bytes, a numpy array, a CPU tensor's .numpy()"
            ) from None
        if not view.c_contiguous:
            raise ValueError("a Blob's buffer must be C-contiguous")
        if view.nbytes == 0:
            view = memoryview(b"")
        self._view: memoryview | None = view.cast("B").toreadonly()

    @property
    def buffer(self) -> memoryview:
        """Its bytes. ValueError where it was closed."""
        if self._view is None:
            raise ValueError("this Blob was closed")
        return self._view

    @property
    def nbytes(self) -> int:
        return 0 if self._view is None else self._view.nbytes

    def close(self) -> None:
        """Lets go of the buffer, here and at everyone of this node that holds this Blob."""
        self._view = None

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return "Blob(closed)" if self._view is None else f"Blob({self.nbytes} bytes)"
