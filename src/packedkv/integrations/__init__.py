"""Where packedkv meets other libraries: one module per library, imported only when asked for."""
