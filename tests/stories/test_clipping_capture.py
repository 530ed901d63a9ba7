"""Training loops as users write them: the clipped sum is exact, or the step is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hushgrad.clipping import Capture, Flat, clipped_sum, joint_norms
from hushgrad.clipping.rules import linear
from hushgrad.errors import ArgumentError, CaptureError
from hushgrad.testing.rules import one_by_one, sum_of_sines

CLIP = 0.5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def oracle(model, inputs, loss=sum_of_sines, clip=CLIP, examples=None):
    """Clipped sums by the loop of single-example backward passes."""
    gradients = one_by_one(model, inputs, loss, examples=examples)
    norms = sum(G.flatten(1).square().sum(1) for G in gradients.values()).sqrt()
    weights = (clip / norms).clamp(max=1)
    return {name: torch.tensordot(weights, G, dims=1) for name, G in gradients.items()}, norms


def attached(model, **options):
    capture = Capture(model, **{"loss_reduction": "sum", **options})
    capture.attach()
    return capture


def agrees(clipped, expected, tolerance=1e-11):
    sums, norms = expected
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=tolerance, atol=tolerance)
    for name, value in sums.items():
        torch.testing.assert_close(clipped.raw_sums[name], value, rtol=tolerance, atol=tolerance)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()


class Tied(nn.Module):
    """A language model whose head is its embedding, with positions that broadcast over the batch."""

    def __init__(self, positions="row"):
        super().__init__()
        self.how, self.tokens, self.where = positions, nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        where = torch.arange(ids.shape[1])
        h = self.tokens(ids) + self.where(where[None] if self.how == "row" else where)
        return self.head(self.block(h) + self.block(h + 1))


# Exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["row", "flat"])
@pytest.mark.parametrize("B", [1, 2, 5])
def test_tied_weights_modules_called_twice_and_broadcast_positions(positions, B):
    model, ids = Tied(positions).double(), torch.randint(11, (B, 7))
    expected = oracle(model, (ids,))
    capture = attached(model)
    sum_of_sines(model(ids)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


@pytest.mark.parametrize("pairs_at_most", [0, 4])
@pytest.mark.parametrize("keep", [0, 1 << 26])
def test_joint_norms_by_pairs_and_by_sums_agree(monkeypatch, pairs_at_most, keep):
    monkeypatch.setattr(joint_norms, "_PAIRS_AT_MOST", pairs_at_most)
    monkeypatch.setattr(joint_norms, "_CHUNK", 100)
    monkeypatch.setattr(linear, "_KEEP_AT_MOST", keep)
    model, ids = Tied().double(), torch.randint(11, (5, 9))
    model.tokens.padding_idx = 3
    expected = oracle(model, (ids,))
    capture = attached(model)
    sum_of_sines(model(ids)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


class Loop(nn.Module):
    """One layer, called again and again."""

    def __init__(self, calls, width):
        super().__init__()
        self.calls, self.first, self.layer = calls, nn.Linear(4, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.calls):
            x = self.layer(x).tanh()
        return x


@pytest.mark.parametrize("calls", [2, 5, 9])
@pytest.mark.parametrize("width", [3, 12])  # for nine calls, gradients are made for width 3, Gram matrices for width 12
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_a_layer_in_a_loop(calls, width, shape, chunk, monkeypatch):
    monkeypatch.setattr(joint_norms, "_CHUNK", chunk)
    model, x = Loop(calls, width).double(), torch.randn(shape).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_a_layer_in_a_loop_makes_no_gradient_of_its_weights():
    """Only the outer products' Gram matrices, and the weighted sums."""
    B, width, calls = 8, 64, 6
    model, x = Loop(calls, width), torch.randn(B, 4)
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    with FlopCounterMode(display=False) as counter:
        capture.collect(Flat(CLIP))
    assert (
        counter.get_total_flops() < 1.5 * calls * 2 * B * width * width
    )  # a weight gradient for each example, too, would be twice that


