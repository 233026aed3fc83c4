"""What is written to disk: one versioned container, and in it caches and fitted constants."""
