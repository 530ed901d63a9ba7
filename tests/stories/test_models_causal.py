"""Causal language models under PrivateTrainer: one step of it is the clipped mean of single-example gradients, however it is run."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hushgrad[hf]'")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'hushgrad[hf]'")

from hushgrad.errors import ArgumentError, CaptureError, NotIsolated  # noqa: E402
from hushgrad.integrations.huggingface import PrivateTrainer, token_loss  # noqa: E402
from hushgrad.train import Plan, make_private  # noqa: E402

VOCABULARY, LENGTH, COUNT = 31, 9, 6
CLIP = 0.8


def llama(*, dtype=torch.float32, **config):
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "max_position_embeddings": 64, **config}))
    return model.to(dtype)


def adapted(model, **options):
    """LoRA on every linear layer, with a second factor that is not zero: else the first one has no gradient."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, target_modules="all-linear", **options)
    model = peft.get_peft_model(model, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    return model


def prompted(config):
    model = peft.get_peft_model(llama(), config)
    return model.train()


def texts(count=COUNT, seed=5):
    """Texts of different lengths, as a data set has them before anybody pads."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [LENGTH - i % 5 for i in range(count)]
    return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=rng).tolist()} for n in lengths]


def padded(examples, *, left=False):
    """Pads to the longest, as the collators of transformers do; labels of padding do not count."""
    most = max(len(e["input_ids"]) for e in examples)
    rows = []
    for e in examples:
        ids, none = list(e["input_ids"]), most - len(e["input_ids"])
        labels = list(e.get("labels", ids))
        parts = {"input_ids": (ids, 0), "attention_mask": ([1] * len(ids), 0), "labels": (labels, -100)}
        rows.append({k: [f] * none + v if left else v + [f] * none for k, (v, f) in parts.items()})
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class Keeps(torch.optim.SGD):
    """Takes no step, and keeps the gradients that it was given."""

    def step(self, closure=None):
        self.given = [None if p.grad is None else p.grad.detach().float().clone() for p in self.param_groups[0]["params"]]


def a_plan(count=COUNT, *, steps=1, clip=CLIP, **more):
    return Plan.dpsgd(
        noise_multiplier=0.0, delta=1e-3, max_grad_norm=clip, batch_size=count, dataset_size=count, steps=steps, **more
    )


def a_trainer(folder, model, data, *, plan=None, collate=padded, kind=PrivateTrainer, groups=None, checked=True, **options):
    more = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(output_dir=str(folder), remove_unused_columns=False, **{**more, **options})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Keeps(trained, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    plan = plan or a_plan(len(data))
    chosen = {
        "data_collator": collate,
        "optimizers": (optimizer, schedule),
        "groups": groups,
        "seed": 2,
        "check_isolation": checked,
    }
    return kind(model, args, plan, train_dataset=data, **chosen)


def stepped(folder, model, data, **options):
    """What one step makes of the data: the clipped mean gradient by parameter."""
    trainer = a_trainer(folder, model, data, **options)
    trainer.train()
    assert trainer.private.steps == trainer.plan.steps
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return dict(zip(names, trainer.private.optimizer.given, strict=True))


def own_loss(model, example, *, prompt=0, half=False):
    """The mean over the example's own tokens, from a pass over it alone, without padding."""
    ids = torch.tensor([example["input_ids"]])
    labels = torch.tensor([example.get("labels", example["input_ids"])])
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    behind = nn.functional.pad(labels, (prompt, 0), value=-100)
    return token_loss(logits, behind, shift=True)


def gradients(model, examples, **options):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses = torch.stack([own_loss(model, e, **options) for e in examples])
    grads = torch.autograd.grad(losses.sum(), list(named.values()), materialize_grads=True)
    return {name: g.float() for name, g in zip(named, grads, strict=True)}


def looped(model, data, *, groups=None, **options):
    """The same by definition, (sums, clip norm): the gradient of each example, or user, alone, clipped and added.

    The clip norm lies in the middle of the gradients' norms, so that some are clipped and some are not.
    """
    model = copy.deepcopy(model)
    users = {}
    for i, example in enumerate(data):
        users.setdefault(i if groups is None else groups[i], []).append(example)
    found = [gradients(model, own, **options) for own in users.values()]
    lengths = [float(torch.stack([g.norm() for g in grads.values()]).norm()) for grads in found]
    clip = (min(lengths) + max(lengths)) / 2
    assert min(lengths) < 0.999 * clip
    factors = [min(1.0, clip / max(length, 1e-12)) / len(users) for length in lengths]
    return {name: sum(f * grads[name] for f, grads in zip(factors, found, strict=True)) for name in found[0]}, clip


def apart(one, other):
    """The distance, relative to the second."""
    assert one.keys() == other.keys()
    far = torch.stack([(one[name] - other[name]).norm() for name in one]).norm()
    return float(far / torch.stack([g.norm() for g in other.values()]).norm())


def mostly_slow(cases, *quick):
    """All cases as parameters; those that are not ``quick`` are for `make test-all`: each proves a model."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in cases]


def full(**config):
    return llama(**config).train()


def gpt2():
    torch.manual_seed(4)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop))


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
AGAIN = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

# name: model, settings of Trainer
WAYS = {
    "LoRA": (lambda: adapted(llama()), {}),
    "full": (full, {}),
    "full, tied": (lambda: full(tie_word_embeddings=True), {}),
    "GPT-2": (gpt2, {}),
    "LoRA, checkpointed": (lambda: adapted(llama()), AGAIN),
    "LoRA, reentrant checkpoints": (lambda: adapted(llama()), REENTRANT),
    "full, checkpointed": (full, AGAIN),
    "full, reentrant checkpoints": (full, REENTRANT),
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "full, reentrant checkpoints"))
def test_a_step_is_the_clipped_mean_of_single_examples(way, tmp_path):
    make, options = WAYS[way]
    model, data = make(), texts()
    exact, clip = looped(model, data)
    assert apart(stepped(tmp_path, model, data, plan=a_plan(clip=clip), **options), exact) < 1e-5


class PlainLoss(PrivateTrainer):
    """Planted defect: the mean over all tokens of a part."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return (loss, None) if return_outputs else loss


@pytest.mark.slow
def test_the_comparison_sees_the_mean_over_all_tokens(tmp_path):
    model, data = adapted(llama()), texts()
    exact, clip = looped(model, data)
    assert apart(stepped(tmp_path, model, data, kind=PlainLoss, plan=a_plan(clip=clip), checked=False), exact) > 0.02


PROMPTS = {
    "prompt tuning": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), 3),
    "p-tuning": (lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8), 3),
    "prefix tuning": (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), 0),
}


