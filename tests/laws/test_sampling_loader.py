from __future__ import annotations

import itertools
from collections import namedtuple
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import calls_in, memory_of
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from hushgrad import sampling
from hushgrad.errors import ArgumentError, BudgetExceeded
from hushgrad.sampling.batch import Sizes
from hushgrad.sampling.batch_loader import stamp

KEY = bytes(range(32))
DATA = TensorDataset(torch.randn(40, 3, 2), torch.arange(40))
POISSON = sampling.Poisson(rate=0.2, steps=9)


class Rows(Dataset):
    """A map-style data set of dicts, fetched one by one."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": torch.full((3,), float(i)), "text": f"row {i}", "y": i}


def dealt(loader):
    return [batch[1].tolist() for batch in loader]


def test_deals_exactly_the_samplers_batches():
    draws = sampling.Draws(KEY)
    expected = [POISSON.dealer(40, draws)(t).tolist() for t in range(9)]
    assert dealt(sampling.loader(DATA, POISSON, rng_key=KEY)) == expected
    assert dealt(sampling.loader(DATA, POISSON, rng_key=bytes(32))) != expected


@given(start=st.integers(0, 8))
@settings(max_examples=9, deadline=None)
def test_resumes_with_the_same_batches(start):
    whole = dealt(sampling.loader(DATA, POISSON, rng_key=KEY))
    assert dealt(sampling.loader(DATA, POISSON, rng_key=KEY, start=start)) == whole[start:]


def test_stamps_count_from_start_and_len_shrinks():
    loader = sampling.loader(DATA, POISSON, rng_key=KEY, start=4)
    assert len(loader) == 5
    assert [b.step for b in itertools.islice(loader, 2)] == [4, 5]
    assert (len(loader), loader.next_step) == (3, 6)
    assert [b.step for b in loader] == [6, 7, 8]  # a loop that was left early goes on
    with pytest.raises(BudgetExceeded, match="One loop over the loader is the whole run"):
        iter(loader)


def test_empty_batches_have_shape_and_dtype():
    rare = sampling.Poisson(rate=1e-9, steps=2)
    for x, y in sampling.loader(DATA, rare, rng_key=KEY):
        assert x.shape == (0, 3, 2) and x.dtype == torch.float32
        assert y.shape == (0,) and y.dtype == torch.int64
    (batch,) = itertools.islice(sampling.loader(Rows(), rare, rng_key=KEY), 1)
    assert isinstance(batch, dict) and isinstance(batch, sampling.Batch) and batch.examples == 0
    assert batch["x"].shape == (0, 3) and batch["text"] == [] and batch["y"].dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_collate_change_nothing(workers):
    options = {"num_workers": workers, "persistent_workers": workers > 0, "prefetch_factor": 2 if workers else None}
    got = [b["y"].tolist() for b in sampling.loader(Rows(), POISSON, rng_key=KEY, **options)]
    assert got == dealt(sampling.loader(DATA, POISSON, rng_key=KEY))


def test_the_gather_path_equals_collating_example_by_example():
    class Plain(Dataset):
        def __len__(self):
            return len(DATA)

        def __getitem__(self, i):
            return DATA[i]

    left, right = (list(sampling.loader(d, POISSON, rng_key=KEY)) for d in (DATA, Plain()))
    for a, b in zip(left, right, strict=True):
        assert isinstance(a, list) and isinstance(b, list)
        assert all(map(torch.equal, a, b))


def test_a_custom_collate_function_never_sees_an_empty_list():
    def collate(rows):
        assert rows
        return torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    sampler = sampling.Poisson(rate=0.02, steps=30)
    sizes = [b.examples for b in sampling.loader(DATA, sampler, rng_key=KEY, collate_fn=collate)]
    assert 0 in sizes and sum(sizes) > 0


@given(world=st.integers(1, 5))
@settings(max_examples=5, deadline=None)
def test_ranks_share_each_batch_without_overlap(world):
    whole = dealt(sampling.loader(DATA, POISSON, rng_key=KEY))
    shares = [dealt(sampling.loader(DATA, POISSON, rng_key=KEY, rank=r, world_size=world)) for r in range(world)]
    for step, batch in enumerate(whole):
        assert sorted(itertools.chain.from_iterable(share[step] for share in shares)) == batch


# Stamps -----------------------------------------------------------------------------------------------------------------


@given(examples=st.integers(0, 20), size=st.integers(1, 25))
@settings(deadline=None)
def test_split_keeps_order_and_stamp(examples, size):
    batch = stamp({"x": torch.arange(examples), "mask": torch.ones(3, 33)}, step=5, examples=examples)
    parts = list(batch.split(size))
    assert torch.cat([p["x"] for p in parts]).tolist() == list(range(examples))
    assert all(p.step == 5 and p.examples <= size and p["mask"].shape == (3, 33) for p in parts if examples != 3)
    assert sum(p.examples for p in parts) == examples and [p.part for p in parts] == list(range(len(parts)))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("data", [(torch.arange(5), torch.ones(5, 2)), Pair(torch.arange(5), torch.ones(5, 2)), torch.arange(5)])
def test_a_batch_is_still_of_its_own_type(data):
    batch = stamp(data, step=1, examples=5)
    assert isinstance(batch, type(data)) and isinstance(batch, sampling.Batch)
    parts = list(batch.split(3))
    assert [p.examples for p in parts] == [3, 2] and all(isinstance(p, type(data)) for p in parts)
    if isinstance(data, Pair):
        assert parts[1].y.shape == (2, 2)
    if isinstance(data, torch.Tensor):
        assert type(batch + 1) is torch.Tensor and torch.equal(batch + 1, data + 1)


class Grown(namedtuple("Grown", "x y")):
    def __new__(cls, *, x):
        made = super().__new__(cls, x, x + 1)
        made.unit = "m"
        return made


class Two(tuple):
    unit = "m"
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


class Any(tuple):
    unit, x, y = "m", Two.x, Two.y


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [Grown, Two, Any])
def test_a_tuple_may_be_of_a_class_that_is_made_otherwise(kind, nested):
    x = torch.arange(5)
    data = {Grown: lambda: Grown(x=x), Two: lambda: Two(x, x + 1), Any: lambda: Any([x, x + 1])}[kind]()
    batch = stamp({"pair": data} if nested else data, step=1, examples=5)
    for whole, rows in [(batch, x), *zip(batch.split(3), (x[:3], x[3:]), strict=True)]:
        its = whole["pair"] if nested else whole
        assert isinstance(its, kind) and its.unit == "m" and whole.step == 1
        assert torch.equal(its.x, rows) and torch.equal(its.y, rows + 1)


def test_a_structure_of_torch_is_a_plain_tuple():
    largest = torch.rand(5, 2).max(1)
    assert [len(part[1]) for part in stamp(largest, step=0, examples=5).split(3)] == [3, 2]
    assert [len(part[0].values) for part in [stamp([largest], step=0, examples=5)]] == [5]


def test_every_issued_part_is_announced():
    seen = []
    loader = sampling.loader(DATA, POISSON, rng_key=KEY, on_issue=lambda b: seen.append((b.step, b.part, b.examples)))
    batch = next(iter(loader))
    parts = list(batch.split(4))
    assert seen[0] == (0, None, batch.examples)
    assert seen[1:] == [(0, i, p.examples) for i, p in enumerate(parts)]


def test_other_containers_are_refused():
    with pytest.raises(ArgumentError, match="collate_fn"):
        stamp(object(), step=0, examples=1)


# Users --------------------------------------------------------------------------------------------------------------------


@given(owners=st.lists(st.integers(0, 9), min_size=40, max_size=40), size=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_user_level_batches_hold_whole_users(owners, size):
    sampler = sampling.Poisson(rate=0.4, steps=4)
    numbers = {owner: number for number, owner in enumerate(sorted(set(owners)))}
    for batch in sampling.loader(DATA, sampler, rng_key=KEY, groups=owners):
        assert [numbers[owners[i]] for i in batch[1].tolist()] == batch.units.tolist()
        for user in set(batch.units.tolist()):
            assert (batch.units == user).sum() == owners.count(sorted(numbers)[user])
        parts = list(batch.split(size))
        users = [set(p.units.tolist()) for p in parts]
        assert sum(map(len, users)) == len(set().union(*users))  # no user is cut in two
        assert all(p.examples <= size or len(u) == 1 for p, u in zip(parts, users, strict=True))


def test_groups_by_function_and_by_name_agree():
    names = [f"user {i % 7}" for i in range(40)]
    left = sampling.loader(DATA, POISSON, rng_key=KEY, groups=names)
    right = sampling.loader(DATA, POISSON, rng_key=KEY, groups=lambda i: i % 7)
    assert dealt(left) == dealt(right)
    with pytest.raises(ArgumentError, match="one unit id for each"):
        sampling.loader(DATA, POISSON, rng_key=KEY, groups=names[:-1])


# Refusals -----------------------------------------------------------------------------------------------------------------


def test_cannot_be_dealt_again_by_a_framework():
    loader = sampling.loader(DATA, POISSON, rng_key=KEY)
    assert not isinstance(loader, DataLoader)  # accelerate and Lightning re-deal DataLoaders only
    assert loader.dataset is DATA  # loops print its size
    with pytest.raises(ArgumentError, match="rank= and world_size="):
        loader.sampler  # noqa: B018  what Lightning replaces
    with pytest.raises(ArgumentError, match="rank= and world_size="):
        DataLoader(DATA, batch_sampler=loader.batch_sampler)  # what accelerate's BatchSamplerShard wraps
    with pytest.raises(ArgumentError, match="dealt by its own loader"):
        next(iter(DataLoader(loader, batch_sampler=BatchSampler(SequentialSampler(range(4)), 2, False))))


@pytest.mark.parametrize("option", [{"batch_size": 4}, {"shuffle": True}, {"drop_last": True}, {"in_order": False}])
def test_options_that_would_redeal_are_refused(option):
    with pytest.raises(ArgumentError, match="not to be given"):
        sampling.loader(DATA, POISSON, rng_key=KEY, **option)


def test_wrong_sizes_are_refused():
    for sampler in (
        sampling.FixedSize(size=4, dataset_size=41, steps=3),
        sampling.TruncatedPoisson(rate=0.1, size=4, dataset_size=39, steps=3),
        sampling.RoundRobin(batch_size=4, dataset_size=39),
    ):
        with pytest.raises(ArgumentError, match="dataset_size"):
            sampling.loader(DATA, sampler, rng_key=KEY)
    with pytest.raises(ArgumentError, match="len"):
        sampling.loader(TensorDataset(torch.empty(0, 2)), POISSON, rng_key=KEY)
    with pytest.raises(ArgumentError, match="not a loader"):
        sampling.loader(DataLoader(DATA), POISSON, rng_key=KEY)
    with pytest.raises(ArgumentError, match="key"):
        sampling.loader(DATA, POISSON, rng_key=b"short")


@pytest.mark.parametrize("wrong", [{"batch_size": 41}, {"shuffle": 1}, {"shuffle": "no"}, {"epochs": 0}])
def test_a_round_robin_that_means_nothing_is_refused(wrong):
    assert sampling.RoundRobin(batch_size=40, dataset_size=40).steps == 1
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        sampling.RoundRobin(**{"batch_size": 4, "dataset_size": 40, **wrong})


def test_two_loops_over_one_loader_are_refused():
    loader = sampling.loader(DATA, POISSON, rng_key=KEY)
    one, two = iter(loader), iter(loader)
    next(one), next(two)
    with pytest.raises(ArgumentError, match="two loops"):
        next(one)


# Samplers -------------------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), batch=st.integers(1, 60), epochs=st.integers(1, 4), missing=st.integers(0, 5), shuffle=st.booleans())
@settings(deadline=None)
def test_round_robin_gap_is_honest_for_partial_batches(n, batch, epochs, missing, shuffle):
    batch, records = min(batch, n), max(1, n - missing)
    sampler = sampling.RoundRobin(batch_size=batch, dataset_size=n, epochs=epochs, shuffle=shuffle)
    promise = sampler.participation()
    last: dict[int, int] = {}
    count = np.zeros(records, int)
    for step, members in enumerate(sampler.batches(records, np.random.default_rng(0))):
        assert len(members) <= batch
        for i in members.tolist():
            assert step - last.get(i, -promise.gap) >= promise.gap
            last[i] = step
            count[i] += 1
    assert (count == epochs).all() and promise.times == epochs


def test_poisson_does_little_on_large_data():
    """Ten million records at rate 1e-4: the cost is that of the batch, far below one pass over the data."""
    deal = sampling.Poisson(rate=1e-4, steps=100).dealer(10_000_000, sampling.Draws(KEY))
    sizes: list[int] = []
    assert memory_of(lambda: sizes.extend(len(deal(t)) for t in range(100))) < 1_000_000
    assert calls_in(lambda: deal(0)) < 1000
    assert 900 < np.mean(sizes) < 1100


def test_a_sampler_does_not_print_its_key():
    assert "secret" in repr(sampling.Draws(KEY))


# A cap on each unit's examples ----------------------------------------------------------------------------------------------

OWNERS = np.repeat(np.arange(8), [1, 2, 3, 9, 4, 1, 12, 8])  # of 40 examples


def with_cap(owners, *, cap, choose, steps=30, key=KEY):
    units = sampling.Units(owners, examples=len(owners), cap=cap, choose=choose)
    data = TensorDataset(torch.arange(len(owners)))
    sampler = sampling.Poisson(rate=0.5, steps=steps)
    return [(b[0].tolist(), b.units.tolist()) for b in sampling.loader(data, sampler, rng_key=key, groups=units)]


@pytest.mark.parametrize("choose", ["step", "run"])
def test_a_cap_bounds_every_units_examples(choose):
    whole, capped = with_cap(OWNERS, cap=100, choose=choose), with_cap(OWNERS, cap=3, choose=choose)
    for (_, units), (examples, owners) in zip(whole, capped, strict=True):
        assert set(units) == set(owners)  # who takes part is not the cap's business
        assert owners == sorted(owners) and OWNERS[examples].tolist() == owners  # a unit's examples are neighbours, and its own
        counts = {unit: owners.count(unit) for unit in owners}
        assert counts == {unit: min(3, int((unit == OWNERS).sum())) for unit in counts}
        assert len(set(examples)) == len(examples)
    seen = {
        unit: {e for examples, owners in capped for e, u in zip(examples, owners, strict=True) if u == unit} for unit in range(8)
    }
    assert (len(seen[6]) == 3) == (choose == "run")  # else more and more of the twelve
    if choose == "step":
        assert len(seen[6]) > 8
    assert capped == with_cap(OWNERS, cap=3, choose=choose)  # it follows from the key


def test_a_units_choice_does_not_depend_on_what_others_have():
    """Other users' records, however many, leave the examples that a user gives to each step as they were."""
    more = np.repeat(np.arange(8), [5, 2, 30, 9, 1, 1, 12, 8])
    first = {owner: np.flatnonzero(owner == OWNERS)[0] for owner in (3, 6, 7)}
    other = {owner: np.flatnonzero(more == owner)[0] for owner in (3, 6, 7)}
    for (a, ua), (b, ub) in zip(with_cap(OWNERS, cap=3, choose="step"), with_cap(more, cap=3, choose="step"), strict=True):
        for owner in first:
            mine = [e - first[owner] for e, u in zip(a, ua, strict=True) if u == owner]
            assert mine == [e - other[owner] for e, u in zip(b, ub, strict=True) if u == owner]


