"""Train: the hall where the workshops meet: plan, make_private, fit, checkpoint."""
