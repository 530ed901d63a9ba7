"""The interface of layer rules, and the symbols that all of them use.

| symbol | name | meaning |
|---|---|---|
| B | examples | examples in one physical batch; always the first dimension |
| T | positions | tokens, pixels: all dimensions between the first and the features |
| x | ``record.x`` | the input of one call of a layer |
| g | ``record.g`` | the gradient of the loss with respect to the output of that call |
| G_i | per-example gradient | the gradient of example i's own loss with respect to one parameter |
| w_i | weight | what the clipper multiplies G_i by |

A :class:`Rule` answers three questions about a :class:`Record`: what is G_i, what is its squared norm, and what is
sum_i w_i G_i. Only the first has to be written; the other two have defaults, which a rule overrides if there is a cheaper
exact way. A rule is stateless, is registered with ``@rule(TheLayerClass)``, and never sees clip norms, reductions or
probes: the capture multiplies those in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from hushgrad.clipping.mass import sq_norm
from hushgrad.clipping.record import Record, Sum
from hushgrad.clipping.rejected import Counted

__all__ = ["ClippedSum", "Factors", "Record", "Rule", "measured_here", "rule", "rule_for"]


class ClippedSum(NamedTuple):
    """The sum of the clipped per-example gradients, before any noise: sensitive, as the prefix ``raw_`` says."""

    raw_sums: dict[str, Tensor]  # by parameter name, in the parameter's shape
    raw_norms: Tensor  # (B,) norms of the examples' (or units') whole gradients before clipping
    raw_weights: Tensor  # (B,) or (B, groups): what each example's gradient was multiplied by
    rejected: Counted  # examples with a NaN or infinite gradient: weight 0
    fixed_norms: Tensor | None = None  # of a batch of fixed shape on a device: the norms, and -1 where it is filled up


class Factors(NamedTuple):
    """A per-example gradient as a sum of outer products: G_i = sum_t left[i, t] right[i, t]^T, viewed in the parameter's shape.

    ``left`` is (B, T, m), or a (B, T) integer tensor that stands for one-hot rows of length m (an embedding's ids; a negative
    id is a row of zeros). ``right`` is (B, T, n).

        >>> import torch
        >>> inputs, gradients = torch.ones(8, 1, 3), torch.ones(8, 1, 2)
        >>> torch.einsum("btm,btn->bmn", *Factors(gradients, inputs)).shape
        torch.Size([8, 2, 3])
    """

    left: Tensor
    right: Tensor


Example = tuple[nn.Module, tuple[Tensor, ...]]  # a layer, and inputs for it


class Rule(ABC):
    """What per-example clipping must know about one kind of layer. Stateless: one instance serves all layers.

    ``parameters`` are the local names the formulas cover; a layer that owns other trainable parameters is not this rule's.
    ``subtree`` = True: the rule also owns the parameters of the layer's children (their local names are dotted), which are
    then not captured by themselves (``nn.MultiheadAttention`` uses its ``out_proj`` without calling it).
    ``scatters`` = True: the weighted sum touches few rows of a large table, and so is best added to what is there already (noise).
    ``positions`` = True: the layer has one input, and the rule takes any number of dimensions between the examples and the features.
    ``hot`` = False: norms are taken at collect time instead of inside backward, right after the gradient was computed.

    A layer with one output tensor has one entry in ``record.grads``; one that returns a tuple, list or dict has one for each
    floating-point tensor in it, in order, None where the loss does not depend on it.
    """

    parameters: ClassVar[frozenset[str] | None] = None  # None: whatever there is
    subtree: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    positions: ClassVar[bool] = False
    hot: ClassVar[bool] = True

    @staticmethod
    def examples() -> tuple[Example, ...]:
        """Small layers with inputs, examples first: what the conformance tests run over."""
        return ()

    @abstractmethod
    def per_example(self, record: Record) -> dict[str, Tensor]:
        """The per-example gradients G_i of every name in ``record.names``: (B, *parameter shape) each."""

    def sq_norms(self, record: Record) -> dict[str, Tensor]:
        """Their squared norms in double precision, (B,) each. May put what is worth keeping into ``record.kept``.

        Where ``add_weighted`` will add a gradient part by part, ``record.masses`` must have its mass. Those of kept gradients may be
        left out on a device: :meth:`rest` gives them when they are asked for.
        """
        record.kept = self.per_example(record)
        return measured_here(record.kept)

    def rest(self, record: Record, names: Sequence[str]) -> dict[str, Tensor]:
        """Squared norms that ``sq_norms`` has put off: on a device those of all layers are taken together, if possible."""
        return {name: sq_norm(record.kept[name]) for name in names}

    def outer(self, record: Record) -> tuple[Tensor, Tensor] | None:
        """X (B, d) and g (B, p) where the gradients of weight and bias are g x^T and g and nothing was made yet; else None."""
        return None

    def add_weighted(self, record: Record, weights: Mapping[str, Tensor], out: Mapping[str, Sum]) -> None:
        """Add ``sum_i weights[name][i] G_i`` to ``out[name]`` for every name in ``record.names``.

        Args:
            record: what the capture kept of one call of the layer.
            weights: for each parameter, one weight per example.
            out: the sums to add to, by parameter.
        """
        kept = record.kept or self.per_example(record)
        for name in record.names:
            out[name].add_kept(kept[name], weights[name])

    def factors(self, record: Record) -> dict[str, Factors]:
        """G_i as outer products, for the names that have this form (default: none). Makes cross terms of tied weights cheap."""
        return {}

    def check(self, module: nn.Module) -> str | None:
        """Why this module cannot be clipped per example, with the remedy; None if it can (the default)."""
        return None

    def reads(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Which rows of its table a call is about to read, for a rule that ``scatters``; None (the default): it may be any."""
        return None

    def folds(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call computes otherwise if the parameters require no gradients. Default: no call does.

        Args:
            module: the layer.
            args: what it is called with.
            kwargs: the same, by name.
        """
        return False

    def remember(self, module: nn.Module) -> Any:
        """What must be noted before a call (the random state); it comes back as ``record.memory``. Default: nothing."""
        return None

    def features(self, module: nn.Module) -> int:
        """How many of the output's last dimensions are features, for a rule of ``positions``. Default: one."""
        return 1

    def dims(self, module: nn.Module, outputs: int) -> tuple[int, ...]:
        """The dimension of the examples in each of the layer's outputs, as the rule reads them. Default: the first."""
        return (0,) * outputs

    def select(self, record: Record, index: Tensor, examples: int) -> Record:
        """The same record for the examples in ``index`` alone. Default: every tensor whose first dimension is ``examples``.

        Args:
            record: what the capture kept of one call of the layer.
            index: numbers of the wanted examples.
            examples: how many the record holds.
        """

        def pick(value: Any) -> Any:
            batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples
            return value.index_select(0, index) if batched else value

        record.join()
        args, grads = tuple(map(pick, record.args)), tuple(map(pick, record.grads))
        chosen = Record(record.module, record.names, args, {k: pick(v) for k, v in record.kwargs.items()}, grads)
        chosen.kept = {name: pick(G) for name, G in record.kept.items()}
        return chosen

    def widened(self, record: Record) -> Record:
        """The same record in double precision, for a rule whose gradients are added part by part."""
        args, grads = tuple(map(_widened, record.args)), tuple(map(_widened, record.grads))
        return Record(record.module, record.names, args, {k: _widened(v) for k, v in record.kwargs.items()}, grads)


def measured_here(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The squared norms of gradients that exist; on a device they are deferred."""
    return {name: sq_norm(G) for name, G in kept.items() if G.is_cpu}


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# The registry --------------------------------------------------------------------------------------------------------

_RULES: dict[type[nn.Module], Rule] = {}
R = TypeVar("R", bound=type[Rule])


def rule(*kinds: type[nn.Module]) -> Callable[[R], R]:
    """Class decorator: this rule serves these layer classes (and subclasses that keep their ``forward``)."""

    def register(cls: R) -> R:
        instance = cls()
        for kind in kinds:
            _RULES[kind] = instance
        return cls

    return register


def rule_for(module: nn.Module, trainable: Sequence[str]) -> Rule | None:
    """The rule that covers this module's trainable parameters, or None: then the fallback is used.

    A subclass that overrides ``forward`` computes something else, and one with further parameters has gradients that the
    rule does not know, so neither inherits its parent's rule.
    """
    for kind in type(module).__mro__:
        found = _RULES.get(kind)
        if found is not None:
            same = type(module).forward is kind.forward  # type: ignore[attr-defined]
            covered = found.parameters is None or found.parameters.issuperset(trainable)
            return found if same and covered else None
    return None
