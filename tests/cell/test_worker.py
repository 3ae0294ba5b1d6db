"""A rank worker and its engine, whatever that is. Real ranks in processes: test_rank_workers.py."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gyre.actors import ActorDied, ChildSpec, ExitReason, Node, Ref, RemoteError
from gyre.cell import rank as rank_module
from gyre.cell.engine import GenerateRequest, SamplingParams
from gyre.cell.engine.scripted import ScriptedEngine, answers
from gyre.cell.messages import EndSession, ForgetSession, Generate
from gyre.cell.worker import RankWorker
from gyre.cell.worker_messages import LoadModel, SleepEngine, WakeEngine, WorkerConfig, WriteSnapshot
from gyre.rdma import RegionHandle, SharedMemory
from tests.cell.parts import VOCAB, cell_setup
from tests.cell.witness import Witness

CALL = Generate(
    request=GenerateRequest(
        call="c", session="s", prompt_ids=(1, 2), prompt_tokens=2, sampling=SamplingParams(max_new_tokens=5)
    )
)


class House:
    """A rank of the core in this process, whose engine is scripted."""

    def __init__(self, node: Node, policy_folder: Path, shm: Path, tmp_path: Path) -> None:
        self._node = node
        self._setup = cell_setup(policy_folder, shm, tmp_path / "checkpoints", ranks=2)
        self.engine = ScriptedEngine(answers(lambda _: (7, 8, 9), 0), vocab=VOCAB, eos_token_ids=(0,))

    async def worker(
        self, *, rank: int = 0, parallel: str = "data", model: Path | None = None
    ) -> tuple[Ref, RegionHandle]:
        rollout = msgspec.structs.replace(self._setup.rollout, parallel=parallel)
        folder = model or self._setup.model_folder
        setup = msgspec.structs.replace(self._setup, rollout=rollout, model_folder=folder)
        config = WorkerConfig(setup=setup, cell=0, rank=rank, core=True)
        ref = await self._node.spawn(
            ChildSpec(name=f"rank-{rank}", start=lambda: RankWorker(config), restart="temporary")
        )
        await ref.ask(LoadModel())
        return ref, await ref.ask(WriteSnapshot(version=3))

    async def witness(self, of: Ref) -> asyncio.Future[ExitReason]:
        witness = Witness(of)
        await self._node.spawn(ChildSpec(name="witness", start=lambda: witness))
        return witness.reason


@pytest.fixture
async def house(
    policy_folder: Path, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[House]:
    async with Node(name="test") as node:
        made = House(node, policy_folder, shm, tmp_path)
        monkeypatch.setattr(rank_module, "make_engine", lambda *_: made.engine)
        yield made
    # A worker freezes what is there when its model is.
    gc.unfreeze()


async def test_a_worker_passes_calls_on_to_whatever_engine_it_has(house: House) -> None:
    worker, region = await house.worker()
    await worker.ask(WakeEngine(version=3, region=region))
    chunks = [chunk async for chunk in worker.stream(CALL)]
    assert [token for chunk in chunks for token in chunk.token_ids] == [7, 8, 9, 0]
    assert chunks[-1].versions == (3,)
    await worker.ask(SleepEngine())
    assert house.engine.version is None
    ((call, tokens),) = [(leg.call, leg.tokens) for leg in await worker.ask(EndSession(session="s"))]
    assert (call, tokens) == ("c", 4)
    await worker.tell(ForgetSession(session="s"))
    assert await worker.ask(EndSession(session="s")) == ()


async def test_a_worker_frees_what_a_life_that_was_killed_has_left(house: House, shm: Path) -> None:
    SharedMemory(shm)
    for name in ("kv-0-0", "kv-0-0-pin", ".kv-0-0-socket", "kv-0-1"):
        (shm / name).touch()
    await house.worker()
    left = {*os.listdir(shm)} & {"kv-0-0", "kv-0-0-pin", ".kv-0-0-socket", "kv-0-1"}
    assert left == {"kv-0-1"}


async def test_a_worker_whose_engine_is_lost_ends_and_says_why(house: House) -> None:
    worker, region = await house.worker()
    reason = await house.witness(worker)
    await worker.ask(WakeEngine(version=3, region=region))
    await house.engine.lose("its server died of signal 9")
    assert "its server died of signal 9" in str(await reason)
    with pytest.raises(ActorDied):
        await worker.ask(SleepEngine())


async def test_a_rank_that_another_one_leads_has_no_engine(house: House, even_policy_folder: Path) -> None:
    worker, region = await house.worker(rank=1, parallel="tensor", model=even_policy_folder)
    await worker.ask(WakeEngine(version=3, region=region))
    assert house.engine.version is None
    with pytest.raises(RemoteError, match="rank 1 has no engine"):
        [chunk async for chunk in worker.stream(CALL)]
    await worker.ask(SleepEngine())
