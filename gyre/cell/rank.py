"""Rank: the models, gradients and weights of one rank. Blocking; all of it belongs to the device thread."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from gyre.cell.checkpoints import check
from gyre.cell.engine.base import Engine, EngineMetrics
from gyre.cell.engine.follower import Follower
from gyre.cell.engine.make import EngineSetup, make_engine, make_follower
from gyre.cell.engine.memory import release_parameters, return_memory
from gyre.cell.engine.native import NativeEngine
from gyre.cell.engine.team import meet
from gyre.cell.group import CellGroup
from gyre.cell.model import end_token_ids, gpus, load_model, training_model
from gyre.cell.page_lock import page_lock
from gyre.cell.train.optimizer import MasterWeights
from gyre.cell.train.saving import load_optimizer, save_optimizer, save_weights
from gyre.cell.train.trainer import Trainer
from gyre.cell.train.warm_start import warm_start
from gyre.cell.weights import Layout, RegionWeights, checksum, fill, local, parameters, shapes
from gyre.cell.worker_messages import BuildGroup, Loaded, RankStatus, StagedShard, Updated, WorkerConfig
from gyre.loss import MicroStep, MicroStepStats
from gyre.rdma import Backend, HeldRegions, RegionError, RegionHandle, SharedMemory


class Rank:
    """In rollout role its engine has weights, in train role its trainer has; the core's masters stay. Where
    the ranks of a cell are one engine, rank 0 has it."""

    def __init__(self, config: WorkerConfig, device: torch.device, thread: ThreadPoolExecutor) -> None:
        self._config = config
        self._setup = config.setup
        self._ranks = config.setup.cells.ranks
        self._thread = thread
        self._device = device
        self._shared = SharedMemory(config.setup.shm_folder)
        self._snapshots = HeldRegions(self._shared, page_lock(device))
        self._model: PreTrainedModel | None = None
        self._engine: Engine | None = None
        self._follower: Follower | None = None
        self._trainer: Trainer | None = None
        self._masters: MasterWeights | None = None
        self._layout: Layout | None = None
        self._train_busy_s = 0.0
        self._trained_tokens = 0
        self.group = CellGroup(config.rank, self._ranks, self._device, config.setup.cells.group_timeout_s)

    @property
    def engine(self) -> Engine | None:
        """None before it is loaded, and at a rank that another one leads."""
        return self._engine

    # --- loading ----------------------------------------------------------------------------------

    def load(self, checkpoint: Path | None, backend: Backend | None = None) -> Loaded:
        """Builds model and engine, which sleeps and hands KV over by `backend`; on the core the masters."""
        setup = self._setup
        step = check(checkpoint) if checkpoint is not None else 0
        folder = checkpoint or setup.model_folder
        model = self._model = load_model(folder, setup.model.dtype, self._device)
        self._layout = Layout(shapes(model), model.dtype, self._config.rank, self._ranks)
        if self._config.core:
            self._take_masters()
            if checkpoint is not None:
                load_optimizer(checkpoint, self._masters_, self._config.rank)
        window = min(setup.model.context_tokens, model.config.max_position_embeddings)
        if setup.rollout.parallel == "data" or self._config.rank == 0:
            self._engine = make_engine(self._engine_setup(window), model, self._thread, backend)
            window = self._engine.window_tokens
        elif setup.engine_over_ranks:
            self._follower = make_follower(self._engine_setup(window), model, self._thread, self.weights)
        if not (self._config.core and checkpoint is None and setup.model.warm_start is not None):
            release_parameters(model)
        return Loaded(
            weights_bytes=self._layout.nbytes,
            parameters=model.num_parameters(),
            step=step,
            window_tokens=window,
        )

    def _engine_setup(self, window_tokens: int) -> EngineSetup:
        setup, config = self._setup, self._config
        ranks = range(self._ranks) if setup.rollout.parallel == "tensor" else (config.rank,)
        return EngineSetup(
            cell=config.cell,
            rank=config.rank,
            rollout=setup.rollout,
            model_folder=setup.model_folder,
            log_folder=setup.log_folder,
            scratch=setup.shm_folder,
            dtype=setup.model.dtype,
            window_tokens=window_tokens,
            eos_token_ids=end_token_ids(setup.model_folder),
            gpus=tuple(gpus(self._device.type, config.slot, ranks, self._ranks)),
            ranks=len(ranks),
        )

    def warm_start(self) -> float:
        """Trains the model as it was loaded, then takes the masters from it. With more ranks than one each
        does the same: the demonstrations come in one order."""
        config = self._setup.model.warm_start
        assert config is not None and self._model is not None
        loss = warm_start(self._model, self._setup.model_folder, config)
        self._take_masters()
        release_parameters(self._model)
        return loss

    def _take_masters(self) -> None:
        assert self._model is not None and self._layout is not None
        slots = zip(parameters(self._model), self._layout.slots, strict=True)
        rows = [parameter[slot.rows[0] : slot.rows[1]] for parameter, slot in slots]
        self._masters = MasterWeights(rows, self._setup.train)

    # --- meeting the other ranks --------------------------------------------------------------------

    def meet(self, message: BuildGroup) -> None:
        """Drops what stands. Blocks until all ranks came; one alone needs no group, and NCCL takes 0.4 s to
        end one."""
        self.part()
        if not message.engine:
            if self._ranks > 1:
                self.group.rebuild(message.host, message.port, message.prefix)
            return
        cells = self._setup.cells
        team = meet(
            self.group.store(message.host, message.port, message.prefix),
            self._config.rank,
            self._ranks,
            self._setup.shm_folder / f"{message.prefix.replace('/', '-')}.sock",
            device=self._device,
            timeout_s=cells.group_timeout_s,
            in_order=self._setup.rollout.batch_invariant,
        )
        if self._follower is not None:
            self._follower.join(team)
        else:
            assert isinstance(self._engine, NativeEngine)
            self._engine.join(team)

    def part(self) -> None:
        """From the group; an engine's ranks part when it falls asleep."""
        self.group.drop()
        if self._follower is not None:
            self._follower.leave()

    def close(self) -> None:
        """It is not used any more."""
        self.part()
        if self._follower is not None:
            self._follower.close()
        self._snapshots.close()

    # --- weights ------------------------------------------------------------------------------------

    def weights(self, version: int, region: RegionHandle) -> RegionWeights:
        """A snapshot, for the engine to read."""
        assert self._model is not None and self._layout is not None
        names = [name for name, _ in self._model.named_parameters()]
        return RegionWeights(version, names, self._layout, self._snapshots, region)

    def hold(self, regions: tuple[RegionHandle, ...]) -> None:
        """Maps them, and pins them for the GPU: now, because it takes a second for some GB."""
        for region in regions:
            # It may have another name by now; then it is mapped when it is first used.
            with suppress(RegionError):
                self._snapshots.open(region).close()

    def write_snapshot(self, version: int) -> RegionHandle:
        """Writes this rank's rows of the masters, in compute dtype, into the region all ranks share."""
        assert self._layout is not None
        with self._snapshots.allocate(f"w{version}", self._layout.nbytes) as region:
            shards = self._layout.shards(region.buffer)
            fill(shards, [weight.detach() for weight in self._masters_.weights])
            del shards
            return region.handle

    # --- training -----------------------------------------------------------------------------------

    def begin_training(self, region: RegionHandle) -> None:
        """Loads a snapshot into the training module, which is built where there is none."""
        assert self._model is not None and self._layout is not None
        if self._trainer is None:
            model = training_model(self._model, self.group.mesh())
            self._trainer = Trainer(
                model, self._setup.loss, self._setup.rollout.temperature, self._config.rank, self._ranks
            )
        self._trainer.drop_gradients()
        with self._snapshots.open(region) as source:
            shards = self._layout.shards(source.buffer)
            fill([local(p.data) for p in parameters(self._trainer.model)], shards)
            del shards

    def end_training(self) -> None:
        """Frees the training module. A sharded one is full of cycles: until they are collected it keeps its
        memory, and sockets and threads of its group."""
        self._trainer = None
        gc.collect()
        return_memory(self._device)

    def micro_step(self, micro_step: MicroStep) -> MicroStepStats:
        stats = self._trainer_.micro_step(micro_step)
        self._train_busy_s += stats.seconds
        self._trained_tokens += stats.tokens
        return stats

    def drop_gradients(self) -> None:
        self._trainer_.drop_gradients()

    def stage(self, name: str) -> StagedShard:
        """A satellite's gradients as a region."""
        gradients = self._trainer_.gradients
        layout = self._gradient_layout()
        with self._shared.allocate(f"{name}-r{self._config.rank}", layout.nbytes) as region:
            views = layout.views(region.buffer)
            fill(views, gradients)
            del views
            staged = StagedShard(region=region.handle, checksum=checksum(region.buffer))
        self._trainer_.drop_gradients()
        return staged

    # --- the core -------------------------------------------------------------------------------------

    def is_whole(self, region: RegionHandle, expected: int) -> bool:
        if region.nbytes != self._gradient_layout().nbytes:
            return False
        try:
            with self._shared.open(region) as source:
                return checksum(source.buffer) == expected
        except RegionError:
            return False

    def add_shard(self, region: RegionHandle) -> None:
        with self._shared.open(region) as source:
            views = self._gradient_layout().views(source.buffer)
            self._masters_.add([view.to(self._device) for view in views])
            del views

    def add_own(self) -> None:
        self._masters_.add(self._trainer_.gradients)
        self._trainer_.drop_gradients()

    def commit(self, version: int, scale: float) -> Updated:
        """Updates the masters, writes the snapshot, loads it into the training module."""
        norm, lr = self._masters_.update(version - 1, scale, self.group)
        region = self.write_snapshot(version)
        masters = [weight.detach() for weight in self._masters_.weights]
        fill([local(p.data) for p in parameters(self._trainer_.model)], masters)
        return Updated(grad_norm=norm, lr=lr, region=region)

    def write_checkpoint(self, folder: Path, region: RegionHandle) -> None:
        """The optimizer's shard; rank 0 also writes the snapshot as a Hugging Face folder."""
        save_optimizer(folder, self._masters_, self._config.rank)
        if self._config.rank != 0:
            return
        assert self._model is not None and self._layout is not None
        names = [name for name, _ in self._model.named_parameters()]
        with self._snapshots.open(region) as source:
            views = dict(zip(names, self._layout.views(source.buffer), strict=True))
            save_weights(folder, self._model, views, self._setup.model_folder)
            del views

    def status(self) -> RankStatus:
        if self._engine is not None:
            metrics = self._engine.metrics()
        else:
            metrics = EngineMetrics(busy_s=self._follower.busy_s if self._follower is not None else 0.0)
        return RankStatus(
            engine=metrics, train_busy_s=self._train_busy_s, trained_tokens=self._trained_tokens
        )

    def _gradient_layout(self) -> Layout:
        """This rank's rows of every parameter in fp32, as a layout of their own."""
        assert self._layout is not None
        rows = [(slot.rows[1] - slot.rows[0], *slot.shape[1:]) for slot in self._layout.slots]
        return Layout(rows, torch.float32, 0, 1)

    @property
    def _trainer_(self) -> Trainer:
        assert self._trainer is not None, "the cell is not in train role"
        return self._trainer

    @property
    def _masters_(self) -> MasterWeights:
        assert self._masters is not None, "this rank is not of the core"
        return self._masters
