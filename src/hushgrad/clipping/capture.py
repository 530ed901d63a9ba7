"""Capture: per-example clipped gradient sums from an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hushgrad import _check
from hushgrad.clipping._torch import NodeHooks, memory_of
from hushgrad.clipping._torch_compile import left_alone
from hushgrad.clipping.certificate import Certificate
from hushgrad.clipping.clipper import Clipper
from hushgrad.clipping.declarations import Declarations
from hushgrad.clipping.grad_scaler import unwatch, watch
from hushgrad.clipping.parameter_placement import ParameterPlacement
from hushgrad.clipping.passes import Looks
from hushgrad.clipping.proof.explain import explained
from hushgrad.clipping.proof_interface import ProofInterface
from hushgrad.clipping.reduce import Part, together
from hushgrad.clipping.root import Root
from hushgrad.clipping.site import Site
from hushgrad.clipping.sites import sites_of, sum_dtype
from hushgrad.clipping.sums import Form, Sum
from hushgrad.clipping.tape import Tape

if TYPE_CHECKING:
    from hushgrad.clipping.parameter_placement import Added


class Capture(Declarations, ProofInterface):
    """Watches a model's forward and backward passes and gives the sum of clipped per-example gradients.

    sum_i w_i G_i, where G_i is the gradient of example i's own loss and w_i = ``clipper.weights(‖G_i‖²)``. The model, its
    parameters and the loop stay as they are; ``p.grad`` stays None after ``backward``.

    Args:
        model: its trainable parameters at the time of :meth:`attach` are captured, under their names in ``named_parameters()``.
        loss_reduction: "mean" if the loss is the mean of the examples' losses, "sum" if it is their sum. A mean over something
            else than examples (all tokens that are not ``ignore_index``) mixes the examples; use the sum, or a mean per example.
        check_isolation: prove that no example influences another before a kind of pass is used; False: you vouch for it, and for
            calls of the model's parts outside of ``model(x)``.
        unused: "raise" refuses a step in which a trainable parameter got no gradient; "zero" counts its gradient as zero.
        held: where the parameters lie; whole, in this process, by default.
        certificate: add in double precision, for a bound that is proved (see :mod:`hushgrad.clipping.certificate`); needs a "sum".
        copies: how many times each example is in a batch, as rows of one unit; the mean of their gradients is clipped.
        fixed: every batch is filled up to one shape, with at most so many units in it; None: batches have their own sizes.

    **Formal guarantee.** Example i enters the result only through w_i G_i, provided the model keeps examples apart (see
    :func:`~hushgrad.clipping.isolation`). Whatever cannot be attributed to single examples raises
    :class:`~hushgrad.errors.CaptureError`; nothing is skipped. Numbers, words and arrays beside the tensors are taken as constants, so
    they must not follow from the examples: a bare capture cannot tell a longest length from a schedule. A run's loader can.

        >>> from hushgrad.clipping import Flat
        >>> model = nn.Linear(3, 1)
        >>> capture = Capture(model)
        >>> capture.attach()
        >>> model(torch.randn(8, 3)).mean().backward()
        >>> clipped = capture.collect(Flat(1.0))
        >>> clipped.raw_sums["weight"].shape, clipped.raw_norms.shape
        (torch.Size([1, 3]), torch.Size([8]))

    Reference: Bu et al., "Differentially private optimization on large models at small cost" (ICML 2023), algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_reduction: str = "mean",
        unused: str = "raise",
        check_isolation: bool = True,
        held: ParameterPlacement | None = None,
        certificate: Certificate | None = None,
        copies: int = 1,
        fixed: int | None = None,
    ) -> None:
        self.model = _check.instance(nn.Module, model=model)
        self.loss_reduction = _check.one_of(("mean", "sum"), loss_reduction=loss_reduction)
        self.unused = _check.one_of(("raise", "zero"), unused=unused)
        # Called when sums are formed: public factors for every coordinate, applied before clipping.
        self.scales: Callable[[], Mapping[str, Tensor] | None] | None = None
        self.not_isolated: str | None = None  # why this model cannot be trained privately, if a proof has shown that
        self.looks: Looks | None = None  # at what the model reads beside its inputs
        self.late = False  # whether a repeated proof showed it, for passes whose gradients had counted
        self.first_size: tuple[Any, ...] | None = None  # of one example in each input, in the first pass
        self.resized = False  # whether another pass had another one
        self._held = held or ParameterPlacement()
        self._certificate = certificate
        self._copies = _check.positive_int(copies=copies)  # of each example; their mean is clipped
        if certificate is not None and loss_reduction == "mean":
            remedy = "A mean divides every example's gradient by a number that depends on the others; make the loss a sum."
            _check.fail("loss_reduction", loss_reduction, 'to be "sum" for a certified run', remedy)
        self._fixed = None if fixed is None else _check.positive_int(fixed=fixed)
        self._tape = Tape()
        self._most = self._tape.most = None if certificate is None else certificate.usual or certificate.here
        self._tape.vouched = not check_isolation
        self._root = Root(self, seal=check_isolation)
        self._handles: list[Any] = []
        self._sites: list[Site] = []
        self._params: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}  # of the parameters, by identity
        self._bare: dict[str, Site] = {}  # parameters that are read at the frontier
        self._covered: frozenset[str] = frozenset()  # parameters that belong to a site
        self._usual_calls = 0
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._likes: Mapping[str, Tensor | Form] = {}
        self._reduced: Added = self._added
        self._grouped: tuple[Clipper | None, bool] = (None, False)  # the last clipper, and whether it clips groups separately
        self._dtypes: dict[str, torch.dtype] = {}  # of the sums
        self._blank: dict[str, Sum] = {}  # the sums of most steps; none has a tensor between two of them
        self._scattered: frozenset[str] = frozenset()
        self._by_rows: frozenset[str] = frozenset()
        self.tables: dict[int, Site] = {}  # those that are kept by rows, by their memory
        self._tied = False  # a parameter belongs to two sites
        self._folded: tuple[dict[str, Sum], list[Part]] | None = None
        self._folded_units: set[int] = set()

    # Attach and detach -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put hooks on every module that owns a trainable parameter."""
        if self._handles:
            return
        left_alone()
        NodeHooks.watch()
        if isinstance(self.model, torch.jit.RecursiveScriptModule):
            remedy = "Put it into an ordinary one, nn.Sequential(model), or give the module that it was made from."
            _check.fail("model", type(self.model).__name__, "to be no script itself, which takes no hooks", remedy)
        named = dict(self.model.named_parameters())
        self._params = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = [(name, p) for name, p in named.items() if not p.requires_grad]
        if not self._params:
            _check.fail("model", type(self.model).__name__, "to have a parameter that requires gradients")
        places = sorted({str(p.device) for p in self._params.values()})
        if len(places) > 1:
            remedy = "An example's norm is taken over all of them together; frozen layers may lie anywhere. Or use fully_shard."
            _check.fail("model", places, "to have its trainable parameters on one device", remedy)
        self._sites = [
            self._held.site(self.model, site) for site in sites_of(self._tape, self.model, all_modules=not self._held.whole)
        ]
        self._likes, self._grouped = self._held.likes(self._params), (None, False)
        self._reduced = self._held.reducing(self._added, self._sites)
        self._dtypes = {name: sum_dtype(p) for name, p in self._params.items()}
        if self._certificate is not None:
            width = max(p.shape[0] + p.numel() // p.shape[0] if p.numel() else 1 for p in self._params.values() if p.dim())
            self._certificate = self._certificate._replace(width=width)
            self._certificate.cap(1)  # raises now if there is none for such a batch
            self._dtypes = dict.fromkeys(self._dtypes, torch.float64)
        self._blank = self._sums({})
        self._covered = frozenset(name for s in self._sites for name in s.full.values())
        self._usual_calls = len(self._sites) + len(self._params.keys() - self._covered)
        self._names = {id(p): name for name, p in self._params.items()}
        self._scattered = frozenset(name for s in self._sites if s.rule.scatters for name in s.full.values())
        self._tied = sum(len(s.names) for s in self._sites) > len(self._covered)
        watch(self)
        self._handles += self._root.hooks()
        for site in self._sites:
            self._handles += site.hooks()
        for name, p in self._params.items():
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._leaked, name)))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Remove all hooks and restore the model."""
        unwatch(self)
        for handle in self._handles:
            handle.remove()
        for site in self._sites:
            site.restore()
        self._handles, self._sites, self._by_rows, self.tables = [], [], frozenset(), {}
        self.discard()

    def _leaked(self, name: str, p: Tensor) -> None:
        grad, p.grad = p.grad, None  # a raw gradient must not reach the optimizer
        tape = self._tape
        batch = tape.batch()
        if tape.deaf or grad is None or not batch.examples:
            return
        if batch.examples == 1 and self.whole:  # it belongs to that example
            self.bare_call(name).take(0, grad.unsqueeze(0))
        elif name in batch.bare:
            batch.bare[name].require_all(0, grad)
        else:
            tape.leaks.add(name)

    def explain(self) -> str:
        """A table of how each parameter's gradients are computed, for the passes proved so far: module, rule, layout and cost."""
        return explained(self._root.known.every(), self._sites)

    @property
    def sizes(self) -> set[tuple[Any, ...]]:
        """The sizes of one example in the model's inputs, over the passes of this step that were read by a proof."""
        return self._tape.sizes

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured modules."""
        return tuple(self._sites)

    @property
    def whole(self) -> bool:
        """Whether this process can run the model alone."""
        return self._held.whole

    # Collect -----------------------------------------------------------------------------------------------------------

    @property
    def scattered(self) -> frozenset[str]:
        """Parameters whose sum touches few rows of a large table: cheapest added to an existing ``out`` (the noise)."""
        return self._scattered - self._by_rows

    @property
    def by_rows(self) -> frozenset[str]:
        """Tables whose sum is a sparse tensor of the touched rows, see :meth:`keep_rows`."""
        return self._by_rows

    def keep_rows(self, names: Iterable[str]) -> None:
        """From now on ``raw_sums`` of these tables, which must be among ``scattered``, are sparse tensors of the touched rows.

        A pass that reads one of them beside its module is refused.
        """
        self._by_rows = frozenset(names) & self._scattered
        self.tables = {memory_of(self._params[name]): self.owners(name)[0] for name in self._by_rows}
        self.discard()

    def owners(self, name: str) -> list[Site]:
        """The sites of all modules that use this parameter."""
        return [site for site in self._sites if name in site.full.values()]

    @torch.no_grad()
    def fold(self, clipper: Clipper) -> None:
        """Clip and add up the micro-batches so far, so that their activations can be freed before the next forward.

        ``fold_with(clipper)`` does this automatically. All examples of a unit must be in one micro-batch: a unit that comes again is
        refused. Probes span micro-batches and are not folded.
        """
        if any(batch.probe is not None for batch in self._tape.batches):
            return
        sums, parts = self._folded or (self._sums({}), [])
        self._folded = sums, together([*parts, *self._reduced(clipper, sums, 1.0)])
        counted = (b.units[: b.examples - b.padding] for b in self._tape.batches if b.units is not None)
        self._folded_units.update(unit for units in counted for unit in units.tolist())
        self._tape.clear(announced=False)

    def fold_with(self, clipper: Clipper | None) -> None:
        """Fold automatically with this clipper when a further micro-batch begins; None: keep all micro-batches until collect."""
        self._tape.before_batch = None if clipper is None else lambda: self.fold(clipper)
