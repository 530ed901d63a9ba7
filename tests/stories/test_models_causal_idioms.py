"""What people do with Trainer, peft and their data: each is the clipped mean of single examples, or refused in a sentence of hushgrad's."""

from __future__ import annotations

import pytest
import torch
from test_models_causal import After, a_plan, a_trainer, adapted, apart, full, llama, looped, peft, stepped, texts, transformers
from torch import nn

from hushgrad.errors import ArgumentError, HushgradError, NotIsolated
from hushgrad.integrations.huggingface import PrivateTrainer
from hushgrad.train.loss_tracking import VOUCHED


def exact(folder, model, data=None, **options):
    """How far a step is from single passes. The model is not proved: what is asked here is what an option does to a step."""
    data = data or texts()
    by_hand, clip = looped(model, data)
    return apart(stepped(folder, model, data, plan=a_plan(clip=clip), checked=False, **options), by_hand)


# Trainer's options --------------------------------------------------------------------------------------------------------

OPTIONS = {
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "emptied caches": {"torch_empty_cache_steps": 1},
    "drop_last": {"dataloader_drop_last": True},
    "tokens are counted": {"include_num_input_tokens_seen": "all"},
    "use_cache": {"use_cache": True},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "dispatched batches": {"accelerator_config": {"dispatch_batches": True}},
    "accelerate's own accumulation": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "looked for overflows": {"debug": "underflow_overflow"},
    "as many steps as the plan": {"max_steps": 1},
    "more epochs": {"num_train_epochs": 7},
    "Trainer's clipping": {"max_grad_norm": 1e-3},
    "the best model at the end": {"load_best_model_at_end": True},
    "one text at a time": {"per_device_train_batch_size": 1},
    "a log of every step": {"logging_steps": 1, "logging_first_step": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_nothing(name, tmp_path):
    assert exact(tmp_path, adapted(llama()), **OPTIONS[name]) < 1e-5


# Adapters -----------------------------------------------------------------------------------------------------------------


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": ["q_proj"], **options})


ADAPTERS = {
    "DoRA": lambda: lora(use_dora=True),
    "rsLoRA": lambda: lora(use_rslora=True),
    "a bias": lambda: lora(lora_bias=True),
    "a trained head": lambda: lora(modules_to_save=["lm_head"]),
    "a trained table": lambda: lora(modules_to_save=["embed_tokens"]),
    "an adapted table": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
    "some tokens": lambda: lora(trainable_token_indices=[1, 2]),
    "parameters by name": lambda: lora(target_modules=[], target_parameters=["q_proj.weight"]),
    "PiSSA": lambda: lora(init_lora_weights="pissa"),
    "OLoRA": lambda: lora(init_lora_weights="olora"),
    "LoHa": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "LoKr": lambda: peft.LoKrConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=["q_proj"]),
}


def with_adapter(name):
    torch.manual_seed(9)
    model = peft.get_peft_model(llama(), ADAPTERS[name]())
    for p in model.parameters():
        if p.requires_grad and not p.any():
            nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, tmp_path):
    assert exact(tmp_path, with_adapter(name)) < 1e-5


# What is done in mid-run --------------------------------------------------------------------------------------------------


def another(model):
    model.add_adapter("two", lora())


def another_instead(model):
    another(model)
    model.set_adapter("two")


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def go_on(act, folder, make=lambda: adapted(llama())):
    """The steps of a run of two, with ``act`` after the first."""
    trainer = a_trainer(folder, make(), texts(), plan=a_plan(steps=2), checked=False)
    trainer.add_callback(After(act))
    trainer.train()
    return trainer.private.steps


