"""OP.json: what was measured, on what, at which commit. Written after every case, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .timing import Row


class Record:
    """The results of one op in a folder.

    A file is continued when its rows are of the same commit and kind of run, and count; otherwise
    it starts anew with the next :meth:`add`.
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path, self.meta = path, meta
        self.rows: list[Row] = []
        if path.exists():
            before = json.loads(path.read_text())
            same = all(before["meta"].get(k) == meta.get(k) for k in ("commit", "gpu", "quick"))
            if same and before["meta"]["counts"]:
                self.rows = before["rows"]

    def has(self, case: str, dtype: str) -> bool:
        return any((row["case"], row["dtype"]) == (case, dtype) for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        text = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        text = f'{{"meta": {json.dumps(self.meta)},\n "rows": [\n{text}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
