"""A call of each kind for every norm, with the module of its cases."""

import group_kernel_cases
import kernel_cases
import pool_cases
import row_cases

OPERATORS = [
    (cases, case)
    for cases in (kernel_cases, row_cases, pool_cases, group_kernel_cases)
    for case in cases.OPERATOR_CASES
]
