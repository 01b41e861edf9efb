"""How candidate attention is computed: its configuration (ikbo._host), and a model of what the
threads of a CTA wait for."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ikbo import _host

from .test_gemm_config import DEVICES, H200, SHARED_BYTES, ceil_div

KERNELS = _host.attention_kernels()
HEADS = [(64, 64), (128, 128), (192, 128), (256, 256)]
CONSUMER_ROWS = 64


def problem(
    B: int = 2048, S: int = 64, U: int = 32, L: int = 1024, H: int = 2, D: int = 128, Dv: int = 128,
    lengths_differ: bool = False, ordered: bool = False,
) -> Any:  # fmt: skip
    return _host.AttentionProblem(B, S, H, D, Dv, U, L, lengths_differ, ordered)


# ---- kernels -----------------------------------------------------------------------------------


def test_kernels_fit_an_sm() -> None:
    assert {(kernel.head_qk, kernel.head_v) for kernel in KERNELS} == set(HEADS)
    for kernel in KERNELS:
        q = (
            kernel.consumers * kernel.q_slots * CONSUMER_ROWS * kernel.head_qk * 2
        )  # of all consumers
        keys = kernel.stages * kernel.tile_n * (kernel.head_qk + kernel.head_v) * 2
        assert q + keys + 1024 < kernel.shared_bytes <= SHARED_BYTES
        # A consumer thread's scores, outputs and rounded weights.
        registers = kernel.tile_n // 2 + kernel.head_v // 2 + kernel.tile_n // 4
        assert registers + 32 <= {2: 232, 3: 160}[kernel.consumers]
        assert kernel.tile_m == kernel.consumers * CONSUMER_ROWS


@pytest.mark.parametrize(
    ("D", "Dv", "kernel"),
    [(8, 8, "64_64_192x128"), (64, 64, "64_64_192x128"), (72, 8, "128_128_128x128"),
     (8, 72, "128_128_128x128"), (128, 128, "128_128_128x128"), (136, 128, "192_128_128x128"),
     (192, 24, "192_128_128x128"), (136, 136, "256_256_128x80"), (200, 8, "256_256_128x80"),
     (256, 256, "256_256_128x80")],
)  # fmt: skip
def test_heads_run_in_the_next_size_up(D: int, Dv: int, kernel: str) -> None:
    config = _host.attention_config(problem(D=D, Dv=Dv), H200)
    assert repr(config.kernel) == f"candidate_attention_sm90_{kernel}"


def test_tall_tiles_only_where_they_fill() -> None:
    for candidates, tall in [(64, True), (6, True), (4, False), (2, False), (1, False)]:
        config = _host.attention_config(problem(2048, U=2048 // candidates, D=64, Dv=64), H200)
        assert config.kernel.tile_m == (192 if tall else 128), candidates
    assert _host.attention_config(problem(S=1, D=64, Dv=64), H200).kernel.tile_m == 128


def test_keys_are_shared_where_rounds_waste_enough() -> None:
    def shared(**sizes: Any) -> int:
        config = _host.attention_config(problem(**sizes), H200)
        assert (config.shared_blocks > 0) == repr(config.kernel).endswith("_shared")
        return int(config.shared_blocks)

    for L in (2048, 4096, 8192, 16384):
        assert shared(L=L) == L // 128
    # The last round is nearly full, or short.
    for sizes in ({"L": 512}, {"S": 8}, {"S": 16}, {"S": 32}, {"U": 512}, {"B": 2040, "U": 204}):
        assert shared(**sizes) == 0
    assert shared(B=140, U=140, S=128, H=1, L=1000) == 8  # 140 tiles of 132
    assert not shared(L=4096, lengths_differ=True) and not shared(L=4096, D=256, Dv=256)


def test_jagged_histories_run_in_smaller_blocks() -> None:
    assert _host.attention_config(problem(lengths_differ=True), H200).kernel.tile_n == 96
    assert _host.attention_config(problem(S=8, lengths_differ=True), H200).kernel.tile_n == 128


# ---- configs -----------------------------------------------------------------------------------


@given(
    B=st.integers(0, 5000), S=st.integers(0, 300), U=st.integers(0, 3000), L=st.integers(1, 20000),
    H=st.integers(1, 40), heads=st.sampled_from(HEADS), device=st.sampled_from(DEVICES),
    lengths_differ=st.booleans(), ordered=st.booleans(),
)  # fmt: skip
@example(
    B=1, S=1, U=1, L=20000, H=1, heads=(64, 64), device=H200, lengths_differ=True, ordered=True
)
def test_every_problem_has_a_config(
    B: int, S: int, U: int, L: int, H: int, heads: tuple[int, int], device: Any,
    lengths_differ: bool, ordered: bool,
) -> None:  # fmt: skip
    config = _host.attention_config(
        problem(B, S, U, L, H, *heads, lengths_differ=lengths_differ, ordered=ordered), device
    )
    assert 1 <= config.parts <= 64
    # Every user with candidates, and the rows without one, may need a tile that isn't full.
    tiles = (B * S // config.kernel.tile_m + max(min(U, B), 1) + 1) * H
    users = max(min(U, B), 1)
    even = users * max(ceil_div(ceil_div(B * S, users), config.kernel.tile_m), 1) * H
    if config.parts == 1 and 2 * even > device.sm_count:
        assert config.ctas == min(tiles, device.sm_count)
    else:  # a CTA for each part there is if candidates are spread evenly, all at once
        assert config.ctas == min(even, tiles) * config.parts <= device.sm_count
    # No part is without keys for the longest history; there is room for what each tile's keep.
    assert config.parts == 1 or config.parts <= ceil_div(L, config.kernel.tile_n)
    assert config.most_tiles == (tiles if config.parts > 1 else 0)
    assert config.rows_together == (math.gcd(S, CONSUMER_ROWS) if ordered else CONSUMER_ROWS)
    # By tickets only where lengths differ, and where they pay for a launch that clears a counter.
    assert not config.tickets or (lengths_differ and config.parts == 1)
    assert not config.shared_blocks or (not lengths_differ and config.parts == 1)


def test_headline_fills_the_gpu_in_whole_tiles() -> None:
    for L in (512, 1024, 16384):
        config = _host.attention_config(problem(L=L), H200)
        assert (config.parts, config.ctas, config.tickets) == (1, 132, False)
    assert _host.attention_config(problem(lengths_differ=True), H200).tickets


def test_few_tiles_are_cut_into_parts_where_that_pays() -> None:
    def parts(**sizes: Any) -> tuple[int, int]:
        config = _host.attention_config(problem(**sizes), H200)
        return config.parts, config.ctas

    # 64 tiles of eight blocks of keys: not cut, on half of the SMs.
    assert parts(S=1) == (1, 64)
    assert parts(S=1, L=4096) == (2, 128)
    # One user's 512 rows are 8 tiles; parts of two blocks of 128 keys, on half of the SMs.
    assert parts(B=512, S=1, U=1, L=2048) == (8, 64)
    assert parts(B=512, S=1, U=1, L=512) == (1, 8)
    # There are no CTAs for users without candidates.
    assert parts(B=1, S=1, U=10**5, L=10**6) == (64, 2 * 64)


def test_guesses_what_is_read_first_only_where_that_is_likely() -> None:
    assert _host.attention_config(problem(S=1), H200).expected_tiles == 1
    assert _host.attention_config(problem(S=64), H200).expected_tiles == 32
    for unlikely in (problem(ordered=True), problem(lengths_differ=True), problem(B=2047)):
        assert _host.attention_config(unlikely, H200).expected_tiles == 0


SMALL_SHARED = _host.DeviceLimits(170, 96 * 2**20, 99 * 1024)


@pytest.mark.parametrize(
    ("declined", "device", "words"),
    [
        (problem(D=12), H200, "multiples of 8"),
        (problem(Dv=4), H200, "multiples of 8"),
        (problem(Dv=0), H200, "multiples of 8"),
        (problem(D=264), H200, "larger than 256"),
        (problem(Dv=264), H200, "larger than 256"),
        (problem(B=2**25, S=64), H200, "2^31 query rows"),
        (problem(B=2**30, S=1, H=64), H200, "tiles"),
        (problem(U=2**30, H=64), H200, "tiles"),
        (problem(), SMALL_SHARED, "shared memory"),
    ],
)
def test_declines_with_a_reason(declined: Any, device: Any, words: str) -> None:
    assert words in _host.attention_decline_reason(declined, device)


def test_config_prints_as_json() -> None:
    config = _host.attention_config(problem(S=8, ordered=True), H200)
    assert json.loads(repr(config)) == {
        "kernel": "candidate_attention_sm90_128_128_128x128",
        "stages": 2,
        "shared_bytes": config.kernel.shared_bytes,
        "parts": 1,
        "ctas": 132,
        "rows_together": 8,
        "tickets": False,
        "expected_tiles": 0,
        "shared_blocks": 0,
    }


@given(ctas=st.integers(1, 140), blocks=st.integers(1, 40), data=st.data())
def test_every_block_is_dealt_out_once(ctas: int, blocks: int, data: st.DataObject) -> None:
    tiles = data.draw(st.integers(0, 2 * ctas))
    runs = _host.shared_blocks(ctas, blocks, tiles)
    sizes = [sum(end - first for _, first, end, _ in run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    flat = [(at, *part) for at, run in enumerate(runs) for part in run]
    assert [(tile, block) for _, tile, first, end, _ in flat for block in range(first, end)] == [
        (tile, block) for tile in range(tiles) for block in range(blocks)
    ]
    for at, tile, first, _, sharers in flat:
        # Who has a tile's first block adds up what as many runs after it keep, each in one part,
        # before all else that it does.
        others = [run for run, other, _, _, _ in flat if other == tile and run != at]
        if first == 0:
            assert others == [at + i + 1 for i in range(sharers)]
        else:
            assert runs[at][0][:2] == (tile, first)


# ---- a model of a CTA --------------------------------------------------------------------------
# Each thread (or warp, or group) that waits is a generator that yields while it does; what runs
# next is drawn by chance. Barriers are those of candidate_attention_sm90.cuh and loads.cuh.

Step = Generator[None, None, Any]


class Barrier:
    """An mbarrier: `arrivals`, and loads under way that it expects."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.left = arrivals
        self.loads = self.phase = 0

    def arrive(self) -> None:
        self.left -= 1
        assert self.left >= 0
        self.complete()

    def complete(self) -> None:
        if self.left == 0 and self.loads == 0:
            self.left, self.phase = self.arrivals, self.phase ^ 1

    def wait(self, phase: int) -> Step:
        while self.phase == phase:
            yield


