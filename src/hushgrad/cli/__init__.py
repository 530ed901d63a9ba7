"""The command line: `hushgrad epsilon | calibrate | train | ...`, each with --json."""


def entry() -> int:
    """What the ``hushgrad`` command calls: from here on an interrupt is one word, while Python is still importing, too."""
    try:
        from hushgrad.cli.main import main

        return main()
    except KeyboardInterrupt:
        import sys

        print("Interrupted.", file=sys.stderr)
        return 130
