"""One paper, one file. Every module here is imported once by the registry; drop a file in and it is listed."""
