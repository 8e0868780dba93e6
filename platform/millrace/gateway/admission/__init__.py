"""Admission control: rate limits, budgets, idempotency keys and rejections.

`RequestAdmission.admit` (budget_admission.py) is called before an execution is dispatched. It checks the rate limits
(admission.py, limits.py), estimates the maximum cost (cost_estimate.py) and reserves it from the budgets
(budget_admission.py). The result is an admission lease. Closing the lease when the request ends returns the unused
capacity. A rejection is an `ApiError` (rejections.py, rates.py).
"""
