"""Engines for the contract suite: each case makes engines, fills them with the weights of a seed, and knows
by other means what they must sample."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gyre.cell.engine import Engine, GenerateRequest, Weights
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.native import NativeEngine
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine
from gyre.cell.engine.team import Team
from gyre.cell.weights import Layout, RegionWeights, fill, shapes
from gyre.rdma import Backend, BackendName, SharedMemory, make_backend
from tests.cell.engine import toy
from tests.cell.engine.calls import VOCAB
from tests.cell.engine.followers import Followers

# Of the engines that have one; GYRE_TEST_DEVICE=cuda tests them on a GPU.
DEVICE = torch.device(os.environ.get("GYRE_TEST_DEVICE", "cpu"))


class Case(Protocol):
    """One kind of engine. `lacks` says of what it does not have why not: tests that need it (`needs` in
    their marks) are skipped with that reason. Log-probabilities agree within `tolerance`. Whole blocks of
    `block_tokens` are reused. What it makes, `close` ends."""

    lacks: Mapping[str, str]
    tolerance: float
    block_tokens: int
    regions: SharedMemory

    async def start(self) -> None:
        """Before the first engine."""

    def engine(self, **options: Any) -> Engine:
        """Asleep. Options as those of NativeEngine."""

    def weights(
        self, seed: int, *, version: int | None = None, before: Callable[[], object] = bool
    ) -> Weights:
        """That seed's, as version `seed` if not said otherwise; `before` is called when they are opened."""

    async def awake(self, seed: int = 0, **options: Any) -> Engine:
        """An engine under version `seed`, with that seed's weights."""

    def greedy(self, ids: Sequence[int], count: int, *, seed: int = 0) -> tuple[int, ...]:
        """The tokens that the weights of the seed find most likely after `ids`."""

    def logprobs(
        self, ids: Sequence[int], out: Sequence[int], temperature: float = 1.0, *, seed: int = 0
    ) -> list[float]:
        """Of each token of `out` after `ids`."""

    async def close(self) -> None: ...


@cache
def reference_model(kind: str, seed: int) -> PreTrainedModel:
    """One for all tests: nobody changes it."""
    return tiny_model(kind, seed)


def tiny_model(kind: str, seed: int) -> PreTrainedModel:
    """A random fp32 model whose distributions are peaked enough that wrong KV changes tokens."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()


class ModelWeights:
    """A model's parameters as weights of a version; `before` is called when they are opened."""

    def __init__(self, version: int, model: PreTrainedModel, before: Callable[[], object]) -> None:
        self.version = version
        self._model = model
        self._before = before

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self._before()
        yield {name: parameter.detach() for name, parameter in self._model.named_parameters()}


class Homes:
    """Where the KV of engines lies that hand it over to each other: their pools are read where they lie, by
    one backend, or with `slot_bytes` by way of host memory, each by a backend of its own."""

    def __init__(self, regions: SharedMemory, name: BackendName, slot_bytes: int = 0) -> None:
        self._regions = regions
        self._name: BackendName = name
        self._slot_bytes = slot_bytes
        self._backends = [] if slot_bytes else [self._backend()]
        self._started = 0
        self._count = 0

    def new(self) -> KvHome:
        self._count += 1
        if self._slot_bytes:
            self._backends.append(self._backend())
        name = f"kv-{id(self)}-{self._count}"
        return KvHome(self._backends[-1], self._regions, name, self._slot_bytes)

    async def start(self) -> None:
        """Those that are not started."""
        while self._started < len(self._backends):
            self._started += 1
            await self._backends[self._started - 1].start()

    async def close(self) -> None:
        for backend in self._backends[: self._started]:
            await backend.close()

    def _backend(self) -> Backend:
        return make_backend(self._name, where="127.0.0.1", token=b"secret", shared=self._regions)


# Of a stage: some blocks of the models here.
SLOT_BYTES = 2**16

NATIVE_OPTIONS: dict[str, Any] = {
    "window_tokens": 256,
    "kv_tokens": 4096,
    "block_tokens": 8,
    "max_batch": 16,
    "chunk_interval_s": 0.0,
    "eos_token_ids": (),
}


