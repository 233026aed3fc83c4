"""The commands of the library, one per file: ``add_arguments(parser)``, ``run(args) -> Result | int`` (exit status).

Module-level imports are light, so that ``--help`` is fast: ``run`` imports torch, numpy and models.
"""
