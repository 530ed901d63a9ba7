"""Third layer: the choice of tilt, window and grid for a question. Nothing here enters a proof: a bad choice only widens the interval."""
