"""The pages: each reads rows and returns one text."""
