"""Words that workers, load and judge have in common; `OPEN` and `LOOKED` are kinds of rows of the provider."""

OPEN = "soak_open_transaction"
LOOKED = "soak_looked"
LEASE, DEADLINE, LAG = 3.0, 4.0, 3.0
"""Seconds: of a lease, and of the effects."""
WHY = "by chance"
"""Why an operator cancels."""
