"""Report: the privacy card of a run (JSON, Markdown, one HTML page), and citations for what it used.

| file | what is in it |
|---|---|
| ``folder`` | reads and checks a run folder, never its checkpoint or key |
| ``card`` | ``privacy_card``: the facts of a run, and their JSON |
| ``provenance`` | data, author, date, model file, ledger entry and policy |
| ``words`` | the guarantee in plain words |
| ``page`` | the card as Markdown, and as one self-contained HTML page (``card.html``) with its curves |
| ``charts`` | small line charts as SVG, here and in ``serve`` |
| ``signature`` | ``sign`` and ``verify``: who signed a card, and for which model file |
| ``compare`` | ``compare_runs``: two runs side by side |
| ``citations`` | ``citation``: BibTeX for exactly what a plan used |
"""

from hushgrad._papers import Paper
from hushgrad.report.card import Card, privacy_card
from hushgrad.report.citations import citation
from hushgrad.report.compare import compare_runs
from hushgrad.report.signature import Verified, new_signing_key, sign, verify

__all__ = ["Card", "Paper", "Verified", "citation", "compare_runs", "new_signing_key", "privacy_card", "sign", "verify"]
