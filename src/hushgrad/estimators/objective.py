r"""Objective perturbation: minimise the loss plus a random linear term.

    θ = argmin  Σ_i ℓ(θ; x_i, y_i) + λ/2 ‖θ‖² + ⟨b, θ⟩,    b ~ N(0, σ² I)

**Theorem (vertices).** Let the gradient of any one example's loss lie, for every θ, in the convex hull of 0 and v_1, ..., v_m, which
depend on the example but not on θ, and let J bound log det(I + ∇²ℓ/λ). For every epsilon >= J the released θ satisfies

    delta(epsilon) <= Σ_j H(‖v_j‖/σ, epsilon - J),

where H(μ, e) = Φ(μ/2 - e/μ) - e^e Φ(-μ/2 - e/μ) is the Gaussian mechanism's profile. Under replace-one the vertices are those of
the differences of two such hulls.

*Proof.* b ↦ θ is a bijection, Lipschitz both ways as the objective is strongly convex with a Lipschitz gradient. Its inverse is
b_D(θ) = -∇(Σ ℓ + λ/2 ‖·‖²)(θ), so θ has density φ_σ(b_D(θ)) det(∇²). For D' = D plus one example with gradient g(θ) and Hessian
A(θ), b_D' = b_D - g, and the determinants' ratio lies between 1 and det(I + A/λ) <= e^J, because the rest of the Hessian is at least
λI. With b = b_D(θ) ~ N(0, σ²I) the privacy loss of D against D' is therefore at most ‖g‖²/2σ² - ⟨b, g⟩/σ², and that of D' against D
at most J plus the same with the other sign. Given b this is a convex function of g, so over the hull it is largest at a vertex: the
loss is at most J + max(0, G_1, ..., G_m), G_j = ‖v_j‖²/2σ² + ⟨b, v_j⟩/σ² up to sign, which is exactly the privacy loss of a Gaussian
mechanism with μ = ‖v_j‖/σ. Finally delta(epsilon) = E[(1 - e^{epsilon - loss})_+], the term of 0 vanishes as epsilon >= J, and the
maximum of the others is at most their sum. ∎

**Theorem (logistic).** For logistic regression with rows of norm at most R and λ >= R²/epsilon, under add/remove,

    delta(epsilon) <= H(R/σ, epsilon):

the curvature costs nothing, and objective perturbation is as private as the Gaussian mechanism on the summed gradient.

*Proof.* The one vertex is v = -y x, and the gradient s v, 0 < s < 1, comes with the curvature s(1 - s): where the gradient is at its
vertex, the determinant does not move. Put a = ‖x‖/σ, r = ‖x‖²/λ <= epsilon; the loss is at most f(s) = log(1 + s(1-s) r) + s²a²/2 + s a u
with a standard Gaussian u, and f(1) = G. As f(1) - f(s) >= (1-s)((1+s)a²/2 + a u - s r), which is linear in s inside the brackets, the
maximum is f(1) = G if a u >= max(-a²/2, r - a²). Otherwise either a u < r - a², and f(s) <= r(2s - s²) - s a² + s²a²/2 <= r <= epsilon;
or a u < -a²/2, and f(s) <= s(1-s)(r - a²/2) <= r/4 <= epsilon. So the loss exceeds epsilon only where it is at most G. ∎

Under replace-one the other record adds its vertices -v': f gains G_{-v'} and, where its maximum is not at s = 1, at most r more, so
delta(epsilon) <= H(2R/σ, epsilon) + H(R/σ, epsilon) + H(R/σ, epsilon - r).

Both bounds improve on the profile of Redberg, Koskela and Wang (2023), which is the vertex theorem for the two vertices ±v.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy.optimize import brentq

from hushgrad import _check
from hushgrad._printed import at_most
from hushgrad.accounting.gaussian import gaussian_delta, gaussian_mu
from hushgrad.errors import ArgumentError
from hushgrad.estimators.losses import LinearLoss
from hushgrad.events import Relation


class Term(NamedTuple):
    """One term of the bound: ``copies`` x H(``norm``/σ, epsilon - ``price``)."""

    norm: float
    copies: int
    price: float


def profile(loss: LinearLoss, *, row_norm: float, l2: float, relation: Relation, epsilon: float) -> tuple[Term, ...]:
    """The terms of the better of the two theorems that hold at this ``epsilon``.

    >>> from hushgrad.estimators.losses import Logistic, Softmax
    >>> profile(Logistic(), row_norm=1.0, l2=10.0, relation=Relation.ADD_REMOVE, epsilon=0.1)
    (Term(norm=1.0, copies=1, price=0.0),)
    >>> [round(t.price, 3) for t in profile(Softmax(3), row_norm=1.0, l2=10.0, relation=Relation.ADD_REMOVE, epsilon=0.1)]
    [0.066]
    """
    ratio = row_norm**2 / l2
    one = [(norm * row_norm, count) for norm, count in loss.vertices()]
    if loss.curvature_vanishes_at_vertex and relation.contributions * ratio <= epsilon:
        single = Term(one[0][0], 1, 0.0)
        other = Term(one[0][0], 1, ratio)
        return (single,) if relation is not Relation.REPLACE_ONE else (single._replace(norm=2 * single.norm), single, other)
    price = loss.log_det(ratio)
    terms = [Term(norm, count, price) for norm, count in one]
    if relation is Relation.REPLACE_ONE:
        # g - g' over two hulls: a vertex of the one, of the other, or a difference of two (their norms add at most).
        terms += terms + [Term(a + b, m * k, price) for a, m in one for b, k in one]
    return tuple(terms)


def objective_delta(epsilon: float, *, sigma: float, terms: tuple[Term, ...]) -> float:
    """The theorems' bound on delta at ``epsilon``; 1 where they say nothing (epsilon below a price)."""
    if any(epsilon < term.price for term in terms):
        return 1.0
    return min(1.0, sum(term.copies * gaussian_delta(term.norm / sigma, epsilon - term.price) for term in terms))


