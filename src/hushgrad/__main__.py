"""``python -m hushgrad`` is the ``hushgrad`` command."""

from hushgrad.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
