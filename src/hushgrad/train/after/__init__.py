"""After the step: averages of the parameters and projections onto a set. Post-processing."""
