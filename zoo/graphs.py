"""Graph networks of torch_geometric that classify whole graphs: one graph is one example."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as graph_nn
from torch_geometric.data import Batch, Data

from zoo.losses import draw
from zoo.specimen import Sizes, Specimen

__all__ = ["specimens"]

_RELATIONS = ("usual", "B=T")


class _Dense(nn.Module):
    """Each graph has a matrix of its own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.graph, self.last = layer(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.last(self.graph(x, edges).relu().mean(1))


class _Sparse(nn.Module):
    """The nodes of all graphs are in one list."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.graph, self.second, self.last = layer(4, 8), layer(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        h = self.second(self.graph(x, edges).relu(), edges).relu()
        return self.last(graph_nn.global_mean_pool(h, graph, size=graphs))


def specimens() -> Iterator[Specimen]:
    """Dense and sparse."""
    for layer in (graph_nn.DenseGCNConv, graph_nn.DenseSAGEConv):
        yield Specimen(f"graphs/{layer.__name__}", partial(_Dense, layer), _matrices, _classified, relations=_RELATIONS)
    for layer in (graph_nn.GCNConv, graph_nn.SAGEConv, graph_nn.GATv2Conv, graph_nn.GraphConv, _gin):
        name = getattr(layer, "__name__", "").replace("_gin", "GINConv")
        yield Specimen(f"graphs/{name}", partial(_Sparse, layer), _lists, _pooled, collate=_joined, relations=_RELATIONS)


def _gin(inputs: int, outputs: int) -> nn.Module:
    return graph_nn.GINConv(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs)), train_eps=True)


def _matrices(sizes: Sizes) -> list[Any]:
    return [
        (
            torch.randn(5, 4, dtype=torch.float64, generator=draw(i)),
            (torch.rand(5, 5, generator=draw(i)) > 0.5).double(),
            torch.tensor(i % 2),
        )
        for i in range(sizes.batch)
    ]


def _classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def _lists(sizes: Sizes) -> list[Any]:
    """Rings: of as many nodes each if there are as many graphs as tokens, else of other sizes."""
    counts = [4 if sizes.batch == sizes.length else 3 + i % 4 for i in range(sizes.batch)]
    nodes = [torch.randn(n, 4, dtype=torch.float64, generator=draw(i)) for i, n in enumerate(counts)]
    rings = [torch.stack([torch.arange(n), torch.arange(n).roll(-1)]) for n in counts]
    return [Data(x=x, edge_index=ring, y=torch.tensor([i % 2])) for i, (x, ring) in enumerate(zip(nodes, rings, strict=True))]


def _joined(records: list[Any]) -> Any:
    joined = Batch.from_data_list(records)
    return {"x": joined.x, "edges": joined.edge_index, "graph": joined.batch, "y": joined.y}


def _pooled(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"], batch["graph"], len(batch["y"])), batch["y"])