class NativeCase:
    """NativeEngine over a tiny model of one kind, compared with transformers."""

    makes: type[NativeEngine] = NativeEngine
    lacks: Mapping[str, str] = (
        {} if DEVICE.type == "cpu" else {"open kv": "on a GPU a test can neither read nor change it"}
    )
    tolerance = 1e-4
    block_tokens = 8

    def __init__(self, kind: str, shm: Path) -> None:
        self._kind = kind
        self.regions = SharedMemory(shm)
        self.homes = self.make_homes()
        self.engines: list[NativeEngine] = []
        self.models: list[PreTrainedModel] = []

    def make_homes(self) -> Homes:
        return Homes(self.regions, "shm" if DEVICE.type == "cpu" else "cuda_ipc")

    async def start(self) -> None:
        await self.homes.start()

    def reference(self, seed: int = 0) -> PreTrainedModel:
        return reference_model(self._kind, seed)

    def engine(self, **options: Any) -> NativeEngine:
        model = tiny_model(self._kind, 12345).to(DEVICE)
        engine = self.makes(model, **({**NATIVE_OPTIONS, "kv_home": self.homes.new()} | options))
        self.engines.append(engine)
        self.models.append(model)
        return engine

    def weights(
        self, seed: int, *, version: int | None = None, before: Callable[[], object] = bool
    ) -> ModelWeights:
        return ModelWeights(seed if version is None else version, self.reference(seed), before)

    async def awake(self, seed: int = 0, **options: Any) -> NativeEngine:
        engine = self.engine(**options)
        await engine.wake(self.weights(seed))
        return engine

    def greedy(self, ids: Sequence[int], count: int, *, seed: int = 0) -> tuple[int, ...]:
        inputs = torch.tensor([ids])
        whole = self.reference(seed).generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False
        )
        return tuple(whole[0, len(ids) :].tolist())

    def logprobs(
        self, ids: Sequence[int], out: Sequence[int], temperature: float = 1.0, *, seed: int = 0
    ) -> list[float]:
        whole = torch.tensor([[*ids, *out]])
        with torch.no_grad():
            logits = self.reference(seed)(input_ids=whole).logits[0, len(ids) - 1 : -1].float() / temperature
        found: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(out)[:, None])[:, 0].tolist()
        return found

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        await self.homes.close()


class WrittenWeights(RegionWeights):
    """A model's parameters in a region; `before` is called when they are opened here."""

    def __init__(
        self, version: int, model: PreTrainedModel, regions: SharedMemory, before: Callable[[], object]
    ) -> None:
        names = [name for name, _ in model.named_parameters()]
        layout = Layout(shapes(model), model.dtype, 0, 1)
        with regions.allocate(f"weights-{id(model)}", layout.nbytes) as region:
            views = layout.views(region.buffer)
            fill(views, [parameter.detach() for parameter in model.parameters()])
            del views
            super().__init__(version, names, layout, regions, region.handle)
        self._before = before

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        self._before()
        with super().open() as found:
            yield found


class LeadingEngine(NativeEngine):
    """Meets its followers before each wake, as a cell has its ranks do."""

    meet: Callable[[], Team]
    homes: Homes

    async def wake(self, weights: Weights) -> None:
        await self.homes.start()
        if self.version is None:
            team = await asyncio.to_thread(self.meet)
            await asyncio.wrap_future(self._thread_lane.run(partial(self.join, team)))
        await super().wake(weights)


class TensorCase(NativeCase):
    """A NativeEngine of several ranks, the others in another process."""

    makes = LeadingEngine

    def __init__(self, kind: str, shm: Path, followers: Followers, ranks: int = 2) -> None:
        if DEVICE.type == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"there are fewer GPUs than {ranks} ranks")
        super().__init__(kind, shm)
        self._shm = shm
        self._followers = followers
        self._ranks = ranks

    def make_homes(self) -> Homes:
        return Homes(self.regions, "shm", SLOT_BYTES if DEVICE.type == "cuda" else 0)

    def engine(self, *, by_group: str | None = None, **options: Any) -> LeadingEngine:
        engine = super().engine(ranks=self._ranks, **options)
        assert isinstance(engine, LeadingEngine)
        asked = {**NATIVE_OPTIONS, **options}
        setup = {name: asked[name] for name in ("window_tokens", "kv_tokens", "block_tokens")}
        setup |= {
            "kind": self._kind,
            "batch_invariant": options.get("batch_invariant", False),
            "by_group": by_group,
        }
        name = str(id(engine))
        engine.homes = self.homes
        engine.meet = partial(self._followers.meet, name, self._ranks, self._shm, setup)
        return engine

    def weights(
        self, seed: int, *, version: int | None = None, before: Callable[[], object] = bool
    ) -> WrittenWeights:
        version = seed if version is None else version
        return WrittenWeights(version, self.reference(seed), self.regions, before)

    async def close(self) -> None:
        await super().close()
        for engine in self.engines:
            await asyncio.to_thread(self._followers.forget, str(id(engine)))


