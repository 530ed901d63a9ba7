"""Outputs of the model that hold no examples: a loss returned next to the logits, a weight table, a penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hushgrad.clipping._torch import accumulated
from hushgrad.clipping.layout import Layout
from hushgrad.clipping.proof.inputs import Reading
from hushgrad.clipping.proof.survey import Stage, Survey, run_some
from hushgrad.clipping.proof.variable_lengths import OPENED
from hushgrad.clipping.runs import same


def batch_outputs(
    stage: Stage, reading: Reading, inputs: Any, survey: Survey, layouts: tuple[Layout | None, ...]
) -> tuple[bool, ...]:
    """For each output, whether it reaches a parameter by a path without any example's output on it, and is not a sum over examples.

    A gradient through such an output belongs to no example, so the loss must not use it.
    """
    stops: set[Any] = {(e.edge.node, e.edge.output_nr) for e in survey.exits}
    stops |= {below for e in survey.exits if e.edge.node.name() == OPENED for below in e.edge.node.next_functions}
    ours = {e.node for edges in survey.run.edges.values() for e in edges if e is not None}
    found = []
    for y, layout in zip(survey.run.outputs, layouts, strict=True):
        leads = layout is None and y.requires_grad and _leads(stage, get_gradient_edge(y), stops, ours)
        found.append(leads)
    if not any(found):
        return tuple(found)
    sums = _are_sums(stage, reading, inputs, survey)
    return tuple(leads and not adds for leads, adds in zip(found, sums, strict=True))


def _leads(stage: Stage, edge: GradientEdge, stops: set[Any], ours: set[Any]) -> bool:
    if (edge.node, edge.output_nr) in stops:
        return False
    stack, seen = [edge.node], {edge.node}
    while stack:
        node = stack.pop()
        leaf = accumulated(node)
        if node in ours or (leaf is not None and stage.name_of(leaf) is not None):
            return True
        for below, number in node.next_functions:
            if below is not None and (below, number) not in stops and below not in seen:
                seen.add(below)
                stack.append(below)
    return False


def _are_sums(stage: Stage, reading: Reading, inputs: Any, survey: Survey) -> list[bool]:
    """For each output, whether it is a scalar that equals the sum, or the mean, of its values on two parts of the batch."""
    B = survey.examples
    found = [True] * len(survey.run.outputs)
    for cut in {1, B // 2, B - 1}:
        parts = [torch.arange(cut), torch.arange(cut, B)]
        runs = [run_some(stage, reading, inputs, part, B) for part in parts]
        for k, y in enumerate(survey.run.outputs):
            values = [r.outputs[k].detach() for r in runs if r is not None and len(r.outputs) > k]
            if y.dim() or len(values) < 2 or any(v.dim() for v in values):
                found[k] = False
                continue
            total, mean = values[0] + values[1], (values[0] * cut + values[1] * (B - cut)) / B
            found[k] = found[k] and (same(y.detach(), total) or same(y.detach(), mean))
    return found
