"""The machines that play executions of a job beside its own."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec
import structlog

from gyre.actors import Down, Ref
from gyre.actors.actor import Context
from gyre.harness.far import FarConfig, JoinHarness, LeaveHarness, far_spec
from gyre.harness.places import Places
from gyre.proxy.messages import GetBaseUrl

log = structlog.get_logger()

START_TIMEOUT_S = 30.0


class CannotPlay(Exception):
    """A machine cannot play executions of this job: `reason` says why."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node} cannot play executions of this job: {reason}")
        self.node = node
        self.reason = reason


class Machines:
    """Part of the HarnessActor, whose children the processes on other machines are."""

    def __init__(self, context: Context, places: Places, proxy: Ref, base: FarConfig) -> None:
        self._context = context
        self._places = places
        self._proxy = proxy
        self._base = base
        self._by_node: dict[str, Ref] = {}

    async def join(self, message: JoinHarness) -> None:
        """Raises CannotPlay, SpawnFailed."""
        node = message.node
        if node.node_id in self._by_node:
            raise CannotPlay(node.name, "it does already")
        if self._base.harness.actor is not None:
            raise CannotPlay(node.name, "its harness is an actor, which lives on the job's machine")
        url = urlsplit(await self._proxy.ask(GetBaseUrl(), timeout_s=START_TIMEOUT_S))
        host, port = url.hostname or "", url.port or 0
        if _is_loopback(host) and not _is_loopback(urlsplit(f"//{node.endpoint.partition(':')[2]}").hostname):
            fix = "set harness.proxy.host to an address of its machine that the others reach"
            raise CannotPlay(node.name, f"the proxy listens at {host} only; {fix}")
        config = msgspec.structs.replace(self._base, host=host, port=port)
        log_path = config.folder.parent / "logs" / f"harness-{node.name}.log"
        machine = await self._context.spawn(far_spec(config, node, log_path))
        # Monitored, so that its loss is no crash of ours.
        self._context.monitor(machine)
        self._by_node[node.node_id] = machine
        self._places.add(machine, message.executions)
        log.info("harness_machine_joined", node=node.name, executions=message.executions)

    async def leave(self, message: LeaveHarness) -> None:
        machine = self._by_node.pop(message.node.node_id, None)
        if machine is None:
            return
        self._places.remove(machine)
        self._context.demonitor(machine)
        await self._context.stop_child(machine)
        log.info("harness_machine_left", node=message.node.name)

    def lost(self, message: Down) -> bool:
        """Whether it was one of these that is gone."""
        for node_id, machine in self._by_node.items():
            if machine == message.ref:
                del self._by_node[node_id]
                self._places.remove(machine)
                # At the end of a job it may be gone before us.
                say = log.warning if message.reason.first.abnormal else log.info
                say("harness_machine_lost", machine=machine.name, reason=message.reason.brief)
                return True
        return False


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
