"""What racecheck reports though it is no race: it doesn't follow mbarriers that copies arrive on,
nor a cluster's barrier, nor that a shuffle needs what lanes have read."""

from __future__ import annotations

import re

_BEFORE_SHUFFLES = (
    "norm_forward_loose_sm90, rows within a warp: a row's values pass shuffles of the whole warp "
    "before a lane writes over them; what is read behind a row's end is thrown away"
)

# By the two functions that touch the bytes: what orders them.
EXPLAINED = {
    ("ikbo::hopper::copy_async_16", "ikbo::hopper::load_tiles"): (
        "JoinEpilogue: the helper warp's copies of users' parts arrive on `full`, which the "
        "consumer waits for; the next copies wait for its named barrier kStaged"
    ),
    ("ikbo::gemm::JoinEpilogue::Consumer::add_bias", "ikbo::gemm::gemm_sm90"): (
        "JoinEpilogue: the same barriers, of the bias that is copied with the parts"
    ),
    ("ikbo::linear_compression::consume", "ikbo::linear_compression::store"): (
        "`told` is written before the arrival on `filled`, and read after the wait for it"
    ),
    ("ikbo::hopper::load_in_cluster", "ikbo::weight_stream::consume"): (
        "the CTAs of the cluster meet between writing their sums and reading each other's, and "
        "again before they end"
    ),
    ("ikbo::attention::TileRing::read", "ikbo::attention::TileRing::write"): (
        "a tile is written before the arrival on the ring's full barrier, and read after the wait "
        "for it; its slot is written again after all have arrived on the empty one"
    ),
    ("ikbo::norm::LooseColumns::store", "ikbo::norm::norm_forward_loose_sm90"): _BEFORE_SHUFFLES,
    ("ikbo::norm::norm_forward_loose_sm90", "ikbo::norm::norm_forward_loose_sm90"): (
        _BEFORE_SHUFFLES
    ),
    ("ikbo::norm::LooseColumns::load_padded", "ikbo::norm::LooseColumns::store"): _BEFORE_SHUFFLES,
    ("float", "ikbo::norm::LooseColumns::store"): _BEFORE_SHUFFLES,
    ("ikbo::norm::norm_backward_wide_sm90", "ikbo::norm::sum_parts"): (
        "a turn's sums are written before the arrival on `warps`, and read after the wait for it; "
        "a warp writes them again four turns later, when all have arrived for the turn before"
    ),
    ("ikbo::norm::norm_backward_whole_sm90", "ikbo::norm::norm_backward_whole_sm90"): (
        "teams' sums are read after the CTA's barrier that follows their writing; before it teams "
        "have met at named barriers, some of them once more than others"
    ),
}

_ACCESS = re.compile(r"(Race reported between|and) (?:Read|Write) access at (.*?)\+0x[0-9a-f]+")


def hazards(output: str) -> set[tuple[str, str]]:
    """The pairs of functions in racecheck's output, in order. Those of other libraries' kernels, of
    which cuBLAS's have some, are left out."""
    pairs = set()
    first = ""
    for kind, symbol in _ACCESS.findall(output):
        name = _function(symbol)
        if kind == "and":
            pairs.add((min(first, name), max(first, name)))
        else:
            first = name
    return {pair for pair in pairs if any(name.startswith("ikbo::") for name in pair)}


def _function(symbol: str) -> str:
    """Its qualified name without template arguments, parameters, lambdas and result type."""
    while "<" in symbol:
        bare = re.sub(r"<[^<>]*>", "", symbol)
        if bare == symbol:
            break
        symbol = bare
    return symbol.split("(")[0].split()[-1]
