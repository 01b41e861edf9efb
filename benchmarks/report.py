"""Writes the README's figures from benchmarks/results/h200.

  python benchmarks/report.py

Replaces what stands between <!-- figures --> and <!-- /figures --> in README.md. With matplotlib
installed it also draws a plot per op, beside the op's JSON.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ops import OPS, note

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
CEILINGS = ("copy",)  # no contestants: nothing can pass them
OURS = "ikbo_"  # begins the names of ikbo called in another way: columns, but no yardsticks
NO_FIGURES = "No figures are recorded yet."

Results = dict[str, Any]  # an OP.json


def main() -> None:
    results = load(RESULTS)
    readme = ROOT / "README.md"
    links = {op: str((RESULTS / op).relative_to(ROOT)) for op in results}
    plotted = {op for op, result in results.items() if plot(op, result, RESULTS / f"{op}.svg")}
    readme.write_text(replace_block(readme.read_text(), figures(results, links, plotted)))
    print(f"{readme}: {', '.join(results) or NO_FIGURES}; plots: {len(plotted)}")


def load(folder: Path) -> dict[str, Results]:
    """The runs that count, by op."""
    results = {}
    for op in OPS:
        path = folder / f"{op}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        if result["meta"]["counts"] and not result["meta"]["quick"]:
            results[op] = result
        else:
            print(f"{path}: left out, the run doesn't count", file=sys.stderr)
    return results


def figures(results: dict[str, Results], links: dict[str, str], plotted: set[str]) -> str:
    """The block as Markdown; ``links[op]`` is the path of an op's files without the suffix."""
    if not results:
        return NO_FIGURES
    parts = [
        "How many times as long as `ikbo` each yardstick takes, the median of rounds in which they "
        "take turns: **above 1, `ikbo` is faster**. `copy` is a ceiling: a copy of the same bytes, "
        "so 0.9 means 90 % of its bandwidth. A column `ikbo_…` is no yardstick but ikbo called in "
        "another way. Half-precision columns are bf16; the JSON files hold fp16 and every sample "
        "too."
    ]
    for op, result in results.items():
        meta, cases = result["meta"], by_case(result)
        won = sum(best_yardstick(rows) > 1 for rows in cases.values())
        parts.append(
            f"<details>\n<summary><b>{op}</b>: faster than every yardstick in {won} of "
            f"{len(cases)} cases</summary>"
        )
        if op in plotted:
            parts.append(f"![{op}]({links[op]}.svg)")
        if text := note(op):
            parts.append(text)
        parts.append("\n".join(table(cases)))
        parts.append(
            f"[{op}.json]({links[op]}.json): {meta['gpu']}, torch {meta['torch']}, driver "
            f"{meta['driver']}, {meta['date']}, commit {meta['commit'][:12]}; copy "
            f"{meta['copy_TBps']} TB/s, bf16 matrix product {meta['matmul_TFLOPS']} TFLOP/s.\n"
            "</details>"
        )
    return "\n\n".join(parts)


def replace_block(readme: str, block: str) -> str:
    """The README with its figures replaced."""
    text, count = re.subn(
        r"(<!-- figures -->\n).*?(<!-- /?figures -->)",
        lambda match: f"{match[1]}\n{block}\n\n{match[2]}", readme, flags=re.DOTALL,
    )  # fmt: skip
    if count != 1:
        raise SystemExit(
            f"benchmarks/report.py: expected one block between <!-- figures --> and "
            f"<!-- /figures --> in README.md, got {count}. Add the two lines."
        )
    return text


def by_case(result: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """{case: {impl: row}}, without fp16."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["dtype"] != "fp16":
            cases.setdefault(row["case"], {})[row["impl"]] = row
    return cases


def best_yardstick(rows: dict[str, dict[str, Any]]) -> float:
    """The smallest ratio of a case; 0 where ikbo has none, or nobody to compare with."""
    ratios = [
        row["ratio"] for impl, row in rows.items()
        if "ratio" in row and impl not in CEILINGS and not impl.startswith(OURS)
    ]  # fmt: skip
    return min(ratios, default=0.0)


def table(cases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Markdown rows: a line per case, a column per contestant beside ikbo."""
    peers = columns(cases)
    lines = [f"| case | `ikbo`, µs | {' | '.join(peers)} |", "|---" * (len(peers) + 2) + "|"]
    for name, rows in cases.items():
        ikbo = rows["ikbo"]
        cells = [_readable(ikbo["us"]) if "us" in ikbo else "error"]
        for peer in peers:
            row = rows.get(peer)
            if row is None or ("ratio" not in row and "error" not in row):
                cells.append("")
            else:
                cells.append(_readable(row["ratio"]) if "ratio" in row else "error")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _readable(number: float) -> str:
    """Three digits of what is above 1, two of what is below: 193,700; 54.4; 1.07; 0.0012."""
    if number >= 100:
        return f"{float(f'{number:.4g}'):,.0f}"
    return f"{number:.3g}" if number >= 1 else f"{number:.2g}"


def columns(cases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    return list(dict.fromkeys(impl for rows in cases.values() for impl in rows if impl != "ikbo"))


def plot(op: str, result: Results, path: Path) -> bool:
    """Draws the ratios; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ikbo"  # same data, same file
    from matplotlib import pyplot, ticker

    cases = by_case(result)
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.28 * len(cases)), layout="constrained")
    for peer in columns(cases):
        points = [(rows[peer]["ratio"], y) for y, rows in enumerate(cases.values())
                  if "ratio" in rows.get(peer, {})]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=peer)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="time over ikbo's (right of 1: ikbo is faster)", title=op)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.grid(axis="x", which="both", alpha=0.3)
    for of_ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        of_ticks(ticker.FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.tick_params(axis="x", which="both", labelsize=8)
    figure.legend(loc="outside right upper")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


if __name__ == "__main__":
    main()
