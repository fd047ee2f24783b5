"""R7: backup workers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reproductions.base import Found, Reproduction, Row, accuracy, digits_job, mean, spread, timing, train

# By replicas, spares and spread: the mean of the (replicas - spares)-th of so many Gamma distributed times of mean 1.
EXPECTED = {
    (8, 0, 0.1): 1.147,
    (9, 1, 0.1): 1.093,
    (16, 0, 0.1): 1.185,
    (16, 1, 0.1): 1.132,
    (8, 0, 0.6): 1.986,
    (9, 1, 0.6): 1.544,
    (16, 0, 0.6): 2.307,
    (16, 1, 0.6): 1.827,
}
STEPS = 4000
BATCHES = 200


def step_times(seeds: Sequence[int]) -> Found:
    """R7."""
    rows: list[Row] = []
    found: dict[tuple[int, int, float], float] = {}
    for (replicas, spares, cv), expected in EXPECTED.items():
        job = digits_job(
            optimizer_args={"lr": 0.1}, replicas=replicas, consistency=f"sync:spares={spares}", steps=STEPS
        )
        times = [timing(job, replicas, cv=cv, seed=seed).step_s.mean() for seed in seeds]
        found[replicas, spares, cv] = mean(times)
        rows.append(
            {
                "replicas": replicas,
                "spares": spares,
                "spread": cv,
                "order statistic": expected,
                "time per step": spread(times),
            }
        )
    scores = {}
    for replicas, spares in ((8, 0), (9, 1)):
        ends = []
        for seed in seeds:
            job = digits_job(
                optimizer_args={"lr": 0.1, "momentum": 0.9},
                replicas=replicas,
                consistency=f"sync:spares={spares}",
                steps=BATCHES,
                seed=seed,
            )
            ends.append(accuracy(train(job, replicas, cv=0.6, seed=seed).params))
        scores[spares] = mean(ends)
        rows.append({"replicas": replicas, "spares": spares, "spread": 0.6, "accuracy": spread(ends)})
    return Found(
        rows=rows,
        verdicts={
            "without spares a step takes as long as the largest of the times, within 2 %": all(
                abs(found[key] / expected - 1) < 0.02 for key, expected in EXPECTED.items() if not key[1]
            ),
            "one spare for 8 saves as much as the order statistic says, within 5 %": all(
                abs(found[9, 1, cv] / EXPECTED[9, 1, cv] - 1) < 0.05 for cv in (0.1, 0.6)
            ),
            "the accuracy stays within half a point": abs(scores[0] - scores[1]) < 0.005,
        },
    )


ALL = (
    Reproduction(
        number="R7",
        title="Backup workers",
        source="Chen et al., Revisiting Distributed Synchronous SGD, 2016; closed form for the times",
        claim="With b spares a step takes as long as the N-th of N + b times instead of the largest of N, at the same "
        "accuracy.",
        setting="Timing only, 4,000 steps; and digits, 200 steps of 8 batches. The order statistic assumes that "
        "workers begin each step together; a worker who is late for one step begins the next one late.",
        run=step_times,
    ),
)
