"""Mutants that change nothing, or nothing that matters, and why: ``mutate.py`` does not try them."""

from __future__ import annotations

__all__ = ["ANY", "EQUIVALENT"]

ANY = ""
# (file, line of code without its comment, what it becomes, as Python writes it, or ANY) -> why no test can see it.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "guarantee.py",
        "costs.append((_FORKED, 1))",
        "costs.append((_FORKED, 2))",
    ): "an event that nobody analysed is as infinite twice as once",
    (
        "sampling/balls_in_bins.py",
        "of_epoch = lru_cache(maxsize=2)(lambda epoch: parts(n, self.bins, draws.at(epoch * self.bins)))",
        "of_epoch = lru_cache(maxsize=3)(lambda epoch: parts(n, self.bins, draws.at(epoch * self.bins)))",
    ): "how many deals are remembered changes no deal",
    (
        "clipping/adaptive.py",
        "count = (wide <= here).to(wide.dtype).sub_(0.5).masked_fill_(wide < 0, 0.0).sum(0, keepdim=True)",
        "count = (wide <= here).to(wide.dtype).sub_(0.5).masked_fill_(wide < 0, 0.0).sum(0, keepdim=False)",
    ): "a number without dimensions meets the clip norm of one element in the same way",
    (
        "noise/sensitivity.py",
        "return int(nonzero[-1]) + 1 if len(nonzero) else 0",
        "return int(nonzero[-1]) + 1 if len(nonzero) else 1",
    ): ("without a coefficient nothing moves, by either way"),
    (
        "noise/sensitivity.py",
        "if banded_toeplitz_support(c) <= gap:",
        "if banded_toeplitz_support(c) < gap:",
    ): "the general sum below has the same value",
    (
        "noise/sensitivity.py",
        "squares = np.r_[0.0, np.cumsum(np.square(c))]",
        "squares = np.r_[1.0, np.cumsum(np.square(c))]",
    ): "nobody reads the first of them",
    (
        "noise/sensitivity.py",
        "return float(np.sqrt(sum(squares[n - i] for i in range(0, pattern.times * gap, gap) if i < n)))",
        "return float(np.sqrt(sum((squares[n - i] for i in range(0, pattern.times * gap, gap) if i <= n))))",
    ): "the column after the last one is empty",
    ("noise/sensitivity.py", "blocks = -(-n // gap)", "blocks = -(-n * gap)"): "more room for zeros",
    **{
        (
            "noise/sensitivity.py",
            "total[pattern.times :] -= total[: -pattern.times].copy() if pattern.times < blocks else 0.0",
            f"total[pattern.times:] -= total[:-pattern.times].copy() if pattern.times {wrong}",
        ): "with as many participations as blocks there is nothing to take away from"
        for wrong in ("<= blocks else 0.0", "< blocks else 1.0")
    },
    (
        "noise/sensitivity.py",
        "if pattern.gap == 1 and pattern.times >= n:",
        "if pattern.gap == 1 and pattern.times > n:",
    ): "the dynamic programme has the same value",
    (
        "noise/sensitivity.py",
        "return float(np.sqrt(best[0, pattern.times]))",
        "return float(np.sqrt(best[1, pattern.times]))",
    ): "both rows are the same",
    ("accounting/filter_rules.py", "high = 1.0", "high = 2.0"): "where the search for rho begins",
    ("accounting/filter_rules.py", "high *= 4.0", "high *= 5.0"): "where the search for rho begins",
    (
        "accounting/filter_rules.py",
        "return ZCDPLoss(1.0 / inverse).epsilon(delta) <= epsilon",
        "return ZCDPLoss(1.0 / inverse).epsilon(delta) < epsilon",
    ): "the search ends within 1e-9 of the border, on its safe side",
    (
        "accounting/filter_rules.py",
        "if self._bound <= 0.0 and order is None:",
        "if self._bound < 0.0 and order is None:",
    ): "no room is exactly 0",
    ("accounting/filter_rules.py", "if self._bound <= 0.0:", "if self._bound < 0.0:"): "no room is exactly 0",
    (
        "accounting/filter_rules.py",
        "return loss.renyi(order) / room if room > 0.0 else math.inf",
        "return loss.renyi(order) / room if room >= 0.0 else math.inf",
    ): "no room is exactly 0",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-2])",
    ): "where no order has room the filter is refused, whichever it is",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[1])",
    ): "where no order has room the filter is refused, whichever it is",
    (
        "accounting/filter_rules.py",
        "return min((order for order, room in rooms.items() if room >= HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
        "return min((order for order, room in rooms.items() if room > HEURISTICS.least_copies * most > 0.0), default=_FINE_ORDERS[-1])",
    ): "no room is exactly that share",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-15, 15)]",
    ): "one order more to choose from",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 16)]",
    ): "one order more to choose from",
    (
        "accounting/filter_rules.py",
        "around = [1.0 + (best - 1.0) * math.exp(0.01 * k) for k in range(-14, 15)]",
        "around = [1.0 + (best - 1.0) / math.exp(0.01 * k) for k in range(-14, 15)]",
    ): "the same orders, from the other end",
    (
        "accounting/filter_rules.py",
        "good = [order for order, used in shares.items() if used <= (wide if wide <= 1.0 else max(least, 1.0))]",
        "good = [order for order, used in shares.items() if used <= (wide if wide < 1.0 else max(least, 1.0))]",
    ): "no share is exactly 1",
    (
        "release/run_state.py",
        "self._ahead = False",
        "self._ahead = True",
    ): "the rows so far are drawn once more, and are the same",
    (
        "release/core.py",
        "if self._plan.secure or (self._plan.certified and not self.placement.finishes):",
        "if self._plan.secure or (self._plan.certified or not self.placement.finishes):",
    ): "whether a sum is added to its noise or the noise to the sum changes what is held in memory, and no number",
    (
        "release/core.py",
        "if self._first is None:",
        "if not self._first is None:",
    ): "whether a sum is added to its noise or the noise to the sum changes what is held in memory, and no number",
    (
        "release/run_state.py",
        "self.source.z(step, index, count, out=count, scale=options.count_noise or 0.0)",
        "self.source.z(step, index, count, out=count, scale=options.count_noise or 1.0)",
    ): "the noise of a count is positive; the 0 is for the type",
    (
        "release/core.py",
        "drawn = {name: row for (name, _, _), row in zip(own, rows, strict=True)}",
        "drawn = {name: row for (name, _, _), row in zip(own, rows, strict=False)}",
    ): "a stream gives as many rows as it is asked for",
    **{
        ("accounting/calibration.py", line, ANY): "where the search begins; what it ends with is evaluated"
        for line in ("few = min(100, most)", "guess = math.floor(few * math.exp(min(max(-2 * g(few), -600.0), 30.0)))")
    },
    **{
        (
            "accounting/calibration.py",
            "found, neighbour = search.crossing(min(max(guess, low), high), tolerance)",
            f"found, neighbour = search.crossing({wrong}, tolerance)",
        ): "where the search begins; what it ends with is evaluated"
        for wrong in ("max(max(guess, low), high)", "min(min(guess, low), high)")
    },
    **{
        (
            "accounting/calibration.py",
            "guess = _check.number(start=start) if start is not None else 1.0 if bracket is None else math.sqrt(low * high)",
            f"guess = _check.number(start=start) if start is not None else {wrong}",
        ): "where the search begins; what it ends with is evaluated"
        for wrong in (
            "1.0 if not bracket is None else math.sqrt(low * high)",
            "2.0 if bracket is None else math.sqrt(low * high)",
            "1.0 if bracket is None else math.sqrt(low / high)",
        )
    },
    (
        "release/journal.py",
        "self._before, self._half = 0, False",
        "self._before, self._half = (1, False)",
    ): "whoever enters says where it was",
    **{
        ("release/journal_frames.py", line, wrong): "a file is cut once more to the length that it has"
        for line, wrong in (
            ("self._torn = False", "self._torn = True"),
            ("self._end, self._torn = _End(), False", "self._end, self._torn = (_End(), True)"),
        )
    },
    (
        "release/journal_frames.py",
        "self._begun, self._told = 0, False",
        "self._begun, self._told = (1, False)",
    ): "who becomes the writer says both, before anything is flushed",
    (
        "release/journal_frames.py",
        "self._block, self._flushed_at, self._took = 1, 0.0, 0.0",
        "self._block, self._flushed_at, self._took = (1, 1.0, 0.0)",
    ): "a clock's beginning means nothing",
    (
        "release/journal_frames.py",
        "if _MAGIC.startswith(data[: len(_MAGIC)]) and len(data) < len(_MAGIC):",
        "if _MAGIC.startswith(data[:len(_MAGIC)]) and len(data) <= len(_MAGIC):",
    ): "without a frame there is none to read",
    **{
        ("release/journal_place.py", line, wrong): reason
        for line, wrong, reason in (
            (
                'self._name, self._about = _OURS + secrets.token_hex(4), b""',
                "self._name, self._about = (_OURS + secrets.token_hex(5), b'')",
                "a longer name is as new",
            ),
            (
                "return zlib.crc32(boot_identity().encode()) or 1",
                "return zlib.crc32(boot_identity().encode()) or 2",
                "a number that is not 0",
            ),
            (
                "_SECONDS, _NANOSECONDS, _SIZE = 80, 88, 256",
                "_SECONDS, _NANOSECONDS, _SIZE = (80, 88, 257)",
                "more room than the system fills",
            ),
            ("_BIRTH, _OF_FILE = 0x800, 0x1000", "_BIRTH, _OF_FILE = (2048, 4097)", "a bit that means nothing"),
            (
                "_BIRTH, _OF_FILE = 0x800, 0x1000",
                "_BIRTH, _OF_FILE = (2049, 4096)",
                "the kind of file is told, too, and not read",
            ),
            (
                "return _number(about.raw[_SECONDS:_NANOSECONDS]) * 10**9 + _number(about.raw[_NANOSECONDS : _NANOSECONDS + 4])",
                "return _number(about.raw[_SECONDS:_NANOSECONDS]) * 10 ** 9 + _number(about.raw[_NANOSECONDS:_NANOSECONDS + 5])",
                "behind it are four bytes of nothing",
            ),
            (
                'if asked is None or asked(file, b"", _OF_FILE, _BIRTH, about) or not _number(about.raw[:4]) & _BIRTH:',
                "if asked is None or asked(file, b'', _OF_FILE, _BIRTH, about) or (not _number(about.raw[:5]) & _BIRTH):",
                "one bit of it is read, which lies before",
            ),
            ('_REPLACE = getattr(os, "XATTR_REPLACE", 0)', "_REPLACE = getattr(os, 'XATTR_REPLACE', 1)", "Linux has it"),
            (
                "if any(a == b for a, b in zip(numbers, mine, strict=True)):",
                "if any((a == b for a, b in zip(numbers, mine, strict=False))):",
                "both are two numbers",
            ),
        )
    },
    (
        "release/key_reuse.py",
        "entries = (entry for run in runs for entry in zip(run[::2], run[1::2], strict=True))",
        "entries = (entry for run in runs for entry in zip(run[::2], run[1::2], strict=False))",
    ): "a step is never entered without its witness",
    (
        "release/key_reuse.py",
        "return len(runs) > 1 and any(found.setdefault(step, witness) != witness for step, witness in entries)",
        "return len(runs) >= 1 and any((found.setdefault(step, witness) != witness for step, witness in entries))",
    ): "one run alone enters each step once",
    ("train/guard.py", "_registrations, _changes = 0, count(1)", ANY): "only whether the number has changed is asked",
    (
        "train/books.py",
        "self.plan.noise.event(1.0, participation, self.plan.steps)",
        "self.plan.noise.event(2.0, participation, self.plan.steps)",
    ): "whether there is a theorem does not depend on how much noise there is",
    **{
        (
            "estimators/objective.py",
            "high = largest / gaussian_mu(epsilon - price, delta / total) * (1 + 1e-9)",
            f"high = largest / gaussian_mu(epsilon - price, delta / total) * {wrong}",
        ): "where the search ends; the root between is the same"
        for wrong in ("(1 + 1.000000001)", "(2 + 1e-09)")
    },
    (
        "estimators/objective.py",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
        "sigma = low if excess(low) < 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
    ): "a search that begins at its root ends there",
    (
        "estimators/objective.py",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 * high, rtol=1e-13))",
        "sigma = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=1e-12 / high, rtol=1e-13))",
    ): "rtol ends the search; the root is the same within the margin that is added",
    **{
        (
            "estimators/objective.py",
            "low = largest / gaussian_mu(epsilon, delta) * (1 - 1e-9)",
            f"low = largest / gaussian_mu(epsilon, delta) {wrong}",
        ): "the noise is larger by 2e-9 of itself, if at all"
        for wrong in ("/ (1 - 1e-09)", "* (1 + 1e-09)")
    },
}
