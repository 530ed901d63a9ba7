"""Accounting alone: what does a run cost that was done elsewhere? No torch, no data.

python examples/accounting_only.py
"""

from hushgrad.accounting import calibrate, epsilon
from hushgrad.events import Gaussian


def main() -> float:
    # Ten thousand steps; each takes 1 % of the records at random and adds noise of 1.1 times the clip norm.
    run = Gaussian(1.1).sampled(rate=0.01) * 10_000
    spent = epsilon(run, delta=1e-5)
    print(f"{run}: epsilon {spent:.3f} at delta 1e-5")

    # Runs on the same data add up.
    print(f"and a second phase: {epsilon(run + Gaussian(5.0) * 3, delta=1e-5):.3f}")

    # The other way round: which noise meets a budget?
    multiplier = calibrate(lambda noise: Gaussian(noise).sampled(rate=0.01) * 10_000, epsilon=2.0, delta=1e-5)
    print(f"epsilon 2 needs a noise multiplier of {multiplier:.4f}")
    return spent


if __name__ == "__main__":
    main()
