"""A model that copies its contexts' rows in, the same without the copies out.

`exporting` exports the model, `broadcasts` recognises copies, `rules` says of each op how it treats
rows, `lineage` whose rows a value holds, `engine` walks the program with `values` that are not
computed yet, `algebra` splits products, `api` puts the new program together, `split` cuts it in
two, `report` says what happened, `cost` what it saves, `verify` and `shadow` check it.
"""

from .api import rewrite
from .cost import Cost, OpCost
from .engine import Entry
from .exporting import Context
from .report import Copy, Report
from .shadow import Shadow, ShadowStatistics, shadow
from .verify import Check

__all__ = ["Check", "Context", "Copy", "Cost", "Entry", "OpCost", "Report", "Shadow",
           "ShadowStatistics", "rewrite", "shadow"]  # fmt: skip
