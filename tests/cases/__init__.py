from .attention import CASES as ATTENTION_CASES
from .case import Case, Maker
from .linear import CASES as LINEAR_CASES

ALL_CASES: list[Case] = [*LINEAR_CASES, *ATTENTION_CASES]

__all__ = ["ALL_CASES", "Case", "Maker"]
