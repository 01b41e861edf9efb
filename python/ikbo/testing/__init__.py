"""What tests and users compare with: the definitions in plain PyTorch, an honest error bound."""

from . import definitions
from .closeness import assert_matches_definition
from .random_models import RandomModel

__all__ = ["RandomModel", "assert_matches_definition", "definitions"]