class Turn:
    """A named barrier that one group waits at and another arrives at."""

    def __init__(self) -> None:
        self.met = self.round = 0

    def arrive(self) -> None:
        self.met += 1
        if self.met == 2:
            self.met, self.round = 0, self.round + 1

    def wait(self) -> Step:
        now = self.round
        self.arrive()
        while self.round == now:
            yield


class Place:
    """hopper::RingPosition."""

    def __init__(self, slots: int, block: int = 0) -> None:
        self.slots, self.block = slots, block

    @property
    def slot(self) -> int:
        return self.block % self.slots

    @property
    def phase(self) -> int:
        return self.block // self.slots % 2

    def next(self) -> Place:
        return Place(self.slots, self.block + 1)


class Ring:
    """Slots with what is in them, who is reading, and their barriers."""

    def __init__(self, slots: int, consumers: int) -> None:
        self.slots = slots
        self.full = [Barrier(1) for _ in range(slots)]
        self.empty = [Barrier(consumers) for _ in range(slots)]
        self.holds: list[Any] = [None] * slots
        self.readers: Counter[int] = Counter()

    def load(self, place: Place, what: Any, pending: list[Callable[[], None]]) -> Step:
        yield from self.empty[place.slot].wait(place.phase ^ 1)
        assert not self.readers[place.slot], "overwritten while it is read"
        full, slot = self.full[place.slot], place.slot
        self.holds[slot] = None

        def arrives() -> None:
            self.holds[slot] = what
            full.loads -= 1
            full.complete()

        full.loads += 1
        pending.append(arrives)
        full.arrive()
        yield


