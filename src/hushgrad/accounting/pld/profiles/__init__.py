"""First layer: privacy profiles of single steps, evaluated to full relative accuracy. Knows no grid and no question."""
