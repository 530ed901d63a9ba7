"""A private Flower server: what it does with bad replies, drop-outs, budgets, restarts, and what it refuses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx, FedYogi

from hushgrad import clipping, events, noise
from hushgrad.errors import ArgumentError, BudgetExceeded, NoTheorem, StorageError
from hushgrad.federated import DPFTRL, DPFedAvg, LocalGrid, MinSeparation, ServerAdam, ServerSGD, base, clip_update
from hushgrad.federated.directory import ServerDirectory
from hushgrad.train import Plan

CLIENTS = 8


def ftrl(mechanism=None, *, multiplier=0.5, steps=6, gap=2, times=3, cohort=4, **options):
    sampler = MinSeparation(cohort=cohort, gap=gap, times=times, steps=steps)
    options = {"delta": 1e-5, "batch_size": cohort, "dataset_size": CLIENTS, "unit": "user"} | options
    return Plan.dpftrl(noise_multiplier=multiplier, sampling=sampler, noise=mechanism or noise.BLT(buffers=2), **options)


def fedavg(*, multiplier=0.5, steps=6, **options):
    options = {"delta": 1e-5, "batch_size": 4, "dataset_size": CLIENTS, "unit": "user"} | options
    return Plan.dpsgd(noise_multiplier=multiplier, steps=steps, **options)


EVERYBODY = range(1, CLIENTS + 1)


def initial(dtype=np.float32):
    return ArrayRecord({"w": Array(np.zeros((2, 2), dtype)), "b": Array(np.zeros(3, dtype))})


def fleet(reply=None, *, clients=CLIENTS, mods=()):
    """A client moves the model by a function of its number and the round, or replies as ``reply(message, context)`` says."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        if reply is not None and (answer := reply(message, context)) is not None:
            return answer
        round, client = message.content["config"]["server-round"], context.node_config["partition-id"]
        rng = np.random.default_rng([round, client])
        return answer_with(message, {name: a.numpy() + rng.normal(size=a.shape) for name, a in message.content["arrays"].items()})

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0, "num-examples": 1})}), reply_to=message)

    return LocalGrid(app, clients=clients)


def answer_with(message, arrays):
    content = {"arrays": ArrayRecord({name: Array(np.asarray(a, dtype=np.float32)) for name, a in arrays.items()})}
    content["metrics"] = MetricRecord({"num-examples": 5, "loss": 2.0})
    return Message(RecordDict(content), reply_to=message)


def flat(arrays):
    return np.concatenate([arrays[name].numpy().reshape(-1) for name in ("w", "b")])


def one_round(strategy, grid, arrays=None, change_replies=list):
    arrays = initial() if arrays is None else arrays
    messages = list(strategy.configure_train(strategy.rounds + 1, arrays, ConfigRecord(), grid))
    return strategy.aggregate_train(strategy.rounds + 1, change_replies(list(grid.send_and_receive(messages))))


# A whole run ---------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_plans_guarantee():
    plan = ftrl()
    strategy = DPFTRL(FedAvg(), plan, seed=0)
    seen = []
    result = strategy.start(fleet(), initial(), evaluate_fn=lambda round, arrays: seen.append(round))
    assert strategy.rounds == 6 and seen == list(range(7))
    assert strategy.spent().epsilon == plan.guarantee().epsilon and strategy.spent().unit == "user"
    assert "not private against whoever knows the seed" in str(strategy.spent())
    epsilons = [result.train_metrics_clientapp[t]["epsilon"] for t in range(1, 7)]
    assert epsilons == sorted(epsilons) and epsilons[-1] == plan.guarantee().epsilon
    assert set(result.train_metrics_clientapp[1]) == {"epsilon", "delta", "clip-norm"}  # no client's own metric
    assert result.evaluate_metrics_clientapp == {}
    assert result.arrays["w"].numpy().dtype == np.float32


