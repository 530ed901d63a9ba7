"""The error messages of failed proofs, with remedies for a reader who did not write the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hushgrad.clipping.proof.seal import Broken


def refusal(name: str, examples: int, problem: Broken | None, drawn: Iterable[str], *, packed: bool) -> str:
    """The message if no single module is to blame.

    Args:
        name: of the model.
        examples: how many the batch has.
        problem: what broke the seal; None if no reading of the inputs explains the outputs.
        drawn: operations that drew random numbers.
        packed: whether an input is a packed sequence.
    """
    if packed and (problem is None or problem.influence):
        return (
            f"It cannot be told which rows of the outputs of {name} are whose, or its examples influence each other. Return one row for "
            "each example, or for each position: a packed sequence, its rows (out.data), or pad_packed_sequence(out, batch_first=True)."
        )
    if drawn:
        return (
            f"The model draws random numbers ({', '.join(sorted(drawn))}) of which it cannot be told whether examples influence each other "
            "through them. Switch that off, or vouch for it with check_isolation=False."
        )
    if problem and problem.influence:
        return f"{name} lets the examples of a batch influence each other: {problem.what}."
    if problem:
        return (
            f"What is read of {name} in a batch is not what its examples give alone: {problem.what}. Hooks on gradients or parameters, "
            "functions with a backward of their own, and forwards that exchange the weights of a layer do that; leave them out, or "
            "register a rule for the module."
        )
    return (
        f"The examples of a batch influence each other in {name}, or it cannot be told which rows of its inputs are whose: no way to take "
        f"{examples} examples apart gives what it returns for the batch. Give the examples in the first dimension, what all share without "
        "it or with a first dimension of 1, rows of all examples in one list (nodes of graphs) together with the example of each row "
        "(0, 0, 1, ...), and take no statistics over the batch."
    )


INTERRUPTED = (
    "A pass of this step was interrupted (Ctrl-C), and another one was begun after it: what each gave cannot be told "
    "apart. Ask for a new private.loader(), which deals this batch again (with a bare Capture, call its discard())."
)


def of_other_size(sizes: Sequence[tuple[int, ...]], examples: int) -> str:
    """The message for a pass whose inputs, of these sizes, do not hold the examples of the batch, if a gradient comes back from it."""
    if not sizes:
        return (
            "The model was given no tensor that is seen. Give it the tensors themselves, model(batch.x), or a tuple, list, dict or "
            "dataclass of them, instead of an object that holds them."
        )
    given = ", ".join(map(str, sizes[:2]))
    return (
        f"The model was given {given}, the batch has {examples} examples. To run a batch in parts, loop over batch.split(size): "
        "forward and backward for each part, then one optimizer.step() (with a bare Capture, call examples(count) before each part)."
    )


def differentiated(name: str) -> str:
    """The message for a model whose forward computes gradients itself."""
    return (
        f"{name} asks for gradients inside of its forward (autograd.grad, backward), through layers that are trained: these cannot be told "
        "from those of the loss. Let such a gradient pass frozen layers only, or functions of weights that are detached "
        "(F.linear(x, layer.weight.detach())), or take it with torch.func.grad of a function of bare parameters."
    )


def exchanged(name: str) -> str:
    """The same if examples influence each other and no module is to blame."""
    return (
        f"{name} asks for gradients inside of its forward (autograd.grad, backward), and the examples of a batch influence each other in "
        "it: an inner loss over the batch does that. Take the inner gradient of each example by itself, with "
        "torch.func.vmap(torch.func.grad(...)); or let one record of the data be all that an inner loop is to see together (a task)."
    )


def disproportionate(name: str, hooked: Sequence[str]) -> str:
    """The message for a model whose gradients do not double when the loss doubles; ``hooked``: where hooks were found."""
    found = f" There are hooks on {', '.join(hooked[:3])}, which _backward_hooks.clear() of each removes." if hooked else ""
    return (
        f"The gradients of {name} do not follow the size of the loss: a hook on gradients (register_hook, register_full_backward_hook) or "
        "a function with a backward of its own normalises, bounds or replaces them, and so it cannot be told whose they are. Leave it out: "
        f"the gradient of each example is bounded by clipping anyway.{found}"
    )
