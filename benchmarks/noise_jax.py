"""jax-privacy's side of noise.py and noise_speed.py, run by them in the interpreter that has it: figures as JSON on standard output.

python benchmarks/noise_jax.py {optimisers,rows} [--size N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz
from jax_privacy.noise_addition import matrix_factorization_privatizer

BAND, BLOCK, REPEATS = 64, 16, 4
COLUMN = [1.0] + [0.5 / (j + 1) ** 1.5 for j in range(BAND - 1)]
DECAY, WEIGHT = (0.99, 0.9, 0.6, 0.2), (0.1, 0.1, 0.1, 0.1)


def optimisers() -> dict[str, float]:
    """Seconds to find a strategy, compilation included, as a user waits for it."""
    calls: dict[str, Callable[[], object]] = {
        "BLT(3) mean": lambda: buffered_toeplitz.optimize(n=1024, min_buffers=3, max_buffers=3),
        "Banded optimised (8)": lambda: toeplitz.optimize_banded_toeplitz(n=1024, bands=8),
    }
    seconds = {}
    for name, call in calls.items():
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds[name] = time.perf_counter() - begin
    return seconds


def rows(size: int) -> dict[str, float]:
    """Smallest CPU nanoseconds per number of a row of noise; the contestants take turns."""
    blt = buffered_toeplitz.BufferedToeplitz.build(buf_decay=jnp.array(DECAY), output_scale=jnp.array(WEIGHT), dtype=jnp.float32)
    matrices = {
        "identity": toeplitz.inverse_as_streaming_matrix(jnp.array([1.0])),
        f"banded({BAND})": toeplitz.inverse_as_streaming_matrix(jnp.array(COLUMN)),
        "BLT(4)": blt.inverse_as_streaming_matrix(),
    }
    zeros = jnp.zeros(size)
    steps = {name: _step(matrix, zeros) for name, matrix in matrices.items()}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(REPEATS):
        for name, step in steps.items():
            begin = time.process_time()
            for _ in range(BLOCK):
                step()
            best[name] = min(best[name], (time.process_time() - begin) / BLOCK / size * 1e9)
    return best


def _step(matrix: object, zeros: jax.Array) -> Callable[[], None]:
    privatizer = matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=jax.random.key(0))
    state = privatizer.init(zeros)
    update = jax.jit(privatizer.update, donate_argnums=1)

    def step() -> None:
        nonlocal state
        noisy, state = update(zeros, state)
        jax.block_until_ready(noisy)

    step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["optimisers", "rows"])
    parser.add_argument("--size", type=int, default=1_000_000)
    options = parser.parse_args()
    print(json.dumps(optimisers() if options.what == "optimisers" else rows(options.size)))


if __name__ == "__main__":
    main()