def test_rounds_beyond_the_plan_are_refused():
    strategy = DPFTRL(FedAvg(), ftrl(steps=2), seed=0)
    with pytest.raises(ArgumentError, match=r"num_rounds=3 to be at most the plan's steps=2. Make a longer plan"):
        strategy.start(fleet(), initial(), num_rounds=3)
    strategy.start(fleet(), initial())
    with pytest.raises(BudgetExceeded, match="All 2 steps of the plan are taken"):
        one_round(strategy, fleet())
    assert strategy.start(fleet(), initial()).arrays["w"].numpy().tolist()  # nothing left: the last model again


def test_the_budget_ends_the_rounds():
    plan = fedavg(multiplier=1.0)
    budget = plan.guarantee(steps=3).epsilon * 1.0001
    strategy = DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0, max_epsilon=budget)
    strategy.start(fleet(), initial())
    assert strategy.rounds == strategy.rounds_allowed == 3 and strategy.spent().epsilon <= budget
    with pytest.raises(BudgetExceeded, match="would exceed max_epsilon"):
        one_round(strategy, fleet())


def test_prior_phases_count():
    first = DPFedAvg(FedAvg(), fedavg(), population=EVERYBODY, seed=0)
    first.start(fleet(), initial())
    second = DPFedAvg(FedAvg(), fedavg(), population=EVERYBODY, seed=1, prior=first.ledger)
    one_round(second, fleet())
    assert str(second.ledger.event()) == "7 x Poisson(0.5) Gaussian(0.5)"


def test_evaluation_on_clients_is_silent_or_says_that_it_is_not_covered():
    strategy = DPFTRL(FedAvg(), ftrl(), seed=0, raw_evaluation=True)
    result = strategy.start(fleet(), initial(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(1.0)
    assert "published without noise and are not covered" in str(strategy.spent())


# Bad replies ---------------------------------------------------------------------------------------------------------

ZEROS = {"w": np.zeros((2, 2)), "b": np.zeros(3)}
BAD = {
    "not finite": lambda m: answer_with(m, ZEROS | {"b": np.array([0, np.nan, 0])}),
    "is not finite": lambda m: answer_with(m, ZEROS | {"w": np.full((2, 2), np.inf)}),
    "another shape": lambda m: answer_with(m, ZEROS | {"b": np.zeros((3, 1))}),
    "other names": lambda m: answer_with(m, {"w": ZEROS["w"]}),
    "got other names": lambda m: answer_with(m, ZEROS | {"extra": np.zeros(1)}),
    "got 0": lambda m: Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=m),
    "got 2": lambda m: Message(RecordDict({"a": initial(), "b": initial()}), reply_to=m),
    "cannot be read": lambda m: Message(
        RecordDict({"arrays": ArrayRecord({"w": Array("float32", (2, 2), "numpy.ndarray", b"junk"), "b": initial()["b"]})}),
        reply_to=m,
    ),
    "real numbers": lambda m: Message(
        RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros((2, 2), complex)), "b": initial()["b"]})}), reply_to=m
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_reply_counts_as_zero_and_is_reported(reason):
    def bad(message, context):
        return BAD[reason](message) if context.node_config["partition-id"] == 2 else None

    def absent(message, context):
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("gone")

    plan = Plan.dpgd(noise_multiplier=0.5, delta=1e-5, dataset_size=CLIENTS, steps=2, unit="user")
    models = []
    for reply in (bad, absent):
        strategy = DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0)
        models.append(flat(one_round(strategy, fleet(reply))[0]))
        rejected = strategy.raw_round.rejected
        assert strategy.raw_round.accepted == 7 and strategy.raw_round.dropped == 1
        assert (len(rejected) == 1 and "node 3: " in rejected[0] and reason in rejected[0]) if reply is bad else rejected == ()
    assert np.array_equal(*models) and np.isfinite(models[0]).all()


