from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import text

from gyre.job import Job, JobError, load_job, warnings
from gyre.job.decode import key_paths
from gyre.job.named import named_faults
from gyre.job.rules import BOUNDS
from tests.harness.formats.folders import NL2REPOBENCH, OURS, TERMINAL_BENCH, write

from .conftest import Faults


def test_the_job_file_of_these_tests_has_no_fault(faults: Faults) -> None:
    assert faults() == {}


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("cells.cells=1", "cells.cells", "2 or more (the core and at least one satellite)"),
        ("train.group_size=1", "train.group_size", "relative to the other executions"),
        ("train.lr=nan", "train.lr", "0 or more"),
        ("train.steps=10000000000000000000", "train.steps", "at most"),
        ("schedule.lead_steps=-1", "schedule.lead_steps", "found -1 (an integer); allowed: 0 or more"),
        ("rollout.temperature=0", "rollout.temperature", "more than 0"),
        ("rollout.top_p=1.5", "rollout.top_p", "more than 0, at most 1"),
        ("train.betas=[0.9, 1.0]", "train.betas", "two numbers in [0, 1)"),
        ("train.betas=[0.9]", "train.betas", "an array of a number, a number"),
        ("watch.prometheus_port=70000", "watch.prometheus_port", "at most 65535"),
        ("train.micro_step_tokens=100", "train.micro_step_tokens", "at least model.context_tokens = 2048"),
        ("rollout.kv_tokens=100", "rollout.kv_tokens", "at least model.context_tokens = 2048"),
        ("rollout.kv_tokens=16385", "rollout.kv_tokens", "a multiple of rollout.block_tokens = 16"),
        ("rollout.sglang.mem_fraction_static=1.5", "rollout.sglang.mem_fraction_static", "at most 1"),
        ("rollout.sglang.weights_by=nccl", "rollout.sglang.weights_by", "'ipc', 'distributed', 'disk'"),
        ("rollout.max_new_tokens=2048", "rollout.max_new_tokens", "so that a prompt has room"),
        ("harness.overall_timeout_s=1", "harness.overall_timeout_s", "at least harness.timeout_s"),
        ("harness.command=[]", "harness.command", "a program and its arguments"),
        ("harness.command=[]", "harness.command", "or harness.actor"),
        ("harness.own_process=true", "harness.own_process", "only with harness.actor"),
        ("harness.options.a=1", "harness.options", "only with harness.actor"),
        ("harness.command=run", "harness.command", "an array, each entry a string"),
        ("harness.environment.A=1", "harness.environment", "each value a string"),
        ("evaluator.junit=true", "evaluator.command", "{report}"),
        ("name=a/b", "name", "it names a folder"),
        ("model.dtype=int8", "model.dtype", "one of 'float32', 'bfloat16'"),
        ("model.warm_start.steps=3", "model.warm_start.demos", "missing; allowed: a string"),
        ("sampling=3", "sampling", "a table"),
        ("modle.path=x", "modle", "did you mean model?"),
        ("train.learning_rate=1", "train.learning_rate", "unknown key"),
        ("model.micro_step_tokens=1", "model.micro_step_tokens", "did you mean train.micro_step_tokens?"),
    ],
)
def test_impossible_keys_are_named_with_the_fix(faults: Faults, override: str, key: str, says: str) -> None:
    found = faults(override)
    assert list(found) == [key]
    assert says in found[key]


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("harness.actor=own.py:Own", "harness.actor", ""),
        ("harness.actor=own.py:Other", "harness.actor", ""),
        ("harness.actor=own.py:Won", "harness.actor", "no class Won in"),
        ("harness.actor=own.py:Ownn", "harness.actor", "did you mean Own?"),
        ("harness.actor=own.py:function", "harness.actor", "no class function"),
        ("harness.actor=gone.py:Own", "harness.actor", "cannot read"),
        ("harness.actor=gyre.harness.custom:Harness", "harness.actor", ""),
        ("harness.actor=gyre.harness.custom:Harnes", "harness.actor", "did you mean Harness?"),
        ("harness.actor=gyre.harnes.custom:Harness", "harness.actor", "did you mean gyre.harness?"),
        ("harness.actor=gyree:Harness", "harness.actor", "there is no module gyree"),
        ("harness.actor=gyre.cli.custom:Harness", "harness.actor", "there is no module gyre.cli.custom"),
        ("harness.actor=gyre..custom:Harness", "harness.actor", "there is no module gyre."),
        ("harness.actor=Own", "harness.actor", "package.module:Class or file.py:Class"),
        ("harness.command=['run']", "harness.command", "nothing beside harness.actor"),
        ("harness.read_only=['/usr']", "harness.read_only", "nothing beside harness.actor"),
        ("harness.environment.A=b", "harness.environment", "only where harness.own_process = true"),
    ],
)
def test_an_actor_is_looked_for_without_an_import(
    faults: Faults, job_file: Path, override: str, key: str, says: str
) -> None:
    (job_file.parent / "own.py").write_text(
        "from there import Other\nclass Own: ...\ndef function(): ...\nraise SystemExit(1)\n"
    )
    found = faults("harness.command=", "harness.actor=own.py:Own", override)
    assert list(found) == ([key] if says else [])
    assert says in found.get(key, "")


