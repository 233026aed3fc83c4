"""The commands of the library, one per file, imported when a command line names the command.

Each module has ``add_arguments(parser)`` and ``run(args) -> Result | int``; an integer is a bare exit status.
Module-level imports are light, so that ``--help`` is fast: ``run`` imports torch, numpy and models.
"""
