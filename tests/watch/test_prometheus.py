from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gyre.cell.engine.base import EngineMetrics
from gyre.watch import MetricsServer, PortTaken

from .statuses import cell, event, schedule


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(0)
    yield server
    server.close()


def scraped(server: MetricsServer) -> dict[tuple[str, ...], float]:
    """Values by metric name and label values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_status_is_served(server: MetricsServer) -> None:
    engine = EngineMetrics(running=3, generated_tokens=1000)
    server.update(
        schedule(
            cell(0, role="train", micro_steps=5),
            cell(1, engine=engine, busy_fraction=0.5),
            dispatched=9,
            finished=4,
            step=2,
        )
    )
    found = scraped(server)
    assert found["gyre_step",] == 2
    assert found["gyre_executions_dispatched_total",] == 9
    assert found["gyre_unfinished_executions",] == 5
    assert (found["gyre_cell_training", "0"], found["gyre_cell_training", "1"]) == (1, 0)
    assert found["gyre_cell_micro_steps_total", "0"] == 5
    assert found["gyre_cell_busy_fraction", "1"] == 0.5
    assert found["gyre_cell_engine_running", "1"] == 3
    assert found["gyre_cell_engine_generated_tokens_total", "1"] == 1000


def test_all_that_an_engine_counts_is_served(server: MetricsServer) -> None:
    engine = EngineMetrics(preemptions=7)
    server.update(schedule(cell(0, engine=engine)))
    found = scraped(server)
    for name in EngineMetrics.__struct_fields__:
        assert ("gyre_cell_engine_" + name, "0") in found or (f"gyre_cell_engine_{name}_total", "0") in found
    assert found["gyre_cell_engine_preemptions_total", "0"] == 7


def test_events_are_counted_and_figures_kept(server: MetricsServer) -> None:
    for step, reward in ((1, 0.25), (2, 0.5)):
        server(event("step", step=step, reward=reward))
    server(event("cell_down", cell=1))
    found = scraped(server)
    assert found["gyre_events_total", "step"] == 2
    assert found["gyre_events_total", "cell_down"] == 1
    assert found["gyre_train_reward",] == 0.5


def test_a_port_in_use_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"watch\.prometheus_port = {port}: the port is in use"):
            MetricsServer(port)


def test_a_closed_server_leaves_its_port() -> None:
    server = MetricsServer(0)
    port = server.port
    server.close()
    again = MetricsServer(port)
    assert again.port == port
    again.close()