def test_a_norm_that_misses_the_cross_terms_would_be_noticed():
    model, ids = Tied().double(), torch.randint(11, (5, 7))
    _, norms = oracle(model, (ids,))
    capture = attached(model)
    sum_of_sines(model(ids)).backward()
    parts = sum(sq for b in capture._tape.batches for c in b.calls for sq in c.measure().values())
    assert ((parts.sqrt() - norms).abs() > 1e-3 * norms).all()


def test_mean_reduction_recovers_each_examples_own_gradient():
    model, x, y = mlp(), torch.randn(7, 4).double(), torch.randint(3, (7,))
    clipped = clipped_sum(model, F.cross_entropy, (x, y), Flat(CLIP))
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(7):
        row = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        norm = sum(g.square().sum() for g in row).sqrt()
        torch.testing.assert_close(clipped.raw_norms[i], norm)
        for name, g in zip(total, row, strict=True):
            total[name] += g * min(1.0, CLIP / float(norm))
    for name, value in total.items():
        torch.testing.assert_close(clipped.raw_sums[name], value)


@pytest.mark.parametrize("fold", [False, True])
def test_micro_batches_add_up(fold):
    model, x = mlp(), torch.randn(9, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    if fold:
        capture.fold_with(Flat(CLIP))
    for part in x.split(4):
        sum_of_sines(model(part)).backward()
    if fold:
        assert sum(len(b.calls) for b in capture._tape.batches) == 3  # only the last micro-batch is still held
    assert capture.check() == 9
    agrees(capture.collect(Flat(CLIP)), expected)


def test_units_are_folded_and_may_not_come_again():
    torch.manual_seed(0)
    model, x, ids = mlp(), torch.randn(9, 4).double(), torch.tensor([3, 3, 1, 1, 1, 7, 4, 4, 4])
    expected = capture_of_units(model, x, ids, [5, 4], fold=False)
    folded = capture_of_units(model, x, ids, [5, 4], fold=True)
    assert sorted(folded.raw_norms.tolist()) == pytest.approx(sorted(expected.raw_norms.tolist()), rel=1e-12)
    for name, value in expected.raw_sums.items():
        torch.testing.assert_close(folded.raw_sums[name], value)
    with pytest.raises(CaptureError, match=r"two micro-batches.*batch\.split"):  # unit 1 is cut in two
        capture_of_units(model, x, ids, [4, 5], fold=True)


def capture_of_units(model, x, ids, sizes, *, fold):
    capture = attached(model)
    if fold:
        capture.fold_with(Flat(CLIP))
    try:
        for part, own in zip(x.split(sizes), ids.split(sizes), strict=True):
            capture.units(own)
            sum_of_sines(model(part)).backward()
        if fold:
            assert sum(len(b.calls) for b in capture._tape.batches) == 3  # only the last micro-batch is still held
        return capture.collect(Flat(CLIP))
    finally:
        capture.detach()


class Curved(nn.Module):
    """Gradients of these layers depend on the parameters themselves, and their rules run the layer again."""

    def __init__(self):
        super().__init__()
        self.lstm, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        h = self.lstm(x)[0]
        return self.attention(h, h, h)[0] * self.factor.tanh() ** 2


def test_a_probe_is_taken_where_the_parameters_were():
    """They are moved back before collect: a rule that runs its layer again must have done so by then."""
    torch.manual_seed(0)
    model, x = Curved().double(), torch.randn(5, 3, 4).double()
    shift = {name: 0.3 * torch.randn_like(p) for name, p in model.named_parameters()}

    def moved(sign):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(shift[name], alpha=sign)

    here = one_by_one(model, (x,), sum_of_sines)
    moved(1)
    there = one_by_one(model, (x,), sum_of_sines)
    moved(-1)
    gradients = {name: 0.7 * here[name] + 0.3 * there[name] for name in here}
    norms = sum(G.flatten(1).square().sum(1) for G in gradients.values()).sqrt()
    weights = (CLIP / norms).clamp(max=1)
    capture = attached(model)
    with capture.probe(0.7):
        sum_of_sines(model(x)).backward()
    moved(1)
    with capture.probe(0.3):
        sum_of_sines(model(x)).backward()
    moved(-1)
    sums = {name: torch.tensordot(weights, G, dims=1) for name, G in gradients.items()}
    agrees(capture.collect(Flat(CLIP)), (sums, norms), tolerance=1e-9)


def test_probes_are_combined_before_the_norm():
    model, x = mlp(), torch.randn(6, 4).double()
    other = mlp()
    a, b = one_by_one(model, (x,), sum_of_sines), one_by_one(other, (x,), sum_of_sines)
    both = {name: 0.7 * a[name] - 0.4 * b[name] for name in a}
    norms = sum(G.flatten(1).square().sum(1) for G in both.values()).sqrt()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    capture = attached(model)
    for coefficient, state in ((0.7, start), (-0.4, dict(other.named_parameters()))):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(state[name])
        with capture.probe(coefficient):
            for part in x.split(4):
                sum_of_sines(model(part)).backward()
    assert capture.check() == 6
    clipped = capture.collect(Flat(CLIP))
    sums = {name: torch.tensordot((CLIP / norms).clamp(max=1), G, dims=1) for name, G in both.items()}
    agrees(clipped, (sums, norms))


def test_units_are_clipped_as_one_even_across_micro_batches():
    model, x, ids = mlp(), torch.randn(8, 4).double(), torch.tensor([7, 3, 7, 7, 9, 3, 9, 1])
    rows = one_by_one(model, (x,), sum_of_sines)
    units = {name: torch.stack([G[ids == u].sum(0) for u in (1, 3, 7, 9)]) for name, G in rows.items()}
    norms = sum(G.flatten(1).square().sum(1) for G in units.values()).sqrt()
    capture = attached(model)
    for part, owners in zip(x.split(5), ids.split(5), strict=True):
        capture.units(owners)
        sum_of_sines(model(part)).backward()
    sums = {name: torch.tensordot((CLIP / norms).clamp(max=1), G, dims=1) for name, G in units.items()}
    assert capture.check() == 4
    agrees(capture.collect(Flat(CLIP)), (sums, norms))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 6), mlp_middle(), nn.Linear(6, 3)

        def forward(self, x):
            h = self.first(x)
            return self.last(checkpoint(self.middle, h, use_reentrant=reentrant) if self.saving else self.middle(h))

        saving = False

    model, x = Checkpointed().double(), torch.randn(8, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    model.saving = True
    for part in x.split(5):
        sum_of_sines(model(part)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)
    assert all(p.requires_grad for p in model.parameters())


def mlp_middle():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(inplace=True))


