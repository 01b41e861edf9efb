"""The decisions of the host side (ikbo._host): pure functions, checked over their whole range."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from ikbo import _host

DIGIT_BITS, TILE_ROWS, SINGLE_CTA_ROWS, SINGLE_CTA_USERS = 8, 4096, 8192, 16383

every_problem = given(
    rows=st.integers(0, 2**31 - 1) | st.integers(0, 40_000),
    n_users=st.integers(0, 2**31 - 2) | st.integers(0, 70_000),
)


@every_problem
@example(rows=0, n_users=0)
@example(rows=1, n_users=255)
@example(rows=1, n_users=256)
@example(rows=SINGLE_CTA_ROWS, n_users=SINGLE_CTA_USERS)
@example(rows=SINGLE_CTA_ROWS + 1, n_users=SINGLE_CTA_USERS)
@example(rows=SINGLE_CTA_ROWS, n_users=SINGLE_CTA_USERS + 1)
@example(rows=2**31 - 1, n_users=2**31 - 2)
def test_group_candidates_config(rows: int, n_users: int) -> None:
    config = _host.group_candidates_config(rows, n_users)

    # Keys are 0 ... n_users: the passes cover all their bits, and no pass is idle.
    assert n_users < 2 ** (DIGIT_BITS * config.passes)
    assert config.passes == 1 or n_users >= 2 ** (DIGIT_BITS * (config.passes - 1))

    fits_one_cta = rows <= SINGLE_CTA_ROWS and n_users <= SINGLE_CTA_USERS
    assert config.single_cta == fits_one_cta

    # Tiles cover every row, and none is empty.
    assert config.tiles * TILE_ROWS >= rows
    assert (config.tiles - 1) * TILE_ROWS < rows or config.tiles == 0
    # A grid holds no more CTAs than that.
    assert config.tiles < 2**31

    if config.single_cta:
        assert config.launches == 1
    else:
        assert config.launches == 3 * config.passes + (config.passes > 1)

    # Two keys and two row numbers a row between passes; 256 counts a tile, and their totals.
    ping_pong = 4 * rows if config.passes > 1 else 0
    histogram = 0 if config.single_cta else 256 * (config.tiles + 1)
    assert config.scratch_words(rows) == ping_pong + histogram


def test_config_prints_as_json() -> None:
    config = _host.group_candidates_config(100_000, 1000)
    assert json.loads(repr(config)) == {
        "kernel": "group_candidates_sm90",
        "passes": 2,
        "single_cta": False,
        "tiles": 25,
        "launches": 7,
    }
