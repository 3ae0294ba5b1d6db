"""Followers of tensor-parallel engines, in a process of their own: what other ranks of a cell are in a job.

As a program it reads orders from its standard input, one JSON object a line, and answers each with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch
from torch.distributed import PrefixStore, TCPStore

from gyre.cell.engine.follower import Follower
from gyre.cell.engine.kv_home import PoolFile
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.share import Share
from gyre.cell.engine.team import Team, meet
from gyre.cell.weights import Layout, RegionWeights, shapes
from gyre.rdma import RegionHandle, SharedMemory

CUDA = os.environ.get("GYRE_TEST_DEVICE") == "cuda"
TIMEOUT_S = 20.0


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if CUDA else torch.device("cpu")


class Followers:
    """The process, started when it is needed, and again after its death."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._process: subprocess.Popen[str] | None = None
        self._meetings = 0
        self._asking = threading.Lock()

    @property
    def pid(self) -> int:
        return self._running().pid

    def meet(self, name: str, ranks: int, shm: Path, setup: dict[str, Any]) -> Team:
        """The leading rank's side; followers of that name are made where there are none."""
        self._meetings += 1
        prefix = f"meeting{self._meetings}"
        address = {"port": self._store.port, "prefix": prefix, "ranks": ranks, "shm": str(shm)}
        with self._asking:
            self._send({"do": "meet", "name": name, **address, **setup})
            store = PrefixStore(prefix, self._store)
            path = shm / f"{prefix}.sock"
            team = meet(store, 0, ranks, path, device=device_of(0), timeout_s=TIMEOUT_S, **_how(setup))
            self._answer()
        return team

    def forget(self, name: str) -> None:
        if self._process is not None:
            self.ask({"do": "forget", "name": name})

    def things(self) -> list[int]:
        """Threads, descriptors and resident bytes of the process."""
        found: list[int] = self.ask({"do": "things"})
        return found

    def ask(self, order: dict[str, Any]) -> Any:
        with self._asking:
            self._send(order)
            return self._answer()

    def kill(self) -> None:
        process = self._running()
        process.kill()
        self._reap(process)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._reap(self._process)

    def _reap(self, process: subprocess.Popen[str]) -> None:
        process.wait(20.0)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cell.engine.followers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            # What it imports may take longer than a meeting waits.
            self._answer()
        return self._process

    def _send(self, order: dict[str, Any]) -> None:
        pipe = self._running().stdin
        assert pipe is not None
        pipe.write(json.dumps(order) + "\n")
        pipe.flush()

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _how(setup: dict[str, Any]) -> dict[str, Any]:
    return {"in_order": setup["batch_invariant"], "by_group": setup["by_group"]}


class _Rank:
    """One follower, with a thread of its own for a device's."""

    def __init__(self, rank: int, order: dict[str, Any]) -> None:
        from tests.cell.engine.conftest import tiny_model

        self._rank = rank
        self._device = device_of(rank)
        self._thread = ThreadPoolExecutor(1, initializer=self._begin)
        self._shared = SharedMemory(Path(order["shm"]))
        model = tiny_model(order["kind"], 0).to(self._device)
        self._names = [name for name, _ in model.named_parameters()]
        self._layout = Layout(shapes(model), model.dtype, 0, 1)
        kv_tokens, block_tokens = order["kv_tokens"], order["block_tokens"]
        runner = Runner(
            model,
            kv_tokens // block_tokens,
            block_tokens,
            min(order["window_tokens"], kv_tokens),
            order["batch_invariant"],
            Share(rank, order["ranks"]),
            PoolFile(self._shared, f"kv-{order['name']}-{rank}"),
        )
        self._follower = Follower(runner, self._thread, self._weights)

    def meet(self, store: TCPStore, order: dict[str, Any]) -> Any:
        return self._thread.submit(self._meet, PrefixStore(order["prefix"], store), order)

    def close(self) -> None:
        self._thread.submit(self._follower.close).result()
        self._thread.shutdown()

    def _begin(self) -> None:
        if CUDA:
            torch.cuda.set_device(self._device)

    def _meet(self, store: PrefixStore, order: dict[str, Any]) -> None:
        how = _how(order)
        ranks = order["ranks"]
        unused = Path("unused")
        team = meet(store, self._rank, ranks, unused, device=self._device, timeout_s=TIMEOUT_S, **how)
        self._follower.join(team)

    def _weights(self, version: int, region: RegionHandle) -> RegionWeights:
        return RegionWeights(version, self._names, self._layout, self._shared, region)


def main() -> None:
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    followers: dict[str, list[_Rank]] = {}
    stores: dict[int, TCPStore] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["do"] == "meet":
            port, name = order["port"], order["name"]
            if port not in stores:
                stores[port] = TCPStore("127.0.0.1", port, is_master=False)
            if name not in followers:
                followers[name] = [_Rank(rank, order) for rank in range(1, order["ranks"])]
            for meeting in [follower.meet(stores[port], order) for follower in followers[name]]:
                meeting.result()
        elif order["do"] == "forget":
            for follower in followers.pop(order["name"], ()):
                follower.close()
        elif order["do"] == "things":
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            answer = [threading.active_count(), len(os.listdir("/proc/self/fd")), resident]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
    # Not by way of all that torch tidies up.
    os._exit(0)
