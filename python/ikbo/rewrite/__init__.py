"""A model that copies its contexts' rows in, the same without the copies out.

`api` exports the model and puts the new program together, `broadcasts` recognises copies, `rules`
says of each op how it treats rows, `lineage` whose rows a value holds, `engine` walks the program
with `values` that are not computed yet, `algebra` splits products, `report` says what happened and
checks it.
"""

from .api import Context, rewrite
from .engine import Entry
from .report import Report, compare_programs

__all__ = ["Context", "Entry", "Report", "compare_programs", "rewrite"]
