"""The column schedule of linear compression (ikbo._host), and a model of the CTA that follows it.

The models repeat what linear_compression_sm90.cuh does: which thread waits for what, in which
order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ikbo import _host

CONSUMERS = 2
Tile = tuple[int, int]  # consumer, number

schedules = st.builds(
    _host.ColumnSchedule,
    units=st.integers(1, 600), workers=st.integers(1, 40), consumers=st.just(CONSUMERS),
    k_blocks=st.integers(1, 20),
)  # fmt: skip
deep_schedules = st.builds(  # several rounds
    _host.ColumnSchedule,
    units=st.integers(1, 30), workers=st.integers(1, 3), consumers=st.just(CONSUMERS),
    k_blocks=st.integers(1, 15),
)  # fmt: skip


def tiles_of(schedule: object, worker: int) -> list[Tile]:
    return [
        (c, tile) for c in range(schedule.consumers) for tile in range(schedule.tiles(worker, c))
    ]


def tile_walk(schedule: object, worker: int) -> Iterator[Tile]:
    """The kernel's TileWalk."""
    tile = consumer = 0
    while tile < schedule.tiles(worker, consumer):
        yield consumer, tile
        consumer += 1
        if consumer == CONSUMERS or tile >= schedule.tiles(worker, consumer):
            consumer = 0
            tile += 1


def turn(schedule: object, worker: int, consumer: int) -> tuple[int, int, int]:
    """The kernel's Turn: steps before the first tile, tiles, steps after the last."""
    return (
        schedule.first_step(consumer),
        schedule.tiles(worker, consumer),
        schedule.steps(worker) - schedule.end_step(worker, consumer),
    )


# ---- the schedule ------------------------------------------------------------------------------


@given(
    units=st.integers(1, 600), workers=st.integers(1, 40), consumers=st.integers(1, 3),
    k_blocks=st.integers(1, 20),
)  # fmt: skip
@example(units=4096, workers=66, consumers=2, k_blocks=14)
def test_each_unit_has_one_tile(units: int, workers: int, consumers: int, k_blocks: int) -> None:
    schedule = _host.ColumnSchedule(units, workers, consumers, k_blocks)
    visits = Counter(
        schedule.unit(worker, c, tile)
        for worker in range(workers)
        for c, tile in tiles_of(schedule, worker)
    )
    assert visits == Counter(range(units))


@given(schedules)
def test_work_is_even(schedule: object) -> None:
    counts = [[schedule.tiles(w, c) for c in range(CONSUMERS)] for w in range(schedule.workers)]
    every = [count for worker in counts for count in worker]
    assert max(every) <= min(every) + 1
    # TileWalk relies on it.
    assert all(first >= second for first, second in counts)
    # The first worker has the most; the estimate of clocks relies on it.
    assert sum(counts[0]) == max(map(sum, counts)) <= min(map(sum, counts)) + 1
    steps = [schedule.steps(worker) for worker in range(schedule.workers)]
    assert max(steps) == steps[0]


@given(schedules, st.data())
def test_units_of_a_round_are_neighbours(schedule: object, data: st.DataObject) -> None:
    tile = data.draw(st.integers(0, schedule.full_rounds))
    units = sorted(
        schedule.unit(worker, c, tile)
        for worker in range(schedule.workers)
        for c in range(CONSUMERS)
        if tile < schedule.tiles(worker, c)
    )
    assert units == list(range(units[0], units[0] + len(units))) if units else tile > 0


@given(schedules, st.data())
def test_each_step_is_waited_for_once_by_each_consumer(
    schedule: object, data: st.DataObject
) -> None:
    worker = data.draw(st.integers(0, schedule.workers - 1))
    steps, k_blocks = schedule.steps(worker), schedule.k_blocks
    ends = []
    for consumer in range(CONSUMERS):
        before, tiles, after = turn(schedule, worker, consumer)
        assert min(before, tiles, after) >= 0
        assert before + tiles * k_blocks + after == steps
        step = before
        for _ in range(tiles):
            # load_e's blocks, and those of W that come in the same steps: each block once.
            of_e = [(before + i) % k_blocks for i in range(k_blocks)]
            of_w = [s % k_blocks for s in range(step, step + k_blocks)]
            assert of_e == of_w
            assert sorted(of_w) == list(range(k_blocks))
            step += k_blocks
        assert step == schedule.end_step(worker, consumer)
        ends.append(step)
    # No step is for nobody.
    assert min(turn(schedule, worker, c)[0] for c in range(CONSUMERS)) == 0
    assert steps == max(ends)


