"""The step benchmark's peer in JAX: jitted plain SGD and jax-privacy, for an interpreter that has them.

    path/to/jax/python benchmarks/step_jax.py mlp 64 [--seconds 5]

benchmarks/step.py --jax-python PATH runs it. It prints one line of JSON: the plain step in milliseconds of CPU time, and the ratio of the
private step, which processes 8 examples at a time (un-microbatched it takes tens of seconds for the MLP on a CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
from jax_privacy import clipping

CLIP, SIGMA, RATE, MICRO = 1.0, 1.0, 0.01, 8
WIDTHS = {"logreg": (784, 10), "mlp": (784, 1024, 1024, 10)}
Params = list[tuple[jax.Array, jax.Array]]


def dense(key: jax.Array, widths: tuple[int, ...]) -> Params:
    keys = jax.random.split(key, len(widths))
    shapes = zip(keys, widths, widths[1:], strict=False)
    return [(jax.random.normal(k, (d, p)) / d**0.5, jnp.zeros(p)) for k, d, p in shapes]


def through(layers: Params, x: jax.Array) -> jax.Array:
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


def cnn_parameters(key: jax.Array) -> Params:
    a, b, c = jax.random.split(key, 3)
    kernels = [
        (jax.random.normal(a, (16, 1, 8, 8)) / 8, jnp.zeros(16)),
        (jax.random.normal(b, (32, 16, 4, 4)) / 16, jnp.zeros(32)),
    ]
    return [*kernels, *dense(c, (512, 32, 10))]


def cnn(params: Params, x: jax.Array) -> jax.Array:
    for (w, b), stride, pad in zip(params[:2], (2, 2), (3, 0), strict=True):
        x = jax.lax.conv(jnp.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad))), w, (stride, stride), "VALID")
        x = jax.nn.relu(x + b[:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
    return through(params[2:], x.reshape(len(x), -1))


def problem(case: str, size: int) -> tuple[Callable[[Params, jax.Array], jax.Array], Params, tuple[jax.Array, jax.Array]]:
    """The network, its parameters and a batch."""
    key, data, labels = jax.random.split(jax.random.key(0), 3)
    y = jax.random.randint(labels, (size,), 0, 10)
    if case == "cnn":
        return cnn, cnn_parameters(key), (jax.random.normal(data, (size, 1, 28, 28)), y)
    return through, dense(key, WIDTHS[case]), (jax.random.normal(data, (size, 784)), y)


def steps_of(case: str, size: int) -> dict[str, Callable[[], None]]:
    apply, start, batch = problem(case, size)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(apply(params, x)), y[:, None], 1)
        return -chosen.mean()

    clipped = clipping.clipped_grad(
        loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), normalize_by=size, microbatch_size=min(MICRO, size)
    )
    moved = lambda params, grads: jax.tree.map(lambda p, g: p - RATE * g, params, grads)  # noqa: E731

    @jax.jit
    def plain(params: Params, key: jax.Array) -> Params:
        return moved(params, jax.grad(loss)(params, *batch))

    @jax.jit
    def private(params: Params, key: jax.Array) -> Params:
        grads, tree = jax.tree.flatten(clipped(params, *batch))
        keys = jax.random.split(key, len(grads))
        noisy = [g + SIGMA * CLIP / size * jax.random.normal(k, g.shape) for k, g in zip(keys, grads, strict=True)]
        return moved(params, jax.tree.unflatten(tree, noisy))

    def taken(step: Any) -> Callable[[], None]:
        state = [start, jax.random.key(1)]

        def once() -> None:
            state[1] = jax.random.fold_in(state[1], 1)
            state[0] = jax.block_until_ready(step(*state))

        return once

    return {"plain": taken(plain), "jax-privacy": taken(private)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("logreg", "mlp", "cnn"))
    parser.add_argument("size", type=int)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    steps = steps_of(args.case, args.size)
    for step in steps.values():  # compile
        step()
    best, began = dict.fromkeys(steps, float("inf")), time.monotonic()
    for _ in range(1000):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - start)
        if time.monotonic() - began > args.seconds:
            break
    print(json.dumps({"plain ms": best["plain"] * 1e3, "jax-privacy": best["jax-privacy"] / best["plain"]}))


if __name__ == "__main__":
    main()
