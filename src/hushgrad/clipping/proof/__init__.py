"""The proof of attribution: whose row is it? Nothing here runs in an ordinary step, except that known frontiers are read."""
