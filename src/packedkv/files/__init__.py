"""Files: saved caches and fitted constants, in one versioned container format."""
