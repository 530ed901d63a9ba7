"""Every heuristic number of the accountants, in one place, each with its reason.

None of them enters a proof: another choice costs time or a wider interval, never correctness
(``tests/laws/test_accounting_heuristics.py`` draws them at random). Numbers that proofs rest on, such as bounds on rounding, stand beside
their proofs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Heuristics:
    """How much work the accountants do, and where their searches begin."""

    # An answer.
    width: float = 1e-4  # relative width of an interval: takes milliseconds, and a fifth digit is never reported
    width_above: float = 0.62  # share of the width allowed to the upper end, which needs the finer grid
    width_below: float = 0.35  # share allowed to the lower end; the rest is slack for rough estimates
    coarse: float = 0.02  # width for very many steps in a direction that is expected to be the smaller one
    retries: int = 2  # of a lower bound that missed its width; a third never helped
    net: int = 32  # up to this many distinct events a Rényi bound is computed as well; each takes milliseconds

    # Grids and windows of a composition.
    cells: int = 2**21  # of the FFT's window: keeps a question below about 150 MB
    few_cells: int = 4096  # a window this small is cheap, so the grid may be finer than needed
    rough: float = 0.02  # relative error of epsilon at which a grid is chosen from a first, coarse composition
    attempts: int = 4  # windows to try, each with a stricter error allowance; usually two
    resolved: float = 50.0  # least number of grid steps from zero to an answer; with fewer the grid is refined
    alone: int = 32  # parts that are bounded one by one if composition is out of reach
    short: tuple[float, ...] = (0.01, 0.1, 0.4)  # shares of delta for rare large losses, tried where rounding dominates
    fitted_atoms: int = 128  # atoms to which a grid can be fitted; more are treated as a density
    candidates: int = 512  # steps of a grid that are compared for how well they hit the atoms
    finer: float = 0.6  # the factor between two rounds of candidates
    rounds: int = 14  # 0.6^14 is a thousandth, and a finer grid is out of reach
    few_atoms: int = 2**14  # atoms of one curve; more are treated as a density
    endless: int = 2**26  # grid points over the losses of one step, before thinning
    most_points: int = 2**16  # on one side of a step's grid, about: a transform of that many takes a millisecond
    passes: int = 200  # of the hull algorithm; the proof notices a hull that is not finished

    # The saddle point.
    moment_points: int = 160  # of the quadrature for cumulants: three digits, enough to choose a window
    largest_tilt: float = 1e9  # deltas near 1e-300 of a million steps need 1e5
    exponents: tuple[float, ...] = (0.01, 0.0241, 0.0581, 0.14, 0.2, 0.2779, 0.386, 0.5364, 0.7452, 1.0354, 1.4389, 2.0)
    """of Chernoff bounds, over the one that is best for a Gaussian; the small ones for rare large losses"""
    tilts: tuple[float, ...] = (0.85, 0.7, 0.55, 0.4, 0.25, 0.12, 0.05)  # fractions of the saddle point's tilt to try

    # Very many different steps.
    merged: int = 300  # more different curves than this are merged, since each needs a transform
    merged_below: int = 2500  # largest number of cells from below: a composition then takes some seconds
    merged_ratio: float = 0.35  # the largest ratio of the sides of a cell of mixtures; the series converges below one half
    merged_above: int = 1200  # cells of mixtures at most, four transforms each
    merged_tilt: float = 30.0  # how much more mixtures may cost than estimated: large losses count more, and are more sensitive
    merged_share: float = 0.6  # of the wanted width that merging may cost

    # Random allocation. Not finer than 150: the error of a cell's mass (``CELLS``) is proved for cells of 1/150.
    allocation_tail: float = 1e-30  # P's and Q's masses that an addition may leave at the ends
    allocation_fineness: int = 150  # places per spread of a partial mean: the width then is 5e-5
    allocation_core: float = 8.0  # spreads around the mean that get all of them; farther out one large term makes the sum
    exchange_tail: float = 1e-20  # of the moment that an addition of signed terms may leave out
    exchange_deep: float = 9.7  # standard deviations of a Gaussian with that little beyond
    exchange_fineness: int = 60  # places per spread: one epsilon then takes a tenth of a second
    exchange_places: int = 2000  # of a sum at most, about, where terms are of all sizes: a tenth of a second again
    exchange_small: float = 1e-7  # sums this small relative to 1 are negligible
    exchange_large: float = 200.0  # spreads from here on have terms of all sizes: small sums get places of their own
    exchange_left: float = 1e-5  # the share of delta that an addition may leave out at either end, from below
    exchange_alone: int = 4  # epsilons asked together that are worth the finer nodes
    exchange_nodes: int = 320  # epsilons with a value of their own, if one epsilon is asked
    exchange_few_nodes: int = 80  # for a whole curve: every fourth

    # Choices of exponential mechanisms.
    choice_work: float = 1.2e8  # numbers to be computed, about: a second
    choice_finest: int = 400  # steps of the grid per range: the width then is 1e-5
    choice_coarsest: int = 4  # a coarser one is wider than the Rényi bound
    choice_longest: float = 10.0  # a step of the grid: beside such losses the sum of the largest ones is as good

    # Tables, samples that are cut, groups.
    widest_table: float = 1e5  # sigma of a discrete Gaussian: 74 sigma atoms are 60 MB
    most_atoms: int = 8_000_000  # of a discrete Laplace distribution: the same
    # survivors of cuts per record of a full batch: from here on some stay, then all
    frequent_cuts: tuple[float, float] = (5.0, 35.0)
    group_cells: int = 1024  # distinct numbers of participants: with more, one question takes seconds
    group_counts: int = 4_000_000  # that are added up: a second
    trials_block: int = 4096  # probabilities of numbers of trials that are made together

    # Calibration.
    first_step: float = 0.02  # of the expansion, in ln of the unknown: guesses are often that good
    growth: float = 4.0  # of the following steps: from 2 % to a factor of a million in ten
    # of the way to where a line through two answers crosses: epsilon is convex in the unknown, so that it falls short
    beyond: float = 1.2
    farthest: float = 1.0  # in ln of the unknown: lines are not trusted beyond
    most_evaluations: int = 200  # bisection of the widest range to the finest tolerance takes 40

    # Rényi bounds and filters.
    quadrature_points: int = 60_000  # with more points the integral is too slow, and the bound without sampling is used
    largest_order: int = 4096  # integer sums are not taken further, for the same reason
    most_copies: float = 0.85  # of the copies of a plan that the best order admits: an order nearer to the budget's own may do

    # ln(order - 1) of filters: first, last, step; 6 % between two sums
    order_logs: tuple[float, float, float] = (-3.0, 9.0, 0.15)
    # the same for a budget alone: tiny epsilons need orders of 1e10
    fine_order_logs: tuple[float, float, float] = (-3.0, 24.0, 0.03)
    # the part of delta that advanced composition takes, if Gaussians want some
    slacks: tuple[float, ...] = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9)
    least_copies: float = 0.95  # of the Gaussian steps that the best order admits, if nothing is known about the steps

    # The estimate by a contour.
    contour_block: int = 1_500_000  # points of one block of the double integral: 50 MB
    contour_nodes: int = 3000  # if the contour needs more, no estimate is given


HEURISTICS = Heuristics()