def objective_noise(epsilon: float, delta: float, *, terms: tuple[Term, ...]) -> float:
    """The smallest sigma that the theorems allow for (epsilon, delta).

    >>> round(objective_noise(0.1, 1e-5, terms=(Term(norm=1.0, copies=1, price=0.0),)), 2)
    30.75
    """
    price = max(term.price for term in terms)
    if epsilon <= price:
        raise ArgumentError(
            f"Expected epsilon={at_most(epsilon, 6)} to exceed the curvature's price {price:g}. Use a larger l2, which lowers that price."
        )
    largest, total = max(term.norm for term in terms), sum(term.copies for term in terms)
    low = largest / gaussian_mu(epsilon, delta) * (1 - 1e-9)  # one vertex, no price
    high = largest / gaussian_mu(epsilon - price, delta / total) * (1 + 1e-9)  # all at the largest norm and price

    def excess(sigma: float) -> float:
        return math.log(objective_delta(epsilon, sigma=sigma, terms=terms) / delta)

    sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))
    return sigma * (1 + 2e-9)  # on the safe side of the root


def pure_noise(epsilon: float, *, loss: LinearLoss, row_norm: float, l2: float, relation: Relation) -> float:
    """The scale s of noise with density exp(-‖b‖/s) that makes objective perturbation ``epsilon``-DP with delta 0.

    The same proofs with ‖b‖ - ‖b - g‖ <= ‖g‖: epsilon = J + max ‖v‖ / s (Chaudhuri, Monteleoni and Sarwate 2011, theorem 9); for
    logistic regression J = 0 once R²/λ <= R/s, as log(1 + s'(1-s') r) + s' R/s is then largest at s' = 1.
    """
    ratio = row_norm**2 / l2
    reach = loss.lipschitz * row_norm * relation.contributions
    free = loss.curvature_vanishes_at_vertex and ratio <= epsilon / relation.contributions
    price = 0.0 if free else loss.log_det(ratio)
    if epsilon <= price:
        _check.fail("epsilon", epsilon, f"to exceed the curvature's price {price:g}", "Use a larger l2.")
    return reach / (epsilon - price)
