"""The proof of attribution: which example owns each row of each gradient. It runs on the first pass of each kind, not in ordinary steps."""
