"""Budget ledger: data sets with budgets, reservations before a run, commits after it, a hash chain through all of it.

    >>> import tempfile
    >>> from hushgrad.budget import Ledger
    >>> from hushgrad.events import Gaussian
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger.create(f"{folder}/budget.db")
    ...     _ = ledger.add("patients", epsilon=1.0, delta=1e-6)
    ...     ledger.reserve("patients", Gaussian(2.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    hushgrad.errors.BudgetExceeded: Run refused: with it 'patients' would have spent epsilon 2.255 of 1 ...

| file | what is in it |
|---|---|
| ``values`` | data sets, reservations, statuses |
| ``rows`` | the rows and their hash chain |
| ``books`` | data sets and charges, replayed from the rows |
| ``pricing`` | the joint cost of charges, and what would still fit |
| ``store``, ``sqlite``, ``postgresql`` | storage of the rows |
| ``policy`` | what an organisation allows |
| ``folder`` | an upper bound on the steps of a killed run, from its folder |
| ``chain`` | rows read, appended under the lock, verified |
| ``admission`` | reservations before a run begins |
| ``ledger`` | the ledger itself: data sets, commits and approvals |
"""

from hushgrad.budget.chain import Verification
from hushgrad.budget.ledger import Ledger
from hushgrad.budget.policy import Policy, read_policy
from hushgrad.budget.rows import BrokenChain, Row
from hushgrad.budget.values import Dataset, Reservation, Status

__all__ = ["BrokenChain", "Dataset", "Ledger", "Policy", "Reservation", "Row", "Status", "Verification", "read_policy"]
