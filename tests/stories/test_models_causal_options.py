"""Options of Trainer and of TRL's SFTTrainer over causal models: a step is the clipped mean of single examples, or is refused."""

from __future__ import annotations

import pytest
import torch
from test_models_causal import (
    AGAIN,
    a_plan,
    adapted,
    apart,
    full,
    llama,
    looped,
    padded,
    sft,
    stepped,
    texts,
    transformers,
    word_tokenizer,
)

from hushgrad.errors import ArgumentError


def leaves_some_out(examples):
    """Keeps the long texts of a batch, as collators do that cannot use the others."""
    return padded([e for e in examples if len(e["input_ids"]) > 5] or examples[:1])


@pytest.mark.parametrize("options", [{}, AGAIN], ids=["", "checkpoints"])
def test_a_collator_that_leaves_examples_out_is_refused(options, tmp_path):
    """Who is left out may follow from the others, and the rows that come back are not those that were drawn."""
    with pytest.raises(ArgumentError, match=r"input_ids.shape=\(31, 9\) to have 32 rows.*leaves nobody out"):
        stepped(tmp_path, adapted(llama()), texts(), collate=leaves_some_out, **options)


def test_texts_that_were_packed_before_are_refused(tmp_path):
    """The collator drops the column that tells the texts of a row apart."""
    data = [{**one, "seq_lengths": [2, len(one["input_ids"]) - 2]} for one in texts()]
    with pytest.raises(ArgumentError, match=r"train_dataset='seq_lengths' not to have this column.*own, padded"):
        stepped(tmp_path, adapted(llama()), data)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(texts())


def test_a_stream_is_refused(tmp_path):
    """As datasets has it with streaming=True: nobody can draw from it at random."""
    with pytest.raises(ArgumentError, match=r"train_dataset='Stream' to have a length.*Read a stream into memory"):
        stepped(tmp_path, adapted(llama()), Stream(), plan=a_plan())


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: adapted(llama()), full], ids=["lora", "full"])
def test_a_compiled_model(make, tmp_path):
    model = make()
    exact, clip = looped(model, texts())
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    assert apart(stepped(tmp_path, model, texts(), plan=a_plan(clip=clip), **compiled), exact) < 1e-5


def test_a_token_that_ends_texts_may_pad_them(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    data = [{"input_ids": [max(2, i) for i in one["input_ids"]]} for one in texts()]
    model = adapted(llama())
    exact, clip = looped(model, data)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    assert apart(stepped(tmp_path, model, data, plan=a_plan(clip=clip), collate=collate), exact) < 1e-5


def prepared(folder, data, exact_data, **options):
    """The distance of a step of SFTTrainer from the clipped mean over what it should have made of the data."""
    datasets = pytest.importorskip("datasets", reason="pip install 'hushgrad[trl]'")
    model = adapted(llama(), exclude_modules=["lm_head"])
    exact, clip = looped(model, exact_data)
    trainer = sft(folder, model, datasets.Dataset.from_list(data), plan=a_plan(clip=clip), **options)
    trainer.train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return apart(dict(zip(names, trainer.private.optimizer.given, strict=True)), exact)


def words(ids):
    return " ".join(f"w{i}" for i in ids)


ANSWERS = [[max(2, i) for i in one["input_ids"]] for one in texts()]
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w3 {% generation %}{{ m.content }}{% endgeneration %} "
    "{% else %}w2 {{ m.content }} {% endif %}{% endfor %}"
)


@pytest.mark.slow
def test_sft_over_what_an_assistant_says(tmp_path):
    data = [{"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": words(ids)}]} for ids in ANSWERS]
    made = [{"input_ids": [2, 5, 6, 3, *ids], "labels": [-100] * 4 + ids} for ids in ANSWERS]
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    assert prepared(tmp_path, data, made, assistant_only_loss=True, processing_class=tokenizer) < 1e-5


@pytest.mark.slow
def test_sft_with_a_tokenizer_that_has_no_token_to_pad_with(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.pad_token = None
    made = [{"input_ids": [*ids, 1]} for ids in ANSWERS]
    assert prepared(tmp_path, [{"text": words(ids)} for ids in ANSWERS], made, processing_class=tokenizer) < 1e-5


@pytest.mark.slow
def test_sft_over_rows_that_trl_has_packed_before(tmp_path):
    trl, datasets = (pytest.importorskip(name, reason="pip install 'hushgrad[trl]'") for name in ("trl", "datasets"))
    rows = trl.pack_dataset(datasets.Dataset.from_list(texts(12)), 20)
    trainer = sft(tmp_path, adapted(llama()), rows, plan=a_plan(len(rows)))
    with pytest.raises(ArgumentError, match=r"train_dataset='seq_lengths' not to have this column"):
        trainer.train()
