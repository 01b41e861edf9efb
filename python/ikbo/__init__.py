"""ikbo: layers for models in which many rows share one context, without copying the context."""

import sys

from . import _library

try:
    _library.library()
except ImportError:
    # The report on what is wrong must run when something is.
    if "ikbo.collect_env" not in sys.orig_argv:
        raise
else:
    from . import nn
    from .diagnostics import counters, explain, reset_counters, sm_limit, strict, warmup
    from .ops import *  # noqa: F403
    from .ops import __all__ as _op_names

    __version__: str = _library.library().ikbo_version().decode()
    __all__ = [
        "counters",
        "explain",
        "nn",
        "reset_counters",
        "sm_limit",
        "strict",
        "warmup",
        *_op_names,
    ]
