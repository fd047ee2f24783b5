"""Who may make which call: tokens, proofs, certificates."""
