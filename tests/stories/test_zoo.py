"""The zoo's judge, and a few of its models (all of them: ``make zoo``)."""

import torch
from torch import nn
from torch.nn import functional as F
from zoo import layers, misc, page
from zoo.examine import Finding, Verdict, examine
from zoo.specimen import Specimen

from hushgrad.clipping import Capture


def _numbers(sizes):
    return [(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(sizes.batch)]


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _specimen(build, **options):
    return Specimen("own/one", build, _numbers, _loss, **options)


class _Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(x - x.mean(0))


def test_a_model_that_keeps_examples_apart_is_exact_at_every_relation_of_sizes():
    specimen = _specimen(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    assert {examine(specimen, relation).verdict for relation in specimen.relations} == {Verdict.EXACT}


def test_a_model_that_mixes_examples_is_refused_rightly():
    assert examine(_specimen(_Mixing)).verdict is Verdict.RIGHTLY


def test_a_sum_that_is_a_little_off_is_wrong(monkeypatch):
    collect = Capture.collect
    monkeypatch.setattr(Capture, "collect", lambda self, clipper, **o: collect(self, clipper, **{**o, "scale": 1.00001}))
    assert examine(_specimen(lambda: nn.Linear(6, 2))).verdict is Verdict.WRONG


def test_what_must_be_refused_is_wrong_if_it_is_not():
    assert examine(_specimen(lambda: nn.Linear(6, 2), refusal="for a reason")).verdict is Verdict.WRONG


def test_an_exception_that_is_not_ours_is_foreign(monkeypatch):
    def collect(self, clipper, **_):
        raise KeyError("lost")

    monkeypatch.setattr(Capture, "collect", collect)
    assert examine(_specimen(lambda: nn.Linear(6, 2))).verdict is Verdict.FOREIGN


def test_a_model_that_does_not_run_by_itself_is_skipped():
    assert examine(_specimen(lambda: nn.Linear(5, 2))).verdict is Verdict.SKIPPED


def test_models_that_people_write_are_exact():
    exact = {"CNN for MNIST", "embedding and mean", "CTC with an LSTM", "FT-Transformer", "nn.Transformer"}
    for specimen in misc.specimens():
        if specimen.name.partition("/")[2] in exact:
            finding = examine(specimen)
            assert finding.verdict is Verdict.EXACT, finding


def test_layers_batch_first_are_exact():
    kinds = {"Conv1d", "Conv2d", "Conv3d", "GroupNorm", "InstanceNorm2d", "LayerNorm", "RMSNorm"}
    chosen = [s for s in layers.specimens() if s.name.split("/")[1].split()[0] in kinds and s.name.split()[1] in ("1", "2")]
    assert len(chosen) == 4 * len(kinds)
    for specimen in chosen:
        finding = examine(specimen)
        assert finding.verdict is Verdict.EXACT, finding


def test_the_page_shows_the_worst_verdict_of_each_model(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- zoo: begin -->\nold\n<!-- zoo: end -->\nafter\n", encoding="utf-8")
    findings = [
        Finding("a/good", "usual", Verdict.EXACT, error=1e-12),
        Finding("a/half", "usual", Verdict.EXACT, error=1e-12),
        Finding("a/half", "T=1", Verdict.WRONG, error=0.5),
        Finding("b/one", "usual", Verdict.SKIPPED, message="no | such thing"),
    ]
    page.write(file, findings, {"c": "c is not installed"}, asked=len(findings))
    text = file.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| a | 2 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in text and "| half | wrong | T=1 | relative error 5.0e-01 |" in text
    assert "Exact: good." in text and "**c** (c is not installed)" in text and "no ¦ such thing" in text