@settings(max_examples=200, deadline=None)
@given(text())
def test_any_name_is_a_class_or_a_fault(name: str) -> None:
    for fault in named_faults("harness.actor", f"{name}:Own", "class"):
        assert fault.key == "harness.actor"


@pytest.mark.parametrize(
    ("config", "ranks", "says"),
    [
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            2,
            "over 2 ranks of a model of 9 heads and 3 KV",
        ),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "KV heads too or a divisor of them"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 3, ""),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 1, ""),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, ""),
        ({"num_attention_heads": 8}, 4, ""),
        ({"num_attention_heads": "8"}, 3, ""),
        ({}, 3, ""),
        ([], 3, ""),
    ],
)
def test_ranks_that_are_one_engine_divide_its_heads(
    faults: Faults, tmp_path: Path, config: object, ranks: int, says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = faults(
        f"model.path={tmp_path}", "model.recipe=", f"cells.ranks={ranks}", "rollout.parallel=tensor"
    )
    assert ("rollout.parallel" in found) == bool(says)
    assert says in found.get("rollout.parallel", "")


SGLANG = "rollout.engine=sglang"
URL = "rollout.sglang.server_url"
KV = "rollout.sglang.kv_storage_bytes"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ([], "rollout.sglang.python", "no SGLang in this environment"),
        (["rollout.sglang.python=gone/python"], "rollout.sglang.python", "no program"),
        (["rollout.sglang.python=/dev/null"], "rollout.sglang.python", "no program /dev/null"),
        (["rollout.sglang.python=/bin/sh"], "", ""),
        (["rollout.sglang.python=/bin/sh", "rollout.parallel=tensor"], "", ""),
        (
            ["rollout.sglang.python=/bin/sh", "rollout.batch_invariant=true"],
            "rollout.batch_invariant",
            "--enable-deterministic-inference",
        ),
        (
            ["rollout.sglang.python=/bin/sh", "rollout.on_publish=keep"],
            "rollout.on_publish",
            "'recompute': SGLang's prefix cache knows no sessions",
        ),
        (
            ["rollout.sglang.python=/bin/sh", "rollout.kv_rest_bytes=1000"],
            "rollout.kv_rest_bytes",
            "0: SGLang gives no KV away",
        ),
        (["rollout.sglang.python=/bin/sh", "rollout.sglang.environment.A=b"], "", ""),
        (
            ["rollout.sglang.python=/bin/sh", r'rollout.sglang.arguments=["\u0000"]'],
            "rollout.sglang.arguments",
            "NUL",
        ),
        (
            ["rollout.sglang.python=/bin/sh", r'rollout.sglang.environment.A="\u0000"'],
            "rollout.sglang.environment",
            "NUL",
        ),
        (["rollout.sglang.python=/bin/sh", f"{KV}=1000"], "", ""),
        (["rollout.sglang.python=/bin/sh", f"{KV}=-1"], KV, "0 or more"),
        ([f"{URL}=http://h:3{{cell}}", f"{KV}=1000"], KV, "0: a server is told when it starts"),
        (
            ["rollout.sglang.python=/bin/sh", f"{KV}=1000", "rollout.parallel=tensor", "cells.ranks=2"],
            KV,
            "0: only servers of one GPU",
        ),
        ([f"{URL}=http://10.0.0.1:3000{{cell}}"], "", ""),
        ([f"{URL}=http://:key@host-{{cell}}:30000"], "", ""),
        ([f"{URL}=http://10.0.0.1:30000"], URL, "each cell has a server of its own"),
        ([f"{URL}=http://h:3{{cell}}", "cells.ranks=2"], URL, "each rank has a server of its own"),
        ([f"{URL}=http://h:3{{cell}}", "cells.ranks=2", "rollout.parallel=tensor"], "", ""),
        ([f"{URL}=http://h:3{{cell}}{{rank}}", "cells.ranks=2"], "", ""),
        ([f"{URL}=10.0.0.1:3000{{cell}}"], URL, "http://HOST:PORT"),
        ([f"{URL}=http://{{cell}}:port"], URL, "http://HOST:PORT"),
        ([f"{URL}=http://h-{{node}}"], URL, "{cell} and {rank} are replaced"),
        ([f"{URL}=http://h-{{cell"], URL, "{cell} and {rank} are replaced"),
        ([f"{URL}=http://h-{{cell}}", "rollout.sglang.python=/bin/sh"], "rollout.sglang.python", "beside"),
        (
            [f"{URL}=http://h-{{cell}}", "rollout.sglang.weights_by=ipc", "cluster.device=cpu"],
            "rollout.sglang.weights_by",
            "only GPU memory is shared so",
        ),
    ],
)
def test_a_server_of_sglang_can_be_started_or_reached(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, overrides: list[str], key: str, says: str
) -> None:
    monkeypatch.setattr("gyre.job.engines.PathFinder.find_spec", lambda name: None)
    found = faults(SGLANG, *overrides)
    assert list(found) == ([key] if key else [])
    assert says in found.get(key, "")


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(text())
def test_any_server_url_is_one_or_a_fault(job_file: Path, url: str) -> None:
    with contextlib.suppress(JobError):
        job = load_job(job_file, [SGLANG, f"{URL}=http://{{cell}}{url}"])
        assert job.rollout.sglang.server_url is not None
        job.rollout.sglang.server_url.format(cell=1, rank=1)


