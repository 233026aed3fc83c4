"""The commands that the laboratory adds to ``packedkv``; the form is that of ``packedkv.cli.commands``."""
