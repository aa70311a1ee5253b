"""The order in which waiting generations will be claimed, by the rules of the claim in ``models``.

Which run ends next is not known. The order is exact if runs end in the order in which they were
claimed, and no generation prefers a worker, runs isolated or arrives meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A generation that waits."""

    pk: int
    project_id: int
    service_class: int


def claim_order(
    waiting: Iterable[Waiting], running: Sequence[int], slots: int, most: int
) -> list[int]:
    """Return the first ``most`` of the generations of one model, as they will be claimed.

    ``waiting`` has the oldest first, ``running`` the projects of the running generations, the one
    that was claimed first first. While all ``slots`` are busy, a run ends before each claim.
    """
    lines: dict[int, dict[int, deque[tuple[int, int]]]] = {}
    for age, one in enumerate(waiting):
        line = lines.setdefault(one.service_class, {}).setdefault(one.project_id, deque())
        line.append((age, one.pk))
    runs, ending = Counter(running), deque(running)
    last_claim = {project: number for number, project in enumerate(running, start=1)}
    order: list[int] = []
    for service_class in sorted(lines):
        projects = lines[service_class]
        while projects and len(order) < most:
            if ending and len(ending) >= slots:
                runs[ending.popleft()] -= 1
            best = min((runs[p], last_claim.get(p, 0), *line[0], p) for p, line in projects.items())
            project = best[-1]
            order.append(projects[project].popleft()[1])
            if not projects[project]:
                del projects[project]
            runs[project] += 1
            ending.append(project)
            last_claim[project] = len(running) + len(order)
    return order
