"""Tables, plots and pages of result files; nothing here runs a model.

``rows`` reads files; ``figures`` states what a figure shows, ``svg`` and ``pictures`` draw it; ``html`` is the shell of
every page in ``pages``; ``publish`` writes the output of ``kvcodec bench page``.
"""
