"""Accounting: from an event to an epsilon. numpy and scipy only; importing it never imports torch."""
