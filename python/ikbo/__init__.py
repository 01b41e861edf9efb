"""ikbo: layers for models in which many rows share one context, without copying the context."""

import sys

# The report on what is wrong must run when something is: it tries the library in another process.
if "ikbo.collect_env" not in sys.orig_argv:
    from . import _library

    __version__: str = _library.library().ikbo_version().decode()

    from . import nn
    from .diagnostics import counters, explain, reset_counters, sm_limit, strict, warmup
    from .ops import *  # noqa: F403
    from .ops import __all__ as _op_names
    from .rewrite import Context, rewrite, shadow

    __all__ = [
        "Context",
        "counters",
        "explain",
        "nn",
        "reset_counters",
        "rewrite",
        "shadow",
        "sm_limit",
        "strict",
        "warmup",
        *_op_names,
    ]
