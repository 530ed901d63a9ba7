"""The command line: `hushgrad epsilon | calibrate | train | ...`, each with --json."""
