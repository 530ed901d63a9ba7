"""Third layer: which tilt, window and grid answer a question well. Nothing here enters a bound: a bad choice costs width only."""