@pytest.mark.parametrize("way", mostly_slow(PROMPTS, "prompt tuning"))
def test_prompts_are_trained(way, tmp_path):
    config, prompt = PROMPTS[way]
    model, data = prompted(config()), texts()
    exact, clip = looped(model, data, prompt=prompt)
    assert apart(stepped(tmp_path, model, data, plan=a_plan(clip=clip)), exact) < 1e-5


# Half precision: single examples in the same precision differ from a batch by roundings of 2**-8.
HALVES = {
    "bf16 weights, LoRA": (lambda: adapted(llama(dtype=torch.bfloat16)), {}),
    "bf16 weights, LoRA in bf16": (lambda: adapted(llama()).to(torch.bfloat16), {}),
    "bf16 weights, full": (lambda: full(dtype=torch.bfloat16), {}),
    "bf16 weights, full, tied": (lambda: full(dtype=torch.bfloat16, tie_word_embeddings=True), {}),
    "autocast, LoRA": (lambda: adapted(llama()), {"bf16": True}),
    "autocast, full": (full, {"bf16": True}),
    "autocast, full, checkpointed": (full, {"bf16": True, **AGAIN}),
}


def to_one_length(examples):
    """Padded as far as the longest text of all, whoever is in the batch."""
    return {
        name: nn.functional.pad(rows, (0, LENGTH - rows.shape[1]), value=-100 if name == "labels" else 0)
        for name, rows in padded(examples).items()
    }


