"""Second layer: measures on grids that dominate a profile or are dominated by it, and their composition with every error bounded."""
