r"""User-level privacy in two ways: sample users (ULS), or sample examples and account for all examples of a user (ELS).

Both make B = ``batch_size`` example gradients in a step, so they cost the same time:

| | who is in a step | what is clipped | event of a user |
|---|---|---|---|
| ULS, k examples | a user with probability q = B / (k N), and k of its examples | its gradient | Poisson(q) Gaussian(sigma) |
| ELS, at most k | an example with probability p = B / (k N); data cut to k a user | its gradient | Gaussian mixture, Binomial(k, p) |

Which one needs less noise depends on how alike one user's examples are. An example's gradient is taken to have mean square norm 1, of which
``within`` is what differs between examples of one user: the mean of k of them has mean square norm 1 - within + within / k, which is
what a user is clipped to. The noise in the mean gradient is then, per coordinate and in units of one example's norm,

    ULS: sigma sqrt(1 - within + within / k) / (B / k),        ELS: sigma / B.

References: Ganesh, "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms" (2024), for the event of
ELS; Charles et al., "Fine-tuning large language models with user-level differential privacy" (2024), for the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hushgrad import _check
from hushgrad.accounting import calibrate, for_group
from hushgrad.errors import ArgumentError
from hushgrad.events import Event, Gaussian, Poisson, Sampled
from hushgrad.train.plan import Plan

_TOLERANCE = 1e-3  # of the noise of examples, which is ranked, and rounded up by calibration


@dataclass(frozen=True, kw_only=True)
class UserCandidate:
    """A calibrated plan for privacy of users.

    | field | meaning |
    |---|---|
    | ``plan`` | the run: its unit is the user (give ``Units(owners, examples=, cap=cap)`` as ``groups``), or the example |
    | ``cap`` | examples of one user: in a step, or (for a plan over examples) in all the data |
    | ``event`` | what one *user* sees of the run; its epsilon is within the budget |
    | ``noise`` | in the mean gradient, per coordinate, in units of one example's gradient |
    | ``relative`` | the same divided by that of the best candidate |
    """

    name: str
    plan: Plan
    cap: int
    event: Event
    noise: float
    relative: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, the plan included."""
        return {**vars(self), "plan": self.plan.to_json(), "event": self.event.to_json()}


def compare_users(
    *,
    epsilon: float,
    delta: float,
    users: int,
    per_user: int,
    batch_size: int,
    steps: int,
    within: float = 0.5,
    max_grad_norm: float = 1.0,
) -> list[UserCandidate]:
    """Sampling of users against sampling of examples under one budget *per user*, best first; see the table of this module.

    **Formal guarantee.** Every plan that is returned gives users (``epsilon``, ``delta``)-DP under adding or removing all records of one
    user, if the data hold at most ``cap`` examples of each (plans over examples). The choice uses public numbers only.

    Args:
        epsilon: of the whole run, for one user.
        delta: of the guarantee.
        users: a public number of users.
        per_user: examples of each user, at most; all powers of two up to it are tried as caps.
        batch_size: expected examples in a step.
        steps: number of steps.
        within: the part of an example's squared gradient norm that differs between examples of one user, from 0 to 1: a guess, or known
            from public data.
        max_grad_norm: the clip norm of one example's gradient; that of users follows from it.

        >>> found = compare_users(epsilon=8.0, delta=1e-5, users=1000, per_user=4, batch_size=64, steps=50)
        >>> found[0].relative, found[0].noise <= found[-1].noise
        (1.0, True)
    """
    _check.positive(epsilon=epsilon)
    _check.positive(max_grad_norm=max_grad_norm)
    _check.delta(delta=delta)
    _check.positive_int(users=users)
    _check.positive_int(per_user=per_user)
    _check.positive_int(batch_size=batch_size)
    _check.positive_int(steps=steps)
    if not 0 <= within <= 1:
        _check.fail("within", within, "to lie in [0, 1]")
    ways = list(_ways(users, per_user, batch_size))
    if not ways:
        raise ArgumentError(f"Expected batch_size={batch_size} to be at most all examples: {users} users x {per_user}.")
    found = [_calibrated(way, epsilon, delta, users, batch_size, steps, within, max_grad_norm) for way in ways]
    found.sort(key=lambda one: one.noise)
    return [UserCandidate(**{**vars(one), "relative": one.noise / found[0].noise}) for one in found]


def _ways(users: int, per_user: int, batch_size: int) -> Iterator[tuple[bool, int, float]]:
    """(users are sampled, cap, rate)."""
    caps = sorted({*(1 << i for i in range(per_user.bit_length())), per_user})
    for cap in caps:
        if batch_size <= users * cap:
            if cap <= batch_size:
                yield True, cap, batch_size // cap / users
            if cap > 1:  # with one example per user both are the same
                yield False, cap, batch_size / (users * cap)


def _calibrated(
    way: tuple[bool, int, float],
    epsilon: float,
    delta: float,
    users: int,
    batch_size: int,
    steps: int,
    within: float,
    max_grad_norm: float,
) -> UserCandidate:
    of_users, cap, rate = way

    def event(sigma: float) -> Event:
        run = Sampled(Poisson(rate), Gaussian(sigma)) * steps
        return run if of_users else for_group(run, cap)

    sigma = calibrate(event, epsilon=epsilon, delta=delta, tolerance=_TOLERANCE)
    alike = math.sqrt(1 - within + within / cap)
    options: dict[str, Any] = {"noise_multiplier": sigma, "delta": delta, "steps": steps}
    if of_users:
        size = batch_size // cap  # users in a step
        clip = max_grad_norm * cap * alike  # a user's gradient is the sum over its examples
        plan = Plan.dpsgd(**options, batch_size=size, dataset_size=users, max_grad_norm=clip, unit="user")
        noise = sigma * alike / size
        return UserCandidate(
            name=f"users, {cap} examples each", plan=plan, cap=cap, event=event(sigma), noise=noise, relative=1.0
        )
    plan = Plan.dpsgd(**options, batch_size=batch_size, dataset_size=users * cap, max_grad_norm=max_grad_norm)
    name = f"examples, at most {cap} of a user"
    return UserCandidate(name=name, plan=plan, cap=cap, event=event(sigma), noise=sigma / batch_size, relative=1.0)
