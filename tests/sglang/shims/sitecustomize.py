"""Lets SGLang 0.5.23 serve dense models on a CPU. On the PYTHONPATH of the server alone, never of Gyre.

It stands in for what has no wheel for such a machine, in every process of the server:
- torchvision, whose wheels do not fit a CPU build of torch: SGLang imports it for image models, which nobody
  asks for here. Any name in it is a class that does nothing.
- sgl_kernel, of which only CUDA wheels are published: see sgl_kernel/__init__.py beside this file.
- deterministic inference, which SGLang refuses for attention by torch and whose matrix products it writes in
  triton: here it is only that each draw has its own seed.
- pinned memory, which CUDA alone has, for recorded experts and the host's part of the hierarchical cache.
- the copies between that part and the device's, which are CUDA kernels: see sgl_kernel/__init__.py.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return thing(name)

    def __call__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__()


def thing(name):
    return Anything(name, (), {})


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return thing(name)


class Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Module(spec.name)
        module.__version__ = "0.0"
        return module

    def exec_module(self, module):
        pass


def torch_native_draws_by_seed(choices):
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def products_stay_torchs_own(ops):
    ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


def nothing_is_pinned(common):
    common._cuda_host_register = lambda *args, **kwargs: None


def copies_are_torchs(mha):
    import sgl_kernel

    mha.transfer_kv_all_layer_direct_lf_pf = sgl_kernel.pages_to_host
    mha.transfer_kv_per_layer_direct_pf_lf = sgl_kernel.pages_to_device


AFTER = {
    "sglang.srt.arg_groups.choices": torch_native_draws_by_seed,
    "sglang.srt.batch_invariant_ops": products_stay_torchs_own,
    "sglang.srt.mem_cache.pool_host.common": nothing_is_pinned,
    "sglang.srt.mem_cache.pool_host.mha": copies_are_torchs,
}


class Changed(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported."""

    def find_spec(self, fullname, path=None, target=None):
        change = AFTER.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            change(module)

        loader.exec_module = execute_and_change
        return spec


sys.meta_path[:0] = [Torchvision(), Changed()]
