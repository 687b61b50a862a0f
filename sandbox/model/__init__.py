"""The sandbox's own language model: tiny, trained on the spot, and honest about it."""