@given(schedules)
def test_consumers_start_apart_over_several_rounds(schedule: object) -> None:
    apart = schedule.first_step(1) - schedule.first_step(0)
    assert schedule.first_step(0) == 0
    assert apart == (schedule.k_blocks // 2 if schedule.full_rounds >= 3 else 0)


@given(schedules, st.data())
def test_walk_goes_by_the_ends_of_tiles(schedule: object, data: st.DataObject) -> None:
    worker = data.draw(st.integers(0, schedule.workers - 1))

    def end(tile: Tile) -> tuple[int, int]:  # of those that end together the lower consumer's first
        c, number = tile
        return schedule.first_step(c) + (number + 1) * schedule.k_blocks, c

    walk = list(tile_walk(schedule, worker))
    assert walk == sorted(tiles_of(schedule, worker), key=end)
    # What the storer tells a consumer lies in one place: neighbours are of different consumers.
    assert all(a[0] != b[0] for a, b in itertools.pairwise(walk))


def test_the_largest_schedules_stay_in_int32() -> None:
    for workers in (1, 3, 132, 396):
        schedule = _host.ColumnSchedule(2**30, workers, CONSUMERS, 1)
        last_tile = schedule.full_rounds if schedule.leftover else schedule.full_rounds - 1
        consumer, worker = divmod((schedule.leftover or workers * CONSUMERS) - 1, workers)
        assert schedule.unit(worker, consumer, last_tile) == 2**30 - 1
        assert 0 < schedule.steps(0) < 2**31


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_there_is_no_schedule_of_nothing(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="nothing"):
        _host.ColumnSchedule(*shape)


# ---- a CTA -------------------------------------------------------------------------------------

Thread = Iterator[Callable[[], bool]]  # yields what it waits for


class Barrier:
    """An mbarrier: whoever waits knows the parity of a round, not the round."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.round = 0

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.missing = self.arrivals
            self.round += 1

    def has_completed(self, round_: int) -> Callable[[], bool]:
        def completed() -> bool:
            assert self.round in (round_, round_ + 1), "the parity is another round's"
            return self.round % 2 != round_ % 2

        return completed


class Cta:
    """The threads of a CTA that wait for each other, but for the rings of E: each of those has one
    consumer, whom it never holds up for good."""

    def __init__(
        self, schedule: object, worker: int, *, w_stages: int, buffers: int, results: int,
        walk: list[Tile] | None = None,
    ) -> None:  # fmt: skip
        self.k_blocks, self.steps = schedule.k_blocks, schedule.steps(worker)
        self.turns = [turn(schedule, worker, c) for c in range(CONSUMERS)]
        self.walk = list(tile_walk(schedule, worker)) if walk is None else walk
        self.results = results
        self.full = [Barrier(1) for _ in range(w_stages)]
        self.empty = [Barrier(CONSUMERS) for _ in range(w_stages)]
        self.filled = [Barrier(1) for _ in range(CONSUMERS)]
        self.ready = [Barrier(1) for _ in range(CONSUMERS)]
        self.told: list[tuple[Tile, int, int] | None] = [None] * CONSUMERS
        self.owners: list[tuple[Tile, int] | None] = [None] * buffers
        self.at = [0] * CONSUMERS  # steps that each consumer has seen
        self.stored: list[tuple[Tile, int]] = []
        self.threads: dict[str, Thread] = {
            "load_w": self.load_w(), "store": self.store(),
            **{f"consumer {c}": self.consume(c) for c in range(CONSUMERS)},
        }  # fmt: skip

    def load_w(self) -> Thread:
        for step in range(self.steps):
            round_, slot = divmod(step, len(self.full))
            if round_ > 0:
                yield self.empty[slot].has_completed(round_ - 1)
            self.full[slot].arrive()

    def see(self, consumer: int) -> Callable[[], bool]:
        round_, slot = divmod(self.at[consumer], len(self.full))
        return self.full[slot].has_completed(round_)

    def release(self, step: int) -> None:
        self.empty[step % len(self.empty)].arrive()

    def consume(self, c: int) -> Thread:
        before, tiles, after = self.turns[c]
        handed = 0

        def skip(steps: int) -> Thread:
            for _ in range(steps):
                yield self.see(c)
                self.release(self.at[c])
                self.at[c] += 1

        yield from skip(before)
        for tile in range(tiles):
            for k in range(self.k_blocks):
                yield self.see(c)
                if k > 0:
                    self.release(self.at[c] - 1)
                self.at[c] += 1
            for result in range(self.results):
                # The last block of W is still held.
                yield self.filled[c].has_completed(handed)
                handed += 1
                mine = (c, tile), result
                assert self.told[c] is not None
                *told, buffer = self.told[c]
                self.told[c] = None
                assert tuple(told) == mine == self.owners[buffer]
                if result == 0:
                    self.release(self.at[c] - 1)
                yield lambda: True  # the epilogue
                assert self.owners[buffer] == mine
                self.ready[c].arrive()
        yield from skip(after)

    def load_part(self, consumer: int) -> Thread:
        yield lambda: True
        self.filled[consumer].arrive()

    def store(self) -> Thread:
        buffers = len(self.owners)
        to_fill = iter([(tile, r) for tile in self.walk for r in range(self.results)])
        filled = 0

        def fill_next() -> None:
            nonlocal filled
            if (following := next(to_fill, None)) is None:
                return
            (consumer, _), _ = following
            buffer = filled % buffers
            filled += 1
            assert self.owners[buffer] is None, "a buffer for two"
            assert self.told[consumer] is None, "told twice"
            self.owners[buffer] = following
            self.told[consumer] = (*following, buffer)
            self.threads[f"part {filled}"] = self.load_part(consumer)

        fill_next()
        if buffers > 1 and self.results == 1:
            fill_next()
        received = [0] * CONSUMERS
        number = 0
        for tile in self.walk:
            for result in range(self.results):
                consumer, _ = tile
                yield self.ready[consumer].has_completed(received[consumer])
                received[consumer] += 1
                yield lambda: True  # the store reads the buffer
                buffer = number % buffers
                number += 1
                assert self.owners[buffer] == (tile, result)
                self.owners[buffer] = None
                self.stored.append((tile, result))
                fill_next()

    def run(self, random: Random) -> None:
        """To the end, in an order in which some threads may be much slower than others."""
        speeds: dict[str, float] = {}
        waiting: dict[str, Callable[[], bool]] = {}
        while self.threads:
            for name in self.threads.keys() - waiting.keys():
                speeds.setdefault(name, 0.01 ** random.randrange(3))
                waiting[name] = lambda: True
            ready = sorted(name for name, done in waiting.items() if done())
            assert ready, f"deadlock: {sorted(waiting)}"
            name = random.choices(ready, [speeds[name] for name in ready])[0]
            try:
                waiting[name] = next(self.threads[name])
            except StopIteration:
                del self.threads[name], waiting[name]
            assert abs(self.at[0] - self.at[1]) <= len(self.full)


rings = st.sampled_from([(kernel.w_stages, kernel.staging_buffers)
                         for kernel in _host.linear_compression_kernels()])  # fmt: skip


@settings(max_examples=300)
@given(
    schedule=deep_schedules, data=st.data(), results=st.integers(1, 2), seed=st.integers(0, 2**32),
    ring=rings | st.tuples(st.integers(2, 5), st.integers(1, 2)),
)  # fmt: skip
def test_cta_stores_every_result_in_any_order_of_its_threads(
    schedule: object, data: st.DataObject, ring: tuple[int, int], results: int, seed: int
) -> None:
    w_stages, buffers = ring
    worker = data.draw(st.integers(0, schedule.workers - 1))
    cta = Cta(schedule, worker, w_stages=w_stages, buffers=buffers, results=results)
    cta.run(Random(seed))
    assert cta.at == [cta.steps] * CONSUMERS
    assert Counter(cta.stored) == Counter(
        (tile, result) for tile in tiles_of(schedule, worker) for result in range(results)
    )
    assert cta.owners == [None] * buffers


@pytest.mark.parametrize("buffers", [1, 2])
def test_model_notices_another_order_of_stores(buffers: int) -> None:
    # Consumer 1 ends half a round later than consumer 0, but the ring is no half round deep.
    schedule = _host.ColumnSchedule(6, 1, CONSUMERS, 14)
    walk = [(1 - c, tile) for c, tile in tile_walk(schedule, 0)]
    cta = Cta(schedule, 0, w_stages=4, buffers=buffers, results=2, walk=walk)
    with pytest.raises(AssertionError, match="deadlock"):
        cta.run(Random(0))
