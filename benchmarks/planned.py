"""What `shardline partition` predicts of a run of pipeline_job.py, as one JSON object, and the memory of its stages.

SHARDLINE_JOB_ARGS="--pipeline flush --microbatches 4" python -m benchmarks.planned --workers 4 --ps 2 --link 940Mbit
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from benchmarks.stage_memory import measured
from benchmarks.staged import JOB
from shardline.job import load_job
from shardline_pipeline.cli.partition import in_layers, make_costs, own_stages
from shardline_pipeline.partition.choose import choose, rated

STEPS = 4
"""Of each stage, for its memory."""
HERE = {"group": 1, "memory": "none", "sync": "servers", "profile": None}
"""What `shardline partition` takes where no flag says otherwise."""


def main() -> int:
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--ps", type=int, required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--codec", default="raw", help="of gradients and parameters")
    options = parser.parse_args()
    job = load_job(JOB, [("codec_up", options.codec), ("codec_down", options.codec)], workers=options.workers)
    model = in_layers(job.build_model())
    # All workers are on this machine.
    costs = make_costs(job, {**HERE, **vars(options), "cores": os.cpu_count()}, model)
    own = own_stages(job, model, options.workers)
    found = (rated(costs, own) if own is not None else choose(costs).whole).forecast
    memory: Sequence[float] = found.memory_bytes if own is not None else ()
    figures = {
        "median_s": found.seconds,
        "bytes": found.bytes,
        "memory": memory,
        "measured_memory": measured(job, STEPS) if own is not None else (),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
