"""The page's snippets run as they are printed, and the room's names are documented."""

from __future__ import annotations

import inspect

from snippets import DOCS, snippets_run

from hushgrad import federated


def test_snippets_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    snippets_run("federated.md", 4)
    assert "(8, 1e-05)-DP per user (zero out one" in capsys.readouterr().out


def test_every_public_name_is_documented():
    assert federated.__all__ == sorted(federated.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(inspect.getdoc(vars(federated)[name]) for name in federated.__all__)
    assert "::: hushgrad.federated\n" in (DOCS / "reference" / "federated.md").read_text()
