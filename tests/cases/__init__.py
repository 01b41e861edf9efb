from .attention import CASES as ATTENTION_CASES
from .case import Case, Maker
from .gated import CASES as GATED_CASES
from .linear import CASES as LINEAR_CASES
from .norms import CASES as NORM_CASES

ALL_CASES: list[Case] = [*LINEAR_CASES, *ATTENTION_CASES, *NORM_CASES, *GATED_CASES]

__all__ = ["ALL_CASES", "Case", "Maker"]