def test_outsiders_and_second_answers_count_as_zero():
    strategy = DPFTRL(FedAvg(), ftrl(multiplier=0.0), seed=0)
    plain = flat(one_round(DPFTRL(FedAvg(), ftrl(multiplier=0.0), seed=0), fleet())[0])

    def stuff(replies):
        outsider = next(node for node in EVERYBODY if node not in {r.metadata.src_node_id for r in replies})
        forged = Message(replies[0].content, reply_to=answer_to(outsider))
        return [*replies, replies[0], forged]

    assert np.array_equal(flat(one_round(strategy, fleet(), change_replies=stuff)[0]), plain)
    assert len(strategy.raw_round.rejected) == 2 and strategy.raw_round.accepted == 4


def answer_to(node):
    return Message(RecordDict(), dst_node_id=node, message_type="train")


def test_every_user_counts_the_same_whatever_it_says_about_its_examples():
    def boast(message, context):
        reply = answer_with(message, {"w": np.full((2, 2), 0.01), "b": np.zeros(3)})
        reply.content["metrics"]["num-examples"] = 10 ** int(context.node_config["partition-id"])
        return reply

    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=CLIENTS, steps=1, max_grad_norm=5.0, unit="user")
    arrays, _ = one_round(DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0), fleet(boast))
    np.testing.assert_allclose(arrays["w"].numpy(), 0.01, rtol=1e-6)


# Cohorts -------------------------------------------------------------------------------------------------------------


def test_too_few_eligible_users_make_a_smaller_cohort_with_the_same_divisor():
    strategy = DPFTRL(FedAvg(), ftrl(multiplier=0.0, gap=6, steps=3, times=1, max_grad_norm=100.0), seed=0)

    def constant(message, context):
        return answer_with(message, {name: a.numpy() + 1 for name, a in message.content["arrays"].items()})

    grid, arrays, sizes, moves = fleet(constant, clients=6), initial(), [], []
    for _ in range(3):
        released, _ = one_round(strategy, grid, arrays)
        sizes.append(strategy.raw_round.chosen)
        moves.append(flat(released)[0] - flat(arrays)[0])
        arrays = released
    assert sizes == [4, 2, 0]
    np.testing.assert_allclose(moves, [1.0, 0.5, 0.0], atol=1e-6)


def test_poisson_cohorts_come_from_the_population_not_from_who_is_connected():
    def cohorts(clients):
        strategy = DPFedAvg(FedAvg(), fedavg(steps=20), population=EVERYBODY, seed=0)
        chosen, asked = [], []
        for _ in range(20):
            one_round(strategy, fleet(clients=clients))
            chosen.append(strategy.raw_round.chosen)
            asked.append(strategy.raw_round.asked)
        return chosen, asked

    all_there, half_there = cohorts(8), cohorts(4)
    assert all_there[0] == half_there[0] == all_there[1]
    assert sum(half_there[1]) < 0.7 * sum(all_there[1])
    assert 50 < sum(all_there[0]) < 110 and len(set(all_there[0])) > 3  # Binomial(8, 1/2): no fixed size


def test_fixed_size_cohorts_have_their_event():
    plan = fedavg(sampling="fixed_size", relation="replace_one")
    strategy = DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0)
    one_round(strategy, fleet())
    assert strategy.raw_round.chosen == 4 and isinstance(plan.event().of.how, events.FixedSize)


def test_amplified_banded_noise_deals_the_population_in_cycles():
    sampler = noise.Banded.square_root(bands=2)
    plan = Plan.dpftrl(
        noise_multiplier=1.0, delta=1e-5, batch_size=2, dataset_size=CLIENTS, steps=6, sampling="cyclic_poisson", noise=sampler,
        unit="user", relation="add_remove",
    )  # fmt: skip
    strategy = DPFTRL(FedAvg(), plan, population=EVERYBODY, seed=0)
    strategy.start(fleet(), initial())
    assert "Poisson(" in str(strategy.ledger.event()) and strategy.check_ins is None