HARMLESS = {
    "generate": lambda model: model.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False),
    "eval": lambda model: model.eval(),
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "the same weights": lambda model: model.load_state_dict(model.state_dict()),
}
OTHERS = "one was added, removed, frozen or unfrozen. Detach, change the model, and call make_private again"
CHANGES = {
    "an adapter is added": (another, OTHERS, None),
    "another adapter": (another_instead, OTHERS, None),
    "no adapter": (lambda model: model.unload(), OTHERS, None),
    "merged for good": (lambda model: model.merge_and_unload(), OTHERS, None),
    "more tokens": (lambda model: model.resize_token_embeddings(40), OTHERS, full),
    "more tokens beside adapters": (lambda model: model.resize_token_embeddings(40), OTHERS, None),
    "a frozen head": (lambda model: model.lm_head.requires_grad_(False), OTHERS, full),
    "a tied head": (tied, OTHERS, full),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_run_goes_on_after(name, tmp_path):
    assert go_on(HARMLESS[name], tmp_path) == 2


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_other_parameters(name, tmp_path):
    act, message, make = CHANGES[name]
    with pytest.raises(HushgradError, match=message):
        go_on(act, tmp_path, *([make] if make else []))


# Data ---------------------------------------------------------------------------------------------------------------------

DATA = {
    "a token that the model does not know": [1, 2, 99],
    "a label that the model does not know": ([1, 2, 3], [1, 2, 99]),
}


@pytest.mark.parametrize("name", DATA)
def test_tokens_that_the_model_does_not_know_are_refused_without_a_word_of_them(name, tmp_path):
    ids, labels = DATA[name] if isinstance(DATA[name], tuple) else (DATA[name], DATA[name])
    data = [{"input_ids": ids, "labels": labels} for _ in range(6)]
    with pytest.raises(ArgumentError, match=r"to be tokens of the model.*own tokenizer") as refused:
        stepped(tmp_path, adapted(llama()), data, checked=False)
    assert "99" not in str(refused.value) and refused.value.__context__ is None


def test_a_collator_that_does_not_pad_is_named(tmp_path):
    data = [{**one, "labels": one["input_ids"]} for one in texts()]
    with pytest.raises(ArgumentError, match=r"data_collator to make a batch of 2 of the texts \(ValueError\).*have to be padded"):
        stepped(tmp_path, adapted(llama()), data, collate=transformers.default_data_collator)


def test_an_optimizer_and_a_schedule_that_are_made_before_the_run_are_its_own(tmp_path):
    trainer = a_trainer(tmp_path, adapted(llama()), texts(), plan=a_plan(steps=2), checked=False)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.create_optimizer_and_scheduler(3)
    made = trainer.optimizer, trainer.lr_scheduler
    trainer.train()
    assert (trainer.private.optimizer, trainer.lr_scheduler) == made and trainer.lr_scheduler.last_epoch == 2
    with pytest.raises(ArgumentError, match=r"hyperparameter_search=.*not to be called.*hushgrad tune"):
        trainer.hyperparameter_search(n_trials=2)


def test_an_empty_text_adds_nothing(tmp_path):
    data = texts(4)
    steps = [stepped(tmp_path, full(), some, plan=a_plan(len(data))) for some in ([{"input_ids": []}, *data[1:]], data[1:])]
    assert apart(*steps) < 1e-6


# Steps of one's own -------------------------------------------------------------------------------------------------------


class OwnStep(PrivateTrainer):
    """As a page on Trainer has it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        loss = loss + outputs["logits"].logsumexp(-1).square().max()
        self.accelerator.backward(loss)
        return loss.detach()


class OwnStepAndLoss(OwnStep):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_what_a_step_of_ones_own_adds_to_the_loss_is_vouched_for(tmp_path):
    trainer = a_trainer(tmp_path, full(), texts(), kind=OwnStep)
    trainer.train()
    assert VOUCHED in trainer.spent().notes


def test_a_loss_of_all_tokens_in_a_step_of_ones_own_is_refused(tmp_path):
    with pytest.raises(NotIsolated, match=r"the model's own loss.*Override compute_loss"):
        a_trainer(tmp_path, full(), texts(), kind=OwnStepAndLoss).train()
