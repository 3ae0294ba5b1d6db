"""`python -m benchmarks.kv [--json] [--quick] [--device cpu|cuda] [--only BACKEND,...]`."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from rich.console import Console

from benchmarks.actors.raw import Memcpy, raw_sender
from benchmarks.command import chosen, parser, tell
from benchmarks.kv.engines import SESSIONS, Bench, tokens_of
from benchmarks.kv.publish import CALLS, measure_publish
from benchmarks.kv.rest import measure_rest
from benchmarks.process import Companion, companion, quiet
from benchmarks.report import Report
from benchmarks.timing import Segment, rates
from gyre.actors import run
from gyre.cell.engine import GenerateRequest, KvManifest, SamplingParams
from gyre.rdma import SharedMemory

TO_RAW = 0.8
GB_PER_S = {"cuda_ipc": 200.0, "host": 40.0}
TO_RECOMPUTING = {"cpu": 50.0, "cuda": 5.0}
RAW_BYTES = 256 * 2**20
RAW = {"shm": "raw_shm", "tcp": "raw_tcp"}


class Move:
    """A session from the engine of another process into one of this: pinned there, read, checked and made
    findable here, let go of there."""

    def __init__(self, here: Bench, there: Companion, session: str) -> None:
        self._here = here
        self._there = there
        self._session = session

    async def run(self, count: int) -> float:
        """Answers the seconds of the import."""
        await self._here.forget()
        manifest = msgspec.convert(await self._there.ask(self._session), KvManifest)
        start = perf_counter()
        taken = await self._here.engine.import_kv(manifest)
        took_s = perf_counter() - start
        assert taken == SESSIONS[self._session], taken
        assert (await self._there.ask(f"release {manifest.pin}"))["held"]
        return took_s


class RawShm(AbstractContextManager["RawShm"]):
    """One copy between two files in shared memory, both mapped and touched: what `shm` can be at most.
    `memcpy` has large pages besides."""

    def __init__(self, folder: Path) -> None:
        shared = SharedMemory(folder)
        self._regions = [shared.allocate(f"raw-{number}", RAW_BYTES) for number in range(2)]
        for region in self._regions:
            region.buffer[:] = b"\x01" * RAW_BYTES

    async def run(self, count: int) -> None:
        self._regions[0].buffer[:count] = self._regions[1].buffer[:count]

    def __exit__(self, *_: object) -> None:
        for region in self._regions:
            region.close()


async def recompute_s(here: Bench, session: str) -> float:
    """The prompt of the session, and one token."""
    await here.forget()
    prompt = tokens_of(session)
    request = GenerateRequest(
        call="recomputed",
        session="recomputed",
        prompt_ids=prompt,
        prompt_tokens=len(prompt),
        sampling=SamplingParams(max_new_tokens=1),
    )
    start = perf_counter()
    async for _ in here.engine.generate(request):
        pass
    return perf_counter() - start


async def measure(
    report: Report, console: Console, *, backend: str, device: str, sessions: list[str], rounds: int
) -> None:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    there_on = "cuda:0" if gpus else "cpu"
    here_on = torch.device("cuda", gpus - 1) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(here_on)
    largest = max(sessions, key=SESSIONS.__getitem__)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as folder:
        async with AsyncExitStack() as stack:
            console.print(f"{backend} ...")
            arguments = (backend, folder, there_on, ",".join(sessions))
            there = await stack.enter_async_context(companion("benchmarks.kv.source", *arguments))
            here = Bench(backend, Path(folder), "here", here_on, SESSIONS[largest] + 1024)
            await here.start()
            stack.push_async_callback(here.close)
            nbytes = {name: await _nbytes(there, name) for name in sessions}
            segments = [Segment(name, nbytes[name], Move(here, there, name).run) for name in sessions]
            if backend == "shm":
                raw_shm = stack.enter_context(RawShm(Path(folder)))
                segments.append(Segment("raw_shm", RAW_BYTES, raw_shm.run))
                segments.append(Segment("memcpy", RAW_BYTES, Memcpy(RAW_BYTES).run))
            if backend == "tcp":
                raw = await stack.enter_async_context(raw_sender(RAW_BYTES))
                segments.append(Segment("raw_tcp", RAW_BYTES, raw.run))
            await Move(here, there, largest).run(1)  # mapped and connected once
            per_s = await rates(segments, rounds)
            for name, rate in per_s.items():
                report.figure(f"{backend}.{name}_gb_per_s", rate / 1e9)
            raw_name = RAW.get(backend)
            if raw_name is not None:
                report.at_least(
                    f"{backend}.{largest}_to_{raw_name}_ratio", per_s[largest] / per_s[raw_name], TO_RAW
                )
            else:
                report.at_least(f"{backend}.{largest}_gb_per_s", per_s[largest] / 1e9, GB_PER_S[backend])
            if backend != "tcp":
                await _against_recomputing(report, here, backend, device, sessions, nbytes, per_s)


async def _nbytes(there: Companion, session: str) -> int:
    manifest = msgspec.convert(await there.ask(session), KvManifest)
    await there.ask(f"release {manifest.pin}")
    return manifest.nbytes


async def _against_recomputing(
    report: Report,
    here: Bench,
    backend: str,
    device: str,
    sessions: list[str],
    nbytes: dict[str, int],
    per_s: dict[str, float],
) -> None:
    """Once: on the CPU it takes minutes, of two layers."""
    session = "16k" if "16k" in sessions else sessions[0]
    again_s = await recompute_s(here, session)
    moved_s = nbytes[session] / per_s[session]
    report.figure(f"{backend}.{session}_moved_ms", moved_s * 1e3)
    report.figure(f"{backend}.{session}_recomputed_s", again_s)
    ratio = again_s / moved_s
    report.at_least(f"{backend}.{session}_recomputed_to_moved_ratio", ratio, TO_RECOMPUTING[device])


async def measure_all(
    report: Report, console: Console, backends: list[str], device: str, quick: bool
) -> None:
    sessions = ["4k"] if quick else [*SESSIONS]
    rounds = 1 if quick else 5
    one = partial(measure, report, console, device=device, sessions=sessions, rounds=rounds)
    for backend in backends:
        if backend not in ("publish", "rest"):
            await one(backend=backend)
            continue
        console.print(f"{backend} ...")
        with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as folder:
            if backend == "rest":
                await measure_rest(report, Path(folder), device, sessions, rounds)
                continue
            calls = 2 if quick else CALLS[device]
            await measure_publish(report, Path(folder), device, min(rounds, 3), calls)


def main() -> None:
    line = parser("kv", "Sessions moved between two processes, beside raw copies and computing them again.")
    line.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    line.add_argument("--only", help="of shm, tcp, publish, rest; on GPUs of cuda_ipc, host, publish, rest")
    options = line.parse_args()
    usual = (
        ["shm", "tcp", "publish", "rest"]
        if options.device == "cpu"
        else ["cuda_ipc", "host", "publish", "rest"]
    )
    backends = chosen(line, options.only, usual, usual)
    quiet()
    torch.set_num_threads(1)
    report = Report("kv")
    run(measure_all(report, Console(stderr=True), backends, options.device, options.quick))
    tell(report, options.json)


if __name__ == "__main__":
    main()
