"""The commands that the laboratory adds to ``kvcodec``; the form is that of ``kvcodec.cli.commands``."""
