"""What a ledger speaks of: data sets with budgets, reservations, statuses. Frozen, public, with one JSON form."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass, field

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad._value import LATER, Value
from hushgrad.events import Event, Relation

COMPOSITIONS = ("adaptive", "pld", "rdp", "zcdp", "gdp")
# Letters of other alphabets that look like Latin ones (Unicode TR 39, the common ones), letters without their stroke or dot, digits and
# signs that look like a letter or like another sign.
_TWINS = str.maketrans(
    "аеорсухіјѕһԁԛԝвмткнгѵӏαβεηικμνορτυχγωօոսհɑɡıłø01|ǀ−‘’´`“”∕⁄∶꞉․",
    "aeopcyxijshdqwbmtkhrvlabehikuvoptuxywonuhagilool" + "ll-''''\"\"//::.",
)
_SHAPES = (("i", "l"), ("rn", "m"), ("vv", "w"))  # a capital I is an l in many a font; letters that meet are another one
_BLANK = "\u3164\u2800\u115f\u1160\uffa0"  # letters and signs of which nothing is seen


class _Account(Value, family="account"):
    """Family of the values of this room."""


def name_of(what: str, name: object) -> str:
    """A name that can be printed, typed and put into one line."""
    remedy = "Use letters, digits, spaces and punctuation, at most 200 of them."
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        _check.fail(what, name, "to be a short name in one line", remedy)
    return name


def looks_like(name: str) -> str:
    """One form for all names that a person could take for each other: look-alikes, case, spaces, dashes and accents aside.

    Where case does not count, ``i`` and ``l`` are one letter, because ``I`` and ``l`` are one shape.

    >>> looks_like("Patients ") == looks_like("patients") == looks_like("pаtients")  # the last one has a Cyrillic a
    True
    """
    plain = unicodedata.normalize("NFKD", name).casefold().translate(_TWINS)
    seen = [letter for letter in plain if unicodedata.category(letter)[0] not in "CMZ" and letter not in _BLANK]
    word = "".join("-" if unicodedata.category(letter) == "Pd" else letter for letter in seen)
    for one, other in _SHAPES:
        word = word.replace(one, other)
    return word


@dataclass(frozen=True, kw_only=True)
class Dataset(_Account):
    """A data set and the budget of everything that is ever released about it.

    **Formal guarantee.** All runs that the ledger admits are together (``epsilon``, ``delta``)-DP per ``unit`` under
    ``relation``, provided that each run is what its event says, and:

    | ``composition`` | how runs add up | what may depend on earlier results |
    |---|---|---|
    | ``"adaptive"`` with a ``plan`` | each step uses up one of the plan's that dominates it (``Filter``, ``"pool"``) | everything |
    | ``"adaptive"`` without | by the first run: the Rényi filter at its best order, or a pool if only that fits | everything |
    | ``"rdp"``, ``"zcdp"``, ``"gdp"`` | a privacy filter | everything (Feldman and Zrnic 2021, theorem 3.1; see ``Filter``) |
    | ``"pld"`` | numerically, tight | what a run computes, but not its *event*: noise, steps and rates are fixed beforehand |

        >>> print(Dataset(name="patients", epsilon=3.0, delta=1e-6))
        patients: epsilon 3, delta 1e-06 per example (add/remove one), composed by adaptive
    """

    name: str
    epsilon: float
    delta: float
    unit: str = "example"
    relation: Relation = Relation.ADD_REMOVE
    composition: str = "adaptive"
    plan: Event | None = field(default=None, metadata=LATER)
    first: Event | None = field(default=None, metadata=LATER)  # what the first run reserved; the ledger fills it in

    def __post_init__(self) -> None:
        self._keep(
            name=name_of("name", self.name),
            epsilon=_check.positive(epsilon=self.epsilon),
            delta=_check.delta(delta=self.delta),
            unit=name_of("unit", self.unit),
            relation=Relation.of(self.relation),
            composition=_check.one_of(COMPOSITIONS, composition=self.composition),
        )
        if self.plan is not None:
            _check.instance(Event, plan=self.plan)
            if self.composition != "adaptive":
                _check.fail("plan", str(self.plan), "to be given for composition='adaptive' only")

    def __str__(self) -> str:
        budget = f"epsilon {at_most(self.epsilon, 6)}, delta {at_most(self.delta, 6)} per {self.unit}"
        return f"{self.name}: {budget} ({self.relation}), composed by {self.composition}"


@dataclass(frozen=True, kw_only=True)
class Reservation(_Account):
    """One run's place in the budget. ``charged`` is what counts now: at first what was ``reserved``, later what happened.

    | ``state`` | meaning |
    |---|---|
    | ``"held"`` | reserved; the run may not begin before :meth:`Ledger.begin`, so it can still be cancelled |
    | ``"begun"`` | the run may have released something: charged in full until it is committed or settled |
    | ``"committed"`` | finished; charged for what it did |
    | ``"settled"`` | it ended early; charged for the steps that it may have taken |
    | ``"cancelled"`` | it never began; charged for nothing |

        >>> import tempfile
        >>> from hushgrad.budget import Ledger
        >>> from hushgrad.events import Gaussian
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = Ledger.create(f"{folder}/budget.db")
        ...     _ = ledger.add("people", epsilon=3.0, delta=1e-6)
        ...     mine = ledger.reserve("people", Gaussian(4.0), run="first")
        ...     mine.state, mine.charged == mine.reserved
        ('begun', True)
    """

    id: str
    dataset: str
    run: str
    reserved: Event
    charged: Event
    state: str
    overrun: bool = False
    since: str = ""
    approved: tuple[str, ...] = field(default=(), metadata=LATER)  # by whom
    model: str = field(default="", metadata=LATER)  # SHA-256 of the model file that was booked with the commit
    owner: str = field(default="", metadata=LATER)  # a digest of the token that the run's last life has: who lacks it is a copy
    identity: str = field(default="", metadata=LATER)  # the run's name, which follows from its key

    @property
    def is_open(self) -> bool:
        """Whether the run may still be going on."""
        return self.state in ("held", "begun")


@dataclass(frozen=True, kw_only=True)
class Status(_Account):
    """How much of a data set's budget is spent, counting every open reservation in full.

    ``epsilon`` is the composed epsilon of all charges at the budget's delta; under a filter it is the used share of the
    budget's epsilon, and under ``"adaptive"`` the larger of the two.
    Under ``"pld"`` any ``left``-DP run still fits, and often a costlier one: epsilons do not simply add up.

        >>> import tempfile
        >>> from hushgrad.budget import Ledger
        >>> from hushgrad.events import Gaussian
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = Ledger.create(f"{folder}/budget.db")
        ...     _ = ledger.add("people", epsilon=3.0, delta=1e-6)
        ...     _ = ledger.reserve("people", Gaussian(4.0), run="first")
        ...     print(f"{ledger.status('people').epsilon:.3f}")
        1.061
    """

    dataset: Dataset
    epsilon: float
    committed_epsilon: float
    reservations: tuple[Reservation, ...]

    @property
    def left(self) -> float:
        """The budget's epsilon less what is spent; 0 if nothing is left."""
        return max(0.0, self.dataset.epsilon - self.epsilon)

    @property
    def used(self) -> float:
        """The spent fraction of the budget; above 1 only after an overrun."""
        return self.epsilon / self.dataset.epsilon

    @property
    def exceeded(self) -> bool:
        """Whether more was spent than the budget allows: a run did more than it had reserved."""
        return not self.epsilon <= self.dataset.epsilon

    @property
    def open(self) -> tuple[Reservation, ...]:
        """The reservations of runs that may be going on."""
        return tuple(r for r in self.reservations if r.is_open)

    @property
    def overruns(self) -> tuple[Reservation, ...]:
        """The runs that did more than they had reserved."""
        return tuple(r for r in self.reservations if r.overrun)

    def __str__(self) -> str:
        spent = "an infinite epsilon" if math.isinf(self.epsilon) else f"epsilon {at_most(self.epsilon)}"
        runs = f"{len(self.reservations)} runs, {len(self.open)} open"
        warning = " EXCEEDED." if self.exceeded else ""
        return (
            f"{self.dataset.name}: {spent} of {at_most(self.dataset.epsilon, 6)} at delta "
            f"{at_most(self.dataset.delta, 6)}; {runs}.{warning}"
        )