def test_several_losses_over_one_forward():
    model, x = mlp(), torch.randn(6, 4).double()
    expected = oracle(model, (x,), lambda out: sum_of_sines(out) + out.square().sum())
    capture = attached(model)
    out = model(x)
    sum_of_sines(out).backward(retain_graph=True)
    out.square().sum().backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_in_place_activations_on_three_dimensional_outputs():
    model, x = mlp(), torch.randn(5, 3, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_frozen_parameters_cost_nothing_and_get_nothing():
    model, x = mlp(), torch.randn(5, 4).double()
    for p in model[0].parameters():
        p.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    expected = oracle(model, (x,))
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(CLIP))
    agrees(clipped, expected)
    assert set(clipped.raw_sums) == {"2.weight", "4.weight", "4.bias"}


def test_a_nan_example_gets_weight_zero_and_is_counted():
    model, x = mlp(), torch.randn(6, 4).double()
    good = torch.tensor([0, 1, 3, 5])
    expected, _ = oracle(model, (x[good],))
    x[2, 1], x[4, 0] = float("nan"), float("inf")
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(CLIP))
    assert clipped.rejected == 2 and clipped.raw_weights[[2, 4]].tolist() == [0, 0]
    for name, value in expected.items():
        torch.testing.assert_close(clipped.raw_sums[name], value)