def test_what_is_for_sglang_is_nobodys_fault_with_another_engine(faults: Faults) -> None:
    assert faults("rollout.sglang.python=gone", f"{URL}=anything") == {}


@pytest.mark.parametrize("table", ["model", "tasks", "eval"])
def test_a_source_is_a_path_or_a_recipe(faults: Faults, tmp_path: Path, table: str) -> None:
    for name in ("config.json", "a/prompt.md"):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text("do it")
    both = [f"{table}.path=source", f"{table}.recipe=recipes.py:build"]
    neither = [f"{table}.path=", f"{table}.recipe=", "eval.every_steps=2", "eval.path=source"]
    if table == "eval":
        neither = ["eval.every_steps=2"]
    assert "both" in faults(*both)[f"{table}.path"]
    assert "neither" in faults(*neither)[f"{table}.path"]
    assert faults(both[0], f"{table}.recipe=") == {}
    assert faults(both[1], f"{table}.path=") == {}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tasks.path=none", "no folder"),
        ("tasks.path=tasks/first", "no */prompt.md in"),
        ("tasks.path=small.toml", "no folder"),
        ("tasks.path=~nobody/tasks", "no folder"),
        (f"tasks.path={'x' * 300}", "no folder"),
    ],
)
def test_a_task_folder_must_hold_tasks(faults: Faults, override: str, says: str) -> None:
    assert says in faults(override)["tasks.path"]


