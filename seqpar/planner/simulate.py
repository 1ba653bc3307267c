"""A small discrete-event simulation of tasks that run in streams and share links.

A stream runs its tasks one after another, as a CUDA stream or an NCCL communicator does. Tasks of different streams run
at the same time, and tasks that use the same link share its bandwidth equally. ``Timeline`` records tasks in the order
in which a program issues them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """A kernel or a transfer.

    Attributes:
        name: a name for timelines.
        stream: the stream that runs the task after the stream's earlier tasks.
        links: for each link that the task uses, the seconds that the task takes if no other task uses the link. A task
            uses all of its links at the same time.
        delay: seconds between the start of the task and its use of the links (the latency of a transfer).
        after: the indices of tasks that must have ended before this task starts.
    """

    name: str
    stream: str
    links: Mapping[str, float]
    delay: float = 0.0
    after: tuple[int, ...] = ()


Span = tuple[float, float]  # start and end of a task, in seconds


def simulate(tasks: Sequence[Task]) -> list[Span]:
    """The start and the end of each task, in the order of ``tasks``.

    Raises:
        ValueError: some tasks wait for one another, so that they never start.
    """
    queues: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    works: dict[int, dict[str, float]] = {}  # of each running task, the seconds left by link
    delayed: set[int] = set()  # the running tasks that have not used their links yet
    idle = list(queues.values())  # the queues of the streams that run nothing
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
            delayed.add(number)
            works[number] = {f"delay of {number}": task.delay} if task.delay > 0 else {}
        idle = waiting
        if not works:
            if idle:
                raise ValueError("tasks: some wait for one another, and would never start; remove the circle in after")
            return list(zip(starts, ends, strict=True))
        users: dict[str, int] = {}  # the number of tasks on each link
        for links in works.values():
            for link in links:
                users[link] = users.get(link, 0) + 1
        # The time until the next task has its delay behind it, or ends its use of a link.
        step = inf
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
            if not links and number in delayed:
                delayed.remove(number)
                works[number] = {link: seconds for link, seconds in tasks[number].links.items() if seconds > 0}
            elif not links:
                ends[number] = now
                del works[number]
                queue = queues[tasks[number].stream]
                queue.popleft()
                if queue:
                    idle.append(queue)


@dataclass
class Timeline:
    """Records the kernels and transfers of one rank in the order in which the program issues them.

    All kernels run in one stream. A transfer starts after the last kernel that was issued before it. Whatever is issued
    after ``wait(number)`` starts after that transfer has ended.

    Attributes:
        tasks: the recorded tasks.
        sent: bytes that the rank sends, by level of links.
    """

    tasks: list[Task] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    _last_kernel: tuple[int, ...] = ()  # the index of the last kernel, if there is one
    _waits: list[int] = field(default_factory=list)  # the transfers that have been waited for since the last kernel

    def compute(self, name: str, seconds: float) -> None:
        """Record a kernel that takes ``seconds``; nothing if that is 0."""
        if seconds > 0:
            self.tasks.append(Task(name, COMPUTE, {COMPUTE: seconds}, after=tuple(self._waits)))
            self._last_kernel, self._waits = (len(self.tasks) - 1,), []

    def start(self, name: str, stream: str, links: Mapping[str, float], delay: float = 0.0) -> int | None:
        """Record a transfer.

        Args:
            name: a name for timelines.
            stream: the communicator, whose transfers run one after another.
            links: the seconds of the transfer on each link.
            delay: the latency in seconds.

        Returns:
            The number of the transfer for ``wait``; None if there is nothing to transfer.
        """
        if not any(links.values()):
            return None
        self.tasks.append(Task(name, stream, links, delay, (*self._last_kernel, *self._waits)))
        return len(self.tasks) - 1

    def wait(self, *numbers: int | None) -> None:
        """Let all later kernels and transfers start after these transfers have ended. None is ignored."""
        self._waits += [n for n in numbers if n is not None]

    def run(self, *more: Task) -> Result:
        """Simulate the recorded tasks, with ``more`` tasks that start at once."""
        tasks = (*self.tasks, *more)
        return Result(tasks, simulate(tasks), dict(self.sent))


@dataclass(frozen=True)
class Result:
    """A simulated timeline.

    Attributes:
        tasks: the tasks.
        spans: the start and the end of each task, in seconds.
        sent: bytes that the rank sends, by level of links.
    """

    tasks: tuple[Task, ...]
    spans: Sequence[Span]
    sent: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Seconds until the last task ends."""
        return max((end for _, end in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds in which kernels run."""
        return sum(task.links[COMPUTE] for task in self.tasks if task.stream == COMPUTE)

    @property
    def exposed(self) -> float:
        """Seconds in which no kernel runs, because the rank waits for communication."""
        return max(0.0, round(self.seconds - self.compute, 12))
