"""Chapter 0's tables, a file each."""