def test_an_empty_batch_and_no_batch_give_zeros_or_the_noise():
    model = mlp()
    noise = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    kept = {name: t.clone() for name, t in noise.items()}
    capture = attached(model, loss_reduction="mean")
    assert capture.collect(Flat(CLIP)).raw_norms.shape == (0,)
    model(torch.randn(0, 4).double()).sum().backward()
    clipped = capture.collect(Flat(CLIP), out=noise)
    assert clipped.raw_norms.shape == (0,)
    for name, value in kept.items():
        assert clipped.raw_sums[name] is noise[name] and torch.equal(value, noise[name])


def test_out_and_scale():
    model, x = mlp(), torch.randn(5, 4).double()
    (sums, _), noise = oracle(model, (x,)), {name: torch.randn_like(p) for name, p in model.named_parameters()}
    start = {name: t.clone() for name, t in noise.items()}
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    capture.collect(Flat(CLIP), out=noise, scale=0.25)
    for name in sums:
        torch.testing.assert_close(noise[name], start[name] + 0.25 * sums[name])


def test_no_raw_gradient_is_left_and_the_model_is_as_it_was():
    model, x = mlp(), torch.randn(5, 4).double()
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    capture.detach()
    assert before == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    sum_of_sines(model(x)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_evaluation_between_steps_does_not_count():
    model, x = mlp(), torch.randn(5, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    model(torch.randn(3, 4).double())  # gradients enabled, never used
    with torch.no_grad():
        model(torch.randn(4, 4).double())
    with torch.inference_mode():
        model(torch.randn(4, 4).double())
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_discard_and_pause():
    model, x = mlp(), torch.randn(5, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    capture.discard()
    attacked = x.clone().requires_grad_()
    with capture.pause():
        torch.autograd.grad(sum_of_sines(model(attacked)), attacked)
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_channels_last():
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3, padding=1), nn.GroupNorm(4, 20), nn.ReLU(inplace=True), nn.Conv2d(20, 5, 3)
    ).double()
    x = torch.randn(4, 3, 8, 8).double()
    expected = oracle(model, (x,))
    model = model.to(memory_format=torch.channels_last)
    capture = attached(model)
    sum_of_sines(model(x.to(memory_format=torch.channels_last))).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_bfloat16_autocast_clips_to_the_norm_it_adds():
    model, x = mlp().float(), torch.randn(16, 4)
    _, norms = oracle(model, (x,))
    capture = attached(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sum_of_sines(model(x)).backward()
    clipped = capture.collect(Flat(CLIP))
    assert clipped.raw_norms.dtype == torch.float32
    torch.testing.assert_close(clipped.raw_norms, norms, rtol=0.05, atol=0.02)
    one = attached(model.train())
    capture.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sum_of_sines(model(x[:1])).backward()
    alone = one.collect(Flat(1e-3))
    size = sum(t.square().sum() for t in alone.raw_sums.values()).sqrt()
    torch.testing.assert_close(size, torch.tensor(1e-3), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend):
    model, x = mlp().float(), torch.randn(6, 4)
    expected = oracle(model, (x,))
    capture = attached(model)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        sum_of_sines(compiled(x)).backward()
        agrees(capture.collect(Flat(CLIP)), expected, 1e-5)


def test_a_model_compiled_in_place_is_proved_as_it_is():
    model, x = mlp().float(), torch.randn(6, 4)
    expected = oracle(model, (x,))
    model.compile(backend="aot_eager")
    capture = attached(model)
    for _ in range(2):
        sum_of_sines(model(x)).backward()
        agrees(capture.collect(Flat(CLIP)), expected, 1e-5)


def test_a_model_that_ran_compiled_before_the_capture_was_attached_is_exact_or_refused():
    model, x = mlp().float(), torch.randn(6, 4)
    expected = oracle(model, (x,))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    capture = attached(model)
    sum_of_sines(compiled(x)).backward()
    try:  # whether the compiler notices the hooks is its own affair
        clipped = capture.collect(Flat(CLIP))
    except CaptureError as error:
        assert "does not come through the outputs" in str(error)
    else:
        agrees(clipped, expected, 1e-5)


def test_closure_is_just_another_pass():
    model, x = mlp(), torch.randn(5, 4).double()
    expected = oracle(model, (x,))
    capture = attached(model)

    def closure():
        capture.discard()
        loss = sum_of_sines(model(x))
        loss.backward()
        return loss

    closure()
    closure()
    agrees(capture.collect(Flat(CLIP)), expected)


# Refused -----------------------------------------------------------------------------------------------------------


def refuses(capture, match):
    with pytest.raises(CaptureError, match=match):
        capture.check()
    with pytest.raises(CaptureError, match=match):
        capture.collect(Flat(CLIP))
    assert capture.collect(Flat(CLIP)).raw_norms.shape == (0,)  # the refused passes are gone


class Functional(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), use

    def forward(self, x):
        return self.use(self, self.a(x))


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: F.linear(x, m.b.weight),
        lambda m, x: x @ m.b.weight + m.b(x) @ m.a.weight,  # in part through its module, in part not
        lambda m, x: F.linear(x, m.b.weight / m.b.weight.norm()) * m.a.bias.mean(),
    ],
)
def test_a_parameter_used_without_its_module_is_exact(use):
    model, x = Functional(use).double(), torch.randn(5, 4).double()
    expected, capture = oracle(model, (x,)), attached(model)
    sum_of_sines(model(x)).backward()
    assert all(p.grad is None for p in model.parameters())
    agrees(capture.collect(Flat(CLIP)), expected)


