"""docs/norms.md shows the mapping that the config code decides on: `python -m tests.test_norm_docs`
rewrites its table."""

from __future__ import annotations

import re

from ikbo import _host

from .installed import REPOSITORY

PAGE = REPOSITORY / "docs/norms.md"
BLOCK = re.compile(r"(?<=<!-- mapping -->\n\n).*?(?=\n\n<!-- /mapping -->)", re.DOTALL)
ROWS = 32768
SMS = 132
H200 = _host.DeviceLimits(SMS, 50 * 2**20, 227 * 1024)
COLUMNS = [64, 128, 192, 256, 257, 384, 512, 576, 640, 768, 769, 1024, 1152, 1536, 2048, 2560, 4095,
           4096, 5120, 7168, 8192, 16384, 32768, 65536, 131072, 262144, 262145]  # fmt: skip


def _cells(columns: int, backward: bool) -> list[str]:
    """Threads x vectors of a row; the CTAs it lies in; rows a stage x stages and an SM's KB, or
    rows a unit and a CTA's KB."""
    if backward:
        both = _host.norm_backward_config(ROWS, columns, (2, 2, 0), True, True, H200)
        if both.whole.has_kernel:
            return _whole_cells(both.whole)
    operands = (2, 2, 0) if backward else (2, 0, 0)
    config = _host.norm_config(ROWS, columns, operands, backward, backward, H200)
    m = config.mapping
    if m.looped:
        return [f"{m.lanes}, looped", "1", "-"]
    if m.in_warp:
        where = (
            f"{m.warps} warps, {32 // m.lanes} rows each" if m.lanes < 32 else f"{m.warps} warps"
        )
    else:
        where = f"{m.warps} warps" if m.cluster == 1 else f"{m.cluster} x {m.warps} warps"
    if config.whole:
        return [f"{m.lanes} x {m.thread_vectors}", where, "none"]
    if m.interleaved and not backward:
        kilobytes = config.stage_bytes * config.rings / 1024
        return [
            f"{m.lanes} x {m.thread_vectors}",
            where,
            f"unit of {config.rows_per_stage}, {kilobytes:.0f} KB",
        ]
    per_sm = -(-config.grid // SMS)
    kilobytes = config.stage_bytes * config.stages * config.rings * per_sm / 1024
    ring = f"{config.rows_per_stage} x {config.stages}, {kilobytes:.0f} KB"
    return [
        f"{m.lanes} x {m.thread_vectors}",
        where,
        ring + (", ticket" if config.by_ticket else ""),
    ]


def _whole_cells(w: _host.NormWhole) -> list[str]:
    warps = f"{w.warps} warps"
    if w.lanes < 32:
        where = f"{warps}, {w.turn_rows} rows each"
    elif w.lanes == 32:
        where = warps if w.rows == 1 else f"{warps}, {w.rows} rows each"
    else:
        where = f"{w.teams} x {w.lanes // 32} warps"
        if w.cluster > 1:
            where = f"{w.cluster} x ({where})" if w.teams > 1 else f"{w.cluster} x {warps}"
        if w.rows > 1:
            where += f", {w.rows} rows each"
    kilobytes = w.stage_bytes * w.stages / 1024
    return [f"{w.lanes} x {w.vectors}", where, f"own, {w.stages}, {kilobytes:.0f} KB"]


def mapping_table() -> str:
    lines = [
        "| N | forward: threads x vectors | CTA | ring | backward | CTA | ring |",
        "|---" * 7 + "|",
    ]
    for columns in COLUMNS:
        cells = [str(columns), *_cells(columns, False), *_cells(columns, True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_shows_what_the_config_says() -> None:
    assert BLOCK.findall(PAGE.read_text()) == [mapping_table()]


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: mapping_table(), PAGE.read_text()))
