"""``python -m hushgrad`` is the ``hushgrad`` command."""

from hushgrad.cli import entry

if __name__ == "__main__":
    raise SystemExit(entry())
