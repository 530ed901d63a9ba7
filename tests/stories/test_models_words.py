"""The page on language models says what is refused in the very words in which it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_models_causal import (
    PrivateTrainer,
    a_plan,
    a_trainer,
    adapted,
    full,
    llama,
    packed,
    padded,
    stepped,
    texts,
    token_loss,
    transformers,
)

from hushgrad.clipping.merged_adapters import require_unmerged
from hushgrad.errors import HushgradError, NotIsolated
from hushgrad.train import Plan, make_private

PAGE = Path(__file__).parents[2] / "docs" / "language-models.md"


class ByTheBatch(PrivateTrainer):
    """As Trainer's own guide to gradient accumulation has it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        return loss / num_items_in_batch


def gives(made):
    """A Trainer whose loss is this, of the model's outputs."""

    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return made(model(**inputs), num_items_in_batch)

    return Own


NO_LOSS = {
    "outputs": (lambda outputs, _: outputs, "CausalLMOutputWithPast' to give a tensor without dimensions"),
    "a number": (lambda outputs, _: float(outputs.loss), "'float' to give a tensor without dimensions"),
    "one for each": (lambda outputs, _: outputs.logits.mean((1, 2)), r"shape \(\d,\)' to give a tensor without dimensions"),
    "counts as a tensor": (lambda outputs, count: outputs.loss / count.item(), "not to use num_items_in_batch"),
    "counts as a number": (lambda outputs, count: outputs.loss * (8 / float(count)), "not to use num_items_in_batch"),
    "counts at least 1": (lambda outputs, count: outputs.loss / max(1, count), "not to use num_items_in_batch"),
}


@pytest.mark.parametrize("way", NO_LOSS)
def test_what_is_no_loss_is_refused(way, tmp_path):
    made, message = NO_LOSS[way]
    with pytest.raises(HushgradError, match=message):
        stepped(tmp_path, full(), texts(), kind=gives(made))


class Weighted(PrivateTrainer):
    """Class weights, as the guides to Trainer have them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, weight = model(**inputs), torch.linspace(0.5, 2.0, model.config.vocab_size)
        loss = torch.nn.CrossEntropyLoss(weight=weight)(outputs.logits[:, 0], inputs["labels"][:, 0])
        return (loss, outputs) if return_outputs else loss


class Each(Weighted):
    """The remedy, as the sentence has it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return token_loss(model(**inputs).logits, inputs["labels"], shift=True)


def test_a_loss_of_ones_own_is_tried_and_the_remedy_is_one(tmp_path):
    with pytest.raises(NotIsolated, match=r"one example changes what another one counts\. It is that of compute_loss"):
        stepped(tmp_path, full(), texts(), kind=Weighted)
    own, usual = stepped(tmp_path, full(), texts(), kind=Each), stepped(tmp_path, full(), texts())
    assert all(torch.allclose(own[name], g, rtol=1e-4, atol=1e-6) for name, g in usual.items())


def test_a_loss_without_the_newest_argument_is_called_without_it(tmp_path):
    class Old(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return super().compute_loss(model, inputs, return_outputs)

    given, usual = stepped(tmp_path, full(), texts(), kind=Old), stepped(tmp_path, full(), texts())
    assert all(torch.allclose(given[name], g, rtol=1e-4, atol=1e-6) for name, g in usual.items())


def test_a_batch_that_is_no_dictionary_is_refused(tmp_path):
    with pytest.raises(HushgradError, match=r"data_collator.*to give a dictionary"):
        stepped(tmp_path, full(), texts(), collate=lambda examples: [torch.ones(len(examples), 3)])


def again(folder):
    model = torch.nn.Linear(2, 1)
    run = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), a_plan(steps=1), seed=1)
    loader = run.loader(torch.ones(6, 2))
    for _ in range(2):
        for x in loader:
            model(x).mean().backward()
            run.optimizer.step()


def merged(folder):
    model = adapted(llama())
    model.merge_adapter()
    require_unmerged(model)


REFUSED = {
    "texts packed into rows, or all in one": lambda f: stepped(
        f, full(), texts(), collate=transformers.DataCollatorWithFlattening()
    ),
    "positions that begin again in a row": lambda f: stepped(f, full(), texts(), collate=packed),
    "`group_by_length`": lambda f: a_trainer(f, full(), texts(), train_sampling_strategy="group_by_length"),
    "padding to the longest of a batch in half precision, or in a certified run; in any loop": lambda f: stepped(
        f, full(), texts(), bf16=True
    ),
    "padding on the left without positions": lambda f: stepped(f, full(), texts(), collate=lambda e: padded(e, left=True)),
    "a second epoch around the loader": again,
    "adapters merged in mid-run": merged,
    "`compute_loss` of one's own that is no mean over the texts": lambda f: stepped(
        f, full(), texts(), kind=gives(lambda outputs, _: outputs.loss)
    ),
    "`compute_loss` of one's own that divides by `num_items_in_batch`": lambda f: stepped(f, full(), texts(), kind=ByTheBatch),
}


def quoted():
    """What is refused, and the sentence, as the page has them."""
    section = PAGE.read_text().partition("## What is refused")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {what: sentence.replace("\\*", "*") for what, sentence in rows[1:]}


def test_the_page_names_what_is_tried():
    assert quoted().keys() == REFUSED.keys()


@pytest.mark.parametrize("what", REFUSED)
def test_the_page_has_the_words(what, tmp_path):
    with pytest.raises(HushgradError) as error:
        REFUSED[what](tmp_path)
    words = ".*".join(map(re.escape, quoted()[what].split("…")))
    assert re.fullmatch(words, str(error.value)), f"{error.value}\n{quoted()[what]}"


def test_a_step_without_a_user_is_taken(tmp_path):
    owners = ["ann", "bob", "ann", "eve", "bob", "ann"]
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=1, dataset_size=3, steps=10, unit="user")
    trainer = a_trainer(tmp_path, full(), texts(), plan=plan, groups=owners)
    seen = []
    issued = PrivateTrainer.training_step
    trainer.training_step = lambda model, inputs, _=None: (
        seen.append(inputs.examples - inputs.padding),
        issued(trainer, model, inputs),
    )[1]
    trainer.train()
    assert trainer.private.steps == 10 and 0 in seen and max(seen) > 0
