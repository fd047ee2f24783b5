"""Claims of papers about the methods, tried small with the real classes under the virtual clock.

    make reproduce                                     # all of them; half an hour on two cores
    python -m benchmarks.reproductions --only R4       # one
    python -m benchmarks.reproductions --only R4 --quick   # one seed

Figures go to benchmarks/results/reproductions, and from there to docs/reproductions.md.
"""
