"""A hunt for planted secrets over everything that a run leaves, says or shows while it runs."""
