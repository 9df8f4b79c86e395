"""Where the time of a training step goes, and what is slow in it."""