def test_a_gradient_that_the_outputs_do_not_know_of_is_refused():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.kept = self.scale.square()
            return self.a(x) * self.scale

    model = Keeps()
    capture = attached(model)
    with pytest.raises(
        CaptureError, match=r"scale that does not come through the outputs of model\(x\).*return what the model keeps"
    ):
        (sum_of_sines(model(torch.randn(3, 4))) + model.kept.sum()).backward()
    refuses(capture, "does not come through the outputs")


def test_an_unused_parameter_is_named_or_counts_as_zero():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    model = Idle()
    capture = attached(model)
    sum_of_sines(model(torch.randn(3, 4))).backward()
    refuses(capture, r"idle\.bias, idle\.weight got no gradient")
    lenient = Capture(model, unused="zero")
    capture.detach()
    lenient.attach()
    model(torch.randn(3, 4)).sum().backward()
    assert not lenient.collect(Flat(CLIP)).raw_sums["idle.weight"].any()


def test_a_call_of_a_part_of_the_model_is_refused_unless_it_is_vouched_for():
    model, x = mlp(), torch.randn(4, 4).double()
    capture = attached(model)
    with pytest.raises(CaptureError, match=r"called outside of model\(x\)"):
        sum_of_sines(model[2](model[1](model[0](x)))).backward()
    refuses(capture, "outside of model")
    capture.detach()
    vouched = attached(model, check_isolation=False, unused="zero")
    vouched.examples(4)
    sum_of_sines(model[2](model[1](model[0](x)))).backward()
    assert len(vouched.collect(Flat(CLIP)).raw_norms) == 4


@pytest.mark.parametrize("turn", [lambda y: y, lambda y: y.transpose(0, 1)], ids=["examples first", "time first"])
def test_rows_of_examples_and_positions_are_exact(turn):
    class Flattened(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, x):
            y = turn(self.a(x))
            return turn(self.b(self.norm(y.flatten(0, 1))).unflatten(0, y.shape[:2]))

    model, x = Flattened().double(), torch.randn(3, 5, 4).double()
    expected, capture = oracle(model, (x,)), attached(model)
    capture.examples(3)
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_a_model_of_rows_for_a_single_batch():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1), nn.Unflatten(0, (-1, 3)), nn.Flatten(1))
    clipped = clipped_sum(model, F.cross_entropy, (torch.randn(6, 3, 4), torch.randint(3, (6,))), Flat(CLIP))
    assert len(clipped.raw_norms) == 6


def test_a_single_batch_needs_a_clipper():
    with pytest.raises(ArgumentError, match=r"clipper=1\.0"):
        clipped_sum(nn.Linear(4, 3), F.cross_entropy, (torch.randn(6, 4), torch.randint(3, (6,))), 1.0)


