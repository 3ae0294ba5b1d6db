import heapq
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field


class CycleError(ValueError):
    def __init__(self, cycle):
        super().__init__(f"a cycle: {' -> '.join(cycle[:10])}")
        self.cycle = cycle


class Graph:
    def __init__(self):
        self._needs = {}

    def add(self, task, *needs):
        own = self._needs.setdefault(task, {})
        for need in needs:
            self._needs.setdefault(need, {})
            own[need] = None

    def tasks(self):
        return list(self._needs)

    def needs(self, task):
        return list(self._needs[task])

    def order(self, *wanted):
        rank, waiting, users = self._prepared(wanted)
        ready = [rank[task] for task, count in waiting.items() if not count]
        heapq.heapify(ready)
        tasks, done = self.tasks(), []
        while ready:
            task = tasks[heapq.heappop(ready)]
            done.append(task)
            for user in users[task]:
                waiting[user] -= 1
                if not waiting[user]:
                    heapq.heappush(ready, rank[user])
        if len(done) < len(waiting):
            raise CycleError(self._cycle({task for task, count in waiting.items() if count}))
        return done

    def levels(self, *wanted):
        level, found = {}, []
        for task in self.order(*wanted):
            level[task] = max((level[need] + 1 for need in self._needs[task]), default=0)
            if level[task] == len(found):
                found.append([])
            found[level[task]].append(task)
        rank = {task: place for place, task in enumerate(self._needs)}
        return [sorted(tasks, key=rank.__getitem__) for tasks in found]

    def after(self, task):
        if task not in self._needs:
            raise KeyError(task)
        users = self._users(self._needs)
        return self._reached(users[task], users)

    def reduced(self):
        less = Graph()
        for task in self._needs:
            less.add(task)
        for task, needs in self._needs.items():
            for need in needs:
                others = [other for other in needs if other != need]
                if need not in self._reached([n for o in others for n in self._needs[o]], self._needs):
                    less.add(task, need)
        return less

    def _prepared(self, wanted):
        for task in wanted:
            if task not in self._needs:
                raise KeyError(task)
        chosen = self._reached(wanted or self._needs, self._needs)
        rank = {task: place for place, task in enumerate(self._needs)}
        waiting = {task: len(self._needs[task]) for task in self._needs if task in chosen}
        return rank, waiting, self._users(waiting)

    def _users(self, tasks):
        users = {task: [] for task in tasks}
        for task in tasks:
            for need in self._needs[task]:
                users[need].append(task)
        return users

    @staticmethod
    def _reached(start, edges):
        found, pending = set(start), list(start)
        while pending:
            for other in edges[pending.pop()]:
                if other not in found:
                    found.add(other)
                    pending.append(other)
        return found

    def _cycle(self, left):
        """Whoever is left needs another that is left: that way one comes round."""
        path, place = [], {}
        task = next(task for task in self._needs if task in left)
        while task not in place:
            place[task] = len(path)
            path.append(task)
            task = next(need for need in self._needs[task] if need in left)
        cycle = path[place[task] :]
        rank = {task: place for place, task in enumerate(self._needs)}
        first = min(range(len(cycle)), key=lambda at: rank[cycle[at]])
        return cycle[first:] + cycle[:first]


def parse(text):
    graph = Graph()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        task, colon, needs = line.partition(":")
        if not colon or len(task.split()) != 1:
            raise ValueError(f"line {number}: it is not `task: need need`")
        graph.add(task.strip(), *needs.split())
    return graph


@dataclass
class Report:
    done: list = field(default_factory=list)
    failed: dict = field(default_factory=dict)
    skipped: set = field(default_factory=set)


def run(graph, action, wanted=(), workers=1):
    order = graph.order(*wanted)
    report, waiting = Report(), list(order)
    running = {}
    with ThreadPoolExecutor(workers) as pool:
        while waiting or running:
            _begin(graph, action, pool, workers, waiting, running, report)
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(ended, key=lambda future: order.index(running[future])):
                task = running.pop(future)
                if future.exception() is None:
                    report.done.append(task)
                else:
                    report.failed[task] = future.exception()
                    report.skipped |= graph.after(task) & set(waiting)
                    waiting[:] = [task for task in waiting if task not in report.skipped]
    return report


def _begin(graph, action, pool, workers, waiting, running, report):
    for task in list(waiting):
        if len(running) == workers:
            return
        if all(need in report.done for need in graph.needs(task)):
            waiting.remove(task)
            running[pool.submit(action, task)] = task
