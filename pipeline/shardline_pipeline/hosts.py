"""Which worker computes which stage, where a model says so: several for a stage, or several stages on one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline.errors import JobError

Hosts = tuple[tuple[int, ...], ...]
"""Numbers of the workers of each stage; () = the chief chooses."""


def hosts_of(workers: Sequence[int | Sequence[int]], stages: int) -> Hosts:
    """The workers of each stage, from the form in which a Pipeline gets them.

    [2, 1, 1]: that many of each stage's own, numbered stage by stage. [[0], [1], [2], [0]]: these. Raises JobError.
    """
    given = list(workers)
    if given and len(given) != stages:
        raise JobError(
            f"Pipeline: workers is {given}, which is {len(given)} entries for {stages} stages; give one each"
        )
    counts = [one for one in given if isinstance(one, int)]
    if counts and len(counts) != len(given):
        raise JobError(
            f"Pipeline: workers is {given}; give a number of workers for every stage, or a list of workers' numbers"
        )
    found: list[tuple[int, ...]] = []
    free = 0
    for stage, one in enumerate(given):
        numbers = tuple(range(free, free + one)) if isinstance(one, int) else tuple(int(number) for number in one)
        free += len(numbers)
        if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
            raise JobError(
                f"Pipeline: workers is {given}, but stage {stage} needs at least one worker, each named once by its "
                "number, from 0 on"
            )
        found.append(numbers)
    return tuple(found)


def planned_hosts(hosts: Hosts, replicas: int) -> dict[int, str]:
    """Task by unit: the replicas of a stage go to its workers in turn (1F1B-RR; Narayanan et al.: PipeDream, 2019)."""
    return {
        stage * replicas + replica: f"worker/{numbers[replica % len(numbers)]}"
        for stage, numbers in enumerate(hosts)
        for replica in range(replicas)
    }


def check_hosts(hosts: Hosts, stages: int, replicas: int, *, workers: int | None = None) -> None:
    """Raise JobError where a stage's workers can't share its replicas, or there are fewer. workers: in the cluster."""
    if hosts and (len(hosts) != stages or not all(hosts)):
        raise JobError(f"the workers {list(map(list, hosts))} are not those of {stages} stages, each with at least one")
    for stage, numbers in enumerate(hosts):
        if replicas % len(numbers):
            raise JobError(
                f"stage {stage} of the pipeline has {len(numbers)} workers for the job's {replicas} replicas, which "
                f"they can't share evenly; choose replicas={len(numbers)} or a multiple, or other workers"
            )
        if workers is not None and max(numbers) >= workers:
            raise JobError(
                f"stage {stage} of the pipeline is for worker/{max(numbers)}, but there are {workers} workers; start "
                f"{max(max(one) for one in hosts) + 1}, or change `workers` of the Pipeline"
            )


def assign_hosts(
    plan: Mapping[int, str],
    previous: Mapping[int, str],
    living: Sequence[str],
    *,
    together: Sequence[Sequence[int]] = (),
) -> dict[int, str]:
    """Task by unit: the planned one if it is living, else the one that has stood in for it, else who has least.

    plan: planned_hosts(). living: tasks in order of index. together: all units, in groups that have the same planned
    task and are always given to one; () = each alone. {} if nobody is living.
    """
    if not living:
        return {}
    groups = together or [[unit] for unit in plan]
    homes = {number: plan[group[0]] for number, group in enumerate(groups) if plan[group[0]] in living}
    for number, group in enumerate(groups):
        if number not in homes and previous.get(group[0]) in living:
            homes[number] = previous[group[0]]
    held = [task for number, task in homes.items() for _ in groups[number]]
    for number, group in enumerate(groups):
        if number not in homes:
            homes[number] = min(living, key=lambda task: (held.count(task), living.index(task)))
            held += [homes[number]] * len(group)
    return dict(sorted((unit, task) for number, task in homes.items() for unit in groups[number]))
