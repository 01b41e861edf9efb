from .case import Case, Maker
from .gated import CASES as GATED_CASES
from .linear import CASES as LINEAR_CASES

ALL_CASES: list[Case] = [*LINEAR_CASES, *GATED_CASES]

__all__ = ["ALL_CASES", "Case", "Maker"]
