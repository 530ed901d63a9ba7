"""Conversion of other libraries' descriptions of runs (dp-accounting, Opacus) to the JSON of an event, and back.

Only names and numbers are exchanged: no class of another library is imported to read its objects. Whatever has no exact counterpart is
refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from hushgrad import _check
from hushgrad._printed import below
from hushgrad.errors import ArgumentError

Json = dict[str, Any]


def json_of(thing: object) -> object:
    """The JSON that ``Event.from_json`` reads, from JSON, a dp-accounting event, or an Opacus accountant or its history.

    Raises:
        ArgumentError: for anything else, and if there is no counterpart.
    """
    if isinstance(thing, (str, bytes)):
        thing = _check.parsed(thing)
    if isinstance(thing, dict):
        return thing
    history = getattr(thing, "history", thing)
    if isinstance(history, (list, tuple)):
        return _opacus(history)
    if type(thing).__module__.split(".")[0] == "dp_accounting":
        return _from_dp_accounting(thing)
    raise ArgumentError(
        f"Expected an event, its JSON, a dp-accounting event or an Opacus history [(sigma, rate, steps)], got {type(thing).__name__}."
    )


def _opacus(history: Sequence[object]) -> Json:
    """The event of an Opacus ``history``: a list of (noise multiplier, Poisson rate, steps)."""
    events = []
    for entry in history:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise ArgumentError(f"Expected an Opacus history of (noise multiplier, rate, steps), got the entry {entry!r}.")
        sigma, rate, steps = entry
        sampled = _sampled({"participation": "Poisson", "rate": rate}, {"event": "Gaussian", "noise_multiplier": sigma})
        events.append({"event": "Repeat", "of": sampled, "times": steps})
    return {"event": "Compose", "events": events}


def _sampled(how: Json, of: object) -> Json:
    return {"event": "Sampled", "how": how, "of": of}


def _plain(name: str, **fields: str) -> Callable[[Any], Json]:
    """A conversion to our event ``name``, whose fields are attributes of theirs."""
    return lambda theirs: {"event": name, **{ours: _number(getattr(theirs, field)) for ours, field in fields.items()}}


def _number(x: Any) -> Any:
    several = isinstance(x, (list, tuple)) or (hasattr(x, "tolist") and int(getattr(x, "ndim", 0)) > 0)
    return [_number(item) for item in x] if several else x


def _zcdp(theirs: Any) -> Json:
    if getattr(theirs, "xi", 0):
        raise ArgumentError(f"Expected a ZCDpEvent with xi = 0, got xi={theirs.xi!r}. Only rho-zCDP has a counterpart.")
    return {"event": "ZCDP", "rho": theirs.rho}


_READ: dict[str, Callable[[Any], Json]] = {
    "NoOpDpEvent": lambda theirs: {"event": "Compose", "events": []},
    "NonPrivateDpEvent": lambda theirs: {"event": "NonPrivate"},
    "UnsupportedDpEvent": lambda theirs: {"event": "Unanalysed", "why": "dp-accounting calls it unsupported"},
    "GaussianDpEvent": _plain("Gaussian", noise_multiplier="noise_multiplier"),
    "LaplaceDpEvent": _plain("Laplace", scale="noise_multiplier"),
    "DiscreteLaplaceDpEvent": lambda theirs: {
        "event": "DiscreteLaplace",
        "scale": below(1 / Fraction(float(theirs.noise_parameter))),  # rounded down, if at all
        "sensitivity": theirs.sensitivity,
        "vector": True,
    },
    "RandomizedResponseDpEvent": _plain("RandomizedResponse", noise_probability="noise_parameter", categories="num_buckets"),
    "EpsilonDeltaDpEvent": _plain("ApproxDP", epsilon="epsilon", delta="delta"),
    "ZCDpEvent": _zcdp,
    "MixtureOfGaussiansDpEvent": _plain(
        "GaussianMixture", noise_multiplier="standard_deviation", sensitivities="sensitivities", probabilities="sampling_probs"
    ),
    "PoissonSampledDpEvent": lambda theirs: _sampled(
        {"participation": "Poisson", "rate": theirs.sampling_probability}, _from_dp_accounting(theirs.event)
    ),
    "SampledWithoutReplacementDpEvent": lambda theirs: _sampled(
        {"participation": "FixedSize", "dataset_size": theirs.source_dataset_size, "size": theirs.sample_size},
        _from_dp_accounting(theirs.event),
    ),
    "TruncatedSubsampledGaussianDpEvent": lambda theirs: _sampled(
        {
            "participation": "TruncatedPoisson",
            "rate": theirs.sampling_probability,
            "dataset_size": theirs.dataset_size,
            "size": theirs.truncated_batch_size,
        },
        {"event": "Gaussian", "noise_multiplier": theirs.noise_multiplier},
    ),
    "RepeatAndSelectDpEvent": lambda theirs: {
        "event": "RepeatAndSelect",
        "of": _from_dp_accounting(theirs.event),
        "mean": theirs.mean,
        "shape": theirs.shape if theirs.shape != float("inf") else {"float": "inf"},
    },
    "SelfComposedDpEvent": lambda theirs: {"event": "Repeat", "of": _from_dp_accounting(theirs.event), "times": theirs.count},
    "ComposedDpEvent": lambda theirs: {"event": "Compose", "events": [_from_dp_accounting(event) for event in theirs.events]},
}


def _from_dp_accounting(theirs: Any) -> Json:
    read = _READ.get(type(theirs).__name__)
    if read is None:
        raise ArgumentError(
            f"dp-accounting's {type(theirs).__name__} has no counterpart here. Describe the run by hushgrad's events, "
            "or by UnsupportedDpEvent, whose epsilon is infinite."
        )
    return read(theirs)


def _write_sampled(dp: Any, data: Json) -> Any:
    how, of = data["how"], dp_accounting_of(data["of"])
    kind = how["participation"]
    if kind == "Poisson":
        return dp.PoissonSampledDpEvent(how["rate"], of)
    if kind == "FixedSize":
        return dp.SampledWithoutReplacementDpEvent(how["dataset_size"], how["size"], of)
    if kind == "TruncatedPoisson" and data["of"]["event"] == "Gaussian":
        sigma = data["of"]["noise_multiplier"]
        return dp.TruncatedSubsampledGaussianDpEvent(how["dataset_size"], how["rate"], how["size"], sigma)
    if kind in ("Everyone", "Once"):
        return of
    if kind == "MinSep":
        return dp.SelfComposedDpEvent(of, how["times"])
    if kind == "CyclicPoisson":  # one Sampled is a whole cycle, in which a record's group has one step
        return dp.PoissonSampledDpEvent(how["rate"], of)
    raise ArgumentError(f"{kind} samples have no counterpart in dp-accounting. Ask hushgrad's own accountants.")


_WRITE: dict[str, Callable[[Any, Json], Any]] = {
    "NonPrivate": lambda dp, data: dp.NonPrivateDpEvent(),
    "Unanalysed": lambda dp, data: dp.UnsupportedDpEvent(),
    "Gaussian": lambda dp, data: dp.GaussianDpEvent(data["noise_multiplier"]),
    "Laplace": lambda dp, data: dp.LaplaceDpEvent(data["scale"]),
    "DiscreteLaplace": lambda dp, data: dp.DiscreteLaplaceDpEvent(1 / data["scale"], data["sensitivity"]),
    "RandomizedResponse": lambda dp, data: dp.RandomizedResponseDpEvent(data["noise_probability"], data["categories"]),
    "ZCDP": lambda dp, data: dp.ZCDpEvent(data["rho"]),
    "GaussianMixture": lambda dp, data: dp.MixtureOfGaussiansDpEvent(
        data["noise_multiplier"], data["sensitivities"], data["probabilities"]
    ),
    "RepeatAndSelect": lambda dp, data: dp.RepeatAndSelectDpEvent(
        dp_accounting_of(data["of"]), data["mean"], float("inf") if isinstance(data["shape"], dict) else data["shape"]
    ),
    "Repeat": lambda dp, data: dp.SelfComposedDpEvent(dp_accounting_of(data["of"]), data["times"]),
    "Compose": lambda dp, data: (
        dp.ComposedDpEvent([dp_accounting_of(event) for event in data["events"]]) if data["events"] else dp.NoOpDpEvent()
    ),
    "Sampled": _write_sampled,
}


def dp_accounting_of(data: Json) -> Any:
    """The dp-accounting event for the JSON of one of ours.

    Raises:
        ArgumentError: where dp-accounting has no such event, or is not installed.
    """
    try:
        from dp_accounting import dp_event
    except ImportError:
        raise ArgumentError("dp-accounting is not installed. Install it with pip install dp-accounting.") from None
    write = _WRITE.get(data["event"])
    if write is None:
        raise ArgumentError(f"{data['event']} has no counterpart in dp-accounting. Ask hushgrad's own accountants.")
    return write(dp_event, data)