def test_two_devices_of_one_user_are_one_user():
    strategy = DPFTRL(FedAvg(), ftrl(gap=3, times=2, cohort=4, multiplier=0.0), seed=0, users=lambda node: (node + 1) // 2)
    grid, arrays = fleet(), initial()
    one_round(strategy, grid, arrays)
    assert strategy.raw_round.asked == 4 and len(strategy.check_ins) == 4  # all four people, one device each
    one_round(strategy, grid, arrays)
    assert strategy.raw_round.chosen == 0


# Adaptive clipping ---------------------------------------------------------------------------------------------------


def test_the_clip_norm_follows_the_quantile_and_is_paid_for():
    def steady(message, context):
        size = 0.2 + 0.1 * int(context.node_config["partition-id"])  # norms 0.2 ... 0.9: median 0.5 to 0.6
        return answer_with(
            message, {"w": message.content["arrays"]["w"].numpy() + size / 2, "b": message.content["arrays"]["b"].numpy()}
        )

    clip = clipping.Adaptive(0.05, batch_size=CLIENTS, learning_rate=0.5, count_noise=0.6)
    plan = Plan.dpgd(noise_multiplier=1.0, delta=1e-5, dataset_size=CLIENTS, steps=60, clip=clip, unit="user")
    strategy = DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0)
    result = strategy.start(fleet(steady), initial())
    norms = [result.train_metrics_clientapp[t]["clip-norm"] for t in range(1, 61)]
    assert 0.4 < np.median(norms[-20:]) < 0.75 and norms[0] != norms[1]
    assert str(strategy.ledger.event()) == "60 x Gaussian(1)"  # both releases together are the plan's event
    release = strategy._aggregator._release
    assert release._scale * CLIENTS / release.clip_norm == pytest.approx((1 - 1.2**-2) ** -0.5)  # the rest goes to the model


def test_adaptive_clipping_with_correlated_noise_has_no_theorem():
    with pytest.raises(NoTheorem, match="correlated noise needs a constant one"):
        ftrl(clip=clipping.Adaptive(1.0, batch_size=4))


# Server optimizers: Flower's own, number for number ------------------------------------------------------------------


@pytest.mark.parametrize(
    "peer",
    [
        FedAvg(),
        FedProx(proximal_mu=0.1),
        FedAvgM(server_learning_rate=0.7, server_momentum=0.9),
        FedAdam(eta=0.05, beta_1=0.9, beta_2=0.99, tau=1e-2),
    ],
    ids=lambda peer: type(peer).__name__,
)
def test_without_noise_and_clipping_it_is_the_wrapped_strategy(peer):
    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=CLIENTS, steps=4, max_grad_norm=1e6, unit="user")
    ours = DPFedAvg(peer, plan, population=EVERYBODY, seed=0).start(fleet(), initial(np.float64)).arrays
    theirs = peer.start(fleet(), initial(np.float64), num_rounds=4).arrays
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=2e-6, atol=1e-7)  # the peer rounds to float32 as it goes


# Killed and resumed --------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


MECHANISMS = {
    "tree": noise.Tree(restart=4, completion=True),
    "blt": noise.BLT(buffers=2),
    "banded": noise.Banded.square_root(bands=3),
}


def killed_at(monkeypatch, where, round):
    """Let a server die in ``round``: before anybody is asked, before or after its result is on disk."""
    owner, name = {
        "asking": (ServerDirectory, "save_cohorts"),
        "collecting": (base, "collected"),
        "saving": (ServerDirectory, "save_state"),
        "saved": (ServerDirectory, "save_public"),
    }[where]
    real, calls = getattr(owner, name), []

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) == round:
            if where == "saved":
                real(self, *arguments)
            raise Killed
        return real(self, *arguments)

    monkeypatch.setattr(owner, name, dies)


