"""KV that goes to and fro between two small pools under load. The scripted engine looks at every block that
it reads, so that one that two sequences write, or that holds other tokens, fails a call."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import Chunk, KvUnavailable, OnPublish, SamplingParams, unpack_ids
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine
from gyre.rdma import SharedMemory
from gyre.rdma.shm_backend import ShmBackend
from tests.cell.engine import toy
from tests.cell.engine.calls import VOCAB, generate, prompt

PASS_S = 0.0005
SESSIONS = "ab"

_engines = st.integers(0, 1)
_sessions = st.sampled_from(SESSIONS)
_actions = st.one_of(
    # Two prompts that many calls share the start of.
    st.tuples(
        st.just("call"), _engines, _sessions, st.integers(0, 1), st.integers(1, 60), st.integers(1, 30)
    ),
    # With or without a call at the other engine that goes on from there.
    st.tuples(st.just("hand over"), _engines, _sessions, st.integers(0, 20)),
    st.tuples(st.just("abort"), _engines),
    st.tuples(st.just("publish"), _engines),
    st.tuples(st.just("wait"), st.integers(1, 15)),
)


class Traffic:
    """Calls at two engines, and what goes between them."""

    def __init__(self, regions: SharedMemory, on_publish: OnPublish) -> None:
        self.on_publish = on_publish
        self.backend = backend = ShmBackend(regions)
        self.engines = [
            ScriptedEngine(
                toy.sample,
                vocab=VOCAB,
                kv_tokens=96,
                block_tokens=8,
                max_batch=3,
                step_tokens=24,
                pass_s=lambda decoding, prompt_tokens: PASS_S,
                open_weights=False,
                kv_home=KvHome(backend, regions, f"kv-{number}"),
                on_publish=on_publish,
            )
            for number in range(2)
        ]
        self.calls: list[tuple[tuple[int, ...], int, asyncio.Task[Chunk]]] = []

    async def call(self, engine: int, session: str, kind: int, length: int, tokens: int) -> None:
        self.begin(engine, session, prompt(60, seed=kind)[:length], tokens)

    def begin(self, engine: int, session: str, ids: tuple[int, ...], tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens)
        number = len(self.calls)
        call = generate(self.engines[engine], ids, sampling, call=f"c{number}", session=session)
        self.calls.append((ids, tokens, asyncio.create_task(call)))

    async def hand_over(self, source: int, session: str, tokens: int) -> None:
        with contextlib.suppress(KvUnavailable):
            manifest = await self.engines[source].export_kv(session)
            try:
                assert await self.engines[1 - source].import_kv(manifest) <= manifest.length_tokens
            finally:
                assert await self.engines[source].release_kv(manifest.pin)
            if tokens and manifest.length_tokens < 95:
                self.begin(1 - source, session, (*unpack_ids(manifest.tokens), 0), tokens)

    def check(self, ids: tuple[int, ...], got: Chunk) -> None:
        """That the weights it says sampled each token; the engine has looked at the KV."""
        said = list(ids)
        for token, version, kv_version in zip(got.token_ids, got.versions, got.kv_versions, strict=True):
            assert toy.greedy(said, 1, version) == (token,)
            assert kv_version == version or (self.on_publish == "keep" and kv_version < version)
            said.append(token)

    async def run(self, actions: list[Any]) -> None:
        await self.backend.start()
        for engine in self.engines:
            await engine.wake(NoWeights(0))
        for name, *fields in actions:
            if name == "call":
                await self.call(*fields)
            elif name == "hand over":
                await self.hand_over(*fields)
            elif name == "abort":
                await self.engines[fields[0]].abort_all()
            elif name == "publish":
                engine = self.engines[fields[0]]
                await engine.update(NoWeights((engine.version or 0) + 1))
            else:
                await asyncio.sleep(PASS_S * fields[0])
        for ids, tokens, call in self.calls:
            got = await call
            self.check(ids, got)
            assert len(got.token_ids) == min(tokens, 96 - len(ids)) or got.finish_reason == "abort"
        for engine in self.engines:
            assert engine.metrics().kv_blocks_used == 0
            await engine.close()
        await self.backend.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(_actions, max_size=16), st.sampled_from(["recompute", "keep"]))
def test_kv_goes_to_and_fro_and_every_call_is_answered_as_if_alone(
    actions: list[Any], on_publish: OnPublish
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder,
        asyncio.Runner() as runner,
    ):
        regions = SharedMemory(Path(folder) / "regions")
        runner.run(Traffic(regions, on_publish).run(actions))
        assert not any((Path(folder) / "regions").iterdir())
