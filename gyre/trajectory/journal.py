"""The run's journal: SQLite in WAL mode, one writer thread, group commit.

`await journal.write(entry)` returns when the entry survives kill -9 of this process: all that is queued
while a transaction runs goes into the next one. (With `synchronous=NORMAL` a loss of power may take the
last transactions, never a part of one.) A full disk makes writes wait, it loses none.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

import structlog

from gyre.trajectory.rows import SCHEMA, SCHEMA_VERSION, Entry, Statement, statements

log = structlog.get_logger()

RETRY_S = 1.0
# Conditions of the disk, not faults of an entry: the same write may succeed later.
_TRANSIENT = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN}


class JournalError(RuntimeError):
    """The journal at `path` cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class JournalCorrupt(JournalError):
    """The file is there but is no intact journal of this version."""


class JournalInUse(JournalError):
    """Another job has the run folder."""


class JournalClosed(JournalError):
    """The journal was closed before an entry was durable."""


class _Item(NamedTuple):
    statements: list[Statement]
    loop: asyncio.AbstractEventLoop
    durable: asyncio.Future[None]


class Journal:
    """The writing side; one at a time per file, guarded by a lock file beside it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates. Raises JournalInUse, JournalCorrupt, JournalError."""
        self.path = path
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._full = False
        self._lock = _lock(path)
        try:
            self._connection = _open(path)
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    async def write(self, *entries: Entry) -> None:
        """Returns when all entries are durable, in one transaction. Raises JournalClosed; what SQLite says
        of a bad entry; TypeError and the like where an entry cannot be encoded."""
        loop = asyncio.get_running_loop()
        encoded = [statement for entry in entries for statement in statements(entry)]
        if self._closing.is_set():
            raise JournalClosed(self.path, "the journal is closed")
        durable: asyncio.Future[None] = loop.create_future()
        self._items.put(_Item(encoded, loop, durable))
        await durable

    async def close(self) -> None:
        """Commits what is queued, unless the disk is full, and frees the file."""
        if not self._closing.is_set():
            self._closing.set()
            self._items.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the writer thread ---

    def _run(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                self._commit_all(self._drain(item))
        finally:
            self._closing.set()
            while not self._items.empty():
                if item := self._items.get():
                    _settle([item], JournalClosed(self.path, "the journal is closed"))
            self._connection.close()
            self._lock.close()

    def _drain(self, first: _Item) -> list[_Item]:
        batch = [first]
        with suppress(queue.Empty):
            while (item := self._items.get_nowait()) is not None:
                batch.append(item)
            self._items.put(None)
        return batch

    def _commit_all(self, batch: list[_Item]) -> None:
        error = self._commit(batch)
        if len(batch) > 1 and error is not None and not isinstance(error, JournalClosed):
            # One entry of the batch is at fault; the others must not fail with it.
            for item in batch:
                _settle([item], self._commit([item]))
            return
        _settle(batch, error)

    def _commit(self, batch: list[_Item]) -> Exception | None:
        """Commits one transaction, as often as the disk's condition makes it fail."""
        while True:
            try:
                self._transact(batch)
            except Exception as error:
                if not _is_transient(error):
                    return error
                self._report_full(batch[0].loop, error)
                if self._closing.wait(RETRY_S):
                    return JournalClosed(self.path, f"closed while the disk refused to write ({error})")
            else:
                if self._full:
                    self._full = False
                    _call(batch[0].loop, log.info, "journal_recovered", path=str(self.path))
                return None

    def _transact(self, batch: list[_Item]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for item in batch:
                for sql, parameters in item.statements:
                    connection.execute(sql, parameters)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise

    def _report_full(self, loop: asyncio.AbstractEventLoop, error: Exception) -> None:
        if not self._full:
            self._full = True
            _call(loop, log.error, "journal_full", path=str(self.path), error=str(error), retry_s=RETRY_S)


def _is_transient(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, OSError) or (code is not None and code & 0xFF in _TRANSIENT)


def _settle(items: list[_Item], error: Exception | None) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for item in items:
        by_loop.setdefault(item.loop, []).append(item.durable)
    for loop, futures in by_loop.items():
        _call(loop, _resolve, futures, error)


def _resolve(futures: list[asyncio.Future[None]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: object, *args: object, **kwargs: object) -> None:
    # A loop that is closed has nobody who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: function(*args, **kwargs))  # type: ignore[operator]


def _lock(path: Path) -> IO[str]:
    try:
        lock = open(path.with_name(path.name + ".lock"), "a+", encoding="ascii")  # noqa: SIM115
    except OSError as error:
        raise JournalError(path, f"cannot be opened: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(f"process {os.getpid()}\n")
        lock.flush()
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise JournalInUse(
            path, f"in use by {holder}; a run folder belongs to one job: stop it or take another name"
        ) from None
    except OSError as error:
        lock.close()
        raise JournalError(path, f"cannot be locked: {error}") from error
    return lock


def _open(path: Path) -> sqlite3.Connection:
    try:
        # Only the writer thread uses it after this.
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(path, f"cannot be opened: {error}") from error
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        if _is_transient(error):
            raise JournalError(path, f"cannot be written: {error}") from error
        raise corrupt(path, str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
        insert = f"INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');"
        connection.executescript(f"BEGIN;{SCHEMA}{insert}COMMIT;")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise corrupt(path, str(found))
    check_version(connection, path)


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalCorrupt where the file was written by another version."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except UnicodeDecodeError as error:  # of what SQLite itself wants to say
        raise corrupt(path, str(error)) from error
    if row != (str(SCHEMA_VERSION),):
        raise JournalCorrupt(
            path, f"its version is {row[0] if row else 'unknown'}, this Gyre reads {SCHEMA_VERSION}"
        )


def corrupt(path: Path, reason: str) -> JournalCorrupt:
    """The error for a damaged file, with what to do."""
    return JournalCorrupt(
        path,
        f"the journal is corrupt ({' '.join(reason.split())}); restore the file from a copy, or start a new"
        " run under another name (its checkpoints can be given as [model] path)",
    )