@pytest.mark.parametrize("where", ["asking", "collecting", "saving", "saved"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_killed_server_goes_on_bit_for_bit(tmp_path, monkeypatch, mechanism, where):
    plan, key, server = ftrl(MECHANISMS[mechanism]), bytes(range(32)), ServerSGD(learning_rate=0.5, momentum=0.9)
    whole = DPFTRL(FedAvg(), plan, key=key, server=server)
    expected = whole.start(fleet(), initial()).arrays
    with monkeypatch.context() as patch:
        killed_at(patch, where, round=4)
        with pytest.raises(Killed):
            DPFTRL(FedAvg(), plan, key=key, server=server, directory=tmp_path).start(fleet(), initial())
    resumed = DPFTRL(FedAvg(), plan, server=server, directory=tmp_path)  # the key is found in the directory
    assert resumed.rounds == (4 if where == "saved" else 3)
    result = resumed.start(fleet(), initial())
    assert flat(result.arrays).tobytes() == flat(expected).tobytes()
    assert resumed.ledger == whole.ledger and resumed.spent().epsilon == whole.spent().epsilon
    assert min(result.train_metrics_clientapp) == resumed.rounds - len(result.train_metrics_clientapp) + 1
    books = [strategy.check_ins.state_dict() for strategy in (whole, resumed)]
    assert all(torch.equal(books[0][name], books[1][name]) for name in books[0])


def test_no_rounds_noise_is_released_twice_when_clients_answer_otherwise(tmp_path, monkeypatch):
    """The round that was saved is not repeated, though the clients would now answer otherwise."""

    def liar(message, context):
        return answer_with(message, {name: a.numpy() - 1 for name, a in message.content["arrays"].items()})

    plan = ftrl()
    with monkeypatch.context() as patch:
        killed_at(patch, "saved", round=2)
        with pytest.raises(Killed):
            DPFTRL(FedAvg(), plan, directory=tmp_path).start(fleet(), initial())
    resumed = DPFTRL(FedAvg(), plan, directory=tmp_path)
    on_disk = flat(resumed._arrays)
    sent = []

    def note(message, context):
        sent.append(flat(message.content["arrays"]))
        return liar(message, context)

    resumed.start(fleet(note), initial(), num_rounds=3)
    assert np.array_equal(sent[0], on_disk)  # the released model itself, not a second version of it


def test_a_model_that_could_not_be_saved_is_sent_to_nobody(tmp_path, monkeypatch):
    """Else a server that is started again from its directory would release the round once more, under the same noise."""
    strategy, grid = DPFTRL(FedAvg(), ftrl(), directory=tmp_path, seed=1), fleet()
    strategy.start(grid, initial(), num_rounds=1)
    asked = []
    monkeypatch.setattr(LocalGrid, "send_and_receive", lambda self, messages, **_: asked.extend(messages))
    with monkeypatch.context() as patch:
        patch.setattr(ServerDirectory, "save_state", _full)
        with pytest.raises(StorageError):
            strategy.configure_train(2, strategy._arrays, ConfigRecord(), grid)
            strategy.aggregate_train(2, [])
        for _ in range(2):  # tried again with the disk as full as before
            with pytest.raises(StorageError):
                strategy.start(grid, initial(), num_rounds=3)
            with pytest.raises(StorageError):
                strategy.configure_train(3, initial(), ConfigRecord(), grid)
    assert not asked and strategy.rounds == 2
    strategy.configure_train(3, strategy._arrays, ConfigRecord(), grid)  # there is room again
    assert DPFTRL(FedAvg(), ftrl(), directory=tmp_path).rounds == 2


def _full(self, tree):
    raise StorageError("No space left on device.")


def test_check_ins_that_are_lost_or_of_another_time_are_refused(tmp_path):
    """Without them a user would be asked more often, or sooner, than the theorem allows; nobody else would notice."""
    book, kept = tmp_path / "cohorts.safetensors", []
    for rounds in (1, 3):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path).start(fleet(), initial(), num_rounds=rounds)
        kept.append(book.read_bytes())
    other = DPFTRL(FedAvg(), ftrl(), directory=tmp_path / "other")
    other.configure_train(1, initial(), ConfigRecord(), fleet())
    stranger = (tmp_path / "other" / "cohorts.safetensors").read_bytes()
    for content in (None, kept[0], stranger):
        book.unlink()
        if content is not None:
            book.write_bytes(content)
        with pytest.raises(ArgumentError, match="who took part when"):
            DPFTRL(FedAvg(), ftrl(), directory=tmp_path)
        book.write_bytes(kept[1])
    resumed = DPFTRL(FedAvg(), ftrl(), directory=tmp_path)
    resumed.configure_train(4, resumed._arrays, ConfigRecord(), fleet())  # asked, and died before the sum
    assert DPFTRL(FedAvg(), ftrl(), directory=tmp_path).rounds == 3


def test_a_damaged_key_is_one_sentence(tmp_path):
    DPFTRL(FedAvg(), ftrl(), directory=tmp_path, seed=1)
    key = tmp_path / "key.json"
    for text in (key.read_text()[:40], "[]", '{"key": "00"}', key.read_text().replace('"key": "', '"key": "x')):
        key.write_text(text)
        with pytest.raises(ArgumentError, match=r"key\.json to be as it was written"):
            DPFTRL(FedAvg(), ftrl(), directory=tmp_path)


def test_the_directory_keeps_its_secrets_and_tells_the_public_part(tmp_path):
    strategy = DPFTRL(FedAvg(), ftrl(), directory=tmp_path)
    strategy.start(fleet(), initial(), num_rounds=2)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["key.json"] == modes["state.safetensors"] == modes["cohorts.safetensors"] == 0o600
    public = json.loads((tmp_path / "privacy.json").read_text())
    assert public["rounds"] == 2 and public["spent"]["epsilon"] == strategy.spent().epsilon
    assert json.loads((tmp_path / "key.json").read_text())["key"] not in (tmp_path / "privacy.json").read_text()
    os.chmod(tmp_path / "key.json", 0o644)
    with pytest.raises(ArgumentError, match="0600"):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path)


