"""Audit: an epsilon that has been attacked."""
