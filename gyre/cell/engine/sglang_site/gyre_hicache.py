"""The storage of SGLang's hierarchical cache in a folder that the servers of one host share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang
import torch
from gyre_pages import Fence, PageFolder
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

PAGES_AT_ONCE = 16


class GyrePages(HiCacheStorage):  # type: ignore[misc]
    """SGLang loads it as its `dynamic` backend, and tells in `extra_config`: the `folder` of the pages, the
    `fence` that says of which weights the server's KV is, the `model`, and `limit_bytes`.

    SGLang hands over pages by their place in its host pool: each is copied while the fence is held, so that
    none is on its way when the weights change.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        self._config = storage_config
        self._fence = Fence(Path(storage_config.extra_config["fence"]))
        self._pages: PageFolder

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        extra, page = self._config.extra_config, mem_pool_host.get_data_page(0)
        self._shape, self._dtype = page.shape, page.dtype
        self._pages = PageFolder(
            Path(extra["folder"]),
            kind=self._kind(extra["model"]),
            page_bytes=page.nbytes,
            limit_bytes=extra["limit_bytes"],
        )

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many from the first on."""
        with self._fence.held() as version:
            for count, key in enumerate(keys):
                if version is None or not self._pages.has(version, key):
                    return count
        return len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._each(self._get, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._each(self._set, keys, host_indices)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The page, flat."""
        with self._fence.held() as version:
            return None if version is None else self._read(version, key)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Never: a page that was copied before the fence is held may be of other weights than it says."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def _each(
        self, move: Callable[[int, str, int], bool], keys: list[str], host_indices: torch.Tensor
    ) -> list[bool]:
        """A few at a time: new weights wait until the fence is let go."""
        step = self.mem_pool_host.page_size
        places = [int(host_indices[at * step]) for at in range(len(keys))]
        moved: list[bool] = []
        while len(moved) < len(keys):
            some = slice(len(moved), len(moved) + PAGES_AT_ONCE)
            with self._fence.held() as version:
                moved += [
                    version is not None and move(version, key, place)
                    for key, place in zip(keys[some], places[some], strict=True)
                ]
        return moved

    def _get(self, version: int, key: str, place: int) -> bool:
        page = self._read(version, key)
        if page is None:
            return False
        self.mem_pool_host.set_from_flat_data_page(place, page)
        return True

    def _set(self, version: int, key: str, place: int) -> bool:
        page: torch.Tensor = self.mem_pool_host.get_data_page(place).contiguous()
        kept: bool = self._pages.put(version, key, page.view(torch.uint8).numpy())
        return kept

    def _read(self, version: int, key: str) -> torch.Tensor | None:
        page = torch.empty(self._shape, dtype=self._dtype)
        return page if self._pages.get(version, key, page.view(torch.uint8).numpy()) else None

    def _kind(self, model: str) -> str:
        """All that says what a page's bytes mean, but for the weights and the tokens."""
        config, pool = self._config, self.mem_pool_host
        said = (
            model,
            sglang.__version__,
            str(pool.dtype),
            pool.layout,
            pool.page_size,
            tuple(pool.get_data_page(0, flat=False).shape),
            (config.tp_rank, config.tp_size, config.pp_rank, config.pp_size),
        )
        return hashlib.sha256(repr(said).encode()).hexdigest()[:32]
