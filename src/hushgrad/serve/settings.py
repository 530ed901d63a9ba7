"""The settings of the page: what is served, and to whom."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from hushgrad import _check

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_NAME = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``hushgrad serve``.

    | field | meaning |
    |---|---|
    | ``runs`` | run folders are read below this folder only; None: no runs are shown |
    | ``ledger`` | where the budget ledger is: a path or a database URL; None: no ledger is shown |
    | ``policy`` | the file of a policy in TOML; None: the one that HUSHGRAD_POLICY names, if any |
    | ``host`` | address to listen at; anything but loopback makes the page ask for a token |
    | ``raw`` | show un-noised metrics (``raw_...``) where a run stored them: such a page is as sensitive as the data |
    | ``token`` | what a visitor has to know; empty on loopback unless asked for |

    >>> Settings(host="192.0.2.7").is_loopback, len(Settings(host="192.0.2.7").token) > 20
    (False, True)
    """

    runs: Path | None = None
    ledger: str | None = field(default=None, repr=False)  # a URL may hold a password
    policy: str | None = None
    host: str = "127.0.0.1"
    port: int = 8642
    raw: bool = False
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.host):
            _check.fail("--host", self.host, "to be a name or an address", "Give 127.0.0.1 to be seen from this machine only.")
        if not 0 <= _check.integer(port=self.port) < 1 << 16:
            _check.fail("--port", self.port, "to lie in 0..65535", "0 takes any free port.")
        if self.runs is not None:
            folder = Path(self.runs)
            if not folder.is_dir():
                _check.fail("RUNS_FOLDER", str(self.runs), "to be a folder", "Give the folder that holds your run folders.")
            object.__setattr__(self, "runs", folder.resolve())
        if not self.is_loopback and not self.token:
            object.__setattr__(self, "token", self.fresh_token())

    @staticmethod
    def fresh_token() -> str:
        """192 random bits: not to be guessed over a network."""
        return secrets.token_urlsafe(24)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the page."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """The names under which a browser may ask: a page elsewhere whose name was bent to this address has another one.

        Who listens at all addresses (0.0.0.0) is asked under any of them, so there the token alone decides.
        """
        return _LOOPBACK_NAMES | {self.host.lower()}

    @property
    def any_host(self) -> bool:
        """Whether the address stands for all addresses of this machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False