@pytest.mark.parametrize("way", mostly_slow(HALVES, "bf16 weights, full"))
def test_half_precision(way, tmp_path):
    make, options = HALVES[way]
    model, data = make(), texts()
    exact, clip = looped(model, data, half="bf16" in options)
    made = stepped(tmp_path, model, data, plan=a_plan(clip=clip), collate=to_one_length, **options)
    assert apart(made, exact) < 0.03


def test_in_half_precision_the_longest_text_must_not_round_the_others(tmp_path):
    """Left out of a batch of six, it moved the clipped sum by 1.0009 of the bound: all others were shorter, and rounded otherwise."""
    half = llama().requires_grad_(False)
    half.model.layers[0].mlp.up_proj.compute_dtype = torch.bfloat16  # as quantised layers say what they compute in
    for make, options in (HALVES["autocast, LoRA"], HALVES["bf16 weights, full"], (lambda: adapted(half), {})):
        with pytest.raises(NotIsolated, match=r"In half precision.*Pad all of them to one length.*pad_to_multiple_of"):
            stepped(tmp_path, make(), texts(), **options)


@pytest.mark.slow
def test_users(tmp_path):
    model, data, owner = adapted(llama()), texts(), ["ann", "bob", "ann", "eve", "bob", "ann"]
    exact, clip = looped(model, data, groups=owner)
    plan = a_plan(3, unit="user", clip=clip)
    assert apart(stepped(tmp_path, model, data, plan=plan, groups=owner, per_device_train_batch_size=2), exact) < 1e-5


@pytest.mark.slow
def test_examples_without_a_label_count_as_nothing(tmp_path):
    data = texts()
    data[1] = {**data[1], "labels": [-100] * len(data[1]["input_ids"])}
    data[4] = {**data[4], "labels": [-100, -100, *data[4]["input_ids"][2:]]}  # a question before an answer
    model = adapted(llama())
    exact, clip = looped(model, data)
    assert apart(stepped(tmp_path, model, data, plan=a_plan(clip=clip)), exact) < 1e-5
    none = [{**e, "labels": [-100] * len(e["input_ids"])} for e in data]
    model = adapted(llama())
    assert all(not g.any() for g in stepped(tmp_path, model, none).values())


@pytest.mark.slow
def test_steps_without_an_example_and_a_run_that_is_asked_for_more(tmp_path):
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, max_grad_norm=CLIP, batch_size=1, dataset_size=COUNT, steps=6)
    trainer = a_trainer(tmp_path, adapted(llama()), texts(), plan=plan, num_train_epochs=100)
    trainer.train()
    assert trainer.private.steps == 6  # of the plan, whatever the epochs
    spent = trainer.spent()
    trainer.train()  # there is none left
    assert trainer.private.steps == 6 and trainer.spent() == spent


# Refusals -----------------------------------------------------------------------------------------------------------------


def packed(examples):
    """Rows of two texts each, as packing makes them before training: positions begin again, and the mask is left out."""
    halves = [range(3), range(4)]
    rows = [list(range(1, 8)) for _ in examples]
    return {
        "input_ids": torch.tensor(rows),
        "labels": torch.tensor(rows),
        "position_ids": torch.tensor([[i for half in halves for i in half] for _ in examples]),
    }


