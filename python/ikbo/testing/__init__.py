"""What tests and users compare with: the definitions in plain PyTorch, an honest error bound."""

from . import definitions
from .closeness import assert_matches_definition

__all__ = ["assert_matches_definition", "definitions"]
