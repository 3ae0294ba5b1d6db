"""Scores and tokens of a run, from its export. For a notebook (the `# %%` are its cells) or the command line:

gyre inspect runs/quickstart --export executions.jsonl --by execution
gyre inspect runs/quickstart --export spans.jsonl --by span
python examples/notebook/plots.py executions.jsonl spans.jsonl plots.png     # needs matplotlib
"""

# %%
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows(path: str | Path) -> Iterator[Row]:
    """One after the other: an export may be larger than memory. A .parquet file needs pyarrow."""
    if Path(path).suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist(maps_as_pydicts="strict")
    else:
        with open(path, encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def mean_scores(executions: Iterable[Row], split: str) -> dict[int, float]:
    """By step. A dropped execution has no score."""
    scores = defaultdict(list)
    for row in executions:
        if row["split"] == split and row["score"] is not None:
            scores[row["step"]].append(row["score"])
    return {step: sum(of) / len(of) for step, of in sorted(scores.items())}


def sampled_tokens(spans: Iterable[Row]) -> tuple[Counter[str], list[float]]:
    """How many tokens were trained, or why they were not; and the log-probabilities of the trained."""
    went: Counter[str] = Counter()
    logprobs: list[float] = []
    for row in spans:
        if row["mask"] != "context":
            went[row["reason"] or row["mask"]] += row["tokens"]
        if row["mask"] == "trained":
            logprobs += row["logprobs"]
    return went, logprobs


# %%
def plot(executions_path: str, spans_path: str) -> Any:
    """A matplotlib figure."""
    from matplotlib import pyplot

    figure, (scores, tokens, logprobs) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for split in ("train", "eval"):
        of_step = mean_scores(rows(executions_path), split)
        scores.plot(list(of_step), list(of_step.values()), marker="o", label=split)
    scores.set(xlabel="step", ylabel="mean score")
    scores.legend()
    went, of_trained = sampled_tokens(rows(spans_path))
    tokens.barh(list(went), list(went.values()))
    tokens.set(xlabel="sampled tokens")
    logprobs.hist(of_trained, bins=60, log=True)
    logprobs.set(xlabel="log-probability at sampling", ylabel="trained tokens")
    return figure


# %%
if __name__ == "__main__":
    executions_file, spans_file, image = sys.argv[1:]
    plot(executions_file, spans_file).savefig(image, dpi=120)