def numbered(examples):
    made = packed(examples)
    del made["position_ids"]
    return {**made, "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 2] for _ in examples])}


COLLATORS = {
    r"input_ids.shape=\(1, \d+\) to have 32 rows.*own, padded": transformers.DataCollatorWithFlattening(),
    "position_ids=.*begin again.*several texts.*own, padded": packed,
    "attention_mask=2 to be 0 or 1.*own, padded": numbered,
}


@pytest.mark.parametrize("message", COLLATORS)
def test_several_texts_in_a_row_are_refused(message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        stepped(tmp_path, adapted(llama()), texts(), collate=COLLATORS[message])


def to_the_left(examples):
    """As generation wants it: nothing of a text depends on how long the others are, if it is told its positions."""
    made = padded(examples, left=True)
    mask = made["attention_mask"]
    return {**made, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: adapted(llama()), gpt2], ids=["rotary positions", "a table of positions"])
def test_padding_on_the_left_needs_positions(make, tmp_path):
    model, data = make(), texts()
    exact, clip = looped(model, data)
    assert apart(stepped(tmp_path, model, data, collate=to_the_left, plan=a_plan(clip=clip)), exact) < 1e-5
    with pytest.raises(ArgumentError, match=r"padding on the left.*padding_side = .right."):
        stepped(tmp_path, make(), data, collate=lambda examples: padded(examples, left=True))


@pytest.mark.parametrize("order", ["group_by_length", "sequential"])
def test_another_order_is_refused(order, tmp_path):
    with pytest.raises(ArgumentError, match=f"train_sampling_strategy='{order}' to be \"random\".*the plan draws"):
        stepped(tmp_path, adapted(llama()), texts(), train_sampling_strategy=order)


def test_processes_that_were_not_started_are_missed(tmp_path, monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` and `--use_fsdp` leave in the environment."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    a_trainer(tmp_path, full(), texts())  # one was asked for
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ArgumentError, match=r"number of processes=1.*torchrun"):
        a_trainer(tmp_path, full(), texts())
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ArgumentError, match=r"fsdp or deepspeed=.*fully_shard\(model\)"):
        a_trainer(tmp_path, full(), texts())


class After(transformers.TrainerCallback):
    """Does something to the model after the first step."""

    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            self.act(model)


def merge_and_back(model):
    model.merge_adapter()
    model.unmerge_adapter()


IN_MID_RUN = {
    "is merged into the frozen weights.*after the run": lambda model: model.merge_adapter(),
    "is frozen, but was changed since.*merge adapters after the run": merge_and_back,
    "one was added, removed, frozen or unfrozen": lambda model: model.base_model.disable_adapter_layers(),
}


@pytest.mark.parametrize("message", mostly_slow(IN_MID_RUN, next(iter(IN_MID_RUN))))
def test_what_is_done_to_adapters_in_mid_run_is_refused(message, tmp_path):
    trainer = a_trainer(tmp_path, adapted(llama()), texts(), plan=a_plan(steps=3))
    trainer.add_callback(After(IN_MID_RUN[message]))
    with pytest.raises(CaptureError, match=message):
        trainer.train()
    assert trainer.private.steps == 1


def test_adapters_that_are_merged_in_mid_run_are_named_in_a_plain_loop_too():
    """The outputs of such a model have no graph, which was said to be a checkpoint's doing."""
    model = adapted(llama()).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = make_private(model, optimizer, a_plan(steps=3), seed=1)
    with pytest.raises(CaptureError, match=r"adapter of base_model\S+ is merged into the frozen weights.*after the run"):
        for batch in private.loader(texts(), collate_fn=padded):
            optimizer.zero_grad()
            token_loss(model(**batch).logits, batch["labels"], shift=True).backward()
            optimizer.step()
            model.merge_adapter()
    assert private.steps == 1
    private.detach()


@pytest.mark.slow
def test_after_the_run_a_model_is_what_it_was_made_as(tmp_path):
    """It generates, its adapter is saved as peft saves it, and merging gives the same scores."""
    model = adapted(llama())
    stepped(tmp_path, model, texts())
    model.eval()
    ids = torch.tensor([[1, 2, 3]])
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape == (1, 6)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    scores = model(input_ids=ids).logits
    assert torch.equal(again(input_ids=ids).logits, scores)
    torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, scores, atol=1e-5, rtol=1e-5)


# TRL ----------------------------------------------------------------------------------------------------------------------


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")


def sft(folder, model, data, *, plan, processing_class=None, **options):
    trl, integration = pytest.importorskip("trl", reason="pip install 'hushgrad[trl]'"), "hushgrad.integrations.trl"
    from importlib import import_module

    more = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 4}
    more |= {"bf16": False, "gradient_checkpointing": False, "max_length": 32}
    args = trl.SFTConfig(output_dir=str(folder), **{**more, **options})
    optimizer = Keeps([p for p in model.parameters() if p.requires_grad], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    chosen = {"optimizers": (optimizer, schedule), "processing_class": processing_class or word_tokenizer(), "seed": 2}
    return import_module(integration).PrivateSFTTrainer(model, args, plan, train_dataset=data, **chosen)


@pytest.mark.slow
def test_sft_takes_the_same_steps_over_answers_alone(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install 'hushgrad[trl]'")
    pairs = [(e["input_ids"][:2], e["input_ids"][2:]) for e in texts()]
    words = [
        {"prompt": " ".join(f"w{max(2, i)}" for i in a), "completion": " " + " ".join(f"w{max(2, i)}" for i in b)}
        for a, b in pairs
    ]
    data = [
        {"input_ids": [max(2, i) for i in (*a, *b)] + [1], "labels": [-100] * len(a) + [max(2, i) for i in b] + [1]}
        for a, b in pairs
    ]
    model = adapted(llama(), exclude_modules=["lm_head"])
    exact, clip = looped(model, data)
    trainer = sft(tmp_path, model, datasets.Dataset.from_list(words), plan=a_plan(clip=clip))
    trainer.train()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert apart(dict(zip(names, trainer.private.optimizer.given, strict=True)), exact) < 1e-5
    for refused in ({"packing": True}, {"padding_free": True}, {"loss_type": "dft"}):
        with pytest.raises(ArgumentError, match=f"{next(iter(refused))}=.*one example"):
            sft(tmp_path, adapted(llama()), datasets.Dataset.from_list(words), plan=a_plan(), **refused)


# Frozen quantised bases ---------------------------------------------------------------------------------------------------


def torchao_int8(model):
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def bitsandbytes_linear(make):
    """Every linear layer but the head replaced, as ``load_in_4bit`` and ``load_in_8bit`` do."""
    bnb = pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

    def quantised(model):
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                model.set_submodule(name, make(bnb, module))
        return model

    return quantised


def nf4(bnb, linear):
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")


def int8(bnb, linear):
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


QUANTISED = {
    "torchao int8": torchao_int8,
    "bitsandbytes nf4": bitsandbytes_linear(nf4),
    "bitsandbytes int8": bitsandbytes_linear(int8),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", QUANTISED)
def test_adapters_over_a_quantised_base(way, tmp_path):
    base = llama(hidden_size=64, intermediate_size=64)
    base.requires_grad_(False)
    model = adapted(QUANTISED[way](base), exclude_modules=["lm_head"])
    data = texts()
    exact, clip = looped(model, data)
    assert apart(stepped(tmp_path, model, data, plan=a_plan(clip=clip)), exact) < 1e-5


@pytest.mark.slow
def test_an_evaluation_in_mid_run_packs_no_frozen_weights(tmp_path):
    """Where the processor has instructions for it, bitsandbytes does so in every pass outside of training."""
    base = llama(hidden_size=64, intermediate_size=64).requires_grad_(False)
    model = adapted(bitsandbytes_linear(nf4)(base), exclude_modules=["lm_head"])
    trainer = a_trainer(tmp_path, model, texts(), plan=a_plan(steps=2))
    trainer.add_callback(After(lambda _: trainer.evaluate(texts(seed=6))))
    trainer.train()
    assert trainer.private.steps == 2
