"""Chapter 5's tables, a file each."""
