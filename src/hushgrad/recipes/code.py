"""The only place where a file may name code. Recipes, run folders and model files are data; names are imported only if allowed.

``module:function`` in a file runs that module when it is imported, so whoever passes on such a file could run a program on the reader's
machine. It is refused unless the reader allows code: by ``--allow-code``, or by a recipe that is itself a program (.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hushgrad.errors import ArgumentError


def imported(name: str, what: str, allow_code: bool) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Args:
        name: ``module:function``.
        what: the table that names it, for the message.
        allow_code: whether the reader of the file has said that code may run.

    Raises:
        ArgumentError: where code is not allowed, or there is no such function.
    """
    require_code_allowed(name, what, allow_code)
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = vars(importlib.import_module(module))[function]
    except (ImportError, KeyError) as error:
        raise ArgumentError(f"Expected {what}={name!r} to name a function as module:function ({error!r}).") from None
    return found


def require_code_allowed(name: str, what: str, allow_code: bool) -> None:
    """Refuse a name of code where code is not allowed; nothing is imported.

    Args:
        name: of a table: ``module:function``, or a word that the library knows.
        what: the table that names it, for the message.
        allow_code: whether the reader of the file has said that code may run.
    """
    if ":" in name and not allow_code:
        raise ArgumentError(
            f"{what}={name!r} names code, which would be run. Read that module, and add --allow-code if you trust it "
            "(allow_code=True in Python)."
        )