def test_positions_that_look_like_examples_are_exact():
    model, ids = Tied("flat").double(), torch.randint(11, (7, 7))
    expected, capture = oracle(model, (ids,)), attached(model)
    sum_of_sines(model(ids)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)


def test_later_forward_before_backward_is_refused():
    model, x = mlp(), torch.randn(4, 4).double()
    capture = attached(model)
    first, second = model(x), model(x)
    sum_of_sines(first).backward()
    sum_of_sines(second).backward()
    refuses(capture, "separate backward passes")
    out = model(x)
    sum_of_sines(out).backward(retain_graph=True)
    sum_of_sines(model(x)).backward()
    with pytest.raises(CaptureError, match="earlier batch"):
        out.sum().backward()
    refuses(capture, "earlier batch")


def test_an_input_changed_in_place_is_refused():
    model, x = mlp(), torch.randn(4, 4).double()
    capture = attached(model)
    out = model(x)
    x += 1
    with pytest.raises(CaptureError, match="changed in place"):
        sum_of_sines(out).backward()
    refuses(capture, "changed in place")


def test_an_input_changed_between_backward_and_collect_is_refused():
    model, x = mlp(), torch.randn(4, 4).double()
    capture = attached(model)
    sum_of_sines(model(x)).backward()
    x.zero_()
    refuses(capture, "changed in place")


def test_second_derivatives_are_refused():
    model, x = mlp(), torch.randn(4, 4).double().requires_grad_()
    capture = attached(model)
    with pytest.raises(CaptureError, match="create_graph"):
        torch.autograd.grad(sum_of_sines(model(x)), x, create_graph=True)
    refuses(capture, "create_graph")


def test_thawing_a_parameter_needs_a_new_capture():
    model, x = mlp(), torch.randn(4, 4).double()
    model[0].weight.requires_grad_(False)
    attached(model)
    model[0].weight.requires_grad_(True)
    with pytest.raises(CaptureError, match=r"requires_grad of 0\.weight has changed"):
        model(x)


def test_an_exception_in_forward_leaves_the_model_whole():
    model = mlp()
    capture = attached(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5).double())
    assert all(p.requires_grad for p in model.parameters())
    x = torch.randn(4, 4).double()
    sum_of_sines(model(x)).backward()
    assert capture.collect(Flat(CLIP)).raw_norms.shape == (4,)


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupted_forward_leaves_the_model_whole(inside):
    def interrupt(*_):
        raise KeyboardInterrupt

    model, x = mlp(), torch.randn(3, 4).double()
    expected, capture = oracle(model, (x,)), attached(model)
    sum_of_sines(model(x)).backward()
    capture.collect(Flat(CLIP))
    handle = model[2 if inside else 1].register_forward_pre_hook(interrupt)  # inside: its parameters are turned off by then
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    capture.discard()
    assert all(p.requires_grad for p in model.parameters())
    sum_of_sines(model(x)).backward()
    agrees(capture.collect(Flat(CLIP)), expected)
    capture.detach()
    assert all(p.requires_grad for p in model.parameters())


def test_embedding_options_that_mix_examples_are_refused():
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(CaptureError, match=next(iter(option))):
            attached(nn.Embedding(5, 3, **option))


def test_random_layers_without_a_rule_are_read_as_they_ran():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return F.dropout(x * self.scale, 0.5)

    model, x = Noisy(), torch.randn(3, 4)
    capture = attached(model)
    y = model(x)
    y.sum().backward()
    agrees(capture.collect(Flat(1e9)), ({"scale": y.detach().sum(0)}, y.detach().norm(dim=1)), tolerance=1e-6)


class _Nests(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)).to_padded_tensor(0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_a_sentence(layout):
    nested = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 4, 1)], layout=layout)
    with pytest.raises(CaptureError, match=r"was given a nested tensor.*Pad it"):
        model = nn.Linear(3, 2)
        attached(model)
        model(nested)
    with pytest.raises(CaptureError, match="layer returned a nested tensor"):
        model = _Nests()
        attached(model)
        model(torch.randn(4, 5, 3))
