"""The `gyre` command."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from gyre.harness.host import HarnessActorError, load_harness
from gyre.harness.presets import PresetMissing, find_preset
from gyre.job import Fault, Job, JobError, Plan, load_job, plan, resolved_toml, warnings

if TYPE_CHECKING:
    from gyre.recorded.show import Shown

BAD_JOB, INTERRUPTED = 2, 130

app = typer.Typer(
    help="Elastic online RL for LLM agents.", no_args_is_help=True, pretty_exceptions_enable=False
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, for example train.lr=1e-5. Repeatable."),
]

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, be it over or not.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key that is other than in the job. Repeatable."),
]
Group = Annotated[str, typer.Option("--group", metavar="GROUP", help="Only this group, as g000012.")]


@app.callback()
def _commands() -> None:
    """Elastic online RL for LLM agents."""


@app.command()
def run(
    job: JobFile,
    resume: Annotated[bool, typer.Option("--resume", help="Go on at the last complete step.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run a job. The last line of its output is its summary (JSON)."""
    from gyre.run import main  # imports what `check` can do without

    arguments = [str(job), *(["--resume"] if resume else [])]
    for override in overrides or []:
        arguments += ["--set", override]
    raise typer.Exit(main(arguments))


@app.command()
def join(
    job: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the job listens.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="A copy of the job's token file.")],
    name: Annotated[str, typer.Option(help="What the job calls this machine.")] = "",
    listen: Annotated[str, typer.Option(help="The address of this machine that the others reach.")] = "",
    cells: Annotated[int, typer.Option(min=0, help="How many cells this machine takes.")] = 1,
    executions: Annotated[int, typer.Option(min=0, help="How many executions it plays at a time.")] = 0,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for the job to be there.")] = 60.0,
) -> None:
    """Make this machine a node of a job, which may run cells and executions here. Ctrl-C: it leaves, cells
    hand over, executions are played again elsewhere."""
    from gyre.join import JoinOptions, main  # imports what `check` can do without

    if not cells + executions:
        raise typer.BadParameter("neither --cells nor --executions: this machine would do nothing")
    options = JoinOptions(
        job=job,
        token_file=token_file,
        name=name or socket.gethostname(),
        listen=listen,
        cells=cells,
        executions=executions,
        wait_s=wait_s,
    )
    raise typer.Exit(main(options))


@app.command()
def check(job: JobFile, overrides: Overrides = None) -> None:
    """Print the resolved job and what it takes: cells, ranks, memory, executions. Needs no GPU."""
    try:
        loaded = load_job(job, overrides or [])
    except JobError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_JOB) from None
    if loaded.harness.actor is not None:
        try:
            load_harness(loaded.harness.actor, loaded.harness.options)
        except HarnessActorError as error:
            typer.echo(f"{job}: 1 fault\n  {error}", err=True)
            raise typer.Exit(BAD_JOB) from None
    _show(loaded, plan(loaded), (*warnings(loaded), *_not_installed(loaded)))


def _not_installed(job: Job) -> Iterator[Fault]:
    """The harness may well be on the machine that runs the job only."""
    try:
        find_preset(job.harness)
    except PresetMissing as error:
        yield Fault(key="harness.preset", found=error.problem, allowed=error.fix)


@app.command()
def inspect(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[RUN|ACTOR]",
            help="A run's folder: its executions. Or an actor of a running job, as satellites/cell-1.",
        ),
    ] = "",
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FOLDER", help="The job's folder. [default: newest in runs]"),
    ] = None,
    trace: Annotated[
        float, typer.Option("--trace", metavar="SECONDS", min=0, help="Print messages as they are handled.")
    ] = 0.0,
    over: Annotated[
        float, typer.Option("--over", metavar="SECONDS", min=0, help="The time that rates are of.")
    ] = 1.0,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long the job may take to answer."),
    ] = 5.0,
    tree: Annotated[
        str, typer.Option("--tree", metavar="EXECUTION", help="Of a run: an execution's calls.")
    ] = "",
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="EXECUTION/CALL", help="Of a run: the tokens of a call.")
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Of a run: write rows, .jsonl or .parquet."),
    ] = None,
    by: Annotated[
        Literal["execution", "trajectory", "span"], typer.Option("--by", help="With --export: what a row is.")
    ] = "trajectory",
    group: Group = "",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Look into a running job, its actors and what they are at; or at what a run has recorded."""
    from gyre.recorded import show  # imports what `check` can do without

    is_folder = bool(what) and show.is_run_folder(Path(what))
    if not (is_folder or tree or tokens or export or group):
        return _inspect_living(what, run, trace, over, timeout, as_json)
    if what and not is_folder:
        _end(f"{what}: there is no run in this folder", BAD_JOB)
    with _recorded(Path(what) if what else run, as_json) as shown:
        if tree:
            shown.tree(tree)
        elif tokens:
            shown.tokens(tokens)
        elif export:
            shown.export(export, by, group or None)
        else:
            shown.executions(group or None)


@app.command()
def resample(
    run: RunFolder,
    overrides: Changes = None,
    group: Group = "",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Say what of a run would have been trained, had its job sampled otherwise."""
    with _recorded(run, as_json) as shown:
        shown.resample(overrides or [], group or None)


