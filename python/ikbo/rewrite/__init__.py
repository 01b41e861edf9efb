"""Rewrites a model that copies a context's rows into one that doesn't. Start with `rewrite`."""
