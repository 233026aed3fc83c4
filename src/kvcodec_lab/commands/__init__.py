"""The commands of ``kvcodec``, one to a file; a file is imported when its command is named.

Each has ``add_arguments(parser)`` and ``run(args) -> Result | int`` (an exit status alone: there is nothing to write).
At their top they import what is light, and torch, numpy or a model only inside ``run``: ``--help`` needs none of them.
"""