def test_a_task_that_cannot_be_run_is_named(faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "tasks" / "second").mkdir()
    (tmp_path / "tasks" / "second" / "task.yaml").write_text("instruction: x\nparser_name: y")
    assert "second/task.yaml: parser_name = 'y'" in faults("tasks.path=tasks")["tasks.path"]


def test_bundled_tasks_are_a_source(faults: Faults) -> None:
    own = ["tasks.path=", "evaluator.command=[]", "evaluator.own=true"]
    assert faults('tasks.bundled=["double"]', *own) == {}
    assert "none named 'dubble'" in faults('tasks.bundled=["dubble"]', *own)["tasks.bundled"]
    assert "both" in faults('tasks.bundled=["all"]')["tasks.bundled"]


def test_own_evaluators_must_be_there(faults: Faults) -> None:
    found = faults("evaluator.command=[]", "evaluator.own=true")["evaluator.own"]
    assert "first has no evaluator of its own" in found


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("recipes.py:biuld", "did you mean build?"),
        ("none.py:build", "cannot read"),
        ("tasks.py", "file.py:function"),
        ("a.b:", "file.py:function"),
        ("small.toml.py:build", "cannot read"),
    ],
)
def test_a_recipe_must_be_there(faults: Faults, recipe: str, says: str) -> None:
    assert says in faults(f"model.recipe={recipe}")["model.recipe"]


def test_a_recipe_file_must_be_python(faults: Faults, tmp_path: Path) -> None:
    (tmp_path / "recipes.py").write_text("def build(:")
    assert "cannot read" in faults()["model.recipe"]


def test_a_run_folder_must_not_be_a_file(faults: Faults, job_file: Path) -> None:
    assert "is no folder" in faults(f"run_dir={job_file}")["run_dir"]


def test_rules_about_a_key_that_is_faulty_already_are_moot(faults: Faults) -> None:
    assert list(faults("model.context_tokens=many", "train.micro_step_tokens=1")) == ["model.context_tokens"]


