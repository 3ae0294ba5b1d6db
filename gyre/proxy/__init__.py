"""What a harness talks to: an HTTP server that speaks the APIs of model vendors, keeps token ids as they were
sampled, routes each call to a cell in rollout role, follows it when that cell leaves, and has it recorded
before the answer ends. A key opens one execution and nothing else."""

from gyre.proxy.config import ProxyConfig
from gyre.proxy.messages import (
    CloseExecution,
    ExecutionAccess,
    GetProxyTotals,
    OpenExecution,
    ProxyTotals,
)

__all__ = [
    "CloseExecution",
    "ExecutionAccess",
    "GetProxyTotals",
    "OpenExecution",
    "ProxyConfig",
    "ProxyTotals",
]
