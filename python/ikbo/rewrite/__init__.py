"""A model that copies its contexts' rows in, the same without the copies out.

`exporting` exports the model, `broadcasts` recognises copies, `rules` says of each op how it treats
rows, `lineage` whose rows a value holds, `engine` walks the program with `values` that are not
computed yet, `algebra` splits products, `program` puts the new program together, `split` cuts it in
two, `report` says what happened, `cost` what it saves, `verify` and `shadow` check it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .api import rewrite
from .context import Context
from .shadow import Shadow, ShadowStatistics, shadow

if TYPE_CHECKING:
    from .cost import Cost, OpCost
    from .engine import Entry
    from .report import Copy, Report
    from .verify import Check

__all__ = ["Check", "Context", "Copy", "Cost", "Entry", "OpCost", "Report", "Shadow",
           "ShadowStatistics", "rewrite", "shadow"]  # fmt: skip

# torch.export and sympy take a third of a second to import: only for those who rewrite.
_LATE = {"Check": "verify", "Copy": "report", "Cost": "cost", "Entry": "engine", "OpCost": "cost",
         "Report": "report"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