@pytest.fixture(autouse=True)
def _bubblewrap_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_an_absent_sandbox_is_warned_of(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [w.key for w in warnings(load_job(job_file))] == ["harness.sandbox"]
    (job_file.parent / "rubric.md").write_text("It is good.")
    judge = "evaluator.judge={base_url='http://127.0.0.1:1/v1', model='judge', rubric='rubric.md'}"
    assert warnings(load_job(job_file, ["harness.sandbox=process", "evaluator.command=", judge])) == ()
    overrides = ["harness.sandbox=process", "evaluator.sandbox=process"]
    assert warnings(load_job(job_file, overrides)) == ()


def test_wide_clip_ranges_are_warned_of(job_file: Path) -> None:
    assert [w.key for w in warnings(load_job(job_file, ["loss.clip_high=0.2"]))] == ["loss.clip_high"]
    assert warnings(load_job(job_file)) == ()


def test_tasks_that_are_scored_by_a_script_are_warned_of(job_file: Path) -> None:
    """It runs beside what it judges. Hidden tests of another task's, or of ours, are not."""
    own = ["evaluator.command=[]", "evaluator.own=true", "harness.sandbox=process"]
    own.append("evaluator.sandbox=process")
    write(job_file.parent / "tasks" / "first", OURS)
    write(job_file.parent / "tasks" / "second", NL2REPOBENCH)
    assert warnings(load_job(job_file, own)) == ()
    write(job_file.parent / "tasks" / "third", TERMINAL_BENCH)
    (found,) = warnings(load_job(job_file, own))
    assert found.key == "evaluator.own"
    assert "tasks/third is scored by a script" in found.found
    command = ["harness.sandbox=process", "evaluator.sandbox=process"]
    assert warnings(load_job(job_file, command)) == ()


def test_a_place_for_each_dispatched_execution_is_advised(job_file: Path) -> None:
    assert [w.key for w in warnings(load_job(job_file, ["harness.concurrent=31"]))] == ["harness.concurrent"]


def test_every_number_has_bounds() -> None:
    def types(type_: Any, prefix: str = "") -> dict[str, Any]:
        found = {}
        for field in msgspec.structs.fields(type_):
            inner = [t for t in (field.type, *getattr(field.type, "__args__", ())) if isinstance(t, type)]
            structs = [t for t in inner if issubclass(t, msgspec.Struct)]
            found[prefix + field.name] = field.type
            below = f"{prefix}{field.name}." + ("*." if get_origin(field.type) is dict else "")
            found |= types(structs[0], below) if structs else {}
        return found

    numbers = {key for key, type_ in types(Job).items() if type_ in (int, float, int | None)}
    assert set(BOUNDS) == numbers
    assert set(types(Job)) == set(key_paths(Job))


@pytest.mark.parametrize(
    "listen", ["10.0.0.1", ":7000", "10.0.0.1:70000", "10.0.0.1:x", "0.0.0.0:7000", "[::]:1"]
)
def test_the_others_must_reach_where_a_job_listens(faults: Faults, listen: str) -> None:
    assert "cluster.listen" in faults(f"cluster.listen={listen}")


def test_nodes_join_only_a_job_that_listens(faults: Faults) -> None:
    assert "ADDRESS:PORT" in faults("cluster.nodes=1")["cluster.listen"]
    assert faults("cluster.nodes=1", "cluster.listen=10.0.0.1:7000") == {}


EVALUATORS = [
    ("evaluator.pytest.tests=hidden", "evaluator.command", "command and pytest"),
    ("evaluator.function=own.py:score", "evaluator.command", "command and function"),
    ("evaluator.mix.a.function=own.py:score", "evaluator.command", "command beside a mix"),
]


@pytest.mark.parametrize(("override", "key", "says"), EVALUATORS)
def test_an_evaluator_is_one_thing(
    faults: Faults, job_file: Path, override: str, key: str, says: str
) -> None:
    (job_file.parent / "own.py").write_text("def score(workspace, task): ...\n")
    (job_file.parent / "tasks" / "first" / "hidden").mkdir()
    (job_file.parent / "tasks" / "first" / "hidden" / "test_it.py").write_text("def test_it(): ...\n")
    assert says in faults(override)[key]
    assert faults("evaluator.command=", override) == {}


def test_without_an_evaluator_all_ways_are_named(faults: Faults) -> None:
    says = faults("evaluator.command=")["evaluator.command"]
    assert "evaluator.pytest, evaluator.judge, evaluator.function, evaluator.own or evaluator.mix" in says


JUDGE = [
    ("evaluator.judge.base_url=nowhere", "https://HOST/v1"),
    ("evaluator.judge.base_url=https://h:port/v1", "https://HOST/v1"),
    ("evaluator.judge.model=''", "the name by which the endpoint knows"),
    ("evaluator.judge.rubric=gone.md", "no text in"),
    ("evaluator.judge.api_key_env=GYRE_TEST_NO_KEY", "no variable GYRE_TEST_NO_KEY"),
    ("evaluator.judge.files=[]", "patterns of file names"),
    ("evaluator.judge.temperature=-1", "0 or more"),
    ("evaluator.judge.ruberic=a", "did you mean evaluator.judge.rubric?"),
    ("evaluator.judge.rubric=", "missing"),
]


@pytest.mark.parametrize(("override", "says"), JUDGE)
def test_a_judge_that_cannot_judge_is_told(faults: Faults, job_file: Path, override: str, says: str) -> None:
    (job_file.parent / "rubric.md").write_text("It is good.")
    judge = ["base_url='http://127.0.0.1:1/v1'", "model=judge", "rubric=rubric.md"]
    for table in ("evaluator", "evaluator.mix.style"):
        right = ["evaluator.command=", *(f"{table}.judge.{setting}" for setting in judge)]
        assert faults(*right) == {}
        wrong = override.replace("evaluator", table, 1)
        found = faults(*right, wrong)
        assert list(found) == [wrong.partition("=")[0]]
        assert says.replace("evaluator", table) in found[wrong.partition("=")[0]]


HIDDEN = [
    ("evaluator.pytest.tests=gone", "evaluator.pytest.tests", "tasks/first/gone there is no such folder"),
    ("evaluator.pytest.tests=empty", "evaluator.pytest.tests", "has no test in it"),
    ("evaluator.pytest.tests=broken", "evaluator.pytest.tests", "cannot be read"),
    ("evaluator.pytest.tests=workspace/tests", "evaluator.pytest.tests", "beside workspace"),
    ("evaluator.pytest.tests=../second", "evaluator.pytest.tests", "beside workspace"),
    ("evaluator.pytest.plugins=['a b']", "evaluator.pytest.plugins", "a module, such as"),
    (
        "evaluator.pytest.plugins=['gone.plugin']",
        "evaluator.pytest.plugins",
        "there is no module gone.plugin",
    ),
    ("evaluator.pytest.test_timeout_s=0", "evaluator.pytest.test_timeout_s", "more than 0"),
]


@pytest.mark.parametrize(("override", "key", "says"), HIDDEN)
def test_hidden_tests_that_cannot_run_are_told(
    faults: Faults, job_file: Path, override: str, key: str, says: str
) -> None:
    for name, source in [("tests", "def test_it(): ..."), ("empty", "x = 1"), ("broken", "def test_it(:")]:
        (job_file.parent / "tasks" / "first" / name).mkdir()
        (job_file.parent / "tasks" / "first" / name / "test_it.py").write_text(source)
    assert faults("evaluator.command=", "evaluator.pytest={}") == {}
    found = faults("evaluator.command=", "evaluator.pytest={}", override)
    assert list(found) == [key]
    assert says in found[key]


FUNCTIONS = [
    ("own.py:score", ""),
    ("own.py:scor", "did you mean score?"),
    ("gone.py:score", "cannot read"),
    ("gyre.harness.score:junit_score", ""),
    ("gyre.harness.score:junit_scor", "did you mean junit_score?"),
    ("score", "package.module:function or file.py:function"),
]


@pytest.mark.parametrize(("name", "says"), FUNCTIONS)
def test_a_function_that_scores_is_looked_for(faults: Faults, job_file: Path, name: str, says: str) -> None:
    (job_file.parent / "own.py").write_text("def score(workspace, task): ...\nraise SystemExit(1)\n")
    found = faults("evaluator.command=", f"evaluator.function={name}")
    assert list(found) == (["evaluator.function"] if says else [])
    assert says in found.get("evaluator.function", "")


def test_the_parts_of_a_mix_are_named(faults: Faults) -> None:
    part = "evaluator.mix.size.command=['du']"
    assert faults("evaluator.command=", part, "evaluator.mix.size.weight=2") == {}
    found = faults("evaluator.command=", part, "evaluator.mix.size.weight=0", "evaluator.mix.other.weight=1")
    assert found.keys() == {"evaluator.mix.size.weight", "evaluator.mix.other.command"}
    unknown = faults("evaluator.command=", part, "evaluator.mix.size.wieght=2")
    assert "did you mean evaluator.mix.size.weight?" in unknown["evaluator.mix.size.wieght"]
    assert "table of tables" in faults("evaluator.command=", "evaluator.mix=3")["evaluator.mix"]
