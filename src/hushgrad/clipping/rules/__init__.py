"""Layer rules: per-example gradient norms and weighted sums, one file per layer family."""