class Cta:
    """`tiles`: (rows, keys); keys 0 or less where there is nothing to attend to. `guess`: what is
    loaded before the first is known. If it is another it comes as a tile of its own, WRONG."""

    WRONG = -1

    def __init__(
        self, tiles: list[tuple[int, int]], q_slots: int, stages: int, consumers: int,
        tickets: bool, parts: bool, guess: tuple[int, int] | None, random: Random,
    ) -> None:  # fmt: skip
        self.tiles, self.tickets, self.parts, self.random = tiles, tickets, parts, random
        self.consumers = consumers
        self.tile_ring = Ring(2, 3 + consumers)  # an arrival for each of three loaders and these
        self.k, self.v = Ring(stages, consumers), Ring(stages, consumers)
        self.q = [Ring(q_slots, 1) for _ in range(consumers)]
        self.turns = [Turn() for _ in range(consumers)]
        self.pending: list[Callable[[], None]] = []
        self.results: Counter[tuple[int, int]] = Counter()
        self.guessed_rows, guessed_keys = guess or (0, 0)
        self.early = range(min(ceil_div(guessed_keys, 128), stages))
        self.is_wrong = guess is not None and tiles[:1] != [guess]
        self.guessed_tile = self.WRONG if self.is_wrong else 0

    def blocks(self, tile: int) -> range:
        if tile == self.WRONG:
            return self.early
        return range(ceil_div(max(self.tiles[tile][1], 0), 128))

    def has_rows(self, tile: int, consumer: int) -> bool:
        return tile != self.WRONG and self.tiles[tile][0] > consumer * CONSUMER_ROWS

    def guess_has_rows(self, consumer: int) -> bool:
        return self.guessed_rows > consumer * CONSUMER_ROWS

    # -- group 2
    def finder(self) -> Step:
        place, ring = Place(2), self.tile_ring
        for tile in (*[self.WRONG] * self.is_wrong, *range(len(self.tiles)), None):
            yield from ring.empty[place.slot].wait(place.phase ^ 1)
            ring.holds[place.slot] = tile
            ring.full[place.slot].arrive()
            if self.tickets and tile is not None:
                yield from ring.empty[place.slot].wait(place.phase)
            place = place.next()
            yield

    def read_tile(self, place: Place) -> Generator[None, None, int | None]:
        yield from self.tile_ring.full[place.slot].wait(place.phase)
        tile: int | None = self.tile_ring.holds[place.slot]
        self.tile_ring.empty[place.slot].arrive()
        return tile

    def q_loader(self) -> Step:
        at, places = Place(2), [Place(ring.slots) for ring in self.q]
        for consumer in range(self.consumers):
            if self.guess_has_rows(consumer):
                yield from self.q[consumer].load(places[consumer], self.guessed_tile, self.pending)
                places[consumer] = places[consumer].next()
        if self.guessed_rows:
            yield from self.read_tile(at)
            at = at.next()
        while (tile := (yield from self.read_tile(at))) is not None:
            at = at.next()
            for consumer in range(self.consumers):
                if self.blocks(tile) and self.has_rows(tile, consumer):
                    yield from self.q[consumer].load(places[consumer], tile, self.pending)
                    places[consumer] = places[consumer].next()

    def key_loader(self, ring: Ring) -> Step:
        at, place = Place(2), Place(ring.slots)
        for block in self.early:
            yield from ring.load(place, (self.guessed_tile, block), self.pending)
            place = place.next()
        first = len(self.early)
        while (tile := (yield from self.read_tile(at))) is not None:
            at = at.next()
            for block in self.blocks(tile)[first:]:
                yield from ring.load(place, (tile, block), self.pending)
                place = place.next()
            first = 0

    def copy_engine(self) -> Iterator[None]:
        while True:
            if self.pending:
                self.pending.pop(self.random.randrange(len(self.pending)))()
            yield

    # -- consumers
    def consumer(self, me: int) -> Step:
        q, next_turn = self.q[me], self.turns[(me + 1) % self.consumers]
        at, at_q = Place(2), Place(q.slots)
        at_k, at_v = Place(self.k.slots), Place(self.v.slots)

        def next_tile() -> Generator[None, None, int | None]:
            nonlocal at
            while True:
                tile = yield from self.read_tile(at)
                at = at.next()
                if tile is None or self.blocks(tile):
                    return tile
                if self.has_rows(tile, me):
                    self.results[tile, me] += 1

        def some_time() -> Step:
            for _ in range(self.random.randrange(4)):
                yield

        def reads(ring: Ring, place: Place, what: Any) -> None:
            assert ring.holds[place.slot] == what
            ring.readers[place.slot] += 1

        def release(ring: Ring, place: Place) -> Place:
            ring.readers[place.slot] -= 1
            ring.empty[place.slot].arrive()
            return place.next()

        def multiply_scores(tile: int, block: int) -> Step:
            """Waits for the turn and begins the product; the caller hands the turn on."""
            yield from self.k.full[at_k.slot].wait(at_k.phase)
            yield from self.turns[me].wait()
            reads(q, at_q, tile)
            reads(self.k, at_k, (tile, block))

        def multiply_values(tile: int, block: int) -> Step:
            yield from self.v.full[at_v.slot].wait(at_v.phase)
            reads(self.v, at_v, (tile, block))

        def after_scores(tile: int, block: int) -> None:
            nonlocal at_k, at_q
            at_k = release(self.k, at_k)
            if block + 1 == len(self.blocks(tile)):
                at_q = release(q, at_q)
            else:
                q.readers[at_q.slot] -= 1

        if me == self.consumers - 1:
            next_turn.arrive()
        tile = yield from next_tile()
        while tile is not None:
            if not self.has_rows(tile, me):
                if tile == self.WRONG and self.guess_has_rows(me):
                    yield from q.full[at_q.slot].wait(at_q.phase)
                    reads(q, at_q, tile)
                    at_q = release(q, at_q)
                for block in self.blocks(tile):
                    yield from self.k.full[at_k.slot].wait(at_k.phase)
                    yield from self.turns[me].wait()
                    next_turn.arrive()
                    reads(self.k, at_k, (tile, block))
                    at_k = release(self.k, at_k)
                    yield from self.v.full[at_v.slot].wait(at_v.phase)
                    reads(self.v, at_v, (tile, block))
                    at_v = release(self.v, at_v)
                tile = yield from next_tile()
                continue
            yield from q.full[at_q.slot].wait(at_q.phase)
            yield from multiply_scores(tile, 0)
            next_turn.arrive()
            yield from some_time()
            after_scores(tile, 0)
            block, following = 0, None
            while True:
                finishes = block + 1 == len(self.blocks(tile))
                following, next_block = tile, block + 1
                if finishes:
                    following, next_block = (yield from next_tile()), 0
                    if following is None or not self.has_rows(following, me) or self.parts:
                        break
                    yield from q.full[at_q.slot].wait(at_q.phase)
                yield from multiply_scores(following, next_block)
                yield from multiply_values(tile, block)
                next_turn.arrive()
                yield from some_time()
                after_scores(following, next_block)
                yield from some_time()
                at_v = release(self.v, at_v)
                if finishes:
                    self.results[tile, me] += 1
                tile, block = following, next_block
            yield from multiply_values(tile, block)
            yield from some_time()
            at_v = release(self.v, at_v)
            self.results[tile, me] += 1
            tile = following
        if me == 0:
            yield from self.turns[0].wait()

    def run(self) -> None:
        threads: list[Iterator[None]] = [
            self.finder(), self.q_loader(), self.key_loader(self.k), self.key_loader(self.v),
            *(self.consumer(me) for me in range(self.consumers)),
        ]  # fmt: skip
        engine = self.copy_engine()
        speeds = {id(t): self.random.choice([1, 1, 5, 20]) for t in (*threads, engine)}
        for _ in range(200_000):
            if not threads:
                return
            thread = self.random.choices(
                [*threads, engine], [speeds[id(t)] for t in (*threads, engine)]
            )[0]
            try:
                next(thread)
            except StopIteration:
                threads.remove(thread)
        raise AssertionError("threads wait for one another")


@pytest.mark.parametrize(("q_slots", "stages"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(("tickets", "parts"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("guesses", [False, True])
def test_threads_of_a_cta_end_and_read_what_they_mean_to(
    q_slots: int, stages: int, consumers: int, tickets: bool, parts: bool, guesses: bool
) -> None:
    for seed in range(100):
        random = Random(seed)
        tiles = [
            (
                random.choice([1, 40, 64, 65, 100, 64 * consumers]),
                random.choice([-1, 0, 1, 128, 129, 300]),
            )
            for _ in range(random.randrange(9))
        ]
        guess = None
        if guesses:
            guess = random.choice([1, 64, 65, 64 * consumers]), random.choice([1, 129, 700])
            tiles[:1] = random.choice([tiles[:1], [guess]])
        cta = Cta(tiles, q_slots, stages, consumers, tickets, parts, guess, random)
        cta.run()
        assert cta.results == {
            (tile, consumer): 1
            for tile, (rows, _) in enumerate(tiles)
            for consumer in range(consumers)
            if rows > consumer * CONSUMER_ROWS
        }
