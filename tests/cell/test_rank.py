"""One rank by itself: what it loads, hands on, updates and saves. Two ranks: test_rank_workers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre.cell.checkpoints import CheckpointError, CheckpointFolder
from gyre.cell.config import WarmStartConfig
from gyre.cell.engine.memory import is_released
from gyre.cell.rank import Rank
from gyre.cell.weights import Layout, parameters, shapes
from gyre.cell.worker_messages import CellSetup, Loaded, WorkerConfig
from gyre.rdma import RegionError, RegionHandle, SharedMemory
from tests.cell.parts import cell_setup, micro_step, trajectory

CPU = torch.device("cpu")
MakeRank = Callable[..., tuple[Rank, Loaded]]
GROUP = micro_step(*(trajectory(seed, tokens=10 + seed) for seed in range(4)))


@pytest.fixture
def setup(policy_folder: Path, shm: Path, tmp_path: Path) -> CellSetup:
    return cell_setup(policy_folder, shm, tmp_path / "checkpoints")


@pytest.fixture
def make_rank(setup: CellSetup) -> Iterator[MakeRank]:
    with ThreadPoolExecutor(1) as thread:

        def make(
            *, core: bool = True, checkpoint: Path | None = None, setup: CellSetup = setup, rank: int = 0
        ) -> tuple[Rank, Loaded]:
            made = Rank(WorkerConfig(setup=setup, cell=0, rank=rank, core=core), CPU, thread)
            return made, made.load(checkpoint)

        yield make


def read(setup: CellSetup, rank: Rank, region: RegionHandle) -> list[Tensor]:
    """The weights of a snapshot, by the layout that every reader has."""
    assert rank._model is not None
    layout = Layout(shapes(rank._model), torch.float32, 0, 1)
    with SharedMemory(setup.shm_folder).open(region) as source:
        return [view.clone() for view in layout.views(source.buffer)]


def train(rank: Rank, region: RegionHandle, version: int) -> RegionHandle:
    """One step of the core on its own."""
    rank.begin_training(region)
    rank.micro_step(GROUP)
    rank.add_own()
    return rank.commit(version, scale=0.25).region


def test_what_it_loads_is_known(make_rank: MakeRank, policy_folder: Path) -> None:
    _, loaded = make_rank()
    saved = load_file(policy_folder / "model.safetensors")
    assert loaded.parameters == sum(tensor.numel() for tensor in saved.values())
    assert loaded.weights_bytes >= 4 * loaded.parameters
    assert (loaded.step, loaded.window_tokens) == (0, 128)


def test_the_first_snapshot_is_the_models_folder(
    make_rank: MakeRank, setup: CellSetup, policy_folder: Path
) -> None:
    rank, _ = make_rank()
    saved = AutoModelForCausalLM.from_pretrained(policy_folder)
    for found, expected in zip(read(setup, rank, rank.write_snapshot(0)), parameters(saved), strict=True):
        assert torch.equal(found, expected)


def test_an_engine_that_sleeps_holds_no_weights(make_rank: MakeRank) -> None:
    rank, _ = make_rank()
    assert rank._model is not None
    assert all(is_released(parameter) for parameter in parameters(rank._model))


def test_of_ranks_that_are_one_engine_the_first_has_it(
    make_rank: MakeRank, setup: CellSetup, even_policy_folder: Path
) -> None:
    tensor = msgspec.structs.replace(
        setup,
        model_folder=even_policy_folder,
        cells=msgspec.structs.replace(setup.cells, ranks=2),
        rollout=msgspec.structs.replace(setup.rollout, parallel="tensor"),
    )
    leader, _ = make_rank(core=False, setup=tensor, rank=0)
    led, loaded = make_rank(core=False, setup=tensor, rank=1)
    assert leader.engine is not None
    assert led.engine is None
    assert loaded.window_tokens == 128


def test_a_satellite_has_no_masters(make_rank: MakeRank) -> None:
    rank, _ = make_rank(core=False)
    with pytest.raises(AssertionError, match="not of the core"):
        rank.write_snapshot(0)


def test_after_a_commit_the_trainer_holds_what_the_snapshot_does(
    make_rank: MakeRank, setup: CellSetup
) -> None:
    rank, _ = make_rank()
    first = rank.write_snapshot(0)
    second = train(rank, first, 1)
    assert rank._trainer is not None
    before, after = read(setup, rank, first), read(setup, rank, second)
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for found, expected in zip(parameters(rank._trainer.model), after, strict=True):
        assert torch.equal(found, expected)
    assert not any(gradient.any() for gradient in rank._trainer.gradients)


def test_bfloat16_is_on_the_wire_what_the_engine_would_have_made_of_float32(
    make_rank: MakeRank, setup: CellSetup
) -> None:
    """To the bit, and so is what the core trains with: the masters are rounded once, at the core."""
    half = msgspec.structs.replace(setup, model=msgspec.structs.replace(setup.model, dtype="bfloat16"))
    rank, loaded = make_rank(setup=half)
    region = train(rank, rank.write_snapshot(0), 1)
    assert region.nbytes == loaded.weights_bytes < 2.1 * loaded.parameters
    assert rank._masters is not None and rank._trainer is not None and rank._model is not None
    taken = [torch.empty(p.shape, dtype=torch.bfloat16) for p in rank._masters.weights]
    for parameter, master in zip(taken, rank._masters.weights, strict=True):
        assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float())
        parameter.copy_(master.detach())
    with rank.weights(1, region).open() as served:
        for found, expected in zip(served.values(), taken, strict=True):
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    for trained, expected in zip(parameters(rank._trainer.model), taken, strict=True):
        assert torch.equal(trained.view(torch.int16), expected.view(torch.int16))


def test_a_snapshot_whose_memory_is_used_again_is_no_weights(make_rank: MakeRank, setup: CellSetup) -> None:
    """As for a reader that was too slow: an engine that took them raises, and sleeps on."""
    rank, _ = make_rank()
    region = rank.write_snapshot(0)
    with pytest.raises(RegionError, match="w0: was taken back"), rank.weights(0, region).open() as served:
        assert all(tensor.isfinite().all() for tensor in served.values())
        SharedMemory(setup.shm_folder).rename(region, "spare")


def test_a_snapshot_that_is_loaded_forgets_what_was_accumulated(make_rank: MakeRank) -> None:
    rank, _ = make_rank()
    region = rank.write_snapshot(0)
    rank.begin_training(region)
    rank.micro_step(GROUP)
    rank.begin_training(region)
    assert rank._trainer is not None
    assert not any(gradient.any() for gradient in rank._trainer.gradients)


def test_a_satellites_shard_is_added_as_the_cores_own_would_be(make_rank: MakeRank, setup: CellSetup) -> None:
    core, _ = make_rank()
    satellite, _ = make_rank(core=False)
    region = core.write_snapshot(0)
    expected = read(setup, core, train(core, region, 1))
    other, _ = make_rank()
    other.begin_training(region)
    satellite.begin_training(region)
    satellite.micro_step(GROUP)
    shard = satellite.stage("g0-c1")
    assert other.is_whole(shard.region, shard.checksum)
    other.add_shard(shard.region)
    found = read(setup, other, other.commit(1, scale=0.25).region)
    assert all(torch.equal(one, theirs) for one, theirs in zip(found, expected, strict=True))


def test_a_shard_that_was_staged_is_forgotten(make_rank: MakeRank) -> None:
    rank, _ = make_rank()
    rank.begin_training(rank.write_snapshot(0))
    rank.micro_step(GROUP)
    first, second = rank.stage("a"), rank.stage("b")
    assert first.checksum != second.checksum


def test_a_shard_is_whole_or_not(make_rank: MakeRank, setup: CellSetup) -> None:
    rank, _ = make_rank()
    rank.begin_training(rank.write_snapshot(0))
    rank.micro_step(GROUP)
    shard = rank.stage("g0")
    path = setup.shm_folder / "g0-r0"
    assert rank.is_whole(shard.region, shard.checksum)
    assert not rank.is_whole(shard.region, shard.checksum ^ 1)
    assert not rank.is_whole(msgspec.structs.replace(shard.region, nbytes=64), shard.checksum)
    assert not rank.is_whole(msgspec.structs.replace(shard.region, name="../g0"), shard.checksum)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not rank.is_whole(shard.region, shard.checksum)
    path.write_bytes(data[:-1])
    assert not rank.is_whole(shard.region, shard.checksum)
    path.unlink()
    assert not rank.is_whole(shard.region, shard.checksum)


def test_a_resumed_core_goes_on_as_if_never_stopped(make_rank: MakeRank, setup: CellSetup) -> None:
    rank, _ = make_rank()
    folder = CheckpointFolder(setup.checkpoint_folder, 2)
    first = train(rank, rank.write_snapshot(0), 1)
    partial = folder.begin(1)
    rank.write_checkpoint(partial, first)
    checkpoint = folder.finish(partial, 1)
    expected = read(setup, rank, train(rank, first, 2))

    resumed, loaded = make_rank(checkpoint=checkpoint)
    assert loaded.step == 1
    region = resumed.write_snapshot(1)
    found = read(setup, resumed, train(resumed, region, 2))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_checkpoint_is_a_folder_that_transformers_reads(
    make_rank: MakeRank, setup: CellSetup, tmp_path: Path
) -> None:
    rank, _ = make_rank()
    region = train(rank, rank.write_snapshot(0), 1)
    (folder := tmp_path / "step").mkdir()
    rank.write_checkpoint(folder, region)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for found, expected in zip(parameters(model), read(setup, rank, region), strict=True):
        assert torch.equal(found, expected)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


@pytest.mark.parametrize("name", ["optimizer-0.safetensors", "model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_not_loaded(make_rank: MakeRank, setup: CellSetup, name: str) -> None:
    rank, _ = make_rank()
    folder = CheckpointFolder(setup.checkpoint_folder, 2)
    partial = folder.begin(0)
    rank.write_checkpoint(partial, rank.write_snapshot(0))
    checkpoint = folder.finish(partial, 0)
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{name} is not as it was written"):
        make_rank(checkpoint=checkpoint)


def warm(setup: CellSetup, tmp_path: Path) -> CellSetup:
    demos = tmp_path / "demos.py"
    demos.write_text(
        "def demos():\n"
        "    asked = {'role': 'user', 'content': 'next: k7.csv'}\n"
        "    while True:\n"
        "        yield {'messages': [asked, {'role': 'assistant', 'content': 'data'}]}\n"
    )
    config = WarmStartConfig(demos=f"{demos}:demos", steps=8, batch=2, lr=1e-2)
    return msgspec.structs.replace(setup, model=msgspec.structs.replace(setup.model, warm_start=config))


def test_a_warm_start_is_what_the_core_publishes(
    make_rank: MakeRank, setup: CellSetup, tmp_path: Path
) -> None:
    """It needs the weights that were loaded, gives their memory back, and is the same on every rank."""
    snapshots = []
    for _ in range(2):
        rank, _ = make_rank(setup=warm(setup, tmp_path))
        before = [parameter.clone() for parameter in parameters(rank._model)]  # type: ignore[arg-type]
        assert rank.warm_start() < 3.0
        assert all(is_released(parameter) for parameter in parameters(rank._model))  # type: ignore[arg-type]
        snapshots.append(read(setup, rank, rank.write_snapshot(0)))
    assert all(torch.equal(one, other) for one, other in zip(*snapshots, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(before, snapshots[0], strict=True))


def test_a_core_that_resumes_before_its_first_step_keeps_no_weights_for_a_warm_start(
    make_rank: MakeRank, setup: CellSetup, tmp_path: Path
) -> None:
    warmed = warm(setup, tmp_path)
    rank, _ = make_rank(setup=warmed)
    rank.warm_start()
    folder = CheckpointFolder(setup.checkpoint_folder, 2)
    partial = folder.begin(0)
    region = rank.write_snapshot(0)
    rank.write_checkpoint(partial, region)
    resumed, loaded = make_rank(checkpoint=folder.finish(partial, 0), setup=warmed)
    assert loaded.step == 0
    assert all(is_released(parameter) for parameter in parameters(resumed._model))  # type: ignore[arg-type]
    found, expected = read(setup, resumed, resumed.write_snapshot(0)), read(setup, rank, region)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_status_counts(make_rank: MakeRank) -> None:
    rank, _ = make_rank()
    rank.begin_training(rank.write_snapshot(0))
    rank.micro_step(GROUP)
    status = rank.status()
    assert status.trained_tokens == GROUP.length_tokens
    assert status.train_busy_s > 0.0
    assert status.engine.generated_tokens == 0
