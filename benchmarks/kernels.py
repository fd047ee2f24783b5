"""The native kernels against torch, pass by pass, on one thread: python -m benchmarks.kernels [--levels] [--repeats 15]

Both ways go through the product's own functions, in turns; the medians of their times, and how many times faster the
native one is. By the size of a bucket: 256 KB and 4 MB that lie in a cache, 64 MB that don't fit.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from shardline.codecs import CODECS
from shardline.codecs.base import Turn
from shardline.codecs.cast import cast
from shardline.codecs.coding import Coding
from shardline.core.plan import make_plan
from shardline.core.reduce import magnitude, tree_sum
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.tensor_bytes import fingerprint, tensor_bytes
from shardline.native import library
from shardline.native.kernels import Copies
from shardline.update.torch_optim import adam, eager, sgd

SIZES = {"256 KB": 1 << 16, "4 MB": 1 << 20, "64 MB": 1 << 24}
"""float32 elements."""
CODED = ("int8", "onebit", "ef-sign", "qsgd", "terngrad", "topk")
PLAIN = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

ADAMS: dict[str, dict[str, bool]] = {"AdamW": {}, "AdamW, amsgrad": {"amsgrad": True}, "AdamW, fused": {"fused": True}}
"""The last is torch's at each level."""


def adam_step(
    values: torch.Tensor, gradient: torch.Tensor, target: torch.Tensor, **given: bool
) -> Callable[[], object]:
    """One step of AdamW, as a bucket's run takes it."""
    parameter = torch.nn.Parameter(target)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], **given)
    eager.step(optimizer)
    group, state = optimizer.param_groups[0], optimizer.state[parameter]

    def action() -> None:
        if not adam.is_plain(torch.optim.AdamW, group) or adam.step(values, gradient, target, state, group) is None:
            target.copy_(values)
            eager.step(optimizer)

    return action


def passes(elements: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and action of each pass over so many float32 elements."""
    values, gradient, target, kept = (torch.randn(elements) for _ in range(4))
    several = [torch.randn(elements) for _ in range(4)]
    momentum = {**PLAIN, "momentum": 0.9}
    all_of_it = {**momentum, "weight_decay": 1e-4, "nesterov": True}

    whole = (0, 0, elements, elements)

    def copied(copies: Copies) -> None:
        if copies.fill([values]) is None:
            target.copy_(values)
            magnitude(target)

    yield "largest magnitude", lambda: magnitude(values)
    yield "copy with it", functools.partial(copied, Copies(target, [whole]))
    yield "copy with it, past the cache", functools.partial(copied, Copies(target, [whole], away=True))
    yield "fingerprint", lambda: fingerprint(tensor_bytes(values))
    yield "sum of 4 in the tree", lambda: tree_sum(several)
    yield "SGD", lambda: sgd.step(values, gradient, target, None, PLAIN)
    yield "SGD, decay", lambda: sgd.step(values, gradient, target, None, {**PLAIN, "weight_decay": 1e-4})
    yield "SGD, momentum", lambda: sgd.step(values, gradient, target, kept, momentum)
    yield "SGD, momentum, decay, nesterov", lambda: sgd.step(values, gradient, target, kept, all_of_it)
    yield from ((name, adam_step(values, gradient, target, **given)) for name, given in ADAMS.items())
    yield "to bfloat16", lambda: cast(values, "bfloat16")
    half = values.to(torch.bfloat16)
    yield "from bfloat16", lambda: cast(half, "float32")
    tensor = TensorSpec(name="rows", shape=(elements >> 8, 256), dtype="float32", kind=TensorKind.PARAM)
    for name in CODED:
        coding = Coding(CODECS.parse(name), make_plan([tensor], 1)).bucket(0, 0)
        part = gradient[: coding.layout.bucket.elements]
        payload = bytearray(coding.coder.encode(part, Turn()))
        yield f"{name}, encoding", functools.partial(coding.coder.encode, part, Turn())
        yield f"{name}, decoding", functools.partial(coding.coder.decode, payload, Turn())


def median_ms(action: Callable[[], object], levels: list[str | None], repeats: int) -> list[float]:
    """Medians by level, each a turn after the other."""
    times: list[list[float]] = [[] for _ in levels]
    for turn in range(repeats + 1):
        for level, taken in zip(levels, times, strict=True):
            library.use(level)
            start = time.perf_counter()
            action()
            if turn:
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", action="store_true", help="every level that this machine has, not only the best")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if library.level() is None:
        parser.exit(1, f"{library.describe()}\n")
    names = library.levels() if options.levels else library.levels()[-1:]
    print(f"| pass | size | torch, ms |{''.join(f' {name}, ms | times |' for name in names)}")
    print(f"|---|---|---|{'---|---|' * len(names)}")
    for size, elements in SIZES.items():
        for name, action in passes(elements):
            torch_ms, *native_ms = median_ms(action, [None, *names], options.repeats)
            cells = "".join(f" {ms:.3f} | {torch_ms / ms:.2f} |" for ms in native_ms)
            print(f"| {name} | {size} | {torch_ms:.3f} |{cells}", flush=True)


if __name__ == "__main__":
    main()
