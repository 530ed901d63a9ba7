"""A call on other tensors than the layer's own parameters (``functional_call``) is read where these are used, exactly."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hushgrad.clipping import Capture, Flat

LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)), (2, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (4, 6)),
}


class _Exchanged(nn.Module):
    """Calls its layers on functions of some of their parameters, chosen at random; and perhaps on the parameters as well."""

    def __init__(self, inner: nn.Module, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.7))
        names = [name for name, _ in inner.named_parameters()]
        self.chosen = [name for name in names if float(torch.rand((), generator=generator)) < 0.6] or names[:1]
        self.twice = seed % 2 == 1

    def forward(self, x: Tensor) -> Tensor:
        values = dict(self.inner.named_parameters())
        values |= {name: values[name] * self.scale / (1 + values[name].norm()) for name in self.chosen}
        out = functional_call(self.inner, values, (x,))
        return out + self.inner(x) if self.twice else out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", LAYERS)
def test_functions_of_parameters_are_read_as_each_example_gives_alone(name: str, seed: int) -> None:
    """The layer's rule took the gradient of what stood in its parameter's place for the parameter's own, and the model was refused."""
    make, shape = LAYERS[name]
    torch.manual_seed(seed)
    model, x = _Exchanged(make(), seed).double(), torch.randn(2 + seed, *shape, dtype=torch.float64)
    params = dict(model.named_parameters())
    alone = [torch.autograd.grad(model(x[i : i + 1]).square().sum(), [*params.values()]) for i in range(len(x))]
    norms = torch.stack([torch.cat([g.flatten() for g in every]).norm() for every in alone])
    clip = float(norms.median()) * 0.9
    capture = Capture(model, loss_reduction="sum")
    capture.attach()
    model(x).square().sum().backward()
    made = capture.collect(Flat(clip))
    capture.detach()
    torch.testing.assert_close(made.raw_norms.double(), norms)
    for k, name in enumerate(params):
        expected = sum(w * every[k] for w, every in zip((clip / norms).clamp(max=1.0), alone, strict=True))
        torch.testing.assert_close(made.raw_sums[name], expected)
