"""Which data sets are neighbours, and what a mechanism reveals of an absent record."""

from __future__ import annotations

import enum

from hushgrad import _check


class Relation(enum.Enum):
    """When two data sets are neighbours. A guarantee compares the outputs on neighbours, so it is meaningless without a relation.

    | relation | neighbours | distance of the two sums of a query (contributions of norm at most 1) |
    |---|---|---|
    | ``ADD_REMOVE`` | one record is added or removed | 1 |
    | ``REPLACE_ONE`` | one record is replaced by any other; the size is public | 2 |
    | ``ZERO_OUT`` | one record is replaced by a null record that contributes 0; the size is public | 1 |

        >>> Relation.of("replace_one")
        <Relation.REPLACE_ONE: 'replace_one'>
        >>> print(Relation.REPLACE_ONE, Relation.REPLACE_ONE.contributions)
        replace one 2
    """

    ADD_REMOVE = "add_remove"
    REPLACE_ONE = "replace_one"
    ZERO_OUT = "zero_out"

    def __str__(self) -> str:
        return {"add_remove": "add/remove one", "replace_one": "replace one", "zero_out": "zero out one"}[self.value]

    @classmethod
    def of(cls, relation: Relation | str) -> Relation:
        """The relation named by a string such as ``"replace_one"``; a relation is returned as it is."""
        if isinstance(relation, Relation):
            return relation
        return cls(_check.one_of([r.value for r in cls], relation=relation))

    @property
    def contributions(self) -> int:
        """How many bounded contributions the two neighbouring sums differ by: 2 for ``REPLACE_ONE``, else 1."""
        return 2 if self is Relation.REPLACE_ONE else 1


class Absent(enum.Enum):
    """What a mechanism reveals of a record that is absent or null; amplification by sampling depends on it.

    | value | meaning |
    |---|---|
    | ``NOTHING`` | as if it contributed 0: the output's distribution is the same without it. Noise added to a sum is like that |
    | ``UNKNOWN`` | its place may be visible: a mechanism may print how many records it was given |

        >>> from hushgrad.events import Gaussian, PureDP
        >>> Gaussian(1.0).absent, PureDP(1.0).absent, PureDP(1.0, absent="nothing").absent
        (<Absent.NOTHING: 'nothing'>, <Absent.UNKNOWN: 'unknown'>, <Absent.NOTHING: 'nothing'>)
    """

    NOTHING = "nothing"
    UNKNOWN = "unknown"


class Answers(enum.Enum):
    """Whether what a mechanism releases says which records it comes from.

    | value | meaning |
    |---|---|
    | ``ANONYMOUS`` | a function of the records as a set: a name, where there is one, is part of the record |
    | ``NAMED`` | each answer stands beside its record's name, which is public |
    | ``UNKNOWN`` | nobody said; then the worse of the two is assumed |

        >>> from hushgrad.events import Gaussian, RandomizedResponse
        >>> Gaussian(1.0).answers, RandomizedResponse(0.5).answers, RandomizedResponse(0.5, answers="named").answers
        (<Answers.ANONYMOUS: 'anonymous'>, <Answers.UNKNOWN: 'unknown'>, <Answers.NAMED: 'named'>)
    """

    ANONYMOUS = "anonymous"
    NAMED = "named"
    UNKNOWN = "unknown"