def test_a_directory_serves_one_plan_one_key_and_one_server_optimizer(tmp_path):
    DPFTRL(FedAvg(), ftrl(), directory=tmp_path).start(fleet(), initial(), num_rounds=1)
    with pytest.raises(ArgumentError, match="A key serves one plan"):
        DPFTRL(FedAvg(), ftrl(multiplier=0.7), directory=tmp_path)
    with pytest.raises(ArgumentError, match="key to be that of the run in this directory"):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path, key=bytes(32))
    with pytest.raises(ArgumentError, match="those of the interrupted run"):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path, server=ServerAdam())
    (tmp_path / "key.json").unlink()
    with pytest.raises(ArgumentError, match="without its key a killed run cannot go on"):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path)


def test_strangers_only_after_a_restart_are_refused(tmp_path):
    class Elsewhere(LocalGrid):
        def get_node_ids(self):
            return [node + 1000 for node in super().get_node_ids()]

    DPFTRL(FedAvg(), ftrl(), directory=tmp_path).start(fleet(), initial(), num_rounds=2)
    with pytest.raises(ArgumentError, match="Node ids changed with the restart"):
        DPFTRL(FedAvg(), ftrl(), directory=tmp_path).start(Elsewhere(ClientApp(), clients=CLIENTS), initial())


