"""What the proxy costs: between a harness and an engine, over long contexts, in memory."""
