import random
import threading

import pytest
from tasks import CycleError, Graph, parse, run

BUILD = """
# what to do
app: lib ui
ui: lib theme
lib: compiler   # with its own
docs:
"""


def is_ordered(graph, order):
    at = {task: place for place, task in enumerate(order)}
    return all(at[need] < at[task] for task in order for need in graph.needs(task))


def test_add():
    graph = Graph()
    graph.add("a", "b", "c")
    graph.add("c", "b")
    assert graph.tasks() == ["a", "b", "c"]
    assert (graph.needs("a"), graph.needs("b"), graph.needs("c")) == (["b", "c"], [], ["b"])


def test_add_again():
    graph = Graph()
    graph.add("a", "b")
    graph.add("a", "c", "b")
    assert graph.needs("a") == ["b", "c"]


def test_unknown_tasks():
    with pytest.raises(KeyError):
        Graph().needs("a")
    with pytest.raises(KeyError):
        Graph().order("a")


def test_what_is_returned_is_not_the_graph():
    graph = Graph()
    graph.add("a", "b")
    graph.needs("a").append("x")
    graph.tasks().append("x")
    assert graph.tasks() == ["a", "b"]
    assert graph.needs("a") == ["b"]


def test_parse():
    graph = parse(BUILD)
    assert graph.tasks() == ["app", "lib", "ui", "theme", "compiler", "docs"]
    assert graph.needs("ui") == ["lib", "theme"]


@pytest.mark.parametrize(("text", "line"), [("a: b\nword", 2), ("\n: b", 2), ("a b: c", 1)])
def test_what_cannot_be_parsed(text, line):
    with pytest.raises(ValueError, match=f"line {line}"):
        parse(text)


def test_order():
    assert parse(BUILD).order() == ["theme", "compiler", "lib", "ui", "app", "docs"]


def test_order_of_some():
    assert parse(BUILD).order("lib", "docs") == ["compiler", "lib", "docs"]
    assert parse(BUILD).order("ui") == ["theme", "compiler", "lib", "ui"]


def test_the_one_that_was_met_first_comes_first():
    graph = Graph()
    for task in "dbca":
        graph.add(task)
    assert graph.order() == list("dbca")


def test_order_of_nothing():
    assert Graph().order() == Graph().levels() == []


def test_levels():
    assert parse(BUILD).levels() == [["theme", "compiler", "docs"], ["lib"], ["ui"], ["app"]]
    assert parse(BUILD).levels("lib") == [["compiler"], ["lib"]]


def test_random_graphs():
    for seed in range(50):
        rng = random.Random(seed)
        graph = Graph()
        for n in range(1, 30):
            graph.add(str(n), *(str(need) for need in rng.sample(range(n), min(n, rng.randrange(4)))))
        order = graph.order()
        assert sorted(order) == sorted(graph.tasks())
        assert is_ordered(graph, order)
        assert is_ordered(graph, [task for level in graph.levels() for task in level])


def test_cycles():
    graph = parse("x: c\nb: c\nc: d\nd: b\n")
    for work in (graph.order, graph.levels):
        with pytest.raises(CycleError) as error:
            work()
        assert error.value.cycle == ["c", "d", "b"]


def test_a_task_that_needs_itself():
    with pytest.raises(CycleError) as error:
        parse("a: a").order()
    assert error.value.cycle == ["a"]


def test_cycles_elsewhere_do_not_matter():
    assert parse("a: b\nx: y\ny: x").order("a") == ["b", "a"]


def test_a_cycle_is_a_value_error():
    assert issubclass(CycleError, ValueError)


def chain(length):
    graph = Graph()
    for n in range(length):
        graph.add(str(n), str(n + 1))
    return graph


@pytest.mark.timeout(20)
def test_long_chains():
    graph = chain(100_000)
    assert graph.order()[0] == "100000"
    assert len(graph.levels()) == 100_001
    assert len(graph.after("100000")) == 100_000


@pytest.mark.timeout(20)
def test_long_cycles():
    graph = chain(50_000)
    graph.add("50000", "0")
    with pytest.raises(CycleError) as error:
        graph.order()
    assert len(error.value.cycle) == 50_001
    assert error.value.cycle[:2] == ["0", "1"]


def test_after():
    assert parse(BUILD).after("lib") == {"app", "ui"}
    assert parse(BUILD).after("docs") == set()
    with pytest.raises(KeyError):
        parse(BUILD).after("gone")


def test_reduced():
    graph = parse("a: b c d\nb: c\nc: d")
    less = graph.reduced()
    assert [less.needs(task) for task in "abcd"] == [["b"], ["c"], ["d"], []]
    assert graph.needs("a") == ["b", "c", "d"]
    assert less.tasks() == graph.tasks()


def test_run():
    done = []
    report = run(parse(BUILD), done.append)
    assert report.done == done == parse(BUILD).order()
    assert (report.failed, report.skipped) == ({}, set())


def test_run_of_some():
    assert run(parse(BUILD), lambda task: None, wanted=["lib"]).done == ["compiler", "lib"]


def test_run_with_failures():
    def action(task):
        if task == "lib":
            raise RuntimeError("no")

    report = run(parse(BUILD), action)
    assert sorted(report.done) == ["compiler", "docs", "theme"]
    assert list(report.failed) == ["lib"] and str(report.failed["lib"]) == "no"
    assert report.skipped == {"ui", "app"}


@pytest.mark.timeout(20)
def test_run_at_the_same_time():
    graph = Graph()
    for task in "abc":
        graph.add("all", task)
    together = threading.Barrier(3, timeout=5)
    report = run(graph, lambda task: together.wait() if task != "all" else None, workers=3)
    assert report.failed == {}
    assert report.done[-1] == "all"


@pytest.mark.timeout(20)
def test_no_more_than_the_workers():
    lock, running, most = threading.Lock(), [0], [0]
    graph = Graph()
    for n in range(20):
        graph.add(str(n))

    def action(task):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.01)
        with lock:
            running[0] -= 1

    assert len(run(graph, action, workers=4).done) == 20
    assert 1 <= most[0] <= 4


@pytest.mark.timeout(20)
def test_a_task_is_begun_as_soon_as_it_can_be():
    """`slow` ends only when `next`, which does not need it, was done."""
    graph = parse("slow:\nquick:\nnext: quick")
    is_done = threading.Event()

    def action(task):
        if task == "slow" and not is_done.wait(5):
            raise TimeoutError
        if task == "next":
            is_done.set()

    report = run(graph, action, workers=2)
    assert (sorted(report.done), report.failed) == (["next", "quick", "slow"], {})


def test_run_of_a_cycle():
    done = []
    with pytest.raises(CycleError):
        run(parse("a: b\nb: a\nc:"), done.append)
    assert done == []