# Wrong use -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "unit": (lambda: DPFTRL(FedAvg(), ftrl(unit="example")), ArgumentError, 'unit="user"'),
    "independent noise": (lambda: DPFTRL(FedAvg(), fedavg()), ArgumentError, "to be correlated. Use DPFedAvg"),
    "correlated noise": (lambda: DPFedAvg(FedAvg(), ftrl()), ArgumentError, r"to be Independent\(\). Use DPFTRL"),
    "no population": (lambda: DPFedAvg(FedAvg(), fedavg()), ArgumentError, "samples from all, not from those who happen to"),
    "a needless population": (lambda: DPFTRL(FedAvg(), ftrl(), population=EVERYBODY), ArgumentError, "kept by check-ins"),
    "weights": (lambda: DPFTRL(FedAvg(weighted_by_key="loss"), ftrl()), ArgumentError, "every user counts the same"),
    "a median": (lambda: DPFTRL(FedMedian(), ftrl()), ArgumentError, "not a function of a clipped sum"),
    "another optimizer": (lambda: DPFTRL(FedYogi(), ftrl()), ArgumentError, r"server=ServerSGD\(...\) or ServerAdam"),
    "no strategy": (lambda: DPFTRL("FedAvg", ftrl()), ArgumentError, "to be a FedAvg"),
    "no training": (lambda: DPFTRL(FedAvg(fraction_train=0.0), ftrl()), ArgumentError, "Nobody would train"),
    "add/remove": (lambda: DPFTRL(FedAvg(), ftrl(relation="add_remove")), NoTheorem, "who else finds a place"),
    "clipping by layer": (
        lambda: DPFTRL(FedAvg(), ftrl(clip=clipping.PerLayer(1.0))), ArgumentError, "to clip all arrays together"
    ),
    "averaging": (lambda: DPFTRL(FedAvg(), ftrl(average="ema")), ArgumentError, "A federated server does not do that"),
    "another size": (
        lambda: DPFedAvg(FedAvg(), fedavg(sampling="fixed_size", relation="replace_one"), population=range(7)),
        ArgumentError, "to be the public dataset_size=8",
    ),
    "a step without a cohort": (lambda: DPFTRL(FedAvg(), ftrl()).aggregate_train(1, []), ArgumentError, "configure_train before"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_refused_with_its_remedy(case):
    use, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        use()


def test_whole_numbers_in_the_model_are_refused():
    arrays = initial()
    arrays["steps"] = Array(np.zeros(1, np.int64))
    with pytest.raises(ArgumentError, match="Send the trainable parameters only"):
        one_round(DPFTRL(FedAvg(), ftrl()), fleet(), arrays)


def test_a_strategy_that_asks_others_is_refused():
    class Stubborn(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            return messages[:-1]

    with pytest.raises(ArgumentError, match="to ask the chosen cohort"):
        one_round(DPFTRL(Stubborn(), ftrl()), fleet())


def test_without_flower_one_sentence_says_what_to_install():
    code = "import sys; sys.modules['flwr'] = None\nimport hushgrad.federated"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: hushgrad.federated needs Flower; install it with: pip install 'hushgrad[federated]'"
    )


# The client's side ---------------------------------------------------------------------------------------------------


def test_the_mod_clips_on_the_device():
    sent = []

    def spy(message, context, call_next):
        before = flat(message.content["arrays"]).copy()
        reply = call_next(message, context)
        sent.append(np.linalg.norm(flat(reply.content["arrays"]) - before))
        return reply

    def loud(message, context):
        client = int(context.node_config["partition-id"])
        if client == 7:
            return answer_with(message, {"w": np.full((2, 2), np.nan), "b": np.zeros(3)})
        return answer_with(message, {"w": np.full((2, 2), 10.0 * client), "b": np.zeros(3)})

    plan = Plan.dpgd(noise_multiplier=0.0, delta=1e-5, dataset_size=CLIENTS, steps=1, max_grad_norm=0.5, unit="user")
    results = []
    for mods in ([], [spy, clip_update]):
        strategy = DPFedAvg(FedAvg(), plan, population=EVERYBODY, seed=0)
        results.append(flat(one_round(strategy, fleet(loud, mods=mods))[0]))
    np.testing.assert_allclose(sorted(sent), [0.0, 0.0, *[0.5] * 6], rtol=1e-5)
    np.testing.assert_allclose(*results, rtol=1e-5)  # the server's own clipping had done the same