def test_units_of_other_data_and_bad_caps_are_refused():
    units = sampling.Units(OWNERS, examples=40, cap=2)
    with pytest.raises(ArgumentError, match="one unit id for each of the 50"):
        sampling.loader(list(range(50)), POISSON, rng_key=KEY, groups=units)
    for bad in ({"cap": 0}, {"choose": "first"}):
        with pytest.raises(ArgumentError):
            sampling.Units(OWNERS, examples=40, **bad)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_batches_with_their_examples_in_the_second_dimension_are_cut_there(length):
    """Of an empty one the first record's own numbers were left, and one with as many positions as examples was cut into positions."""
    data = torch.utils.data.TensorDataset(torch.randn(40, length, 5), torch.arange(40))

    def collate(records):
        xs, ys = zip(*records, strict=True)
        return torch.stack(xs, 1), torch.stack(ys)

    sampler = sampling.Poisson(rate=0.05, steps=60)
    dealt = sampling.loader(data, sampler, rng_key=bytes(32), collate_fn=collate, sizes=Sizes(4, least=0))
    sizes = set()
    for batch in dealt:
        sizes.add(batch.examples)
        assert batch[0].shape == (length, batch.examples, 5) and len(batch[1]) == batch.examples
        for part in batch.split(3):
            assert part[0].shape == (length, part.examples, 5)
            assert torch.equal(part[0], torch.stack([data[i][0] for i in part[1].tolist()], 1) if part.examples else part[0])
    assert {0, 4} <= sizes
