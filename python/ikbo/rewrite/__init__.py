"""A model that copies its contexts' rows in, the same without the copies out.

`exporting` exports the model, `api` puts the new program together, `split` cuts it in two,
`broadcasts` recognises copies, `rules`
says of each op how it treats rows, `lineage` whose rows a value holds, `engine` walks the program
with `values` that are not computed yet, `algebra` splits products, `report` says what happened,
`cost` what it saves, `verify` checks it.
"""

from .api import rewrite
from .cost import Cost, OpCost
from .engine import Entry
from .exporting import Context
from .report import Copy, Report
from .verify import Check

__all__ = ["Check", "Context", "Copy", "Cost", "Entry", "OpCost", "Report", "rewrite"]
