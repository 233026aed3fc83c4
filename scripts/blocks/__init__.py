"""The generated blocks of README.md and of docs/, by subject; ``scripts/update_readme.py`` writes them."""
