"""The command line of the library; other distributions add commands by the entry point group ``packedkv.commands``."""
