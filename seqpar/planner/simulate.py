"""A small discrete-event simulation: tasks in streams, which share links.

A stream runs its tasks one after another, as a CUDA stream or an NCCL communicator does. Tasks of different streams run
at the same time; those that use the same link share it equally. ``Timeline`` records tasks as a program issues them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """Something that takes time.

    Attributes:
        name: a name for timelines.
        stream: the stream that runs the task, after the stream's earlier tasks.
        links: for each link that the task uses, the seconds that it takes without other tasks. A task uses several
            links at the same time.
        delay: seconds before it uses its links.
        after: the numbers of tasks that must have ended before it starts.
    """

    name: str
    stream: str
    links: Mapping[str, float]
    delay: float = 0.0
    after: tuple[int, ...] = ()


Span = tuple[float, float]  # start and end of a task, in seconds


def simulate(tasks: Sequence[Task]) -> list[Span]:
    """When each task starts and ends.

    Raises:
        ValueError: tasks wait for one another.
    """
    queues: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    delays: dict[int, float] = {}  # by running task, the seconds of its delay that are left
    works: dict[int, dict[str, float]] = {}  # by running task, the seconds that are left by link
    idle = list(queues.values())  # streams that run nothing
    now = 0.0
    while True:
        waiting = []
        for queue in idle:
            number = queue[0]
            task = tasks[number]
            if any(ends[i] < 0 for i in task.after):
                waiting.append(queue)
                continue
            starts[number] = now
            if task.delay > 0:
                delays[number] = task.delay
            else:
                works[number] = {x: s for x, s in task.links.items() if s > 0}
        idle = waiting
        if not delays and not works:
            if idle:
                raise ValueError("tasks: some wait for one another")
            return list(zip(starts, ends, strict=True))
        users: dict[str, int] = {}
        for links in works.values():
            for link in links:
                users[link] = users.get(link, 0) + 1
        step = min(delays.values(), default=inf)
        for links in works.values():
            for link, seconds in links.items():
                step = min(step, seconds * users[link])
            if not links:
                step = 0.0
        now += step
        rounding = 1e-12 * now + 1e-15
        for number, links in list(works.items()):
            for link in list(links):
                links[link] -= step / users[link]
                if links[link] <= rounding:
                    del links[link]
            if not links:
                ends[number] = now
                del works[number]
                queue = queues[tasks[number].stream]
                queue.popleft()
                if queue:
                    idle.append(queue)
        for number in list(delays):
            delays[number] -= step
            if delays[number] <= rounding:
                del delays[number]
                works[number] = {x: s for x, s in tasks[number].links.items() if s > 0}


@dataclass
class Timeline:
    """Records tasks in the order in which a program issues them, with the rules of CUDA streams.

    What is issued after a computation starts after it; what is issued after ``wait`` starts after the transfer.

    Attributes:
        tasks: the recorded tasks.
        sent: bytes sent, by level.
    """

    tasks: list[Task] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    _last: tuple[int, ...] = ()  # the last computation
    _waits: list[int] = field(default_factory=list)  # transfers that the next task starts after

    def compute(self, name: str, seconds: float) -> None:
        """A computation."""
        if seconds > 0:
            self.tasks.append(Task(name, COMPUTE, {COMPUTE: seconds}, after=tuple(self._waits)))
            self._last, self._waits = (len(self.tasks) - 1,), []

    def start(self, name: str, stream: str, links: Mapping[str, float], delay: float = 0.0) -> int | None:
        """A transfer; its number, to wait for. None if there is nothing to transfer."""
        if not any(links.values()):
            return None
        self.tasks.append(Task(name, stream, links, delay, (*self._last, *self._waits)))
        return len(self.tasks) - 1

    def wait(self, *numbers: int | None) -> None:
        """What follows starts after these transfers."""
        self._waits += [n for n in numbers if n is not None]

    def run(self) -> Result:
        """Simulate."""
        return Result(tuple(self.tasks), simulate(self.tasks))


@dataclass(frozen=True)
class Result:
    """What a simulation found.

    Attributes:
        tasks: the tasks.
        spans: the start and the end of each.
    """

    tasks: tuple[Task, ...]
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """When the last task ends."""
        return max((end for _, end in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return sum(task.links[COMPUTE] for task in self.tasks if task.stream == COMPUTE)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return max(0.0, round(self.seconds - self.compute, 12))
