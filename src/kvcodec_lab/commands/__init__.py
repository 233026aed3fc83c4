"""The commands of ``kvcodec``, one to a file; a file is imported when its command is named.

Each has ``add_arguments(parser)`` and ``run(args) -> Result | int`` (an exit status alone: there is nothing to write).
At module level they import only light modules, and torch, numpy or a model inside ``run``, so that ``--help`` is fast.
"""
