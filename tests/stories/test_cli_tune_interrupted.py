"""An interrupted search names a command that works, or says that nothing began."""

from __future__ import annotations

import pytest

import hushgrad.tuning
from hushgrad.cli.main import main


@pytest.mark.parametrize("began", [False, True])
def test_the_command_that_continues_is_named_where_there_is_something_to_continue(tmp_path, monkeypatch, capsys, began):
    (tmp_path / "recipe.toml").write_text(
        '[model]\nname = "logistic"\n[data]\nname = "digits"\n[plan]\nmethod = "dpsgd"\nepsilon = 3.0\ndelta = 1e-4\n'
        'max_grad_norm = 1.0\nbatch_size = 250\nsteps = 5\n[optimizer]\nname = "sgd"\nlr = 0.5\n'
    )
    out = tmp_path / "a search"

    def interrupted(*args, **options):
        if began:
            (out / "search").mkdir(parents=True)
            (out / "search" / "recipe.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(hushgrad.tuning, "tune", interrupted)
    assert main(["tune", str(tmp_path / "recipe.toml"), "--over", "optimizer.lr=0.1,0.3", "--out", str(out)]) == 130
    said = capsys.readouterr().err
    assert said == (
        f"Interrupted. Continue with: hushgrad tune --out '{out}' --resume\n"
        if began
        else "Interrupted before the search began.\n"
    )
