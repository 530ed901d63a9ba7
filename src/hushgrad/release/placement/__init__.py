"""Where the tensors of a run lie: in one process, replicated in several, or sharded over them."""
