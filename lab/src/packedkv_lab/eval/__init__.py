"""What compression does to a model: perplexity, fidelity, generation; ``compare`` runs them all and returns rows."""
