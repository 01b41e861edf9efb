"""What a call takes of the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes that the call asked for at its peak, its results among them, beyond what was there.

    Asked for, not taken: what the allocator adds to a request depends on the blocks that earlier
    tests left in its cache, up to 1 MB each.
    """

    def asked(when: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = asked("current")
    results = call()
    torch.cuda.synchronize()
    peak = asked("peak") - before
    del results
    return peak
