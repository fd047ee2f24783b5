"""What the microbatches in a stage keep for their backward passes, and what these need for a moment. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shardline_pipeline.partition.profile import Profile


class Activations:
    """Bytes of the activations of any layers first to end - 1 as a stage, for one microbatch.

    recompute: see PipelineSchedule.recompute.
    """

    def __init__(self, profile: Profile, *, recompute: bool) -> None:
        self._profile = profile
        self._recompute = recompute
        self._held: dict[int, list[int]] = {}
        self._passing: dict[tuple[int, int, bool], int] = {}

    def busiest_bytes(self, first: int, end: int, *, held: int, share: int, flushes: bool) -> int:
        """The most that passes need at a time. held: microbatches at a time, of `share` that a worker has in a step."""
        each = self.held_bytes(first, end)
        # Gradients are added up from the second microbatch on; the first one's memory may have been used again by then.
        added = held if share > held or not flushes else held - 1
        again = self.made_bytes(first, end) - each
        return again + max(
            held * each + self.passing_bytes(first, end, added=False),
            added * each + self.passing_bytes(first, end, added=share > 1),
        )

    def held_bytes(self, first: int, end: int) -> int:
        """What one microbatch keeps between its two passes: all that is made, or if that is repeated, what came in."""
        if not self._recompute:
            return self.made_bytes(first, end)
        batch = self._profile.batch_bytes if first == 0 or end == len(self._profile.layers) else 0
        return batch + self._come_bytes(first, set())

    def _come_bytes(self, first: int, found: set[int]) -> int:
        if not first:
            return 0
        before = self._profile.layers[first - 1]
        return _more(before.output, found) + before.weight_bytes

    def made_bytes(self, first: int, end: int) -> int:
        """What is saved in a forward pass, and the stage's input and output."""
        if first not in self._held:
            found: set[int] = set()
            total = self._come_bytes(first, found)
            row = [total]
            for layer in self._profile.layers[first:]:
                total += _more(layer.saved, found)
                # Only the stage's last output is kept where nothing else keeps it.
                row.append(total + _more(layer.output, set(found)))
            self._held[first] = row
        return self._held[first][end - first]

    def passing_bytes(self, first: int, end: int, *, added: bool) -> int:
        """What a backward pass needs for a moment: gradients of the stage's and a layer's output, and of what it makes.

        Without what later layers had saved, which is free by then. added: and with the gradient of the layer's largest
        parameter, to be added to what there is.
        """
        if (first, end, added) not in self._passing:
            layers = self._profile.layers
            ends = set(layers[end - 1].output) | set(layers[first - 1].output if first else ())
            most, later = 0, {one for layer in layers[first:end] for one in layer.saved} - ends
            free = 0
            for number in range(end - 1, first - 1, -1):
                last = number == end - 1
                own = layers[number].passing_bytes if last else layers[number].between_bytes
                most = max(most, own + (layers[number].largest_bytes if added else 0) - free)
                earlier = {one for layer in layers[first:number] for one in layer.saved}
                free += sum(size for _, size in later - earlier)
                later &= earlier
            self._passing[first, end, added] = layers[end - 1].gradient_bytes + most
        return self._passing[first, end, added]


def _more(storages: Iterable[tuple[int, int]], known: set[int]) -> int:
    """Bytes of those that are not known yet; they are from now on."""
    total = sum(size for number, size in storages if number not in known)
    known.update(number for number, _ in storages)
    return total
