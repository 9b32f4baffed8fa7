"""All cases for prefix safety."""

from __future__ import annotations

import prefix_cases_compute
import prefix_cases_moves
import prefix_cases_names
from prefix_case import CASES, Case

__all__ = ["CASES", "Case", "prefix_cases_compute", "prefix_cases_moves", "prefix_cases_names"]
