"""A small discrete-event simulation: tasks in streams, which share links.

A stream runs its tasks one after another, as a CUDA stream or an NCCL communicator does. Tasks of different streams run
at the same time; those that use the same link share it equally. ``Timeline`` records tasks as a program issues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """Something that takes time.

    Attributes:
        name: what it is.
        stream: the stream it runs in, after the stream's earlier tasks.
        links: by link, the seconds that it takes alone. A task that uses several uses them at the same time.
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
    queues: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    heads = dict.fromkeys(queues, 0)
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    running: dict[int, tuple[list[float], dict[str, float]]] = {}  # the delay, and the seconds left by link
    now, left = 0.0, len(tasks)
    while left:
        for stream, queue in queues.items():
            if (head := heads[stream]) < len(queue):
                task = tasks[queue[head]]
                if queue[head] not in running and all(ends[i] >= 0 for i in task.after):
                    starts[queue[head]] = now
                    running[queue[head]] = [task.delay], {x: s for x, s in task.links.items() if s > 0}
        if not running:
            raise ValueError("tasks: some wait for one another")
        users = Counter(link for delay, links in running.values() if delay[0] <= 0 for link in links)
        step = min(
            delay[0] if delay[0] > 0 else min((s * users[x] for x, s in links.items()), default=0.0)
            for delay, links in running.values()
        )
        now += step
        for number in list(running):
            delay, links = running[number]
            if delay[0] > 0:
                delay[0] = _less(delay[0], step, now)
            else:
                for link in list(links):
                    links[link] = _less(links[link], step / users[link], now)
                    if not links[link]:
                        del links[link]
            if not delay[0] and not links:
                ends[number] = now
                heads[tasks[number].stream] += 1
                del running[number]
                left -= 1
    return list(zip(starts, ends, strict=True))


def _less(seconds: float, by: float, now: float) -> float:
    """``seconds - by``, 0 where only rounding is left."""
    rest = seconds - by
    return rest if rest > 1e-12 * now + 1e-15 else 0.0


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
    spans: Iterable[Span]

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
        return self.seconds - self.compute
