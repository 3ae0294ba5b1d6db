"""Which variables of an environment matter to what is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Read where nobody sees it: by the loader, libc, the interpreter, and libraries that are not Python's when
# they are loaded. Measured with getenv replaced, on an import of torch, numpy, transformers and tokenizers;
# of a family that is read then, all.
READ_WHEN_LOADED = (
    "ACC_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "GCONV_PATH",
    "GFORTRAN_",
    "GLIBC_",
    "GOMP_",
    "GOTO_",
    "HOME",
    "I_MPI_",
    "INTEL_",
    "KINETO_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "LOCPATH",
    "MALLOC_",
    "MKL",
    "MPI_",
    "NPY_",
    "NUMPY_",
    "NVIDIA_",
    "OMP",
    "ONEDNN_",
    "OPENBLAS_",
    "OPENSSL_",
    "PATH",
    "PSUTIL_",
    "PYTHON",
    "PYTORCH_",
    "RUST_",
    "TMPDIR",
    "TOKENIZERS_",
    "TORCH",
    "TQDM_",
    "TZ",
    "_PYTHON",
    "__PYVENV",
)
# Of those, and of what imports ask for, what does not change what they come to: the modules are compared by
# themselves, GPUs are chosen and a group is joined after, and the width of a terminal is a matter of taste.
READ_AGAIN = frozenset(
    [
        "COLUMNS",
        "CUDA_VISIBLE_DEVICES",
        "LINES",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONPATH",
        "RANK",
        "WORLD_SIZE",
    ]
)
OURS = ("GYRE_", "PYTEST_")


class _Watched(os._Environ[str]):
    """An environment that keeps what it was asked for."""

    asked_for: set[str]

    def __getitem__(self, key: str) -> str:
        self.asked_for.add(key)
        return super().__getitem__(key)


@contextmanager
def watched(asked_for: set[str]) -> Iterator[None]:
    """Adds what Python code asks for meanwhile, there or not; of who copies it, all that is there."""
    environment = os.environ
    usual = environment.__class__
    environment.__class__ = _Watched
    environment.asked_for = asked_for  # type: ignore[attr-defined]
    try:
        yield
    finally:
        environment.__class__ = usual
        del environment.asked_for  # type: ignore[attr-defined]


def matters(name: str, asked_for: set[str]) -> bool:
    """Whether a process that imported the same with another value may have come to something else. Any other
    variable can be set after the imports as well as before."""
    if name in READ_AGAIN or name.startswith(OURS):
        return False
    return name in asked_for or name.startswith(READ_WHEN_LOADED)