@app.command()
def rescore(
    run: RunFolder,
    overrides: Changes = None,
    group: Group = "",
    concurrent: Annotated[int, typer.Option(min=1, help="How many evaluations run at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Score the workspaces that a run has kept again, by its evaluator or another."""
    with _recorded(run, as_json) as shown:
        shown.rescore(overrides or [], concurrent, group or None)


@app.command()
def doctor(
    where: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Of this machine, as the others reach it.")
    ] = "127.0.0.1",
) -> None:
    """Say which backends can move KV and weights here, and why not the others."""
    from gyre import rdma

    table = Table("backend", "", box=None, padding=(0, 2), show_header=False)
    for name, why, fix in asyncio.run(rdma.probe(where)):
        table.add_row(name, f"no: {why}; {fix}" if why else "yes")
    Console(highlight=False).print(table)


def _inspect_living(
    actor: str, run: Path | None, trace: float, over: float, timeout: float, as_json: bool
) -> None:
    from gyre import inspecting  # imports what `check` can do without

    if trace:
        shown = inspecting.show_trace(
            run, actor, seconds=trace, timeout_s=timeout, as_json=as_json, say=typer.echo
        )
    else:
        shown = inspecting.show_report(
            run, actor, over_s=over, timeout_s=timeout, as_json=as_json, say=typer.echo
        )
    try:
        asyncio.run(shown)
    except inspecting.CannotInspect as error:
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _recorded(run: Path | None, as_json: bool) -> Iterator[Shown]:
    """Its exit codes are those of the commands that look at a recorded run."""
    from gyre.recorded import show  # imports what `check` can do without

    try:
        with show.shown(run, typer.echo, lambda line: typer.echo(line, err=True), as_json=as_json) as shown:
            yield shown
    except show.CannotShow as error:
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _end(problem: str, exit_code: int) -> NoReturn:
    typer.echo(problem, err=True)
    raise typer.Exit(exit_code)


def _show(job: Job, planned: Plan, unlikely: tuple[Fault, ...]) -> None:
    console = Console(highlight=False)
    toml = resolved_toml(job)
    if console.is_terminal:
        console.print(Syntax(toml, "toml", background_color="default", word_wrap=True))
        table = Table("plan", "", box=None, padding=(0, 2), show_header=False)
        for name, value in plan_rows(planned):
            table.add_row(f"[bold]{name}[/bold]", value)
        console.print(table)
    else:
        typer.echo(toml)
        for name, value in plan_rows(planned):
            typer.echo(f"# {name}: {value}")
    for fault in unlikely:
        typer.echo(f"warning: {fault}", err=True)


def plan_rows(planned: Plan) -> list[tuple[str, str]]:
    """A plan in words, row by row."""
    rows = [
        (
            "cells",
            f"{planned.cells}: a core and {planned.cells - 1} satellites, {planned.ranks} ranks in all",
        ),
        ("steps", f"{planned.steps} in {planned.bursts} bursts"),
        ("executions", f"{planned.executions} to train, {planned.executions_per_step} a step"),
        ("evaluations", f"{planned.evaluations}, {planned.evaluation_executions} executions in all"),
        (
            "dispatch depth",
            f"Q_b = {planned.dispatched_groups} groups, {planned.dispatched_executions} executions",
        ),
        (
            "waterlevel",
            f"all cells carry {planned.capacity_executions} executions; "
            f"the core may leave rollout at {planned.leave_at} unfinished",
        ),
    ]
    if planned.parameters is None:
        return [*rows, ("memory", "unknown until the model is built")]
    rows.append(("parameters", f"{planned.parameters:,}"))
    for role in planned.memory:
        parts = {
            "weights": role.weights_bytes,
            "KV": role.kv_bytes,
            "gradients": role.gradients_bytes,
            "master and optimizer": role.master_bytes,
        }
        detail = " + ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
        rows.append((f"memory, {role.role}", f"{_size(role.total_bytes)} and activations: {detail}"))
    return rows


def _size(count_bytes: int) -> str:
    size = float(count_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