class WatchedWeights(NoWeights):
    """`before` is called when they are opened."""

    def __init__(self, version: int, before: Callable[[], object]) -> None:
        super().__init__(version)
        self._before = before

    def open(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        self._before()
        return super().open()


class ScriptedCase:
    """ScriptedEngine over a toy model, whose numbers depend on the version in the place of weights."""

    lacks: Mapping[str, str] = {}
    tolerance = 1e-9
    block_tokens = 8

    def __init__(self, shm: Path) -> None:
        self.regions = SharedMemory(shm)
        self.homes = Homes(self.regions, "shm")
        self._engines: list[ScriptedEngine] = []
        self._seeds: dict[int, int] = {}

    async def start(self) -> None:
        await self.homes.start()

    def engine(self, **options: Any) -> ScriptedEngine:
        defaults: dict[str, Any] = {
            "window_tokens": 256,
            "kv_tokens": 4096,
            "block_tokens": 8,
            "kv_home": self.homes.new(),
        }
        engine = ScriptedEngine(self._sample, vocab=VOCAB, **(defaults | options))
        self._engines.append(engine)
        return engine

    def weights(
        self, seed: int, *, version: int | None = None, before: Callable[[], object] = bool
    ) -> WatchedWeights:
        named = WatchedWeights(seed if version is None else version, before)
        self._seeds[named.version] = seed
        return named

    async def awake(self, seed: int = 0, **options: Any) -> ScriptedEngine:
        engine = self.engine(**options)
        await engine.wake(self.weights(seed))
        return engine

    def greedy(self, ids: Sequence[int], count: int, *, seed: int = 0) -> tuple[int, ...]:
        return toy.greedy(ids, count, seed)

    def logprobs(
        self, ids: Sequence[int], out: Sequence[int], temperature: float = 1.0, *, seed: int = 0
    ) -> list[float]:
        return toy.logprobs_of(ids, out, seed, temperature)

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        await self.homes.close()

    def _sample(self, request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
        return toy.sample(request, tokens, self._seeds[version])


CASES: dict[str, Callable[[Path], Case]] = {
    "native-llama": lambda shm: NativeCase("llama", shm),
    "native-qwen3": lambda shm: NativeCase("qwen3", shm),
    "scripted": ScriptedCase,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A second shape of models matters to numbers alone; what was sampled is known to one rank alone."""
    module = metafunc.module.__name__.rpartition(".")[2]
    if module.startswith("test_contract"):
        left_out = {"test_contract_numbers": (), "test_contract_sampled": ("native-qwen3", "native-tensor")}
        cases = [
            name for name in (*CASES, "native-tensor") if name not in left_out.get(module, ("native-qwen3",))
        ]
        metafunc.parametrize("case", cases, indirect=True)


@pytest.fixture(scope="session")
def followers() -> Iterator[Followers]:
    made = Followers()
    yield made
    made.close()


@pytest.fixture
async def case(request: pytest.FixtureRequest, shm: Path) -> AsyncIterator[Case]:
    made: Case
    if request.param == "native-tensor":
        made = TensorCase("llama", shm, request.getfixturevalue("followers"))
    else:
        made = CASES[request.param](shm)
    skip_what_it_lacks(made, request)
    await made.start()
    yield made
    await made.close()


def skip_what_it_lacks(case: Case, request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("needs"):
        for feature in mark.args:
            if feature in case.lacks:
                pytest.skip(f"{feature}: {case.lacks[feature]}")


@pytest.fixture
async def native(shm: Path) -> AsyncIterator[NativeCase]:
    """For what only the native engine promises."""
    made = NativeCase("llama", shm)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def scripted(shm: Path) -> AsyncIterator[ScriptedCase]:
    """For what only the scripted engine promises."""
    made = ScriptedCase(shm)
    await made.start()
    yield made
    await made.close()
